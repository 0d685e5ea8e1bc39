"""timm's and transformers' vision transformers as LaplaceViT, and back.

timm's names are those of its `deit3_*` models, which the fork of the paper's authors shares
(yuchongzhang/pytorch-image-models). facebookresearch/deit differs from them in the names of LayerScale alone.
"""

import functools
import math
import re

import torch
from torch import nn
from transformers import Dinov2ForImageClassification, Dinov2Model, ViTConfig, ViTForImageClassification, ViTModel
from transformers.utils import logging

from laplacian_heads.configuration import LaplaceViTConfig, pair
from laplacian_heads.laplacian import heads_by_layer
from laplacian_heads.modeling_laplace_vit import LaplaceViTForImageClassification, LaplaceViTModel
from laplacian_heads.weights import build

# timm's eps of LayerNorm and initial LayerScale, which no weights tell.
TIMM_EPS = 1e-6
TIMM_LAYER_SCALE = 1e-6
# A block's modules in timm and here, each with weight and bias.
BLOCK = {
    "norm1": "layernorm_before",
    "attn.proj": "attention.o_proj",
    "norm2": "layernorm_after",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
# timm's entry points by width, blocks and heads.
DEIT3 = {
    (384, 12, 6): "deit3_small_patch16_224",
    (512, 12, 8): "deit3_medium_patch16_224",
    (768, 12, 12): "deit3_base_patch16_224",
    (1024, 24, 16): "deit3_large_patch16_224",
    (1280, 32, 16): "deit3_huge_patch14_224",
}
# Fields that mean the same in ViT, Dinov2 and LaplaceViT.
SHARED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "hidden_dropout_prob"),
    *("attention_probs_dropout_prob", "layer_norm_eps", "initializer_range", "image_size", "patch_size"),
    *("num_channels", "qkv_bias", "id2label", "label2id", "problem_type"),
)
# What files of weights keep a state dict under; the weights that were trained come before their moving average.
WRAPPERS = ("model", "state_dict", "model_ema", "state_dict_ema")
# timm's names of interpolations and Pillow's numbers.
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
VIT_CLASSES = (ViTForImageClassification, ViTModel, Dinov2Model)
DINOV2 = {
    "encoder.layer.": "layers.",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".layer_scale1.": ".layer_scale_attention.",
    ".layer_scale2.": ".layer_scale_mlp.",
}

logger = logging.get_logger(__name__)


def from_timm(model, laplacian_heads=0, laplacian_share: float = 1.0):
    """A LaplaceViT with the weights of a vision transformer of timm.

    Without Laplacian heads it computes timm's function, at every size of images. With them it computes that of the
    authors' models, which timm itself has not: its attention is plain in every head.

    Args:
        model: a VisionTransformer of timm, which is not changed, or its name for `timm.create_model`, such as
            "deit3_small_patch16_224" or "hf-hub:OWNER/NAME", for which timm's weights are downloaded.
        laplacian_heads, laplacian_share: as in `LaplaceViTConfig`.

    Returns:
        A LaplaceViTForImageClassification, or for a model without classes a LaplaceViTModel, whose pooler_output is
        what timm's model returns; in evaluation mode, with weights of its own, in the dtype and on the device of the
        model. A position of the class token is added to the class token, which is the same function.

    Raises:
        ValueError: timm is not installed or has no such model, or the model has something that LaplaceViT cannot
            compute; the message names it, its value and what is allowed.

    Source: timm 1.0.31, `models/vision_transformer.py`.
    """
    if isinstance(model, str):
        model = timm_model(model)
    config = timm_config(model, laplacian_heads, laplacian_share)
    weights = model.state_dict()
    if not model.no_embed_class:
        weights["cls_token"] = weights["cls_token"] + weights["pos_embed"][:, :1]
        weights["pos_embed"] = weights["pos_embed"][:, 1:]
    return _laplace_vit(weights, config, bool(model.num_classes)).to(weights["cls_token"].device)


