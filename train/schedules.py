"""Values that change over the steps of a run."""

import math


def linear(step: int, steps: int, start: float, end: float) -> float:
    """From start at step 0 to end at step steps - 1, and end from there on; with 1 step it is start there."""
    if step >= steps:
        return end
    return start + (end - start) * step / max(steps - 1, 1)


def cosine(step: int, steps: int, start: float, end: float) -> float:
    """From start at step 0 along half a cosine to what would be end at step `steps`, and end from there on."""
    if step >= steps:
        return end
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * step / steps))


def warmup_cosine(step: int, steps: int, warmup: int, start: float, peak: float, end: float) -> float:
    """`linear` from start to peak in the first `warmup` steps, then `cosine` from peak to end in the others.

    Source: Caron et al., "DINO", 2021 (facebookresearch/dino, `utils.cosine_scheduler`).
    """
    if step < warmup:
        return linear(step, warmup, start, peak)
    return cosine(step - warmup, steps - warmup, peak, end)
