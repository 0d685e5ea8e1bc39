"""How well predicted masks agree with those of people: intersection over union, and accuracies."""

import math

import torch

IGNORED = 255  # the label of a pixel that has no class, after `reduced`


def reduced(mask: torch.Tensor) -> torch.Tensor:
    """Labels from 1 to classes from 0: 0, which is no class then, and 255 become 255.

    Args:
        mask: of whole numbers, of any shape.

    Source: `reduce_labels` of huggingface/evaluate, metrics/mean_iou.
    """
    return torch.where((mask == 0) | (mask == IGNORED), IGNORED, mask - 1)


class ConfusionMatrix:
    """Counts of pixels by their class and the class predicted for them, over any number of pictures.

    The figures are those of `mean_iou` of huggingface/evaluate. It leaves out of the counts what is no class and not
    ignored either; here that is refused.

    Args:
        classes: how many there are.
        ignored: label of the pixels that do not count, whatever is predicted for them.

    Attributes:
        counts: (classes, classes) int64, a row for each class and a column for each predicted class.
    """

    def __init__(self, classes: int, ignored: int = IGNORED):
        self.ignored = ignored
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, prediction: torch.Tensor, reference: torch.Tensor) -> None:
        """Take in the masks of a picture or of several.

        Args:
            prediction, reference: whole numbers, both of one shape.

        Raises:
            ValueError: they differ in shape, or hold a number that is no class.
        """
        if prediction.shape != reference.shape:
            raise ValueError(
                f"The prediction is {_size(prediction)}, allowed is the size of the mask, {_size(reference)}."
            )
        counted = reference != self.ignored
        classes = len(self.counts)
        pairs = [mask[counted].long() for mask in (prediction, reference)]
        for name, labels in zip(("prediction", "mask"), pairs, strict=True):
            wrong = labels[(labels < 0) | (labels >= classes)]
            if len(wrong):
                raise ValueError(
                    f"The {name} has the label {wrong[0]}, allowed are 0 to {classes - 1}, and {self.ignored} in masks."
                )
        predicted, right = pairs
        counts = torch.bincount(right * classes + predicted, minlength=classes**2).view(classes, classes)
        self.counts = self.counts.to(counts.device) + counts

    def merge(self, other: "ConfusionMatrix") -> None:
        """Take in what another one, of other pictures, has counted."""
        self.counts = self.counts + other.counts.to(self.counts.device)

    def result(self) -> dict:
        """Figures from 0 to 1, NaN where there is nothing to measure.

        Returns:
            mean_iou and mean_accuracy, over the classes that have one; overall_accuracy, the share of right pixels; iou
            and accuracy, of each class. A class in no mask has no accuracy, and one nobody predicts either has no IoU.
        """
        counts = self.counts.double().cpu()
        right, predicted, there = counts.diagonal(), counts.sum(0), counts.sum(1)
        iou, accuracy = right / (predicted + there - right), right / there  # 0 / 0 is NaN
        return {
            "mean_iou": iou.nanmean().item(),
            "mean_accuracy": accuracy.nanmean().item(),
            "overall_accuracy": (right.sum() / there.sum()).item(),
            "iou": iou.tolist(),
            "accuracy": accuracy.tolist(),
        }


def without_nan(figures: dict) -> dict:
    """`ConfusionMatrix.result` with None for NaN, which JSON does not have."""

    def known(value):
        return None if math.isnan(value) else value

    return {
        name: list(map(known, value)) if isinstance(value, list) else known(value) for name, value in figures.items()
    }


def _size(mask: torch.Tensor) -> str:
    return " x ".join(map(str, mask.shape))
