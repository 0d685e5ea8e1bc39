"""What self-distillation is made of: network, teacher, schedules, crops and masks, against what is written out here."""

import itertools
import math
import random
import types

import numpy as np
import PIL.Image
import pytest
import torch
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from reference import redraw
from torchvision.transforms import v2
from transformers import AutoModel
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from laplacian_heads import LaplaceViTConfig, images, recipes
from laplacian_heads.modeling_laplace_vit import LaplaceViTModel
from laplacian_heads.train.augmentation import seeded
from laplacian_heads.train.crops import collate, mask_blocks, multi_crop
from laplacian_heads.train.dino import DinoRecipe, Schedules, TeacherCallback
from laplacian_heads.train.dino_network import DinoNetwork, Teacher
from laplacian_heads.train.draws import Draw
from laplacian_heads.train.parameter_groups import make_optimizer
from laplacian_heads.train.pictures import AugmentedImages
from laplacian_heads.train.schedules import cosine, linear, warmup_cosine

SMALL = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "laplacian_heads": 1},
    **{"image_size": 16, "patch_size": 4, "use_mask_token": True, "qk_norm": True},
}
PROTOTYPES, CROPS = 11, 3


def network(seed=0, patch_prototypes=None, norm_last_layer=True, **fields):
    config = LaplaceViTConfig(**{**SMALL, **fields})
    made = DinoNetwork(config, 24, 8, PROTOTYPES, patch_prototypes, norm_last_layer)
    lengths = {name: each.clone() for name, each in made.state_dict().items() if norm_last_layer and "weight_g" in name}
    redraw(made, seed).load_state_dict(lengths, strict=False)
    return made


