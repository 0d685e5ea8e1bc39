"""Runs side by side: what is read from their folders, the tables, the verdict and the plots."""

import json
import warnings

import numpy as np
import pytest

from laplacian_heads import recipes
from laplacian_heads.eval import compare as module
from laplacian_heads.eval import plots
from laplacian_heads.eval.compare import (
    CompareRecipe,
    Score,
    compare,
    differences,
    differences_table,
    plot,
    read,
    rows,
    table,
    verdict,
)


def score(value, stderr, chance=None):
    """An entry of eval.json as it was before it told of the calculator and of samples."""
    return {"metric": "acc", "value": value, "stderr": stderr, "items": 500, "chance": chance, "others": []}


def layers(*shares):
    return [
        {
            "layer": i,
            "variance": {"shares": {"within_sequence": share}},
            "spectrum": {"per_sequence": {"components_99": 10.5 * share, "eigenvalues": [3.0, 1.0]}},
        }
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
    assert known["scores"] == {
        "choice": Score(metric="acc", value=0.5, stderr=0.02, items=500),
        "sums": Score(metric="acc", value=0.3, items=500),
    }
    assert known["chance"] == {"choice": 0.25}
    assert known["within_sequence_share"] == 0.8
    assert known["components_99"] == 10.5 * 0.8
    assert known["log_history"] == PRETRAINED["trainer_state.json"]["log_history"]
    assert read([folder / "tuned", folder / "pretrained"])["tokens_per_second"] == 99.0


def test_pictures_are_named_in_their_order(folder):
    """The log of training has geometry too; one without losses has no picture of losses."""
    log = {"log_history": [{"step": 1, "gradient_norm/layer_01": 0.5}]}
    (folder / "laplacian" / "trainer_state.json").write_text(json.dumps(log))
    pictures = plot(rows({"k=3": [folder / "laplacian"]}), folder)
    assert [picture.stem for picture in pictures] == ["scores", "variance", "spectrum", "ranks", "training"]
    assert all((folder / f"{picture.stem}.png").exists() for picture in pictures)


@pytest.mark.parametrize(
    "last",
    [
        {"layer": 1, "within_sequence_share": 0.5, "components_99": 3.0},  # as earlier versions wrote it
        {"layer": 1},
        {"layer": 1, "variance": {"shares": {"within_sequence": None}}, "spectrum": {"pooled": {"components_99": 3}}},
    ],
)
def test_geometry_that_the_last_layer_does_not_have_is_unknown(folder, last):
    (folder / "tuned" / "geometry.json").write_text(json.dumps({"layers": [layers(0.9)[0], last]}))
    known = read([folder / "tuned"])
    assert (known["within_sequence_share"], known["components_99"]) == (None, None)
    compare(recipe(folder, "tuned", "laplacian", output=str(folder / "out")))


def test_layout_is_that_of_the_config_where_the_results_are_of_before(folder):
    (folder / "laplacian" / "config.json").write_text('{"laplacian_heads": 0}')
    assert read([folder / "laplacian"])["laplacian_heads"] == 0


def test_damaged_score_is_named(folder):
    (folder / "tuned" / "eval.json").write_text('{"tasks": {"choice": {}}}')
    with pytest.raises(ValueError, match=r"eval.json is damaged, the task choice has no value"):
        read([folder / "tuned"])


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


def row(run, **scores):
    unknown = ("laplacian_heads", "bits_per_byte", "stage", "tokens_per_second", "loss", "images", "hours")
    geometry = {"within_sequence_share": None, "components_99": None, "geometry": {}}
    return {
        "run": run,
        **dict.fromkeys(unknown),
        "scores": scores,
        "chance": {},
        "log_history": [],
        "of_images": False,
        **geometry,
    }


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
    baseline = row("a", choice=Score("acc", *before), x=Score("acc", 0, 0))
    sentence = verdict(baseline, row("b", choice=Score("acc", *after)))
    assert f"here: choice {word} (" in sentence
    assert "x " not in sentence.replace("choice ", "")


def test_verdict_is_one_sentence_on_every_measure(folder):
    found = rows({"k=0": [folder / "pretrained", folder / "tuned"], "k=3": [folder / "laplacian"]})
    assert verdict(*found) == (
        "k=3 (Laplacian heads: 3) against k=0 (Laplacian heads: 0), here: choice better (0.600 ± 0.020 against 0.500 ± "
        "0.020: difference +0.1000, 95 % interval +0.0434 to +0.1566 by two standard errors); bits per byte better "
        "(1.7000 against 1.7500); within-sequence share lower (0.600 against 0.800); "
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
    stems = ["differences", "loss", "ranks", "scores", "spectrum", "variance"]
    names = {"compare.md", *(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg"))}
    assert {path.name for path in (folder / "out").iterdir()} == names
    text = (folder / "out" / "compare.md").read_text()
    assert text == printed
    assert "one seed is no evidence" in text
    assert "+0.0434 to +0.1566" in text.split("\n\n")[1]


def test_run_without_results_is_named(folder):
    with pytest.raises(ValueError, match=r"There is no results.json, no eval.json, no geometry.json, .* in .*empty"):
        compare(recipe(folder, "tuned", "empty"))
    with pytest.raises(ValueError, match=r"There is no folder .*nowhere"):
        compare(recipe(folder, "tuned", "nowhere"))


def test_model_of_the_hub_is_read_where_it_was_measured(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "laplacian").rename(folder / "measured")
    (folder / "runs" / "eval").mkdir(parents=True)
    (folder / "measured").rename(folder / "runs" / "eval" / "owner--name")
    compare(CompareRecipe(models=["tuned", "owner/name"], output=None, paper=False))
    assert "| owner/name | 3 " in capsys.readouterr().out


@pytest.mark.parametrize("text", ['{"layers": [', "[1]", '{"layers": 5}', '{"layers": [1]}', '{"layers": [{}]}'])
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


def write_run(folder, task="choice", metric="acc", values=None, items=None, filtered="none", **entry):
    """A run that was scored on one task, with its samples if there are values: {(doc_id, doc_hash): value}."""
    (folder / "eval").mkdir(parents=True)
    if values is not None:
        numbers = list(values.values())
        entry = {"value": np.mean(numbers).item(), "stderr": (np.std(numbers) / len(numbers) ** 0.5).item(), **entry}
        entry["samples"] = f"eval/samples_{task}.jsonl"
        lines = [
            {"doc_id": i, "doc_hash": hashed, "doc": {}, "filter": filtered, metric.partition(",")[0]: value}
            for (i, hashed), value in values.items()
        ]
        lines.append({"doc_id": 0, "doc_hash": "h0", "filter": "another filter", metric.partition(",")[0]: 77.0})
        (folder / entry["samples"]).write_text("".join(json.dumps(line) + "\n" for line in lines))
        items = items or len(numbers)
    entry = {"metric": metric, "items": items, "of": items, "chance": 0.25, "calculator": True, "others": [], **entry}
    (folder / "eval.json").write_text(json.dumps({"checkpoint": "c0ffee", "tasks": {task: entry}}))


def draw(seed, items=200, share=0.5):
    values = np.random.default_rng(seed).random(items) < share
    return {(i, f"h{i}"): float(value) for i, value in enumerate(values)}


def both(folder):
    return rows({name: [folder / name] for name in ("a", "b")})


def test_score_is_read_as_it_was_written(tmp_path):
    others = [{"metric": "pass@1", "value": 0.1, "stderr": None}]
    values = {(3, "three"): 1.0, (4, "four"): 0.0}
    write_run(tmp_path / "a", metric="pass@10", values=values, of=2376, calculator=False, stderr=0.5, others=others)
    expected = Score("pass@10", 0.5, 0.5, items=2, of=2376, calculator=False, samples=values, others=others)
    found = read([tmp_path / "a"])
    assert found["scores"] == {"choice": expected}
    assert found["chance"] == {"choice": 0.25}


@pytest.mark.parametrize("filtered", ["none", "strict"])
def test_interval_of_a_pair_is_the_bootstrap_over_its_items(tmp_path, filtered):
    """Against resampling in a loop; the answers agree on most items, so unpaired scores would tell far less."""
    metric = "acc" if filtered == "none" else f"acc,{filtered}"
    before = draw(0)
    after = {item: 1.0 if i < 25 else value for i, (item, value) in enumerate(before.items())}
    shuffled = {item: after[item] for item in [list(after)[i] for i in np.random.default_rng(5).permutation(200)]}
    write_run(tmp_path / "a", metric=metric, values=before, filtered=filtered)
    write_run(tmp_path / "b", metric=metric, values=shuffled, filtered=filtered)
    (found,) = differences(both(tmp_path))

    gains = np.array([after[item] - before[item] for item in before])
    random = np.random.default_rng(12345)
    means = [random.choice(gains, len(gains)).mean() for _ in range(4000)]
    low, high = np.quantile(means, [0.025, 0.975])
    assert found["difference"] == pytest.approx(gains.mean())
    assert found["low"] == pytest.approx(low, abs=0.006)
    assert found["high"] == pytest.approx(high, abs=0.006)
    assert low > 0
    assert found["method"] == "paired bootstrap"
    assert found["items"] == "200"
    # The same figures without the items, for which the two-standard-errors rule sees nothing.
    for name in "ab":
        (tmp_path / name / "eval/samples_choice.jsonl").unlink()
    (unpaired,) = differences(both(tmp_path))
    assert unpaired["method"] == "two standard errors"
    assert unpaired["low"] < 0 < unpaired["high"]
    assert "by two standard errors" in verdict(*both(tmp_path))


def test_bootstrap_is_the_same_every_time():
    gains = tuple(np.random.default_rng(3).normal(size=50))
    first = module._bootstrap(gains)
    module._bootstrap.cache_clear()
    assert module._bootstrap(gains) == first


@pytest.mark.parametrize("change", ["an item is another", "not of this score", "no number", "other count"])
def test_scores_are_not_paired_on_other_items(tmp_path, change):
    values = draw(1)
    write_run(tmp_path / "a", values=values)
    if change == "an item is another":
        other = {**{key: value for key, value in values.items() if key != (0, "h0")}, (0, "changed"): values[0, "h0"]}
        write_run(tmp_path / "b", values=other)
    elif change == "not of this score":
        write_run(tmp_path / "b", values=values, value=0.123)
    elif change == "no number":
        write_run(tmp_path / "b", values=values)
        path = tmp_path / "b/eval/samples_choice.jsonl"
        path.write_text(path.read_text().replace('"acc": 1.0', '"acc": [1.0, 4]'))
    else:
        write_run(tmp_path / "a2", values=values, items=300)
        write_run(tmp_path / "b", values=values, items=300)
        (tmp_path / "a").rename(tmp_path / "unused")
        (tmp_path / "a2").rename(tmp_path / "a")
    (found,) = differences(both(tmp_path))
    assert found["method"] == "two standard errors"


@pytest.mark.parametrize(("gain", "word"), [(0.0, "not distinguishable"), (1.0, "better"), (-1.0, "worse")])
@pytest.mark.parametrize("items", [1, 5])
def test_equal_differences_are_their_own_interval(tmp_path, gain, word, items):
    start = 1.0 if gain < 0 else 0.0
    write_run(tmp_path / "a", values={(i, "h"): start for i in range(items)})
    write_run(tmp_path / "b", values={(i, "h"): start + gain for i in range(items)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (found,) = differences(both(tmp_path))
        assert f"choice {word} (" in verdict(*both(tmp_path))
    assert (found["low"], found["high"], found["method"]) == (gain, gain, "paired bootstrap")


@pytest.mark.parametrize("metric", ["bits_per_byte", "word_perplexity", "byte_perplexity", "perplexity"])
@pytest.mark.parametrize("stderr", [0.01, None])
def test_lower_is_better_where_it_is(metric, stderr):
    before, after = Score(metric, 1.5, stderr), Score(metric, 1.2, stderr)
    assert "text better" in verdict(row("a", text=before), row("b", text=after))
    assert "text worse" in verdict(row("a", text=after), row("b", text=before))
    assert "text worse" in verdict(row("a", text=Score("f1", 1.5, stderr)), row("b", text=Score("f1", 1.2, stderr)))


def test_perplexities_are_not_drawn_among_scores(tmp_path):
    found = [row(name, text=Score("word_perplexity", value, 0.1)) for name, value in (("a", 30.0), ("b", 20.0))]
    assert differences(found)[0]["difference"] == -10
    plot(found, tmp_path)
    assert not list(tmp_path.iterdir())
    for each in found:
        each["scores"]["choice"] = Score("acc", 0.5, 0.1)
    plot(found, tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == {"scores", "differences"}


def test_fewer_items_are_said_everywhere(tmp_path, monkeypatch):
    limited = {"items": 20, "of": 2376}
    found = [
        row("a", choice=Score("acc", 0.3, 0.01, **limited), sums=Score("acc", 0.1, 0.01, items=9, of=9)),
        row("b", choice=Score("acc", 0.31, 0.01, **limited), sums=Score("acc", 0.2, 0.01, items=9, of=9)),
    ]
    assert "| 0.310 ± 0.010 (20 of 2376 items) |" in table(found)
    assert table(found).count("items") == 2
    assert "(0.310 ± 0.010 (20 of 2376 items) against 0.300 ± 0.010 (20 of 2376 items): difference" in verdict(*found)
    cells = [[cell.strip() for cell in line.split("|")] for line in differences_table(differences(found)).split("\n")]
    assert cells[0][1:-1] == [
        *("task", "metric", "run against baseline", "difference", "95 % interval", "items", "method")
    ]
    assert cells[2][1:-1] == [
        *("choice", "acc", "b against a", "+0.0100", "-0.0183 to +0.0383", "20 of 2376", "two standard errors")
    ]
    assert cells[3][6] == "9"

    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, axes, path: drawn.update({path.name: axes}))
    plot(found, tmp_path)
    labels = ["choice\n20 of 2376 items", "sums"]
    assert [label.get_text() for label in drawn["scores.png"].get_xticklabels()] == labels
    assert [label.get_text() for label in drawn["differences.png"].get_yticklabels()] == labels
    found[1]["scores"]["choice"] = Score("acc", 0.31, 0.01, items=2376, of=2376)
    plot(found, tmp_path)
    (label, _) = drawn["scores.png"].get_xticklabels()
    assert label.get_text() == "choice\n20 of 2376 items or all items"


def test_intervals_are_drawn_where_they_are(tmp_path, monkeypatch):
    """A line for each task and run, the first task above, each run in the colour that it has among the scores."""
    means = {"a": (0.5, 0.4), "b": (0.6, 0.3), "c": (0.45, 0.4)}
    found = [row(run, x=Score("acc", x, 0.01), y=Score("acc", y, 0.02)) for run, (x, y) in means.items()]
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, axes, path: drawn.update({path.name: axes}))
    plot(found, tmp_path)
    axes = drawn["differences.png"]
    for (points, _, (bars,)), run in zip(axes.containers, "bc", strict=True):
        assert points.get_color() == plots.COLOURS["abc".index(run)]
        expected = [after - before for before, after in zip(means["a"], means[run], strict=True)]
        assert points.get_xdata() == pytest.approx(expected)
        assert [round(place) for place in points.get_ydata()] == [0, 1]
        margins = [2 * 2**0.5 * 0.01, 2 * 2**0.5 * 0.02]
        ends = [segment[:, 0].tolist() for segment in bars.get_segments()]
        for (low, high), difference, margin in zip(ends, expected, margins, strict=True):
            assert (low, high) == pytest.approx((difference - margin, difference + margin))
    assert axes.yaxis_inverted()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"items": 20}, "items 20 against 500"),
        ({"calculator": False}, "calculator False against True"),
        ({"apply_chat_template": False}, "apply_chat_template False against True"),
        ({"generation_kwargs": {"top_k": 5}}, "generation_kwargs {'top_k': 5} against {'top_k': 50}"),
        ({"metric": "acc_norm"}, "metric acc_norm against acc"),
    ],
)
def test_scores_of_other_conditions_are_not_comparable(tmp_path, other, reason):
    conditions = {"metric": "acc", "items": 500, "calculator": True, "apply_chat_template": True}
    conditions["generation_kwargs"] = {"top_k": 50}
    before, after = (
        Score(value=0.2, stderr=0.01, **conditions),
        Score(value=0.9, stderr=0.01, **{**conditions, **other}),
    )
    found = [row("a", choice=before), row("b", choice=after)]
    assert f"here: choice not comparable (0.900 ± 0.010 against 0.200 ± 0.010: {reason});" in verdict(*found)
    assert differences(found) == []
    # What an old file does not tell cannot part them.
    found[1]["scores"]["choice"] = Score("acc", 0.9, 0.01)
    assert "choice better" in verdict(*found)
    assert len(differences(found)) == 1


@pytest.mark.parametrize(
    "line", ['{"doc_id": 1, "doc_ha', "[1]", '{"doc_id": 1, "filter": "none"}', '{"doc_id": 1, "doc_hash": "h"}']
)
def test_damaged_samples_are_named(tmp_path, line):
    write_run(tmp_path / "a", values=draw(1))
    with open(tmp_path / "a/eval/samples_choice.jsonl", "a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"samples_choice.jsonl is damaged"):
        compare(recipe(tmp_path, "a"))


def write_classifier(
    folder, accuracy=0.75, top5=0.9, heads=0, classes=10, recipe="data: digits\nheld_out: digits:test", **results
):
    folder.mkdir()
    found = {
        **{"stage": "classify", "laplacian_heads": heads, "images": 70400, "seconds": 180.0, "loss": 0.5, "seed": 0},
        **{"accuracy": accuracy, "accuracy_top5": top5, "ema_accuracy": None, "held_out_images": 300, **results},
    }
    (folder / "results.json").write_text(json.dumps(found))
    (folder / "config.json").write_text(json.dumps({"id2label": {str(i): str(i) for i in range(classes)}}))
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 10, "loss": 2.0}]}))


