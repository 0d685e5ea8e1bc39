"""Figures of what `geometry` measures, of one model or of several compared.

Each function draws into a folder and returns what it has drawn, or None where no model has what it shows.
"""

import collections
import re
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from laplacian_heads.eval.geometry_report import VECTORS, figure, value
from laplacian_heads.eval.plots import COLOURS, Picture, panels, save, style, write, written

LAYERS = "Layer 0 is the embeddings, the last one is after the final norm."
# What is drawn of collapse; the tables have the rest.
COLLAPSE = {
    "nc1": "NC1",
    "nc2_equinorm_means": "NC2, equal norms",
    "nc2_equiangular_means": "NC2, equal angles",
    "nc3": "NC3",
    "nc4": "NC4",
    "cdnv": "CDNV",
    "separability": "separability",
}
CLASSES = 8  # that a scatter tells apart, as many as there are colours
LOGGED = re.compile(r"(geometry/\w+|gradient_norm)/(\w+)")
# Viridis without its end, which is pale on white: from the first layer to the last.
DEPTH = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0, 0.92, 256)))
ACCENTS = [COLOURS[1], COLOURS[6], COLOURS[3]]  # which viridis does not have


def all_of(models: dict[str, dict], folder: Path, pca: dict | None = None, logs: dict | None = None) -> list[Picture]:
    """Draw all that there is to draw.

    Args:
        models: name of each model and the content of its geometry.json.
        folder: where to draw.
        pca: for each model None or a `geometry_survey.Points`.
        logs: for some of the models Trainer's log_history.

    Returns:
        What was drawn, in the order in which a report shows it.
    """
    drawn = [
        variance(models, folder),
        similarity(models, folder),
        attention_entropy(models, folder),
        spectrum(models, folder),
        ranks(models, folder),
        *(collapse(models, kind, folder) for kind in VECTORS),
        scatter(pca or {}, folder),
        patches(pca or {}, folder),
        training(logs or {}, folder),
    ]
    return [picture for picture in drawn if picture is not None]


def variance(models: dict[str, dict], folder: Path) -> Picture | None:
    """Share of the variance within sequences and, where there are classes, between classes, by layer."""
    titles = {
        ("variance", "shares", "within_sequence"): ("Within sequences", "share of the tokens' variance"),
        ("variance", "shares", "between_class"): ("Between classes", "share of the tokens' variance"),
    }
    text = "Shares of the variance of tokens, by layer."
    return _by_layer(models, titles, folder, Picture("variance", "Variance", f"{text} {LAYERS}"))


def similarity(models: dict[str, dict], folder: Path) -> Picture | None:
    """Mean cosine between tokens by layer."""
    titles = {
        ("similarity", "within_sequence"): ("Tokens of a sequence", "mean cosine of two tokens"),
        ("similarity", "pooled"): ("All tokens", "mean cosine of two tokens"),
    }
    text = "Mean cosine between two tokens, by layer."
    return _by_layer(models, titles, folder, Picture("similarity", "Similarity", f"{text} {LAYERS}"))


def ranks(models: dict[str, dict], folder: Path) -> Picture | None:
    """Effective rank and components for 99 % of the variance by layer, where more than one layer has a spectrum."""
    titles = {
        ("spectrum", "per_sequence", "effective_rank"): ("Effective rank", "mean over sequences"),
        ("spectrum", "per_sequence", "components_99"): ("Components for 99 % of the variance", "mean over sequences"),
    }
    if not any(len(_points(model, *keys)[0]) > 1 for model in models.values() for keys in titles):
        return None
    text = "How many directions the tokens of a sequence fill, by layer."
    return _by_layer(models, titles, folder, Picture("ranks", "Ranks", f"{text} {LAYERS}"))


