"""The report of geometry: its numbers, and that it stands alone and shows names, not what they say."""

import base64
import re
from html.parser import HTMLParser

import pytest
from markdown_it import MarkdownIt

from laplacian_heads.eval import geometry_report
from laplacian_heads.eval.geometry_plots import all_of
from laplacian_heads.eval.plots import Picture

HOSTILE = '<script>alert("1")</script> | **a** [b](javascript:c) `d` _e_ & $f$'


def model(*layers, **others):
    return {"data": "python_prose", "sequences": 64, "tokens": 16320, "classes_are": None, "layers": layers, **others}


def layer(number, share, **others):
    return {"layer": number, "variance": {"shares": {"within_sequence": share}, "snr": None}, **others}


MODELS = {
    "runs/a": model(
        layer(0, 0.9, collapse={"tokens": {"classes": 100, "nc1": 12345.6, "cdnv": 2.5e-5, "nc4": 0.0, "nc3": None}}),
        layer(1, 0.81234, attention_entropy={"share_of_most": [0.2, 0.4, None]}),
        classes_are="next tokens",
    ),
    HOSTILE: model(layer(0, 0.5), layer(1, None)),
    "bare": {"layers": []},
}


class Page(HTMLParser):
    """The tags of a page, its text, its tables as lists of rows, and its attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.tables, self.text, self.cell = [], [], [], "", None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("th", "td"):
            self.tables[-1][-1].append("")
            self.cell = tag

    def handle_endtag(self, tag):
        if tag == self.cell:
            self.cell = None

    def handle_data(self, data):
        self.text += data
        if self.cell:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    pictures = all_of(MODELS, folder)
    geometry_report.write(MODELS, pictures, folder)
    return folder, pictures


def pages(folder):
    """Both reports as HTML, the Markdown rendered as GitHub's tables are."""
    markdown = MarkdownIt("commonmark").enable("table").render((folder / "report.md").read_text())
    return Page((folder / "report.html").read_text()), Page(markdown)


def test_tables_have_the_figures_of_the_last_layer_that_has_them(written):
    for page in pages(written[0]):
        figures, collapse, *layers = page.tables
        assert figures == [
            ["", *MODELS],
            ["share within sequences", "0.812", "0.500 (layer 0)", "–"],
            ["attention entropy, share of the largest", "0.300", "–", "–"],
        ]
        assert collapse == [
            ["", *MODELS],
            *(["classes", "100 (layer 0)", "–", "–"], ["NC1", "12,346 (layer 0)", "–", "–"]),
            *(["NC4", "0.00 (layer 0)", "–", "–"], ["CDNV", "2.50e-05 (layer 0)", "–", "–"]),
        ]
        heads = ["layer", "share within sequences"]
        assert layers == [
            [[*heads, "attention entropy, share of the largest"], ["0", "0.900", "–"], ["1", "0.812", "0.300"]],
            [heads, ["0", "0.500"], ["1", "–"]],
        ]


def test_names_are_shown_and_do_nothing(written):
    folder, _ = written
    for page in pages(folder):
        assert not {"script", "em", "code", "a"} & set(page.tags)
        assert not any(name.startswith("on") for name, _ in page.attributes)
        assert HOSTILE in page.text
        assert "64 sequences, 16,320 tokens of python_prose, classes are next tokens" in page.text


def test_pictures_are_in_the_page_and_nothing_is_fetched(written):
    folder, pictures = written
    page, markdown = pages(folder)
    sources = [value for name, value in page.attributes if name == "src"]
    expected = [(folder / f"{picture.stem}.svg").read_bytes() for picture in pictures]
    assert [base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")) for source in sources] == expected
    assert len(expected) == 3
    assert not {"link", "script", "iframe", "svg"} & set(page.tags)  # svg: its ids would clash with another's
    text = (folder / "report.html").read_text()
    assert not re.search(r"url\(|@import|https?://", text)
    assert [value for name, value in markdown.attributes if name == "src"] == [f"{each.stem}.png" for each in pictures]
    for alt, picture in zip((value for name, value in page.attributes if name == "alt"), pictures, strict=True):
        assert alt == f"{picture.title}: {picture.text}"


def test_only_what_was_measured_is_explained(written):
    for page in pages(written[0]):
        assert "What it means: variance" in page.text
        assert "v_a + v_b" in page.text
        assert "What it means: spectrum" not in page.text


@pytest.mark.parametrize("models", [{}, {"a": {}}, {"a": {"layers": None}}])
def test_nothing_measured_is_a_report_without_tables(tmp_path, models):
    geometry_report.write(models, [], tmp_path)
    assert [page.tables for page in pages(tmp_path)] == [[], []]


def test_names_that_differ_in_spaces_have_columns_of_their_own():
    text = geometry_report.markdown({"a b": model(layer(0, 0.25)), "a  b": model(layer(0, 0.75))}, [])
    assert Page(MarkdownIt().enable("table").render(text)).tables[0][1] == ["share within sequences", "0.250", "0.750"]


def test_report_without_its_picture_is_not_written(tmp_path):
    (tmp_path / "report.html").write_text("before")
    with pytest.raises(OSError, match="missing.svg"):
        geometry_report.write(MODELS, [Picture("missing", "Missing", "Nothing.")], tmp_path)
    assert (tmp_path / "report.html").read_text() == "before"
    assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        *((None, "–"), (0.0, "0.00"), (3, "3"), (12345, "12,345"), (0.12345, "0.123"), (123.4, "123"), (8.4, "8.40")),
        *((1234.5, "1,234"), (2.3e8, "2.30e+08"), (0.00012, "1.20e-04"), (-0.5, "-0.500"), (999.9, "1,000")),
    ],
)
def test_numbers_have_three_digits_that_count(number, shown):
    assert geometry_report._shown(number) == shown


def test_what_is_no_number_is_not_a_figure():
    layer = {"a": {"b": [1.0, 3.0, None], "c": float("nan"), "d": "text", "e": []}}
    assert geometry_report.figure(layer, "a", "b") == 2.0
    assert [geometry_report.figure(layer, "a", key) for key in "cdef"] == [None] * 4
    assert geometry_report.figure(layer, "a", "b", "c") is None