def test_classifiers_are_compared_by_their_accuracy(tmp_path, capsys):
    """Each with the binomial standard error: sqrt(0.75 * 0.25 / 300) = 0.025."""
    write_classifier(tmp_path / "a")
    write_classifier(tmp_path / "b", accuracy=0.9, heads=2, ema_accuracy=0.92)
    compare(recipe(tmp_path, "a", "b", output=str(tmp_path / "out")))
    head, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table(both(tmp_path)).split("\n"))
    assert head == [
        *("run", "Laplacian heads", "accuracy", "top-5 accuracy", "accuracy of averaged weights"),
        *("held-out loss", "held-out images", "images seen", "hours"),
    ]
    run = ["0.5000", "300 of digits:test", "70,400", "0.050"]
    assert lines == [
        ["a", "0", "0.750 ± 0.025", "0.900 ± 0.017", "", *run],
        ["b", "2", "0.900 ± 0.017", "0.900 ± 0.017", "0.920 ± 0.016", *run],
    ]
    assert both(tmp_path)[0]["chance"] == {"accuracy": 0.1, "top-5 accuracy": 0.5}
    margin = 2 * (0.75 * 0.25 / 300 + 0.9 * 0.1 / 300) ** 0.5
    found = differences(both(tmp_path))
    assert [each["task"] for each in found] == ["accuracy", "top-5 accuracy"]
    assert (found[0]["low"], found[0]["high"]) == pytest.approx((0.15 - margin, 0.15 + margin))
    printed = capsys.readouterr().out
    assert "here: accuracy better (0.900 ± 0.017 against 0.750 ± 0.025: difference +0.1500" in printed
    assert "top-5 accuracy not distinguishable" in printed
    # Nats per token are no unit of theirs.
    assert {path.stem for path in (tmp_path / "out").iterdir()} == {"compare", "differences", "scores"}


