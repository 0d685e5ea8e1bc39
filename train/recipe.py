"""Keys that the recipes of the stages share, and which values they may have."""

import dataclasses
import importlib.util
import math

import torch
from accelerate import PartialState

from laplacian_heads.train.chat import check_mixture

REPORTS = ("tensorboard", "wandb", "trackio")


@dataclasses.dataclass(kw_only=True)
class RunRecipe:
    """Keys that all recipes for training share; the shipped ones say what they mean."""

    output: str
    seed: int
    workers: int
    on_bad_data: str
    batch_size: int
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
        self.check_least(1, "batch_size", "logging_steps", "save_steps")
        self.check_least(0, "workers")
        self.check_numbers("max_grad_norm")
        if self.eval_steps is not None and self.eval_steps < 1:
            raise ValueError(f"eval_steps is {self.eval_steps}, allowed is at least 1, or null for the end only.")
        if self.geometry_steps is not None and self.geometry_steps < 1:
            raise ValueError(f"geometry_steps is {self.geometry_steps}, allowed is at least 1, or null for never.")
        if not self.output:
            raise ValueError("output is '', allowed is the path of a folder.")
        check_on_bad_data(self.on_bad_data)
        if self.report_to not in ("none", *REPORTS):
            raise ValueError(f"report_to is {self.report_to!r}, allowed are none, {', '.join(REPORTS)}.")
        if self.report_to != "none" and importlib.util.find_spec(self.report_to) is None:
            raise ValueError(f"report_to is {self.report_to}, which is not installed: pip install {self.report_to}.")

    def check_least(self, least: int, *names: str) -> None:
        """Raise ValueError unless these keys are at least so large."""
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least {least}.")

    def check_numbers(self, *names: str) -> None:
        """Raise ValueError unless these keys are finite and not below 0."""
        for name in names:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a finite number of at least 0.")

    @property
    def skip(self) -> bool:
        return self.on_bad_data == "skip"


@dataclasses.dataclass(kw_only=True)
class StageRecipe(RunRecipe):
    """Keys that pretraining, mid-training and SFT share."""

    streams: int
    shuffle_shards: int
    context: int
    rows_per_step: int
    matrix_lr: float
    embedding_lr: float
    head_lr: float
    momentum_warmup_steps: int
    warmup_steps: int
    decay_share: float

    def __post_init__(self):
        super().__post_init__()
        self.check_least(1, "streams", "rows_per_step")
        self.check_least(2, "context")
        self.check_least(0, "momentum_warmup_steps", "warmup_steps", "shuffle_shards")
        self.check_numbers("matrix_lr", "embedding_lr", "head_lr")
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"decay_share is {self.decay_share}, allowed is a number from 0 to 1.")
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


@dataclasses.dataclass(kw_only=True)
class ImageRecipe(RunRecipe):
    """Keys of the recipes that train on images."""

    data: str
    label: str | None
    held_out: str | int | None
    images: int | None
    image_size: int
    drop_path_rate: float
    drop_path_schedule: str
    epochs: int
    images_per_step: int
    learning_rate: float
    min_learning_rate: float
    warmup_epochs: int
    weight_decay: float
    flip: float
    eval_crop: float

    def __post_init__(self):
        super().__post_init__()
        if not self.data:
            raise ValueError(f"data is {self.data!r}, allowed is a source of images.")
        if self.held_out == "" or (isinstance(self.held_out, int) and self.held_out < 1):
            raise ValueError(
                f"held_out is {self.held_out!r}, allowed is a source of images, or a number of at least 1."
            )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}, allowed is 0 to {2**32 - 1}.")
        if self.images is not None:
            self.check_least(1, "images")
        self.check_least(1, "image_size", "epochs", "images_per_step")
        self.check_least(0, "warmup_epochs")
        self.check_numbers("learning_rate", "min_learning_rate", "weight_decay")
        if self.learning_rate == 0:
            raise ValueError(f"learning_rate is {self.learning_rate}, allowed is a number above 0.")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate is {self.min_learning_rate}, allowed is at most learning_rate.")
        self.check_shares("flip")
        if not 0.1 <= self.eval_crop <= 1:
            raise ValueError(f"eval_crop is {self.eval_crop}, allowed is a number from 0.1 to 1.")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(f"warmup_epochs is {self.warmup_epochs}, allowed is less than epochs, {self.epochs}.")
        batch = self.batch_size * this_process().num_processes
        if self.images_per_step % batch:
            raise ValueError(
                f"images_per_step is {self.images_per_step}, allowed are multiples of {batch}, which is batch_size "
                f"times {this_process().num_processes} processes."
            )

    def check_shares(self, *names: str) -> None:
        """Raise ValueError unless these keys are from 0 to 1."""
        for name in names:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a number from 0 to 1.")

    def check_scale(self, *names: str) -> None:
        """Raise ValueError unless these keys are least and largest shares of an area."""
        for name in names:
            scale = getattr(self, name)
            numbers = len(scale) == 2 and all(isinstance(part, int | float) for part in scale)
            if not numbers or not 0 < scale[0] <= scale[1] <= 1:
                raise ValueError(f"{name} is {scale}, allowed are two numbers above 0 and up to 1, the smaller first.")


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
