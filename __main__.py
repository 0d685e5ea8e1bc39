"""Command line: `laplacian-heads VERB ...`, the same as `python -m laplacian_heads VERB ...`."""

import argparse
import importlib
import re
import sys
from pathlib import Path

from laplacian_heads import recipes
from laplacian_heads.files import Stopped

# verb: (module, function, recipe class, optional dependencies, what stands before key=value, default recipe, what for)
VERBS = {
    "demo": ("study", "demo", "DemoRecipe", "demo", "recipe", "demo", "run every stage on this machine and compare"),
    "demo-vision": (
        *("study", "demo_vision", "DemoVisionRecipe", "demo-vision", "recipe", "demo_vision"),
        "train image classifiers on this machine and compare",
    ),
    "tokenizer": (
        *("train.tokenizer", "tokenizer", "TokenizerRecipe", "train", "recipe", "gpt_tiny_tokenizer"),
        "train a byte-level BPE tokenizer with a chat template",
    ),
    "prepare": (
        *("train.prepare", "prepare", "PrepareRecipe", "train", "recipe", "gpt_tiny_prepare"),
        "tokenise a corpus once, for pretraining",
    ),
    "pretrain": (
        *("train.pretrain", "pretrain", "PretrainRecipe", "train", "recipe", "gpt_tiny_pretrain"),
        "train a new LaplaceGPT on text",
    ),
    "midtrain": (
        *("train.midtrain", "midtrain", "MidtrainRecipe", "train", "recipe", "gpt_tiny_midtrain"),
        "train a LaplaceGPT on conversations, with the loss on every token",
    ),
    "sft": (
        *("train.sft", "sft", "SFTRecipe", "train", "recipe", "gpt_tiny_sft"),
        "fine-tune a LaplaceGPT on what the assistant says in conversations",
    ),
    "classify": (
        *("train.classify", "classify", "ClassifyRecipe", "vision", "recipe", "vit_tiny_digits"),
        "train a LaplaceViT to classify images",
    ),
    "dino": (
        *("train.dino", "dino", "DinoRecipe", "dino", "recipe", "dino_tiny_digits"),
        "train a LaplaceViT on images without labels",
    ),
    "eval": ("eval.evaluate", "evaluate", "EvalRecipe", "eval", "model", "eval", "score a model with lm-eval"),
    "geometry": (
        *("eval.measure", "geometry", "GeometryRecipe", "eval", "models", "geometry"),
        "measure and picture how tokens lie in models' hidden states",
    ),
    "probe": (
        *("eval.probe", "probe", "ProbeRecipe", "demo-vision", "model", "probe"),
        "train linear classifiers on a vision model's frozen features",
    ),
    "knn": (
        *("eval.probe", "knn", "KnnRecipe", "demo-vision", "model", "knn"),
        "classify images by nearest neighbours among a vision model's frozen features",
    ),
    "segment": (
        *("eval.segment", "segment", "SegmentRecipe", "eval", "model", "segment"),
        "train a linear head that segments pictures on a vision model's frozen patches",
    ),
    "pca": (
        *("eval.pca", "pca", "PcaRecipe", "eval", "models", "pca"),
        "show the principal components of vision models' patches as colours",
    ),
    "compare": ("eval.compare", "compare", "CompareRecipe", "eval", "models", "compare", "set runs side by side"),
    "chat": ("eval.chat", "chat", "ChatRecipe", "eval", "model", "chat", "talk to a model in the terminal"),
    "convert": (
        *("convert", "convert", "ConvertRecipe", "train", "source output", "convert"),
        "turn a model of nanochat, timm or transformers into a LaplaceGPT or a LaplaceViT, or back",
    ),
    "upload": (
        *("hub_upload", "upload", "UploadRecipe", "demo", "model repo", "upload"),
        "put a run on the Hub: stage, verify, upload",
    ),
}

