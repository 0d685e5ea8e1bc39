"""The losses of self-distillation against float64 forms written out term by term, against lightly's, in 2 processes."""

import math
import os
import socket
import subprocess
import sys

import pytest
import torch
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from safetensors.torch import load_file

from laplacian_heads.train import dino_losses
from laplacian_heads.train.dino_losses import (
    Center,
    cross_entropy,
    image_loss,
    koleo_loss,
    patch_loss,
    sinkhorn,
    softmax,
)

STUDENT, TEACHER = 0.1, 0.04


def drawn(*shape, seed=0, scale=0.3):
    """Logits as heads make them: products of vectors of length 1."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def probabilities(*shape, seed=1):
    return (drawn(*shape, seed=seed) / TEACHER).softmax(-1)


def naive_term(logits, target, temperature):
    """Cross-entropy of one row, in float64."""
    scaled = logits.double() / temperature
    largest = scaled.max().detach()
    log_sum = largest + sum((each - largest).exp() for each in scaled).log()
    return sum(wanted * (log_sum - each) for wanted, each in zip(target.double(), scaled, strict=True))


def naive_image_loss(global_logits, local_logits, targets, temperature):
    terms = []
    for teacher in range(2):
        for student, crop in enumerate([*global_logits, *local_logits]):
            if student != teacher:
                rows = zip(crop, targets[teacher], strict=True)
                terms.append(sum(naive_term(*row, temperature) for row in rows) / len(crop))
    return sum(terms) / len(terms)


def naive_patch_loss(logits, targets, counts, temperature):
    total, row = torch.zeros((), dtype=torch.float64), 0
    for count in counts.tolist():
        for _ in range(count):
            total = total + naive_term(logits[row], targets[row], temperature) / count
            row += 1
    assert row == len(logits)
    return total / len(counts)


def naive_koleo(crops):
    total = 0
    for crop in crops.double():
        unit = [row / row.square().sum().sqrt() for row in crop]
        for i, row in enumerate(unit):
            distances = [(row - other).square().sum().sqrt() for j, other in enumerate(unit) if i != j]
            total = total - min(distances, key=lambda each: each.item()).add(1e-8).log() / len(unit)
    return total


def naive_sinkhorn(logits, temperature):
    """In logarithms, so that nothing can overflow."""
    table = logits.double() / temperature
    for _ in range(3):
        table = table - table.logsumexp(0, keepdim=True)  # each prototype's sum is the same
        table = table - table.logsumexp(1, keepdim=True)  # each row's sum is 1
    return table.exp()


def with_gradients(loss, tensors):
    """The value of a loss, and its gradients with respect to tensors."""
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    value = loss(*leaves)
    return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)


def check(loss, naive, tensors, rtol=1e-6, gradient=1e-6):
    """A loss in float32 is its naive form in float64; an entry of a gradient may be off by a share of the largest."""
    found, expected = with_gradients(loss, tensors), with_gradients(naive, [each.double() for each in tensors])
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected[0], rtol=rtol, atol=1e-6)
    for one, other, tensor in zip(found[1], expected[1], tensors, strict=True):
        assert one.dtype == tensor.dtype
        if one.numel():
            torch.testing.assert_close(one.double(), other, rtol=gradient, atol=gradient * other.abs().max().item())


@pytest.fixture(params=[1 << 24, 70, 1], ids=["one block", "blocks", "rows"])
def block(request, monkeypatch):
    """Numbers of a block; the last is less than one row."""
    monkeypatch.setattr(dino_losses, "BLOCK", request.param)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("rows", "prototypes"), [(1, 2), (7, 33), (13, 5)])
def test_cross_entropy(block, rows, prototypes, weighted):
    targets = probabilities(rows, prototypes) * torch.arange(1, rows + 1)[:, None]  # sums of several count as often
    weights = torch.linspace(0, 2, rows + 1)[1:] if weighted else torch.ones(rows)
    check(
        lambda logits: cross_entropy(logits, targets, STUDENT, weights if weighted else None),
        lambda logits: sum(weights[row] * naive_term(logits[row], targets[row], STUDENT) for row in range(rows)),
        [drawn(rows, prototypes)],
        gradient=3e-6,  # of two prototypes the gradient is small, and the rounding that of exponents of 5
    )


@pytest.mark.parametrize(("images", "crops", "prototypes"), [(1, 0, 5), (1, 1, 33), (3, 0, 33), (5, 3, 7), (2, 10, 3)])
def test_image_loss(block, images, crops, prototypes):
    targets = probabilities(2, images, prototypes)
    check(
        lambda *logits: image_loss(*logits, targets, STUDENT),
        lambda *logits: naive_image_loss(*logits, targets, STUDENT),
        [drawn(2, images, prototypes), drawn(crops, images, prototypes, seed=2)],
    )


@pytest.mark.parametrize("counts", [[3], [1, 0, 4, 2, 0, 7], [0, 0, 1], [5, 5]])
def test_patch_loss(block, counts):
    masked, counts = sum(counts), torch.tensor(counts)
    targets = probabilities(masked, 19)
    check(
        lambda logits: patch_loss(logits, targets, counts, STUDENT),
        lambda logits: naive_patch_loss(logits, targets, counts, STUDENT),
        [drawn(masked, 19)],
    )


@pytest.mark.parametrize("images", [1, 3])
def test_no_masked_patch_is_no_loss(block, images):
    logits = torch.empty(0, 19, requires_grad=True)
    loss = patch_loss(logits, torch.empty(0, 19), torch.zeros(images, dtype=torch.long), STUDENT)
    assert loss == 0
    loss.backward()
    assert logits.grad.shape == (0, 19)


@pytest.mark.parametrize(("crops", "images", "width"), [(1, 2, 3), (2, 5, 7), (2, 16, 8), (3, 9, 33)])
def test_koleo_loss(crops, images, width):
    check(koleo_loss, naive_koleo, [drawn(crops, images, width, scale=3)], gradient=3e-6)


def test_koleo_of_crops_does_not_compare_crops():
    """Two crops of an image are to be near each other."""
    features = drawn(5, 7)
    torch.testing.assert_close(koleo_loss(torch.stack([features, features])), 2 * koleo_loss(features[None]))


@pytest.mark.parametrize("images", [1, 2, 3])
def test_koleo_of_the_same_image_is_finite(images):
    """Also of one alone. Nothing says which way they should part."""
    value, (gradient,) = with_gradients(koleo_loss, [drawn(2, 1, 7).expand(2, images, 7)])
    assert 2 * 16 < value < 2 * -math.log(1e-8)
    assert gradient.isfinite().all()
    assert images > 2 or not gradient.any()


def test_koleo_is_in_float32_under_autocast():
    features = 1 + drawn(2, 33, 8, scale=0.05)  # bfloat16 would not tell the nearest one
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(koleo_loss(features), koleo_loss(features.float()))
        rounded = koleo_loss(features.bfloat16())
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded.double(), naive_koleo(features.bfloat16()), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(koleo_loss(features).double(), naive_koleo(features), rtol=1e-6, atol=1e-6)


def test_logits_in_bfloat16_lose_nothing_but_their_gradients_digits(block):
    targets = probabilities(2, 3, 33)
    check(
        lambda *logits: image_loss(*logits, targets, STUDENT),
        lambda *logits: naive_image_loss(*logits, targets, STUDENT),
        [drawn(2, 3, 33).bfloat16(), drawn(4, 3, 33, seed=2).bfloat16()],
        gradient=2**-8,
    )
    counts = torch.tensor([4, 0, 5])
    check(
        lambda logits: patch_loss(logits, targets.flatten(0, 1).repeat(2, 1)[:9], counts, STUDENT),
        lambda logits: naive_patch_loss(logits, targets.flatten(0, 1).repeat(2, 1)[:9], counts, STUDENT),
        [drawn(9, 33).bfloat16()],
        gradient=2**-8,
    )


def test_upstream_gradient_is_multiplied_in():
    """As gradient accumulation divides the loss."""
    logits, targets = drawn(5, 7), probabilities(5, 7)
    _, (whole,) = with_gradients(lambda each: cross_entropy(each, targets, STUDENT), [logits])
    _, (part,) = with_gradients(lambda each: cross_entropy(each, targets, STUDENT) / 4, [logits])
    torch.testing.assert_close(part, whole / 4)


def test_no_gradient_is_made_where_none_is_asked_for():
    logits, targets = drawn(5, 7), probabilities(5, 7)
    expected = cross_entropy(logits.clone().requires_grad_(), targets, STUDENT)
    assert torch.equal(cross_entropy(logits, targets, STUDENT), expected.detach())
    assert not cross_entropy(logits, targets, STUDENT).requires_grad


@pytest.mark.parametrize("offset", [1e3, -1e3])
def test_student_logits_far_from_zero(offset):
    """float32 has steps of 1e-3 at 1e4, which is what they are divided by the temperature."""
    logits, targets = drawn(2, 3, 33) + offset, probabilities(2, 3, 33)
    check(
        lambda each: image_loss(each, each[:0], targets, STUDENT),
        lambda each: naive_image_loss(each, each[:0], targets, STUDENT),
        [logits],
        rtol=2e-3,
        gradient=2e-3,
    )


@pytest.mark.parametrize("spread", [1e3, 1e4])
def test_student_logits_far_apart(spread):
    logits, targets = drawn(2, 3, 33, scale=spread), probabilities(2, 3, 33)
    check(
        lambda each: image_loss(each, each[:0], targets, STUDENT),
        lambda each: naive_image_loss(each, each[:0], targets, STUDENT),
        [logits],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.04, 0.07, 1.0])
def test_softmax_targets(temperature, dtype):
    logits, center = drawn(7, 33).to(dtype), drawn(33, seed=5)
    found = softmax(logits.requires_grad_(), center, temperature)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    for row, probability in zip(logits.detach().double(), found.double(), strict=True):
        weights = [math.exp((each - middle) / temperature) for each, middle in zip(row, center.double(), strict=True)]
        expected = torch.tensor([each / sum(weights) for each in weights], dtype=torch.float64)
        # a float32 difference of logits has an error of 1e-8, over the temperature
        torch.testing.assert_close(probability, expected, rtol=3e-6, atol=1e-8)
    assert softmax(torch.empty(0, 33), center, temperature).shape == (0, 33)


def test_softmax_of_logits_far_from_zero():
    logits = drawn(7, 33, scale=1e3)
    torch.testing.assert_close(
        softmax(logits, torch.full((33,), 1e3), TEACHER).double(),
        ((logits.double() - 1e3) / TEACHER).softmax(-1),
        rtol=0,
        atol=2e-3,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.04, 0.07])
@pytest.mark.parametrize(("rows", "prototypes"), [(1, 5), (2, 64), (31, 7), (64, 33)])
def test_sinkhorn_targets(rows, prototypes, temperature, dtype):
    """Against DINOv2's own form, which exponentiates at once; in float64 it has room for this."""
    logits = drawn(rows, prototypes).to(dtype)
    found = sinkhorn(logits.requires_grad_(), temperature)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    weights = (logits.detach().double() / temperature).exp()
    weights = weights / weights.sum()
    for _ in range(3):
        for prototype in range(prototypes):
            weights[:, prototype] /= weights[:, prototype].sum() * prototypes
        for row in range(rows):
            weights[row] /= weights[row].sum() * rows
    weights *= rows
    torch.testing.assert_close(found.double(), weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(naive_sinkhorn(logits.detach(), temperature), weights, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.sum(1), torch.ones(rows))


def test_sinkhorn_spreads_what_softmax_does_not():
    """All rows prefer one prototype."""
    logits = drawn(64, 8, scale=0.05) + torch.tensor([0.3] + [0.0] * 7)
    plain = softmax(logits, torch.zeros(8), TEACHER).mean(0)
    spread = sinkhorn(logits, TEACHER).mean(0)
    assert plain[0] > 0.9
    torch.testing.assert_close(spread, torch.full((8,), 1 / 8), rtol=0.1, atol=0)


@pytest.mark.parametrize("offset", [1e3, -1e3])
def test_sinkhorn_does_not_overflow_far_from_zero(offset):
    logits = drawn(13, 7) + offset
    found = sinkhorn(logits, TEACHER)
    torch.testing.assert_close(found.double(), naive_sinkhorn(logits, TEACHER), rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "logits",
    [
        [[0.0, 0.0], [-10.0, -10.0]],  # a row far below the others
        [[0.0, -10.0], [0.0, -10.0]],  # a prototype far below the others
        [[1e3, -1e3], [-1e3, 1e3], [1e3, 1e3]],
    ],
)
def test_sinkhorn_of_logits_far_apart(logits):
    """A row or prototype whose weights are less than float32 has is divided by its sum all the same."""
    logits = torch.tensor(logits)
    found = sinkhorn(logits, TEACHER)
    torch.testing.assert_close(found.double(), naive_sinkhorn(logits, TEACHER), rtol=0, atol=2e-3)


def test_sinkhorn_of_drawn_logits_far_apart():
    found = sinkhorn(drawn(13, 7, scale=1e3), TEACHER)
    assert found.isfinite().all()
    torch.testing.assert_close(found.sum(1), torch.ones(13))


def test_sinkhorn_of_no_rows():
    assert sinkhorn(torch.empty(0, 7), TEACHER).shape == (0, 7)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 1.0])
