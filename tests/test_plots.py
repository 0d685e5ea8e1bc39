"""The figures of geometry: what they show is what was measured, whatever is missing and whatever models are called."""

import base64
import io
import warnings
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import cbook
from PIL import Image

from laplacian_heads.eval import geometry_plots, plots
from laplacian_heads.eval.geometry_plots import all_of, collapse, scatter, spectrum, training, variance
from laplacian_heads.eval.plots import Picture

FIGURES = {"nc1": 5.0, "nc2_equinorm_means": 0.25, "nc3": 0.5, "nc4": 0.0, "cdnv": None}
LONG = [f"runs/a/{'long-' * 12}/laplacian_heads_{i}/sft" for i in range(6)]


@pytest.fixture(autouse=True)
def strict():
    """A warning of matplotlib, such as of a name that a key leaves out, is a fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # others may be of what an earlier test has left open
        yield


@pytest.fixture
def drawn(monkeypatch):
    """The figures by stem, none of them written."""
    figures = {}
    for module in (plots, geometry_plots):
        monkeypatch.setattr(module, "write", lambda figure, path: figures.update({path.stem: figure}))
    return figures


def spectrum_of(*eigenvalues, components_99=1.0):
    return {"eigenvalues": list(eigenvalues), "components_99": components_99, "effective_rank": 2.0}


def layer(number, share=0.5, **others):
    return {
        "layer": number,
        "variance": {"shares": {"within_sequence": share}},
        **others,
    }


def model(*layers, laplacian_heads=None):
    return {"laplacian_heads": laplacian_heads, "layers": list(layers)}


def full(depth, heads=4):
    """A model with everything measured in every layer."""
    layers = []
    for number in range(depth + 1):
        own = layer(number, 1 / (number + 1), similarity={"within_sequence": -0.1, "pooled": 0.1})
        own["variance"]["shares"]["between_class"] = 0.125
        own["spectrum"] = dict.fromkeys(("pooled", "per_sequence"), spectrum_of(3.0, 1.0, 0.0, components_99=1.5))
        own["collapse"] = dict.fromkeys(("tokens", "sequence_means", "classifier_input"), FIGURES)
        if number:
            own["attention_entropy"] = {"share_of_most": [0.1 * (head + 1) for head in range(heads)]}
        layers.append(own)
    return model(*layers, laplacian_heads=[[heads - 1]] * depth)


def points(classes, pictures=()):
    places = np.arange(2.0 * len(classes)).reshape(-1, 2)
    return SimpleNamespace(points=places, classes=classes, shares=(0.5, 0.25), pictures=list(pictures))


def lines(axes):
    """What is named in a panel: x and y of each."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.lines
        if not line.get_label().startswith("_child")
    }


