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
class StudyRecipe:
    """Keys that the recipes of both demos have."""

    output: str
    seed: int
    laplacian_heads: list

    def __post_init__(self):
        if not self.output:
            raise ValueError("output is '', allowed is the path of a folder.")
        if not self.laplacian_heads:
            raise ValueError("laplacian_heads is [], allowed is a list with one entry for each model.")
        if len({_folder_name(heads) for heads in self.laplacian_heads}) < len(self.laplacian_heads):
            raise ValueError(f"laplacian_heads is {self.laplacian_heads}, allowed are entries with names of their own.")

    @property
    def folders(self) -> list[Path]:
        """The folder of each model."""
        return [Path(self.output).expanduser() / _folder_name(heads) for heads in self.laplacian_heads]

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


@dataclasses.dataclass
class DemoRecipe(StudyRecipe):
    """Keys of `recipes/demo.yaml`, which says what they mean."""

    tokenizer: dict
    pretrain: dict
    midtrain: dict
    sft: dict
    eval: dict
    geometry: dict


@dataclasses.dataclass
class DemoVisionRecipe(StudyRecipe):
    """Keys of `recipes/demo_vision.yaml`, which says what they mean."""

    classify: dict
    geometry: dict


def demo(recipe: DemoRecipe, dry_run: bool = False) -> None:
    """Take one LaplaceGPT for each entry of `laplacian_heads` through every stage, and compare them.

    Writes into `recipe.output` the tokenizer, a folder for each model with one for each of its stages, plots and
    `report.md`, and prints the report.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another recipe's results.
    """
    made = str(Path(recipe.output).expanduser() / "tokenizer")
    stages = [("tokenizer", tokenizer, recipe.load("tokenizer", TokenizerRecipe, output=made))]
    for heads, folder in zip(recipe.laplacian_heads, recipe.folders, strict=True):
        stages += _stages(recipe, made, folder, heads)  # refuses wrong values before any work
    _run(recipe, stages, dry_run)
    if dry_run:
        return
    run, hub = recipe.folders[-1] / "sft", recipe.folders[-1] / "hub"
    _report(
        *(recipe, "LaplaceGPT demo", ["pretrain", "sft"]),
        f"{len(recipe.folders)} models through pretraining, mid-training and SFT, with the same seed {recipe.seed}, "
        "data and budget. Bits per byte and tokens/s are of pretraining, the rest is of the model after SFT.",
        [f"laplacian-heads chat {run}", f"laplacian-heads upload {run} YOUR-NAME/YOUR-MODEL"],
        [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{hub}", trust_remote_code=True)',
            f'tokenizer = AutoTokenizer.from_pretrained("{hub}", trust_remote_code=True)',
        ],
    )


def demo_vision(recipe: DemoVisionRecipe, dry_run: bool = False) -> None:
    """Train one LaplaceViT for each entry of `laplacian_heads` to classify images, and compare them.

    Writes into `recipe.output` a folder for each model with its run and what is to go to the Hub, the report on the
    geometry of all of them, plots and `report.md`, and prints the report.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another recipe's results.
    """
    from laplacian_heads.train.classify import ClassifyRecipe, classify  # here, so that demo comes without torchvision

    runs = [folder / "classify" for folder in recipe.folders]
    several = len(runs) > 1
    pages = (Path(recipe.output).expanduser() if several else runs[0]) / "geometry"
    measured = recipe.load(
        *("geometry", GeometryRecipe), models=list(map(str, runs)), output=str(pages) if several else None
    )
    stages = [
        (
            *(f"classify, laplacian_heads {heads}", classify),
            recipe.load("classify", ClassifyRecipe, output=str(run), seed=recipe.seed, laplacian_heads=heads),
        )
        for heads, run in zip(recipe.laplacian_heads, runs, strict=True)
    ]
    stages.append(("geometry", _unless(pages / "report.md", geometry), measured))
    stages += map(_upload_stage, recipe.laplacian_heads, runs)
    _run(recipe, stages, dry_run)
    if dry_run:
        return
    _report(
        *(recipe, "LaplaceViT demo", ["classify"]),
        f"{len(runs)} models trained to classify images, with the same seed {recipe.seed}, data and budget. "
        f"{pages / 'report.html'} has their geometry on {measured.data} in full.",
        [f"laplacian-heads upload {runs[-1]} YOUR-NAME/YOUR-MODEL"],
        [
            "from transformers import pipeline",
            "",
            f'model = "{recipe.folders[-1] / "hub"}"',
            'classify = pipeline("image-classification", model=model, trust_remote_code=True)',
            "print(classify(YOUR_IMAGE))  # a file, an address or a PIL image",
        ],
    )


