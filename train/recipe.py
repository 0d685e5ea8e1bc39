"""Keys that the recipes of the stages share, and which values they may have."""

import dataclasses
import importlib.util
import math

import torch
from accelerate import PartialState

from laplacian_heads.train.chat import check_mixture

REPORTS = ("tensorboard", "wandb", "trackio")


@dataclasses.dataclass(kw_only=True)
class StageRecipe:
    """Keys that pretraining, mid-training and SFT share; the shipped recipes say what they mean."""

    output: str
    seed: int
    streams: int
    workers: int
    shuffle_shards: int
    on_bad_data: str
    context: int
    rows_per_step: int
    batch_size: int
    matrix_lr: float
    embedding_lr: float
    head_lr: float
    momentum_warmup_steps: int
    warmup_steps: int
    decay_share: float
    max_grad_norm: float
    bf16: bool
    compile: bool
    gradient_checkpointing: bool
    logging_steps: int
    eval_steps: int | None
    geometry_steps: int | None
    save_steps: int
    report_to: str

    def __post_init__(self):
        for name in ("streams", "rows_per_step", "batch_size", "logging_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 1.")
        if self.context < 2:
            raise ValueError(f"context is {self.context}, allowed is at least 2.")
        if self.eval_steps is not None and self.eval_steps < 1:
            raise ValueError(f"eval_steps is {self.eval_steps}, allowed is at least 1, or null for the end only.")
        if self.geometry_steps is not None and self.geometry_steps < 1:
            raise ValueError(f"geometry_steps is {self.geometry_steps}, allowed is at least 1, or null for never.")
        for name in ("momentum_warmup_steps", "warmup_steps", "workers", "shuffle_shards"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 0.")
        for name in ("matrix_lr", "embedding_lr", "head_lr", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a finite number of at least 0.")
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"decay_share is {self.decay_share}, allowed is a number from 0 to 1.")
        if not self.output:
            raise ValueError("output is '', allowed is the path of a folder.")
        check_on_bad_data(self.on_bad_data)
        if self.report_to not in ("none", *REPORTS):
            raise ValueError(f"report_to is {self.report_to!r}, allowed are none, {', '.join(REPORTS)}.")
        if self.report_to != "none" and importlib.util.find_spec(self.report_to) is None:
            raise ValueError(f"report_to is {self.report_to}, which is not installed: pip install {self.report_to}.")
        processes = this_process().num_processes
        rows = self.batch_size * processes
        if self.rows_per_step % rows or self.rows_per_step % self.streams:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step}, allowed are multiples of {rows}, which is batch_size times "
                f"{processes} processes, and of streams, {self.streams}."
            )
        readers = processes * max(self.workers, 1)
        if self.streams % readers:
            raise ValueError(
                f"streams is {self.streams}, allowed are multiples of {readers}, which is {processes} processes times "
                "workers, at least 1."
            )

    @property
    def skip(self) -> bool:
        return self.on_bad_data == "skip"


def this_process() -> PartialState:
    """Which process of the run this is, and of how many. Without a GPU, several are connected only if asked for so."""
    return PartialState(cpu=not torch.accelerator.is_available())


def check_on_bad_data(value: str) -> None:
    """Raise ValueError unless it is a value of the key."""
    if value not in ("stop", "skip"):
        raise ValueError(f"on_bad_data is {value!r}, allowed is stop or skip.")


@dataclasses.dataclass(kw_only=True)
class ConversationRecipe(StageRecipe):
    """Keys of the stages that train a model on with conversations."""

    model: str
    data: list
    held_out: list
    lora: dict | None

    def __post_init__(self):
        super().__post_init__()
        if self.lora is not None:
            check_lora(self.lora)
        check_mixture("data", self.data)
        check_mixture("held_out", self.held_out)
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is the folder of a model or its name on the Hub.")


def check_lora(lora: dict) -> None:
    """Raise ValueError unless it is what the key lora may be."""
    allowed = {"r": int, "alpha": int | float, "targets": str | list, "lr": float}
    for key in (*allowed, *lora):
        value = lora.get(key)
        if key not in allowed or isinstance(value, bool) or not isinstance(value, allowed[key]) or not value:
            raise ValueError(f"lora.{key} is {value!r}, allowed are r, alpha and lr, numbers above 0, and targets.")


@dataclasses.dataclass(kw_only=True)
class PackedRecipe(StageRecipe):
    """Keys of the stages that train on a stream packed into rows, for a number of tokens."""

    eval_rows: int
    tokens: int
    mask_documents: bool

    def __post_init__(self):
        super().__post_init__()
        if self.eval_rows < 1:
            raise ValueError(f"eval_rows is {self.eval_rows}, allowed is at least 1.")
        if self.steps < 1:
            raise ValueError(
                f"tokens is {self.tokens}, allowed is at least one step's, which is rows_per_step times context, "
                f"{self.rows_per_step * self.context}."
            )

    @property
    def steps(self) -> int:
        return self.tokens // (self.rows_per_step * self.context)
