"""lm-eval's own command line, which knows the model type `laplacian-heads` and our tasks."""

import sys

from lm_eval.__main__ import cli_evaluate

import laplacian_heads.eval.harness  # noqa: F401  (registers the model type)
from laplacian_heads.eval.evaluate import TASKS

if __name__ == "__main__":
    if "--tasks" in sys.argv and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()