def batch(images=3, seed=0, probability=0.5, crops=CROPS):
    """A batch as `collate` makes it, of noise."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for image in range(images):
        views = [torch.randn(3, 16, 16, generator=generator) for _ in range(2)]
        views += [torch.randn(3, 8, 8, generator=generator) for _ in range(crops)]
        rows.append((views, -1, seed + image))
    return collate(rows, lambda count: mask_blocks(count, (4, 4), probability, (0.2, 0.6)))


def losses(student, teacher, given):
    targets, patch_targets, _ = teacher(given["pixel_values"], given.get("masked"), 0.04)
    return student(**given, targets=targets, patch_targets=patch_targets)


# The network


def naive_head(head, features):
    weights = {name: each.double() for name, each in head.state_dict().items()}
    for layer in ("layers.0", "layers.2", "layers.4"):
        features = features @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
        if layer != "layers.4":
            features = features * (1 + torch.erf(features / math.sqrt(2))) / 2
    features = features / features.square().sum(-1, keepdim=True).sqrt()
    directions = weights["last_layer.weight_v"]
    directions = directions / directions.square().sum(1, keepdim=True).sqrt()
    return features @ (weights["last_layer.weight_g"] * directions).T


@pytest.mark.parametrize("masks_seen", [False, True])
@pytest.mark.parametrize("norm_last_layer", [False, True])
@pytest.mark.parametrize("patch_prototypes", [None, 7])
def test_projection_is_the_one_written_out(patch_prototypes, norm_last_layer, masks_seen):
    made, given = network(0, patch_prototypes, norm_last_layer).eval(), batch()
    backbone = LaplaceViTModel(made.config).double().eval()
    backbone.load_state_dict(made.vit.state_dict())
    masks = given["bool_masked_pos"] if masks_seen else None
    tokens = backbone(given["pixel_values"].double(), masks).last_hidden_state
    places = [divmod(number, 16) for number in given["masked"].tolist()]
    assert len(places) > 4
    patches = torch.stack([tokens[crop, 1 + patch] for crop, patch in places])
    expected = (
        naive_head(made.image_head, tokens[:, 0]),
        naive_head(made.own_patch_head if patch_prototypes else made.image_head, patches),
        tokens[:, 0],
    )
    assert expected[1].shape[1] == (patch_prototypes or PROTOTYPES)
    found = made.project(given["pixel_values"], given["masked"], masks)
    exact = made.double().project(given["pixel_values"].double(), given["masked"], masks)
    for one, precise, other in zip(found, exact, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(precise, other, rtol=1e-10, atol=1e-12)


def test_network_without_mask_token_projects_no_patches():
    made = network(patch_prototypes=7, use_mask_token=False)
    assert made.own_patch_head is None
    pixels = torch.randn(4, 3, 16, 16)
    logits, patches, features = made.project(pixels, None)
    assert patches is None
    assert (logits.shape, features.shape) == ((4, PROTOTYPES), (4, 16))
    found = losses(made, Teacher(network(1, use_mask_token=False), "softmax", 0.9), {"pixel_values": pixels} | local(0))
    assert found.keys() == {"dino", "koleo"}


def local(crops, images=2):
    return {"local_crops": torch.randn(crops * images, 3, 8, 8)}


@pytest.mark.parametrize("patch_prototypes", [None, 7])
@pytest.mark.parametrize("norm_last_layer", [False, True])
def test_lengths_of_prototypes_train_only_if_they_shall(norm_last_layer, patch_prototypes):
    made = network(0, patch_prototypes, norm_last_layer)
    heads = [head for head in (made.image_head, made.own_patch_head) if head is not None]
    assert len(heads) == 1 + bool(patch_prototypes)
    trained = {name for name, each in made.named_parameters() if each.requires_grad}
    assert {name for name, _ in made.named_parameters()} - trained == {
        name for name, _ in made.named_parameters() if norm_last_layer and name.endswith("weight_g")
    }
    optimizer = make_optimizer(made, "adamw", 0.1, 0.1)
    sum(losses(made, Teacher(network(1, patch_prototypes), "softmax", 0.9), batch()).values()).backward()
    optimizer.step()
    for head in heads:
        assert torch.equal(head.last_layer.weight_g, torch.ones_like(head.last_layer.weight_g)) == norm_last_layer


def test_new_prototypes_are_of_length_one_and_mask_token_zero():
    made = DinoNetwork(LaplaceViTConfig(**SMALL), 24, 8, PROTOTYPES, 7, False)
    for head in (made.image_head, made.own_patch_head):
        assert torch.equal(head.last_layer.weight_g, torch.ones_like(head.last_layer.weight_g))
        assert head.layers[0].weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert not made.vit.embeddings.mask_token.any()
    logits = made.project(torch.randn(6, 3, 16, 16), torch.arange(9))[0]
    assert logits.abs().max() <= 1 + 1e-6


@pytest.mark.parametrize("crops", [0, 2])
@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize("patch_prototypes", [None, 7])
def test_every_trained_parameter_has_a_gradient(patch_prototypes, probability, crops):
    """DDP waits for all of them."""
    made, given = network(0, patch_prototypes, False).train(), batch(probability=probability, crops=crops)
    assert bool(given["masked"].numel()) == bool(probability)
    found = losses(made, Teacher(network(1, patch_prototypes), "softmax", 0.9), given)
    sum(found.values()).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        unused = not probability and ("mask_token" in name or "own_patch_head" in name)
        if "k_norm.bias" not in name:  # which adds the same to all that a softmax is taken of
            assert bool(parameter.grad.any()) != unused, name
    assert bool(found["ibot"]) == bool(probability)


@pytest.mark.parametrize("patch_prototypes", [None, 7])
def test_step_is_that_of_lightlys_losses(patch_prototypes):
    """DINO, iBOT and 0.1 KoLeo as DINOv2 adds them, and the centers, over three steps."""
    student, teacher = network(0, patch_prototypes), Teacher(network(1, patch_prototypes), "softmax", 0.8)
    dino = DINOLoss(PROTOTYPES, teacher_temp=0.04, student_temp=0.1, center_momentum=0.8)
    ibot = IBOTPatchLoss(patch_prototypes or PROTOTYPES, teacher_temp=0.04, student_temp=0.1, center_momentum=0.8)
    parameters = [each for each in student.parameters() if each.requires_grad]
    for step in range(3):
        given = batch(seed=10 * step)
        found = losses(student, teacher, given)
        total = found["dino"] + found["ibot"] + 0.1 * found["koleo"]
        gradients = torch.autograd.grad(total, parameters)

        with torch.no_grad():
            teacher_logits, teacher_patches, _ = teacher.network.project(given["pixel_values"], given["masked"])
        logits, patches, features = student.project(given["pixel_values"], given["masked"], given["bool_masked_pos"])
        crops = student.image_head(student.vit(given["local_crops"]).pooler_output).chunk(CROPS)
        expected = dino(list(teacher_logits.chunk(2)), [*logits.chunk(2), *crops])
        expected = expected + ibot(teacher_patches, patches, given["bool_masked_pos"].unflatten(1, (4, 4)))
        expected = expected + 0.1 * sum(KoLeoLoss()(crop) for crop in features.chunk(2))
        torch.testing.assert_close(total, expected, rtol=2e-6, atol=0)
        for one, other in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7 + 1e-5 * other.abs().max().item())

        teacher.follow(student, 1.0)
        torch.testing.assert_close(teacher.center.value, dino.center[0, 0], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(teacher.patch_center.value, ibot.center.value[0], rtol=1e-5, atol=1e-7)
        assert teacher.center.value.any()
        assert teacher.patch_center.value.any()


def test_step_in_bfloat16_is_nearly_that_in_float32():
    student, teacher, given = network(0, 7), Teacher(network(1, 7), "sinkhorn", 0.8), batch()
    expected = losses(student, teacher, given)
    with torch.autocast("cpu", torch.bfloat16):
        found = losses(student, teacher, given)
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name], rtol=0.05, atol=0.05)
        assert value != expected[name]
    sum(found.values()).backward()
    assert all(each.grad.isfinite().all() for each in student.parameters() if each.requires_grad)


def test_saved_student_is_a_backbone(tmp_path):
    """What a checkpoint of a run in training is read as."""
    made = network(patch_prototypes=7).train()
    made.save_pretrained(tmp_path)
    loaded, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is LaplaceViTModel
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    expected = made.vit.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(loaded(pixels).pooler_output, made.eval()(pixels).pooler_output)


# The teacher


def test_teacher_is_deterministic_where_the_student_drops_branches():
    fields = {"drop_path_rate": 0.5, "drop_path_schedule": "constant"}
    student, teacher = network(**fields).train(), Teacher(network(1, **fields), "none", 0.9)
    given = batch()
    callback = TeacherCallback(student, teacher, None)
    callback.on_train_begin(None, None, None)
    student.train()
    assert not any(module.training for module in teacher.network.modules())
    first, second = (teacher(given["pixel_values"], given["masked"], 0.04) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad
    one, other = (student.project(given["pixel_values"], given["masked"])[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert not any(each.requires_grad for each in teacher.parameters())
    sum(losses(student, teacher, given).values()).backward()
    assert all(each.grad is None for each in teacher.parameters())


def test_teacher_does_not_see_masks():
    teacher, given = Teacher(network(patch_prototypes=7), "none", 0.9), batch()
    targets, patch_targets, features = teacher(given["pixel_values"], given["masked"], 0.07)
    tokens = teacher.network.vit(given["pixel_values"]).last_hidden_state
    torch.testing.assert_close(features, tokens[:, 0])
    patches = tokens[:, 1:][given["bool_masked_pos"]]
    for found, head, seen in (
        (targets, teacher.network.image_head, tokens[:, 0]),
        (patch_targets, teacher.network.own_patch_head, patches),
    ):
        expected = (naive_head(head, seen.detach().double()) / 0.07).softmax(-1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_teacher_with_masks_for_nothing():
    """No patch of a batch may be masked."""
    for centering in ("softmax", "sinkhorn", "none"):
        teacher, given = Teacher(network(patch_prototypes=7), centering, 0.9), batch(probability=0.0)
        targets, patch_targets, _ = teacher(given["pixel_values"], given["masked"], 0.07)
        assert (targets.shape, patch_targets.shape) == ((6, PROTOTYPES), (0, 7))
        teacher.follow(network(1, 7), 0.9)
        assert bool(teacher.center.value.any()) == (centering == "softmax")
        assert not teacher.patch_center.value.any()


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.9995, 1.0])
def test_teacher_follows(momentum):
    student, teacher = network(0, 7, False), Teacher(network(1, 7, False), "softmax", 0.9)
    expected = {name: each.detach().double() for name, each in teacher.network.named_parameters()}
    before = {name: each.detach().clone() for name, each in student.named_parameters()}
    for _ in range(3):
        teacher.follow(student, momentum)
        expected = {
            name: momentum * expected[name] + (1 - momentum) * each.detach().double()
            for name, each in student.named_parameters()
        }
    for name, parameter in teacher.network.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], rtol=1e-6, atol=1e-7)
        assert torch.equal(parameter, before[name]) == (momentum == 0)
    for name, parameter in student.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("patch_prototypes", [None, 7])
def test_teacher_comes_back_as_it_was(tmp_path, patch_prototypes):
    teacher, given = Teacher(network(1, patch_prototypes), "softmax", 0.9), batch()
    teacher(given["pixel_values"], given["masked"], 0.04)
    teacher.follow(network(0, patch_prototypes), 0.7)
    teacher.save(tmp_path)
    other = Teacher(network(2, patch_prototypes), "softmax", 0.9)
    other.load(tmp_path)
    expected = teacher.state_dict()
    assert {"center.value", "patch_center.value"} <= expected.keys()
    assert expected["center.value"].any()
    assert other.state_dict().keys() == expected.keys()
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    found = [each(given["pixel_values"], given["masked"], 0.04) for each in (teacher, other)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# Around an optimizer step


def numpy_cosine(base, final, epochs, per_epoch, warmup_epochs=0, start=0.0):
    """The array of facebookresearch/dino's `cosine_scheduler`."""
    warm = np.linspace(start, base, warmup_epochs * per_epoch) if warmup_epochs else np.array([])
    count = epochs * per_epoch - len(warm)
    rest = np.array([final + 0.5 * (base - final) * (1 + np.cos(np.pi * i / count)) for i in range(count)])
    return np.concatenate([warm, rest])


