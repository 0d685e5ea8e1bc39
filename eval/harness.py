"""Scoring by lm-eval: its stock tasks and ours in `tasks`, with nanochat's calculator in what a model generates."""

import contextlib
import dataclasses
import importlib.metadata
import logging
import math
import numbers
import os
from pathlib import Path

import lm_eval
import lm_eval.api.model
import lm_eval.api.task
import lm_eval.evaluator
import torch
import transformers
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import AutoTokenizer, LogitsProcessorList

from laplacian_heads import recipes
from laplacian_heads.eval.calculator import Calculator
from laplacian_heads.eval.geometry import results_folder
from laplacian_heads.files import check_model, write

TASKS = Path(__file__).parent / "tasks"
# Where lm-eval shows a bar for building prompts and one for tokenizing them, without a switch.
SHORT_BARS = (lm_eval.api.task, lm_eval.api.model)


@dataclasses.dataclass
class EvalRecipe:
    """Keys of `recipes/eval.yaml`, which says what they mean."""

    model: str | None
    tasks: list
    batch_size: int
    limit: int | None
    calculator: bool
    apply_chat_template: bool
    device: str | None
    output: str | None
    trust_remote_code: bool

    def __post_init__(self):
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is a model's folder or its id on the Hub.")
        if not self.tasks:
            raise ValueError("tasks is [], allowed is a list with at least one task of lm-eval.")
        for name, least in (("batch_size", 1), ("limit", 2)):  # 2: a single item has no standard error
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, allowed is at least {least}.")
        if self.output == "":
            raise ValueError("output is '', allowed is null or the path of a folder.")
        if self.device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            self.device = "cpu" if accelerator is None else accelerator.type
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError):  # torch asserts that it was built with CUDA
            raise ValueError(f"device is {self.device!r}, allowed is one that torch finds here, such as cpu.") from None

    @property
    def folder(self) -> Path:
        """Where eval.json goes."""
        return results_folder(self.model, self.output)


@register_model("laplacian-heads")
class LaplacianHeadsLM(HFLM):
    """lm-eval's `hf` model with nanochat's calculator. A prompt that does not fit is refused, not cut.

    Args:
        pretrained: a folder, an id of the Hub, or a model.
        calculator: whether the results of calculator calls are put into what the model generates.
        arguments: those of `HFLM`.

    Raises:
        ValueError: the tokenizer lacks the calculator's tokens; later, a prompt is longer than the model's context.
    """

    def __init__(self, pretrained, calculator: bool = True, **arguments):
        super().__init__(pretrained, **arguments)
        self.processors = LogitsProcessorList([Calculator(self.tokenizer)] if calculator else [])
        if self.think_end_token is None:  # lm-eval drops what stands before it: the answer follows the last output
            self.think_end_token = self.tokenizer.get_vocab().get("<|output_end|>")
        if self.model.generation_config.eos_token_id is None:  # else rows run on until all of a batch have ended
            self.model.generation_config.eos_token_id = self.tokenizer.eos_token_id

    def get_model_info(self) -> dict:
        # For the commit's hash lm-eval asks the Hub, even about a folder.
        on_disk = isinstance(self.pretrained, str) and os.path.isdir(self.pretrained)
        return {} if on_disk else super().get_model_info()

    def _model_generate(self, context, max_length, stop, **arguments):
        return super()._model_generate(context, max_length, stop, logits_processor=self.processors, **arguments)

    def generate_until(self, requests, disable_tqdm=False):
        for request in requests:
            prompt, arguments = request.args
            new = normalize_gen_kwargs(arguments, self.max_gen_toks)["max_gen_toks"]
            self._check_fits(len(self.tok_encode(prompt)), new)
        return super().generate_until(requests, disable_tqdm)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        for _, prompt, continuation in requests:
            self._check_fits(len(prompt), len(continuation) - 1)  # the last token is scored, not read
        return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)

    def _check_fits(self, prompt: int, new: int):
        if prompt + new > self.max_length:
            raise ValueError(
                f"A prompt has {prompt} tokens and its answer up to {new}, allowed are {self.max_length} in all, the "
                "model's context."
            )


