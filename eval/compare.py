"""Runs side by side: what training, eval and geometry wrote into their folders, as tables, plots and verdicts."""

import dataclasses
import functools
import json
import math
import numbers
import statistics
from pathlib import Path

import yaml

from laplacian_heads import recipes
from laplacian_heads.eval.geometry_report import figure, markdown_table
from laplacian_heads.eval.results import results_folder
from laplacian_heads.files import check_writable, read_json, write

FROZEN = ("probe.json", "knn.json", "segment.json")  # what was measured of a vision model's frozen features
RESULTS = ("results.json", "eval.json", "geometry.json", *FROZEN)
PAPER = Path(__file__).parent / "paper.yaml"
# What an image classifier's results.json has of its accuracy, and how many answers each of them allows.
ACCURACIES = {
    "accuracy": ("accuracy", 1),
    "accuracy_top5": ("top-5 accuracy", 5),
    "ema_accuracy": ("accuracy of averaged weights", 1),
    "knn_accuracy": ("k-NN in training", 1),
}
IMAGES = ("classify", "dino")  # stages whose models are of images
LOWER_IS_BETTER = ("bits_per_byte", "byte_perplexity", "word_perplexity", "perplexity")


@dataclasses.dataclass
class CompareRecipe:
    """Keys of `recipes/compare.yaml`, which says what they mean."""

    models: list | None
    output: str | None
    paper: bool

    def __post_init__(self):
        if not self.models or not all(isinstance(model, str) and model for model in self.models):
            raise ValueError(f"models is {self.models}, allowed is a list of folders of runs and ids of the Hub.")
        if len(set(self.models)) < len(self.models):
            raise ValueError(f"models is {self.models}, allowed is each run once.")
        if self.output == "":
            raise ValueError("output is '', allowed is null or the path of a folder.")


@dataclasses.dataclass
class Score:
    """What a run scored on a task, as its eval.json says, or an image classifier's accuracy; None where unknown.

    Args:
        metric: its name, with ",FILTER" behind it where lm-eval filtered the answers.
        value, stderr: the score and its standard error.
        items, of: how many items were scored, and how many the task has.
        calculator, apply_chat_template, generation_kwargs: how it was asked.
        data, held_out: what an image classifier was trained and measured on, as its recipe says.
        samples: {(doc_id, doc_hash): value} of the items that the score is the mean of.
        others: the task's other metrics, each with metric, value and stderr.
        frozen: whether it is of a vision model's frozen features.
    """

    metric: str
    value: float
    stderr: float | None = None
    items: int | None = None
    of: int | None = None
    calculator: bool | None = None
    apply_chat_template: bool | None = None
    generation_kwargs: dict | None = None
    data: str | None = None
    held_out: str | int | None = None
    samples: dict | None = None
    others: list = dataclasses.field(default_factory=list)
    frozen: bool = False

    @property
    def limited(self) -> bool:
        """Whether fewer items were scored than the task has."""
        return None not in (self.items, self.of) and self.items < self.of

    @property
    def lower_is_better(self) -> bool:
        return self.metric.partition(",")[0] in LOWER_IS_BETTER


