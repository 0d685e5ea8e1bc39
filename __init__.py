"""Laplacian heads for transformers: the models, and `laplacianize` for everyone else's."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from .configuration import LaplaceGPTConfig
from .laplacian import laplacianize, set_laplacian_share
from .modeling_laplace_gpt import LaplaceGPTForCausalLM, LaplaceGPTForSequenceClassification, LaplaceGPTModel

__version__ = "0.1.0"

AutoConfig.register("laplace_gpt", LaplaceGPTConfig)
AutoModel.register(LaplaceGPTConfig, LaplaceGPTModel)
AutoModelForCausalLM.register(LaplaceGPTConfig, LaplaceGPTForCausalLM)
AutoModelForSequenceClassification.register(LaplaceGPTConfig, LaplaceGPTForSequenceClassification)

__all__ = [
    "LaplaceGPTConfig",
    "LaplaceGPTForCausalLM",
    "LaplaceGPTForSequenceClassification",
    "LaplaceGPTModel",
    "laplacianize",
    "set_laplacian_share",
]