def numpy_linear(start, end, steps, warm):
    """DINO's temperature of the teacher, by steps."""
    return np.concatenate([np.linspace(start, end, warm), np.full(max(0, steps - warm), end)])[:steps]


@pytest.mark.parametrize(("epochs", "per_epoch"), [(1, 1), (1, 2), (3, 1), (7, 13), (100, 10)])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_warmup_and_cosine_are_dinos(epochs, per_epoch, warmup):
    if warmup > epochs:
        return
    expected = numpy_cosine(3e-3, 1e-6, epochs, per_epoch, warmup, start=1e-5)
    steps = epochs * per_epoch
    found = [warmup_cosine(step, steps, warmup * per_epoch, 1e-5, 3e-3, 1e-6) for step in range(steps)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert warmup_cosine(steps, steps, warmup * per_epoch, 1e-5, 3e-3, 1e-6) == 1e-6
    for base, final in ((0.04, 0.4), (0.996, 1.0), (0.5, 0.5)):
        found = [cosine(step, steps, base, final) for step in range(steps)]
        np.testing.assert_allclose(found, numpy_cosine(base, final, epochs, per_epoch), rtol=1e-12, atol=1e-15)
    assert cosine(steps, steps, 0.04, 0.4) == cosine(steps + 9, steps, 0.04, 0.4) == 0.4


@pytest.mark.parametrize("warm", [0, 1, 2, 30, 100, 130])
def test_temperature_of_the_teacher_is_dinos(warm):
    found = [linear(step, warm, 0.04, 0.07) for step in range(100)]
    np.testing.assert_allclose(found, numpy_linear(0.04, 0.07, 100, warm), rtol=1e-12, atol=1e-15)
    assert linear(1000, warm, 0.04, 0.07) == 0.07


def small_recipe(**given):
    values = {
        name: value for name, value in SMALL.items() if name not in ("use_mask_token", "image_size", "patch_size")
    }
    values |= {"head_hidden_size": 24, "head_bottleneck_size": 8, "prototypes": PROTOTYPES, "epochs": 4}
    values |= {"warmup_epochs": 1, "freeze_last_layer_epochs": 1, "weight_decay": 0.04, "final_weight_decay": 0.4}
    values |= {"teacher_momentum": 0.9, "final_teacher_momentum": 1.0, "warmup_teacher_temperature_epochs": 2}
    values |= {"warmup_teacher_temperature": 0.04, "teacher_temperature": 0.07, "images": 64}
    values |= {"image_size": 16, "local_size": 8, "patch_size": 4, "centering": "softmax"}
    return recipes.load(DinoRecipe, "dino_tiny_digits", values | given)


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("per_epoch", [1, 5])
def test_schedules_of_a_run_are_dinos(per_epoch, warmup):
    recipe = small_recipe(warmup_epochs=warmup, learning_rate=5e-3, min_learning_rate=1e-6)
    schedules, steps = Schedules(recipe, 4 * per_epoch, per_epoch), 4 * per_epoch
    expected = {
        "learning_rate": numpy_cosine(5e-3, 1e-6, 4, per_epoch, warmup),
        "weight_decay": numpy_cosine(0.04, 0.4, 4, per_epoch),
        "teacher_momentum": numpy_cosine(0.9, 1.0, 4, per_epoch),
        "teacher_temperature": numpy_linear(0.04, 0.07, steps, 2 * per_epoch),
    }
    for name, values in expected.items():
        found = [getattr(schedules, name)(step) for step in range(steps)]
        np.testing.assert_allclose(found, values, rtol=1e-12, atol=1e-15, err_msg=name)


@pytest.mark.parametrize("limit", [0.0, 0.02])
@pytest.mark.parametrize(("patch_prototypes", "norm_last_layer"), [(None, True), (7, True), (7, False)])
def test_steps_of_student_and_teacher(patch_prototypes, norm_last_layer, limit):
    """Four epochs of two steps by the callback and AdamW, against loops over the parameters."""
    recipe = small_recipe(max_parameter_grad_norm=limit)
    student = network(0, patch_prototypes, norm_last_layer).train()
    teacher = Teacher(network(0, patch_prototypes, norm_last_layer), "softmax", 0.9)
    callback = TeacherCallback(student, teacher, Schedules(recipe, 8, 2))
    optimizer = make_optimizer(student, "adamw", 1e-2, recipe.weight_decay)
    state = types.SimpleNamespace(global_step=0)
    decays, momenta = numpy_cosine(0.04, 0.4, 4, 2), numpy_cosine(0.9, 1.0, 4, 2)
    start = {name: each.detach().clone() for name, each in student.named_parameters()}
    followed = {name: each.detach().double() for name, each in teacher.network.named_parameters()}
    clipped = []
    callback.on_train_begin(None, state, None)
    for step in range(8):
        callback.on_step_begin(None, state, None, optimizer=optimizer)
        for group in optimizer.param_groups:
            assert group["weight_decay"] == pytest.approx(decays[step] if group["name"] == "decay" else 0, rel=1e-12)
        assert {group["name"] for group in optimizer.param_groups} == {"decay", "no_decay"}

        sum(losses(student, teacher, batch(seed=100 * step)).values()).backward()
        given = {name: each.grad.clone() for name, each in student.named_parameters() if each.grad is not None}
        callback.on_pre_optimizer_step(None, state, None)
        for name, parameter in student.named_parameters():
            if "last_layer" in name and (step < 2 or name not in given):
                assert parameter.grad is None, name
                continue
            norm = math.sqrt(sum(each * each for each in given[name].double().flatten().tolist()))
            factor = limit / (norm + 1e-6) if limit and norm + 1e-6 > limit else 1
            clipped.append(factor < 1)
            torch.testing.assert_close(parameter.grad.double(), given[name].double() * factor, rtol=1e-5, atol=1e-9)
        optimizer.step()
        optimizer.zero_grad()
        state.global_step += 1
        callback.on_step_end(None, state, None)

        for name, parameter in student.named_parameters():
            moved = not torch.equal(parameter, start[name])
            assert moved == ("last_layer" not in name or (step >= 2 and name in given)), name
            followed[name] = momenta[step] * followed[name] + (1 - momenta[step]) * parameter.detach().double()
        for name, parameter in teacher.network.named_parameters():
            torch.testing.assert_close(parameter.double(), followed[name], rtol=1e-5, atol=1e-7)
            if "last_layer" in name and step < 2:
                torch.testing.assert_close(parameter, start[name], rtol=1e-6, atol=0)
        assert not any(module.training for module in teacher.network.modules())
    assert any(clipped) == bool(limit)
    assert not all(clipped)


# Crops


AUGMENTATION = {
    **{"global_size": 24, "global_scale": (0.3, 0.9), "local_size": 12, "local_scale": (0.06, 0.31), "local_crops": 5},
    **{"flip": 0.37, "color_jitter": (0.41, 0.23, 0.12, 0.07), "color_jitter_probability": 0.83, "grayscale": 0.19},
    **{"blur": (0.9, 0.15, 0.55), "blur_sigma": (0.3, 1.7), "solarize": 0.21},
}


def noise(size=48, seed=0):
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


@pytest.mark.parametrize("local_crops", [0, 1, 5])
def test_crops_have_their_sizes(local_crops):
    found = multi_crop(**{**AUGMENTATION, "local_crops": local_crops})(noise())
    assert [tuple(crop.shape) for crop in found] == [(3, 24, 24)] * 2 + [(3, 12, 12)] * local_crops
    assert all(crop.dtype == torch.float32 for crop in found)
    assert all(
        not torch.equal(one, other) for one, other in itertools.combinations(found, 2) if one.shape == other.shape
    )


def test_crops_have_their_parameters():
    views = multi_crop(**AUGMENTATION).transforms
    assert len(views) == 7
    for number, view in enumerate(views):
        crop, flip, upside_down, turn, jitter, gray, blur, solarize, tensor, normalize = view.transform.transforms
        assert isinstance(crop, v2.RandomResizedCrop)
        assert tuple(crop.size) == ((24, 24) if number < 2 else (12, 12))
        assert tuple(crop.scale) == ((0.3, 0.9) if number < 2 else (0.06, 0.31))
        assert tuple(crop.ratio) == (3 / 4, 4 / 3)
        assert crop.interpolation == v2.InterpolationMode.BICUBIC
        assert (flip.p, upside_down.p, turn.p if hasattr(turn, "p") else turn.prob) == (0.37, 0, 0)
        assert jitter.p == 0.83
        (colors,) = jitter.transforms
        assert tuple(colors.brightness) == pytest.approx((0.59, 1.41))
        assert tuple(colors.contrast) == pytest.approx((0.77, 1.23))
        assert tuple(colors.saturation) == pytest.approx((0.88, 1.12))
        assert tuple(colors.hue) == pytest.approx((-0.07, 0.07))
        assert gray.p == 0.19
        assert (blur.prob, blur.sigmas) == ((0.9, 0.15, *[0.55] * 5)[number], (0.3, 1.7))
        assert (solarize.prob, solarize.threshold) == ((0, 0.21, *[0] * 5)[number], 128)
        assert type(tensor).__name__ == "ToTensor"
        assert tuple(normalize.mean) == pytest.approx(IMAGENET_DEFAULT_MEAN)
        assert tuple(normalize.std) == pytest.approx(IMAGENET_DEFAULT_STD)


def test_recipe_names_the_parameters_of_the_crops():
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in AUGMENTATION.items()}
    recipe = small_recipe(image_size=given.pop("global_size"), **given)
    found, expected = recipe.transform().transforms, multi_crop(**AUGMENTATION).transforms
    for one, other in zip(found, expected, strict=True):
        for mine, its in zip(one.transform.transforms, other.transform.transforms, strict=True):
            assert str(vars(mine)) == str(vars(its))