@pytest.mark.parametrize(
    ("other", "reason", "column"),
    [
        ("data: cifar\nheld_out: cifar:test", "data cifar against digits", "300 of cifar:test"),
        ("data: digits\nheld_out: mine", "held_out mine against digits:test", "300 of mine"),
        ("data: digits\nheld_out: 300", "held_out 300 against digits:test", "300 of digits"),
    ],
)
def test_accuracies_on_other_data_are_not_compared(tmp_path, monkeypatch, other, reason, column):
    write_classifier(tmp_path / "a")
    write_classifier(tmp_path / "b", accuracy=0.9, recipe=other)
    found = both(tmp_path)
    assert f"accuracy not comparable (0.900 ± 0.017 against 0.750 ± 0.025: {reason})" in verdict(*found)
    assert differences(found) == []
    assert column in table(found)
    drawn = {}
    monkeypatch.setattr(plots, "save", lambda figure, axes, path: drawn.update({path.name: axes}))
    plot(found, tmp_path)
    (label, _) = drawn["scores.png"].get_xticklabels()
    assert label.get_text() == f"accuracy\n300 of digits:test or {column}"


@pytest.mark.parametrize("damage", ["cut", "", "[1]"])
def test_classifier_without_a_recipe_has_accuracies_of_unknown_data(tmp_path, damage):
    write_classifier(tmp_path / "a", recipe=damage)
    write_classifier(tmp_path / "b")
    assert "| 300 " in table(both(tmp_path))
    assert "accuracy not distinguishable" in verdict(*both(tmp_path))


