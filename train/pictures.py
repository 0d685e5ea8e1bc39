"""Images as a classifier trains on them and is measured on: decoded, made into tensors and put into batches."""

import itertools
import time
from collections.abc import Callable, Iterator

import PIL.Image
import torch
from transformers import BaseImageProcessor
from transformers.utils import logging

from laplacian_heads.images import BadImageError, Images
from laplacian_heads.train.augmentation import Mixing, seeded
from laplacian_heads.train.draws import Draw, Draws
from laplacian_heads.train.rows import begin_worker

logger = logging.get_logger(__name__)

# So many damaged images in succession are no accident.
MOST_BAD = 100


class _Readable(torch.utils.data.Dataset):
    """Images, of which damaged ones may be left out."""

    def __init__(self, images: Images, skip: bool):
        self.images, self.skip = images, skip
        self.warned = set()

    def read(self, number: int) -> PIL.Image.Image | BadImageError | None:
        """An image; of a damaged one the error or, if such are left out, None, which is warned of once."""
        try:
            return self.images.picture(number)
        except BadImageError as error:
            if not self.skip:
                return error
            if number not in self.warned:
                self.warned.add(number)
                logger.warning(f"{error} It is left out.")
            return None


class AugmentedImages(_Readable):
    """Draws of images as (tensor, label, seed of the draw), or the error that ends the run, for the reader to raise.

    A damaged image is replaced by the one after it where that is allowed.

    Args:
        images: what is drawn from.
        transform: makes a tensor of a PIL image.
        skip: whether damaged images are left out, with a warning, or end the run.
    """

    def __init__(self, images: Images, transform: Callable, skip: bool):
        super().__init__(images, skip)
        self.transform = transform

    def __getitem__(self, draw: Draw) -> tuple[torch.Tensor, int, int] | BadImageError:
        for after in range(MOST_BAD):
            number = (draw.index + after) % len(self.images)
            picture = self.read(number)
            if isinstance(picture, BadImageError):
                return picture
            if picture is not None:
                with seeded(draw.seed):
                    return self.transform(picture), int(self.images.labels[number]), draw.seed
        return BadImageError(
            f"data: {MOST_BAD} images in succession cannot be read, {self.images.called(number)} last."
        )


class TrainingBatches:
    """The batches of a process, from a step on; mixed, with labels as (batch, classes) targets.

    Args:
        images: see `AugmentedImages`.
        draws: which images are in each batch of the run.
        mixing: mixes the images of a batch.
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
        mixing: Mixing,
        step: int = 0,
        process: int = 0,
        processes: int = 1,
        workers: int = 0,
    ):
        self.mixing, self.waited = mixing, 0.0
        numbers = itertools.count(step * draws.batches_per_step + process, processes)
        self.loader = torch.utils.data.DataLoader(
            images,
            batch_sampler=map(draws.batch, numbers),
            collate_fn=_as_they_are,
            num_workers=workers,
            worker_init_fn=begin_worker,
            generator=torch.Generator(),  # of its own: the random state of the run stays as it is
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        loaded = iter(self.loader)
        while True:
            started = time.perf_counter()
            rows = next(loaded)
            for row in rows:
                if isinstance(row, Exception):
                    raise row
            images, labels, seeds = zip(*rows, strict=True)
            images, targets = self.mixing(torch.stack(images), torch.tensor(labels), seeds[0])
            self.waited += time.perf_counter() - started
            yield {"pixel_values": images, "labels": targets}


class HeldOutImages(_Readable):
    """Images as the saved image processor makes them: what is measured is what a user of the model will see.

    A row is a dict of pixel_values (channels, height, width) and labels, an int; None for a damaged image that is left
    out; or the error that ends the run.
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
        return {"pixel_values": values, "labels": int(self.images.labels[number])}

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


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of rows of `HeldOutImages`: pixel_values (batch, channels, height, width), labels (batch,)."""
    images = torch.stack([row["pixel_values"] for row in rows])
    return {"pixel_values": images, "labels": torch.tensor([row["labels"] for row in rows])}


def _as_they_are(rows: list) -> list:
    return rows