def drawn_crops(draws, picture, **given):
    """The crops of one picture by the seeds from 0 on."""
    transform = multi_crop(**{**AUGMENTATION, "local_crops": 2, **given})
    for seed in range(draws):
        with seeded(seed):
            yield transform(picture)


def test_blur_is_as_frequent_as_asked_for():
    """With the same seed a crop differs only where it is blurred: numpy draws that, torch draws cuts and colours."""
    draws, picture, plain = 300, noise(24), {"solarize": 0}
    counts = np.zeros(4)
    for blurred, sharp in zip(
        drawn_crops(draws, picture, **plain), drawn_crops(draws, picture, **plain, blur=(0, 0, 0)), strict=True
    ):
        counts += [not torch.equal(one, other) for one, other in zip(blurred, sharp, strict=True)]
    for count, probability in zip(counts / draws, (0.9, 0.15, 0.55, 0.55), strict=True):
        assert count == pytest.approx(probability, abs=4 * math.sqrt(probability * (1 - probability) / draws))


def test_solarize_is_as_frequent_as_asked_for():
    """White becomes black."""
    draws, white = 300, PIL.Image.new("RGB", (24, 24), (255, 255, 255))
    black = torch.tensor([-mean / std for mean, std in zip(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, strict=True)])
    counts = np.zeros(4)
    for found in drawn_crops(draws, white, color_jitter=(0, 0, 0, 0), blur=(0, 0, 0)):
        counts += [torch.allclose(crop[:, 0, 0], black) for crop in found]
    assert counts[1] / draws == pytest.approx(0.21, abs=4 * math.sqrt(0.21 * 0.79 / draws))
    assert not counts[[0, 2, 3]].any()


