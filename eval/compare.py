"""Runs side by side: what training, eval and geometry wrote into their folders, as one table, plots and verdicts."""

import dataclasses
import json
import math
from pathlib import Path

from laplacian_heads.eval.geometry import results_folder
from laplacian_heads.files import write

RESULTS = ("results.json", "eval.json", "geometry.json")


@dataclasses.dataclass
class CompareRecipe:
    """Keys of `recipes/compare.yaml`, which says what they mean."""

    models: list | None
    output: str | None

    def __post_init__(self):
        if not self.models or not all(isinstance(model, str) and model for model in self.models):
            raise ValueError(f"models is {self.models}, allowed is a list of folders of runs and ids of the Hub.")
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"models is {self.models}, allowed is each run once.")
        if self.output == "":
            raise ValueError("output is '', allowed is null or the path of a folder.")


def read(folders: list[Path]) -> dict:
    """What is known of a run from the files of its folders; of two folders that know a thing the earlier is believed.

    Args:
        folders: those of one run's stages, such as pretraining's, which knows bits per byte, and then SFT's.

    Returns:
        laplacian_heads, bits_per_byte and the stage it is of, tokens_per_second, seed, within_sequence_share and
        components_99 of the last layer: None where unknown. scores: {task: (score, standard error or None)}. chance:
        {task: score of guessing}. layers: the geometry of each. log_history: Trainer's log. The last four are empty
        where unknown.

    Raises:
        ValueError: the folders have none of RESULTS, or a file of theirs is damaged.
    """
    files = {name: [] for name in (*RESULTS, "config.json", "trainer_state.json")}
    for folder in folders:
        for name, contents in files.items():
            path = Path(folder) / name
            if path.exists():
                contents.append(_json(path))
    if not any(files[name] for name in RESULTS):
        names = " and ".join(map(str, folders))
        raise ValueError(f"There is no {', no '.join(RESULTS)} in {names}: train, eval and geometry write them.")

    def first(key, *names):
        known = [content[key] for name in names for content in files[name] if content.get(key) is not None]
        return known[0] if known else None

    tasks = first("tasks", "eval.json") or {}
    layers = first("layers", "geometry.json") or []
    last = layers[-1] if layers else {}
    return {
        "laplacian_heads": first("laplacian_heads", "results.json", "config.json"),
        "bits_per_byte": first("bits_per_byte", "results.json"),
        "stage": first("stage", "results.json"),
        "tokens_per_second": first("tokens_per_second", "results.json"),
        "seed": first("seed", "results.json"),
        "scores": {task: (entry["value"], entry["stderr"]) for task, entry in tasks.items()},
        "chance": {task: entry["chance"] for task, entry in tasks.items() if entry["chance"] is not None},
        "within_sequence_share": last.get("within_sequence_share"),
        "components_99": last.get("components_99"),
        "layers": layers,
        "log_history": first("log_history", "trainer_state.json") or [],
    }