def to_timm(model):
    """timm's vision transformer from a LaplaceViT without Laplacian heads: the same function, in weights of its own.

    Args:
        model: a LaplaceViTForImageClassification, or a LaplaceViTModel, which becomes a model with 0 classes; it is not
            changed.

    Returns:
        The VisionTransformer that timm's entry point of the same width, blocks and heads makes, or
        `deit3_base_patch16_224` where there is none, with other sizes as its arguments; in evaluation mode, in the
        dtype and on the device of the model.

    Raises:
        ValueError: timm is not installed, or cannot compute the model: it has Laplacian heads, a mask token, dropout on
            the branches, another activation or another eps than timm's deit3 models.

    Source: timm 1.0.31, `models/deit.py`.
    """
    timm = import_timm()
    from timm.layers import DropPath

    check_laplace_vit(model)
    config = model.config
    check_for_timm(config)
    with_classifier = hasattr(model, "classifier")
    sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    scale = config.layer_scale_init_value
    made = timm.create_model(
        DEIT3.get(sizes, "deit3_base_patch16_224"),
        img_size=pair(config.image_size),
        patch_size=pair(config.patch_size),
        in_chans=config.num_channels,
        num_classes=config.num_labels if with_classifier else 0,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=_ratio(config.intermediate_size, config.hidden_size),
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        init_values=0.0 if scale is None else scale or TIMM_LAYER_SCALE,  # 0 is none; None would be the default
        attn_drop_rate=config.attention_probs_dropout_prob,
        drop_path_rate=config.drop_path_rate,
    )
    if config.drop_path_schedule == "constant" and config.drop_path_rate:
        for block in made.blocks:  # timm has no argument for it
            block.drop_path1, block.drop_path2 = (DropPath(config.drop_path_rate) for _ in range(2))
    made.load_state_dict(timm_weights(model))
    return made.to(device=model.device, dtype=model.dtype).eval()


def from_deit3_state_dict(state_dict: dict, laplacian_heads, num_heads: int | None = None):
    """A LaplaceViT from weights of DeiT-3: those of timm, of facebookresearch/deit or of the authors' fork.

    The weights do not tell which heads are Laplacian: the fork's `deit3_*_{k}L_*` have the last k of every layer, so
    that laplacian_heads is k. Neither do they tell the rates of drop path, which are 0 here.

    Args:
        state_dict: weights by name, or a dict with them under model, state_dict, model_ema or state_dict_ema, of which
            the first is read; a prefix `module.` or `_orig_mod.` is dropped.
        laplacian_heads: as in `LaplaceViTConfig`.
        num_heads: heads of a layer. None is what norms of queries tell, and else what DeiT-3 has: heads of the width
            64, and of 80 in the model of the width 1280.

    Returns:
        A LaplaceViTForImageClassification, or where there is no classifier a LaplaceViTModel, in evaluation mode, with
        weights of its own, in the widest dtype of the weights.

    Raises:
        ValueError: a weight is missing, unknown, of another shape than the others need, or no floating-point tensor, or
            num_heads is not possible or cannot be told.

    Source: facebookresearch/deit, `models_v2.py`; yuchongzhang/pytorch-image-models at b1a7cfd, `attention_mixed.py`.
    """
    weights = deit3_weights(state_dict)
    return _laplace_vit(weights, deit3_config(weights, laplacian_heads, num_heads), "head.weight" in weights)