def test_equal_seeds_give_equal_crops():
    recipe = small_recipe(image_size=8, local_size=4, patch_size=2)
    augmented = AugmentedImages(images.load("digits"), recipe.transform(), False)
    first = augmented[Draw(5, 123)]
    torch.rand(7), np.random.rand(3), random.random()
    others = [augmented[Draw(5, 124)], augmented[Draw(6, 123)]]
    again = augmented[Draw(5, 123)]
    assert (len(first[0]), first[2]) == (2 + recipe.local_crops, 123)
    assert all(torch.equal(one, other) for one, other in zip(first[0], again[0], strict=True))
    for other in others:
        assert not all(torch.equal(one, its) for one, its in zip(first[0], other[0], strict=True))


@pytest.mark.parametrize("local_crops", [0, 1, 3])
def test_batch_has_the_first_crops_before_the_second(local_crops):
    def crop(image, view):
        return torch.full((3, *((8, 8) if view < 2 else (4, 4))), 10.0 * image + view)

    rows = [([crop(image, view) for view in range(2 + local_crops)], -1, image) for image in range(4)]
    found = collate(rows, None)
    assert found.keys() == {"pixel_values", "local_crops"}
    assert found["pixel_values"][:, 0, 0, 0].tolist() == [0, 10, 20, 30, 1, 11, 21, 31]
    expected = [10 * image + view for view in range(2, 2 + local_crops) for image in range(4)]
    assert found["local_crops"][:, 0, 0, 0].tolist() == expected
    assert found["pixel_values"].shape == (8, 3, 8, 8)
    assert found["local_crops"].shape == ((4 * local_crops, 3, 4, 4) if local_crops else (0, 3, 8, 8))


