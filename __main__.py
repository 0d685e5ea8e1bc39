"""Command line: `laplacian-heads VERB ...`, the same as `python -m laplacian_heads VERB ...`."""

import argparse
import importlib
import re
import sys

from laplacian_heads import recipes

# verb: (module, function, recipe class, optional dependencies it needs, what it does)
VERBS = {
    "demo": ("study", "demo", "DemoRecipe", "train", "train two small LaplaceGPTs on this machine and compare them"),
}

# How tokenizers, safetensors and torch.save say that a file cannot be written, each in an exception of its own.
CANNOT_WRITE = re.compile(r"os error \d+|No space left|PytorchStreamWriter|inline_container")


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit status. A user's mistake ends with one sentence, not with a traceback."""
    parser = argparse.ArgumentParser(
        prog="laplacian-heads",
        description="Train and compare transformers with Laplacian heads.",
        epilog="laplacian-heads VERB --help shows the keys of a verb's recipe.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (*_, what) in VERBS.items():
        sub = verbs.add_parser(
            verb,
            help=what,
            description=what[0].upper() + what[1:] + ".",
            epilog=f"keys and defaults, from the shipped recipe {verb!r}:\n\n{recipes.path_of(verb).read_text()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("recipe", nargs="?", default=verb, help="a recipe file, or the name of a shipped recipe")
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the recipe to set otherwise")
        sub.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
    options = parser.parse_args(arguments)
    if "=" in options.recipe:  # no recipe named: the first override stands in its place
        options.overrides.insert(0, options.recipe)
        options.recipe = options.verb

    try:
        _run(options)
        return 0
    except Exception as error:
        status, message = 1, " ".join(str(error).split())
        if CANNOT_WRITE.search(message):
            message = f"a file cannot be written, the disk is probably full ({message})"
        elif not isinstance(error, (ValueError, OSError)):
            raise
        if options.traceback:
            raise
    except KeyboardInterrupt:
        status, message = 130, "interrupted; the same command goes on at the last checkpoint."
    # Out here the exception is gone, and with it the progress bar of the work it ended.
    print(f"laplacian-heads {options.verb}: {message}", file=sys.stderr)
    return status


def _run(options: argparse.Namespace) -> None:
    module, function, recipe_class, extra, _ = VERBS[options.verb]
    try:
        module = importlib.import_module(f"laplacian_heads.{module}")
        recipe = recipes.load(getattr(module, recipe_class), options.recipe, options.overrides)
        getattr(module, function)(recipe, dry_run=options.dry_run)
    except ImportError as error:
        missing = error
        while isinstance(missing.__cause__, ImportError):  # transformers wraps the error that names the package
            missing = missing.__cause__
        name = missing.name or str(missing)
        cannot_import_name = missing.name and not isinstance(missing, ModuleNotFoundError)
        if cannot_import_name or name.startswith("laplacian_heads"):
            raise
        raise ValueError(f"{options.verb} needs {name}: pip install 'laplacian-heads[{extra}]'.") from error


if __name__ == "__main__":
    sys.exit(main())
