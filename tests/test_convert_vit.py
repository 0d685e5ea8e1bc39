"""Conversion of vision transformers, held against timm's and transformers' own models."""

import argparse
import json
import os
import sys
from functools import partial

import pytest
import timm
import torch
import torchvision
import transformers
from reference import redraw
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock, VisionTransformer
from torch import nn
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    ViTModel,
)

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification, LaplaceViTModel, recipes
from laplacian_heads import weights as weights_file
from laplacian_heads.__main__ import main
from laplacian_heads.convert import (
    ConvertRecipe,
    convert,
    from_deit3_state_dict,
    from_timm,
    from_transformers,
    to_timm,
    to_transformers,
)

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 4, "num_classes": 10}
DEIT3 = {**SMALL, "no_embed_class": True, "init_values": 1e-6}
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
QK = pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])


def drawn(model, seed=0):
    """Every parameter drawn at random, of a size at which outputs are near 1 and each branch counts."""
    redraw(model, seed, std=1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "token" not in name and "pos" not in name:
                parameter *= parameter[0].numel() ** -0.5
            else:
                parameter *= 0.3
                if "norm" in name and name.endswith("weight"):
                    parameter += 1
    return model.eval()


def deit3(**changes):
    return drawn(VisionTransformer(**{**DEIT3, **changes}))


def laplace_vit(model_class=LaplaceViTForImageClassification, **changes):
    small = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return drawn(model_class(LaplaceViTConfig(**{**small, "num_labels": 10, **changes})))


def close(left, right, tolerance=1e-5):
    """Equal within a share of the largest number."""
    assert right.abs().max() > 0.1
    assert (left - right).abs().max() <= tolerance * right.abs().max()


def same_weights(left, right):
    left, right = left.state_dict(), right.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
        assert tensor.dtype == right[name].dtype


def refusal(function, *arguments, **keywords):
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the callers look at what it says
        function(*arguments, **keywords)
    said = str(refused.value)
    assert "\n" not in said
    assert said.endswith((".", ")."))
    return said


def ours_to_timm(name):
    """timm's name of a parameter of ours, and which of queries, keys and values it is; the reference for the map."""
    name = name.removeprefix("vit.").removeprefix("embeddings.")
    for ours, theirs in {
        "position_embeddings": "pos_embed",
        "patch_embeddings.projection": "patch_embed.proj",
        "layers.": "blocks.",
        "layernorm_before": "norm1",
        "layernorm_after": "norm2",
        "layernorm.": "norm.",
        "attention.": "attn.",
        "layer_scale_attn.lambda1": "ls1.gamma",
        "layer_scale_attention.lambda1": "ls1.gamma",
        "layer_scale_mlp.lambda1": "ls2.gamma",
        "o_proj": "proj",
        "classifier": "head",
    }.items():
        name = name.replace(ours, theirs)
    for i, part in enumerate("qkv"):
        if f"{part}_proj" in name:
            return name.replace(f"{part}_proj", "qkv"), i
    return name, None


def check_against_timm(theirs, images):
    """Logits within 1e-5 and gradients of all parameters within 1e-4; the largest differences."""
    ours = from_timm(theirs)
    there, here = theirs(images), ours(images).logits
    close(here, there)
    factors = torch.randn(there.shape, generator=torch.Generator().manual_seed(2))
    (there * factors).sum().backward()
    (here * factors).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    seen, worst = 0, 0.0
    for name, parameter in ours.named_parameters():
        name, part = ours_to_timm(name)
        expected = gradients[name] if part is None else gradients[name].chunk(3)[part]
        scale = gradients[name].abs().max()
        if name.endswith("k_norm.bias"):  # the same for all keys, which a softmax does not see: 0, and here rounding
            scale = gradients[name.replace("k_norm", "q_norm")].abs().max()
        assert scale > 0, name
        worst = max(worst, ((parameter.grad - expected).abs().max() / scale).item())
        seen += parameter.numel()
    assert worst <= 1e-4
    assert seen == sum(parameter.numel() for parameter in theirs.parameters())
    same_weights(to_timm(ours), theirs)
    return ours


# timm


@QK
@pytest.mark.parametrize("name", ["small", pytest.param("base", marks=pytest.mark.slow)])
def test_deit3_of_timm(name, qk_norm):
    theirs = drawn(timm.create_model(f"deit3_{name}_patch16_224", qk_norm=qk_norm))
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    ours = check_against_timm(theirs, images)
    sizes = {"small": (22_059_496, 22_062_568), "base": (86_585_320, 86_588_392)}
    assert ours.num_parameters() == sizes[name][qk_norm]


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"qk_norm": True}, {"init_values": None}, {"qkv_bias": False}, {"mlp_ratio": 2.7}, {"num_classes": 1}),
        *({"img_size": (16, 40)}, {"patch_size": (4, 16)}, {"in_chans": 1}, {"act_layer": "gelu"}),
    ],
    ids=str,
)
def test_every_small_shape_of_timm(changes):
    theirs = deit3(**changes)
    side = theirs.patch_embed.img_size
    ours = check_against_timm(theirs, torch.randn(3, theirs.in_chans, *side))
    assert ours.config.layer_scale_init_value == (None if "init_values" in changes else 1e-6)


