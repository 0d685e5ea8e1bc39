"""What `geometry` measured, as one HTML file that needs nothing else and as Markdown: figures, pictures, meanings."""

import base64
import math
import numbers
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import jinja2

from laplacian_heads import files
from laplacian_heads.sources import listed

UNKNOWN = "–"
LAST = "Figures of the last layer"
# What classes are measured of, by the key under "collapse".
VECTORS = {"tokens": "tokens", "sequence_means": "means of sequences", "classifier_input": "what the classifier reads"}
# Under "collapse", for each of VECTORS.
COLLAPSE = {
    "classes": "classes",
    "samples": "vectors",
    "nc1": "NC1",
    "nc1_cosine": "NC1 by cosines",
    "nc2_equinorm_means": "NC2 of means, equal norms",
    "nc2_equiangular_means": "NC2 of means, equal angles",
    "nc2_maximal_angle_means": "NC2 of means, largest angles",
    "nc2_equinorm_classifier": "NC2 of the classifier, equal norms",
    "nc2_equiangular_classifier": "NC2 of the classifier, equal angles",
    "nc2_maximal_angle_classifier": "NC2 of the classifier, largest angles",
    "nc3": "NC3",
    "nc3_squared": "NC3 squared",
    "nc4": "NC4",
    "cdnv": "CDNV",
    "cdnv_within": "variance within a class",
    "cdnv_between": "squared distance between classes",
    "separability": "separability",
    "gnc2_mean": "GNC2, mean",
    "gnc2_std": "GNC2, standard deviation",
    "unc3_mean": "UNC3, mean",
    "unc3_variance": "UNC3, variance",
}
# Where the other figures lie in a layer of geometry.json.
MEASURES = {
    "share within sequences": ("variance", "shares", "within_sequence"),
    "share between sequences": ("variance", "shares", "between_sequence"),
    "share within classes": ("variance", "shares", "within_class"),
    "share between classes": ("variance", "shares", "between_class"),
    "signal-to-noise ratio": ("variance", "snr"),
    "effective rank, a sequence": ("spectrum", "per_sequence", "effective_rank"),
    "effective rank, pooled": ("spectrum", "pooled", "effective_rank"),
    "components for 99 %, a sequence": ("spectrum", "per_sequence", "components_99"),
    "components for 99 %, pooled": ("spectrum", "pooled", "components_99"),
    "cosine within a sequence": ("similarity", "within_sequence"),
    "cosine, pooled": ("similarity", "pooled"),
    "attention entropy, share of the largest": ("attention_entropy", "share_of_most"),
}
# By the key of a layer: what to call it, and what it means.
MEANINGS = {
    "variance": (
        "Variance",
        "Tokens x vary by E‖x − mean of all‖². Within sequences: E‖x − mean of its sequence‖², as a share of that; the "
        "rest lies between sequences.",
        "Within classes: E‖x − mean of its class‖², where a token's class is the token that follows; the shares within "
        "and between classes are of the variance of the tokens that have a class. Where sequences have labels, the "
        "variance of all tokens has three parts: within sequences, of sequences' means within their class, and between "
        "classes. The signal-to-noise ratio is the part between classes divided by all others.",
    ),
    "spectrum": (
        "Spectrum",
        "λ are the eigenvalues of the covariance of tokens: of all pooled, or of those of a sequence around their own "
        "mean, of which the mean over sequences is given. Components for 99 %: how many of the largest hold 99 % of "
        "their sum. Effective rank: exp(−Σ p log p) with p = λ / Σ λ (Roy & Vetterli, 2007).",
    ),
    "similarity": (
        "Similarity",
        "The mean cosine between two different tokens, of the same sequence, or of all; 1 if they point alike.",
    ),
    "attention_entropy": (
        "Attention entropy",
        "The entropy −Σ P log P of a query's attention P, as a share of log n, the largest possible if it sees n keys: "
        "0 if it looks at one token, 1 if at all alike. It is the mean over queries and, in tables, over heads.",
    ),
    "collapse": (
        "Collapse",
        "How far vectors have collapsed to the means of their classes. m are the means less their mean, C the number "
        "of classes, W the classifier's rows. NC1 to NC4 are those of Papyan, Han & Donoho (2020), and lower is more "
        "collapsed, as it is of CDNV and the deviations of GNC2 and UNC3; of separability and UNC3's mean it is "
        "higher. – is what is not defined, as of two classes whose means coincide.",
        "NC1: tr(Σ_W Σ_B⁺) / C; by cosines: 1 − E cos(x − mean of the means, m of its class). NC2: standard deviation "
        "of ‖m‖ divided by their mean; standard deviation of the cosines between two m; mean of |cosine + 1/(C − 1)|. "
        "NC3: ‖W/‖W‖ − M/‖M‖‖. NC4: share of vectors whose nearest class mean is not the class the network decides "
        "for, of those measured.",
        "CDNV: mean over pairs of classes of (v_a + v_b) / (2 ‖m_a − m_b‖²), v being the variance within a class "
        "(Galanti, György & Hutter, 2022). Separability: mean squared distance between classes divided by the mean "
        "variance within one. GNC2: log(1 / ‖m_a/‖m_a‖ − m_b/‖m_b‖‖) over pairs; UNC3: cos(w, m) over classes (Wu & "
        "Papyan, arXiv 2405.17767).",
    ),
}