def test_center_is_a_running_mean_of_all_rows(momentum):
    center, expected = Center(9, momentum), torch.zeros(9, dtype=torch.float64)
    batches = [[drawn(5, 9, seed=0), drawn(2, 9, seed=1)], [drawn(1, 9, seed=2).bfloat16()], [drawn(4, 9, seed=3) + 50]]
    for batch in batches:  # accumulated: unequal ones have the weight of their rows
        for logits in batch:
            before = center.value.clone()
            center.add(logits.requires_grad_())
            assert torch.equal(center.value, before)  # until the optimizer's step
        center.update()
        rows = torch.cat([logits.detach().double() for logits in batch])
        expected = momentum * expected + (1 - momentum) * rows.mean(0)
        torch.testing.assert_close(center.value.double(), expected, rtol=1e-6, atol=1e-7)
    assert not center.value.requires_grad


def test_center_without_rows_stays():
    center = Center(9, 0.9)
    center.add(drawn(5, 9))
    center.update()
    before = center.value.clone()
    center.update()
    center.add(torch.empty(0, 9))
    center.update()
    assert torch.equal(center.value, before)
    assert list(center.state_dict()) == ["value"]


def test_dino_loss_and_center_are_those_of_lightly():
    theirs, center = DINOLoss(33, teacher_temp=TEACHER, student_temp=STUDENT, center_momentum=0.7), Center(33, 0.7)
    for step in range(3):
        teacher = drawn(2, 5, 33, seed=step) + 0.2
        student = [drawn(2, 5, 33, seed=10 + step), drawn(4, 5, 33, seed=20 + step)]
        value, gradients = with_gradients(lambda a, b: theirs(list(teacher), [*a, *b]), student)  # noqa: B023
        center.add(teacher.flatten(0, 1))
        targets = softmax(teacher, center.value, TEACHER)
        found = with_gradients(lambda a, b: image_loss(a, b, targets, STUDENT), student)  # noqa: B023
        center.update()
        torch.testing.assert_close(found[0], value, rtol=2e-6, atol=0)
        for one, other in zip(found[1], gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * other.abs().max().item())
        torch.testing.assert_close(center.value, theirs.center[0, 0], rtol=1e-6, atol=1e-7)
    assert center.value.abs().min() > 0