WHAT_STANDS_FIRST = {
    "recipe": "a recipe file or the name of a shipped recipe",
    "model": "the folder of a model or its name on the Hub",
    "models": "folders of models or their names on the Hub",
    "source output": "a model, in the forms of the key source, and a new folder",
    "model repo": "the folder of a run and the repository, OWNER/NAME",
}

# How tokenizers, safetensors and torch.save say that a file cannot be written, each in an exception of its own.
CANNOT_WRITE = re.compile(r"os error \d+|No space left|PytorchStreamWriter|inline_container")
# --key is key=true, for keys that are switches.
FLAG = re.compile(r"--[a-z][\w-]*")


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit status. A user's mistake ends with one sentence, not with a traceback."""
    parser = argparse.ArgumentParser(
        prog="laplacian-heads",
        description="Train and compare transformers with Laplacian heads.",
        epilog="laplacian-heads VERB --help shows the keys of a verb's recipe.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (*_, positionals, recipe, what) in VERBS.items():
        names = " ".join(f"[{name.upper()}]" if name == "recipe" else name.upper() for name in positionals.split())
        sub = verbs.add_parser(
            verb,
            help=what,
            usage=f"laplacian-heads {verb} {names} [key=value ...] [--key ...] [--dry-run] [--traceback]",
            description=what[0].upper() + what[1:] + ".",
            epilog=f"{_others(verb, recipe)}keys and defaults, from the shipped recipe {recipe!r}:\n\n"
            + recipes.path_of(recipe).read_text(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument(
            "arguments",
            nargs="*",
            metavar=names,
            help=f"{WHAT_STANDS_FIRST[positionals]}, then keys to set otherwise; --key is key=true",
        )
        sub.add_argument(
            "--dry-run",
            action="store_true",
            help="only say what would be done; upload stages and verifies",
        )
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
    options, unknown = parser.parse_known_args(arguments)
    options.arguments += [f"{flag[2:].replace('-', '_')}=true" if FLAG.fullmatch(flag) else flag for flag in unknown]

    try:
        _run(options)
        return 0
    except Stopped as stopped:
        print(stopped)
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
        status, message = 130, "interrupted; what was saved is kept, and the same command goes on from it."
    # Out here the exception is gone, and with it the progress bar of the work it ended.
    print(f"laplacian-heads {options.verb}: {message}", file=sys.stderr)
    return status


def _others(verb: str, default: str) -> str:
    # Those of models of images are named after their data.
    pattern = {"classify": "vit_*.yaml", "dino": "dino_*.yaml"}.get(verb, f"*_{verb}.yaml")
    names = [path.stem for path in sorted(recipes.SHIPPED.glob(pattern)) if path.stem != default]
    return f"other shipped recipes: {', '.join(names)}\n\n" if names else ""


def _split(positionals: str, recipe: str, arguments: list[str]) -> tuple[str, dict]:
    """The recipe that the arguments name, and the keys that they set."""
    # A folder may have "=" in its name.
    first = [argument for argument in arguments if "=" not in argument or Path(argument).exists()]
    values = recipes.parse([argument for argument in arguments if argument not in first])
    if positionals == "recipe":
        recipe, *first = first or [recipe]
        if first:
            raise ValueError(f"{first[0]!r} is not of the form key=value.")
        return recipe, values
    if positionals == "models":
        return recipe, {**({"models": first} if first else {}), **values}
    names = positionals.split()
    if len(first) > len(names):
        raise ValueError(f"{first[len(names)]!r} is not of the form key=value.")
    return recipe, {**dict(zip(names, first, strict=False)), **values}


def _run(options: argparse.Namespace) -> None:
    module, function, recipe_class, extra, positionals, recipe, _ = VERBS[options.verb]
    try:
        module = importlib.import_module(f"laplacian_heads.{module}")
        name, values = _split(positionals, recipe, options.arguments)
        recipe = recipes.load(getattr(module, recipe_class), name, values)
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
