"""Supervised fine-tuning on conversations: the verb `sft`."""

import dataclasses

from transformers import DataCollatorForSeq2Seq

from laplacian_heads.train import budget
from laplacian_heads.train.chat import encode, mixture
from laplacian_heads.train.stage import ConversationRecipe, is_finished, load_model, train


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
        budget.report(recipe, recipe.steps(sum(entry["rows"] * entry.get("repeat", 1) for entry in recipe.data)))
        return
    if is_finished(recipe):
        return
    model, tokenizer = load_model(recipe.model, recipe.context)

    def rows(entries):
        encoded = (encode(tokenizer, messages, recipe.context) for messages in mixture(entries, recipe.seed))
        # A conversation whose assistant speaks only after the cut would train nothing.
        return [row for row in encoded if any(label != -100 for label in row["labels"])]

    conversations = rows(recipe.data)
    if not conversations:
        raise ValueError(f"context is {recipe.context}, in which no conversation of data reaches the assistant's turn.")
    collator = DataCollatorForSeq2Seq(tokenizer, padding=True)
    steps = recipe.steps(len(conversations))
    train("sft", recipe, model, tokenizer, conversations, rows(recipe.held_out), steps, collator=collator)
