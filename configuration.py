"""Configurations of the project's models."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import NanoChatConfig

from .laplacian import check_share, heads_by_layer

# Ids of the default tokenizer; they belong to its 65,536 entries and are dropped for a smaller vocabulary.
SPECIAL_TOKEN_IDS = {"pad_token_id": 65526, "bos_token_id": 65527, "eos_token_id": 65531}

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)

# Of what a saved model means. It grows when a saved model would mean something else to earlier code.
FORMAT_VERSION = 1

AUTO_MAP = {
    "AutoConfig": "configuration.LaplaceGPTConfig",
    "AutoModel": "modeling_laplace_gpt.LaplaceGPTModel",
    "AutoModelForCausalLM": "modeling_laplace_gpt.LaplaceGPTForCausalLM",
    "AutoModelForSequenceClassification": "modeling_laplace_gpt.LaplaceGPTForSequenceClassification",
}


@strict
class LaplaceGPTConfig(NanoChatConfig):
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
        for name in SIZES:
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
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
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

        self.laplacian_share = check_share(self.laplacian_share)
        heads_by_layer(self.laplacian_heads, [self.num_attention_heads] * self.num_hidden_layers)
        if isinstance(self.laplacian_heads, (list, tuple)):  # as JSON has them, which knows no tuples
            entries = self.laplacian_heads
            self.laplacian_heads = [list(entry) if isinstance(entry, (list, tuple)) else entry for entry in entries]

        kwargs.setdefault("auto_map", dict(AUTO_MAP))
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

    def save_pretrained(self, *args, **kwargs):
        # The code is saved beside the config, so the entries point there and not to where this model came from.
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(*args, **kwargs)