def _run(recipe: StudyRecipe, stages: list[tuple], dry_run: bool) -> None:
    """Do one stage after the other, each of them a name, a verb and its recipe."""
    output = Path(recipe.output).expanduser()
    if not dry_run:
        recipes.check_output(output, recipe)
        make_folder(output)
        recipes.write(output / "recipe.yaml", recipe)
    started = time.perf_counter()
    for i, (name, function, stage_recipe) in enumerate(stages, start=1):
        print(f"\n== {i}/{len(stages)} {name}")
        function(stage_recipe, dry_run)
    if not dry_run:
        print(f"\n== done in {(time.perf_counter() - started) / 60:.1f} minutes\n")


def _folder_name(heads) -> str:
    # Letters, digits and underscores: transformers makes a module name of it when it loads the code.
    return "laplacian_heads_" + re.sub(r"\W+", "_", json.dumps(heads)).strip("_")


def _stages(recipe: DemoRecipe, tokens: str, folder: Path, heads) -> list[tuple]:
    """Name, function and recipe of what is done with one language model, whose tokenizer is in `tokens`."""
    pretrained, midtrained, tuned = (str(folder / stage) for stage in ("pretrain", "midtrain", "sft"))
    start = {"tokenizer": tokens, "laplacian_heads": heads}
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
    ]
    staged = [(f"{name}, laplacian_heads {heads}", function, stage_recipe) for name, function, stage_recipe in staged]
    return [*staged, _upload_stage(heads, folder / "sft")]


def _upload_stage(heads, run: Path) -> tuple:
    """Name, function and recipe of staging a run, beside it, for the Hub."""
    staging = run.parent / "hub"
    values = {"model": str(run), "repo": f"your-name/{run.parent.name}", "staging": str(staging)}
    name = f"upload --dry-run, laplacian_heads {heads}"
    return name, _unless(staging, _stage_only), recipes.load(UploadRecipe, "upload", values)


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


def _report(recipe: StudyRecipe, title: str, kinds: list[str], what: str, commands: list[str], code: list[str]) -> None:
    """Write the comparison of the models as report.md, with its plots, and print it.

    Args:
        kinds: names of the folders of a model that `compare` reads.
        what: which models are compared.
        commands, code: lines of what can be done with the last model, in the shell and in Python.
    """
    output = Path(recipe.output).expanduser()
    rows = compare.rows({folder.name: [folder / kind for kind in kinds] for folder in recipe.folders})
    chance = ", ".join(f"{task} {value:g}" for task, value in rows[0]["chance"].items())
    lines = [
        *(f"# {title}", "", what, "", compare.table(rows), ""),
        *(f"Scores are accuracies with one standard error; guessing gives {chance}.", ""),
    ]
    lines += [line for other in rows[1:] for line in (compare.verdict(rows[0], other), "")]
    lines += [
        "Small models, few data and one seed: this shows that every stage works, and tells nothing of Laplacian heads.",
        "",
    ]
    for picture in compare.plot(rows, output):
        lines += [f"![{picture.title}]({picture.stem}.png)", ""]
    lines += ["## Use it", "", "```bash", *commands, "```", "", "```python", *code, "```", ""]
    report = "\n".join(lines)
    write(output / "report.md", report)
    print(report)