@pytest.mark.parametrize("count", [0, 3, 12])
def test_parameters_do_not_depend_on_the_heads(count):
    with torch.device("meta"):
        cifar = timm.create_model("deit3_base_patch16_224", img_size=32, patch_size=4, num_classes=10)
        ours = LaplaceViTForImageClassification(LaplaceViTConfig.cifar(laplacian_heads=count))
        norms = LaplaceViTForImageClassification(LaplaceViTConfig.base(laplacian_heads=count, qk_norm=True))
    assert ours.num_parameters() == sum(each.numel() for each in cifar.parameters()) == 85_169_674
    assert norms.num_parameters() == 86_588_392
    heads = from_timm(deit3(), laplacian_heads=count // 3)
    assert heads.num_parameters() == sum(each.numel() for each in deit3().parameters())


def test_laplacian_heads_are_those_of_the_authors_fork():
    """Their attention (`attention_mixed.py`) with the last 3 of 4 heads Laplacian, in timm's model."""

    def mixed(self, x, **_):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        out = torch.softmax(q @ k.transpose(2, 3) * self.scale, dim=-1) @ v
        out = torch.cat([out[:, :1], v[:, 1:] - out[:, 1:]], dim=1)
        return self.proj(out.transpose(1, 2).flatten(2))

    theirs = deit3(qk_norm=True)
    converted = [from_timm(theirs, laplacian_heads=3), from_deit3_state_dict(theirs.state_dict(), 3)]
    plain = theirs(IMAGES)
    for block in theirs.blocks:
        block.attn.forward = partial(mixed, block.attn)
    expected = theirs(IMAGES)
    assert (expected - plain).abs().max() > 0.1
    for ours in converted:
        close(ours(IMAGES).logits, expected)
    assert from_timm(deit3(), 3, 0.5).config.laplacian_share == 0.5


@pytest.mark.parametrize("no_embed_class", [True, False])
def test_other_sizes_of_images(no_embed_class):
    theirs = deit3(no_embed_class=no_embed_class, dynamic_img_size=True)
    ours = from_timm(theirs)
    for side in ((32, 32), (16, 16), (24, 56), (64, 64)):
        images = torch.randn(2, 3, *side)
        close(ours(images).logits, theirs(images))
    fixed = deit3(no_embed_class=no_embed_class)
    ours = from_timm(fixed)
    for side in ((48, 48), (16, 64)):
        resized = deit3(no_embed_class=no_embed_class)
        resized.set_input_size(side)
        images = torch.randn(2, 3, *side)
        close(ours(images).logits, resized(images))
        again = from_timm(resized)
        assert again.config.image_size == (48 if side == (48, 48) else [16, 64])
        close(again(images).logits, resized(images))


def test_a_position_of_cls_is_added_to_it():
    theirs = deit3(no_embed_class=False)
    ours = from_timm(theirs)
    assert torch.equal(ours(IMAGES).logits, theirs(IMAGES))
    assert ours.vit.embeddings.position_embeddings.shape == (1, 16, 32)


def test_without_classes():
    theirs = deit3(num_classes=0)
    ours = from_timm(theirs)
    assert type(ours) is LaplaceViTModel
    close(ours(IMAGES).pooler_output, theirs(IMAGES))
    close(ours(IMAGES).last_hidden_state, theirs.forward_features(IMAGES))
    same_weights(to_timm(ours), theirs)
    identity = laplace_vit(num_labels=0)
    close(to_timm(identity)(IMAGES), identity(IMAGES).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_and_weights_of_its_own(dtype):
    theirs = deit3().to(dtype).train()
    ours = from_timm(theirs)
    again = to_timm(ours)
    assert ours.dtype == dtype
    assert not ours.training
    assert not again.training
    same_weights(again, theirs)
    with torch.no_grad():
        ours.vit.layers[0].attention.q_proj.weight.zero_()
        ours.vit.embeddings.cls_token.zero_()
    same_weights(again, theirs)


@pytest.mark.parametrize("schedule", ["linear", "constant"])
def test_drop_path(schedule):
    theirs = deit3(drop_path_rate=0.2)
    if schedule == "constant":
        for block in theirs.blocks:
            block.drop_path1 = block.drop_path2 = timm.layers.DropPath(0.2)
    ours = from_timm(theirs)
    assert (ours.config.drop_path_rate, ours.config.drop_path_schedule) == (0.2, schedule)
    again = to_timm(ours)
    for there, here in zip(theirs.blocks, again.blocks, strict=True):
        for name in ("drop_path1", "drop_path2"):
            rates = [getattr(getattr(block, name), "drop_prob", 0.0) for block in (there, here)]
            assert rates[0] == pytest.approx(rates[1])
    theirs.blocks[1].drop_path1 = theirs.blocks[1].drop_path2 = timm.layers.DropPath(0.15)
    assert "by block, allowed for LaplaceViT are constant and linear" in refusal(from_timm, theirs)
    theirs.blocks[1].drop_path1 = nn.Identity()
    assert "one rate for a block" in refusal(from_timm, theirs)
    assert from_timm(deit3(attn_drop_rate=0.1)).config.attention_probs_dropout_prob == 0.1


def test_names_of_classes():
    theirs = deit3()
    names = [f"class {i}" for i in range(10)]
    theirs.pretrained_cfg = {"label_names": names}
    config = from_timm(theirs).config
    assert [config.id2label[i] for i in range(10)] == names
    assert config.label2id["class 3"] == 3


class OtherPatchEmbed(timm.layers.PatchEmbed):
    pass


REFUSED = {
    "class_token is False": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "reg_tokens is 4, allowed for LaplaceViT is 0": {"reg_tokens": 4},
    "pos_embed is 'none'": {"pos_embed": "none"},
    "global_pool is 'avg', allowed for LaplaceViT is 'token'": {"global_pool": "avg"},
    "global_pool is 'map'": {"global_pool": "map"},
    "pre_norm is True": {"pre_norm": True},
    "fc_norm is True": {"fc_norm": True},
    "final_norm is False": {"final_norm": False},
    "norm is RmsNorm, allowed for LaplaceViT is LayerNorm": {"norm_layer": "rmsnorm"},
    "pos_drop_rate is 0.1, allowed for LaplaceViT is 0": {"pos_drop_rate": 0.1},
    "patch_drop_rate is 0.25": {"patch_drop_rate": 0.25},
    "drop_rate is 0.1": {"drop_rate": 0.1},
    "attn.proj_drop is 0.1": {"proj_drop_rate": 0.1},
    "patch_embed.norm is LayerNorm": {"embed_norm_layer": "layernorm"},
    "patch_embed is OtherPatchEmbed": {"embed_layer": OtherPatchEmbed},
    "dynamic_img_pad is True": {"dynamic_img_pad": True},
    "blocks.0 is ResPostBlock, allowed for LaplaceViT is Block": {"block_fn": ResPostBlock},
    "blocks.0 is ParallelScalingBlock": {"block_fn": ParallelScalingBlock},
    "blocks.0.attn is DiffAttention": {"attn_layer": "diff"},
    "blocks.0.attn.gate is True": {"attn_layer": partial(timm.layers.Attention, gated=True)},
    "blocks.0.attn.attn_dim is 64": {"attn_layer": partial(timm.layers.Attention, attn_head_dim=16)},
    "blocks.0.attn.norm is LayerNorm": {"scale_attn_norm": True},
    "blocks.0.mlp.norm is LayerNorm": {"scale_mlp_norm": True},
    "blocks.0.mlp is SwiGLU": {"mlp_layer": timm.layers.SwiGLU},
    "blocks.0.mlp.act is ReLU, allowed for LaplaceViT is GELU": {"act_layer": nn.ReLU},
    "approximate is 'tanh', allowed for LaplaceViT is 'none'": {"act_layer": partial(nn.GELU, approximate="tanh")},
    "attn.proj.bias is False": {"proj_bias": False},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_laplace_vit_cannot_compute_is_refused(said):
    changes = dict(REFUSED[said])
    wrapped = changes.get("attn_layer")
    if isinstance(wrapped, partial):  # timm wants a class

        class Attention(timm.layers.Attention):
            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, **keywords, **wrapped.keywords)

        model = VisionTransformer(**{**DEIT3, "attn_layer": Attention})
        for block in model.blocks:
            block.attn.__class__ = timm.layers.Attention
    else:
        model = VisionTransformer(**{**DEIT3, **changes})
    assert said in refusal(from_timm, model)


def test_models_of_timm_that_are_no_plain_ones_are_refused():
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", depth=1)
    assert "with a distillation token, allowed is one without" in refusal(from_timm, distilled)
    for name in ("eva02_tiny_patch14_224", "resnet10t"):
        assert "allowed for LaplaceViT is VisionTransformer" in refusal(from_timm, timm.create_model(name))
    assert "The model is Linear" in refusal(from_timm, nn.Linear(2, 2))
    assert "timm cannot make the model no_such_model: Unknown model" in refusal(from_timm, "no_such_model")
    model = deit3()
    model.blocks[1].norm2.eps = 1e-3
    assert "blocks.1.norm2.eps is 0.001" in refusal(from_timm, model)
    model = deit3()
    model.blocks[2].attn.num_heads = 2
    assert "blocks.2.attn.num_heads is 2, allowed for LaplaceViT is 4" in refusal(from_timm, model)
    model = deit3()
    model.blocks[2].ls2 = nn.Identity()
    assert "blocks.2.ls2 is Identity" in refusal(from_timm, model)
    assert "laplacian_heads: the count is 5" in refusal(from_timm, deit3(), 5)


def test_a_name_of_timm(monkeypatch):
    made, theirs = [], deit3()
    theirs.pretrained_cfg = {"num_classes": 10}
    monkeypatch.setattr(timm, "create_model", lambda *args, **more: made.append((args, more)) or theirs)
    close(from_timm("deit3_small_patch16_224", 0)(IMAGES).logits, theirs(IMAGES))
    assert made == [(("deit3_small_patch16_224",), {"pretrained": True})]
    theirs.pretrained_cfg["num_classes"] = 1000
    assert "has 10 classes, allowed are those of its weights, 1000" in refusal(from_timm, "deit3_small_patch16_224")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"laplacian_heads": 1}, "laplacian_heads is 1, allowed is 0: timm has no Laplacian heads"),
        ({"laplacian_heads": [[], [2], []]}, "allowed is 0"),
        ({"use_mask_token": True}, "use_mask_token is True"),
        ({"hidden_dropout_prob": 0.1}, "hidden_dropout_prob is 0.1, allowed for timm's deit3 models is 0"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12, allowed for timm's deit3 models is 1e-06"),
    ],
)
def test_what_timm_cannot_compute_is_refused(changes, said):
    assert said in refusal(to_timm, laplace_vit(**changes))