def key(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_png_and_svg_are_the_same_bytes_every_time(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        assert variance({"one": full(2)}, tmp_path / name).stem == "variance"
        assert {path.name for path in (tmp_path / name).iterdir()} == {"variance.png", "variance.svg"}
    for kind in ("png", "svg"):
        first, second = ((tmp_path / name / f"variance.{kind}").read_bytes() for name in ("a", "b"))
        assert first == second
    assert ElementTree.fromstring(first).tag == "{http://www.w3.org/2000/svg}svg"
    assert b"<dc:date>" not in first


def test_figure_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    variance({"one": full(2)}, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    save = plots.Figure.savefig

    def fails(figure, path, format, **given):
        if format == "svg":
            raise OSError("disk full")
        save(figure, path, format=format, **given)

    monkeypatch.setattr(plots.Figure, "savefig", fails)
    with pytest.raises(OSError, match="disk full"):
        variance({"one": full(3)}, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_shares_are_drawn_where_they_are(tmp_path, drawn):
    """A layer without a figure has no point; a model without any is in the key all the same."""
    models = {"a": model(layer(0, 0.9), layer(1, None), layer(2, 0.7)), "b": model(layer(0, 0.8)), "c": {}}
    models["b"]["layers"][0]["variance"]["shares"]["between_class"] = 0.3
    variance(models, tmp_path)
    within, between = drawn["variance"].axes
    assert lines(within) == {"a": ([0, 2], [0.9, 0.7]), "b": ([0], [0.8]), "c": ([], [])}
    assert lines(between) == {"a": ([], []), "b": ([0], [0.3]), "c": ([], [])}
    assert key(drawn["variance"]) == ["a", "b", "c"]


def test_spectrum_is_a_share_of_the_sum_at_the_last_layer_that_has_one(tmp_path, drawn):
    known = {"pooled": spectrum_of(6.0, 3.0, 1.0, 0.0, components_99=3.0)}
    spectrum(
        {"a": model(layer(0, spectrum={"pooled": spectrum_of(1.0)}), layer(1, spectrum=known), layer(2))}, tmp_path
    )
    (axes,) = drawn["spectrum"].axes
    line, mark = axes.lines
    assert list(line.get_xdata()) == [1, 2, 3]
    assert list(line.get_ydata()) == pytest.approx([0.6, 0.3, 0.1])
    assert (list(mark.get_xdata()), list(mark.get_ydata())) == ([3.0], pytest.approx([0.1]))
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert (
        spectrum({"a": model(layer(0, spectrum={"pooled": spectrum_of(0.0, 0.0, components_99=0.0)}))}, tmp_path)
        is None
    )


def test_laplacian_heads_are_hollow(tmp_path, drawn):
    """Layer l is the output of block l, of which the list has the first at 0; a model that has no list has none."""
    entropy = {"share_of_most": [0.1, 0.2, 0.6]}
    heads = [[2], [0, 1]]
    models = {"a": model(*(layer(i, attention_entropy=entropy) for i in (1, 2)), laplacian_heads=heads)}
    models["b"] = model(layer(1, attention_entropy=entropy))
    geometry_plots.attention_entropy(models, tmp_path)
    for axes, expected in zip(drawn["attention_entropy"].axes, [{1: [0.6], 2: [0.1, 0.2]}, {}], strict=True):
        hollow = {
            round(line.get_xdata()[0]): list(line.get_ydata())
            for line in axes.lines
            if line.get_markerfacecolor() == "none" and len(line.get_xdata())
        }
        assert hollow == expected
        assert list(axes.lines[0].get_ydata()) == pytest.approx([0.3] * len(axes.lines[0].get_xdata()))
    assert key(drawn["attention_entropy"]) == ["mean over heads", "a head", "a Laplacian head"]


def test_collapse_in_one_layer_is_points_with_values_and_in_several_lines(tmp_path, drawn):
    models = {
        name: model(layer(0), layer(1, collapse={"tokens": {**FIGURES, "nc1": nc1}}))
        for name, nc1 in (("a", 5), ("b", 500))
    }
    assert collapse(models, "sequence_means", tmp_path) is None
    collapse(models, "tokens", tmp_path)
    panels = {axes.get_title(): axes for axes in drawn["collapse_tokens"].axes}
    assert list(panels) == ["NC1", "NC2, equal norms", "NC3", "NC4"]
    assert [text.get_text().strip() for text in panels["NC1"].texts] == ["5", "500"]
    assert lines(panels["NC1"]) == {"a": ([5], [0]), "b": ([500], [1])}
    assert [panels[name].get_xscale() for name in ("NC1", "NC4")] == ["log", "linear"]
    models["a"]["layers"][0]["collapse"] = {"tokens": {"nc3": 0.75}}
    collapse(models, "tokens", tmp_path)
    panels = {axes.get_title(): axes for axes in drawn["collapse_tokens"].axes}
    assert lines(panels["NC3"]) == {"a": ([0, 1], [0.75, 0.5]), "b": ([1], [0.5])}


def test_the_most_frequent_classes_are_told_apart(tmp_path, drawn):
    frequent = [name for i in range(8) for name in [f"class {i}"] * (10 - i)]
    scatter(
        {"a": points([*frequent, "rare", "odd"]), "b": points(["rare", "class 0"]), "none": None, "empty": points([])},
        tmp_path,
    )
    figure = drawn["pca"]
    assert [axes.get_title() for axes in figure.axes] == ["a", "b"]
    assert key(figure) == [*(f"class {i}" for i in range(8)), "others"]
    sizes = {each.get_label(): len(each.get_offsets()) for each in figure.axes[0].collections}
    assert sizes == {"others": 2, **{f"class {i}": 10 - i for i in range(8)}}
    looks = [each.get_facecolor()[0].tolist() for each in figure.axes[0].collections]
    assert len({tuple(each) for each in looks}) == 9


@pytest.mark.parametrize("pca", [{}, {"a": None}, {"a": points([])}])
def test_nothing_to_scatter_is_no_figure(tmp_path, pca):
    assert all_of({}, tmp_path, pca, {"a": [{"step": 1, "loss": 2.0}]}) == []
    assert not list(tmp_path.iterdir())


def test_a_single_class_has_no_others(tmp_path, drawn):
    scatter({"a": points(["\n"] * 3)}, tmp_path)
    assert key(drawn["pca"]) == [r"'\n'"]


def test_images_lie_beside_their_patches(tmp_path, drawn):
    pairs = [(np.full((8, 8, 3), i, np.uint8), np.full((2, 2, 3), i / 10)) for i in range(3)]
    all_of({}, tmp_path, {"a": points(["x"], pairs), "b": points(["x"], pairs[:1]), "c": points(["x"])})
    axes = drawn["patches"].axes
    shown = [float(each.images[0].get_array().max()) if each.images else None for each in axes]
    assert shown == [0, 0, 0, 0, 1, 0.1, None, None, 2, 0.2, None, None]


def test_training_has_a_line_for_each_layer(tmp_path, drawn):
    log = [
        {"step": step, "loss": 2.0, "geometry/effective_rank/layer_04": 3.0 + step, "gradient_norm/layer_12": norm}
        for step, norm in ((5, 0.1), (10, 0.0), (15, 0.3))
    ]
    log += [
        {"step": 15, "gradient_norm/head": 1.0, "gradient_norm/embedding": None, "geometry/effective_rank/layer_00": 1}
    ]
    training({"a": log, "b": [{"step": 1, "loss": 2.0}]}, tmp_path)
    rank, gradient, bar = drawn["training"].axes
    assert [rank.get_title(), gradient.get_title()] == ["effective rank", "gradient norm"]
    assert list(rank.lines[0].get_ydata()) == [8, 13, 18]
    assert list(rank.lines[0].get_xdata()) == [5, 10, 15]
    assert gradient.get_yscale() == "log"
    assert bar.get_ylim() == (0, 12)
    assert key(drawn["training"]) == ["head"]
    assert rank.lines[0].get_color() == geometry_plots.DEPTH(4 / 12)


def test_names_are_shown_as_they_are(tmp_path, drawn):
    """Not as formulas, nor left out for an underscore, and long ones in several lines within the figure."""
    names = ["_a", "$x$ and $\\frac$", "<script>&", *LONG]
    variance({name: full(1) for name in names}, tmp_path)
    figure = drawn["variance"]
    figure.draw_without_rendering()
    texts = figure.legends[0].get_texts()
    assert [text.get_text().replace("\n", "").replace("\u200b", "").replace(r"\$", "$") for text in texts] == names
    assert not any(cbook.is_math_text(text.get_text()) for text in texts)
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert box.x0 >= 0 <= box.y0
    assert box.x1 <= whole.x1


def test_everything_is_drawn_once_within_its_figure(tmp_path):
    """Six models with long names, of 1 to 30 layers."""
    models = {name: full(depth, 16) for name, depth in zip(LONG, (1, 2, 3, 4, 5, 30), strict=True)}
    logs = {"one": [{"step": i, "gradient_norm/layer_01": 1.0} for i in (1, 2)]}
    pictures = all_of(
        models, tmp_path, {"one": points(["x", "y"], [(np.zeros((4, 4, 3), np.uint8), np.zeros((2, 2, 3)))])}, logs
    )
    stems = [
        *("variance", "similarity", "attention_entropy", "spectrum", "ranks"),
        *("collapse_tokens", "collapse_sequence_means", "collapse_classifier_input", "pca", "patches", "training"),
    ]
    assert [picture.stem for picture in pictures] == stems
    assert {path.name for path in tmp_path.iterdir()} == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    for picture in pictures:
        assert isinstance(picture, Picture)
        assert picture.text.endswith(".")
        # A margin of the page's colour: nothing runs over the edge.
        pixels = np.asarray(Image.open(tmp_path / f"{picture.stem}.png").convert("L"))
        assert all(edge.min() == 255 for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])), picture.stem


def test_points_are_an_image_in_the_svg(tmp_path):
    scatter({"a": points(["x"] * 5000)}, tmp_path)
    svg = ElementTree.parse(tmp_path / "pca.svg")
    (image,) = svg.iter("{http://www.w3.org/2000/svg}image")
    data = image.get("{http://www.w3.org/1999/xlink}href").partition("base64,")[2]
    assert Image.open(io.BytesIO(base64.b64decode(data))).width > 100
    assert (tmp_path / "pca.svg").stat().st_size < 300_000


@pytest.mark.parametrize(
    "models",
    [
        {},
        {"a": {}},
        {"a": {"layers": None}},
        {"a": model({"layer": 0, "within_sequence_share": 0.5, "components_99": 3})},
    ],
)
def test_models_without_figures_have_none(tmp_path, models):
    assert all_of(models, tmp_path) == []
    assert not list(tmp_path.iterdir())
