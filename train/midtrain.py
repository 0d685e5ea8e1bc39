"""Mid-training: the verb `midtrain`."""

import dataclasses

from laplacian_heads.train import budget
from laplacian_heads.train.chat import encode, mixture
from laplacian_heads.train.data import PackedRows, held_out_rows
from laplacian_heads.train.stage import ConversationRecipe, PackedRecipe, is_finished, load_model, train
from laplacian_heads.train.tokenizer import token_bytes


@dataclasses.dataclass(kw_only=True)
class MidtrainRecipe(PackedRecipe, ConversationRecipe):
    """Keys of the recipes for mid-training."""


def midtrain(recipe: MidtrainRecipe, dry_run: bool = False) -> None:
    """Train a model on conversations, packed into rows, with the loss on every token.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another run.
    """
    if dry_run:
        budget.report(recipe, recipe.steps)
        return
    if is_finished(recipe):
        return
    model, tokenizer = load_model(recipe.model, recipe.context)

    def sequences(entries):
        # A conversation longer than a row goes on in the next one, so none is cut.
        return (encode(tokenizer, messages, None)["input_ids"] for messages in mixture(entries, recipe.seed))

    size_of = token_bytes(tokenizer)
    held_out = held_out_rows(sequences(recipe.held_out), recipe.context, recipe.eval_rows, size_of)
    rows = PackedRows(lambda: sequences(recipe.data), recipe.context)
    train("midtrain", recipe, model, tokenizer, rows, held_out, recipe.steps, size_of)
