"""Runs side by side: what is read from their folders, the table, the verdict and the plots."""

import json

import pytest

from laplacian_heads import recipes
from laplacian_heads.eval.compare import CompareRecipe, compare, read, rows, table, verdict


def score(value, stderr, chance=None):
    return {"metric": "acc", "value": value, "stderr": stderr, "items": 500, "chance": chance, "others": []}


def layers(*shares):
    return [
        {"layer": i, "within_sequence_share": share, "components_99": 10.5 * share, "components_99_pooled": 12}
        for i, share in enumerate(shares)
    ]


PRETRAINED = {
    "results.json": {
        "laplacian_heads": 0,
        "bits_per_byte": 1.75,
        "tokens_per_second": 12345.6,
        "seed": 7,
    },
    "trainer_state.json": {
        "log_history": [
            {"step": 10, "loss": 3.0},
            {"step": 20, "loss": 2.5},
            {"step": 20, "eval_loss": 2.4, "eval_bits_per_byte": 1.75},
        ]
    },
}
TUNED = {
    "results.json": {"laplacian_heads": 0, "bits_per_byte": None, "tokens_per_second": 99.0, "seed": 7},
    "eval.json": {"tasks": {"choice": score(0.5, 0.02, 0.25), "sums": score(0.3, None)}},
    "geometry.json": {"layers": layers(0.9, 0.8)},
    "trainer_state.json": {"log_history": [{"step": 1, "loss": 9.0}]},
}
LAPLACIAN = {
    "results.json": {"laplacian_heads": 3, "bits_per_byte": 1.7, "tokens_per_second": 11000.0, "seed": 7},
    "eval.json": {"tasks": {"choice": score(0.6, 0.02, 0.25)}},
    "geometry.json": {"layers": layers(0.9, 0.6)},
}


@pytest.fixture
def folder(tmp_path):
    for name, files in (("pretrained", PRETRAINED), ("tuned", TUNED), ("laplacian", LAPLACIAN), ("empty", {})):
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(json.dumps(content))
    return tmp_path


def test_earlier_folder_is_believed_where_two_know(folder):
    known = read([folder / "pretrained", folder / "tuned"])
    assert known["bits_per_byte"] == 1.75
    assert known["tokens_per_second"] == 12345.6
    assert known["scores"] == {"choice": (0.5, 0.02), "sums": (0.3, None)}
    assert known["chance"] == {"choice": 0.25}
    assert known["within_sequence_share"] == 0.8
    assert known["components_99"] == 10.5 * 0.8
    assert known["log_history"] == PRETRAINED["trainer_state.json"]["log_history"]
    assert read([folder / "tuned", folder / "pretrained"])["tokens_per_second"] == 99.0


def test_layout_comes_from_the_config_of_a_model_that_was_not_trained_here(folder):
    (folder / "laplacian" / "results.json").unlink()
    assert read([folder / "laplacian"])["laplacian_heads"] is None
    (folder / "laplacian" / "config.json").write_text('{"laplacian_heads": [[0], [1, 2]]}')
    assert read([folder / "laplacian"])["laplacian_heads"] == [[0], [1, 2]]


def test_table_has_a_column_for_all_that_is_known(folder):
    found = rows({"k=0": [folder / "pretrained", folder / "tuned"], "k=3": [folder / "laplacian"]})
    head, line, baseline, laplacian = (
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table(found).split("\n")
    )
    assert head == [
        *("run", "Laplacian heads", "bits per byte", "choice", "sums"),
        *("within-sequence share, last layer", "components for 99 %, last layer", "tokens/s"),
    ]
    assert all(set(cell) == {"-"} for cell in line)
    assert baseline == ["k=0", "0", "1.7500", "0.500 ± 0.020", "0.300", "0.800", "8.4", "12,346"]
    assert laplacian == ["k=3", "3", "1.7000", "0.600 ± 0.020", "", "0.600", "6.3", "11,000"]

    (head, *_) = table(rows({"k=0": [folder / "pretrained"]})).split("\n")
    assert [cell.strip() for cell in head.split("|")[1:-1]] == ["run", "Laplacian heads", "bits per byte", "tokens/s"]