def read(folders: list[Path]) -> dict:
    """What is known of a run from the files of its folders; of two folders that know a thing the earlier is believed.

    Args:
        folders: those of one run's stages, such as pretraining's, which knows bits per byte, and then SFT's.

    Returns:
        laplacian_heads, bits_per_byte and the stage it is of, tokens_per_second, seed, within_sequence_share and
        components_99 of the last layer: None where unknown. loss, images and hours: of an image classifier the held-out
        cross-entropy in nats; of it and of self-supervised training the images, each as often as it was drawn, and how
        long it took; else None. of_images: whether it is one of these, or a model whose frozen features were measured.
        scores: {task: Score}. chance: {task: score of guessing}. geometry: what was measured of it. log_history:
        Trainer's log. The last four are empty where unknown.

    Raises:
        ValueError: the folders have none of RESULTS, or a file of theirs is damaged.
    """
    files = {name: {} for name in (*RESULTS, "config.json", "trainer_state.json")}
    for folder in map(Path, folders):
        for name, contents in files.items():
            if (folder / name).exists():
                contents[folder] = read_json(folder / name)
    if not any(files[name] for name in RESULTS):
        names = " and ".join(map(str, folders))
        raise ValueError(
            f"There is no {', no '.join(RESULTS)} in {names}: train, eval, geometry, probe, knn and segment write them."
        )

    def first(key, *names):
        known = [content[key] for name in names for content in files[name].values() if content.get(key) is not None]
        return known[0] if known else None

    tasks = {}
    for folder, content in files["eval.json"].items():
        for task, entry in (content.get("tasks") or {}).items():
            if not isinstance(entry, dict) or not isinstance(entry.get("value"), numbers.Real):
                raise ValueError(f"{folder / 'eval.json'} is damaged, the task {task} has no value; make it again.")
            tasks.setdefault(task, (folder, entry))
    for folder, content in files["geometry.json"].items():
        layers = content.get("layers") or []
        if not isinstance(layers, list) or not all(isinstance(layer, dict) and "layer" in layer for layer in layers):
            raise ValueError(f"{folder / 'geometry.json'} is damaged, its layers are no list of layers; make it again.")
    geometry = next((content for content in files["geometry.json"].values() if content.get("layers")), {})
    last = geometry["layers"][-1] if geometry else {}
    scores = {task: _score(folder, entry) for task, (folder, entry) in tasks.items()}
    chance = {task: entry["chance"] for task, (_, entry) in tasks.items() if entry.get("chance") is not None}
    trained = {}
    for folder, content in files["results.json"].items():
        if content.get("stage") in IMAGES:
            trained = content
            classes = len(files["config.json"].get(folder, {}).get("id2label") or ())
            scores |= _accuracies(folder, content)
            chance |= {name: count / classes for name, count in ACCURACIES.values() if name in scores and classes}
    for name in FROZEN:
        for folder, content in files[name].items():
            try:
                scores |= _frozen(name, content)
            except (KeyError, TypeError, ValueError, IndexError):
                raise ValueError(f"{folder / name} is damaged; make it again.") from None
    return {
        "laplacian_heads": first("laplacian_heads", "config.json", "results.json", *FROZEN),
        "bits_per_byte": first("bits_per_byte", "results.json"),
        "stage": first("stage", "results.json"),
        "tokens_per_second": first("tokens_per_second", "results.json"),
        "seed": first("seed", "results.json"),
        "loss": trained.get("loss"),
        "images": trained.get("images"),
        "hours": trained["seconds"] / 3600 if trained.get("seconds") else None,
        "of_images": bool(trained or any(files[name] for name in FROZEN)),
        "scores": scores,
        "chance": chance,
        "within_sequence_share": figure(last, "variance", "shares", "within_sequence"),
        "components_99": figure(last, "spectrum", "per_sequence", "components_99"),
        "geometry": geometry,
        "log_history": first("log_history", "trainer_state.json") or [],
    }


def _score(folder: Path, entry: dict) -> Score:
    """The score of an entry of eval.json, and of the file of samples that it names, if that is there."""
    fields = {field.name: entry.get(field.name) for field in dataclasses.fields(Score)}
    score = Score(**{**fields, "samples": None, "others": entry.get("others") or [], "frozen": False})
    path = folder / (entry.get("samples") or "")
    if path.is_file():
        samples = _samples(path, score.metric)
        # Items of a file of another scoring, or of a metric that is no mean, such as perplexity, say nothing of it.
        if (
            score.items in (len(samples), None)
            and samples
            and all(isinstance(value, numbers.Real) for value in samples.values())
            and math.isclose(statistics.fmean(samples.values()), score.value, rel_tol=1e-6, abs_tol=1e-9)
        ):
            score.samples = samples
    return score


def _accuracies(folder: Path, results: dict) -> dict[str, Score]:
    """Of an image classifier's results, each with the binomial standard error of so many held-out images."""
    recipe = recipes.read(folder / "recipe.yaml")
    recipe = recipe if isinstance(recipe, dict) else {}
    found = {}
    for key, (name, _) in ACCURACIES.items():
        value, items = results.get(key), results.get("held_out_images")
        if value is not None:
            if not isinstance(value, numbers.Real) or not 0 <= value <= 1 or not isinstance(items, int) or items < 1:
                raise ValueError(f"{folder / 'results.json'} is damaged, its {key} is {value!r} of {items!r} images.")
            error = math.sqrt(value * (1 - value) / items)
            sources = {"data": recipe.get("data"), "held_out": recipe.get("held_out")}
            found[name] = Score("accuracy", value, error, items, **sources)
    return found