def value(content: dict, *keys: str):
    """What lies in a dict under some keys, each within the one before; None where there is no such thing."""
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def figure(layer: dict, *keys: str) -> float | None:
    """A number of a layer, of a list with one for each head their mean; None where it was not measured."""
    found = value(layer, *keys)
    if isinstance(found, list):
        known = [each for each in found if isinstance(each, numbers.Real)]
        found = statistics.fmean(known) if known else None
    return found if isinstance(found, numbers.Real) and math.isfinite(found) else None


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table with its columns aligned."""
    lines = [list(heads), *map(list, rows)]
    widths = [max(1, *map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def write(models: dict[str, dict], pictures: list, folder: Path) -> None:
    """Write report.html, which has the pictures in it, and report.md, which names them.

    Args:
        models: name of each model and the content of its geometry.json.
        pictures: `plots.Picture` of each figure in the folder, as `geometry_plots.all_of` gives them.
        folder: the folder with the figures.
    """
    # As images and not as part of the page: there their ids would clash.
    images = [base64.b64encode((folder / f"{picture.stem}.svg").read_bytes()).decode() for picture in pictures]
    # autoescape: names of models and classes are anybody's.
    templates = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=templates, autoescape=True, undefined=jinja2.StrictUndefined)
    page = templates.get_template("geometry_report.html.jinja").render(
        measured=[(name, _measured(model)) for name, model in models.items()],
        figures=_figures(models),
        pictures=list(zip(pictures, images, strict=True)),
        meanings=_meanings(models),
        layers=_layers(models),
    )
    files.write(folder / "report.html", page)
    files.write(folder / "report.md", markdown(models, pictures))


def markdown(models: dict[str, dict], pictures: list) -> str:
    """The report as Markdown, with the pictures in the folder where it lies.

    Args:
        models, pictures: as `write` takes them.
    """

    def tables(found):
        for title, heads, rows in found:
            yield f"## {_escaped(title)}"
            yield markdown_table(map(_escaped, heads), (map(_escaped, row) for row in rows))

    parts = ["# Geometry", "\n".join(f"- {_escaped(f'{name}: {_measured(model)}')}" for name, model in models.items())]
    parts += tables(_figures(models))
    for picture in pictures:
        parts += [f"## {picture.title}", f"![{picture.title}]({picture.stem}.png)", _escaped(picture.text)]
    for title, *paragraphs in _meanings(models):
        parts += [f"## What it means: {title.lower()}", *map(_escaped, paragraphs)]
    parts += tables(_layers(models))
    return "\n\n".join(parts) + "\n"


def tables(models: dict[str, dict]) -> str:
    """The figures of each layer, and those of the classes, for the terminal.

    Args:
        models: as `write` takes them.
    """
    found = [*_layers(models), *(table for table in _figures(models) if table[0] != LAST)]
    return "\n\n".join(f"{title}\n\n{markdown_table(heads, rows)}" for title, heads, rows in found)


def _escaped(text: str) -> str:
    """A text that Markdown shows as it is, in a cell of a table too."""
    return re.sub(r"([\\`*_\[\]<>|&~$#!])", r"\\\1", " ".join(text.split()))


def _measured(model: dict) -> str:
    """Of what a model's figures are."""
    size = [f"{model[name]:,} {name}" for name in ("sequences", "tokens") if name in model]
    classes = f"classes are {model['classes_are']}" if model.get("classes_are") else "without classes"
    data = model.get("data")
    # Of a path the name: reports are published.
    sources = [Path(source).name if Path(source).is_absolute() else source for source in listed(data)] if data else []
    return f"{', '.join(size)} of {', '.join(sources) or 'unknown data'}, {classes}"


def _figures(models: dict[str, dict]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, heads and rows of the tables that set models side by side, each figure at the last layer that has it."""
    tables = [(LAST, MEASURES)]
    for kind, vectors in VECTORS.items():
        tables.append((f"Collapse of {vectors}", {name: ("collapse", kind, key) for key, name in COLLAPSE.items()}))
    found = []
    for title, measures in tables:
        rows = [[name, *(_last(model, keys) for model in models.values())] for name, keys in measures.items()]
        rows = [row for row in rows if any(cell != UNKNOWN for cell in row[1:])]
        if rows:
            found.append((title, ["", *models], rows))
    return found


def _last(model: dict, keys: tuple[str, ...]) -> str:
    """A figure at the last layer where it was measured, and which that is, if not the last of all."""
    layers = model.get("layers") or []
    known = [layer for layer in layers if figure(layer, *keys) is not None]
    if not known:
        return UNKNOWN
    cell = _shown(figure(known[-1], *keys))
    return cell if known[-1] is layers[-1] else f"{cell} (layer {known[-1]['layer']})"


def _layers(models: dict[str, dict]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, heads and rows of each model's table of its layers."""
    found = []
    for name, model in models.items():
        layers = model.get("layers") or []
        measures = {
            head: keys for head, keys in MEASURES.items() if any(figure(layer, *keys) is not None for layer in layers)
        }
        if measures:
            rows = [
                [str(layer["layer"]), *(_shown(figure(layer, *keys)) for keys in measures.values())] for layer in layers
            ]
            found.append((f"Layers of {name}", ["layer", *measures], rows))
    return found


def _meanings(models: dict[str, dict]) -> list[tuple[str, ...]]:
    """Those of MEANINGS of which something was measured."""
    layers = [layer for model in models.values() for layer in model.get("layers") or []]
    return [meaning for key, meaning in MEANINGS.items() if any(value(layer, key) for layer in layers)]


def _shown(number: float | None) -> str:
    """A number with three digits that count, in the shortest form that is easily read."""
    if number is None:
        return UNKNOWN
    if isinstance(number, int) or abs(number) >= 999.5:
        return f"{number:,.0f}" if abs(number) < 1e7 else f"{number:.2e}"
    return f"{number:#.3g}".rstrip(".") if number == 0 or abs(number) >= 1e-3 else f"{number:.2e}"
