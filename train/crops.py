"""Several crops of each image, and masks on their patches, as DINO and iBOT train on them."""

from collections.abc import Callable, Sequence

import torch
from lightly.models.utils import random_block_mask
from lightly.transforms import DINOTransform
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from laplacian_heads.train.augmentation import seeded


def multi_crop(
    *,
    global_size: int,
    global_scale: Sequence[float],
    local_size: int,
    local_scale: Sequence[float],
    local_crops: int,
    flip: float,
    color_jitter: Sequence[float],
    color_jitter_probability: float,
    grayscale: float,
    blur: Sequence[float],
    blur_sigma: Sequence[float],
    solarize: float,
) -> DINOTransform:
    """The augmentation of one image: a PIL image in RGB to a list of float32 tensors, two global crops and the local.

    Args:
        global_size, local_size: height and width of the crops, to which random parts of the area, of global_scale and
            local_scale, are resized.
        flip: how often a crop is mirrored.
        color_jitter: largest relative change of brightness, contrast and saturation, and largest turn of the hue.
        color_jitter_probability, grayscale: how often colours are changed, and taken away.
        blur: how often the first and the second global crop and a local one are blurred.
        blur_sigma: least and largest standard deviation of the blur, in pixels.
        solarize: how often the second global crop is solarised.

    Source: Caron et al., "DINO", 2021; by lightly's DINOTransform.
    """
    brightness, contrast, saturation, hue = color_jitter
    strength = 0.5  # lightly's own, that its factors are multiplied by
    return DINOTransform(
        global_crop_size=global_size,
        global_crop_scale=tuple(global_scale),
        local_crop_size=local_size,
        local_crop_scale=tuple(local_scale),
        n_local_views=local_crops,
        hf_prob=flip,
        cj_prob=color_jitter_probability,
        cj_strength=strength,
        cj_bright=brightness / strength,
        cj_contrast=contrast / strength,
        cj_sat=saturation / strength,
        cj_hue=hue / strength,
        random_gray_scale=grayscale,
        gaussian_blur=tuple(blur),
        sigmas=tuple(blur_sigma),
        solarization_prob=solarize,
        normalize={"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)},
    )


def mask_blocks(crops: int, grid: tuple[int, int], probability: float, ratio: tuple[float, float]) -> torch.Tensor:
    """Masks of rectangles of patches: (crops, rows, columns), true where a patch is masked.

    Of the crops a share of `probability` has masks, each covering another part of it, evenly spread over `ratio`; where
    nothing more fits, a little less. Random numbers come from `random`.

    Source: Bao et al., "BEiT", 2021; Oquab et al., "DINOv2", 2023; by lightly's random_block_mask.
    """
    lowest = ratio[0] + 1e-6  # lightly's bounds are in float32, of which less than 3 patches may be 12 % of 25
    least = max(1, min(4, int(lowest * grid[0] * grid[1])))  # of a block; on grids of a few patches 4 are too many
    return random_block_mask((crops, *grid), probability, lowest, max(ratio[1], lowest), min_num_masks_per_block=least)


def collate(rows: list[tuple], masks: Callable[[int], torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """A batch of images' crops.

    Args:
        rows: for each image its crops, the two global ones first; its label; the seed of its draw.
        masks: makes the masks of so many crops; None for none.

    Returns:
        pixel_values, (2 * images, 3, height, width), first the first crop of every image, then the second; local_crops,
        (crops * images, 3, height, width), in the same order; with masks also bool_masked_pos (2 * images, patches),
        masked, the numbers of the masked patches over all crops, and counts, (2 * images,), how many each crop has.
    """
    crops, _, seeds = zip(*rows, strict=True)
    first, second, *others = (torch.stack(views) for views in zip(*crops, strict=True))
    local = torch.cat(others) if others else first[:0]
    batch = {"pixel_values": torch.cat([first, second]), "local_crops": local}
    if masks is not None:
        with seeded(seeds[0] + (1 << 100)):  # not the numbers that the image with this seed was augmented by
            masked = masks(2 * len(rows)).flatten(1)
        batch |= {"bool_masked_pos": masked, "masked": masked.flatten().nonzero()[:, 0], "counts": masked.sum(1)}
    return batch
