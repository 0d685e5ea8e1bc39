"""Supervised fine-tuning on conversations: the verb `sft`."""

import dataclasses
import functools

from laplacian_heads.train import budget
from laplacian_heads.train.chat import conversation_count, conversations, encode
from laplacian_heads.train.recipe import ConversationRecipe
from laplacian_heads.train.rows import IGNORED, collate_padded, one_each
from laplacian_heads.train.run import is_finished
from laplacian_heads.train.stage import load_model, train


@dataclasses.dataclass(kw_only=True)
class SFTRecipe(ConversationRecipe):
    """Keys of the recipes for SFT."""

    epochs: int

    def __post_init__(self):
        super().__post_init__()
        if self.epochs < 1:
            raise ValueError(f"epochs is {self.epochs}, allowed is at least 1.")

    def steps(self, conversations: int) -> int:
        return max(1, conversations // self.rows_per_step) * self.epochs


def sft(recipe: SFTRecipe, dry_run: bool = False) -> None:
    """Fine-tune a model on conversations, one in a row, with the loss on what the assistant says, calls and ends with.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another run.
    """
    if dry_run:
        known = all("rows" in entry for entry in recipe.data)
        count = sum(entry["rows"] * entry.get("repeat", 1) for entry in recipe.data) if known else None
        budget.report(recipe, recipe.steps(count or conversation_count(recipe.data)))
        return
    if is_finished(recipe):
        return
    model, tokenizer = load_model(recipe.model, recipe.context)

    def row(messages):
        encoded = encode(tokenizer, messages, recipe.context)
        # A conversation whose assistant speaks only after the cut would train nothing.
        return encoded if any(label != IGNORED for label in encoded["labels"][1:]) else None

    opened = functools.partial(
        conversations, convert=row, seed=recipe.seed, window=recipe.shuffle_shards, skip=recipe.skip
    )
    stream = opened(recipe.data, streams=recipe.streams)

    def rows(number, place):
        return one_each(stream(number), place)

    next(rows(0, None))  # refuses wrong data before any work
    measured = list(one_each(opened(recipe.held_out)(0), epochs=1))
    collate = functools.partial(collate_padded, pad=tokenizer.pad_token_id)
    train("sft", recipe, model, tokenizer, rows, measured, recipe.steps(conversation_count(recipe.data)), collate)