# Masks


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (7, 7), (14, 14)])
@pytest.mark.parametrize(("count", "probability"), [(1, 0.5), (2, 0.5), (7, 0.5), (10, 0.3), (8, 1.0), (6, 0.0)])
def test_share_of_masked_crops_and_patches(count, probability, grid):
    low, high, patches = 0.1, 0.5, grid[0] * grid[1]
    expected = int(count * probability)
    bounds = np.linspace(low, high, expected + 1)
    for seed in range(20):
        with seeded(seed):
            found = mask_blocks(count, grid, probability, (low, high))
        assert (found.shape, found.dtype) == ((count, *grid), torch.bool)
        sums = sorted(each for each in found.flatten(1).sum(1).tolist() if each)
        assert len(sums) == expected
        for number, most in zip(sums, bounds[1:], strict=True):
            assert 1 <= number <= patches * most + 1e-4


def test_parts_of_masks_are_spread_over_the_ratio():
    """Each in a stratum of its own, of which it falls short at times."""
    bounds, short = 196 * np.linspace(0.1, 0.5, 9), 0
    for seed in range(50):
        with seeded(seed):
            sums = mask_blocks(16, (14, 14), 0.5, (0.1, 0.5)).flatten(1).sum(1).sort().values.tolist()[-8:]
        short += sum(number < math.floor(least) for number, least in zip(sums, bounds, strict=False))
        assert all(number >= 0.8 * least for number, least in zip(sums, bounds, strict=False))
    assert short < 0.15 * 50 * 8


