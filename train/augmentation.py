"""What happens to the images and labels of training: crops and colours, mixing, and the loss of mixed labels."""

import contextlib
import random
import re
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from timm.data import Mixup, create_transform
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, RandomCrop, Resize

CROPS = ("resized", "padded", "none")
LOSSES = ("cross_entropy", "binary_cross_entropy")
# timm passes over what it does not know in these strings
RAND_AUGMENT = re.compile(r"rand(-m\d+|-n\d+|-p\d*\.?\d+|-mstd\d*\.?\d+|-mmax\d+|-inc[01])*")


def transform(
    *,
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    crop: str = "resized",
    crop_scale: Sequence[float] = (0.08, 1.0),
    flip: float = 0.5,
    auto_augment: str | None = None,
    color_jitter: float = 0.0,
    random_erasing: float = 0.0,
) -> Compose:
    """The augmentation of one image: a PIL image in RGB to a float32 tensor (3, image_size, image_size).

    Its random numbers come from `random`, numpy's global state and torch's, which `seeded` sets.

    Args:
        mean, std: per channel, for values from 0 to 1.
        crop: "resized", a random part of `crop_scale` of the area and 3/4 to 4/3 as wide as high, resized; "padded",
            the shorter side is resized to image_size, black is added on every side, an eighth of it wide, and a random
            square is cut out, which is DeiT's way for images of 32 pixels; "none", the shorter side is resized and the
            middle cut out. All resize bicubically.
        crop_scale: least and largest part; for "resized" only.
        flip: how often the image is mirrored.
        auto_augment: "3a", the 3-Augment of DeiT III: grayscale, solarize or Gaussian blur, one of them always, the
            same in pixels whatever the image size; or RandAugment as timm writes it, such as "rand-m9-mstd0.5-inc1".
        color_jitter: largest relative change of brightness, contrast and saturation. Under RandAugment, which changes
            colours itself, timm leaves it out.
        random_erasing: how often a rectangle is overwritten with noise.

    Raises:
        ValueError: crop or auto_augment is unknown.

    Source: timm's create_transform; Touvron et al., "DeiT III", 2022; facebookresearch/deit.
    """
    if crop not in CROPS:
        raise ValueError(f"crop is {crop!r}, allowed are {', '.join(CROPS)}.")
    if auto_augment not in (None, "3a") and not RAND_AUGMENT.fullmatch(auto_augment):
        raise ValueError(
            f"auto_augment is {auto_augment!r}, allowed are null, 3a, or rand followed by any of -mN, -nN, -pX, "
            "-mstdX, -mmaxN and -inc1, such as rand-m9-mstd0.5-inc1."
        )
    steps = create_transform(
        image_size,
        is_training=True,
        scale=tuple(crop_scale),
        hflip=flip,
        auto_augment=auto_augment,
        color_jitter=color_jitter or None,
        interpolation="bicubic",
        mean=tuple(mean),
        std=tuple(std),
        re_prob=random_erasing,
        re_mode="pixel",
    ).transforms
    if crop != "resized":
        cut = CenterCrop(image_size) if crop == "none" else RandomCrop(image_size, padding=image_size // 8)
        steps[:1] = [Resize(image_size, InterpolationMode.BICUBIC), cut]
    return Compose(steps)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed `random`, numpy's global state and torch's CPU generator inside; afterwards they go on as they were.

    Args:
        seed: of any size, not negative.
    """
    state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    # random takes all digits of a seed, numpy and torch use 32 bits of theirs
    random.seed(seed)
    np.random.seed(random.getrandbits(32))
    torch.default_generator.manual_seed(random.getrandbits(32))
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.default_generator.set_state(state[2])


def check_batch_size(batch_size: int, mixup: float, cutmix: float) -> None:
    """Images are mixed in pairs.

    Raises:
        ValueError: the batch size is odd, and images are to be mixed.
    """
    if (mixup or cutmix) and batch_size % 2:
        raise ValueError(f"batch_size is {batch_size}, allowed with mixup or cutmix are even numbers.")


class Mixing:
    """Mixup and CutMix: image i of a batch is mixed with image B - 1 - i, all in the same way, as DeiT does.

    Args:
        mixup, cutmix: alpha of the Beta(alpha, alpha) that the share of the first image is drawn from; 0 for never.
        prob: how often a batch is mixed at all.
        switch_prob: where both are on, how often it is CutMix.
        label_smoothing: s; before mixing, a target is 1 - s + s / num_classes for the label and s / num_classes for
            every other class.

    Source: Zhang et al., "mixup", 2018; Yun et al., "CutMix", 2019; by timm's Mixup.
    """

    def __init__(
        self, mixup: float, cutmix: float, prob: float, switch_prob: float, label_smoothing: float, num_classes: int
    ):
        self.label_smoothing, self.num_classes = label_smoothing, num_classes
        self.mix = None
        if mixup or cutmix:
            self.mix = Mixup(
                mixup_alpha=mixup,
                cutmix_alpha=cutmix,
                prob=prob,
                switch_prob=switch_prob,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mix a batch.

        Args:
            images: (B, 3, H, W), floating point; they are left as they are. B is even.
            labels: (B,) integers.
            seed: such as that of the first draw of the batch.

        Returns:
            the mixed images, or the given ones where nothing is ever mixed; targets, (B, num_classes) in float32, whose
            rows sum to 1.
        """
        if self.mix is None:
            return images, mixup_target(labels, self.num_classes, smoothing=self.label_smoothing)
        with seeded(seed + (1 << 100)):  # not the numbers that the image with this seed was augmented by
            return self.mix(images.clone(), labels)


def check_loss(loss: str, threshold: float | None, label_smoothing: float, num_classes: int) -> None:
    """Whether `soft_target_loss` can be asked for this.

    Raises:
        ValueError: the loss is unknown, cross-entropy has a threshold, or the threshold makes every class a target, or
            none.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss is {loss!r}, allowed are {', '.join(LOSSES)}.")
    if threshold is None:
        return
    if loss == "cross_entropy":
        raise ValueError(f"target_threshold is {threshold}, allowed with the loss cross_entropy is null.")
    lowest = label_smoothing / num_classes
    if not (lowest < threshold < 1 or lowest == threshold == 0):
        allowed = f"above {lowest:g}, the target that label_smoothing={label_smoothing} gives every class,"
        if not lowest:
            allowed = "at least 0"
        raise ValueError(f"target_threshold is {threshold}, allowed is a number {allowed} and below 1.")


def soft_target_loss(
    logits: torch.Tensor, targets: torch.Tensor, loss: str, threshold: float | None = None
) -> torch.Tensor:
    """The mean loss of a batch, in float32.

    Args:
        logits, targets: (B, classes).
        loss: "cross_entropy", or "binary_cross_entropy", the mean over images and classes.
        threshold: for binary cross-entropy, targets above it count as 1 and others as 0; DeiT III has 0, by which both
            classes of a mixed image are right. None takes the targets as they are.

    Source: Wightman et al., "ResNet strikes back", 2021; Touvron et al., "DeiT III", 2022; by timm's losses.
    """
    if loss == "cross_entropy":
        return SoftTargetCrossEntropy()(logits.float(), targets)
    return BinaryCrossEntropy(smoothing=0.0, target_threshold=threshold)(logits.float(), targets)
