"""Pretraining: the verb `pretrain`."""

import dataclasses
import itertools

from transformers import set_seed

from laplacian_heads import sources
from laplacian_heads.configuration import LaplaceGPTConfig
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.train import budget
from laplacian_heads.train.data import PackedRows, encode_documents, held_out_rows
from laplacian_heads.train.stage import PackedRecipe, is_finished, load_tokenizer, train
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
    documents = sources.documents(recipe.data)
    size_of = token_bytes(tokenizer)
    first = encode_documents(tokenizer, itertools.islice(documents, recipe.held_out))
    held_out = held_out_rows(first, recipe.context, recipe.eval_rows, size_of)
    if next(documents, None) is None:
        raise ValueError(f"data: {recipe.data} has no more than the {recipe.held_out} documents that are held out.")

    def sequences():
        return encode_documents(tokenizer, itertools.islice(sources.documents(recipe.data), recipe.held_out, None))

    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    special["eos_token_id"] = [special["eos_token_id"], special["bos_token_id"]]  # another document begins
    set_seed(recipe.seed)
    model = LaplaceGPTForCausalLM(recipe.config(**special))
    rows = PackedRows(sequences, recipe.context)
    train("pretrain", recipe, model, tokenizer, rows, held_out, recipe.steps, size_of)