def test_masks_are_anywhere_in_the_batch():
    counts = torch.zeros(6)
    for seed in range(300):
        with seeded(seed):
            counts += mask_blocks(6, (4, 4), 0.5, (0.2, 0.5)).flatten(1).any(1)
    assert (counts / 300).tolist() == pytest.approx([0.5] * 6, abs=4 * math.sqrt(0.25 / 300))


def test_equal_seeds_give_equal_masks():
    def found(seed):
        with seeded(seed):
            return mask_blocks(8, (7, 7), 0.5, (0.1, 0.5))

    assert torch.equal(found(3), found(3))
    assert not torch.equal(found(3), found(4))


@pytest.mark.parametrize(("side", "ratio"), [(4, 0.25), (5, 0.12), (7, 0.3), (14, 0.4), (10, 0.04)])
def test_ratio_may_be_one_number(side, ratio):
    """The recipe allows mask_ratio: [0.12, 0.12]."""
    for seed in range(10):
        with seeded(seed):
            found = mask_blocks(4, (side, side), 1.0, (ratio, ratio))
        assert (found.flatten(1).sum(1) <= ratio * side * side + 1e-4).all()
        assert found.flatten(1).any(1).all()


def naive_masks(generator, count, side, low, high):
    """DINOv2's masks of as many crops, as sets of places, written out."""
    bounds = [low + (high - low) * number / count for number in range(count + 1)]
    for least, most in zip(bounds, bounds[1:], strict=False):
        wanted = int(side * side * generator.uniform(least, most))
        masked = set()
        while len(masked) < wanted:
            remaining = wanted - len(masked)
            for _ in range(10):
                area = 4 + (remaining - 4) * generator.random()
                aspect = math.exp(generator.uniform(math.log(0.3), -math.log(0.3)))
                height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
                if height >= side or width >= side:
                    continue
                top, left = generator.integers(side - height + 1), generator.integers(side - width + 1)
                new = {(top + i, left + j) for i in range(height) for j in range(width)} - masked
                if 0 < len(new) <= remaining:
                    masked |= new
                    break
            else:
                break
        table = np.zeros((side, side), dtype=bool)
        for place in masked:
            table[place] = True
        yield table