def from_vit(model):
    """A LaplaceViT with 0 Laplacian heads from transformers' ViT or Dinov2, in weights of its own.

    The position of the class token is added to the class token. For images of image_size the function is the same; for
    others it is not: LaplaceViT interpolates positions as timm does, with antialiasing, transformers without. A pooler
    is left out with a warning: LaplaceViT's pooler_output is the class token after the final norm, as Dinov2's.

    Args:
        model: a ViTModel, a ViTForImageClassification or a Dinov2Model; it is not changed.

    Returns:
        A LaplaceViTForImageClassification of a ViTForImageClassification, else a LaplaceViTModel; in evaluation mode,
        in the dtype and on the device of the model.

    Raises:
        ValueError: the model is of another class, or has what LaplaceViT cannot compute: SwiGLU, Dinov2's dropout
            after the embeddings alone, or positions that Dinov2 interpolates for the size they are for.

    Source: transformers, `models/vit` and `models/dinov2`.
    """
    if type(model) is Dinov2ForImageClassification:
        raise ValueError(
            "The model is a Dinov2ForImageClassification, whose classifier reads also the mean of the patches; allowed "
            "is its dinov2, a Dinov2Model."
        )
    check_vit(model)
    name, config = type(model).__name__, model.config
    fields = {field: getattr(config, field) for field in SHARED if hasattr(config, field)}
    weights = model.state_dict()
    if name == "Dinov2Model":
        # Dinov2 drops after the embeddings alone, and takes every image that is not square to be of another size.
        height, _ = pair(config.image_size)
        _check(
            [
                ("use_swiglu_ffn", config.use_swiglu_ffn, False),
                ("hidden_dropout_prob", config.hidden_dropout_prob, 0),
                ("image_size", list(pair(config.image_size)), [height, height]),
            ]
        )
        fields |= {
            "intermediate_size": int(config.hidden_size * config.mlp_ratio),
            "layer_scale_init_value": config.layerscale_value,
            "drop_path_rate": config.drop_path_rate,
            "use_mask_token": config.use_mask_token,
        }
        for there, here in DINOV2.items():
            weights = {weight.replace(there, here): tensor for weight, tensor in weights.items()}
    else:
        mask = f"{'' if name == 'ViTModel' else 'vit.'}embeddings.mask_token" in weights
        fields |= {
            "intermediate_size": config.intermediate_size,
            "layer_scale_init_value": None,
            "use_mask_token": mask,
        }
        if any(weight.startswith("pooler.") for weight in weights):
            weights = {weight: tensor for weight, tensor in weights.items() if not weight.startswith("pooler.")}
            logger.warning(
                "ViTModel's pooler is left out, which LaplaceViT does not have: pooler_output is the class token after "
                "the final norm, and last_hidden_state is the same."
            )
    prefix = "vit." if name == "ViTForImageClassification" else ""
    weights = {weight: tensor.detach().clone() for weight, tensor in weights.items()}
    cls, position = f"{prefix}embeddings.cls_token", f"{prefix}embeddings.position_embeddings"
    weights[cls] = weights[cls] + weights[position][:, :1]
    weights[position] = weights[position][:, 1:].contiguous()
    mask_token = f"{prefix}embeddings.mask_token"
    if mask_token in weights:
        weights[mask_token] = weights[mask_token].reshape(1, 1, -1)  # Dinov2's is (1, width)
    made = build(_model_class(bool(prefix)), LaplaceViTConfig(**fields), weights, model.dtype)
    return made.to(model.device)


def to_vit(model) -> ViTForImageClassification | ViTModel:
    """transformers' ViT from a LaplaceViT without Laplacian heads: the same function in evaluation mode.

    LayerScale is multiplied into the projections before it, which rounds their weights, and the class token gets a
    position of zeros. Drop path, which ViT has not, is left out with a warning. For images of another size than
    image_size the function differs as `from_vit` says.

    Args:
        model: a LaplaceViTForImageClassification or a LaplaceViTModel; it is not changed.

    Returns:
        A ViTForImageClassification, or a ViTModel without a pooler, in evaluation mode, in the dtype and on the device
        of the model.

    Raises:
        ValueError: ViT cannot compute the model: it has Laplacian heads, norms of queries and keys, or a classifier
            and a mask token.

    Source: transformers, `models/vit`.
    """
    check_laplace_vit(model)
    config = model.config
    check_for_vit(config, with_classifier=hasattr(model, "classifier"))
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name in [name for name in weights if name.endswith(".lambda1")]:
        layer, scale = name.split(".layer_scale_")[0], weights.pop(name)
        last = f"{layer}.attention.o_proj" if "layer_scale_attention" in name else f"{layer}.mlp.fc2"
        weights[f"{last}.weight"] = weights[f"{last}.weight"] * scale[:, None]
        weights[f"{last}.bias"] = weights[f"{last}.bias"] * scale
    (position,) = [name for name in weights if name.endswith("position_embeddings")]
    weights[position] = nn.functional.pad(weights[position], (0, 0, 1, 0))
    if config.drop_path_rate:
        logger.warning(f"drop_path_rate {config.drop_path_rate} is left out: ViT has no drop path.")
    fields = {name: getattr(config, name) for name in SHARED if hasattr(config, name)}
    plain = ViTConfig(**fields, intermediate_size=config.intermediate_size)
    if hasattr(model, "classifier"):
        return build(ViTForImageClassification, plain, weights, model.dtype).to(model.device)
    made = ViTModel(plain, add_pooling_layer=False, use_mask_token=config.use_mask_token)
    made.load_state_dict(weights)
    return made.to(device=model.device, dtype=model.dtype).eval()