def test_only_a_laplace_vit_goes_to_timm():
    assert "The model is a ViTModel, allowed are LaplaceViTForImageClassification" in refusal(to_timm, vit(ViTModel))
    assert "The model is a Linear" in refusal(to_timm, nn.Linear(2, 2))


@pytest.mark.parametrize("width", [32, 36, 384, 768, 1280])
def test_every_width_of_the_mlp_goes_to_timm(width):
    from laplacian_heads.deit import _ratio

    assert all(int(width * _ratio(size, width)) == size for size in range(1, 6 * width))


def test_without_timm(monkeypatch, capsys, tmp_path):
    laplace_vit().save_pretrained(tmp_path / "ours")
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "out"), "to=timm"]) == 1
    assert "timm's models need timm: pip install 'laplacian-heads[vision]'." in capsys.readouterr().err


# State dicts of DeiT-3 and of the authors' fork


WRAPPERS = {
    "bare": lambda weights: weights,
    "model": lambda weights: {"model": weights},
    "state_dict": lambda weights: {"epoch": 3, "state_dict": weights, "state_dict_ema": {"other": 1}},
    "state_dict_ema": lambda weights: {"state_dict_ema": weights},
    "module": lambda weights: {"model": {f"module.{name}": tensor for name, tensor in weights.items()}},
    "compiled": lambda weights: {f"_orig_mod.{name}": tensor for name, tensor in weights.items()},
    "facebookresearch": lambda weights: {
        "model": {
            name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): weights[name] for name in weights
        }
    },
}


