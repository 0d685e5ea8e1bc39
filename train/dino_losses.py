"""Losses between what a student and a teacher make of the same image, and what the student is to match.

Sources: Caron et al., "DINO", 2021 (arXiv 2104.14294); Zhou et al., "iBOT", 2022 (arXiv 2111.07832); Oquab et al.,
"DINOv2", 2023 (arXiv 2304.07193; facebookresearch/dinov2, `loss`); Sablayrolles et al., "Spreading vectors", 2019.
"""

import torch
from accelerate.utils import gather, reduce
from lightly.loss import KoLeoLoss

# Numbers of a block of logits that are in float32 at a time.
BLOCK = 1 << 24


class Center(torch.nn.Module):
    """A running mean of the teacher's logits over all processes, which changes once in an optimizer step.

    Args:
        prototypes: number of logits.
        momentum: share of the mean that a step keeps.

    Attributes:
        value: (prototypes,), zero in the beginning.
    """

    def __init__(self, prototypes: int, momentum: float):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("value", torch.zeros(prototypes))
        # of this step: sums, and how many rows they are of
        self.register_buffer("seen", torch.zeros(prototypes + 1), persistent=False)

    @torch.no_grad()
    def add(self, logits: torch.Tensor) -> None:
        """Take in logits of a batch, (rows, prototypes)."""
        self.seen[:-1] += logits.sum(0, dtype=torch.float32)
        self.seen[-1] += len(logits)

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the mean of what was taken in since the last time; all processes must call it."""
        seen = reduce(self.seen)
        if seen[-1] > 0:
            self.value.lerp_(seen[:-1] / seen[-1], 1 - self.momentum)
        self.seen.zero_()


@torch.no_grad()
def softmax(logits: torch.Tensor, center: torch.Tensor, temperature: float) -> torch.Tensor:
    """The teacher's probabilities, (rows, prototypes) in float32, of logits (rows, prototypes) less a center."""
    return ((logits.float() - center) / temperature).softmax(-1)


@torch.no_grad()
def sinkhorn(logits: torch.Tensor, temperature: float, iterations: int = 3) -> torch.Tensor:
    """The teacher's probabilities, spread evenly over the prototypes: Sinkhorn-Knopp over the rows of all processes.

    Args:
        logits: (rows, prototypes); a process may have none.

    Returns:
        (rows, prototypes) in float32. Each row sums to 1; over all rows, the prototypes nearly have the same sum.
    """
    # In logarithms: of logits that lie far apart, the exponentials of whole rows or prototypes would be 0.
    logs = logits.float() / temperature
    for _ in range(iterations):
        largest = torch.cat([logs, logs.new_full((1, logs.shape[1]), -torch.inf)]).amax(0)
        largest = gather(largest[None]).amax(0)
        logs = logs - largest - reduce((logs - largest).exp().sum(0)).log()
        logs = logs.log_softmax(1)
    return logs.exp()


class _CrossEntropy(torch.autograd.Function):
    """The gradient is made with the loss, block by block: of the rows' float32 only one block exists at a time."""

    @staticmethod
    def forward(ctx, logits, targets, temperature, weights):
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), device=logits.device)
        size = max(1, BLOCK // logits.shape[1])
        for begin in range(0, len(logits), size):
            part = slice(begin, begin + size)
            scaled, wanted, weight = logits[part].float() / temperature, targets[part], weights[part]
            log_sum, mass = scaled.logsumexp(1), wanted.sum(1)
            total += (weight * (mass * log_sum - (wanted * scaled).sum(1))).sum()
            if gradient is not None:
                predicted = (scaled - log_sum[:, None]).exp_() * mass[:, None]
                gradient[part] = (predicted - wanted) * (weight / temperature)[:, None]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, upstream):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum over rows of weight times cross-entropy, in nats and in float32.

    Args:
        logits: (rows, prototypes), the student's.
        targets: (rows, prototypes) in float32, the teacher's probabilities, or a sum of several.
        temperature: that the logits are divided by.
        weights: (rows,); None is 1 each.
    """
    weights = targets.new_ones(len(targets)) if weights is None else weights
    return _CrossEntropy.apply(logits, targets, temperature, weights)


def image_loss(
    global_logits: torch.Tensor, local_logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """DINO's loss: the mean cross-entropy over images and all pairs of a teacher's and another crop of the student.

    Args:
        global_logits: (2, images, prototypes), of the two crops that the teacher sees too.
        local_logits: (crops, images, prototypes).
        targets: (2, images, prototypes), of the teacher's two crops.
    """
    total = cross_entropy(global_logits[0], targets[1], temperature)
    total = total + cross_entropy(global_logits[1], targets[0], temperature)
    both = targets.sum(0)
    for logits in local_logits:
        total = total + cross_entropy(logits, both, temperature)
    return total / (targets.shape[1] * 2 * (1 + len(local_logits)))


def patch_loss(logits: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, temperature: float) -> torch.Tensor:
    """iBOT's loss: the mean over images, those without masks too, of the mean cross-entropy over their masked patches.

    Args:
        logits, targets: (masked patches, prototypes), one image after the other.
        counts: (images,), how many of them are in each.
    """
    weights = (1 / counts.clamp(min=1)).repeat_interleave(counts, output_size=len(logits))
    return cross_entropy(logits, targets, temperature, weights) / len(counts)


def koleo_loss(features: torch.Tensor) -> torch.Tensor:
    """The KoLeo regulariser of each crop, summed over the crops: -log of the distance to the nearest other image.

    Args:
        features: (crops, images, width), class tokens of the backbone.
    """
    with torch.autocast(features.device.type, enabled=False):
        return sum(KoLeoLoss()(crop) for crop in features.float())
