"""The demo of image classifiers: refused early, gone on with, and what it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import pipeline

from laplacian_heads import images
from laplacian_heads.__main__ import main

ROOT = Path(__file__).parents[1]
# Two steps a model, of one layer.
SMALL = [
    *("classify.images=64", "classify.epochs=1", "classify.warmup_epochs=0", "classify.geometry_steps=1"),
    *("classify.num_hidden_layers=1", "classify.hidden_size=16", "geometry.sequences=32"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which the small demo has run to its end."""
    output = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo-vision", f"output={output}", *SMALL]) == 0
    return output


def check(output, printed):
    """That everything is there; returns the accuracies."""
    report = (output / "report.md").read_text()
    assert report in printed
    assert "tells nothing of Laplacian heads" in report
    assert "guessing gives accuracy 0.1, top-5 accuracy 0.5" in report
    assert (
        "laplacian_heads_2 (Laplacian heads: 2) against laplacian_heads_0 (Laplacian heads: 0), here: accuracy"
        in report
    )
    pictures = {line.split("(")[1].split(")")[0] for line in report.split("\n") if line.startswith("![")}
    assert {"scores.png", "differences.png", "variance.png", "training.png"} <= pictures
    assert all((output / picture).exists() for picture in pictures)
    assert (output / "geometry/report.html").exists()
    picture = images.load("digits:test").picture(0)
    accuracies = []
    for heads in (0, 2):
        folder = output / f"laplacian_heads_{heads}"
        results = json.loads((folder / "classify/results.json").read_text())
        assert f"| {results['accuracy']:.3f} ± " in report
        assert results["laplacian_heads"] == heads
        assert f"laplacian_heads_{heads}" in (folder / "hub/README.md").read_text()
        classify = pipeline("image-classification", model=str(folder / "hub"), trust_remote_code=True)
        assert {answer["label"] for answer in classify(picture, top_k=10)} == set("0123456789")
        assert json.loads((folder / "classify/geometry.json").read_text())["data"] == "digits:test"
        accuracies.append(results["accuracy"])
    return accuracies


def test_demo_ends_with_everything_a_visitor_needs(finished, capsys):
    """And what is finished is not done again."""
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.parent != finished}
    capsys.readouterr()
    assert main(["demo-vision", f"output={finished}", *SMALL]) == 0
    check(finished, capsys.readouterr().out)
    same = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.parent != finished}
    assert {path for path in same if path.is_file() and same[path] != before.get(path)} == set()
    assert main(["demo-vision", f"output={finished}", *SMALL, "seed=1"]) == 1
    assert "holds the results of another recipe" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["classify", "geometry", "upload"])
def test_interrupted_demo_goes_on(tmp_path, monkeypatch, capsys, verb):
    """At the second model, or before what is of all of them; of one model the report lies in its own folder."""
    given = ["demo-vision", f"output={tmp_path / 'out'}", *SMALL, "laplacian_heads=[2]"]

    def end(*arguments, **values):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"laplacian_heads.{'train.classify' if verb == 'classify' else 'study'}.{verb}", end)
        assert main(given) == 130
    weights = tmp_path / "out/laplacian_heads_2/classify/model.safetensors"
    assert weights.exists() == (verb != "classify")
    made = weights.exists() and weights.stat().st_mtime_ns
    assert main(given) == 0
    assert not made or weights.stat().st_mtime_ns == made
    assert (weights.parent / "geometry/report.html").exists()
    assert (tmp_path / "out/report.md").read_text() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("laplacian_heads=1", "laplacian_heads is 1, allowed is list"),
        ("laplacian_heads=[0, 9]", "laplacian_heads: the count is 9 in layer 0"),
        ("classify.seed=1", "classify.seed is set by the demo itself"),
        ("geometry.output=there", "geometry.output is set by the demo itself"),
        ("classify.recipe=vit_tiny_digit", "the nearest is 'vit_tiny_digits'"),
        ("tokenizer.recipe=x", "demo_vision has no block 'tokenizer'"),
    ],
)
def test_wrong_demo_is_refused_before_any_work(capsys, tmp_path, override, said):
    assert main(["demo-vision", f"output={tmp_path / 'out'}", override]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_dry_run_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo-vision", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.count("parameters ") == 2
    assert [line.split("/")[0] for line in said.split("\n") if line.startswith("==")] == [
        f"== {i}" for i in range(1, 6)
    ]
    assert not list(tmp_path.iterdir())


def test_text_demo_needs_no_torchvision():
    """It is another extra's."""
    code = "import sys; sys.modules['torchvision'] = None; import laplacian_heads.study"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_demo_vision_is_the_verb():
    make = ["make", "--dry-run", "--no-print-directory", "demo-vision"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == ".venv/bin/laplacian-heads demo-vision"


@pytest.mark.slow
def test_demo_learns_what_it_is_scored_on(tmp_path):
    """The whole demo, from the recipe as shipped: both models score far above guessing, and everything is there."""
    command = [sys.executable, "-m", "laplacian_heads", "demo-vision"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for accuracy in check(tmp_path / "runs/demo_vision", done.stdout):
        assert accuracy > 0.8  # guessing gives 0.1, and ten standard errors of 360 images are 0.2