def check_vit(model) -> None:
    # The type in the config tells a model that `laplacianize` has changed.
    if type(model) not in VIT_CLASSES or model.config.model_type not in ("vit", "dinov2"):
        allowed = ", ".join(each.__name__ for each in VIT_CLASSES)
        raise ValueError(f"The model is a {type(model).__name__}, allowed are transformers' {allowed}.")


def check_laplace_vit(model) -> None:
    # By name: a model that was loaded with the code beside it has a class of that code.
    name, allowed = type(model).__name__, ("LaplaceViTForImageClassification", "LaplaceViTModel")
    if name not in allowed:
        raise ValueError(f"The model is a {name}, allowed are {' and '.join(allowed)}.")


def check_for_timm(config: LaplaceViTConfig) -> None:
    """Raise ValueError for what timm's deit3 models cannot compute."""
    _check_no_heads(config, "timm")
    for name, allowed in {
        "use_mask_token": False,
        "hidden_dropout_prob": 0,
        "hidden_act": "gelu",
        "layer_norm_eps": TIMM_EPS,
    }.items():
        if getattr(config, name) != allowed:
            raise ValueError(f"{name} is {getattr(config, name)!r}, allowed for timm's deit3 models is {allowed!r}.")


def check_for_vit(config: LaplaceViTConfig, with_classifier: bool) -> None:
    """Raise ValueError for what transformers' ViT cannot compute."""
    _check_no_heads(config, "transformers' ViT")
    if config.qk_norm:
        raise ValueError("qk_norm is True, allowed for transformers' ViT is False.")
    if config.use_mask_token and with_classifier:
        raise ValueError("use_mask_token is True, allowed for transformers' ViTForImageClassification is False.")


def _check_no_heads(config: LaplaceViTConfig, whose: str) -> None:
    layers = [config.num_attention_heads] * config.num_hidden_layers
    if any(heads_by_layer(config.laplacian_heads, layers)):
        raise ValueError(
            f"laplacian_heads is {config.laplacian_heads!r}, allowed is 0: {whose} has no Laplacian heads."
        )


def import_timm():
    """The module timm. Raises ValueError if it cannot be imported."""
    try:
        # It is in the extra [vision] and takes seconds to import: not for those who convert models of text.
        import timm
    except ImportError as error:
        raise ValueError(f"timm's models need {error.name}: pip install 'laplacian-heads[vision]'.") from None
    return timm


def timm_model(name: str, pretrained: bool = True):
    """A model by its name for `timm.create_model`. Raises ValueError if timm cannot make it with all of its weights."""
    timm = import_timm()
    try:
        model = timm.create_model(name, pretrained=pretrained).eval()
    except Exception as error:  # what is missing or damaged shows in many ways
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise ValueError(f"timm cannot make the model {name}: {said}.") from None
    classes = model.pretrained_cfg.get("num_classes")
    if pretrained and classes != model.num_classes:  # timm then draws a classifier at random
        raise ValueError(f"{name} has {model.num_classes} classes, allowed are those of its weights, {classes}.")
    return model