def _frozen(file: str, content: dict) -> dict[str, Score]:
    """What probe, knn or segment wrote, as scores; of a mean IoU nobody knows the standard error."""
    sources = {**{key: content["recipe"][key] for key in ("data", "held_out")}, "frozen": True}
    if file == "segment.json":
        value = content["mean_iou"]  # None where no pixel of a class was there or predicted
        return {} if value is None else {"mean IoU": Score("mean_iou", float(value), **sources)}
    if file == "probe.json":
        # Not the head that the held-out images themselves chose.
        found = {"linear probe": content["by_selection"]["held_out_accuracy"]}
    else:
        found = {f"{each['neighbors']}-NN": each["accuracy"] for each in content["neighbors"]}
    items = int(content["held_out_images"])
    return {
        name: Score("accuracy", value, math.sqrt(value * (1 - value) / items), items, **sources)
        for name, value in found.items()
    }


def _samples(path: Path, metric: str) -> dict:
    """{(doc_id, doc_hash): value} of a metric, from the samples of a task as lm-eval logs them."""
    name, _, filtered = metric.partition(",")
    samples = {}
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                item = json.loads(line)
                if item["filter"] == (filtered or "none"):
                    samples[item["doc_id"], item["doc_hash"]] = item.get(name)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged; move it away, and the task is compared without it ({error}).") from None
    return samples


def rows(runs: dict[str, list[Path]]) -> list[dict]:
    """What is known of each run, as `read` gives it, with its name under "run".

    Args:
        runs: name of each run and its folders.

    Raises:
        ValueError: as `read`, or some of the runs are image classifiers and others language models.
    """
    found = [{"run": name, **read(folders)} for name, folders in runs.items()]
    images = [row["run"] for row in found if row["of_images"]]
    texts = [
        row["run"]
        for row in found
        if not row["of_images"] and (row["stage"] or row["scores"] or row["bits_per_byte"] is not None)
    ]
    if images and texts:
        raise ValueError(f"{images[0]} is of images and {texts[0]} is of text, allowed are runs of one kind.")
    return found


def table(rows: list[dict]) -> str:
    """Rows of `rows` as one Markdown table; what no run knows has no column."""
    tasks = dict.fromkeys(task for row in rows for task in row["scores"])
    columns = {
        "run": [row["run"] for row in rows],
        "Laplacian heads": [_cell(row["laplacian_heads"]) for row in rows],
        "bits per byte": [_cell(row["bits_per_byte"], ".4f") for row in rows],
        **{task: [_figures(row["scores"].get(task)) for row in rows] for task in tasks},
        "held-out loss": [_cell(row["loss"], ".4f") for row in rows],
        "held-out images": [_held_out(row["scores"].get("accuracy")) for row in rows],
        "within-sequence share, last layer": [_cell(row["within_sequence_share"], ".3f") for row in rows],
        "components for 99 %, last layer": [_cell(row["components_99"], ".1f") for row in rows],
        "images seen": [_cell(row["images"], ",") for row in rows],
        "hours": [_cell(row["hours"], ".3f") for row in rows],
        "tokens/s": [_cell(row["tokens_per_second"], ",.0f") for row in rows],
    }
    return _markdown({head: cells for head, cells in columns.items() if any(cells)})


def _markdown(columns: dict[str, list[str]]) -> str:
    return markdown_table(columns, zip(*columns.values(), strict=True))


def _cell(value, form: str = "") -> str:
    return "" if value is None else format(str(value) if form == "" else value, form)


def _held_out(accuracy: Score | None) -> str:
    """How many images an accuracy is of, and whose: where the recipe has a number, they are some of its data."""
    if accuracy is None:
        return ""
    source = accuracy.data if isinstance(accuracy.held_out, int) else accuracy.held_out
    return f"{accuracy.items:,}" + ("" if source is None else f" of {source}")