def evaluate(recipe: EvalRecipe, dry_run: bool = False) -> None:
    """Score a model on tasks of lm-eval; prints a table and writes `eval.json`.

    Raises:
        ValueError: a task that is not there, a model without chat template or calculator tokens where they are asked
            for, or a prompt that does not fit into the model's context.
        OSError: the model or the data of a task cannot be read.
    """
    check_model(recipe.model)
    manager = _task_manager(recipe.tasks)
    target = recipe.folder / "eval.json"
    limit = "all items" if recipe.limit is None else f"the first {recipe.limit} items"
    calculator = "with calculator" if recipe.calculator else "without calculator"
    print(f"{recipe.model}: {limit} of {', '.join(recipe.tasks)}, {calculator}, on {recipe.device}, into {target}")
    tokenizer = AutoTokenizer.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code)
    if recipe.apply_chat_template and tokenizer.chat_template is None:
        raise ValueError(f"{recipe.model} has no chat template, which apply_chat_template=true needs.")
    if recipe.calculator:
        Calculator(tokenizer)  # refuses a tokenizer without its tokens before the weights are read
    if dry_run:
        return

    with _quiet():
        model = LaplacianHeadsLM(
            recipe.model,
            calculator=recipe.calculator,
            tokenizer=tokenizer,
            batch_size=recipe.batch_size,
            device=recipe.device,
            trust_remote_code=recipe.trust_remote_code,
        )
        results = lm_eval.simple_evaluate(
            model,
            tasks=recipe.tasks,
            task_manager=manager,
            limit=recipe.limit,
            apply_chat_template=recipe.apply_chat_template,
            log_samples=False,
        )
    if results is None:  # a process of several, and not the first, which has the results of all
        return
    rows = list(_rows(results))
    _print_table(rows)
    print(f"{calculator}, {limit}")

    tasks = {}
    for row in rows:
        entry = {key: row[key] for key in ("metric", "value", "stderr")}
        if row["task"] in tasks:
            tasks[row["task"]]["others"].append(entry)
        else:
            tasks[row["task"]] = {**entry, "items": row["items"], "chance": row["chance"], "others": []}
    summary = {
        "tasks": tasks,
        "calculator": recipe.calculator,
        "limit": recipe.limit,
        "lm_eval_version": importlib.metadata.version("lm_eval"),
        "config": dataclasses.asdict(recipe),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    write(target, summary)


def _task_manager(names: list) -> TaskManager:
    """Where lm-eval looks for these tasks. Raises ValueError for a task that is nowhere."""
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    if set(map(str, names)) <= set(manager.all_tasks):
        return manager
    manager = TaskManager(include_path=TASKS)  # thousands of files: this takes seconds
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(f"There is no task {name!r}; {recipes.nearest(str(name), manager.all_tasks)}")
    return manager


@contextlib.contextmanager
def _quiet():
    """Within it there is one progress bar, that of the requests under way, and no word of lm-eval's but errors."""
    logger = logging.getLogger("lm_eval")
    level, verbosity = logger.level, transformers.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for module in SHORT_BARS:
        module.tqdm = lambda items, **_: items
    commit = lm_eval.evaluator.get_git_commit_hash
    lm_eval.evaluator.get_git_commit_hash = lambda: None  # git prints an error where the folder is no repository
    try:
        yield
    finally:
        logger.setLevel(level)
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()
        for module in SHORT_BARS:
            module.tqdm = tqdm
        lm_eval.evaluator.get_git_commit_hash = commit


def _rows(results: dict):
    """One row for every task and metric, a task's first metric first."""
    for task, figures in results["results"].items():
        for key, value in figures.items():
            metric, comma, name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, numbers.Real):
                continue
            error = figures.get(f"{metric}_stderr,{name}")
            yield {
                "task": task,
                "metric": metric if name == "none" else key,
                "value": float(value),
                "stderr": float(error) if isinstance(error, numbers.Real) and math.isfinite(error) else None,
                "items": figures.get("sample_len"),
                "chance": results["configs"].get(task, {}).get("metadata", {}).get("chance"),
            }


def _print_table(rows: list[dict]):
    header = ("task", "metric", "value", "standard error", "items")
    cells = [
        (
            row["task"],
            row["metric"],
            f"{row['value']:.4f}",
            "" if row["stderr"] is None else f"{row['stderr']:.4f}",
            "" if row["items"] is None else str(row["items"]),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for line in (header, *cells):
        text, numbers = line[:2], line[2:]
        left = [cell.ljust(width) for cell, width in zip(text, widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(numbers, widths[2:], strict=True)]
        print("  ".join(left + right))
