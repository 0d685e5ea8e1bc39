"""Scoring a model by lm-eval: its stock tasks, and ours in `tasks`."""

import contextlib
import dataclasses
import json
import logging
from pathlib import Path

import lm_eval
import lm_eval.api.model
import lm_eval.api.task
import lm_eval.evaluator
import torch
import transformers
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig

from laplacian_heads import recipes
from laplacian_heads.eval import results, sandbox
from laplacian_heads.eval.calculator import Calculator
from laplacian_heads.eval.harness import WARPERS, LaplacianHeadsLM
from laplacian_heads.files import check_model, make_folder, weights_hash

TASKS = Path(__file__).parent / "tasks"
# What generation may be told: lm-eval's own settings, and transformers'.
GENERATION = ["max_gen_toks", "until", "do_sample", *sorted(GenerationConfig().to_dict())]
# Where lm-eval shows a bar for building prompts and one for tokenizing them, without a switch.
SHORT_BARS = (lm_eval.api.task, lm_eval.api.model)


@dataclasses.dataclass
class EvalRecipe:
    """Keys of `recipes/eval.yaml`, which says what they mean."""

    model: str | None
    tasks: list | str
    include_path: str | None
    data: str | None
    batch_size: int | str
    limit: int | None
    gen_kwargs: dict
    seed: int
    calculator: bool
    apply_chat_template: bool
    confirm_run_unsafe_code: bool
    dtype: str
    device: str | None
    output: str | None
    use_cache: str | None
    trust_remote_code: bool

    def __post_init__(self):
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is a model's folder or its id on the Hub.")
        if not self.tasks:
            raise ValueError(f"tasks is {self.tasks!r}, allowed is a list with at least one task of lm-eval.")
        self.tasks = [self.tasks] if isinstance(self.tasks, str) else [str(task) for task in self.tasks]
        if self.batch_size != "auto" and (isinstance(self.batch_size, str) or self.batch_size < 1):
            raise ValueError(f"batch_size is {self.batch_size}, allowed is auto or at least 1.")
        if self.limit is not None and self.limit < 2:
            raise ValueError(f"limit is {self.limit}, allowed is at least 2: one item has no standard error.")
        for key in self.gen_kwargs:
            if key not in GENERATION:
                raise ValueError(f"gen_kwargs knows no {key!r}; {recipes.nearest(str(key), GENERATION)}")
        if self.gen_kwargs.keys() & WARPERS.keys():  # else lm-eval stays greedy where the task is
            self.gen_kwargs = {"do_sample": self.gen_kwargs.get("temperature") != 0, **self.gen_kwargs}
        if self.include_path is not None and not Path(self.include_path).expanduser().is_dir():
            raise ValueError(f"include_path is {self.include_path!r}, allowed is null or a folder with tasks.")
        for name in ("output", "use_cache", "data"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is '', allowed is null or a path.")
        if self.dtype != "auto" and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype is {self.dtype!r}, allowed is auto or one of torch's, such as bfloat16.")
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
        return results.results_folder(self.model, self.output)


def evaluate(recipe: EvalRecipe, dry_run: bool = False) -> None:
    """Score a model on tasks of lm-eval; prints a table and writes `eval.json`, and into `eval` what lm-eval writes.

    Raises:
        ValueError: a task that is not there, a model without chat template or calculator tokens where they are asked
            for, code that nobody said may run, or a prompt that does not fit into the model's context.
        OSError: the model or the data of a task cannot be read, or the results cannot be written.
    """
    check_model(recipe.model)
    manager = _task_manager(recipe)
    target = recipe.folder / results.FILE
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

    make_folder(target.parent / "eval")  # before there are hours to lose
    with _quiet():
        _load_data(manager, recipe)
        model = LaplacianHeadsLM(
            recipe.model,
            calculator=recipe.calculator,
            seed=recipe.seed,
            tokenizer=tokenizer,
            batch_size=recipe.batch_size,
            dtype=recipe.dtype,
            device=recipe.device,
            trust_remote_code=recipe.trust_remote_code,
        )
        cache = None
        if recipe.use_cache is not None:
            cache = Path(recipe.use_cache).expanduser() / f"{model.checkpoint[:16]}-{calculator.replace(' ', '-')}"
            make_folder(cache.parent)
        found = lm_eval.simple_evaluate(
            model,
            tasks=recipe.tasks,
            task_manager=manager,
            limit=recipe.limit,
            gen_kwargs=recipe.gen_kwargs or None,
            apply_chat_template=recipe.apply_chat_template,
            confirm_run_unsafe_code=recipe.confirm_run_unsafe_code,
            use_cache=cache and str(cache),
        )
    if found is None:  # a process of several, and not the first, which has the results of all
        return
    found["config"].update(model="laplacian-heads", model_args=dataclasses.asdict(recipe))
    samples = found.pop("samples")
    names = ("calculator", "apply_chat_template", "seed", "dtype", "gen_kwargs")
    settings = {name: getattr(recipe, name) for name in names}
    entries = results.entries(found, settings)
    print(results.table(entries))
    print(", ".join([calculator, limit, *(f"{key} {value}" for key, value in recipe.gen_kwargs.items())]))
    for task, path in _save(found, samples, recipe).items():
        entries[task]["samples"] = str(path.relative_to(target.parent))
    if aside := results.add(target, model.checkpoint, entries, weights_hash(Path(recipe.model).expanduser())):
        print(f"{target} held no scores of this checkpoint; what it held is in {aside}.")


def _task_manager(recipe: EvalRecipe) -> TaskManager:
    """Where lm-eval looks for these tasks. Raises ValueError for a task that is nowhere."""
    own = [] if recipe.include_path is None else [Path(recipe.include_path).expanduser()]
    paths = [TASKS, *own]
    for path in sorted(path for folder in own for path in folder.rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # lm-eval passes over a file that it cannot read
            raise ValueError(f"include_path: {path} is no task: {' '.join(str(error).split())}") from error
    metadata = None if recipe.data is None else {"data": recipe.data}
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    if set(recipe.tasks) <= set(manager.all_tasks):
        return manager
    manager = TaskManager(include_path=paths, metadata=metadata)  # thousands of files: this takes seconds
    for name in recipe.tasks:
        if name not in manager.all_tasks:
            raise ValueError(f"There is no task {name!r}; {recipes.nearest(name, manager.all_tasks)}")
    return manager


def _load_data(manager: TaskManager, recipe: EvalRecipe) -> None:
    """Read the data of the tasks, and refuse what must not be run, before the model is read and has answered."""
    try:
        loaded = manager.load(recipe.tasks)
    except OSError as error:
        names = ", ".join(recipe.tasks)
        raise OSError(f"The data of {names}, or what it is measured with, cannot be read: {error}") from error
    except ValueError as error:
        if str(error).startswith("Duplicate task"):
            raise ValueError(f"{error}; score one after the other, their scores are kept together.") from error
        raise
    manager.load = lambda _: loaded  # lm-eval loads them again
    unsafe = [name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe and not recipe.confirm_run_unsafe_code:
        raise ValueError(f"{unsafe[0]} runs code that the model writes; --confirm_run_unsafe_code allows it.")
    if any("sandboxed" in loaded["tasks"][name].aggregation() for name in unsafe):
        sandbox.isolated()


def _save(found: dict, samples: dict, recipe: EvalRecipe) -> dict[str, Path]:
    """Write lm-eval's files into the folder `eval`; returns each task's file of samples.

    Raises:
        OSError: a file is not there as it should be; lm-eval itself does not say so.
    """
    tracker = EvaluationTracker(output_path=str(recipe.folder / "eval" / "results.json"))
    tracker.general_config_tracker.model_source = "laplacian-heads"
    tracker.general_config_tracker.model_name = recipe.model
    tracker.save_results_aggregated(found, samples)
    date, files = getattr(tracker, "date_id", ""), {}
    try:
        json.loads((recipe.folder / "eval" / f"results_{date}.json").read_text(encoding="utf-8"))
        for task, rows in samples.items():
            tracker.save_results_samples(task, rows)
            files[task] = recipe.folder / "eval" / f"samples_{task}_{date}.jsonl"
            with files[task].open(encoding="utf-8") as lines:
                for row in rows:
                    if json.loads(next(lines))["doc_id"] != row["doc_id"]:
                        raise ValueError
    except (OSError, ValueError, StopIteration) as error:
        raise OSError(f"{recipe.folder / 'eval'}: the results cannot be written; the disk is probably full.") from error
    return files


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
