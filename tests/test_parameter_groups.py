"""Parameter groups, LAMB and the learning rate against timm, BEiT's rule and the update written out."""

import copy
import math

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from transformers import get_scheduler

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification
from laplacian_heads.train.parameter_groups import make_optimizer, parameter_groups

SMALL = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LaplaceViTForImageClassification(LaplaceViTConfig(**SMALL, qk_norm=True, use_mask_token=True, num_labels=5))


def settings(groups, model):
    """{parameter name: (lr, weight_decay)}, each parameter once."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [(names[p], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


def our_name(name):
    """A parameter of timm's ViT by the name of LaplaceViT's."""
    for theirs, ours in {
        "pos_embed": "vit.embeddings.position_embeddings",
        "cls_token": "vit.embeddings.cls_token",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "blocks.": "vit.layers.",
        ".norm1.": ".layernorm_before.",
        ".norm2.": ".layernorm_after.",
        ".attn.q_norm": ".attention.q_norm",
        ".attn.k_norm": ".attention.k_norm",
        ".attn.qkv": ".attention.q_proj",
        ".attn.proj": ".attention.o_proj",
        ".ls1.gamma": ".layer_scale_attention.lambda1",
        ".ls2.gamma": ".layer_scale_mlp.lambda1",
        "head.": "classifier.",
    }.items():
        name = name.replace(theirs, ours)
    return "vit.layernorm" + name.removeprefix("norm") if name.startswith("norm") else name


@pytest.fixture(scope="module")
def timms():
    """deit3_small, one of 3 blocks and 16 channels, and the names of its parameters here."""
    shape = {"embed_dim": 16, "depth": 3, "num_heads": 2, "img_size": 8, "patch_size": 4, "qk_norm": True}
    theirs = timm.create_model("deit3_small_patch16_224", num_classes=5, **shape)
    return theirs, {name: our_name(name) for name, _ in theirs.named_parameters()}


def without_scale(groups, lr):
    return [{**group, "lr": lr * group.get("lr_scale", 1)} for group in groups]


def test_decay_is_as_in_timm(model, timms):
    theirs, names = timms
    expected = settings(
        without_scale(param_groups_weight_decay(theirs, 0.05, no_weight_decay_list=theirs.no_weight_decay()), 0.003),
        theirs,
    )
    found = settings(parameter_groups(model, 0.003, 0.05), model)
    assert {name for name in found if "k_proj" not in name and "v_proj" not in name and "mask_token" not in name} == {
        *names.values()
    }
    for name, ours in names.items():
        assert found[ours] == expected[name], name
    assert found["vit.embeddings.mask_token"] == (0.003, 0.0)
    assert found["vit.layers.1.attention.k_proj.weight"] == found["vit.layers.1.attention.v_proj.weight"]
    assert found["vit.layers.1.attention.v_proj.weight"] == (0.003, 0.05)


def test_layer_decay_is_as_in_timm_but_for_the_last_norm(model, timms):
    """timm has it in the last block. BEiT, whose rule both follow, has it beside the head."""
    theirs, names = timms
    groups = param_groups_layer_decay(theirs, 0.05, theirs.no_weight_decay(), layer_decay=0.65)
    expected = settings(without_scale(groups, 0.003), theirs)
    found = settings(parameter_groups(model, 0.003, 0.05, 0.65), model)
    for name, ours in names.items():
        rate, decay = expected[name]
        if name.startswith("norm."):
            rate /= 0.65
        assert found[ours] == (pytest.approx(rate, rel=1e-12), decay), name


@pytest.mark.parametrize("prefix", ["vit.", "", "module.vit."])
def test_layers_are_those_of_beit(model, prefix):
    """BEiT's get_num_layer_for_vit, by its own names."""

    def layer_in_beit(name, layers):
        if name in ("cls_token", "mask_token", "pos_embed") or name.startswith("patch_embed"):
            return 0
        if name.startswith("blocks"):
            return int(name.split(".")[1]) + 1
        return layers - 1

    if prefix == "":
        model = model.vit
    elif prefix != "vit.":
        model = torch.nn.ModuleDict({"module": model})
    found = settings(parameter_groups(model, 1.0, 0.05, 0.5), model)
    layers = 3 + 2
    embeddings = {
        "cls_token": "cls_token",
        "mask_token": "mask_token",
        "position_embeddings": "pos_embed",
        "patch_embeddings.projection.weight": "patch_embed.proj.weight",
        "patch_embeddings.projection.bias": "patch_embed.proj.bias",
    }
    beits = {f"{prefix}embeddings.{ours}": theirs for ours, theirs in embeddings.items()}
    for name, (rate, _) in found.items():
        theirs = beits.get(name, name.removeprefix(prefix).replace("layers.", "blocks."))
        assert rate == 0.5 ** (layers - 1 - layer_in_beit(theirs, layers)), name
    assert {rate for rate, _ in found.values()} == {0.5**power for power in range(5)}


