"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import os
import re
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HUB_FILES = ("laplacian.py", "configuration.py", "modeling_laplace_gpt.py", "modeling_laplace_vit.py")
# Each module may import those before it; train and eval stand side by side, but for the measures of eval.geometry.
ORDER = [
    *("laplacian", "configuration", "modeling_laplace_gpt", "modeling_laplace_vit"),
    *("files", "recipes", "problems", "shards", "sources", "images", "accuracy", "neighbors", "weights"),
    *("train", "eval", "nanochat", "deit", "convert", "model_card", "hub_upload", "study", "__main__"),
]


def imported(path):
    """Names of our modules that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level:
                yield name
            elif name.split(".")[0] == "laplacian_heads":
                yield from (f"{name}.{alias.name}".removeprefix("laplacian_heads.") for alias in node.names)


def sources():
    return [path for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")] if path.parent.name not in ("tests", "build")]


def test_package_list_is_the_folders_on_disk():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "build"}
    packages = PROJECT["tool"]["setuptools"]["packages"]
    assert set(packages) == {"laplacian_heads", *(f"laplacian_heads.{folder}" for folder in folders)}


def test_files_of_the_hub_import_only_each_other():
    """transformers copies what `from .name import` names in the same folder, and nothing else."""
    for name in HUB_FILES:
        text = (ROOT / name).read_text()
        assert not re.search(r"^\s*(from|import) laplacian_heads", text, re.MULTILINE)
        for relative in re.findall(r"^\s*from (\.\S*) import", text, re.MULTILINE):
            assert f"{relative[1:]}.py" in HUB_FILES


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    place = path.parent.name if path.parent != ROOT else path.stem
    if place in ("__init__", "benchmarks"):
        return
    allowed = ORDER[: ORDER.index(place) + 1]
    if place in ("train", "eval"):
        allowed = [name for name in allowed if name not in {"train", "eval"} - {place}]
    if path == ROOT / "eval/geometry.py":
        allowed = []  # a leaf, so that training can measure by it
    for name in imported(path):
        shared = place == "train" and f"{name}.".startswith("eval.geometry.")
        assert shared or name.split(".")[0] in allowed, f"{path} imports {name}"


def test_nothing_else_at_the_root_would_ship():
    """Every .py file of the root is in the wheel."""
    assert {path.stem for path in ROOT.glob("*.py")} <= {*ORDER, "__init__"}
    assert not list(ROOT.glob("tests/__init__.py"))


def test_eval_does_not_load_anything():
    assert (ROOT / "eval/__init__.py").read_text() == ""


@pytest.mark.slow
def test_wheel_holds_the_package_and_its_data(tmp_path):
    import subprocess

    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = {name.removeprefix("laplacian_heads/") for name in zipfile.ZipFile(wheel).namelist()}
    assert {*HUB_FILES, "__main__.py", "study.py", "train/stage.py", "eval/harness.py", "eval/paper.yaml"} <= names
    assert {f"recipes/{path.relative_to(ROOT / 'recipes')}" for path in ROOT.glob("recipes/**/*.yaml")} <= names
    assert {f"eval/tasks/{path.name}" for path in ROOT.glob("eval/tasks/*.*")} <= names
    assert not any(name.startswith(("tests", "benchmarks", "docs")) for name in names)

    # A shipped recipe runs by name from the wheel, outside of the clone.
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(command, check=True)
    code = "import sys, laplacian_heads; from laplacian_heads.__main__ import main; print(laplacian_heads.__file__); "
    code += "sys.exit(main(['tokenizer', 'gpt_tiny_tokenizer', 'data=generated:choice', 'vocab_size=300', 'output=t']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(target)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert str(target) in done.stdout
    assert (tmp_path / "t/tokenizer.json").exists()
