"""Laplacian heads for transformers: the models, and `laplacianize` for everyone else's."""

from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    AutoModelForSequenceClassification,
)

from .configuration import LaplaceGPTConfig, LaplaceViTConfig
from .laplacian import laplacianize, set_laplacian_share
from .modeling_laplace_gpt import LaplaceGPTForCausalLM, LaplaceGPTForSequenceClassification, LaplaceGPTModel
from .modeling_laplace_vit import (
    LaplaceViTBackbone,
    LaplaceViTForImageClassification,
    LaplaceViTForMaskedImageModeling,
    LaplaceViTModel,
)

__version__ = "0.1.0"

AutoConfig.register("laplace_gpt", LaplaceGPTConfig)
AutoModel.register(LaplaceGPTConfig, LaplaceGPTModel)
AutoModelForCausalLM.register(LaplaceGPTConfig, LaplaceGPTForCausalLM)
AutoModelForSequenceClassification.register(LaplaceGPTConfig, LaplaceGPTForSequenceClassification)

AutoConfig.register("laplace_vit", LaplaceViTConfig)
AutoModel.register(LaplaceViTConfig, LaplaceViTModel)
AutoModelForImageClassification.register(LaplaceViTConfig, LaplaceViTForImageClassification)
AutoModelForMaskedImageModeling.register(LaplaceViTConfig, LaplaceViTForMaskedImageModeling)
AutoBackbone.register(LaplaceViTConfig, LaplaceViTBackbone)

__all__ = [
    "LaplaceGPTConfig",
    "LaplaceGPTForCausalLM",
    "LaplaceGPTForSequenceClassification",
    "LaplaceGPTModel",
    "LaplaceViTBackbone",
    "LaplaceViTConfig",
    "LaplaceViTForImageClassification",
    "LaplaceViTForMaskedImageModeling",
    "LaplaceViTModel",
    "laplacianize",
    "set_laplacian_share",
]