def _figures(score: Score | None, form: str = ".3f") -> str:
    if score is None:
        return ""
    error = "" if score.stderr is None else f" ± {score.stderr:{form}}"
    return f"{score.value:{form}}{error}" + (f" ({score.items} of {score.of} items)" if score.limited else "")


def differences(rows: list[dict]) -> list[dict]:
    """How far the runs' scores lie from those of the first run, task by task, where an interval can be told.

    Where both runs have the values of the same items, the interval is of a paired bootstrap over the items; else it is
    two standard errors to both sides, sqrt(se1^2 + se2^2) being that of the difference. Scores on other numbers of
    items or data, by other metrics or of models that were asked otherwise are left out.

    Args:
        rows: rows of `rows`.

    Returns:
        A dict for each task and run: task, metric, run, baseline, difference, low and high (the 95 % interval), items
        ("500", "20 of 2376" or ""), lower_is_better and method.
    """
    baseline, *others = rows
    found = []
    for task, before in baseline["scores"].items():
        for row in others:
            after = row["scores"].get(task)
            interval = None if after is None or _mismatch(before, after) else _interval(before, after)
            if interval is not None:
                difference, low, high, method = interval
                found.append(
                    {
                        **{"task": task, "metric": after.metric, "run": row["run"], "baseline": baseline["run"]},
                        **{"difference": difference, "low": low, "high": high},
                        "items": f"{after.items} of {after.of}" if after.limited else _cell(after.items),
                        "lower_is_better": after.lower_is_better,
                        "method": method,
                    }
                )
    return found


def differences_table(differences: list[dict]) -> str:
    """What `differences` gives as a Markdown table."""
    return _markdown(
        {
            "task": [each["task"] for each in differences],
            "metric": [each["metric"] for each in differences],
            "run against baseline": [f"{each['run']} against {each['baseline']}" for each in differences],
            "difference": [f"{each['difference']:+.4f}" for each in differences],
            "95 % interval": [f"{each['low']:+.4f} to {each['high']:+.4f}" for each in differences],
            "items": [each["items"] for each in differences],
            "method": [each["method"] for each in differences],
        }
    )


def _mismatch(before: Score, after: Score) -> str:
    """Why two scores of a task cannot be compared, or ""."""
    for name in ("metric", "data", "held_out", "items", "calculator", "apply_chat_template", "generation_kwargs"):
        values = getattr(after, name), getattr(before, name)
        if None not in values and values[0] != values[1]:
            return f"{name} {values[0]} against {values[1]}"
    return ""


def _interval(before: Score, after: Score) -> tuple[float, float, float, str] | None:
    """Difference, lower and upper end of its 95 % interval, and whose it is; None where no standard error is known."""
    difference = after.value - before.value
    if before.samples and after.samples and before.samples.keys() == after.samples.keys():
        low, high = _bootstrap(tuple(after.samples[item] - value for item, value in before.samples.items()))
        return difference, low, high, "paired bootstrap"
    if before.stderr is None or after.stderr is None:
        return None
    margin = 2 * math.hypot(before.stderr, after.stderr)
    return difference, difference - margin, difference + margin, "two standard errors"


