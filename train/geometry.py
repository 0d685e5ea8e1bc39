"""How tokens lie in each layer of a model and how large the gradient of each is, while Trainer trains it."""

import contextlib
import inspect
import itertools
import math
import weakref
from collections.abc import Iterable

import torch
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.utils import logging

from laplacian_heads.eval.geometry import NotFiniteError, Similarity, Spectrum, Variance

logger = logging.get_logger(__name__)

# What accumulates each metric of the hidden states, and where in its result it stands.
MEASURES = {
    "within_sequence_share": (Variance, "shares", "within_sequence"),
    "token_similarity": (Similarity, None, "within_sequence"),
    "effective_rank": (Spectrum, "per_sequence", "effective_rank"),
    "components_99": (Spectrum, "per_sequence", "components_99"),
}
METRICS = (*MEASURES, "gradient_norm")
# Norms of a gradient that are worth a warning: of all of it, and of one of the last layers.
LARGE, SMALL = 10.0, 1e-4


class GeometryCallback(TrainerCallback):
    """Logs the geometry of tokens and the norms of gradients, layer by layer, as the run's other figures are logged.

    Of hidden state l, which is what block l outputs; 0 is what the first block reads, and the last one comes after the
    model's final norm:

    - `geometry/within_sequence_share/layer_l`: the share of the tokens' variance that lies within sequences
    - `geometry/token_similarity/layer_l`: the mean cosine between two tokens of a sequence
    - `geometry/effective_rank/layer_l` and `geometry/components_99/layer_l`, of the last layer only: the effective rank
      of a sequence's tokens, and how many principal components hold 99 % of their variance; means over the sequences

    and of the gradient before it is clipped:

    - `gradient_norm/layer_l` for block l, from 1 on, `gradient_norm/embedding`, `gradient_norm/head`: of the parameters
      that have a gradient, tied ones in the embedding only

    The measures are those of `laplacian_heads.eval.geometry`. Weights, random state and training stay as they are. The
    norm before clipping is known from Trainer's own line of the log, so Trainer writes one at every measured step: make
    `steps` a multiple of `logging_steps` and it is none more. Warns when the whole gradient's norm goes above 10, that
    of one of the last quarter of the blocks below 1e-4, and when hidden states are no longer finite.

    Works in one process, with DDP, and with FSDP2, where every process takes part. In the terminal Trainer prints every
    figure; `BriefProgressCallback` of `laplacian_heads.train.callbacks` in place of its ProgressCallback prints ranges.

    Args:
        trainer: the Trainer it is added to.
        rows: held-out rows as the trainer's data collator takes them, at least one; all are measured each time, in
            batches of the size of its training batches, so give a few. Of a single one all variance lies within it.
            Tokens whose attention_mask is 0 do not count.
        steps: optimizer steps between two measurements.
        metrics: which to log, of METRICS.

    Raises:
        ValueError: one of these is not allowed, the model is none of transformers or its blocks cannot be found, or it
            is shared out by DeepSpeed or FSDP1.
    """

    def __init__(self, trainer: Trainer, rows: Iterable, steps: int = 100, metrics: Iterable[str] = METRICS):
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps!r}, allowed is an integer of at least 1.")
        self.metrics = tuple(metrics)
        if isinstance(metrics, str) or not self.metrics:
            raise ValueError(f"metrics is {metrics!r}, allowed is a list of {', '.join(METRICS)}.")
        for metric in self.metrics:
            if metric not in METRICS:
                raise ValueError(f"metrics has {metric!r}, allowed are {', '.join(METRICS)}.")
        if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
            raise ValueError("trainer uses DeepSpeed or FSDP1, allowed are one process, DDP and FSDP2.")
        parts(trainer.model)
        rows, size = iter(rows), trainer.args.per_device_train_batch_size
        with torch.random.fork_rng(devices=[]):  # a collator may draw what it masks
            self.batches = []
            while batch := list(itertools.islice(rows, size)):
                self.batches.append(trainer.data_collator(batch))
        if not self.batches:
            raise ValueError("rows is empty, allowed is at least one row.")
        # The trainer holds this callback: in a circle, the model would outlive the training.
        self.trainer, self.steps = weakref.proxy(trainer), steps
        self.due = False
        self.norms = {}  # of the gradient as it was clipped, by part
        self.lasting = set()  # what has been warned of and goes on

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if "gradient_norm" in self.metrics and (state.global_step + 1) % self.steps == 0 and self._takes_part():
            self.norms = gradient_norms(self.trainer.model)

    def on_step_end(self, args, state, control, **kwargs):
        self.due = state.global_step % self.steps == 0
        if self.due:
            control.should_log = True

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self.due or "grad_norm" not in logs or not self._takes_part():
            return
        self.due = False
        figures = self._geometry() | self._gradient(logs["grad_norm"])
        if figures and state.is_world_process_zero:
            self.trainer.log(figures)

    def _takes_part(self) -> bool:
        """Whether this process measures: the main one, and all of them where each has a share of the parameters."""
        shared = any(isinstance(parameter, DTensor) for parameter in self.trainer.model.parameters())
        return shared or self.trainer.is_fsdp_enabled or self.trainer.is_world_process_zero()

    def _geometry(self) -> dict[str, float]:
        kinds = dict.fromkeys(MEASURES[metric][0] for metric in self.metrics if metric in MEASURES)
        if not kinds:
            return {}
        found = {}
        layers = math.inf  # that are finite, from the first on
        for batch in self.batches:
            states, mask = self._hidden_states(batch)
            for layer, hidden in enumerate(states):
                try:
                    for kind in kinds:
                        if layer < layers and (kind is not Spectrum or layer == len(states) - 1):
                            found.setdefault((layer, kind), kind()).update(hidden, mask)
                except NotFiniteError:
                    layers = layer
        self._warn(
            "not finite",
            layers < math.inf,
            f"The hidden states of layer {layers} are not finite at step {self.trainer.state.global_step}.",
        )
        figures = {}
        for (layer, kind), accumulator in found.items():
            if layer >= layers:
                continue
            result = accumulator.result()
            for metric, (its_kind, group, name) in MEASURES.items():
                if metric in self.metrics and its_kind is kind:
                    figures[f"geometry/{metric}/layer_{layer:02}"] = (result[group] if group else result)[name]
        # A row of a single token has no two tokens to compare.
        return {name: value for name, value in figures.items() if value is not None}

    def _hidden_states(self, batch: dict) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The hidden states of every layer, (rows, tokens, width), and the mask of real tokens, (rows, tokens)."""
        model = self.trainer.model  # FSDP gathers the weights for the whole model only
        takes = inspect.signature(type(of_transformers(model)).forward).parameters
        # Packed documents would attend to each other with a cache, and nobody needs the logits.
        options = {name: value for name, value in (("use_cache", False), ("logits_to_keep", 1)) if name in takes}
        batch = {name: value for name, value in batch.items() if "labels" not in name}
        batch = send_to_device(batch, self.trainer.args.device)
        training = [module for module in model.modules() if module.training]
        model.eval()
        try:
            with torch.no_grad(), self.trainer.compute_loss_context_manager():
                outputs = model(**batch, **options, output_hidden_states=True)
        finally:
            for module in training:
                module.training = True
        states = getattr(outputs, "hidden_states", None)
        if not states:
            raise ValueError(f"{type(of_transformers(model)).__name__} records no hidden states.")
        return states, batch.get("attention_mask")

    def _gradient(self, total: float) -> dict[str, float]:
        """Norms by part, where `total` is that of the whole gradient before clipping, which scales all parts alike."""
        scale = total / (math.hypot(*self.norms.values()) or 1.0)
        norms = {part: norm * scale for part, norm in self.norms.items() if part != "rest"}
        if not norms:
            return {}
        step, count = self.trainer.state.global_step, len(blocks(self.trainer.model))
        largest = max(norms, key=norms.get)
        self._warn(
            "large",
            total > LARGE,
            f"The norm of the gradient is {total:.3g} at step {step}, above {LARGE:g}; the largest part of it is that "
            f"of {largest}, {norms[largest]:.3g}.",
        )
        upper = [f"layer_{block:02}" for block in range(count - max(1, count // 4) + 1, count + 1)]
        norm, smallest = min(((norms[part], part) for part in upper if part in norms), default=(SMALL, None))
        self._warn(
            "small",
            norm < SMALL,
            f"The norm of the gradient of {smallest} is {norm:.3g} at step {step}, below {SMALL:g}.",
        )
        return {f"gradient_norm/{part}": norm for part, norm in norms.items()}

    def _warn(self, what: str, holds: bool, sentence: str) -> None:
        """Warn when something begins to hold, in the main process."""
        if not holds:
            self.lasting.discard(what)
        elif what not in self.lasting and self.trainer.is_world_process_zero():
            self.lasting.add(what)
            logger.warning(sentence)


def of_transformers(model: nn.Module) -> PreTrainedModel:
    """The model of transformers in whatever wraps it. Raises ValueError if there is none."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(f"model is a {type(model).__name__}, allowed is a model of transformers, also in PEFT's.")


