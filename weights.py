"""Weights of models: read from files without running anything in them, put into models, and compared."""

import argparse
import pickle
import re
from pathlib import Path

import torch
from safetensors.torch import load_file


def read(path: Path, mapped: bool = False):
    """What is in a file of safetensors or of torch.save, of which no code is run.

    Args:
        mapped: whether a file of torch.save is mapped into memory, and its tensors read when they are needed.

    Raises:
        ValueError: the file is not there, is damaged, or asks for code.
    """
    if not path.is_file():
        raise ValueError(f"There is no {path}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # timm's and DeiT's training scripts save their arguments beside the weights: a class that holds plain values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None)
    except Exception as error:  # damage shows in many ways, none with a class of its own
        asked = re.search(r"(?:GLOBAL|[Ff]unction|class) ([\w.]+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and asked:
            raise ValueError(
                f"{path} asks for {asked[1]}, code that weights do not need; nothing of it was run."
            ) from None
        kind = "safetensors writes" if path.suffix == ".safetensors" else "torch.save writes"
        raise ValueError(f"{path} is no file of weights as {kind} them, or is damaged.") from None


def build(model_class: type, config, weights: dict, dtype: torch.dtype):
    """A model with these weights. Not through its constructor, which would draw random ones first."""
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    check_loaded("The model", info)
    model.config.name_or_path = ""  # it came from no folder
    return model


def check_loaded(what: str, info: dict) -> None:
    """Raise ValueError if from_pretrained found other weights than those of the model."""
    for problem in ("missing", "unexpected", "mismatched"):
        if info[f"{problem}_keys"]:
            raise ValueError(f"{what} has the weight {sorted(info[f'{problem}_keys'], key=str)[0]} {problem}.")


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, the sign of zero included; float32 holds those of every dtype here."""
    return torch.equal(left.float().view(torch.int32), right.float().view(torch.int32))