def timm_config(model, laplacian_heads=0, laplacian_share: float = 1.0) -> LaplaceViTConfig:
    """The configuration of what a model of timm becomes. Raises ValueError for what LaplaceViT cannot compute."""
    import_timm()
    _check(_timm_features(model))
    blocks, embed = model.blocks, model.patch_embed
    first = blocks[0]
    rate, schedule = _drop_path(blocks)
    label_names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    labels = {"num_labels": model.num_classes}
    if model.num_classes and isinstance(label_names, (list, tuple)) and len(label_names) == model.num_classes:
        labels = {"id2label": dict(enumerate(label_names)), "label2id": {name: i for i, name in enumerate(label_names)}}
    return LaplaceViTConfig(
        hidden_size=model.embed_dim,
        num_hidden_layers=len(blocks),
        num_attention_heads=first.attn.num_heads,
        intermediate_size=first.mlp.fc1.out_features,
        attention_probs_dropout_prob=first.attn.attn_drop.p,
        drop_path_rate=rate,
        drop_path_schedule=schedule,
        layer_scale_init_value=getattr(first.ls1, "init_values", None),
        qk_norm=isinstance(first.attn.q_norm, nn.LayerNorm),
        qkv_bias=first.attn.qkv.bias is not None,
        layer_norm_eps=first.norm1.eps,
        image_size=_short(embed.img_size),
        patch_size=_short(embed.patch_size),
        num_channels=embed.proj.in_channels,
        laplacian_heads=laplacian_heads,
        laplacian_share=laplacian_share,
        **labels,
    )


def _timm_features(model):
    """Of a model of timm (feature, value, *what is allowed), one after another: each stands on those before."""
    from timm.layers import Attention, LayerNorm, LayerScale, Mlp, PatchEmbed
    from timm.layers.activations import GELU
    from timm.models.vision_transformer import Block, VisionTransformer

    none, norms = nn.Identity, (nn.LayerNorm, LayerNorm)
    if hasattr(model, "dist_token"):
        raise ValueError(f"The model is a {type(model).__name__} with a distillation token, allowed is one without.")
    yield "The model", type(model), VisionTransformer
    yield "class_token", model.cls_token is not None, True
    yield "reg_tokens", model.num_reg_tokens, 0
    yield "pos_embed", "none" if model.pos_embed is None else "learn", "learn"
    yield "global_pool", model.global_pool, "token"
    yield "pre_norm", type(model.norm_pre) is not none, False
    yield "fc_norm", type(model.fc_norm) is not none, False
    yield "final_norm", type(model.norm) is not none, True
    yield "norm", type(model.norm), *norms
    yield "pos_drop_rate", model.pos_drop.p, 0
    yield "patch_drop_rate", getattr(model.patch_drop, "prob", 0), 0
    yield "drop_rate", model.head_drop.p, 0
    yield "patch_embed", type(model.patch_embed), PatchEmbed
    yield "patch_embed.norm", type(model.patch_embed.norm), none
    yield "dynamic_img_pad", model.patch_embed.dynamic_img_pad, False
    yield "head", type(model.head), nn.Linear if model.num_classes else none
    first = model.blocks[0]
    for i, block in enumerate(model.blocks):
        at = f"blocks.{i}"
        yield at, type(block), Block
        yield f"{at}.attn", type(block.attn), Attention
        yield f"{at}.mlp", type(block.mlp), Mlp
        yield f"{at}.attn.gate", block.attn.gate is not None, False
        yield f"{at}.attn.norm", type(block.attn.norm), none
        yield f"{at}.attn.attn_dim", block.attn.attn_dim, model.embed_dim
        yield f"{at}.attn.num_heads", block.attn.num_heads, first.attn.num_heads
        yield f"{at}.attn.attn_drop", block.attn.attn_drop.p, first.attn.attn_drop.p
        yield f"{at}.attn.proj_drop", block.attn.proj_drop.p, 0
        yield f"{at}.mlp.act", type(block.mlp.act), nn.GELU, GELU
        yield f"{at}.mlp.act.approximate", getattr(block.mlp.act, "approximate", "none"), "none"
        yield f"{at}.mlp.norm", type(block.mlp.norm), none
        yield f"{at}.mlp.drop1", block.mlp.drop1.p, 0
        yield f"{at}.mlp.drop2", block.mlp.drop2.p, 0
        yield f"{at}.mlp.fc1.out_features", block.mlp.fc1.out_features, first.mlp.fc1.out_features
        for norm in ("norm1", "norm2"):
            yield f"{at}.{norm}", type(getattr(block, norm)), *norms
        qk_norm = norms if isinstance(first.attn.q_norm, nn.LayerNorm) else (none,)
        scale = LayerScale if isinstance(first.ls1, LayerScale) else none
        for norm in ("q_norm", "k_norm"):
            yield f"{at}.attn.{norm}", type(getattr(block.attn, norm)), *qk_norm
        for name in ("ls1", "ls2"):
            yield f"{at}.{name}", type(getattr(block, name)), scale
    eps = model.norm.eps
    for name, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            yield f"{name}.eps", module.eps, eps
            yield f"{name}.elementwise_affine", module.elementwise_affine, True
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            with_bias = first.attn.qkv.bias is not None if name.endswith("qkv") else True
            yield f"{name}.bias", module.bias is not None, with_bias