@functools.cache  # table, verdict and plot ask for it, and thousands of items take a second
def _bootstrap(differences: tuple[float, ...]) -> tuple[float, float]:
    """The 95 % percentile interval of the mean: Efron and Tibshirani, An Introduction to the Bootstrap, chapter 13."""
    import numpy as np  # here, so that a comparison without samples comes without scipy
    from scipy import stats

    if len(set(differences)) == 1:  # also that of a single item, which scipy refuses
        return differences[0], differences[0]
    # batch: resamples at once, each of which holds an index and a value for each item.
    found = stats.bootstrap((differences,), np.mean, n_resamples=10_000, batch=100, method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def verdict(baseline: dict, other: dict) -> str:
    """One sentence on how a run did against another: better, worse or not distinguishable, measure by measure.

    Two scores are distinguishable if the 95 % interval of their difference, as `differences` takes it, excludes 0.
    Scores on other numbers of items or other data, by other metrics or of models that were asked otherwise are not
    comparable. Bits per byte have no standard error: the lower is better. Geometry is lower or higher.

    Args:
        baseline, other: rows of `rows`. What only one of them knows is left out.
    """
    parts = [
        f"{task} {_judged(baseline['scores'][task], score)}"
        for task, score in other["scores"].items()
        if task in baseline["scores"]
    ]
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


def _judged(before: Score, after: Score) -> str:
    figures = f"{_figures(after)} against {_figures(before)}"
    mismatch = _mismatch(before, after)
    if mismatch:
        return f"not comparable ({figures}: {mismatch})"
    word = _word(after.value - before.value, *(("worse", "better") if after.lower_is_better else ("better", "worse")))
    interval = _interval(before, after)
    if interval is None:
        return f"{word} without a known standard error ({figures})"
    difference, low, high, method = interval
    if low <= 0 <= high:
        word = "not distinguishable"
    return f"{word} ({figures}: difference {difference:+.4f}, 95 % interval {low:+.4f} to {high:+.4f} by {method})"


def _word(difference: float, more: str, less: str) -> str:
    return "equal" if difference == 0 else more if difference > 0 else less


def paper(rows: list[dict]) -> str:
    """The figures of arXiv 2602.09297 beside those of runs, in percent, with what is doubtful about them, as Markdown.

    Args:
        rows: rows of `rows`. A measure that none of them has is left out; eval/paper.yaml says which task, or which
            held-out images, are which.
    """
    data = yaml.safe_load(PAPER.read_text(encoding="utf-8"))
    lines, doubts = [], []

    def cell(measure, entries, k_is_shown=False):
        texts = []
        for entry in entries:
            if entry["measure"] == measure:
                text = f"{entry['value']:.2f}" + ("" if entry["std"] is None else f" ± {entry['std']:.2f}")
                if k_is_shown:
                    text += f" (k={entry['k']})"
                if entry["doubt"] is not None:
                    if entry["doubt"] not in doubts:
                        doubts.append(entry["doubt"])
                    text += f" [{doubts.index(entry['doubt']) + 1}]"
                texts.append(text)
        return ", ".join(texts)

    baseline = [entry for entry in data["paper"] if entry["k"] == 0]
    others = [entry for entry in data["paper"] if entry["k"] != 0]
    measured = [
        (measure, [_percent(row["scores"].get(place["task"]), place["metric"]) for row in rows])
        for measure, place in data["tasks"].items()
    ]
    accuracies = [row["scores"].get("accuracy") for row in rows]
    for measure, held_out in data["images"].items():
        of_it = [each if each is not None and each.held_out == held_out else None for each in accuracies]
        measured.append((measure, [_percent(each, "accuracy") for each in of_it]))
    for measure, scores in measured:
        if any(scores):
            published = cell(measure, baseline), cell(measure, others, True), cell(measure, data["nanochat d20"])
            lines.append([measure, *published, *(_figures(score, ".2f") for score in scores)])
    if not lines and any(accuracies):
        sources = ", ".join(data["images"].values())
        return f"No run has a measure of the paper's table; that has accuracies on the held_out {sources}."
    if not lines:
        return (
            "No run has a measure of the paper's table; score the tasks that are: laplacian-heads eval MODEL "
            "tasks=[chatcore_paper]."
        )
    heads = ["measure", "paper, k=0", "paper, other k", "nanochat d20, k=0", *(row["run"] for row in rows)]
    columns = dict(zip(heads, zip(*lines, strict=True), strict=True))
    parts = [
        "Beside the figures of arXiv 2602.09297, in percent, from the sources that eval/paper.yaml names; ± is the "
        "standard deviation over seeds there and one standard error here:",
        _markdown({head: cells for head, cells in columns.items() if any(cells)}),
        *(["\n".join(f"- [{i}] {doubt}" for i, doubt in enumerate(doubts, start=1))] if doubts else []),
        "The runs are other models on other budgets than the paper's, unless they were trained by the same recipe.",
    ]
    return "\n\n".join(parts)


def _percent(score: Score | None, metric: str) -> Score | None:
    """A task's score by one of its metrics, in percent."""
    if score is None:
        return None
    for entry in ({"metric": score.metric, "value": score.value, "stderr": score.stderr}, *score.others):
        if entry["metric"].partition(",")[0] == metric:
            error = None if entry["stderr"] is None else 100 * entry["stderr"]
            return dataclasses.replace(score, metric=metric, value=100 * entry["value"], stderr=error)
    return None


def plot(rows: list[dict], folder: Path) -> list:
    """Draw scores, their differences, geometry and loss into a folder, each if a run has what it shows.

    Of the scores those of which the higher is better: perplexities have a scale of their own.

    Returns:
        A `plots.Picture` of each figure.
    """
    from laplacian_heads.eval import geometry_plots, plots  # here, so that the table comes without matplotlib

    pictures = []
    scores, of_task = {}, {}
    for row in rows:
        for task, score in row["scores"].items():
            if not score.lower_is_better:
                scores.setdefault(row["run"], {})[task] = score.value, score.stderr
                of_task.setdefault(task, []).append(score)
    if scores:
        chance = {task: value for row in rows for task, value in row["chance"].items()}
        labels = {task: _label(task, found) for task, found in of_task.items()}
        plots.scores(scores, chance, labels, folder / "scores.png")
        pictures.append(plots.Picture("scores", "Scores", "Scores with one standard error, and what guessing gives."))
    found = [each for each in differences(rows) if not each["lower_is_better"]]
    if found:
        # All are on as many items as the baseline.
        labels = {task: _label(task, [score]) for task, score in rows[0]["scores"].items()}
        plots.differences(found, [row["run"] for row in rows], labels, folder / "differences.png")
        text = f"Differences of scores from {found[0]['baseline']}, with 95 % intervals."
        pictures.append(plots.Picture("differences", "Differences", text))
    logs = {row["run"]: row["log_history"] for row in rows if row["log_history"]}
    models = {row["run"]: row["geometry"] for row in rows if row["geometry"]}
    pictures += geometry_plots.all_of(models, folder, logs=logs)
    # The loss of image classifiers, smoothed and of mixed images, is no nats per token.
    texts = not any(row["of_images"] for row in rows)
    if texts and any(plots.LOSSES.keys() & entry.keys() for log in logs.values() for entry in log):
        plots.loss(logs, folder / "loss.png")
        pictures.append(plots.Picture("loss", "Loss", "Loss and held-out bits per byte by step."))
    return pictures


def _label(task: str, scores: list[Score]) -> str:
    """A task's name, and below it on how many of its items it was scored, unless on all, or on whose, if on several."""
    notes = dict.fromkeys(f"{score.items} of {score.of} items" if score.limited else "all items" for score in scores)
    if len({(score.data, score.held_out) for score in scores}) > 1:
        notes = dict.fromkeys(map(_held_out, scores))
    return task if list(notes) == ["all items"] else f"{task}\n{' or '.join(notes)}"


def compare(recipe: CompareRecipe, dry_run: bool = False) -> None:
    """Print the table of some runs and a verdict on each against the first; with an output also write them and plots.

    Raises:
        ValueError: a run is not there or has nothing to compare, a file of it is damaged, or some runs are of images
            and others of text.
    """
    runs = {model: [results_folder(model)] for model in recipe.models}
    for model, (folder,) in runs.items():
        if not folder.is_dir():
            raise ValueError(f"There is no folder {model}, nor {folder} with what was measured of a model of the Hub.")
    if dry_run:
        print(f"Would read {', '.join(RESULTS)} of {', '.join(recipe.models)}, into {recipe.output or 'no folder'}.")
        return
    if recipe.output is not None:
        check_writable(Path(recipe.output).expanduser())
    found = rows(runs)
    parts = [table(found)]
    if found_differences := differences(found):
        parts.append(differences_table(found_differences))
    parts += [verdict(found[0], other) for other in found[1:]]
    if recipe.paper:
        parts.append(paper(found))
    text = "\n\n".join(parts)
    print(text)
    if recipe.output is not None:
        output = Path(recipe.output).expanduser()
        write(output / "compare.md", text + "\n")
        plot(found, output)
        print(f"\n{output}: {', '.join(sorted(path.name for path in output.iterdir() if path.is_file()))}")