def _json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged; move it away and make it again ({error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged; move it away and make it again.")
    return content


def rows(runs: dict[str, list[Path]]) -> list[dict]:
    """What is known of each run, as `read` gives it, with its name under "run".

    Args:
        runs: name of each run and its folders.
    """
    return [{"run": name, **read(folders)} for name, folders in runs.items()]


def table(rows: list[dict]) -> str:
    """Rows of `rows` as one Markdown table; what no run knows has no column."""
    tasks = dict.fromkeys(task for row in rows for task in row["scores"])
    columns = {
        "run": [row["run"] for row in rows],
        "Laplacian heads": [_cell(row["laplacian_heads"]) for row in rows],
        "bits per byte": [_cell(row["bits_per_byte"], ".4f") for row in rows],
        **{task: [_score(row["scores"].get(task)) for row in rows] for task in tasks},
        "within-sequence share, last layer": [_cell(row["within_sequence_share"], ".3f") for row in rows],
        "components for 99 %, last layer": [_cell(row["components_99"], ".1f") for row in rows],
        "tokens/s": [_cell(row["tokens_per_second"], ",.0f") for row in rows],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    widths = [max(map(len, [head, *cells])) for head, cells in columns.items()]
    lines = [list(columns), ["-" * width for width in widths], *zip(*columns.values(), strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _cell(value, form: str = "") -> str:
    return "" if value is None else format(str(value) if form == "" else value, form)


def _score(score: tuple | None) -> str:
    if score is None:
        return ""
    value, error = score
    return f"{value:.3f}" + ("" if error is None else f" ± {error:.3f}")


def verdict(baseline: dict, other: dict) -> str:
    """One sentence on how a run did against another: better, worse or not distinguishable, measure by measure.

    Two scores are distinguishable if they differ by more than two standard errors of their difference, which is
    sqrt(se1^2 + se2^2). Bits per byte have no standard error: the lower is better. Geometry is lower or higher.

    Args:
        baseline, other: rows of `rows`. What only one of them knows is left out.
    """
    parts = []
    for task, (value, error) in other["scores"].items():
        if task in baseline["scores"]:
            value_before, error_before = baseline["scores"][task]
            figures = f"{_score((value, error))} against {_score((value_before, error_before))}"
            if error is None or error_before is None:
                word = _word(value - value_before, "better", "worse") + " without a known standard error"
            elif abs(value - value_before) <= 2 * math.hypot(error, error_before):
                word = "not distinguishable"
            else:
                word = _word(value - value_before, "better", "worse")
            parts.append(f"{task} {word} ({figures})")
    for name, key, form, more, less in (
        ("bits per byte", "bits_per_byte", ".4f", "worse", "better"),
        ("within-sequence share", "within_sequence_share", ".3f", "higher", "lower"),
        ("components", "components_99", ".1f", "higher", "lower"),
    ):
        # Stages are measured on texts of their own.
        same = key != "bits_per_byte" or baseline["stage"] == other["stage"]
        if same and baseline[key] is not None and other[key] is not None:
            word = _word(other[key] - baseline[key], more, less)
            parts.append(f"{name} {word} ({other[key]:{form}} against {baseline[key]:{form}})")
    names = [
        row["run"] if row["laplacian_heads"] is None else f"{row['run']} (Laplacian heads: {row['laplacian_heads']})"
        for row in (other, baseline)
    ]
    found = "; ".join(parts) or "nothing that both have measured"
    return f"{names[0]} against {names[1]}, here: {found}; one seed is no evidence for or against Laplacian heads."


def _word(difference: float, more: str, less: str) -> str:
    return "equal" if difference == 0 else more if difference > 0 else less


def plot(rows: list[dict], folder: Path) -> None:
    """Write scores.png, geometry.png and loss.png into a folder, each if a run has what it shows."""
    from laplacian_heads.eval import plots  # here, so that the table comes without matplotlib

    scores = {row["run"]: row["scores"] for row in rows if row["scores"]}
    if scores:
        chance = {task: value for row in rows for task, value in row["chance"].items()}
        plots.scores(scores, chance, folder / "scores.png")
    layers = {row["run"]: row["layers"] for row in rows if row["layers"]}
    if layers:
        plots.geometry(layers, folder / "geometry.png")
    logs = {row["run"]: row["log_history"] for row in rows if row["log_history"]}
    if logs:
        plots.loss(logs, folder / "loss.png")


def compare(recipe: CompareRecipe, dry_run: bool = False) -> None:
    """Print the table of some runs and a verdict on each against the first; with an output also write them and plots.

    Raises:
        ValueError: a run is not there or has nothing to compare, or a file of it is damaged.
    """
    runs = {model: [results_folder(model)] for model in recipe.models}
    for model, (folder,) in runs.items():
        if not folder.is_dir():
            raise ValueError(f"There is no folder {model}, nor {folder} with what was measured of a model of the Hub.")
    if dry_run:
        print(f"Would read {', '.join(RESULTS)} of {', '.join(recipe.models)}, into {recipe.output or 'no folder'}.")
        return
    found = rows(runs)
    text = "\n\n".join([table(found), *(verdict(found[0], other) for other in found[1:])])
    print(text)
    if recipe.output is not None:
        output = Path(recipe.output).expanduser()
        output.mkdir(parents=True, exist_ok=True)
        write(output / "compare.md", text + "\n")
        plot(found, output)
        print(f"\n{output}: {', '.join(sorted(path.name for path in output.iterdir() if path.is_file()))}")
