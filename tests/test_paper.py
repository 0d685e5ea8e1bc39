"""The paper's figures: what eval/paper.yaml holds, and how they stand beside runs."""

import json

import pytest
import yaml

from laplacian_heads import recipes
from laplacian_heads.eval.compare import PAPER, CompareRecipe, Score, compare, paper

DATA = yaml.safe_load(PAPER.read_text())
ENTRIES = [*DATA["paper"], *DATA["nanochat d20"]]


def row(run, **scores):
    return {"run": run, "scores": scores}


def lines(text):
    """Cells of the table, by its first column."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("|")]
    return {line[0]: line[1:] for line in cells}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.get('measure')} k={entry.get('k')}")
def test_every_entry_tells_all_of_its_value(entry):
    assert list(entry) == ["measure", "k", "value", "std", "unit", "source", "doubt"]
    assert isinstance(entry["measure"], str)
    assert type(entry["k"]) is int
    assert type(entry["value"]) is float
    assert entry["std"] is None or 0 < entry["std"] < 5
    assert entry["unit"] in ("%", "components")
    assert entry["source"] in (*DATA["sources"], "computed from the other values")
    assert entry["doubt"] is None or entry["doubt"] in DATA["doubts"]
    assert entry["unit"] != "%" or 0 < entry["value"] < 100


def test_values_and_their_doubts():
    assert len({(entry["measure"], entry["k"]) for entry in DATA["paper"]}) == len(DATA["paper"]) == 39
    found = {(entry["measure"], entry["k"]): (entry["value"], entry["std"]) for entry in DATA["paper"]}
    assert found["CIFAR-100", 12] == (77.04, 0.40)
    assert found["ImageNet-1k", 3] == (82.73, 0.19)
    assert found["ARC-Easy", 0] == (31.03, 4.29)
    assert found["GSM8K pass@10", 5] == (24.87, None)
    assert found["DINO ADE20K mIoU", 6] == (29.64, None)
    assert found["LM components for 99 %", 10] == (430.4, None)
    five = ("ARC-Easy", "ARC-Challenge", "GSM8K pass@10", "HumanEval pass@10", "MMLU")
    assert sum(found[measure, 0][0] for measure in five) / 5 == pytest.approx(found["average of five", 0][0])
    doubts = {(entry["measure"], entry["k"]): entry["doubt"] for entry in DATA["paper"]}
    for conflict in (("GSM8K pass@10", 3), ("GSM8K pass@10", 5), ("average of five", 5), ("average of five", 9)):
        assert "disagree" in doubts[conflict]
    assert {entry["measure"]: entry["value"] for entry in DATA["nanochat d20"]}["ARC-Easy"] == 38.76
    # A doubt or source that no entry has is one that was lost on the way.
    assert {entry["doubt"] for entry in ENTRIES} - {None} == set(DATA["doubts"])
    assert set(DATA["sources"]) < {entry["source"] for entry in ENTRIES}


def test_every_measure_of_ours_is_published_and_scored_by_a_task_that_is_there():
    for measure, place in DATA["tasks"].items():
        assert measure in {entry["measure"] for entry in ENTRIES}
        assert set(place) == {"task", "metric"}
        task = yaml.load((PAPER.parent / f"tasks/{place['task']}.yaml").read_text(), Loader)
        metrics = task.get("metric_list") or task["aggregate_metric_list"]
        assert place["metric"] in {metric["metric"] for metric in metrics}


class Loader(yaml.SafeLoader):
    """lm-eval's files, with functions as their names."""


Loader.add_constructor("!function", lambda loader, node: node.value)


def test_figures_stand_beside_the_runs():
    text = paper(
        [
            row("k=0", chatcore_arc_easy=Score("acc", 0.312, 0.0095, items=20, of=2376), other=Score("acc", 0.5)),
            row(
                "k=3",
                chatcore_mmlu=Score("acc", 0.27),
                chatcore_gsm8k_pass10=Score(
                    "pass@1", 0.1, 0.02, others=[{"metric": "pass@10,first", "value": 0.225, "stderr": 0.0115}]
                ),
            ),
        ]
    )
    assert lines(text) == {
        "measure": ["paper, k=0", "paper, other k", "nanochat d20, k=0", "k=0", "k=3"],
        "-" * 13: ["-" * 16, "-" * 73, "-" * 17, "-" * 31, "-" * 12],
        "ARC-Easy": ["31.03 ± 4.29 [1]", "47.12 ± 1.66 (k=5) [1]", "38.76", "31.20 ± 0.95 (20 of 2376 items)", ""],
        "GSM8K pass@10": [
            "22.29 ± 0.13 [2]",
            "24.00 ± 0.27 (k=3) [3], 24.87 (k=5) [3], 21.99 (k=7) [4], 23.73 (k=9) [5]",
            *("", "", "22.50 ± 1.15"),
        ],
        "MMLU": ["27.17 [6]", "", "31.51", "", "27.00"],
    }
    doubts = [line for line in text.split("\n") if line.startswith("- [")]
    assert [doubt[: len("- [1] ")] for doubt in doubts] == [f"- [{i}] " for i in range(1, 7)]
    for measure, k, number in (("ARC-Easy", 0, 1), ("GSM8K pass@10", 5, 3), ("MMLU", 0, 6)):
        (doubt,) = (entry["doubt"] for entry in DATA["paper"] if (entry["measure"], entry["k"]) == (measure, k))
        assert doubts[number - 1] == f"- [{number}] {doubt}"
    assert "30.06" not in text  # of a measure that no run has
    assert text.endswith("other budgets than the paper's, unless they were trained by the same recipe.")


def test_average_and_measures_of_nanochat_alone():
    text = paper([row("a", chatcore_paper=Score("acc", 0.25, 0.01))])
    assert lines(text)["average of five"] == ["23.93 [1]", "30.06 (k=5) [2], 30.09 (k=9) [2]", "25.00 ± 1.00"]
    text = paper([row("a", chatcore_gsm8k=Score("acc", 0.05, 0.01))])
    assert lines(text)["GSM8K pass@1"] == ["4.55", "5.00 ± 1.00"]
    assert "- [" not in text


def test_without_a_measure_it_says_what_to_score():
    rows = [row("a", generated_choice=Score("acc", 0.5), chatcore_gsm8k_pass10=Score("pass@1", 0.5))]
    assert paper(rows).endswith("laplacian-heads eval MODEL tasks=[chatcore_paper].")
    assert "\n" not in paper(rows)


def test_verb_prints_them_only_where_asked(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    entry = {"metric": "acc", "value": 0.3, "stderr": 0.01, "items": 20, "chance": 0.25}
    (tmp_path / "a/eval.json").write_text(json.dumps({"tasks": {"chatcore_arc_easy": entry}}))
    for asked in (False, True):
        values = {"models": [str(tmp_path / "a")], "output": str(tmp_path / f"{asked}"), "paper": asked}
        compare(recipes.load(CompareRecipe, "compare", values))
        printed = capsys.readouterr().out
        for text in (printed, (tmp_path / f"{asked}" / "compare.md").read_text()):
            assert ("31.03 ± 4.29" in text) == asked
    assert recipes.load(CompareRecipe, "compare", {"models": ["a"]}).paper is False