@QK
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_dicts(wrapper, qk_norm):
    theirs = deit3(qk_norm=qk_norm, embed_dim=64, num_heads=4 if qk_norm else 1)
    ours = from_deit3_state_dict(WRAPPERS[wrapper](theirs.state_dict()), 0)
    assert ours.config.to_dict() == from_timm(theirs).config.to_dict()
    close(ours(IMAGES).logits, theirs(IMAGES))
    same_weights(to_timm(ours), theirs)


def test_heads_of_a_state_dict():
    theirs = deit3(embed_dim=64)
    ours = from_deit3_state_dict(theirs.state_dict(), [[0], [], [1, 3]], num_heads=4)
    assert ours.config.laplacian_heads == [[0], [], [1, 3]]
    close(from_deit3_state_dict(theirs.state_dict(), 0, 4)(IMAGES).logits, theirs(IMAGES))
    huge = deit3(embed_dim=1280, depth=1, num_heads=16).state_dict()
    assert from_deit3_state_dict(huge, 0).config.num_attention_heads == 16
    narrow = deit3().state_dict()
    assert "num_heads is None, allowed for the width 32" in refusal(from_deit3_state_dict, narrow, 0)
    assert "num_attention_heads is 5" in refusal(from_deit3_state_dict, narrow, 0, 5)
    normed = deit3(qk_norm=True).state_dict()
    assert "q_norm.weight has the shape (8,)" in refusal(from_deit3_state_dict, normed, 0, 2)
    assert "laplacian_heads: the count is 9" in refusal(from_deit3_state_dict, normed, 9)
    features = {name: tensor for name, tensor in normed.items() if not name.startswith("head")}
    assert type(from_deit3_state_dict(features, 2)) is LaplaceViTModel


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dist_token": torch.ones(1, 1, 32)}, "has the weight dist_token, which a LaplaceViT of 3 blocks does not"),
        ({"blocks.1.attn.norm.weight": torch.ones(32)}, "has the weight blocks.1.attn.norm.weight"),
        ({"blocks.1.mlp.fc3.weight": torch.ones(32)}, "has the weight blocks.1.mlp.fc3.weight"),
        ({"reg_token": torch.ones(1, 4, 32)}, "has the weight reg_token"),
        ({"cls_token": None}, "lacks the weight cls_token"),
        ({"pos_embed": None}, "lacks the weight pos_embed"),
        ({"blocks.1.ls2.gamma": None}, "lacks the weight blocks.1.ls2.gamma"),
        ({"head.bias": None}, "lacks the weight head.bias"),
        ({"pos_embed": torch.ones(1, 17, 32)}, "pos_embed has 17 positions, allowed is a square number"),
        ({"pos_embed": torch.ones(16, 32)}, "pos_embed has 2 axes, allowed are 3"),
        ({"blocks.1.attn.qkv.weight": torch.ones(32, 32)}, "has the shape (32, 32), the others need (96, 32)"),
        ({"norm.weight": torch.ones(32, dtype=torch.int8)}, "'norm.weight' is torch.int8"),
        ({"norm.weight": 3}, "'norm.weight' is int"),
        ({"norm.weight": torch.ones(32, device="meta")}, "'norm.weight' is"),
        ({"module.norm.weight": torch.ones(32)}, "has the weight norm.weight twice"),
        ({"blocks.0.gamma_1": torch.ones(32)}, "has the weight blocks.0.ls1.gamma twice"),
    ],
)
def test_other_state_dicts_are_refused(changes, said):
    weights = {**deit3(qk_norm=True).state_dict(), **changes}
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    assert said in refusal(from_deit3_state_dict, weights, 0)
    for empty in ({}, [], {"model": {}}):
        assert "allowed is a dict of weights by name" in refusal(from_deit3_state_dict, empty, 0)


