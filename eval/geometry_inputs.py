"""What a model's geometry is measured on: sequences of text, and images, in batches."""

import dataclasses
import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import torch
from transformers import PreTrainedTokenizerBase

# Images of a stream are drawn from so many at a time, as datasets are often sorted by class.
SHUFFLED = 1000


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


@dataclasses.dataclass
class Images:
    """Images of a source.

    Args:
        rows: dicts, of which the column `image` has the bytes or the path of a file.
        count: how many there are at most.
        image, label: the columns of images and of classes; label is None if there is none.
        names: of the classes, by their number.
    """

    rows: Iterable[dict]
    count: int
    image: str
    label: str | None
    names: list[str]


def images(data: str, count: int) -> Images:
    """`count` images of a source, drawn at random, always the same ones.

    Args:
        data: a folder with a folder of images for each class, a folder of `Dataset.save_to_disk`, or a dataset of the
            Hub as owner/name[@revision][:config[:split]].

    Raises:
        ValueError: there is no such source, or it has no images.
    """
    path = Path(data).expanduser()
    if (path / "dataset_dict.json").exists():
        path = path / "train"
    try:
        if path.is_dir() and (path / "state.json").exists():
            dataset = datasets.load_from_disk(str(path))
        elif path.is_dir():
            dataset = datasets.load_dataset("imagefolder", data_dir=str(path), split="train")
        else:
            name, config, split, *_ = [*data.split(":"), None, None]
            name, _, revision = name.partition("@")
            dataset = datasets.load_dataset(
                name, config or None, split=split or "train", revision=revision or None, streaming=True
            )
    except Exception as error:  # without a connection, one of the HTTP client that huggingface_hub happens to use
        raise ValueError(f"data: {data} cannot be read as images: {' '.join(str(error).split())}") from error
    features = dataset.features or {}
    pictures = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if not pictures:
        raise ValueError(f"data: {data} has no images, its columns are {', '.join(features) or 'unknown'}.")
    label, names = _classes(dataset, features)
    dataset = dataset.cast_column(pictures[0], datasets.Image(decode=False))  # a damaged one would not be named
    if isinstance(dataset, datasets.Dataset):
        count = min(count, len(dataset))
        rows = dataset.shuffle(seed=0).select(range(count))
    else:
        rows = dataset.shuffle(seed=0, buffer_size=SHUFFLED).take(count)
    return Images(rows, count, pictures[0], label, names)


def _classes(dataset, features: dict) -> tuple[str | None, list[str]]:
    """The column of classes, and their names: one that has names, or numbers in a column that is named for them."""
    for name, feature in features.items():
        if isinstance(feature, datasets.ClassLabel):
            return name, feature.names
    for name in ("label", "labels"):
        if name in features and "int" in str(features[name].dtype) and isinstance(dataset, datasets.Dataset):
            return name, [str(number) for number in range(max(dataset[name], default=-1) + 1)]
    return None, []


def image_batches(
    found: Images,
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
        values = processor([_picture(row[found.image], channels) for row in some], return_tensors="pt")["pixel_values"]
        labels = None
        if found.label is not None:
            labels = [row[found.label] for row in some]
            labels = torch.tensor([-1 if label is None or label < 0 else numbers[label] for label in labels])
            if labels.max() < 0:
                raise ValueError(f"data: the column {found.label!r} has no labels, only -1; give another split.")
        yield Batch({"pixel_values": values}, labels=labels, pixels=_pixels(values, processor))


def _picture(file: dict, channels: int) -> PIL.Image.Image:
    try:
        picture = PIL.Image.open(io.BytesIO(file["bytes"]) if file["bytes"] else file["path"])
        return picture.convert("L" if channels == 1 else "RGB")
    except OSError as error:
        raise ValueError(f"data: the image {file['path'] or 'without a name'} cannot be read ({error}).") from error


def _pixels(values: torch.Tensor, processor) -> np.ndarray:
    """(images, height, width, 3) in 0 to 1 of (images, channels, height, width), without the normalisation."""
    if getattr(processor, "do_normalize", False):
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (processor.image_mean, processor.image_std))
        values = values * std + mean
    return values.clamp(0, 1).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
