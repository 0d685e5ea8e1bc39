"""The first screen of the README does what it says, and its tree and verb table are the project's."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from laplacian_heads import recipes
from laplacian_heads.__main__ import VERBS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST_SCREEN = README.split("\n## ")[0]
SNIPPETS = re.findall(r"```python\n(.*?)```", FIRST_SCREEN, re.DOTALL)
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}
COMMANDS = re.findall(r"^make (\S+)", FIRST_SCREEN, re.MULTILINE)


def run(code, folder):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory):
    """A folder in which the demo was run, with a hundredth of its tokens."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "laplacian_heads", "demo", "laplacian_heads=[2]", "pretrain.tokens=6_144"]
    mixture = '[{data: "generated:choice", rows: 64}]'
    command += ["midtrain.tokens=2_048", f"sft.data={mixture}", "eval.limit=8", "geometry.documents=8"]
    command += ["tokenizer.max_characters=100_000"]
    done = subprocess.run(command, cwd=folder, env=OFFLINE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_there_are_two_commands_and_three_snippets():
    assert COMMANDS == ["demo", "test"]
    assert len(SNIPPETS) == 3


@pytest.mark.parametrize("number", range(3))
def test_snippet_runs_as_it_stands(number, demo_folder):
    run(SNIPPETS[number], demo_folder)


def test_demo_snippet_needs_no_package(demo_folder):
    assert run("import sys; sys.modules['laplacian_heads'] = None\n" + SNIPPETS[0], demo_folder).strip()


def test_make_demo_is_the_demo_verb():
    """So the tests of the verb are tests of the command."""
    make = ["make", "--dry-run", "--no-print-directory", "demo"]  # the tests may themselves run under make
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip().splitlines()[-1] == ".venv/bin/laplacian-heads demo"


@pytest.mark.slow
def test_make_demo_learns_what_it_is_scored_on(tmp_path):
    """The whole demo, from the recipe as shipped: both models score far above guessing, and everything is there."""
    environment = {name: value for name, value in OFFLINE.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "laplacian_heads", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = (tmp_path / "runs/demo/report.md").read_text()
    assert report in done.stdout
    for heads in (0, 2):
        folder = tmp_path / f"runs/demo/laplacian_heads_{heads}"
        scores = json.loads((folder / "sft/eval.json").read_text())["tasks"]
        for task in ("generated_choice", "generated_arithmetic"):
            # Guessing gives 0.25 and 0; ten standard errors are far from luck.
            assert scores[task]["value"] - 10 * 0.022 > scores[task]["chance"]
        assert (folder / "hub/README.md").exists()


def test_tree_names_what_is_there():
    tree = README.split("## Where everything is")[1].split("```")[1]
    named = {line.split()[0].rstrip("/") for line in tree.strip().splitlines()}
    assert all((ROOT / name).exists() for name in named)
    code = {path.name for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/*.py")}
    assert code <= named


def test_verb_table_is_the_command_line():
    rows = re.findall(r"^\| `([\w-]+)` \| `(\S+)` \|", README.split("## Commands")[1], re.MULTILINE)
    assert dict(rows) == {verb: module.replace(".", "/") + ".py" for verb, (module, *_) in VERBS.items()}


def test_value_table_is_accepted():
    from laplacian_heads.laplacian import heads_by_layer

    values = re.findall(r"^\| `([^`]+)` \|", README.split("## Which heads")[1].split("\n## ")[0], re.MULTILINE)
    assert len(values) == 4
    layers = [heads_by_layer(yaml.safe_load(value), [6] * 4) for value in values]
    assert layers[3] == [[], [], [5], [4, 5]]


@pytest.mark.parametrize("path", sorted(recipes.SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_commented(path):
    lines = path.read_text().splitlines()
    commented = False
    for line in lines:
        if line.startswith("#"):
            commented = True
        elif re.match(r"\w+:", line):
            assert commented, line
        elif not line.strip():
            commented = False