# transformers


def vit(model_class=ViTForImageClassification, config_class=ViTConfig, arguments=None, **changes):
    small = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    if config_class is ViTConfig:
        small["intermediate_size"] = 48
    return drawn(model_class(config_class(**{**small, "num_labels": 10, **changes}), **(arguments or {})))


dinov2 = partial(vit, Dinov2Model, Dinov2Config)


def no_pooler(**changes):
    return vit(ViTModel, arguments={"add_pooling_layer": False, "use_mask_token": True}, **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"qkv_bias": False}, {"hidden_act": "relu"}, {"hidden_dropout_prob": 0.1}], ids=str
)
@pytest.mark.parametrize("make", [vit, no_pooler])
def test_vit_and_back(make, changes):
    theirs = make(**changes, id2label={i: f"class {i}" for i in range(10)})
    ours = from_transformers(theirs)
    again = to_transformers(ours)
    assert type(again) is type(theirs)
    assert ours.config.id2label == again.config.id2label == theirs.config.id2label
    assert ours.config.layer_norm_eps == 1e-12
    for model in (ours, again):
        left, right = model(IMAGES), theirs(IMAGES)
        assert torch.equal(left[0], right[0])
    fields = {name: value for name, value in theirs.config.to_dict().items() if name not in ("architectures", "dtype")}
    assert {name: again.config.to_dict()[name] for name in fields} == fields
    if make is no_pooler:
        masked = torch.rand(2, 16) > 0.5
        close(ours(IMAGES, masked)[0], theirs(IMAGES, masked)[0])
    else:
        rectangle = vit(image_size=(16, 32))
        images = torch.randn(2, 3, 16, 32)
        close(from_transformers(rectangle)(images).logits, rectangle(images).logits)


def test_a_pooler_is_left_out_with_a_warning(monkeypatch):
    warned = []
    monkeypatch.setattr("laplacian_heads.deit.logger.warning", warned.append)
    theirs = vit(ViTModel)
    ours = from_transformers(theirs)
    assert torch.equal(ours(IMAGES).last_hidden_state, theirs(IMAGES).last_hidden_state)
    assert "pooler is left out" in warned[0]
    drops = laplace_vit(drop_path_rate=0.2, layer_scale_init_value=None)
    to_transformers(drops)
    assert "drop_path_rate 0.2 is left out" in warned[1]


@pytest.mark.parametrize("changes", [{}, {"mlp_ratio": 2, "drop_path_rate": 0.1, "use_mask_token": False}], ids=str)
def test_dinov2(changes):
    theirs = dinov2(**changes)
    ours = from_transformers(theirs)
    assert type(ours) is LaplaceViTModel
    assert torch.equal(ours(IMAGES).last_hidden_state, theirs(IMAGES).last_hidden_state)
    assert torch.equal(ours(IMAGES).pooler_output, theirs(IMAGES).pooler_output)
    assert ours.config.drop_path_rate == changes.get("drop_path_rate", 0)
    if not changes:
        masked = torch.rand(2, 16) > 0.5
        close(ours(IMAGES, masked)[0], theirs(IMAGES, bool_masked_pos=masked)[0])
        larger = torch.randn(2, 3, 64, 64)  # as the docstring says
        assert (ours(larger)[0] - theirs(larger)[0]).abs().max() > 1e-3


def test_layer_scale_goes_into_the_projections():
    for model in (laplace_vit(), laplace_vit(LaplaceViTModel, use_mask_token=True)):
        plain = to_transformers(model)
        close(plain(IMAGES)[0], model(IMAGES)[0])
        assert not hasattr(plain.config, "layer_scale_init_value")