def attention_entropy(models: dict[str, dict], folder: Path) -> Picture | None:
    """Entropy of each head's attention by layer, one panel for each model."""
    keys = "attention_entropy", "share_of_most"
    models = {name: (i, model) for i, (name, model) in enumerate(models.items()) if _points(model, *keys)[0]}
    if not models:
        return None
    drawing, all_axes = panels(len(models), columns=3)
    for axes, (name, (i, model)) in zip(all_axes, models.items(), strict=True):
        looks = style(i)
        axes.plot(*_points(model, *keys), color=looks["color"], linewidth=2, zorder=3)
        for layer in model["layers"]:
            heads = value(layer, *keys) or []
            # Block l, whose output layer l is, is the l-th of the list.
            laplacian = model["laplacian_heads"][layer["layer"] - 1] if model.get("laplacian_heads") else []
            for hollow in (False, True):
                shown = [
                    share for head, share in enumerate(heads) if share is not None and (head in laplacian) == hollow
                ]
                place = layer["layer"] + (0.12 if hollow else -0.12)
                face = "none" if hollow else looks["color"]
                points = {"color": looks["color"], "markerfacecolor": face, "markersize": 3.5, "alpha": 0.6}
                axes.plot([place] * len(shown), shown, "o", **points)
        axes.set(title=written(name, 45), ylabel="entropy, share of the largest", ylim=(-0.02, 1.03))
        _layer_axis(axes)
    key = {"color": "#444444", "markersize": 4}
    all_axes[0].plot([], [], label="mean over heads", **key)
    all_axes[0].plot([], [], "o", label="a head", **key)
    if any(model.get("laplacian_heads") for _, model in models.values()):
        all_axes[0].plot([], [], "o", label="a Laplacian head", markerfacecolor="none", **key)
    save(drawing, all_axes[0], folder / "attention_entropy.png")
    text = "Entropy of the attention as a share of the largest possible: the line is the mean over heads, a point is a"
    return Picture("attention_entropy", "Attention entropy", f"{text} head, a hollow one a Laplacian head.")


def spectrum(models: dict[str, dict], folder: Path) -> Picture | None:
    """Eigenvalues of the covariance of tokens as shares of their sum, at the last layer that has them."""
    kinds = {"pooled": "All tokens", "per_sequence": "Tokens of a sequence, mean"}
    found = {kind: {name: _spectrum(model, kind) for name, model in models.items()} for kind in kinds}
    kinds = {kind: title for kind, title in kinds.items() if any(found[kind].values())}
    if not kinds:
        return None
    drawing, all_axes = panels(len(kinds))
    for axes, kind in zip(all_axes, kinds, strict=True):
        least = 1.0
        for i, (name, known) in enumerate(found[kind].items()):
            shares, most = known or (np.empty(0), None)
            looks = style(i)
            places = np.arange(1, len(shares) + 1)
            axes.plot(places, shares, color=looks["color"], linewidth=looks["linewidth"])
            # The mean over sequences need not be a whole number.
            mark = ([most], [np.interp(most, places, shares)]) if most else ([], [])
            axes.plot(*mark, label=written(name), markersize=9, markeredgewidth=1.8, markerfacecolor="none", **looks)
            least = min([least, *shares])
        # Below this are directions that the tokens do not have at all, up to rounding.
        axes.set(xscale="log", yscale="log", ylim=(max(least / 2, 1e-8), 1.5))
        axes.set(title=kinds[kind], xlabel="component", ylabel="eigenvalue, share of their sum")
    save(drawing, all_axes[0], folder / "spectrum.png")
    text = "Eigenvalues of the covariance of tokens as shares of their sum, at the last layer where they were measured"
    return Picture("spectrum", "Spectrum", f"{text}; the marker is where 99 % of the variance is reached.")


def _spectrum(model: dict, kind: str) -> tuple[np.ndarray, float | None] | None:
    """Shares of a spectrum's eigenvalues that are not zero, and the number of components for 99 %."""
    known = [each for layer in model.get("layers") or [] if (each := value(layer, "spectrum", kind))]
    eigenvalues = np.array((value(known[-1], "eigenvalues") if known else None) or [], float)
    eigenvalues = eigenvalues[eigenvalues > 0]
    return (eigenvalues / eigenvalues.sum(), figure(known[-1], "components_99")) if len(eigenvalues) else None