def test_groups_are_named_and_begin_with_the_whole_rate(model):
    groups = parameter_groups(model, 0.1, 0.05)
    assert [(group["name"], group["lr"], group["weight_decay"]) for group in groups] == [
        ("decay", 0.1, 0.05),
        ("no_decay", 0.1, 0.0),
    ]
    groups = parameter_groups(model, 0.1, 0.05, 0.5)
    expected = [f"layer_{layer}_{kind}" for layer in (4, 3, 2, 1, 0) for kind in ("decay", "no_decay")]
    assert [group["name"] for group in groups] == expected
    assert [group["lr"] for group in groups[::2]] == pytest.approx([0.1, 0.05, 0.025, 0.0125, 0.00625])


def test_frozen_parameters_are_left_out_and_change_no_rate(model):
    whole = settings(parameter_groups(model, 1.0, 0.05, 0.5), model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.2" not in name and "cls_token" not in name
    found = settings(parameter_groups(model, 1.0, 0.05, 0.5), model)
    assert found == {name: value for name, value in whole.items() if "layers.2" not in name and "cls_token" not in name}


def gradients(model, steps):
    generator = torch.Generator().manual_seed(1)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return [{name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for _ in range(steps)]


def take(optimizer, model, steps):
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = step[name].clone()
        optimizer.step()


def written_out(model, steps, rates, lamb, eps):
    """AdamW or LAMB in float64, with the rate and decay of every parameter."""
    values = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    means = {name: torch.zeros_like(value) for name, value in values.items()}
    squares = {name: torch.zeros_like(value) for name, value in values.items()}
    for t, step in enumerate(steps, start=1):
        for name, value in values.items():
            rate, decay = rates[name]
            g = step[name].double()
            means[name] = 0.9 * means[name] + 0.1 * g
            squares[name] = 0.999 * squares[name] + 0.001 * g * g
            update = means[name] / (1 - 0.9**t) / ((squares[name] / (1 - 0.999**t)).sqrt() + eps)
            if not lamb:
                values[name] = value - rate * decay * value - rate * update
                continue
            ratio = 1.0
            if decay:
                update = update + decay * value
                if value.norm() > 0 and update.norm() > 0:
                    ratio = value.norm() / update.norm()
            values[name] = value - rate * ratio * update
    return values


@pytest.mark.parametrize("layer_decay", [1.0, 0.7])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_update_written_out(model, name, layer_decay):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        model.classifier.weight.zero_()  # its norm is 0, so that it has no trust ratio
    before = {name: parameter.detach().double() for name, parameter in copy.deepcopy(model).named_parameters()}
    steps = gradients(model, 4)
    optimizer = make_optimizer(model, name, 0.02, 0.3, layer_decay, eps=0.01)
    expected = written_out(model, steps, settings(optimizer.param_groups, model), name == "lamb", eps=0.01)
    take(optimizer, model, steps)
    for parameter_name, parameter in model.named_parameters():
        moved = (expected[parameter_name] - before[parameter_name]).norm()
        assert (parameter.double() - expected[parameter_name]).norm() < 1e-5 * moved, parameter_name


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_optimizer_goes_on_from_its_state(model, name, tmp_path):
    other = copy.deepcopy(model)
    steps = gradients(model, 4)
    take(make_optimizer(model, name, 0.01, 0.1, 0.7), model, steps)
    first = make_optimizer(other, name, 0.01, 0.1, 0.7)
    take(first, other, steps[:2])
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = make_optimizer(other, name, 0.01, 0.1, 0.7)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    take(second, other, steps[2:])
    for expected, found in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_unknown_optimizer_is_refused(model):
    with pytest.raises(ValueError, match="optimizer is 'sgd', allowed are adamw, lamb"):
        make_optimizer(model, "sgd", 0.1, 0.1)


# The learning rate is transformers'; these say with which arguments it is the cosine of timm and DeiT.

PEAK, START, LAST = 4e-3, 1e-6, 1e-5


def optimizer_of(rates, **fields):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate, **fields} for rate in rates]
    return torch.optim.AdamW(groups, lr=PEAK)