@pytest.mark.parametrize(
    ("function", "make", "said"),
    [
        (to_transformers, partial(laplace_vit, laplacian_heads=1), "allowed is 0: transformers' ViT has no Laplacian"),
        (
            to_transformers,
            partial(laplace_vit, qk_norm=True),
            "qk_norm is True, allowed for transformers' ViT is False",
        ),
        (to_transformers, partial(laplace_vit, use_mask_token=True), "use_mask_token is True"),
        (from_transformers, partial(dinov2, use_swiglu_ffn=True), "use_swiglu_ffn is True, allowed for LaplaceViT is"),
        (from_transformers, partial(dinov2, hidden_dropout_prob=0.1), "hidden_dropout_prob is 0.1"),
        (from_transformers, partial(dinov2, image_size=(16, 32)), "image_size is [16, 32], allowed"),
        (
            from_transformers,
            partial(vit, Dinov2ForImageClassification, Dinov2Config),
            "whose classifier reads also the mean of the patches",
        ),
        (
            from_transformers,
            partial(vit, ViTForMaskedImageModeling, encoder_stride=8),
            "is a ViTForMaskedImageModeling",
        ),
        (
            from_transformers,
            partial(vit, transformers.Dinov2WithRegistersModel, transformers.Dinov2WithRegistersConfig),
            "is a Dinov2WithRegistersModel, allowed is transformers' NanoChat",
        ),
        (from_transformers, laplace_vit, "is a LaplaceViTForImageClassification, allowed is transformers'"),
    ],
)
def test_what_has_no_counterpart_in_transformers_is_refused(function, make, said):
    assert said in refusal(function, make())


def test_a_laplacianized_vit_is_refused():
    from laplacian_heads import laplacianize

    model = vit()
    laplacianize(model, laplacian_heads=1)
    refusal(from_transformers, model)


# The verb


def run(source, output, dry_run=False, **keys):
    convert(recipes.load(ConvertRecipe, "convert", {"source": str(source), "output": str(output), **keys}), dry_run)


def timm_folder(folder, **changes):
    """A folder of timm's save_for_hf."""
    model = drawn(timm.create_model("deit3_small_patch16_224", **{**DEIT3, **changes}))
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return model


def test_timm_there_and_back(tmp_path, capsys):
    theirs = timm_folder(tmp_path / "theirs")
    assert main(["convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back"), "to=timm"]) == 0
    said = capsys.readouterr().out
    assert said.count("converted back, are the source's bit for bit") == 2
    assert "logits for 2 random images are finite and those of the source within" in said
    assert "images of 32 x 32, patches of 8 x 8, 10 classes" in said
    same_weights(timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True), theirs)
    ours = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    close(ours(IMAGES).logits, theirs(IMAGES))
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours", "back"}


def pixels(folder, image):
    return transformers.AutoImageProcessor.from_pretrained(folder)(image, return_tensors="pt").pixel_values


@pytest.mark.parametrize("crop", [0.9, 1.0, 0.875])
def test_the_image_processor_is_timms(tmp_path, crop):
    model = drawn(timm.create_model("deit3_small_patch16_224", **{**DEIT3, "img_size": 112, "num_classes": 7}))
    data = {"crop_pct": crop, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "input_size": (3, 112, 112)}
    timm.models.save_for_hf(model, tmp_path / "theirs", safe_serialization=True, data_config=data)
    run(tmp_path / "theirs", tmp_path / "ours")
    told = json.loads((tmp_path / "ours/preprocessor_config.json").read_text())
    assert (told["size"], told["crop_size"]) == ({"shortest_edge": int(112 / crop)}, {"height": 112, "width": 112})
    assert (told["resample"], told["image_processor_type"]) == (3, "BitImageProcessor")
    run(tmp_path / "ours", tmp_path / "back", to="timm")
    image = torchvision.transforms.functional.to_pil_image(torch.rand(3, 150, 180))
    results = []
    for name in ("theirs", "back"):
        model = timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True)
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
        results.append(transform(image))
    assert torch.equal(*results)
    here = pixels(tmp_path / "ours", image)[0]
    assert (here - results[0]).abs().mean() < 0.01  # another implementation of the same resizing


def test_laplacian_heads_from_timm_and_from_files(tmp_path, capsys):
    theirs = timm_folder(tmp_path / "theirs", embed_dim=64, num_heads=1, no_embed_class=False)
    run(tmp_path / "theirs", tmp_path / "plain")
    assert "weights are those of the converted model bit for bit" in capsys.readouterr().out
    run(tmp_path / "theirs", tmp_path / "heads", laplacian_heads=1)
    assert "those of the converted model, as timm has no Laplacian heads" in capsys.readouterr().out
    assert LaplaceViTForImageClassification.from_pretrained(tmp_path / "heads").config.laplacian_heads == 1
    assert "allowed is 0" in refusal(run, tmp_path / "heads", tmp_path / "x", to="timm")
    assert "allowed is 0" in refusal(run, tmp_path / "heads", tmp_path / "x", to="transformers")
    close(LaplaceViTForImageClassification.from_pretrained(tmp_path / "plain")(IMAGES).logits, theirs(IMAGES))


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "pt"])
def test_a_file_of_weights(tmp_path, capsys, suffix):
    theirs = deit3(qk_norm=True)
    path = tmp_path / f"deit3.{suffix}"
    if suffix == "safetensors":
        save_file(theirs.state_dict(), path)
    else:
        torch.save({"model": theirs.state_dict(), "epoch": 3}, path)
    assert "laplacian_heads is null, allowed for" in refusal(run, path, tmp_path / "out")
    run(path, tmp_path / "out", laplacian_heads=0)
    assert "weights, converted back, are the source's bit for bit" in capsys.readouterr().out
    ours = LaplaceViTForImageClassification.from_pretrained(tmp_path / "out")
    close(ours(IMAGES).logits, theirs(IMAGES))
    told = json.loads((tmp_path / "out/preprocessor_config.json").read_text())
    assert told["size"] == {"shortest_edge": 32}
    run(path, tmp_path / "heads", laplacian_heads=[0, 1, 4], to="laplace_vit")
    close(
        LaplaceViTForImageClassification.from_pretrained(tmp_path / "heads")(IMAGES).logits,
        from_timm(theirs, [0, 1, 4])(IMAGES).logits,
    )