def test_patch_loss_and_center_are_those_of_lightly():
    theirs = IBOTPatchLoss(33, teacher_temp=TEACHER, student_temp=STUDENT, center_momentum=0.7)
    center, generator = Center(33, 0.7), torch.Generator().manual_seed(0)
    for step in range(3):
        mask = torch.rand(6, 3, 5, generator=generator) < torch.tensor([0.0, 0.5, 0.0, 1.0, 0.2, 0.4])[:, None, None]
        counts = mask.flatten(1).sum(1)
        assert 0 in counts
        teacher, student = (drawn(int(counts.sum()), 33, seed=10 * step + each) for each in range(2))
        value, gradients = with_gradients(lambda each: theirs(teacher, each, mask), [student])  # noqa: B023
        center.add(teacher)
        targets = softmax(teacher, center.value, TEACHER)
        found = with_gradients(lambda each: patch_loss(each, targets, counts, STUDENT), [student])  # noqa: B023
        center.update()
        torch.testing.assert_close(found[0], value, rtol=2e-6, atol=0)
        torch.testing.assert_close(*(found[1][0], gradients[0]), rtol=1e-5, atol=1e-6 * gradients[0].abs().max().item())
        torch.testing.assert_close(center.value, theirs.center.value[0], rtol=1e-6, atol=1e-7)


