"""Pretraining: the verb `pretrain`."""

import dataclasses
import functools

from transformers import set_seed

from laplacian_heads import sources
from laplacian_heads.configuration import LaplaceGPTConfig
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.shards import Part, Shard
from laplacian_heads.train import budget
from laplacian_heads.train.prepare import check_prepared
from laplacian_heads.train.recipe import PackedRecipe
from laplacian_heads.train.rows import collate_packed, held_out_rows, packed
from laplacian_heads.train.run import is_finished
from laplacian_heads.train.stage import load_tokenizer, train
from laplacian_heads.train.streams import DocumentStream, Stream, dealt_out, text_or_tokens
from laplacian_heads.train.tokenizer import token_bytes


@dataclasses.dataclass(kw_only=True)
class PretrainRecipe(PackedRecipe):
    """Keys of the recipes for pretraining."""

    data: str | list
    held_out: int
    tokenizer: str
    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    laplacian_heads: int | list | dict

    def __post_init__(self):
        super().__post_init__()
        if self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, allowed is at least 1.")
        for name in ("data", "tokenizer"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is the name of one.")
        self.config()  # refuses wrong values before any work

    def config(self, **special_tokens) -> LaplaceGPTConfig:
        return LaplaceGPTConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.context,
            laplacian_heads=self.laplacian_heads,
            **special_tokens,
        )


def pretrain(recipe: PretrainRecipe, dry_run: bool = False) -> None:
    """Train a new LaplaceGPT on text.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another run.
    """
    if dry_run:
        arguments = recipe.rows_per_step, recipe.batch_size, recipe.bf16, recipe.gradient_checkpointing
        print(budget.describe(recipe.config(), recipe.steps, *arguments))
        return
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.vocab_size)
    if is_finished(recipe):
        return
    check_prepared(recipe.data, tokenizer)
    shards, held_out = split(sources.shards(recipe.data), recipe.held_out)
    shards = dealt_out(shards, recipe.streams, recipe.skip)

    def stream(shards, number, streams, window):
        rows = Stream(
            shards=shards,
            number=number,
            streams=streams,
            seed=str(recipe.seed),
            window=window,
            skip=recipe.skip,
            convert=functools.partial(text_or_tokens, vocab_size=len(tokenizer)),
        )
        return DocumentStream(rows, tokenizer)

    def rows(number, place):
        return packed(stream(shards, number, recipe.streams, recipe.shuffle_shards), recipe.context, place)

    measured = packed(stream(held_out, 0, 1, 0), recipe.context, epochs=1)
    try:
        measured = held_out_rows(measured, recipe.eval_rows, recipe.context)
    except ValueError as error:
        raise ValueError(f"In what is held out, {held_out[0].name}: {error}") from error
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    special["eos_token_id"] = [special["eos_token_id"], special["bos_token_id"]]  # another document begins
    set_seed(recipe.seed)
    model = LaplaceGPTForCausalLM(recipe.config(**special))
    collate = functools.partial(collate_packed, bos=tokenizer.bos_token_id if recipe.mask_documents else None)
    train("pretrain", recipe, model, tokenizer, rows, measured, recipe.steps, collate, token_bytes(tokenizer))


def split(shards: list[Shard], held_out: int) -> tuple[list[Shard], list[Shard]]:
    """What to train on, and what is held out: the last shard or, of a single one, the last rows.

    Raises:
        ValueError: the single shard has no more rows than are to be held out.
    """
    if len(shards) > 1:
        return shards[:-1], shards[-1:]
    (shard,) = shards
    rows = sum(shard.counts)
    if rows <= held_out:
        raise ValueError(f"held_out is {held_out}, allowed for {shard.name} is less than its {rows} rows.")
    return [Part(shard, 0, rows - held_out)], [Part(shard, rows - held_out, rows)]
