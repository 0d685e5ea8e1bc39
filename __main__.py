"""Command line: `laplacian-heads VERB ...`, the same as `python -m laplacian_heads VERB ...`."""

import argparse
import importlib
import sys

from safetensors import SafetensorError

from laplacian_heads import recipes

# verb: (module, function, recipe class, optional dependencies it needs, what it does)
VERBS = {
    "demo": ("study", "demo", "DemoRecipe", "train", "train two small LaplaceGPTs on this machine and compare them"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit status. A user's mistake ends with one sentence, not with a traceback."""
    parser = argparse.ArgumentParser(
        prog="laplacian-heads",
        description="Train, score and publish transformers with Laplacian heads.",
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

    module, function, recipe_class, extra, _ = VERBS[options.verb]
    try:
        try:
            module = importlib.import_module(f"laplacian_heads.{module}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("laplacian_heads"):
                raise
            raise ValueError(f"{options.verb} needs {error.name}: pip install 'laplacian-heads[{extra}]'.") from error
        recipe = recipes.load(getattr(module, recipe_class), options.recipe, options.overrides)
        getattr(module, function)(recipe, dry_run=options.dry_run)
    except (ValueError, OSError, SafetensorError) as error:
        if options.traceback:
            raise
        message = " ".join(str(error).split())
        print(f"laplacian-heads {options.verb}: {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nlaplacian-heads {options.verb}: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
