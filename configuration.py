"""Configurations of the project's models."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import NanoChatConfig, PreTrainedConfig
from transformers.backbone_utils import BackboneConfigMixin

from .laplacian import check_share, heads_by_layer

# Ids of the default tokenizer; they belong to its 65,536 entries and are dropped for a smaller vocabulary.
SPECIAL_TOKEN_IDS = {"pad_token_id": 65526, "bos_token_id": 65527, "eos_token_id": 65531}

# Of what a saved model means. It grows when a saved model would mean something else to earlier code.
FORMAT_VERSION = 1


class _LaplaceConfig:
    """What the configurations of both models share: the checks of their common fields, and a form for JSON."""

    def _check(self, sizes: tuple[str, ...], kwargs: dict) -> None:
        """Check sizes, the format's version, and which heads are Laplacian; kwargs are the fields nobody declared."""
        for name in sizes:
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}, allowed is an integer of at least 1.")
        if not 1 <= self.format_version <= FORMAT_VERSION:
            raise ValueError(
                f"format_version is {self.format_version}, allowed is 1 to {FORMAT_VERSION}: newer code saved "
                "the model; upgrade laplacian-heads."
            )
        unknown = [name for name in kwargs if name.startswith("laplacian_")]
        if unknown:  # transformers keeps a key it does not know; here it would be a model without its heads
            raise ValueError(f"There is no field {unknown[0]}, allowed are laplacian_heads and laplacian_share.")
        self.laplacian_share = check_share(self.laplacian_share)
        heads_by_layer(self.laplacian_heads, [self.num_attention_heads] * self.num_hidden_layers)
        if isinstance(self.laplacian_heads, (list, tuple)):  # as JSON has them, which knows no tuples
            entries = self.laplacian_heads
            self.laplacian_heads = [list(entry) if isinstance(entry, (list, tuple)) else entry for entry in entries]
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        kwargs.setdefault("auto_map", dict(self.auto_classes))

    def save_pretrained(self, *args, **kwargs):
        # The code is saved beside the config, so the entries point there and not to where this model came from.
        self.auto_map = dict(self.auto_classes)
        super().save_pretrained(*args, **kwargs)