@pytest.mark.parametrize(
    ("before", "after", "word"),
    [
        ((0.5, 0.02), (0.6, 0.02), "better"),
        ((0.6, 0.02), (0.5, 0.02), "worse"),
        ((0.5, 0.03), (0.58, 0.03), "not distinguishable"),  # 0.08 < 2 * sqrt(0.0018) = 0.085
        ((0.5, 0.03), (0.59, 0.03), "better"),
        ((0.5, 0.0), (0.5, 0.0), "not distinguishable"),
        ((0.5, None), (0.6, 0.01), "better without a known standard error"),
    ],
)
def test_verdict_on_a_score(before, after, word):
    row = {
        "run": "a",
        **dict.fromkeys(("laplacian_heads", "bits_per_byte", "stage", "within_sequence_share", "components_99")),
    }
    sentence = verdict({**row, "scores": {"choice": before, "x": (0, 0)}}, {**row, "scores": {"choice": after}})
    assert f"here: choice {word} (" in sentence
    assert "x " not in sentence.replace("choice ", "")


def test_verdict_is_one_sentence_on_every_measure(folder):
    found = rows({"k=0": [folder / "pretrained", folder / "tuned"], "k=3": [folder / "laplacian"]})
    assert verdict(*found) == (
        "k=3 (Laplacian heads: 3) against k=0 (Laplacian heads: 0), here: choice better (0.600 ± 0.020 against 0.500 ± "
        "0.020); bits per byte better (1.7000 against 1.7500); within-sequence share lower (0.600 against 0.800); "
        "components lower (6.3 against 8.4); one seed is no evidence for or against Laplacian heads."
    )
    assert "bits per byte worse (1.7500 against 1.7000)" in verdict(*found[::-1])


def recipe(folder, *names, **values):
    return recipes.load(CompareRecipe, "compare", {"models": [str(folder / name) for name in names], **values})


def test_verb_prints_and_writes(folder, capsys):
    compare(recipe(folder, "tuned", "laplacian"))
    printed = capsys.readouterr().out
    assert not list(folder.rglob("*.png"))
    compare(recipe(folder, "tuned", "laplacian", output=str(folder / "out")), dry_run=True)
    assert not (folder / "out").exists()
    compare(recipe(folder, "tuned", "laplacian", output=str(folder / "out")))
    names = ["compare.md", "geometry.png", "loss.png", "scores.png"]
    assert sorted(path.name for path in (folder / "out").iterdir()) == names
    text = (folder / "out" / "compare.md").read_text()
    assert text == printed
    assert "one seed is no evidence" in text


def test_run_without_results_is_named(folder):
    with pytest.raises(ValueError, match=r"There is no results.json, no eval.json, no geometry.json in .*empty"):
        compare(recipe(folder, "tuned", "empty"))
    with pytest.raises(ValueError, match=r"There is no folder .*nowhere"):
        compare(recipe(folder, "tuned", "nowhere"))


def test_model_of_the_hub_is_read_where_it_was_measured(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "laplacian").rename(folder / "measured")
    (folder / "runs" / "eval").mkdir(parents=True)
    (folder / "measured").rename(folder / "runs" / "eval" / "owner--name")
    compare(CompareRecipe(models=["tuned", "owner/name"], output=None))
    assert "| owner/name | 3 " in capsys.readouterr().out


@pytest.mark.parametrize("text", ['{"layers": [', "[1]"])
def test_damaged_file_is_named(folder, text):
    (folder / "tuned" / "geometry.json").write_text(text)
    with pytest.raises(ValueError, match=r"geometry.json is damaged"):
        compare(recipe(folder, "tuned"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"models": None}, "models is None, allowed is a list"),
        ({"models": []}, r"models is \[\], allowed is a list"),
        ({"models": ["a", "a"]}, "each run once"),
        ({"output": ""}, "output is ''"),
    ],
)
def test_refusals(folder, values, message):
    with pytest.raises(ValueError, match=message):
        recipe(folder, "tuned", **values)


def test_bits_per_byte_of_different_stages_are_not_compared(tmp_path):
    """They are measured on different text."""
    found = {}
    for stage, bits in (("pretrain", 1.1), ("midtrain", 2.2), ("midtrain", 2.3)):
        folder = tmp_path / f"{stage}-{bits}"
        folder.mkdir()
        results = {"laplacian_heads": 1, "bits_per_byte": bits, "tokens_per_second": 1.0, "seed": 0, "stage": stage}
        (folder / "results.json").write_text(json.dumps(results))
        (found[bits],) = rows({folder.name: [folder]})
    assert "bits per byte" not in verdict(found[1.1], found[2.2])
    assert "bits per byte worse (2.3000 against 2.2000)" in verdict(found[2.2], found[2.3])