def statistics(masks):
    """Of each mask (side, side): its patches, edges, patches in the middle and in corners, and rows with any."""
    masks = np.asarray(masks).astype(float)
    side = masks.shape[1]
    edges = np.abs(np.diff(masks, axis=1)).sum((1, 2)) + np.abs(np.diff(masks, axis=2)).sum((1, 2))
    middle = masks[:, side // 4 : side - side // 4, side // 4 : side - side // 4].sum((1, 2))
    corners = masks[:, [0, 0, -1, -1], [0, -1, 0, -1]].sum(1)
    rows = masks.any(2).sum(1)
    return np.stack([masks.sum((1, 2)), edges, middle, corners, rows])


def test_masks_are_distributed_as_those_of_dinov2():
    generator = np.random.default_rng(0)
    found, expected, scattered = [], [], []
    for seed in range(250):
        with seeded(seed):
            masks = mask_blocks(8, (14, 14), 0.5, (0.1, 0.5)).numpy()
        found += [mask for mask in masks if mask.any()]
        expected += list(naive_masks(generator, 4, 14, 0.1, 0.5))
        scattered += [generator.permutation(mask.flatten()).reshape(14, 14) for mask in masks if mask.any()]
    found, expected, scattered = (statistics(masks) for masks in (found, expected, scattered))
    error = np.sqrt((found.var(1) + expected.var(1)) / found.shape[1])
    assert (np.abs(found.mean(1) - expected.mean(1)) < 4 * error).all()
    assert scattered[1].mean() > found[1].mean() + 40 * error[1]  # rectangles have few edges
    for share in (0.1, 0.5, 0.9):
        quantiles = np.quantile(found, share, axis=1), np.quantile(expected, share, axis=1)
        np.testing.assert_allclose(*quantiles, rtol=0.1, atol=2)


def test_batch_says_which_patches_are_masked():
    given = batch(images=5, probability=0.7)
    masked = given["bool_masked_pos"]
    assert (masked.shape, masked.dtype) == ((10, 16), torch.bool)
    assert given["counts"].tolist() == [int(row.sum()) for row in masked]
    assert sum(count > 0 for count in given["counts"].tolist()) == 7
    assert given["masked"].tolist() == [
        16 * crop + patch for crop in range(10) for patch in range(16) if masked[crop, patch]
    ]
    assert given["masked"].dtype == torch.long


def test_masks_of_a_batch_depend_on_its_first_seed_alone():
    state = random.getstate(), torch.get_rng_state()
    one, other = batch(seed=3), batch(seed=3)
    assert torch.equal(one["bool_masked_pos"], other["bool_masked_pos"])
    random.random()
    assert torch.equal(batch(seed=3)["bool_masked_pos"], one["bool_masked_pos"])
    assert not torch.equal(batch(seed=4)["bool_masked_pos"], one["bool_masked_pos"])
    random.setstate(state[0])
    batch(seed=5)
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_recipe_makes_the_masks_of_its_grid():
    recipe = small_recipe(mask_probability=0.5, mask_ratio=[0.2, 0.6])
    rows = [([torch.zeros(3, 16, 16)] * 2, -1, 7 + image) for image in range(3)]
    found = recipe.collate(rows)
    with seeded(7 + (1 << 100)):
        expected = mask_blocks(6, (4, 4), 0.5, [0.2, 0.6])
    assert torch.equal(found["bool_masked_pos"].unflatten(1, (4, 4)), expected)
    assert small_recipe(ibot_weight=0.0).collate(rows).keys() == {"pixel_values", "local_crops"}


def test_mask_token_takes_the_places_of_masked_patches():
    """Rows and columns of a mask are those of the image."""
    embeddings = network().vit.embeddings
    with seeded(0):
        mask = mask_blocks(6, (4, 4), 0.5, (0.2, 0.6))
    pixels = torch.randn(6, 3, 16, 16)
    changed = pixels.clone()
    for crop, row, column in mask.nonzero().tolist():
        changed[crop, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 1
    plain, other = embeddings(pixels), embeddings(changed)
    differ = (plain != other).any(-1)
    assert torch.equal(differ[:, 1:], mask.flatten(1))

    masked = embeddings(pixels, mask.flatten(1))
    assert torch.equal(masked, embeddings(changed, mask.flatten(1)))  # what is under it is not seen
    assert torch.equal(masked[~differ], plain[~differ])
    expected = (embeddings.mask_token + embeddings.position_embeddings).expand(6, 16, 16)[mask.flatten(1)]
    assert torch.equal(masked[differ], expected)
