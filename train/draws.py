"""Which images a run draws, and when."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Draw:
    """One image in one batch.

    Attributes:
        index: of the image.
        seed: of its augmentation; no other draw of the run has it.
    """

    index: int
    seed: int


class Draws:
    """The images of every batch of a run: what batch n holds depends on the arguments and n alone.

    In an epoch the images are shuffled and each is taken `repeats` times in succession, augmented differently every
    time (Hoffer et al., "Augment your batch", 2020). The epoch ends after as many draws as there are images, so that
    with 3 repeats it holds about a third of them. A step deals its images to its batches like cards, as the sampler of
    DeiT (facebookresearch/deit, `RASampler`) does to processes: with at least `repeats` batches in a step no batch
    holds an image twice. The images and seeds of a step do not depend on the batch size.

    Args:
        images: how many there are.
        images_per_step: over all processes; what does not fill a step at the end of an epoch is left out.
        batch_size: images of one batch, of which a step has images_per_step / batch_size.
        repeats: how often an image is taken.
        seed: 0 to 2**32 - 1.

    Attributes:
        steps_per_epoch: the same whatever the repeats.

    Raises:
        ValueError: there are fewer images than a step takes, or batches do not fill a step.
    """

    def __init__(self, images: int, images_per_step: int, batch_size: int, repeats: int, seed: int):
        if images_per_step % batch_size:
            raise ValueError(
                f"images_per_step is {images_per_step}, allowed are multiples of batch_size, {batch_size}."
            )
        if images < images_per_step:
            raise ValueError(
                f"images_per_step is {images_per_step}, allowed is at most {images}, the number of images."
            )
        self.images, self.images_per_step, self.repeats, self.seed = images, images_per_step, repeats, seed
        self.batches_per_step = images_per_step // batch_size
        self.steps_per_epoch = images // images_per_step
        self._epoch = self._order = None

    def batch(self, number: int) -> list[Draw]:
        """The number-th batch of the run, from 0: batches of one step follow each other, whoever takes them.

        Of P processes the p-th takes batches p, p + P, p + 2 P, ...
        """
        step, place = divmod(number, self.batches_per_step)
        epoch, step = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            # RandomState: its numbers are the same in every version of numpy
            shuffled = np.random.RandomState([self.seed, epoch]).permutation(self.images)
            self._epoch, self._order = epoch, shuffled.astype(np.int32)
        begin = step * self.images_per_step
        places = range(begin + place, begin + self.images_per_step, self.batches_per_step)
        first_seed = (self.seed << 40) + epoch * self.steps_per_epoch * self.images_per_step
        return [Draw(int(self._order[place // self.repeats]), first_seed + place) for place in places]
