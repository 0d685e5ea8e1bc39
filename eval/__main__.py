"""lm-eval's own command line, to which the model type `laplacian-heads` is known: python -m laplacian_heads.eval."""

from lm_eval.__main__ import cli_evaluate

import laplacian_heads.eval.harness  # noqa: F401  (registers the model type)

if __name__ == "__main__":
    cli_evaluate()