def _check(features) -> None:
    """Raise ValueError for the first of (feature, value, *what is allowed) whose value is not allowed."""
    for feature, value, *allowed in features:
        if value not in allowed:
            value, *allowed = (each.__name__ if isinstance(each, type) else repr(each) for each in (value, *allowed))
            raise ValueError(f"{feature} is {value}, allowed for LaplaceViT is {' or '.join(dict.fromkeys(allowed))}.")


def _drop_path(blocks) -> tuple[float, str]:
    """Rate and schedule of drop path. Raises ValueError for rates that are neither constant nor linear."""
    rates = [getattr(block.drop_path1, "drop_prob", 0.0) for block in blocks]
    if rates != [getattr(block.drop_path2, "drop_prob", 0.0) for block in blocks]:
        raise ValueError("drop_path1 and drop_path2 have other rates, allowed for LaplaceViT is one rate for a block.")
    rate = round(rates[-1], 6)  # timm's are rounded to float32
    depths = {"constant": [1.0] * len(rates), "linear": [i / max(len(rates) - 1, 1) for i in range(len(rates))]}
    for schedule, depth in depths.items():
        if all(math.isclose(rate * at, each, abs_tol=1e-6) for at, each in zip(depth, rates, strict=True)):
            return rate, schedule
    raise ValueError(f"drop_path is {rates} by block, allowed for LaplaceViT are constant and linear rates.")


def _ratio(intermediate: int, width: int) -> float:
    """mlp_ratio, from which timm computes the width of the MLP by rounding the product down."""
    ratio = intermediate / width
    return ratio if int(width * ratio) == intermediate else math.nextafter(ratio, math.inf)


def _short(size: tuple[int, int]) -> int | list[int]:
    return size[0] if size[0] == size[1] else list(size)


def deit3_weights(state_dict: dict) -> dict[str, torch.Tensor]:
    """Weights by timm's names, out of the dict of a checkpoint. Raises ValueError for what holds no weights."""
    for key in WRAPPERS:
        if isinstance(state_dict, dict) and isinstance(state_dict.get(key), dict):
            state_dict = state_dict[key]
            break
    if not isinstance(state_dict, dict) or not state_dict:
        raise ValueError(f"The state dict is a {type(state_dict).__name__}, allowed is a dict of weights by name.")
    weights = {}
    for name, tensor in state_dict.items():
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta"
        if not isinstance(name, str) or not plain or not tensor.is_floating_point():
            what = tensor.dtype if plain else type(tensor).__name__
            raise ValueError(f"The weight {name!r} is {what}, allowed are tensors of floating-point numbers.")
        name = re.sub(r"^(?:module\.|_orig_mod\.)+", "", name)
        name = re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", name)  # facebookresearch/deit
        if name in weights:
            raise ValueError(f"The state dict has the weight {name} twice, with a prefix or another name and without.")
        weights[name] = tensor
    return weights


