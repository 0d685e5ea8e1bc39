"""Figures of what was measured, each as PNG and as SVG: the style of all, and those of training and scores."""

import dataclasses
import math
import textwrap
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, told apart by colour-blind readers too, with Tol's wine in the place of the yellow, which is
# pale on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255"]
MARKERS = "osD^vPX*"
# What `loss` draws of a log: title and unit.
LOSSES = {
    "loss": ("Training loss", "cross-entropy, nats per token"),
    "eval_bits_per_byte": ("Held-out text", "bits per byte"),
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure that was written into a folder.

    Args:
        stem: the name of its files, STEM.png and STEM.svg.
        title: what it shows, in a few words.
        text: how it is read, for those too who cannot see it.
    """

    stem: str
    title: str
    text: str


def loss(runs: dict[str, list[dict]], path: Path) -> None:
    """Training loss by step and held-out bits per byte, of which at least one was logged.

    Args:
        runs: name of each run and the log_history of its trainer_state.json.
        path: the PNG file to write; the SVG lies beside it.
    """
    logged = [key for key in LOSSES if any(key in entry for log in runs.values() for entry in log)]
    figure, all_axes = panels(len(logged))
    for axes, key in zip(all_axes, logged, strict=True):
        for i, (name, log) in enumerate(runs.items()):
            points = [(entry["step"], entry[key]) for entry in log if key in entry]
            looks = style(i) if len(points) < 30 else {**style(i), "marker": ""}
            axes.plot(*zip(*points, strict=True) if points else ([], []), label=written(name), markersize=4, **looks)
        axes.set(title=LOSSES[key][0], xlabel="step", ylabel=LOSSES[key][1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    save(figure, all_axes[0], path)


def scores(runs: dict[str, dict[str, tuple]], chance: dict[str, float], labels: dict[str, str], path: Path) -> None:
    """Task scores as bars, with one standard error to both sides and a line for chance.

    Args:
        runs: name of each run, and for each of its tasks (score, standard error or None).
        chance: for some of the tasks the score of guessing.
        labels: for each task what stands below its bars, in one or more lines.
        path: the PNG file to write; the SVG lies beside it.
    """
    tasks = list(dict.fromkeys(task for run in runs.values() for task in run))
    names = max(len(line) for task in tasks for line in labels[task].split("\n"))  # characters of about 0.08 inches
    bars = len(tasks) * (0.5 + 0.25 * len(runs))
    level = len(tasks) * (0.2 + 0.08 * names)
    slanted = level > max(9, bars)  # names that would need more room than the bars slant
    figure, (axes,) = panels(1, width=max(6, 1 + bars if slanted else 1 + max(bars, level)))
    width = 0.8 / len(runs)
    for i, (name, run) in enumerate(runs.items()):
        known = [(place, *run[task]) for place, task in enumerate(tasks) if task in run]
        left = [place - 0.4 + width * (i + 0.5) for place, _, _ in known]
        axes.bar(
            left,
            [score for _, score, _ in known],
            0.9 * width,
            yerr=[error if error is not None else math.nan for *_, error in known],
            capsize=3,
            label=written(name),
            color=COLOURS[i % len(COLOURS)],
        )
    known = [(place, chance[task]) for place, task in enumerate(tasks) if task in chance]
    if known:
        places, values = zip(*known, strict=True)
        ends = [place - 0.45 for place in places], [place + 0.45 for place in places]
        axes.hlines(values, *ends, colors="black", linestyles="dashed", label="chance")
    slant = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    axes.set_xticks(range(len(tasks)), [labels[task] for task in tasks], **slant)
    axes.set(title="Tasks", ylabel="score, ± one standard error", ylim=(0, 1.03))
    save(figure, axes, path)


def differences(found: list[dict], runs: list[str], labels: dict[str, str], path: Path) -> None:
    """How far scores lie from the baseline's, as points with their intervals, one line for each task and run.

    Args:
        found: differences as `eval.compare.differences` gives them, of one baseline.
        runs: names of all runs, in the order of `scores`, so that each has the same colour there and here.
        labels: for each task what stands beside its lines.
        path: the PNG file to write; the SVG lies beside it.
    """
    tasks = list(dict.fromkeys(each["task"] for each in found))
    shown = [run for run in runs if any(each["run"] == run for each in found)]
    names = min(60, max(map(len, runs)))  # characters of about 0.09 inches, of which `written` lets 60 on a line
    figure, (axes,) = panels(
        1, width=max(7.5, 3 + 0.09 * names), height=1.4 + len(tasks) * max(0.42, 0.2 + 0.17 * len(shown))
    )
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    for place in range(0, len(tasks), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=1)
    for i, run in enumerate(shown):
        own = [each for each in found if each["run"] == run]
        values = [each["difference"] for each in own]
        axes.errorbar(
            values,
            [tasks.index(each["task"]) + 0.7 * ((i + 0.5) / len(shown) - 0.5) for each in own],
            xerr=[
                [each["difference"] - each["low"] for each in own],
                [each["high"] - each["difference"] for each in own],
            ],
            label=written(run),
            markersize=5,
            capsize=2,
            **{**style(runs.index(run)), "linestyle": "none", "linewidth": None, "elinewidth": 1.6},
        )
    axes.set_yticks(range(len(tasks)), [labels[task] for task in tasks])
    axes.tick_params(axis="y", length=0)
    axes.set(
        title=written(f"Difference from {found[0]['baseline']}"),
        xlabel="difference of the score with its 95 % interval; to the right is better",
        ylim=(len(tasks) - 0.5, -0.5),  # the first task above
    )
    save(figure, axes, path)


def heads(layers: list[list[int]], num_heads: int, path: Path) -> None:
    """Which heads of each layer are Laplacian, as a small chart with a cell for each head.

    Args:
        layers: the Laplacian heads of each layer, as `laplacian.heads_by_layer` gives them.
        num_heads: attention heads of a layer.
        path: the PNG file to write; the SVG lies beside it.
    """
    size = min(0.16, 6 / max(num_heads, len(layers)))  # inches of a cell
    figure = Figure(figsize=(size * num_heads + 2.4, size * len(layers) + 0.8), dpi=150, layout="constrained")
    axes = figure.subplots()
    for head in range(num_heads):
        for layer, laplacian in enumerate(layers):
            colour = COLOURS[1] if head in laplacian else "#dddddd"
            axes.add_patch(Rectangle((head - 0.45, layer - 0.45), 0.9, 0.9, color=colour, linewidth=0))
    axes.set(
        xlabel="head", ylabel="layer", xlim=(-0.6, num_heads - 0.4), ylim=(-0.6, len(layers) - 0.4), aspect="equal"
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[:].set_visible(False)
    keys = [Rectangle((0, 0), 1, 1, color=colour) for colour in (COLOURS[1], "#dddddd")]
    axes.legend(keys, ["v - P v", "P v"], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    write(figure, path)


def panels(count: int, columns: int = 4, width: float | None = None, height: float = 4) -> tuple[Figure, list[Axes]]:
    """A figure with some panels, `columns` of them in a row at most.

    Args:
        width: of the figure, in inches.
        height: of a row of panels, in inches.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    size = width or 4.8 * columns + 0.6, height * rows
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes[count:]:
        axes.remove()
    for axes in all_axes[:count]:
        axes.grid(axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(11)
    return figure, all_axes[:count]


def style(i: int) -> dict:
    """Colour and marker of the i-th of the things that are compared, the same in every figure."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "linewidth": 1.6}


def written(name: str, width: int = 60) -> str:
    """A name for matplotlib to show as it is, in lines of `width` characters at most."""
    # Else dollars enclose a formula, and a key leaves out what starts with an underscore.
    text = "\n".join(textwrap.wrap(name, width) or [repr(name)]).replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


def save(figure: Figure, axes: Axes, path: Path, **looks) -> None:
    """Put the key of one panel, which holds for all, below the figure, and write it; `looks` are the legend's."""
    handles, labels = axes.get_legend_handles_labels()
    # Characters of about 0.08 inches behind a sample of the line, in as many columns as there is room for.
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, int(figure.get_figwidth() / (0.6 + 0.08 * longest)))
    order = sorted(range(len(labels)), key=lambda i: labels[i] in ("chance", "others"))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    rows = math.ceil(len(labels) / columns)
    lines = max(label.count("\n") + 1 for label in labels)
    figure.set_figheight(figure.get_figheight() + 0.22 * (rows * lines - 1))
    columns = math.ceil(len(labels) / rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, **looks)
    write(figure, path)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, and as SVG beside it, each as a whole or not at all; the same figure is the same bytes."""
    parts = {}
    try:
        with rc_context({"svg.hashsalt": "laplacian-heads"}):
            for kind, metadata in (("png", {}), ("svg", {"Date": None})):
                target = path.with_suffix(f".{kind}")
                part = target.with_name(target.name + ".part")
                parts[part] = target
                figure.savefig(part, format=kind, metadata=metadata)
        for part, target in parts.items():
            part.replace(target)
    finally:
        for part in parts:  # of a disk that is full
            part.unlink(missing_ok=True)
