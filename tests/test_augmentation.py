"""Augmentation, mixing and losses against what they should do, written out with numpy."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from laplacian_heads.train.augmentation import Mixing, check_batch_size, check_loss, seeded, soft_target_loss, transform

PLAIN = {"mean": (0, 0, 0), "std": (1, 1, 1)}


def noise(height, width=None):
    values = np.random.RandomState(0).randint(0, 256, (height, width or height, 3))
    return Image.fromarray(values.astype(np.uint8))


def bytes_of(image):
    """An image, or what PLAIN augmentation made of it, as integers (height, width, 3)."""
    if isinstance(image, Image.Image):
        return np.asarray(image).astype(int)
    return (image * 255).round().long().permute(1, 2, 0).numpy()


def names(**settings):
    steps = transform(image_size=32, **PLAIN, **settings).transforms
    return [type(step).__name__.removeprefix("Maybe") for step in steps]


CROP = "RandomResizedCropAndInterpolation"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"auto_augment": "3a", "color_jitter": 0.3},
            [CROP, "RandomHorizontalFlip", "AutoAugment", "ColorJitter", "ToTensor", "Normalize"],
        ),
        (
            {"auto_augment": "rand-m9-mstd0.5-inc1", "color_jitter": 0.3, "random_erasing": 0.25},
            [CROP, "RandomHorizontalFlip", "RandAugment", "ToTensor", "Normalize", "RandomErasing"],
        ),
        (
            {"crop": "padded", "color_jitter": 0.3},
            ["Resize", "RandomCrop", "RandomHorizontalFlip", "ColorJitter", "ToTensor", "Normalize"],
        ),
        ({"crop": "none", "flip": 0.0}, ["Resize", "CenterCrop", "ToTensor", "Normalize"]),
    ],
)
def test_steps(settings, expected):
    assert names(**settings) == expected


def test_three_augment_does_one_of_three():
    image = noise(16)
    augment = transform(image_size=16, crop="none", flip=0.0, auto_augment="3a", **PLAIN)
    values = bytes_of(image)
    solarized = np.where(values < 128, values, 255 - values)
    gray = np.repeat((values @ [0.299, 0.587, 0.114]).round().astype(int)[..., None], 3, axis=2)
    counts = {"grayscale": 0, "solarize": 0, "blur": 0}
    spreads = []
    for seed in range(600):
        with seeded(seed):
            found = bytes_of(augment(image))
        if np.abs(found - gray).max() <= 1:
            assert (found[..., :1] == found).all()
            counts["grayscale"] += 1
        elif (found == solarized).all():
            counts["solarize"] += 1
        else:
            assert np.allclose(found.mean((0, 1)), values.mean((0, 1)), atol=8)
            spreads.append(found.std() / values.std())
            counts["blur"] += 1
    assert all(150 < count < 250 for count in counts.values()), counts  # 200, with a deviation of 12
    # Standard deviations from 0.1, which changes nothing yet, to 2 pixels: white noise keeps 1 / (2 sqrt(pi) 2) of it.
    assert max(spreads) > 0.95
    assert 0.1 < min(spreads) < 0.25


def test_color_jitter_stays_within_its_range():
    """With no crop, flip or colours but brightness to be seen: a gray picture."""
    image = Image.new("RGB", (8, 8), (100, 100, 100))
    augment = transform(image_size=8, crop="none", flip=0.0, color_jitter=0.3, **PLAIN)
    found = []
    for seed in range(200):
        with seeded(seed):
            found.append(bytes_of(augment(image)).mean())
    assert 69 <= min(found) < 75
    assert 125 < max(found) <= 131


def test_normalized_by_channel():
    image = Image.new("RGB", (8, 8), (0, 51, 255))
    found = transform(image_size=8, crop="none", mean=(0.5, 0.1, 0.2), std=(0.5, 0.25, 2.0))(image)
    assert found.shape == (3, 8, 8)
    assert found.dtype == torch.float32
    assert torch.allclose(found[:, 0, 0], torch.tensor([-1.0, 0.4, 0.4]))


def test_padded_crop_is_a_shifted_picture_on_black():
    image = noise(32)
    padded = np.pad(bytes_of(image), ((4, 4), (4, 4), (0, 0)))
    windows = {padded[y : y + 32, x : x + 32].tobytes(): (y, x) for y in range(9) for x in range(9)}
    augment = transform(image_size=32, crop="padded", flip=0.0, **PLAIN)
    places = []
    for seed in range(1000):
        with seeded(seed):
            places.append(windows[bytes_of(augment(image)).tobytes()])
    assert len(set(places)) > 75  # of 81
    assert augment(noise(50, 70)).shape == (3, 32, 32)


def test_resized_crop_keeps_to_its_scale():
    """A picture whose values are the places of its pixels tells which part was taken."""
    ramp = np.zeros((64, 64, 3), dtype=np.uint8)
    ramp[..., 0], ramp[..., 1] = 3 * np.arange(64), 3 * np.arange(64)[:, None]
    augment = transform(image_size=64, crop_scale=[0.25, 0.5], flip=0.0, **PLAIN)
    parts = []
    for seed in range(200):
        with seeded(seed):
            red, green, _ = bytes_of(augment(Image.fromarray(ramp))).transpose(2, 0, 1)
        parts.append((red.max() - red.min()) / 192 * (green.max() - green.min()) / 192)
    assert 0.2 < min(parts) < 0.3
    assert 0.43 < max(parts) < 0.55


@pytest.mark.parametrize(("crop", "settings"), [("resized", {"crop_scale": [1, 1]}), ("none", {})])
def test_resizing_is_bicubic(crop, settings):
    image = noise(64)
    augment = transform(image_size=24, crop=crop, flip=0.0, **settings, **PLAIN)
    expected = bytes_of(image.resize((24, 24), Image.Resampling.BICUBIC))
    assert (bytes_of(augment(image)) == expected).all()


def test_without_a_crop_the_middle_stays():
    image = noise(16, 40)
    augment = transform(image_size=16, crop="none", flip=0.0, **PLAIN)
    assert (bytes_of(augment(image)) == bytes_of(image)[:, 12:28]).all()


def test_flip_is_a_probability():
    image = noise(8)
    augment = transform(image_size=8, crop="none", flip=0.2, **PLAIN)
    flipped = 0
    for seed in range(500):
        with seeded(seed):
            flipped += (bytes_of(augment(image)) == bytes_of(image)[:, ::-1]).all()
    assert 60 < flipped < 140


def test_erased_rectangle_is_noise():
    augment = transform(image_size=32, crop="none", flip=0.0, random_erasing=1.0, **PLAIN)
    found = augment(Image.new("RGB", (32, 32), (255, 255, 255)))
    rows, columns = np.nonzero((found != 1).any(0).numpy())
    height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
    assert len(rows) == height * width
    assert 0.01 < len(rows) / 1024 < 0.35
    assert len(found[found != 1].unique()) == 3 * len(rows)


@pytest.mark.parametrize(
    "wrong", ["4a", "3a-", "rand-", "rand-m9-x3", "random-m9", "rand-foo", "rand-m9-inc2", "rand-m", "", "v0"]
)
def test_unknown_auto_augment_is_refused(wrong):
    with pytest.raises(ValueError, match=r"auto_augment is '.*', allowed are null, 3a, or rand"):
        transform(image_size=32, auto_augment=wrong, **PLAIN)


@pytest.mark.parametrize("right", ["rand", "rand-m7", "rand-n3-m15-mmax20-p0.8-mstd1-inc0"])
def test_rand_augment_strings_reach_timm(right):
    (step,) = (
        step for step in transform(image_size=32, auto_augment=right, **PLAIN).transforms if hasattr(step, "ops")
    )
    if right == "rand":
        assert (step.num_layers, step.ops[0].magnitude, step.ops[0].prob) == (2, 10, 0.5)
    elif right == "rand-m7":
        assert step.ops[0].magnitude == 7
    else:
        op = step.ops[0]
        assert (step.num_layers, op.magnitude, op.magnitude_max, op.prob, op.magnitude_std) == (3, 15, 20, 0.8, 1.0)


def test_unknown_crop_is_refused():
    with pytest.raises(ValueError, match="crop is 'center', allowed are resized, padded, none"):
        transform(image_size=32, crop="center", **PLAIN)


def draw_everything():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()


@pytest.mark.parametrize("auto_augment", ["3a", "rand-m9-mstd0.5-inc1", None])
def test_augmentation_depends_on_the_seed_alone(auto_augment):
    image = noise(48)
    augment = transform(image_size=32, auto_augment=auto_augment, color_jitter=0.3, random_erasing=0.5, **PLAIN)

    def augmented(seed):
        with seeded(seed):
            return augment(image)

    first = [augmented(seed) for seed in range(20)]
    draw_everything()
    for seed in reversed(range(20)):
        assert torch.equal(augmented(seed), first[seed])
    assert len({tensor.numpy().tobytes() for tensor in first}) == 20


@pytest.mark.parametrize("fails", [False, True])
def test_random_state_of_the_run_stays(fails):
    for _ in range(3):  # an odd number of normal numbers, of which generators keep every second
        draw_everything()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = [draw_everything() for _ in range(3)]
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    try:
        with seeded(2**90 + 1):
            inside = draw_everything()
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert [draw_everything() for _ in range(3)] == expected
    assert all(a != b for a, b in zip(inside, expected[0], strict=True))


def test_every_digit_of_a_seed_counts_for_every_generator():
    drawn = []
    for seed in (0, 1, 2**32, 2**40, 2**40 + 1, 2**64, 2**100):
        with seeded(seed):
            drawn.append(draw_everything())
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(drawn)


def batch(size=8):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 12, 12, generator=generator), torch.randint(10, (size,), generator=generator)


def smoothed(labels, smoothing, classes=10):
    return np.eye(classes)[labels.numpy()] * (1 - smoothing) + smoothing / classes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixup_written_out(smoothing):
    images, labels = batch()
    mixing = Mixing(0.8, 0.0, 1.0, 0.5, smoothing, 10)
    one_hot = smoothed(labels, smoothing)
    shares = []
    for seed in range(500):
        mixed, targets = mixing(images, labels, seed)
        # The share that explains the first image best
        a, b = images[0].double(), images[-1].double()
        share = (((mixed[0] - b) * (a - b)).sum() / ((a - b) ** 2).sum()).item()
        expected = share * images.double() + (1 - share) * images.double().flip(0)
        assert torch.allclose(mixed.double(), expected, atol=1e-5)
        assert np.allclose(targets.numpy(), share * one_hot + (1 - share) * one_hot[::-1], atol=1e-5)
        shares.append(share)
    assert targets.dtype == torch.float32
    assert abs(np.mean(shares) - 0.5) < 0.06
    assert abs(np.var(shares) - 1 / (4 * (2 * 0.8 + 1))) < 0.02  # of Beta(0.8, 0.8)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cutmix_written_out(smoothing):
    images, labels = batch()
    mixing = Mixing(0.0, 1.0, 1.0, 0.5, smoothing, 10)
    one_hot = smoothed(labels, smoothing)
    areas = []
    for seed in range(300):
        mixed, targets = mixing(images, labels, seed)
        changed = (mixed != images).any(1).any(0)
        assert torch.equal(mixed, torch.where(changed, images.flip(0), images))
        rows, columns = np.nonzero(changed.numpy())
        if len(rows):
            assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        share = 1 - len(rows) / 144
        assert np.allclose(targets.numpy(), share * one_hot + (1 - share) * one_hot[::-1], atol=1e-6)
        areas.append(len(rows))
    assert min(areas) < 10
    assert max(areas) > 100


def test_how_often_images_are_mixed_and_how():
    images, labels = batch()
    mixing = Mixing(0.8, 1.0, 0.75, 0.3, 0.0, 10)
    counts = {"not": 0, "cutmix": 0, "mixup": 0}
    for seed in range(1000):
        mixed, _ = mixing(images, labels, seed)
        same = (mixed == images).float().mean()
        pasted = ((mixed == images) | (mixed == images.flip(0))).all()
        counts["not" if same == 1 else "cutmix" if pasted else "mixup"] += 1
    # CutMix whose rectangle is empty counts as none
    assert 210 < counts["not"] < 310
    assert 170 < counts["cutmix"] < 270
    assert 475 < counts["mixup"] < 575


def test_mixing_depends_on_the_seed_and_leaves_everything_else():
    images, labels = batch()
    before, labels_before = images.clone(), labels.clone()
    mixing = Mixing(0.8, 1.0, 1.0, 0.5, 0.1, 10)
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    expected = draw_everything()
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    results = [mixing(images, labels, seed) for seed in range(10)]
    assert draw_everything() == expected
    assert torch.equal(images, before)
    assert torch.equal(labels, labels_before)
    for seed in reversed(range(10)):
        for found, first in zip(mixing(images, labels, seed), results[seed], strict=True):
            assert torch.equal(found, first)
    assert len({mixed.numpy().tobytes() for mixed, _ in results}) == 10


def test_mixing_shares_no_numbers_with_the_image_of_that_seed():
    labels = torch.tensor([0, 1])
    _, targets = Mixing(0.8, 0.0, 1.0, 0.5, 0.0, 2)(torch.randn(2, 3, 4, 4), labels, 5)
    with seeded(5):
        np.random.rand()  # whether to mix
        assert targets[0, 0].item() != pytest.approx(np.random.beta(0.8, 0.8))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_mixing_targets_alone_are_made(smoothing):
    images, labels = batch(7)
    mixed, targets = Mixing(0.0, 0.0, 1.0, 0.5, smoothing, 10)(images, labels, 0)
    assert mixed is images
    assert targets.dtype == torch.float32
    assert np.allclose(targets.numpy(), smoothed(labels, smoothing))


def test_odd_batches_are_not_mixed():
    check_batch_size(7, 0.0, 0.0)
    check_batch_size(8, 0.8, 1.0)
    for mixup, cutmix in ((0.8, 0.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="batch_size is 7, allowed with mixup or cutmix are even numbers"):
            check_batch_size(7, mixup, cutmix)


def binary(logits, targets):
    logits, targets = logits.double().numpy(), np.asarray(targets, dtype=float)
    return -(targets * -np.logaddexp(0, -logits) + (1 - targets) * -np.logaddexp(0, logits)).mean()


def test_losses_written_out():
    images, labels = batch()
    _, targets = Mixing(0.8, 0.0, 1.0, 0.5, 0.0, 10)(images, labels, 3)
    logits = 3 * torch.randn(8, 10, generator=torch.Generator().manual_seed(1))
    x, y = logits.double().numpy(), targets.double().numpy()
    assert (y > 0).sum() > 8  # both classes of a mixed image
    log_shares = x - np.log(np.exp(x).sum(1, keepdims=True))
    cases = {
        ("cross_entropy", None): -(y * log_shares).sum(1).mean(),
        ("binary_cross_entropy", None): binary(logits, y),
        ("binary_cross_entropy", 0.0): binary(logits, y > 0),
        ("binary_cross_entropy", 0.5): binary(logits, y > 0.5),
    }
    assert len({round(value, 4) for value in cases.values()}) == 4
    for (loss, threshold), expected in cases.items():
        found = soft_target_loss(logits, targets, loss, threshold)
        assert found.item() == pytest.approx(expected, rel=1e-5)
        half = logits.bfloat16()
        assert torch.equal(
            soft_target_loss(half, targets, loss, threshold), soft_target_loss(half.float(), targets, loss, threshold)
        )


def test_both_classes_of_a_mixed_image_are_right_at_threshold_zero():
    """With the gradient, which pulls towards every target: down on its logit where it is 1, up elsewhere."""
    logits = torch.zeros(2, 4, requires_grad=True)
    targets = torch.tensor([[0.0, 0.9, 0.1, 0.0], [1.0, 0.0, 0.0, 0.0]])
    soft_target_loss(logits, targets, "binary_cross_entropy", 0.0).backward()
    expected = torch.tensor([[1.0, -1, -1, 1], [-1, 1, 1, 1]]) / 2 / 8  # mean over images and classes
    assert torch.allclose(logits.grad, expected)


@pytest.mark.parametrize(
    "arguments",
    [
        ("cross_entropy", None, 0.1, 10),
        ("binary_cross_entropy", None, 0.1, 10),
        ("binary_cross_entropy", 0.0, 0.0, 10),
        ("binary_cross_entropy", 0.02, 0.1, 10),
    ],
)
def test_possible_losses(arguments):
    check_loss(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mse", None, 0.0, 10), "loss is 'mse', allowed are cross_entropy, binary_cross_entropy"),
        (("cross_entropy", 0.0, 0.0, 10), "threshold is 0.0, allowed with the loss cross_entropy is null"),
        (
            ("binary_cross_entropy", 0.0, 0.1, 10),
            "threshold is 0.0, allowed is a number above 0.01, the target that label_smo",
        ),
        (("binary_cross_entropy", 0.01, 0.1, 10), "threshold is 0.01, allowed is a number above 0.01"),
        (("binary_cross_entropy", -0.1, 0.0, 10), "threshold is -0.1, allowed is a number at least 0 and below 1"),
        (("binary_cross_entropy", 1.0, 0.0, 10), "threshold is 1.0, allowed is a number at least 0 and below 1"),
    ],
)
def test_impossible_losses_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        check_loss(*arguments)


def test_refused_threshold_would_make_every_class_a_target():
    """Why it is refused."""
    logits = torch.randn(8, 10)
    _, targets = Mixing(0.0, 0.0, 1.0, 0.5, 0.1, 10)(*batch(), 0)
    assert soft_target_loss(logits, targets, "binary_cross_entropy", 0.0).item() == pytest.approx(
        binary(logits, np.ones((8, 10))), rel=1e-5
    )