def collapse(models: dict[str, dict], kind: str, folder: Path) -> Picture | None:
    """Measures of collapse: by layer where a model has several, else as points with their values.

    Args:
        kind: of which vectors, one of `geometry_report.VECTORS`.
    """
    titles = {("collapse", kind, key): (title, "") for key, title in COLLAPSE.items()}
    titles = {keys: both for keys, both in titles.items() if any(_points(model, *keys)[0] for model in models.values())}
    stem, title = f"collapse_{kind}", f"Collapse of {VECTORS[kind]}"
    if any(len(_points(model, *keys)[0]) > 1 for model in models.values() for keys in titles):
        picture = Picture(stem, title, f"Measures of collapse to the means of classes, by layer. {LAYERS}")
        return _by_layer(models, titles, folder, picture, width=3.4, height=3)
    if not titles:
        return None
    columns = min(4, len(titles))
    drawing, all_axes = panels(len(titles), columns, width=3 * columns + 0.6, height=1.2 + 0.3 * len(models))
    for axes, (keys, (measure, _)) in zip(all_axes, titles.items(), strict=True):
        shown = []
        for i, (name, model) in enumerate(models.items()):
            _, values = _points(model, *keys)
            looks = {**style(i), "linestyle": "none"}
            axes.plot(values, [i] * len(values), label=written(name), markersize=7, **looks)
            for number in values:
                axes.annotate(
                    f" {number:.3g}", (number, i), (4, 0), textcoords="offset points", va="center", fontsize=9
                )
            shown += values
        _scale(axes, "x", shown)
        low, high = min(shown), max(shown)
        room = (low / 2, 6 * high) if axes.get_xscale() == "log" else (min(0, 1.2 * low), 1.6 * high if high > 0 else 1)
        axes.set(title=measure, xlim=room, ylim=(len(models) - 0.4, -0.6), yticks=[])
        axes.grid(axis="x", color="#dddddd", linewidth=0.8)
    save(drawing, all_axes[0], folder / f"{stem}.png")
    return Picture(stem, title, "Measures of collapse to the means of classes, with their values.")


def scatter(pca: dict, folder: Path) -> Picture | None:
    """Tokens or images along their first two principal components, one panel for each model.

    Args:
        pca: as `all_of` takes it.
    """
    pca = {name: each for name, each in pca.items() if each is not None and len(each.points)}
    if not pca:
        return None
    counts = collections.Counter(name for each in pca.values() for name in each.classes if name is not None)
    most = [name for name, _ in counts.most_common(CLASSES)]
    drawing, all_axes = panels(len(pca), columns=3, height=4.4)
    # Thousands of points: in the SVG they are one image.
    looks = {"linewidths": 0, "rasterized": True}
    for axes, (name, each) in zip(all_axes, pca.items(), strict=True):
        points, classes = np.asarray(each.points), np.array(each.classes, object)
        others = points[[name not in most for name in each.classes]]
        if len(others):
            axes.scatter(*others.T, s=8, color="#cccccc", label="others", **looks)
        for i, which in enumerate(most):
            own = points[classes == which]
            # Spaces and line breaks are tokens too.
            label = written(which if which == which.strip() else repr(which), 30)
            axes.scatter(*own.T, s=16, color=COLOURS[i], marker=style(i)["marker"], label=label, **looks)
        axes.set(title=written(name, 45), xticks=[], yticks=[])
        axes.set(xlabel=f"component 1, {each.shares[0]:.0%}", ylabel=f"component 2, {each.shares[1]:.0%}")
        axes.grid(visible=False)
    save(drawing, all_axes[0], folder / "pca.png", markerscale=1.6)
    text = "Along the first two principal components, with their shares of the variance."
    if most:
        text += f" Of the classes the {len(most)} most frequent are told apart."
    return Picture("pca", "Principal components", text)


def patches(pca: dict, folder: Path) -> Picture | None:
    """Images, each beside its patches in the colours of three principal components.

    Args:
        pca: as `all_of` takes it.
    """
    pictures = {name: each.pictures for name, each in pca.items() if each is not None and each.pictures}
    if not pictures:
        return None
    rows, columns = max(map(len, pictures.values())), 2 * len(pictures)
    drawing, all_axes = panels(rows * columns, columns, width=1.5 * columns + 0.2, height=1.5)
    for axes in all_axes:
        axes.axis("off")
    for i, (name, pairs) in enumerate(pictures.items()):
        all_axes[2 * i].set_title(written(name, 24), loc="left", fontsize=9)
        for row, pair in enumerate(pairs):
            for axes, image in zip(all_axes[row * columns + 2 * i :], pair, strict=False):
                axes.imshow(image, interpolation="nearest")
    write(drawing, folder / "patches.png")
    text = "Each image beside its patches, whose first three principal components are red, green and blue."
    return Picture("patches", "Patches of images", text)


