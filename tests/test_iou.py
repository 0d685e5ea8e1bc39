"""Intersection over union against numpy in the semantics of `evaluate`, and against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score, recall_score

from laplacian_heads.eval.iou import ConfusionMatrix, reduced, without_nan

REAL = ROOT.parent / "shared" / "images" / "ade20k"


def mean_iou(predictions, references, classes, ignored=255, reduce_labels=False):
    """What `evaluate`'s metric says it computes, by sums over one class after the other."""
    right, union, there = (np.zeros(classes, dtype=np.float64) for _ in range(3))
    for prediction, reference in zip(predictions, references, strict=True):
        reference = reference.astype(np.int64)
        if reduce_labels:
            reference = np.where(reference == 0, 255, reference) - 1
            reference[reference == 254] = 255
        for label in range(classes):
            one = (prediction == label) & (reference != ignored)
            other = reference == label
            right[label] += (one & other).sum()
            union[label] += (one | other).sum()
            there[label] += other.sum()
    with np.errstate(invalid="ignore"):
        iou, accuracy = right / union, right / there
    return {
        "mean_iou": np.nanmean(iou),
        "mean_accuracy": np.nanmean(accuracy),
        "overall_accuracy": right.sum() / there.sum(),
        "iou": iou,
        "accuracy": accuracy,
    }


def disturbed(mask, classes, generator):
    """A prediction that is right in some regions only, and says something of ignored pixels too."""
    shifted = np.roll(mask, (7, -11), axis=(0, 1))
    noise = generator.integers(0, classes, mask.shape)
    return np.where(generator.random(mask.shape) < 0.2, noise, np.clip(shifted - 1, 0, classes - 1))


def assert_same(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.skipif(not REAL.is_dir(), reason="real masks, shared/images beside the repository, are not here")
def test_real_masks_at_their_own_size():
    masks = [np.asarray(Image.open(path)).astype(np.int64) for path in sorted((REAL / "annotations").glob("*.png"))]
    assert len(masks) == 3
    generator = np.random.default_rng(0)
    predictions = [disturbed(mask, 150, generator) for mask in masks]
    expected = mean_iou(predictions, masks, 150, reduce_labels=True)
    assert 0 < expected["mean_iou"] < 1
    assert any((mask == 0).any() for mask in masks)
    matrix = ConfusionMatrix(150)
    for prediction, mask in zip(predictions, masks, strict=True):
        matrix.update(torch.from_numpy(prediction), reduced(torch.from_numpy(mask)))
    assert_same(matrix.result(), expected)
    # A process for each picture.
    parts = [ConfusionMatrix(150) for _ in masks]
    for part, prediction, mask in zip(parts, predictions, masks, strict=True):
        part.update(torch.from_numpy(prediction), reduced(torch.from_numpy(mask)))
    for part in parts[1:]:
        parts[0].merge(part)
    assert torch.equal(parts[0].counts, matrix.counts)


@pytest.mark.parametrize("reduce_labels", [True, False])
def test_ignored_pixels_and_absent_classes(reduce_labels):
    generator = np.random.default_rng(1)
    references = [generator.choice([0, 1, 2, 3, 255], (13, 17)).astype(np.uint8) for _ in range(4)]
    predictions = [generator.choice([0, 1, 2, 4], (13, 17)) for _ in range(4)]  # 5 is nowhere, 4 in no mask
    matrix = ConfusionMatrix(6)
    for prediction, reference in zip(predictions, references, strict=True):
        labels = torch.from_numpy(reference).long()
        matrix.update(torch.from_numpy(prediction), reduced(labels) if reduce_labels else labels)
    found = matrix.result()
    assert_same(found, mean_iou(predictions, references, 6, reduce_labels=reduce_labels))
    assert math.isnan(found["iou"][5])
    assert found["iou"][4] == 0
    assert math.isnan(found["accuracy"][4])
    assert without_nan(found)["iou"][5] is None
    assert without_nan(found)["mean_iou"] == found["mean_iou"]


def test_figures_are_those_of_scikit_learn():
    generator = np.random.default_rng(2)
    right, predicted = generator.integers(0, 4, (2, 5000))
    matrix = ConfusionMatrix(4)
    matrix.update(torch.from_numpy(predicted), torch.from_numpy(right))
    expected = {
        "iou": jaccard_score(right, predicted, average=None),
        "mean_iou": jaccard_score(right, predicted, average="macro"),
        "accuracy": recall_score(right, predicted, average=None),
        "overall_accuracy": accuracy_score(right, predicted),
    }
    assert_same(matrix.result(), expected)


def test_what_is_reduced():
    given = torch.tensor([0, 1, 150, 254, 255], dtype=torch.uint8)
    assert reduced(given).tolist() == [255, 0, 149, 253, 255]
    assert reduced(given.long()).tolist() == [255, 0, 149, 253, 255]


def test_another_size_is_refused_and_not_resized():
    matrix = ConfusionMatrix(3)
    with pytest.raises(ValueError, match="The prediction is 2 x 2, allowed is the size of the mask, 4 x 4"):
        matrix.update(torch.zeros(2, 2, dtype=torch.long), torch.zeros(4, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="allowed is the size of the mask"):  # not broadcast either
        matrix.update(torch.zeros(1, dtype=torch.long), torch.zeros(4, dtype=torch.long))
    assert matrix.counts.sum() == 0


@pytest.mark.parametrize(
    ("prediction", "mask", "said"),
    [
        ([0, 3], [0, 1], "The prediction has the label 3, allowed are 0 to 2"),
        ([0, 1], [0, 7], "The mask has the label 7, allowed are 0 to 2, and 255 in masks"),
        ([0, 1], [0, -1], "The mask has the label -1"),
    ],
)
def test_labels_that_are_no_class_are_refused(prediction, mask, said):
    matrix = ConfusionMatrix(3)
    with pytest.raises(ValueError, match=said):
        matrix.update(torch.tensor(prediction), torch.tensor(mask))
    matrix.update(torch.tensor([0, 3]), torch.tensor([0, 255]))  # nothing is said of what is ignored
    assert matrix.counts.sum() == 1
