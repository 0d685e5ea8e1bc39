"""Images as a model trains on them and is measured on: decoded, made into tensors and put into batches."""

import itertools
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from transformers import BaseImageProcessor, BitImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

from laplacian_heads.images import BadImageError, Images, Readable, load
from laplacian_heads.train.augmentation import Mixing, seeded
from laplacian_heads.train.draws import Draw, Draws
from laplacian_heads.train.recipe import ImageRecipe, this_process
from laplacian_heads.train.rows import begin_worker

# So many damaged images in succession are no accident.
MOST_BAD = 100
# Held-out images that geometry is measured on: as many whatever the batch size, so that runs can be compared.
GEOMETRY_IMAGES = 32


def split(recipe: ImageRecipe) -> tuple[Images, Images | None]:
    """What to train on and what to measure on, with the same numbers of the same classes; None without held_out.

    Raises:
        ValueError: there are no such images, too few, or held-out ones of a class that is not trained on.
    """
    with this_process().main_process_first():  # what is fetched, is fetched once
        train = load(recipe.data, recipe.label)
        held_out = load(recipe.held_out, recipe.label) if isinstance(recipe.held_out, str) else None
    order = np.random.default_rng(recipe.seed).permutation(len(train))
    if isinstance(recipe.held_out, int):
        if recipe.held_out >= len(train):
            raise ValueError(f"held_out is {recipe.held_out}, allowed is less than the {len(train)} images of data.")
        held_out, order = train.select(np.sort(order[: recipe.held_out])), order[recipe.held_out :]
    elif held_out is not None:
        held_out = held_out.with_classes(train.names)
    if recipe.images is not None and recipe.images > len(order):
        raise ValueError(f"images is {recipe.images}, allowed are at most the {len(order)} of {recipe.data}.")
    return train.select(np.sort(order[: recipe.images])), held_out


def processor(image_size: int, crop: float) -> BitImageProcessor:
    """What a model is measured with, and what is saved beside it.

    Args:
        image_size: height and width in pixels.
        crop: the side of the centre that is cut out, as a share of the image that was resized; rounded as timm does.
    """
    return BitImageProcessor(
        size={"shortest_edge": math.floor(image_size / crop)},
        crop_size={"height": image_size, "width": image_size},
        resample=PILImageResampling.BICUBIC,
        image_mean=list(IMAGENET_DEFAULT_MEAN),
        image_std=list(IMAGENET_DEFAULT_STD),
    )


class AugmentedImages(Readable, torch.utils.data.Dataset):
    """Draws of images as (what the transform makes, label, seed of the draw), or the error that ends the run, for the
    reader to raise. The label is -1 where the images have none.

    A damaged image is replaced by the one after it where that is allowed.

    Args:
        images: what is drawn from.
        transform: makes a tensor of a PIL image, or several.
        skip: whether damaged images are left out, with a warning, or end the run.
    """

    def __init__(self, images: Images, transform: Callable, skip: bool):
        super().__init__(images, skip)
        self.transform = transform

    def __getitem__(self, draw: Draw) -> tuple | BadImageError:
        for after in range(MOST_BAD):
            number = (draw.index + after) % len(self.images)
            picture = self.read(number)
            if isinstance(picture, BadImageError):
                return picture
            if picture is not None:
                with seeded(draw.seed):
                    return self.transform(picture), self.label(number), draw.seed
        return BadImageError(
            f"data: {MOST_BAD} images in succession cannot be read, {self.images.called(number)} last."
        )


class TrainingBatches:
    """The batches of a process, from a step on.

    Args:
        images: see `AugmentedImages`.
        draws: which images are in each batch of the run.
        collate: makes a batch of what `images` has for its draws.
        step: number of steps that are done.
        process, processes: which process this is, and of how many, which take turns with the batches.
        workers: processes that decode and augment for this one; 0 is this one itself.

    Attributes:
        waited: seconds in which a batch was waited for.
        places: none; where a run goes on follows from the step.
    """

    places = {}

    def __init__(
        self,
        images: AugmentedImages,
        draws: Draws,
        collate: Callable[[list[tuple]], dict[str, torch.Tensor]],
        step: int = 0,
        process: int = 0,
        processes: int = 1,
        workers: int = 0,
    ):
        self.collate, self.waited = collate, 0.0
        numbers = itertools.count(step * draws.batches_per_step + process, processes)
        self.loader = torch.utils.data.DataLoader(
            images,
            batch_sampler=map(draws.batch, numbers),
            collate_fn=self._batch,
            num_workers=workers,
            worker_init_fn=begin_worker,
            generator=torch.Generator(),  # of its own: the random state of the run stays as it is
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        loaded = iter(self.loader)
        while True:
            started = time.perf_counter()
            batch = next(loaded)
            if isinstance(batch, Exception):
                raise batch
            self.waited += time.perf_counter() - started
            yield batch

    def _batch(self, rows: list) -> dict[str, torch.Tensor] | Exception:
        errors = [row for row in rows if isinstance(row, Exception)]
        return errors[0] if errors else self.collate(rows)


def mixed(mixing: Mixing, rows: list[tuple]) -> dict[str, torch.Tensor]:
    """A batch of labelled tensors, mixed: pixel_values (batch, 3, height, width), labels (batch, classes)."""
    images, labels, seeds = zip(*rows, strict=True)
    images, targets = mixing(torch.stack(images), torch.tensor(labels), seeds[0])
    return {"pixel_values": images, "labels": targets}


class HeldOutImages(Readable, torch.utils.data.Dataset):
    """Images as the saved image processor makes them: what is measured is what a user of the model will see.

    A row is a dict of pixel_values (channels, height, width) and labels, an int, -1 where there are none; None for a
    damaged image that is left out; or the error that ends the run.
    """

    def __init__(self, images: Images, processor: BaseImageProcessor, skip: bool):
        super().__init__(images, skip)
        self.processor = processor

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> dict | BadImageError | None:
        picture = self.read(number)
        if picture is None or isinstance(picture, BadImageError):
            return picture
        values = self.processor(picture, return_tensors="pt")["pixel_values"][0]
        return {"pixel_values": values, "labels": self.label(number)}

    def batches(self, numbers: range, batch_size: int, workers: int) -> Iterator[list[dict]]:
        """Rows of the images with these numbers, without those that are left out."""
        loader = torch.utils.data.DataLoader(
            self,
            sampler=numbers,
            batch_size=batch_size,
            collate_fn=_as_they_are,
            num_workers=workers,
            worker_init_fn=begin_worker,
            generator=torch.Generator(),
        )
        for rows in loader:
            for row in rows:
                if isinstance(row, Exception):
                    raise row
            yield [row for row in rows if row is not None]


def first_rows(held_out: HeldOutImages) -> list[dict]:
    """Those that geometry is measured on.

    Raises:
        ValueError: one may not be damaged and is, or all are: found before the training rather than after it.
    """
    rows = [held_out[number] for number in range(min(GEOMETRY_IMAGES, len(held_out)))]
    for row in rows:
        if isinstance(row, Exception):
            raise row
    rows = [row for row in rows if row is not None]
    if not rows:
        raise ValueError(f"held_out: none of the first {GEOMETRY_IMAGES} images can be read.")
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of rows of `HeldOutImages`: pixel_values (batch, channels, height, width), labels (batch,)."""
    images = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": images, "labels": torch.tensor([row["labels"] for row in rows])}


def _as_they_are(rows: list) -> list:
    return rows
