"""What a model's geometry is measured on: sequences of text, and images, in batches."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from laplacian_heads.images import Sample, decode


@dataclasses.dataclass
class Batch:
    """Inputs of one forward pass and the classes that they belong to.

    Args:
        inputs: what the model takes.
        token_labels: (sequences, tokens), the class of each token, below 0 where it has none; of text.
        labels: (sequences,), the class of each image, if they are labelled.
        pixels: (images, height, width, 3) in 0 to 1, the images as the model sees them.
    """

    inputs: dict[str, torch.Tensor]
    token_labels: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    pixels: np.ndarray | None = None


def sequences(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], tokens: int, count: int) -> torch.Tensor:
    """Documents cut into pieces of `tokens` tokens and the one that comes next, each after BOS if there is one.

    First comes the first piece of every document, then the second ones; what is left at a document's end is left out.

    Returns:
        (sequences, tokens + 1), `count` sequences at most.

    Raises:
        ValueError: no document is long enough.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = tokens + 1 - len(start)
    cut, longest = [], 0
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, truncation=True, max_length=count * length)["input_ids"]
        longest = max(longest, len(start) + len(ids) - 1)
        cut.append([start + ids[at : at + length] for at in range(0, len(ids) - length + 1, length)])
    turns = itertools.zip_longest(*cut)
    rows = [piece for turn in turns for piece in turn if piece is not None][:count]
    if not rows:
        raise ValueError(f"tokens is {tokens}, but the longest document has {longest} tokens; give a smaller number.")
    return torch.tensor(rows)


def text_batches(
    ids: torch.Tensor, batch_size: int, skip: int, min_count: int, process: int = 0, processes: int = 1
) -> Iterator[Batch]:
    """Batches of `sequences`, whose classes are the next tokens that are seen at least `min_count` times.

    Args:
        ids: (sequences, tokens + 1).
        skip: so many of the first tokens have no class; the very first has none, as it is BOS and alike in all.
        process, processes: whose batches to give, of so many that take turns.
    """
    following = ids[:, 1:].clone()
    following[:, : max(skip, 1)] = -1
    counts = torch.bincount(following[following >= 0], minlength=int(ids.max()) + 1)
    following[counts[following.clamp(min=0)] < min_count] = -1
    batches = list(zip(ids.split(batch_size), following.split(batch_size), strict=True))
    for rows, labels in batches[process::processes]:
        yield Batch({"input_ids": rows[:, :-1]}, token_labels=labels)


def image_batches(
    found: Sample,
    numbers: list[int],
    processor,
    channels: int,
    batch_size: int,
    process: int = 0,
    processes: int = 1,
) -> Iterator[Batch]:
    """Batches of images as an image processor of transformers makes them.

    Args:
        numbers: by the number of a class in the data the number that it shall have.
        channels: 1 for grey images, 3 for coloured ones.
        process, processes: whose batches to give, of so many that take turns; no other's images are decoded.

    Raises:
        ValueError: an image that cannot be read, or images without a class where there should be one.
    """
    rows = iter(found.rows)
    batches = iter(lambda: list(itertools.islice(rows, batch_size)), [])
    for some in itertools.islice(batches, process, None, processes):
        values = processor([decode(row[found.image], channels) for row in some], return_tensors="pt")["pixel_values"]
        labels = None
        if found.label is not None:
            labels = [row[found.label] for row in some]
            labels = torch.tensor([-1 if label is None or label < 0 else numbers[label] for label in labels])
            if labels.max() < 0:
                raise ValueError(f"data: the column {found.label!r} has no labels, only -1; give another split.")
        yield Batch({"pixel_values": values}, labels=labels, pixels=_pixels(values, processor))


def _pixels(values: torch.Tensor, processor) -> np.ndarray:
    """(images, height, width, 3) in 0 to 1 of (images, channels, height, width), without the normalisation."""
    if getattr(processor, "do_normalize", False):
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (processor.image_mean, processor.image_std))
        values = values * std + mean
    return values.clamp(0, 1).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
