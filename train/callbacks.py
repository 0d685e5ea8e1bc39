"""Trainer callbacks."""

import collections
import contextlib
import signal
from collections.abc import Iterator

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from transformers import PreTrainedModel, ProgressCallback, TrainerCallback
from transformers.trainer_callback import ExportableState

from laplacian_heads.laplacian import set_laplacian_share


class MomentumWarmupCallback(TrainerCallback):
    """Raises the momentum of Muon linearly from 0.85 to 0.95 (karpathy/nanochat at 01f5f10, `scripts/base_train.py`).

    Args:
        steps: number of optimizer steps it takes; 0 is none.
    """

    def __init__(self, steps: int):
        self.steps = steps

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        share = min(1.0, state.global_step / self.steps) if self.steps else 1.0
        for group in optimizer.param_groups:
            if "momentum" in group:
                group["momentum"] = 0.85 + 0.10 * share


class TerminationCallback(TrainerCallback):
    """Saves and stops at the end of the step in which a process of the run was asked to terminate (SIGTERM)."""

    def __init__(self):
        self.asked = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes the signal instead of ending by it."""

        def ask(*_):
            self.asked = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def agreed(self) -> bool:
        """Whether any process was asked: the same answer in all of them, which must all ask this together."""
        asked = torch.tensor(float(self.asked), device=PartialState().device)
        return bool(reduce(asked).item())

    def on_step_end(self, args, state, control, **kwargs):
        if self.agreed():
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True


class BriefProgressCallback(ProgressCallback):
    """Trainer's progress bar, whose lines give of a figure that each layer has the lowest and the highest only."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        brief, layers = {}, collections.defaultdict(list)
        for name, value in logs.items():
            figure, by_layer, _ = name.partition("/layer_")
            if by_layer:
                layers[figure].append(value)
            else:
                brief[name] = value
        for figure, values in layers.items():
            brief[figure] = f"{min(values):.4g} to {max(values):.4g}" if len(values) > 1 else values[0]
        super().on_log(args, state, control, logs=brief, **kwargs)


class LaplacianShareCallback(TrainerCallback, ExportableState):
    """Raises `laplacian_share` linearly from the value the model starts with to 1, which it then keeps.

    With `laplacianize(model, ..., laplacian_share=0, keep_outputs=True)` before it, a pretrained model becomes
    Laplacian gradually. Checkpoints record the starting value, so a resumed run goes on along the same line.

    Args:
        steps: number of optimizer steps after which the share is 1.
    """

    def __init__(self, steps: int):
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is {steps!r}, allowed is an integer of at least 1.")
        self.steps = steps
        self.start = None

    def state(self) -> dict:
        return {"args": {"steps": self.steps}, "attributes": {"start": self.start}}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step > 0 else None
        if saved is not None:
            self.start = saved["attributes"]["start"]
        else:
            configs = (module.config for module in model.modules() if isinstance(module, PreTrainedModel))
            self.start = next(
                (config.laplacian_share for config in configs if hasattr(config, "laplacian_share")), None
            )
            if self.start is None:
                raise ValueError(f"{type(model).__name__} has no Laplacian heads whose share could be raised.")
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        left = max(0.0, 1 - state.global_step / self.steps)
        set_laplacian_share(model, 1 - (1 - self.start) * left)