@pytest.mark.parametrize("values", [{"accuracy": "high"}, {"accuracy": 75.0}, {"held_out_images": 0}])
def test_damaged_accuracy_is_named(tmp_path, values):
    write_classifier(tmp_path / "a", **values)
    with pytest.raises(ValueError, match=r"results.json is damaged, its accuracy is"):
        compare(recipe(tmp_path, "a"))


@pytest.mark.parametrize("text", ["pretrained", "tuned"])
def test_images_and_text_are_refused_together(folder, text):
    write_classifier(folder / "image")
    for names in ((text, "image"), ("image", text)):
        with pytest.raises(ValueError, match=rf"image is of images and .*{text} is of text, allowed are runs of"):
            compare(recipe(folder, *names))


def test_accuracies_stand_beside_the_papers_where_their_data_is_its(tmp_path, capsys):
    for name, data in (("k0", "uoft-cs/cifar100::test"), ("k3", "uoft-cs/cifar100::test"), ("other", "digits:test")):
        write_classifier(tmp_path / name, recipe=f"data: {data.split(':')[0]}\nheld_out: {data}")
    compare(recipe(tmp_path, "k0", "k3", paper=True))
    (line,) = (line for line in capsys.readouterr().out.split("\n") if line.startswith("| CIFAR-100"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells[1] == "75.12 ± 0.46"
    assert "77.04 ± 0.40 (k=12)" in cells[2]
    assert cells[3:] == ["75.00 ± 2.50", "75.00 ± 2.50"]
    compare(recipe(tmp_path, "other", paper=True))
    assert "CIFAR-100" not in (printed := capsys.readouterr().out)
    assert (
        "No run has a measure of the paper's table; that has accuracies on the held_out uoft-cs/cifar10::test"
        in printed
    )


def write_frozen(folder, accuracy=0.6, iou=0.25):
    """What dino, probe, knn and segment leave in a run's folder."""
    folder.mkdir(exist_ok=True)
    asked = {"data": "digits", "held_out": "digits:test"}
    head = {"held_out_accuracy": accuracy, "selection_accuracy": 0.9}
    near = [{"neighbors": 10, "accuracy": 0.5, "accuracy_top5": 0.9}]
    contents = {
        "results.json": {"stage": "dino", "laplacian_heads": 1, "images": 640, "seconds": 36, "knn_accuracy": 0.4},
        "probe.json": {"recipe": asked, "by_selection": head, "by_held_out": {}, "held_out_images": 400},
        "knn.json": {"recipe": asked, "neighbors": near, "held_out_images": 400},
        "segment.json": {"recipe": {"data": "a", "held_out": "b"}, "mean_iou": iou},
    }
    contents["results.json"]["held_out_images"] = 400
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))