def training(logs: dict[str, list[dict]], folder: Path) -> Picture | None:
    """What was logged of layers in training: a column for each run, a panel for each measure, a line for each layer.

    Args:
        logs: name of each run and Trainer's log_history.
    """
    found = {name: lines for name, log in logs.items() if (lines := _logged(log))}
    if not found:
        return None
    groups = list(dict.fromkeys(group for lines in found.values() for group in lines))
    names = dict.fromkeys(line for lines in found.values() for group in lines.values() for line in group)
    layers = {name: int(name[6:]) for name in names if re.fullmatch(r"layer_\d+", name)}
    others = [name for name in names if name not in layers]  # the embedding, the head, and what else there is
    others = {name: {"color": ACCENTS[i % len(ACCENTS)], "linestyle": "dashed"} for i, name in enumerate(others)}
    depth = Normalize(0, max(1, *layers.values(), 1))
    drawing, all_axes = panels(len(found) * len(groups), max(2, len(found)), height=3)
    for axes, (run, group) in zip(all_axes, ((run, group) for group in groups for run in found), strict=True):
        for line, (steps, values) in found[run].get(group, {}).items():
            if line in layers:
                axes.plot(steps, values, color=DEPTH(depth(layers[line])), linewidth=1.4)
            else:
                axes.plot(steps, values, **others[line])
        measure = group.rpartition("/")[2].replace("_", " ")
        axes.set(title=measure if len(found) == 1 else f"{written(run, 45)}\n{measure}", xlabel="step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if group == "gradient_norm":
            axes.set_yscale("log", nonpositive="mask")
    if layers:
        drawing.colorbar(ScalarMappable(depth, DEPTH), ax=all_axes, label="layer", ticks=MaxNLocator(integer=True))
    for name, looks in others.items():
        all_axes[0].plot([], [], label=written(name), **looks)
    if others:
        save(drawing, all_axes[0], folder / "training.png")
    else:
        write(drawing, folder / "training.png")
    return Picture("training", "In training", "What was logged of each layer while the model was trained, by step.")


def _logged(log: list[dict]) -> dict[str, dict[str, tuple[list, list]]]:
    """Steps and values of each line of each group of lines in a log."""
    found = {}
    for entry in log:
        for key, number in entry.items():
            match = LOGGED.fullmatch(key)
            if match and number is not None:
                steps, values = found.setdefault(match[1], {}).setdefault(match[2], ([], []))
                steps.append(entry["step"])
                values.append(number)
    return found


def _points(model: dict, *keys: str) -> tuple[list[int], list[float]]:
    """Numbers of the layers where something was measured, and the figures."""
    known = [
        (layer["layer"], number) for layer in model.get("layers") or [] if (number := figure(layer, *keys)) is not None
    ]
    return [layer for layer, _ in known], [number for _, number in known]


def _by_layer(
    models: dict[str, dict],
    titles: dict[tuple, tuple[str, str]],
    folder: Path,
    picture: Picture,
    width: float = 4.8,
    height: float = 4,
) -> Picture | None:
    """Lines over layers, one for each model, in one panel for each measure that some model has.

    Args:
        titles: where each measure lies in a layer, and its title and unit.
        width, height: of a panel, in inches.
    """
    titles = {keys: both for keys, both in titles.items() if any(_points(model, *keys)[0] for model in models.values())}
    if not titles:
        return None
    drawing, all_axes = panels(len(titles), width=width * min(4, len(titles)) + 0.6, height=height)
    for axes, (keys, (title, unit)) in zip(all_axes, titles.items(), strict=True):
        shown = []
        for i, (name, model) in enumerate(models.items()):
            layers, values = _points(model, *keys)
            axes.plot(layers, values, label=written(name), markersize=5 if len(layers) < 16 else 3.5, **style(i))
            shown += values
        axes.set(title=title, ylabel=unit)
        _scale(axes, "y", shown)
        _layer_axis(axes)
    save(drawing, all_axes[0], folder / f"{picture.stem}.png")
    return picture


def _layer_axis(axes: Axes) -> None:
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _scale(axes: Axes, axis: str, values: list[float]) -> None:
    """A logarithmic axis for values of several orders of magnitude; else one from 0, where none is below.

    Values that are nearly alike, as the shares within sequences of text are, have an axis of their own range.
    """
    if min(values) > 0 and max(values) > 30 * min(values):
        axes.set(**{f"{axis}scale": "log"})
    elif axis == "y" and min(values) >= 0 and max(values) - min(values) > 0.1 * max(values):
        axes.set_ylim(0, 1.06 * max(values) or None)
