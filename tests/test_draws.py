"""Draws against timm's sampler of repeated augmentation, whose shuffle is replaced by theirs."""

import collections

import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler

from laplacian_heads.train.draws import Draws

IMAGES = 203


def order(epoch, seed=3):
    """The images of an epoch as shuffled: what is drawn one by one, without repeats."""
    draws = Draws(IMAGES, 1, 1, repeats=1, seed=seed)
    return [draws.batch(epoch * IMAGES + number)[0].index for number in range(IMAGES)]


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize("repeats", [1, 3, 4])
@pytest.mark.parametrize("batches", [1, 2, 4, 8])
def test_images_are_those_of_timms_sampler(batches, repeats, epoch, monkeypatch):
    batch_size = 16 // batches
    draws = Draws(IMAGES, 16, batch_size, repeats, seed=3)
    shuffled = order(epoch)
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.tensor(shuffled))
    for rank in range(batches):
        sampler = RepeatAugSampler(
            range(IMAGES), num_replicas=batches, rank=rank, num_repeats=repeats, selected_round=16
        )
        numbers = [(epoch * draws.steps_per_epoch + step) * batches + rank for step in range(draws.steps_per_epoch)]
        found = [draw.index for number in numbers for draw in draws.batch(number)]
        assert found == list(sampler)


def test_shuffles_are_whole_and_differ():
    orders = [order(0), order(1), order(0, seed=4)]
    for shuffled in orders:
        assert sorted(shuffled) == list(range(IMAGES))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # a random order agrees with another in one place on average
        assert sum(a == b for a, b in zip(orders[one], orders[other], strict=True)) < 10


@pytest.mark.parametrize("processes", [1, 2])
def test_epoch_has_a_third_of_the_images_three_times_each(processes):
    draws = Draws(IMAGES, 16, 4, repeats=3, seed=0)
    assert draws.steps_per_epoch == IMAGES // 16 == Draws(IMAGES, 16, 4, 1, 0).steps_per_epoch
    batches = range(draws.steps_per_epoch * 4)
    taken = [draws.batch(number) for process in range(processes) for number in batches[process::processes]]
    assert {len(batch) for batch in taken} == {4}
    counts = collections.Counter(draw.index for batch in taken for draw in batch)
    assert sorted(counts.values()) == [3] * 64  # 12 steps of 16 draws
    for batch in taken:
        assert len({draw.index for draw in batch}) == len(batch)


def test_fewer_batches_than_repeats_hold_an_image_twice():
    """What the promise of the class depends on."""
    assert len({draw.index for draw in Draws(IMAGES, 16, 8, repeats=3, seed=0).batch(0)}) < 8


def test_every_draw_has_a_seed_of_its_own():
    runs = [Draws(IMAGES, 16, 4, repeats=3, seed=seed) for seed in (0, 1, 2**32 - 1)]
    seeds = [draw.seed for draws in runs for number in range(4 * 12 * 3) for draw in draws.batch(number)]
    assert len(set(seeds)) == len(seeds) == 3 * 3 * 12 * 16


def test_step_does_not_depend_on_the_batch_size():
    def step(batch_size):
        draws = Draws(IMAGES, 16, batch_size, repeats=3, seed=5)
        first = 17 * draws.batches_per_step
        return {draw for number in range(first, first + draws.batches_per_step) for draw in draws.batch(number)}

    assert len(step(16)) == 16
    assert step(16) == step(4) == step(1)


def test_batch_depends_on_its_number_alone():
    inorder, backwards = Draws(IMAGES, 16, 4, 3, 1), Draws(IMAGES, 16, 4, 3, 1)
    expected = {number: inorder.batch(number) for number in range(150)}
    for number in reversed(range(150)):
        assert backwards.batch(number) == expected[number]


@pytest.mark.parametrize(
    ("images", "step", "batch_size", "words"),
    [
        (15, 16, 4, "images_per_step is 16, allowed is at most 15, the number of images"),
        (100, 16, 5, "images_per_step is 16, allowed are multiples of batch_size, 5"),
    ],
)
def test_impossible_steps_are_refused(images, step, batch_size, words):
    with pytest.raises(ValueError, match=words):
        Draws(images, step, batch_size, repeats=3, seed=0)


def test_as_many_images_as_a_step_takes_are_enough():
    assert sorted(draw.index for draw in Draws(16, 16, 16, 1, 0).batch(3)) == list(range(16))