def test_frozen_features_are_compared(tmp_path):
    write_frozen(tmp_path / "a")
    write_frozen(tmp_path / "b", accuracy=0.9)
    found = both(tmp_path)
    text = table(found)
    for head, value in {"linear probe": "0.600 ± 0.024", "10-NN": "0.500 ± 0.025", "mean IoU": "0.250"}.items():
        assert head in text
        assert value in text
    assert "k-NN in training" in text
    assert "linear probe" in {each["task"] for each in differences(found)}
    assert found[0]["images"] == 640
    assert found[0]["hours"] == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["probe.json", "knn.json", "segment.json"])
@pytest.mark.parametrize("content", ["{}", '{"recipe": {"data": 1}}', "[", '{"recipe": null}'])
def test_damaged_figures_of_frozen_features_are_named(tmp_path, name, content):
    write_frozen(tmp_path / "a")
    (tmp_path / "a" / name).write_text(content)
    with pytest.raises(ValueError, match=rf"a/{name} is damaged"):
        compare(recipe(tmp_path, "a"))


def test_model_of_images_whose_features_alone_were_measured_is_not_text(tmp_path):
    write_frozen(tmp_path / "a")
    for name in ("results.json", "knn.json", "segment.json"):
        (tmp_path / "a" / name).unlink()
    write_frozen(tmp_path / "b")
    assert "linear probe" in table(both(tmp_path))


def test_mean_iou_of_nothing_is_left_out(tmp_path):
    write_frozen(tmp_path / "a", iou=None)
    write_frozen(tmp_path / "b")
    assert [set(row["scores"]) & {"mean IoU"} for row in both(tmp_path)] == [set(), {"mean IoU"}]
