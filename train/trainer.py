"""Trainer for all runs: its own batches, exact measurement, checkpoints that are there as a whole or not at all."""

import json
import math
import shutil
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm.auto import tqdm
from transformers import Trainer

from laplacian_heads.train import budget
from laplacian_heads.train.callbacks import TerminationCallback
from laplacian_heads.train.checkpoints import PROGRESS
from laplacian_heads.train.rows import IGNORED


class RunTrainer(Trainer):
    """Trainer over batches of its own, whose checkpoints appear when they are complete.

    Args:
        optimizer: made before FSDP has its share of the weights, which it then takes over.
        batches: what to train on, an iterable with `places`, where each of its streams goes on, and `waited`, the
            seconds in which a batch was waited for; None where the checkpoint to go on from is of the last step.
        termination: knows whether the process was asked to end.
        seconds_before: of training, in the processes before this one.
        flops: floating-point operations for one of what is counted, forward and backward.

    Attributes:
        counted: what speed is given in, such as "tokens"; a subclass says it, and counts them in `seen`.
    """

    counted: str

    def __init__(
        self,
        *args,
        optimizer: torch.optim.Optimizer,
        batches,
        termination: TerminationCallback,
        seconds_before: float,
        flops: int,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.optimizer = optimizer  # Trainer's own argument for it is refused under FSDP
        if self.is_fsdp_enabled and self.args.bf16:
            # Else gradients are summed, and the loss rounded, in bfloat16.
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        self.batches, self.termination, self.flops = batches, termination, flops
        self.seconds_before, self.started = seconds_before, time.perf_counter()
        self.unfinished = Path(self.args.output_dir) / ".unfinished"
        self.finite = torch.tensor(True, device=self.args.device)
        self.device_flops = None
        self.logged = None  # time, number counted and seconds waited for data, at the last line of the log

    def seen(self) -> int:
        """Number of what is counted that the run has trained on."""
        raise NotImplementedError

    def seconds(self) -> float:
        """Seconds of training so far, this process and those before it."""
        return self.seconds_before + time.perf_counter() - self.started

    def create_optimizer(self, model=None):
        return self.optimizer

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        # Trainer leaves this to its skipping of data, which does not happen here; drop path and dropout go by it.
        self._load_rng_state(checkpoint)

    def get_train_dataloader(self):
        return [] if self.batches is None else self.batches

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.finite &= loss.isfinite()  # read only where the device is waited for anyway
        return loss

    def _maybe_log_save_evaluate(self, tr_loss, grad_norm, model, *args, **kwargs):
        # Trainer's own begins again with every process.
        self.state.epoch = self.state.global_step / self.state.max_steps
        if self.control.should_log or self.control.should_save:
            self._check_finite(model)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, *args, **kwargs)

    def _check_finite(self, model) -> None:
        """Raise ValueError if a loss so far, or a weight that is about to be saved, is not finite."""
        broken = (~self.finite).float()
        if self.control.should_save:
            for parameter in model.parameters():
                local = getattr(parameter, "_local_tensor", parameter)  # FSDP's share of it
                broken += (~local.isfinite().all()).float()
        if self.accelerator.reduce(broken).item():
            checkpoints = sorted(Path(self.args.output_dir).glob("checkpoint-*"))
            kept = f"{checkpoints[-1]} is from before" if checkpoints else "there is no checkpoint"
            raise ValueError(
                f"The loss or the weights are no longer finite at step {self.state.global_step}; {kept}; give lower "
                "learning rates and another output=."
            )

    def log(self, logs, start_time=None):
        if "grad_norm" in logs:
            logs = {**logs, **self._speed()}
        super().log(logs, start_time)

    def _speed(self) -> dict[str, float]:
        """What a line of the log says of the time since the one before."""
        now = time.perf_counter(), self.seen(), self.batches.waited, self.state.global_step
        before, self.logged = self.logged, now
        if before is None:  # the first one has compiling and warming up in it
            return {}
        seconds, seen, waited, steps = (a - b for a, b in zip(now, before, strict=True))
        if self.device_flops is None:
            self.device_flops = budget.matmul_flops(self.args.bf16)
            self.logged = (time.perf_counter(), *now[1:])
        rate = seen / seconds
        return {
            f"{self.counted}_per_second": rate,
            # of what a product of large matrices reaches on these devices
            "flop_utilisation": rate * self.flops / (self.device_flops * self.args.world_size),
            "data_wait_share": waited / seconds,
            "hours_left": (self.args.max_steps - self.state.global_step) / steps * seconds / 3600,
        }

    def _get_output_dir(self, trial):
        return str(self.unfinished) if self._is_saving else super()._get_output_dir(trial)

    _is_saving = False

    def _save_checkpoint(self, model, trial):
        """Write a checkpoint beside the others, and let it be seen when it is complete."""
        output, part = Path(self.args.output_dir), self.unfinished / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            shutil.rmtree(self.unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._is_saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._is_saving = False
        places = self.accelerator.gather_for_metrics([self.batches.places], use_gather_object=True)
        if self.is_world_process_zero():  # the gathering says that all have written their part
            progress = {"seconds": self.seconds(), "places": {n: at for each in places for n, at in each.items()}}
            (part / PROGRESS).write_text(json.dumps(progress))
            (part / "training_args.bin").unlink(missing_ok=True)  # a pickle; the recipe says what it says
            older = list(output.glob("checkpoint-*"))
            if (output / part.name).exists():  # of this very step
                (output / part.name).rename(self.unfinished / "older")
            part.rename(output / part.name)
            for path in older:
                if path.name != part.name:
                    path.rename(self.unfinished / path.name)
            shutil.rmtree(self.unfinished)
        self.accelerator.wait_for_everyone()


class StageTrainer(RunTrainer):
    """Trainer of language models.

    Args:
        token_bytes: bytes each token stands for, for bits per byte.
        Every other: as in `RunTrainer`.
    """

    counted = "tokens"

    def __init__(self, *args, token_bytes: list[int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.token_bytes = None if token_bytes is None else torch.tensor(token_bytes)

    def seen(self) -> int:
        return self.state.num_input_tokens_seen

    def _get_learning_rate(self):
        self.rates = self.lr_scheduler.get_last_lr()  # of all groups, before the scheduler's step
        return super()._get_learning_rate()

    def log(self, logs, start_time=None):
        if "grad_norm" in logs:
            names = ("embedding_learning_rate", "head_learning_rate")
            logs = {**logs, **dict(zip(names, self.rates[1:], strict=False))}
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The loss in nats per target and, with token_bytes, the bits per byte of the text that the targets spell.

        Every target counts once, whatever row and process it is in; one that stands for no byte does not count where
        bytes do. Ends early, and says nothing, if the process is asked to end.
        """
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        process, processes = self.args.process_index, self.args.world_size
        mine = rows[process::processes]
        size = self.args.per_device_train_batch_size
        model = self.model_wrapped if self.is_fsdp_enabled else self.model
        model.eval()
        totals = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        # As many batches in each process: under FSDP all have to take part in every forward pass.
        starts = range(0, -(-len(rows) // processes), size)
        for start in tqdm(starts, "held-out rows", unit="batch", leave=False, disable=process > 0 or len(starts) < 100):
            if self.termination.agreed():
                return {}
            batch = self._prepare_inputs(self.data_collator(mine[start : start + size] or rows[:1]))
            targets = batch.pop("shift_labels", None)
            if targets is None:
                targets = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
            counted = (targets != IGNORED) & bool(mine[start : start + size])
            if self.token_bytes is not None:
                sizes = self.token_bytes.to(targets.device)[targets.clamp(min=0)]
                counted &= sizes > 0
                totals[2] += sizes[counted].sum().item()
            targets = targets.masked_fill(~counted, IGNORED)
            with torch.no_grad(), self.compute_loss_context_manager():
                nats = model(**batch, shift_labels=targets, num_items_in_batch=1).loss
            totals[0] += nats.item()
            totals[1] += counted.sum().item()
        # as objects, since not every device has float64
        gathered = self.accelerator.gather_for_metrics([totals.tolist()], use_gather_object=True)
        nats, counted, spelled = map(sum, zip(*gathered, strict=True))
        metrics = {f"{metric_key_prefix}_loss": nats / max(counted, 1)}
        if self.token_bytes is not None:
            metrics[f"{metric_key_prefix}_bits_per_byte"] = nats / math.log(2) / max(spelled, 1)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
