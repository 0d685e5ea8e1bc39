"""The oldest transformers the package allows runs the core of the tests."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = [
    "test_layout.py",
    "test_laplace_gpt.py",
    "test_loss.py",
    "test_generation.py",
    "test_laplacianize.py",
    "test_field_reports.py",
    "test_hub.py",
]


def oldest(package):
    (version,) = re.findall(rf'"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    return f"{version}.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with nothing but the oldest transformers, to be put before the installed one."""
    target = tmp_path_factory.mktemp("oldest")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    result = subprocess.run([*pip, f"transformers=={oldest('transformers')}"], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"pip cannot download transformers {oldest('transformers')}: {result.stderr.strip()[-300:]}")
    return target


def run(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("file", CORE)
def test_core_tests_pass_with_the_oldest_transformers(file, folder):
    version = run(folder, "-c", "import transformers; print(transformers.__version__)").stdout.strip()
    assert version == oldest("transformers")
    result = run(folder, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"tests/{file}")
    assert result.returncode == 0, result.stdout[-8000:]