def test_koleo_is_lightlys():
    features = drawn(2, 9, 8)
    assert torch.equal(koleo_loss(features), KoLeoLoss()(features[0]) + KoLeoLoss()(features[1]))


ROWS = (5, 2), (0, 6), (3, 0), (0, 0)  # in the first process and in the second
PROGRAM = """
import sys

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from safetensors.torch import save_file

from laplacian_heads import LaplaceViTConfig
from laplacian_heads.train.dino_losses import Center, sinkhorn
from laplacian_heads.train.dino_network import DinoNetwork

ROWS = {rows}
state = PartialState(cpu=True)
assert state.num_processes == 2
process, found = state.process_index, {{}}


def mine(table, rows):
    return table[: rows[0]] if process == 0 else table[rows[0] :]


center = Center(9, 0.7)
for case, rows in enumerate(ROWS):
    table = torch.randn(sum(rows), 9, generator=torch.Generator().manual_seed(case)) * 0.3
    center.add(mine(table, rows)[:1])  # in two parts
    center.add(mine(table, rows)[1:])
    center.update()
    found[f"center_{{case}}"] = center.value.clone()
    found[f"sinkhorn_{{case}}"] = sinkhorn(mine(table, rows), 0.04)

# The second process has no masked patch, which must neither stop the gradients' meeting nor change them.
config = LaplaceViTConfig(
    *(), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, laplacian_heads=1, image_size=8, patch_size=4,
    use_mask_token=True,
)
torch.manual_seed(0)
network = DinoNetwork(config, 24, 8, prototypes=11, patch_prototypes=7, norm_last_layer=False)
generator = torch.Generator().manual_seed(process)
masked = torch.zeros(6, 4, dtype=torch.bool)
if process == 0:
    masked[1, 2:] = masked[4, 0] = True
batch = dict(
    pixel_values=torch.randn(6, 3, 8, 8, generator=generator),
    local_crops=torch.randn(3, 3, 4, 4, generator=generator),
    bool_masked_pos=masked,
    masked=masked.flatten().nonzero()[:, 0],
    counts=masked.sum(1),
    targets=torch.randn(6, 11, generator=generator).softmax(-1),
    patch_targets=torch.randn(int(masked.sum()), 7, generator=generator).softmax(-1),
)


def gradients(model):
    model.zero_grad()
    sum(model(**batch).values()).backward()
    return {{name: each.grad.clone() for name, each in network.named_parameters()}}


alone = {{name: reduce(each) for name, each in gradients(network).items()}}
parallel = torch.nn.parallel.DistributedDataParallel(network)
for _ in range(2):  # the second would find out what the first had not reduced
    together = gradients(parallel)
found |= {{f"alone.{{name}}": each for name, each in alone.items()}}
found |= {{f"together.{{name}}": each for name, each in together.items()}}
save_file(found, f"{{sys.argv[1]}}/{{process}}.safetensors")
state.destroy_process_group()
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes found."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "program.py").write_text(PROGRAM.format(rows=ROWS))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    result = subprocess.run(
        [*launch, str(folder / "program.py"), str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [load_file(folder / f"{process}.safetensors") for process in range(2)]


def test_center_is_the_mean_over_the_rows_of_all_processes(processes):
    expected = torch.zeros(9, dtype=torch.float64)
    for case, rows in enumerate(ROWS):
        if sum(rows):
            expected = 0.7 * expected + 0.3 * drawn(sum(rows), 9, seed=case).double().mean(0)
        for found in processes:
            torch.testing.assert_close(found[f"center_{case}"].double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("case", range(len(ROWS)))
def test_sinkhorn_of_two_processes_is_that_of_one(processes, case):
    table = drawn(sum(ROWS[case]), 9, seed=case)
    parts = [found[f"sinkhorn_{case}"] for found in processes]
    assert tuple(len(part) for part in parts) == ROWS[case]
    found = torch.cat(parts)
    torch.testing.assert_close(found, sinkhorn(table, TEACHER), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.double(), naive_sinkhorn(table, TEACHER), rtol=0, atol=1e-6)


def test_process_without_masked_patches_takes_part_in_the_gradients(processes):
    for found in processes:
        names = [name.removeprefix("alone.") for name in found if name.startswith("alone.")]
        assert "own_patch_head.last_layer.weight_v" in names
        for name in names:
            torch.testing.assert_close(found[f"together.{name}"], found[f"alone.{name}"], rtol=1e-5, atol=1e-8)