@strict
class LaplaceGPTConfig(_LaplaceConfig, NanoChatConfig):
    """Configuration of LaplaceGPT: transformers' `NanoChatConfig` and which heads are Laplacian.

    The defaults are nanochat's d20 (karpathy/nanochat at 01f5f10): 560,988,160 parameters for every `laplacian_heads`.

    Args:
        laplacian_heads: which heads are Laplacian, in one of the forms of `laplacian.heads_by_layer`; 0 is NanoChat.
        laplacian_share: a in ``a * v - P v``; 1 is the paper's operator.
        intermediate_size: width of the MLP; None is 4 * hidden_size.
        head_dim: width of a head; None is hidden_size / num_attention_heads.
        initializer_range: factor on nanochat's initial standard deviations.
        return_logits: whether the model returns logits beside the loss when it is given labels. The loss needs only a
            block of them at a time, so False saves most of the memory of a large vocabulary.
        format_version: what a saved model means; code refuses versions that are newer than itself.
        Every other field: as in `NanoChatConfig`.

    Raises:
        ValueError: a value of laplacian_heads or laplacian_share, a size or the format's version is not allowed.
    """

    model_type = "laplace_gpt"
    _auto_class = "AutoConfig"
    auto_classes = {
        "AutoConfig": "configuration.LaplaceGPTConfig",
        "AutoModel": "modeling_laplace_gpt.LaplaceGPTModel",
        "AutoModelForCausalLM": "modeling_laplace_gpt.LaplaceGPTForCausalLM",
        "AutoModelForSequenceClassification": "modeling_laplace_gpt.LaplaceGPTForSequenceClassification",
    }

    # Any: `strict` would raise an error of its own before heads_by_layer can name what is allowed.
    laplacian_heads: Any = 0
    laplacian_share: Any = 1.0
    return_logits: bool = False
    format_version: int = FORMAT_VERSION

    vocab_size: int = 65536
    hidden_size: int = 1280
    intermediate_size: int | None = None
    num_hidden_layers: int = 20
    num_attention_heads: int = 10
    head_dim: int | None = None
    initializer_range: float = 1.0
    pad_token_id: int | None = SPECIAL_TOKEN_IDS["pad_token_id"]
    bos_token_id: int | None = SPECIAL_TOKEN_IDS["bos_token_id"]
    eos_token_id: int | list[int] | None = SPECIAL_TOKEN_IDS["eos_token_id"]

    def __post_init__(self, **kwargs):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        self._check((*sizes, "num_attention_heads", "num_key_value_heads", "head_dim"), kwargs)
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads is {self.num_attention_heads}, allowed are divisors of hidden_size "
                    f"{self.hidden_size}, or any number with head_dim given."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, allowed are even numbers, which RoPE rotates in pairs.")
        if self.num_key_value_heads is not None and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}, allowed are divisors of num_attention_heads "
                f"{self.num_attention_heads}."
            )
        for name, default in SPECIAL_TOKEN_IDS.items():
            if getattr(self, name) == default >= self.vocab_size:
                setattr(self, name, None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_depth(cls, depth: int, **overrides) -> "LaplaceGPTConfig":
        """The configuration of nanochat's one dial: everything follows from the number of layers.

        Args:
            depth: number of layers; the width is 64 * depth rounded up to a multiple of 128, the head size 128.
            overrides: fields to set otherwise.
        """
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth is {depth!r}, allowed is an integer of at least 1.")
        heads = -(-64 * depth // 128)
        derived = {"num_hidden_layers": depth, "hidden_size": 128 * heads, "num_attention_heads": heads}
        return cls(**{**derived, "head_dim": 128, **overrides})


@strict
class LaplaceViTConfig(_LaplaceConfig, BackboneConfigMixin, PreTrainedConfig):
    """Configuration of LaplaceViT: the ViT of DeiT-3 and which heads are Laplacian.

    The defaults are DeiT-3's B/16 (facebookresearch/deit, `models_v2.py`) with transformers' default of 2 classes.
    The number of parameters is the same for every `laplacian_heads`.

    Args:
        laplacian_heads: which heads are Laplacian, in one of the forms of `laplacian.heads_by_layer`; 0 is DeiT-3.
        laplacian_share: a in ``a * v - P v``; 1 is the paper's operator.
        hidden_size, num_hidden_layers, num_attention_heads: width, blocks, and heads in each; a head has the width
            hidden_size / num_attention_heads.
        intermediate_size: width of the MLP; None is 4 * hidden_size.
        hidden_act: activation of the MLP.
        hidden_dropout_prob: dropout after the embeddings and both branches of a block.
        attention_probs_dropout_prob: dropout on the attention matrix P.
        drop_path_rate: probability with which a branch is left out for an image in training.
        drop_path_schedule: "constant" gives it to every block, as DeiT-3's code does; "linear" raises it from 0 in the
            first block to drop_path_rate in the last, as timm does.
        layer_scale_init_value: what the factors on each branch's channels start with: 1e-4 in DeiT-3's code, 1e-6 in
            timm's deit3 models and in the paper's code; None is a model without them.
        qk_norm: whether queries and keys go through a LayerNorm over the width of a head, as in the paper's models.
        qkv_bias: whether the projections to queries, keys and values have biases.
        layer_norm_eps: of every LayerNorm.
        initializer_range: standard deviation of the initial weights.
        image_size: height and width of the images that the position embeddings are for, or [height, width]; those of
            other sizes are interpolated.
        patch_size: height and width of a patch, or [height, width].
        num_channels: of the images.
        use_mask_token: whether there is a token that takes the place of masked patches.
        apply_layernorm, reshape_hidden_states: of a backbone's feature maps, whether they go through the final norm,
            and whether they are (batch, width, rows, columns) without CLS.
        format_version: what a saved model means; code refuses versions that are newer than itself.
        num_labels: number of classes, in place of id2label.

    Raises:
        ValueError: a value of laplacian_heads or laplacian_share, a size or the format's version is not allowed.
    """

    model_type = "laplace_vit"
    _auto_class = "AutoConfig"
    auto_classes = {
        "AutoConfig": "configuration.LaplaceViTConfig",
        "AutoModel": "modeling_laplace_vit.LaplaceViTModel",
        "AutoModelForImageClassification": "modeling_laplace_vit.LaplaceViTForImageClassification",
        "AutoModelForMaskedImageModeling": "modeling_laplace_vit.LaplaceViTForMaskedImageModeling",
        "AutoBackbone": "modeling_laplace_vit.LaplaceViTBackbone",
    }

    laplacian_heads: Any = 0
    laplacian_share: Any = 1.0
    format_version: int = FORMAT_VERSION

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.0
    attention_probs_dropout_prob: float | int = 0.0
    drop_path_rate: float | int = 0.0
    drop_path_schedule: str = "constant"
    layer_scale_init_value: float | int | None = 1e-4
    qk_norm: bool = False
    qkv_bias: bool = True
    layer_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    use_mask_token: bool = False
    apply_layernorm: bool = True
    reshape_hidden_states: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs):
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
        self._check(sizes, kwargs)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, allowed are divisors of hidden_size "
                f"{self.hidden_size}."
            )
        for name in ("image_size", "patch_size"):
            size = getattr(self, name)
            if not isinstance(size, int) and (len(size) != 2 or not all(isinstance(side, int) for side in size)):
                raise ValueError(f"{name} is {size}, allowed is an integer or [height, width].")
            if not isinstance(size, int):
                setattr(self, name, list(size))  # as JSON has them
        if min(pair(self.patch_size)) < 1:
            raise ValueError(f"patch_size is {self.patch_size}, allowed are integers of at least 1.")
        for image, patch in zip(pair(self.image_size), pair(self.patch_size), strict=True):
            if image < 1 or image % patch:
                raise ValueError(
                    f"image_size is {self.image_size}, allowed are multiples of patch_size, {self.patch_size}."
                )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a number from 0 to below 1.")
        if self.drop_path_schedule not in ("constant", "linear"):
            raise ValueError(f"drop_path_schedule is {self.drop_path_schedule!r}, allowed are constant and linear.")

        self.stage_names = ["stem"] + [f"stage{layer}" for layer in range(1, self.num_hidden_layers + 1)]
        self.set_output_features_output_indices(
            out_indices=kwargs.pop("out_indices", None), out_features=kwargs.pop("out_features", None)
        )
        super().__post_init__(**kwargs)

    @classmethod
    def small(cls, **overrides) -> "LaplaceViTConfig":
        """DeiT-3's S/16 for ImageNet's 1,000 classes: 22,059,496 parameters. overrides: fields to set otherwise."""
        return cls.base(**{"hidden_size": 384, "num_attention_heads": 6, **overrides})

    @classmethod
    def base(cls, **overrides) -> "LaplaceViTConfig":
        """DeiT-3's B/16 for ImageNet's 1,000 classes: 86,585,320 parameters. overrides: fields to set otherwise."""
        classes = {} if "id2label" in overrides else {"num_labels": 1000}
        return cls(**{**classes, **overrides})

    @classmethod
    def cifar(cls, **overrides) -> "LaplaceViTConfig":
        """The paper's B/4 for images of 32 pixels: 85,169,674 parameters with 10 classes.

        Args:
            overrides: fields to set otherwise, such as num_labels=100.
        """
        classes = {} if "id2label" in overrides else {"num_labels": 10}
        return cls(**{"image_size": 32, "patch_size": 4, **classes, **overrides})


def pair(size: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width of a size that is one number for both, or both."""
    return (size, size) if isinstance(size, int) else tuple(size)
