"""A run of training: its folder, which one run at a time has, and going on where an earlier process was stopped."""

import contextlib
import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.utils import logging

from laplacian_heads import recipes
from laplacian_heads.files import Stopped, locked, make_folder, write
from laplacian_heads.train.recipe import RunRecipe, this_process
from laplacian_heads.train.trainer import RunTrainer


def has_bf16() -> bool:
    """Whether this machine multiplies bfloat16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def peak_memory() -> int:
    """Bytes that this process has held at most: on the GPU if there is one, else in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def is_finished(recipe: RunRecipe) -> bool:
    """Whether the run of a recipe is complete, so that nothing is left to do.

    Raises:
        ValueError: the output folder holds the run of another recipe.
    """
    output = Path(recipe.output).expanduser()
    recipes.check_output(output, recipe)
    if (output / "results.json").exists():
        print(f"{output} is finished.")
        return True
    return False


@contextlib.contextmanager
def claimed(recipe: RunRecipe) -> Iterator[Path | None]:
    """The output folder of a recipe, which no other run may train in meanwhile; None if one has just finished there.

    Raises:
        ValueError: another run is training there, or the folder holds the run of another recipe.
    """
    output = Path(recipe.output).expanduser()
    make_folder(output)
    state = this_process()
    # Workers of a killed run have its lock until they notice, within five seconds.
    with locked(output, "training", 10) if state.is_main_process else contextlib.nullcontext():
        if is_finished(recipe):  # by a process that had the lock until now
            yield None
        else:
            if state.is_main_process:
                recipes.write(output / "recipe.yaml", recipe)
            logging.disable_progress_bar()  # one for each file of a checkpoint, across that of the training
            yield output


def arguments(recipe: RunRecipe, output: Path, steps: int, per_step: int) -> dict:
    """Arguments of Trainer that are the same in every run.

    Args:
        steps: number of optimizer steps.
        per_step: rows or images in a step, over all processes.
    """
    return {
        "output_dir": str(output),
        "max_steps": steps,
        "per_device_train_batch_size": recipe.batch_size,
        "gradient_accumulation_steps": per_step // (recipe.batch_size * this_process().num_processes),
        "max_grad_norm": recipe.max_grad_norm,
        "bf16": recipe.bf16 and has_bf16(),
        "torch_compile": recipe.compile,
        # only where asked for: transformers 5.24 warns of the old name
        **({"gradient_checkpointing": True} if recipe.gradient_checkpointing else {}),
        "use_cpu": not torch.accelerator.is_available(),
        "seed": recipe.seed,
        "ignore_data_skip": True,  # the data go on at their places
        "logging_steps": recipe.logging_steps,
        "logging_nan_inf_filter": False,  # which hides what ends a run
        "eval_strategy": "no" if recipe.eval_steps is None else "steps",
        "eval_steps": recipe.eval_steps,
        "save_steps": recipe.save_steps,
        "ddp_find_unused_parameters": False,
        "remove_unused_columns": False,  # what the loss needs is not always an argument of forward
        "report_to": recipe.report_to,
    }


def complete(trainer: RunTrainer, steps: int, checkpoint: Path | None) -> tuple[dict[str, float], float]:
    """Train up to the last step, from a checkpoint if there is one, and measure on what is held out.

    Returns:
        What was measured, and the seconds of training, those of earlier processes included.

    Raises:
        ValueError: the loss is no longer a number.
        Stopped: the process was asked to terminate; a checkpoint has been written.
    """
    output = Path(trainer.args.output_dir)
    with trainer.termination.listening():
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if trainer.state.global_step < steps:
            raise Stopped(
                f"{output}: stopped after step {trainer.state.global_step} of {steps}, which is saved; the same "
                "command goes on from there."
            )
        seconds = trainer.seconds()
        metrics = trainer.evaluate()
    if not metrics:
        raise Stopped(f"{output}: stopped while measuring; the training is saved, and the same command goes on there.")
    if not math.isfinite(metrics.get("eval_loss", 0.0)):  # there may be none
        raise ValueError(f"The held-out loss is {metrics['eval_loss']}; delete {output} and give lower learning rates.")
    return metrics, seconds


def finish(trainer: RunTrainer, results: dict) -> None:
    """Write the results of a run, whose model is written already, and delete its checkpoints. In the main process."""
    output = Path(trainer.args.output_dir)
    write(output / "results.json", results)
    for path in (*output.glob("checkpoint-*"), trainer.unfinished):
        shutil.rmtree(path, ignore_errors=True)