def deit3_config(weights: dict[str, torch.Tensor], laplacian_heads, num_heads: int | None = None) -> LaplaceViTConfig:
    """The configuration that weights of DeiT-3 belong to; they are checked to be all of its weights and no others."""
    for name, axes in {"patch_embed.proj.weight": 4, "pos_embed": 3, "blocks.0.mlp.fc1.weight": 2}.items():
        if name not in weights:
            raise ValueError(f"The state dict lacks the weight {name}, which DeiT-3 has.")
        if weights[name].ndim != axes:
            raise ValueError(f"The weight {name} has {weights[name].ndim} axes, allowed are {axes}.")
    width, channels, *patch = weights["patch_embed.proj.weight"].shape
    positions = weights["pos_embed"].shape[1]
    side = math.isqrt(positions)
    if side**2 != positions:
        raise ValueError(
            f"pos_embed has {positions} positions, allowed is a square number: DeiT-3's are for patches alone."
        )
    q_norm = weights.get("blocks.0.attn.q_norm.weight")
    if num_heads is None:
        # DeiT-3's H/14 has 16 heads of the width 80.
        head = q_norm.numel() if q_norm is not None else 80 if width == 1280 else 64
        if width % head:
            raise ValueError(f"num_heads is None, allowed for the width {width} is a divisor of it.")
        num_heads = width // head
    blocks = [re.match(r"blocks\.(\d+)\.", name) for name in weights]
    head = weights.get("head.weight")
    config = LaplaceViTConfig(
        hidden_size=width,
        num_hidden_layers=1 + max(int(match[1]) for match in blocks if match),
        num_attention_heads=num_heads,
        intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
        layer_scale_init_value=TIMM_LAYER_SCALE if "blocks.0.ls1.gamma" in weights else None,
        qk_norm=q_norm is not None,
        qkv_bias="blocks.0.attn.qkv.bias" in weights,
        layer_norm_eps=TIMM_EPS,
        image_size=_short((side * patch[0], side * patch[1])),
        patch_size=_short(patch),
        num_channels=channels,
        laplacian_heads=laplacian_heads,
        num_labels=0 if head is None else head.shape[0],
    )
    with torch.device("meta"):
        shapes = _model_class(head is not None)(config).state_dict()
    names = _names(config, head is not None)
    for name in weights:
        if name not in names:
            raise ValueError(
                f"The state dict has the weight {name}, which a LaplaceViT of {config.num_hidden_layers} blocks does "
                "not have."
            )
    for name, pieces in names.items():
        if name not in weights:
            raise ValueError(f"The state dict lacks the weight {name}.")
        first, *rest = shapes[pieces[0]].shape
        needed = (first * len(pieces), *rest)
        if tuple(weights[name].shape) != needed:
            raise ValueError(f"The weight {name} has the shape {tuple(weights[name].shape)}, the others need {needed}.")
    return config


def _names(config: LaplaceViTConfig, with_classifier: bool) -> dict[str, tuple[str, ...]]:
    """timm's names of all weights, and ours: attn.qkv is the queries', keys' and values' one under the other."""
    prefix = "vit." if with_classifier else ""
    modules = {"patch_embed.proj": "embeddings.patch_embeddings.projection", "norm": "layernorm"}
    names = {
        "cls_token": (f"{prefix}embeddings.cls_token",),
        "pos_embed": (f"{prefix}embeddings.position_embeddings",),
    }
    for i in range(config.num_hidden_layers):
        there, here = f"blocks.{i}", f"layers.{i}"
        modules |= {f"{there}.{theirs}": f"{here}.{ours}" for theirs, ours in BLOCK.items()}
        if config.qk_norm:
            modules |= {f"{there}.attn.{norm}": f"{here}.attention.{norm}" for norm in ("q_norm", "k_norm")}
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            names[f"{there}.attn.qkv.{kind}"] = tuple(f"{prefix}{here}.attention.{p}_proj.{kind}" for p in "qkv")
        if config.layer_scale_init_value is not None:
            names[f"{there}.ls1.gamma"] = (f"{prefix}{here}.layer_scale_attention.lambda1",)
            names[f"{there}.ls2.gamma"] = (f"{prefix}{here}.layer_scale_mlp.lambda1",)
    for kind in ("weight", "bias"):
        names |= {f"{there}.{kind}": (f"{prefix}{here}.{kind}",) for there, here in modules.items()}
        if with_classifier and config.num_labels:
            names[f"head.{kind}"] = (f"classifier.{kind}",)
    return names


def timm_weights(model) -> dict[str, torch.Tensor]:
    """Weights of a LaplaceViT by timm's names, in tensors of their own."""
    weights = model.state_dict()
    names = _names(model.config, hasattr(model, "classifier"))
    return {there: torch.cat([weights[name].detach() for name in here]) for there, here in names.items()}


