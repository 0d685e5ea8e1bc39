"""Mid-training: the verb `midtrain`."""

import dataclasses
import functools

from laplacian_heads.train import budget
from laplacian_heads.train.chat import conversations, encode
from laplacian_heads.train.recipe import ConversationRecipe, PackedRecipe
from laplacian_heads.train.rows import collate_packed, held_out_rows, packed
from laplacian_heads.train.run import is_finished
from laplacian_heads.train.stage import load_model, train
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

    def tokens(messages):
        # A conversation longer than a row goes on in the next one, so none is cut.
        return encode(tokenizer, messages, None)["input_ids"]

    opened = functools.partial(
        conversations, convert=tokens, seed=recipe.seed, window=recipe.shuffle_shards, skip=recipe.skip
    )
    stream = opened(recipe.data, streams=recipe.streams)

    def rows(number, place):
        return packed(stream(number), recipe.context, place)

    measured = packed(opened(recipe.held_out)(0), recipe.context, epochs=1)
    measured = held_out_rows(measured, recipe.eval_rows, recipe.context)
    collate = functools.partial(collate_packed, bos=tokenizer.bos_token_id if recipe.mask_documents else None)
    train("midtrain", recipe, model, tokenizer, rows, measured, recipe.steps, collate, token_bytes(tokenizer))
