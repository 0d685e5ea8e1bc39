"""What is kept of an evaluation: eval.json, a table of it, and the block of a model card."""

import importlib.metadata
import json
import math
import numbers
import re
import shutil
from pathlib import Path

from huggingface_hub import EvalResult

from laplacian_heads.files import write

FILE = "eval.json"


def entries(found: dict, settings: dict) -> dict[str, dict]:
    """The scores in what lm-eval returns, by task and group.

    Args:
        found: what `lm_eval.simple_evaluate` returns.
        settings: what else the scores depend on, such as whether calculator calls were answered.

    Returns:
        For each task and each group with a score: metric, value and stderr of its first metric and, under others, of
        the rest; items scored, and of how many; chance, the score of guessing; dataset and dataset_config, on the Hub;
        the task's generation_kwargs; the settings; the version of lm-eval; samples, to be filled in. None where
        unknown.
    """
    groups = found.get("group_subtasks", {})

    def of(task):
        if task in groups:
            return sum(of(subtask) for subtask in groups[task])
        return found["n-samples"][task]["original"]

    kept = {}
    for task, figures in found["results"].items():
        config = found["configs"].get(task, {})
        scores = [score for key, value in figures.items() if (score := _score(figures, key, value))]
        # The first is the task's own first, which lm-eval does not keep to.
        order = [metric["metric"] for metric in config.get("metric_list") or []]
        scores.sort(key=lambda score: order.index(score["metric"]) if score["metric"] in order else len(order))
        if scores:
            kept[task] = {
                **scores[0],
                "items": figures.get("sample_len"),
                "of": of(task),
                "chance": (config.get("metadata") or {}).get("chance"),
                "dataset": config.get("dataset_path"),
                "dataset_config": config.get("dataset_name"),
                "generation_kwargs": config.get("generation_kwargs"),
                **settings,
                "lm_eval_version": importlib.metadata.version("lm_eval"),
                "samples": None,
                "others": scores[1:],
            }
    return kept


def _score(figures: dict, key: str, value) -> dict | None:
    metric, comma, name = key.partition(",")
    if not comma or metric.endswith("_stderr") or not isinstance(value, numbers.Real):
        return None
    error = figures.get(f"{metric}_stderr,{name}")
    known = isinstance(error, numbers.Real) and math.isfinite(error)
    return {
        "metric": metric if name == "none" else key,
        "value": float(value),
        "stderr": float(error) if known else None,
    }


def add(path: Path, checkpoint: str, new: dict[str, dict], weights: str | None = None) -> Path | None:
    """Write new entries into eval.json, beside those of the same checkpoint.

    Args:
        path: the file, which need not be there.
        checkpoint: whose scores the new ones are, as `LaplacianHeadsLM.checkpoint` says.
        new: what `entries` returned.
        weights: `files.weights_hash` of the model's folder, if it has one.

    Returns:
        Where a file that held another checkpoint's scores, or was damaged, is now; None if there was none.
    """
    tasks, aside = {}, None
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            owner, tasks = before["checkpoint"], dict(before["tasks"])
        except (ValueError, KeyError, TypeError):
            owner = "damaged"
        if owner != checkpoint:
            tasks, aside = {}, path.with_name(f"{path.stem}-{str(owner)[:8]}.json")
            shutil.copyfile(path, aside)
    write(path, {"checkpoint": checkpoint, "weights": weights, "tasks": {**tasks, **new}})
    return aside


def items(entry: dict) -> str:
    """How many items an entry was measured on, and of how many if not on all."""
    count, of = entry.get("items"), entry.get("of")
    if count is None:
        return ""
    return f"{count:,} of {of:,}" if limited(entry) else f"{count:,}"


def limited(entry: dict) -> bool:
    """Whether an entry was measured on some of its task's items."""
    return None not in (entry.get("items"), entry.get("of")) and entry["items"] < entry["of"]


def table(tasks: dict[str, dict]) -> str:
    """The entries as text in columns, a row for each metric."""
    rows = [("task", "metric", "value", "standard error", "items")]
    for task, entry in tasks.items():
        for score in (entry, *entry["others"]):
            error = "" if score["stderr"] is None else f"{score['stderr']:.4f}"
            rows.append((task, score["metric"], f"{score['value']:.4f}", error, items(entry)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(sized))
        for sized in (list(zip(row, widths, strict=True)) for row in rows)
    )


def model_index(tasks: dict[str, dict]) -> list[EvalResult]:
    """The first metric of each entry as a result of a model card, for `huggingface_hub.ModelCardData`."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=entry.get("dataset") or task,
            dataset_config=entry.get("dataset_config"),
            dataset_name=entry.get("dataset") or task,
            metric_type=entry["metric"],
            metric_value=entry["value"],
            metric_name=", ".join(
                [f"{task} {entry['metric']}"]
                + ([f"{items(entry)} items"] if limited(entry) else [])
                + ([f"{key} {value}" for key, value in (entry.get("gen_kwargs") or {}).items()])
                + ([] if entry.get("calculator", True) else ["without calculator"])
            ),
        )
        for task, entry in tasks.items()
        if math.isfinite(entry["value"])
    ]


def results_folder(model: str, output: str | None = None) -> Path:
    """Where what was measured of a model lies: its own folder; for an id of the Hub runs/eval/OWNER--NAME.

    Of a checkpoint of a run that is in training it is geometry/checkpoint-N of the run: the checkpoint itself is
    deleted when the next one is complete.
    """
    if output is not None:
        return Path(output).expanduser()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return Path("runs", "eval", model.replace("/", "--"))
    return folder.parent / "geometry" / folder.name if re.fullmatch(r"checkpoint-\d+", folder.name) else folder
