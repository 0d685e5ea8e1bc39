"""Checkpoints: the newest of a run, and one that many processes wrote in pieces made whole for a single one."""

import json
import shutil
from pathlib import Path

import torch
from accelerate.utils import merge_fsdp_weights
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from transformers import PreTrainedModel

from laplacian_heads.files import check_checkpoint

PROGRESS = "progress.json"  # seconds of training so far, and where each stream of the data goes on


def last_checkpoint(output: Path) -> tuple[Path | None, dict]:
    """The newest checkpoint of a run and its trainer's state; (None, {}) if there is none.

    Raises:
        ValueError: it lacks a file, or one is damaged.
    """
    found = {int(path.name.rpartition("-")[2]): path for path in output.glob("checkpoint-*") if path.is_dir()}
    if not found:
        return None, {}
    path = found[max(found)]
    pieces = ("pytorch_model_fsdp_0", "optimizer_0")
    adapter = "adapter_model.safetensors"
    weights = (
        pieces if is_sharded(path) else (adapter if (path / adapter).exists() else "model.safetensors", "optimizer.pt")
    )
    for name in ("trainer_state.json", PROGRESS, "scheduler.pt", *weights):
        if not (path / name).exists():
            raise ValueError(f"{path} lacks {name}; delete that folder to begin again.")
    check_checkpoint(path)
    return path, json.loads((path / "trainer_state.json").read_text())


def read_progress(checkpoint: Path | None) -> tuple[float, dict[int, dict]]:
    """Seconds of training up to a checkpoint, and where each stream goes on after it, by its number."""
    if checkpoint is None:
        return 0.0, {}
    progress = json.loads((checkpoint / PROGRESS).read_text())
    return progress["seconds"], {int(number): place for number, place in progress["places"].items()}


def is_sharded(checkpoint: Path) -> bool:
    """Whether FSDP wrote it in pieces."""
    return (checkpoint / "pytorch_model_fsdp_0").is_dir()


def made_whole(checkpoint: Path, whole: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Path:
    """Write what FSDP saved in pieces as a single process saves it.

    Args:
        checkpoint: what to read. whole: folder to write.
        model, optimizer: of the run; their values do not matter, and the optimizer's change.

    Returns:
        The folder.
    """
    shutil.rmtree(whole, ignore_errors=True)
    whole.mkdir(parents=True)
    for path in checkpoint.iterdir():
        if path.is_file():
            shutil.copy(path, whole)
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(whole))
    pieces = whole / "optimizer.pieces"
    dcp_to_torch_save(checkpoint / "optimizer_0", pieces)
    # tensors, numbers and strings by the names of parameters
    state = torch.load(pieces, weights_only=True)
    set_optimizer_state_dict(model, optimizer, state.get("optimizer", state))
    torch.save(optimizer.state_dict(), whole / "optimizer.pt")
    pieces.unlink()
    return whole