def _laplace_vit(weights: dict[str, torch.Tensor], config: LaplaceViTConfig, with_classifier: bool):
    """The model with weights by timm's names."""
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in weights.values()))
    ours = {}
    for there, here in _names(config, with_classifier).items():
        pieces = weights[there].detach().chunk(len(here))
        ours |= {name: piece.to(dtype, copy=True) for name, piece in zip(here, pieces, strict=True)}
    return build(_model_class(with_classifier), config, ours, dtype)


def _model_class(with_classifier: bool) -> type:
    return LaplaceViTForImageClassification if with_classifier else LaplaceViTModel


def bit_processor(config: LaplaceViTConfig, crop: float, mean, std, resample: int = 3) -> dict:
    """preprocessor_config.json of transformers' BitImageProcessor, which does what timm's evaluation does.

    Args:
        config: of the model.
        crop: the side of the centre that is cut out, as a share of the image that was resized.
        mean, std: of each channel, of values from 0 to 1.
        resample: Pillow's number of the interpolation; 3 is bicubic.
    """
    height, width = pair(config.image_size)
    return {
        "image_processor_type": "BitImageProcessor",
        "do_convert_rgb": config.num_channels == 3,
        "do_resize": True,
        "size": {"shortest_edge": math.floor(max(height, width) / crop)},  # rounded as timm does
        "resample": resample,
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }


def timm_processor(model, config: LaplaceViTConfig) -> dict:
    """preprocessor_config.json for timm's pretrained_cfg of a model. Raises ValueError for another cropping."""
    from timm.data import resolve_model_data_config

    told = resolve_model_data_config(model)
    if told["crop_mode"] != "center":
        raise ValueError(f"crop_mode is {told['crop_mode']!r}, allowed for BitImageProcessor is 'center'.")
    if told["interpolation"] not in RESAMPLE:
        raise ValueError(f"interpolation is {told['interpolation']!r}, allowed are {', '.join(RESAMPLE)}.")
    resample = RESAMPLE[told["interpolation"]]
    return bit_processor(config, told["crop_pct"], told["mean"], told["std"], resample)


def timm_data_config(processor: dict, config: LaplaceViTConfig) -> dict:
    """timm's data configuration for a preprocessor_config.json. Raises ValueError for one that timm cannot express."""
    sides, size, cut = pair(config.image_size), processor.get("size"), processor.get("crop_size")
    size, cut = size if isinstance(size, dict) else {}, cut if isinstance(cut, dict) else {}
    names = {number: name for name, number in RESAMPLE.items()}
    if processor.get("resample", 3) not in names:
        raise ValueError(f"resample is {processor['resample']!r}, allowed for timm are {', '.join(map(str, names))}.")
    if processor.get("do_center_crop") and size.keys() == {"shortest_edge"} and cut == _sides(sides):
        share = max(sides) / size["shortest_edge"]
        # timm rounds side / crop_pct down, so the half keeps it clear of the next integer.
        share = 1.0 if share == 1 else round(max(sides) / (size["shortest_edge"] + 0.5), 5)
        crop = {"crop_pct": share, "crop_mode": "center"}
    elif not processor.get("do_center_crop") and size == _sides(sides):
        crop = {"crop_pct": 1.0, "crop_mode": "squash"}
    else:
        raise ValueError(
            f"preprocessor_config.json resizes to {size} and crops {cut}, allowed for timm is a shortest_edge and a "
            f"crop of {sides[0]} x {sides[1]}, or that size without a crop."
        )
    plain = not processor.get("do_normalize", True)
    channels = config.num_channels
    return {
        "input_size": (channels, *sides),
        "interpolation": names[processor.get("resample", 3)],
        "mean": (0.0,) * channels if plain else tuple(processor["image_mean"]),
        "std": (1.0,) * channels if plain else tuple(processor["image_std"]),
        **crop,
    }


def _sides(sides: tuple[int, int]) -> dict[str, int]:
    return {"height": sides[0], "width": sides[1]}