def blocks(model: nn.Module) -> nn.ModuleList:
    """The blocks of a model: the outermost list of modules that is as long as its config says.

    Raises:
        ValueError: there is none.
    """
    inner = of_transformers(model)
    count = getattr(inner.config.get_text_config(), "num_hidden_layers", None)
    for module in inner.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"{type(inner).__name__} has no list of {count} blocks, its config's num_hidden_layers.")


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks of a model as "layer_01" and so on, its "embedding" and "head" if it has them, and "rest", which is all.

    Raises:
        ValueError: its blocks cannot be found, or it is an encoder and a decoder.
    """
    inner = of_transformers(model)
    if inner.config.is_encoder_decoder:
        raise ValueError(f"model is a {type(inner).__name__}, allowed is one without both encoder and decoder.")
    found = {f"layer_{number:02}": block for number, block in enumerate(blocks(model), 1)}
    for name, get in (("embedding", inner.get_input_embeddings), ("head", inner.get_output_embeddings)):
        with contextlib.suppress(NotImplementedError):  # what transformers raises for some models of images
            found[name] = get()
    return {name: part for name, part in {**found, "rest": model}.items() if part is not None}


@torch.no_grad()
def gradient_norms(model: nn.Module) -> dict[str, float]:
    """Norms of a model's gradient, by part; under FSDP2 of the whole parameters, and all processes must call it.

    Returns:
        "layer_01" and so on for the blocks, "embedding", "head", and "rest" for all else. A parameter counts in the
        first part that has it; a part without gradients is left out.
    """
    seen, norms = set(), {}
    for name, part in parts(model).items():
        own = []
        for parameter in part.parameters():
            if parameter.grad is not None and parameter not in seen:
                seen.add(parameter)
                norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
                own.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())
        if own:
            norms[name] = math.hypot(*own)
    return norms
