"""What is kept of an evaluation: eval.json, a table of it, and the block of a model card."""

import importlib.metadata
import json
import math
import numbers
from pathlib import Path

from huggingface_hub import EvalResult

FILE = "eval.json"


def entries(found: dict, settings: dict) -> dict[str, dict]:
    """The scores in what lm-eval returns, by task and group.

    Args:
        found: what `lm_eval.simple_evaluate` returns.
        settings: what else the scores depend on, such as whether calculator calls were answered.

    Returns:
        For each task and each group with a score: metric, value and stderr of its first metric and, under others, of
        the rest; items scored, and of how many; chance, the score of guessing; dataset, its id on the Hub; the task's
        generation_kwargs; the settings; the version of lm-eval; samples, to be filled in. None where unknown.
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


def merged(path: Path, checkpoint: str, new: dict[str, dict]) -> dict:
    """The content of eval.json with new entries: those of the same checkpoint stay, another's do not.

    Args:
        path: the file, which need not be there.
        checkpoint: whose scores the new ones are, as `LaplacianHeadsLM.checkpoint` says.
        new: what `entries` returned.
    """
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        tasks = before["tasks"] if before["checkpoint"] == checkpoint else {}
        return {"checkpoint": checkpoint, "tasks": {**tasks, **new}}
    except (OSError, ValueError, KeyError, TypeError):
        return {"checkpoint": checkpoint, "tasks": new}


def items(entry: dict) -> str:
    """How many items an entry was measured on, and of how many if not on all."""
    count, of = entry.get("items"), entry.get("of")
    if count is None:
        return ""
    return f"{count:,}" if of is None or count >= of else f"first {count:,} of {of:,}"


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
    """The entries as results of a model card, for `huggingface_hub.ModelCardData`: each task's metrics."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=entry.get("dataset") or task,
            dataset_name=task,
            metric_type=score["metric"],
            metric_value=score["value"],
            metric_name=", ".join(
                [score["metric"]]
                + ([f"{items(entry)} items"] if items(entry).startswith("first") else [])
                + ([] if entry.get("calculator", True) else ["without calculator"])
            ),
        )
        for task, entry in tasks.items()
        for score in (entry, *entry.get("others", []))
        if math.isfinite(score["value"])
    ]