def rates_of_transformers(optimizer, steps, warmup, **kwargs):
    """[step][group], as Trainer goes through them."""
    schedule = get_scheduler("cosine_warmup_with_min_lr", optimizer, warmup, steps, kwargs)
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def rates_of_timm(optimizer, steps, **kwargs):
    schedule = CosineLRScheduler(optimizer, lr_min=LAST, warmup_lr_init=START, t_in_epochs=False, **kwargs)
    rates = []
    for step in range(steps):
        schedule.step_update(step)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def recommended(steps, warmup, rates=(PEAK,)):
    """From START over `warmup` steps to the peak at step `warmup`, then to LAST at the last step."""
    kwargs = {"min_lr": LAST, "warmup_lr_rate": START / PEAK if warmup else 1.0}
    return rates_of_transformers(optimizer_of(rates), steps, warmup + 1, **kwargs)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-9)


@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (100, 1), (100, 0), (7, 3), (1000, 50)])
def test_schedule_is_timms(steps, warmup):
    found = recommended(steps, warmup)
    kwargs = {"t_initial": steps - 1 - warmup, "warmup_t": warmup, "warmup_prefix": True}
    assert_equal(found, rates_of_timm(optimizer_of([PEAK]), steps, **kwargs))
    assert found[0][0] == pytest.approx(START if warmup else PEAK)
    assert found[warmup][0] == pytest.approx(PEAK)
    assert max(found) == found[warmup]
    assert found[-1][0] == pytest.approx(LAST)


def test_schedule_keeps_the_ratio_of_groups():
    """As timm's does with lr_scale; with groups that have different lr it ends at lr_min in all of them."""
    found = recommended(100, 10, [PEAK, PEAK / 4])
    kwargs = {"t_initial": 89, "warmup_t": 10, "warmup_prefix": True}
    scaled = optimizer_of([PEAK, PEAK])
    scaled.param_groups[0]["lr_scale"], scaled.param_groups[1]["lr_scale"] = 1.0, 0.25
    assert_equal(found, rates_of_timm(scaled, 100, **kwargs))
    absolute = rates_of_timm(optimizer_of([PEAK, PEAK / 4]), 100, **kwargs)
    assert absolute[-1] == pytest.approx([LAST, LAST])
    assert found[-1] == pytest.approx([LAST, LAST / 4])


def test_schedule_takes_the_peak_from_the_optimizers_defaults(model):
    """Otherwise it would end at a multiple of min_lr."""
    for name in ("adamw", "lamb"):
        optimizer = make_optimizer(model, name, PEAK, 0.05, 0.5)
        rates = rates_of_transformers(optimizer, 20, 6, min_lr=LAST, warmup_lr_rate=START / PEAK)
        assert rates[-1][0] == pytest.approx(LAST)
        assert rates[-1][-1] == pytest.approx(LAST / 16)


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_schedule_of_transformers_is_a_step_early(warmup):
    """Why one more warm-up step is passed than is meant: w steps reach the peak at step w - 1, or never for w <= 1."""
    rates = rates_of_transformers(optimizer_of([PEAK]), 100, warmup, min_lr=LAST, warmup_lr_rate=START / PEAK)
    peak = max(range(100), key=lambda step: rates[step][0])
    assert peak == max(warmup - 1, 0 if warmup == 0 else 1)
    assert (rates[peak][0] == pytest.approx(PEAK, rel=1e-9)) == (warmup > 1)
    assert rates[-1][0] == pytest.approx(LAST)


def test_schedule_is_that_of_deit_to_a_hundredth():
    """DeiT counts the cosine from step 0, with the warm-up in it, and sets the rate once an epoch."""
    epochs, warmup, per_epoch = 800, 5, 5
    steps = epochs * per_epoch
    found = [rate for (rate,) in recommended(steps, warmup * per_epoch)]
    kwargs = {"warmup_prefix": False}
    smooth = rates_of_timm(optimizer_of([PEAK]), steps, t_initial=steps, warmup_t=warmup * per_epoch, **kwargs)
    by_epoch = rates_of_timm(optimizer_of([PEAK]), epochs, t_initial=epochs, warmup_t=warmup, **kwargs)
    of_deit = [rate for (rate,) in by_epoch for _ in range(per_epoch)]
    assert max(abs(a - b) for a, (b,) in zip(found, smooth, strict=True)) / PEAK < 0.0065
    after = warmup * per_epoch
    assert max(abs(a - b) for a, b in zip(found[after:], of_deit[after:], strict=True)) / PEAK < 0.0075
    assert max(abs(a - b) for a, b in zip(found[:after], of_deit[:after], strict=True)) < PEAK / warmup
    assert math.isclose(sum(found), sum(of_deit), rel_tol=0.01)
