"""Studies: runs that train models and compare them, the only module that composes train and eval."""

import dataclasses
import json
import re
import time
from pathlib import Path

from laplacian_heads import recipes
from laplacian_heads.eval import compare
from laplacian_heads.eval.evaluate import EvalRecipe, evaluate
from laplacian_heads.eval.measure import GeometryRecipe, geometry
from laplacian_heads.files import make_folder, write
from laplacian_heads.hub_upload import UploadRecipe, upload
from laplacian_heads.train.midtrain import MidtrainRecipe, midtrain
from laplacian_heads.train.pretrain import PretrainRecipe, pretrain
from laplacian_heads.train.sft import SFTRecipe, sft
from laplacian_heads.train.tokenizer import TokenizerRecipe, tokenizer


@dataclasses.dataclass
class DemoRecipe:
    """Keys of `recipes/demo.yaml`, which says what they mean."""

    output: str
    seed: int
    laplacian_heads: list
    tokenizer: dict
    pretrain: dict
    midtrain: dict
    sft: dict
    eval: dict
    geometry: dict

    def __post_init__(self):
        if not self.output:
            raise ValueError("output is '', allowed is the path of a folder.")
        if not self.laplacian_heads:
            raise ValueError("laplacian_heads is [], allowed is a list with one entry for each model.")
        if len({_folder_name(heads) for heads in self.laplacian_heads}) < len(self.laplacian_heads):
            raise ValueError(f"laplacian_heads is {self.laplacian_heads}, allowed are entries with names of their own.")

    def load(self, stage: str, recipe_class: type, **values):
        """The recipe of a stage, with the keys of its block and these values."""
        block = dict(getattr(self, stage))
        name = block.pop("recipe", None)
        if not isinstance(name, str):
            raise ValueError(f"{stage}.recipe is {name!r}, allowed is a recipe file or the name of a shipped recipe.")
        for key in values:
            if key in block:
                raise ValueError(f"{stage}.{key} is set by the demo itself.")
        return recipes.load(recipe_class, name, {**block, **values})


def demo(recipe: DemoRecipe, dry_run: bool = False) -> None:
    """Take one LaplaceGPT for each entry of `laplacian_heads` through every stage, and compare them.

    Writes into `recipe.output` the tokenizer, a folder for each model with one for each of its stages, plots and
    `report.md`, and prints the report.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another recipe's results.
    """
    output = Path(recipe.output).expanduser()
    folders = [output / _folder_name(heads) for heads in recipe.laplacian_heads]
    stages = [("tokenizer", tokenizer, recipe.load("tokenizer", TokenizerRecipe, output=str(output / "tokenizer")))]
    for heads, folder in zip(recipe.laplacian_heads, folders, strict=True):
        stages += _stages(recipe, output, folder, heads)  # refuses wrong values before any work
    if not dry_run:
        recipes.check_output(output, recipe)
        make_folder(output)
        recipes.write(output / "recipe.yaml", recipe)

    started = time.perf_counter()
    for i, (name, function, stage_recipe) in enumerate(stages, start=1):
        print(f"\n== {i}/{len(stages)} {name}")
        function(stage_recipe, dry_run)
    if dry_run:
        return
    runs = {folder.name: [folder / "pretrain", folder / "sft"] for folder in folders}
    rows = compare.rows(runs)
    report = _report(recipe, rows, folders, compare.plot(rows, output))
    write(output / "report.md", report)
    print(f"\n== done in {(time.perf_counter() - started) / 60:.1f} minutes\n\n{report}")


def _folder_name(heads) -> str:
    # Letters, digits and underscores: transformers makes a module name of it when it loads the code.
    return "laplacian_heads_" + re.sub(r"\W+", "_", json.dumps(heads)).strip("_")


def _stages(recipe: DemoRecipe, output: Path, folder: Path, heads) -> list[tuple]:
    """Name, function and recipe of what is done with one model."""
    pretrained, midtrained, tuned = (str(folder / stage) for stage in ("pretrain", "midtrain", "sft"))
    start = {"tokenizer": str(output / "tokenizer"), "laplacian_heads": heads}
    repo = f"your-name/{folder.name}"
    upload_recipe = recipes.load(UploadRecipe, "upload", {"model": tuned, "repo": repo, "staging": str(folder / "hub")})
    staged = [
        ("pretrain", pretrain, recipe.load("pretrain", PretrainRecipe, output=pretrained, seed=recipe.seed, **start)),
        (
            *("midtrain", _unless(None, midtrain)),
            recipe.load("midtrain", MidtrainRecipe, output=midtrained, seed=recipe.seed, model=pretrained),
        ),
        ("sft", _unless(None, sft), recipe.load("sft", SFTRecipe, output=tuned, seed=recipe.seed, model=midtrained)),
        ("eval", _unless(folder / "sft/eval.json", evaluate), recipe.load("eval", EvalRecipe, model=tuned)),
        (
            *("geometry", _unless(folder / "sft/geometry.json", geometry)),
            recipe.load("geometry", GeometryRecipe, models=[tuned]),
        ),
        ("upload --dry-run", _unless(folder / "hub", _stage_only), upload_recipe),
    ]
    return [(f"{name}, laplacian_heads {heads}", function, stage_recipe) for name, function, stage_recipe in staged]


def _unless(path: Path | None, function):
    """A verb that is not run where what it writes is there, and not in a dry run, in which its model is not."""

    def run(recipe, dry_run):
        if path is not None and path.exists():
            print(f"{path} is there.")
        elif not dry_run:
            function(recipe)

    return run


def _stage_only(recipe: UploadRecipe) -> None:
    upload(recipe, dry_run=True)


def _report(recipe: DemoRecipe, rows: list[dict], folders: list[Path], pictures: list) -> str:
    """The comparison as Markdown."""
    chance = ", ".join(f"{task} {value:g}" for task, value in rows[0]["chance"].items())
    folder = folders[-1] / "hub"
    lines = [
        "# LaplaceGPT demo",
        "",
        f"{len(rows)} models through pretraining, mid-training and SFT, with the same seed {recipe.seed}, data and "
        "budget. Bits per byte and tokens/s are of pretraining, the rest is of the model after SFT.",
        "",
        compare.table(rows),
        "",
        f"Scores are accuracies with one standard error; guessing gives {chance}.",
        "",
    ]
    lines += [line for other in rows[1:] for line in (compare.verdict(rows[0], other), "")]
    lines += [line for picture in pictures for line in (f"![{picture.title}]({picture.stem}.png)", "")]
    lines += [
        "## Use it",
        "",
        "```bash",
        f"laplacian-heads chat {folders[-1] / 'sft'}",
        f"laplacian-heads upload {folders[-1] / 'sft'} YOUR-NAME/YOUR-MODEL",
        "```",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)',
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)',
        "```",
        "",
    ]
    return "\n".join(lines)