class Call:
    """Pickled, it calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_files_with_code_and_damaged_ones_are_refused(tmp_path):
    path, canary, out = tmp_path / "w.pth", tmp_path / "canary", tmp_path / "out"
    weights = deit3().state_dict()
    for more in (
        Call(os.system, f"touch {canary}"),
        Call(eval, f"open({str(canary)!r}, 'w')"),
    ):
        torch.save({"model": weights, "more": more}, path)
        assert "code that weights do not need; nothing of it was run" in refusal(run, path, out)
    for content in (b"", b"text"):
        for name in ("w.pth", "w.safetensors"):
            (tmp_path / name).write_bytes(content)
            assert "is no file of weights" in refusal(run, tmp_path / name, out)
    save_file(weights, tmp_path / "theirs.safetensors")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text('{"architecture": "deit3_small_patch16_224"}')
    torch.save({"model": weights, "more": Call(os.system, f"touch {canary}")}, tmp_path / "theirs/pytorch_model.bin")
    assert "timm cannot make the model" in refusal(run, tmp_path / "theirs", out)
    assert not canary.exists()
    assert not out.exists()
    # What timm's and DeiT's training scripts save beside the weights.
    torch.save({"state_dict": weights, "args": argparse.Namespace(lr=1e-3)}, path)
    assert weights_file.read(path)["args"].lr == 1e-3


@pytest.mark.parametrize(
    "make", [vit, partial(vit, ViTModel), partial(vit, ViTModel, arguments={"add_pooling_layer": False}), dinov2]
)
def test_transformers_by_the_verb(tmp_path, capsys, make):
    theirs = make()
    theirs.save_pretrained(tmp_path / "theirs")
    processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
    processor |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (tmp_path / "theirs/preprocessor_config.json").write_text(json.dumps(processor))
    run(tmp_path / "theirs", tmp_path / "ours")
    said = capsys.readouterr().out
    assert "interpolates positions with antialiasing" in said
    assert ("pooler is left out" in said) == hasattr(getattr(theirs, "pooler", None), "dense")
    assert json.loads((tmp_path / "ours/preprocessor_config.json").read_text()) == processor
    run(tmp_path / "ours", tmp_path / "back", to="transformers")
    if make is vit:
        assert "eps is 1e-12, allowed for timm" in refusal(run, tmp_path / "ours", tmp_path / "x", to="timm")
    arguments = {"add_pooling_layer": False} if make is not vit else {}
    model_class = ViTForImageClassification if make is vit else ViTModel
    again = model_class.from_pretrained(tmp_path / "back", **arguments)
    expected = theirs(IMAGES)
    close(again(IMAGES)[0], expected[0])
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "ours", "back"}


def test_laplace_vit_by_the_verb(tmp_path, capsys):
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        ours = laplace_vit(id2label={i: f"class {i}" for i in range(10)}, drop_path_rate=0.1).to(dtype)
        ours.save_pretrained(folder / "ours")
        run(folder / "ours", folder / "timm", to="timm")
        run(folder / "ours", folder / "transformers", to="transformers")
        assert "no image processor was written" in capsys.readouterr().out
        assert json.loads((folder / "timm/config.json").read_text())["label_names"][3] == "class 3"
        theirs = timm.create_model(f"local-dir:{folder / 'timm'}", pretrained=True)
        close(theirs(IMAGES), ours.float()(IMAGES).logits)
        run(folder / "timm", folder / "again")
        again = LaplaceViTForImageClassification.from_pretrained(folder / "again")
        assert again.config.id2label == ours.config.id2label


@pytest.mark.parametrize(
    "changes",
    [{"layer_scale_init_value": None}, {"qk_norm": True}, {"image_size": [16, 40]}, {"intermediate_size": 50}],
    ids=str,
)
def test_every_shape_goes_to_timm_by_the_verb(tmp_path, changes):
    ours = laplace_vit(**changes)
    ours.save_pretrained(tmp_path / "ours")
    run(tmp_path / "ours", tmp_path / "timm", to="timm")
    run(tmp_path / "timm", tmp_path / "again")
    same_weights(LaplaceViTForImageClassification.from_pretrained(tmp_path / "again"), ours)


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    timm_folder(tmp_path / "theirs")
    vit().save_pretrained(tmp_path / "vit")
    torch.save(deit3(qk_norm=True).state_dict(), tmp_path / "w.pth")
    before = sorted(tmp_path.rglob("*"))
    run(tmp_path / "theirs", tmp_path / "out", True)
    run(tmp_path / "vit", tmp_path / "out", True)
    run(tmp_path / "w.pth", tmp_path / "out", True, laplacian_heads=2)
    run("timm:deit3_small_patch16_224", tmp_path / "out", True)  # without its weights
    assert "timm:deit3_small_patch16_224 (timm's vision transformer) to" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_of_timm_by_the_verb(tmp_path, monkeypatch):
    make = timm.create_model

    def made(name, pretrained=False, **arguments):
        assert (name, pretrained) == ("deit3_small_patch16_224", True)
        return drawn(make(name, depth=1, **arguments))

    monkeypatch.setattr(timm, "create_model", made)
    run("timm:deit3_small_patch16_224", tmp_path / "out")
    told = json.loads((tmp_path / "out/preprocessor_config.json").read_text())
    assert (told["size"], told["crop_size"]["height"]) == ({"shortest_edge": 248}, 224)


def test_wrong_keys_and_folders(tmp_path):
    timm_folder(tmp_path / "theirs")
    laplace_vit().save_pretrained(tmp_path / "ours")
    vit().save_pretrained(tmp_path / "vit")
    vit(ViTForMaskedImageModeling, encoder_stride=8).save_pretrained(tmp_path / "masked")
    torch.save(deit3().state_dict(), tmp_path / "w.pth")
    (tmp_path / "wrapped").mkdir()
    (tmp_path / "wrapped/config.json").write_text('{"model_type": "timm_wrapper", "architecture": "resnet18"}')
    before = sorted(tmp_path.rglob("*"))
    for source, keys, said in (
        ("ours", {}, "to is null, and"),
        ("ours", {}, "is a LaplaceViT; allowed are timm and transformers"),
        ("ours", {"to": "laplace_vit"}, "is already; allowed are timm and transformers"),
        ("ours", {"to": "nanochat"}, "allowed are timm and transformers"),
        ("ours", {"to": "timm", "laplacian_heads": 1}, "laplacian_heads is 1, allowed is null"),
        ("ours", {"to": "timm", "tokenizer": "t"}, "tokenizer is t, allowed is null"),
        ("ours", {"to": "timm", "step": 1}, "step is 1, allowed is null"),
        ("vit", {"to": "transformers"}, "allowed is laplace_vit"),
        ("vit", {"laplacian_heads": 1}, "laplacian_heads is 1, allowed is null"),
        ("theirs", {"to": "transformers"}, "is timm's vision transformer; allowed is laplace_vit"),
        ("theirs", {"laplacian_heads": 9}, "laplacian_heads: the count is 9"),
        ("w.pth", {}, "num_heads is None, allowed for the width 32"),
        ("w.pth", {"to": "laplace_gpt"}, "is DeiT-3's weights; allowed is laplace_vit"),
        ("masked", {}, "is a ViTForMaskedImageModeling by its config.json, allowed are"),
        ("wrapped", {}, "is a timm_wrapper, allowed are"),
        ("w.pth/x", {}, "there is no folder"),
    ):
        assert said in refusal(run, tmp_path / source, tmp_path / "out", **keys)
    assert "timm cannot make the model no_such: Unknown" in refusal(run, "timm:no_such", tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_is_left_after_a_failure(tmp_path, monkeypatch):
    theirs = timm_folder(tmp_path / "theirs")
    read = LaplaceViTForImageClassification.from_pretrained

    def flipped(*arguments, **keywords):
        model, info = read(*arguments, **keywords)
        if arguments[0] is not None:
            with torch.no_grad():
                model.vit.layers[1].mlp.fc1.weight[0, 0] *= -1
        return model, info

    with monkeypatch.context() as patch:
        patch.setattr(LaplaceViTForImageClassification, "from_pretrained", flipped)
        assert "blocks.1.mlp.fc1.weight is not the source's" in refusal(run, tmp_path / "theirs", tmp_path / "out")
    with torch.no_grad():
        theirs.head.bias[0] = torch.nan
    timm.models.save_for_hf(theirs, tmp_path / "nan", safe_serialization=True)
    assert "The logits are not finite" in refusal(run, tmp_path / "nan", tmp_path / "out")
    weights = load_file(tmp_path / "theirs/model.safetensors")
    del weights["norm.bias"]
    save_file(weights, tmp_path / "theirs/model.safetensors")
    assert "timm cannot make the model" in refusal(run, tmp_path / "theirs", tmp_path / "out")
    ours = laplace_vit()
    state = ours.state_dict()
    del state["vit.layernorm.weight"]
    ours.save_pretrained(tmp_path / "ours", state_dict=state)
    assert "vit.layernorm.weight missing" in refusal(run, tmp_path / "ours", tmp_path / "out", to="timm")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "nan", "ours"}
