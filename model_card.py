"""The card of a published LaplaceGPT or LaplaceViT: what it is, how to use it, its training, scores and limits."""

import json
import math
import re
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import AutoConfig

from laplacian_heads.configuration import LaplaceGPTConfig, LaplaceViTConfig, pair
from laplacian_heads.eval import compare, geometry_report, plots, results
from laplacian_heads.laplacian import heads_by_layer

HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(@[\w./-]+)?(:[^:]*){0,2}", re.ASCII)
PICTURE = "heads.png"

TEXT_LIMITS = [
    "It says what is likely to follow a text, not what is true, and repeats the prejudices of what it was trained on. "
    "It has had no training against harmful requests.",
    "A Laplacian head needs a term of its own in the graph, which transformers' modelling code computes, and what runs "
    "that. GGUF and llama.cpp, and other engines with graphs of their own, have none; a conversion that drops the term "
    "is another model.",
]
CLASSIFIER_LIMITS = [
    "It is for research, and to start fine-tuning with. It names some of its classes for every image, whatever that "
    "shows; whether its scores are calibrated was not measured.",
]
BACKBONE_LIMITS = ["It is for research, and to start fine-tuning with. It gives features; it names no classes."]
IMAGE_LIMITS = [
    "It repeats the prejudices of the images it was trained on, and how well it does on images from elsewhere was not "
    "measured. It is not meant for decisions about people.",
    "A Laplacian head needs a term of its own in the graph, which transformers' modelling code computes. timm, and "
    "other code with graphs of its own, has none; a conversion that drops the term is another model.",
]
CODE_LIMIT = (
    "The code that comes with it is needed: load it with `trust_remote_code=True`, and pin a revision, so that no code "
    "runs but what you have read."
)

# The table of stages: what it shows, under which key of results.json, and how it is written.
STAGE_COLUMNS = {
    "stage": ("stage", ""),
    "tokens": ("tokens", ","),
    "images seen": ("images", ","),
    "steps": ("steps", ","),
    "epochs": ("epochs", "g"),
    "hours": ("hours", ".2f"),
    "hardware": ("hardware", ""),
    "held-out loss, nats": ("loss", ".4f"),
    "DINO's loss, nats": ("dino_loss", ".4f"),
    "k-NN accuracy": ("knn_accuracy", ".4f"),
    "bits per byte": ("bits_per_byte", ".4f"),
    "seed": ("seed", ""),
}

CITATION = """```bibtex
@inproceedings{zhang2026laplacian,
  title = {Laplacian Heads Improve Transformers by Smoothing Token Representations},
  author = {Zhang, Yuchong and Papyan, Vardan},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2026},
  url = {https://arxiv.org/abs/2602.09297}
}
```"""


def snippets(repo: str, revision: str, config: LaplaceGPTConfig | LaplaceViTConfig, chat: bool) -> dict[str, str]:
    """Code of the card by what it is for; each runs by itself where its packages are installed.

    Args:
        repo: OWNER/NAME.
        revision: what the code is pinned to.
        config: the model's.
        chat: whether its tokenizer has a chat template.
    """
    where = f'"{repo}", revision="{revision}"'
    if isinstance(config, LaplaceGPTConfig):
        parts = _text_snippets(where, repo, revision, chat)
    else:
        parts = _image_snippets(where, config)
    return {name: "\n".join(lines) for name, lines in parts.items()}


def _text_snippets(where: str, repo: str, revision: str, chat: bool) -> dict[str, list[str]]:
    load = [
        f"model = AutoModelForCausalLM.from_pretrained({where}, trust_remote_code=True)",
        f"tokenizer = AutoTokenizer.from_pretrained({where}, trust_remote_code=True)",
    ]
    if chat:
        prompt = [
            'messages = [{"role": "user", "content": "What is 47 plus 85?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        prompt = ['inputs = tokenizer("The value of the", return_tensors="pt")']
    return {
        "Generate": [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            *load,
            *prompt,
            "text = model.generate(**inputs, max_new_tokens=40)",
            "print(tokenizer.decode(text[0]))",
        ],
        "Fine-tune with Trainer": [
            "from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments",
            "",
            *load,
            'rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer(["A text to learn."] * 8)["input_ids"]]',
            'arguments = TrainingArguments("fine-tuned", max_steps=2, save_strategy="no", report_to="none")',
            "Trainer(model, arguments, train_dataset=rows).train()",
        ],
        "Fine-tune with PEFT": [
            "from peft import LoraConfig, get_peft_model",
            "from transformers import AutoModelForCausalLM",
            "",
            load[0],
            'model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))',
            "model.print_trainable_parameters()",
        ],
        "Score with lm-eval": [
            "import lm_eval",
            "import torch",
            "",
            'device = "cuda" if torch.cuda.is_available() else "cpu"',
            f'arguments = {{"pretrained": "{repo}", "revision": "{revision}", "trust_remote_code": True}}',
            'found = lm_eval.simple_evaluate("hf", model_args=arguments, tasks=["arc_easy"], device=device)',
            'print(found["results"])',
        ],
    }


def _image_snippets(where: str, config: LaplaceViTConfig) -> dict[str, list[str]]:
    height, width = pair(config.image_size)
    picture = 'image = Image.new("RGB", (320, 240), "orange")  # or Image.open("yours.jpg")'
    prepare = [
        picture,
        f"processor = AutoImageProcessor.from_pretrained({where})",
        'inputs = processor(image, return_tensors="pt")',
    ]

    def load(auto_class, *more):
        arguments = ", ".join([where, "trust_remote_code=True", *more])
        return [f"model = {auto_class}.from_pretrained(", f"    {arguments}", ")"]

    def loaded(auto_class, *more):
        classes = ", ".join(sorted([auto_class, "AutoImageProcessor"]))
        imports = ["import torch", "from PIL import Image", f"from transformers import {classes}"]
        return [*imports, "", *load(auto_class, *more), *prepare, "with torch.no_grad():"]

    classify = {
        "Classify with a pipeline": [
            "from PIL import Image",
            "from transformers import pipeline",
            "",
            picture,
            f'classify = pipeline("image-classification", model={where}, trust_remote_code=True)',
            "print(classify(image))",
        ],
        "Classify": [
            *loaded("AutoModelForImageClassification"),
            "    logits = model(**inputs).logits",
            "print(model.config.id2label[logits.argmax().item()])",
        ],
    }
    return {
        **(classify if is_classifier(config) else {}),
        "Fine-tune with Trainer": [
            "import torch",
            "from transformers import AutoModelForImageClassification, Trainer, TrainingArguments",
            "",
            *load("AutoModelForImageClassification", "num_labels=2", "ignore_mismatched_sizes=True"),
            f"images = torch.randn(8, {config.num_channels}, {height}, {width})  # yours, from the image processor",
            'rows = [{"pixel_values": image, "labels": i % 2} for i, image in enumerate(images)]',
            'arguments = TrainingArguments("fine-tuned", max_steps=2, save_strategy="no", report_to="none")',
            "Trainer(model, arguments, train_dataset=rows).train()",
        ],
        "Get features": [
            *loaded("AutoModel"),
            "    features = model(**inputs)",
            "print(features.pooler_output.shape, features.last_hidden_state.shape)  # CLS; CLS and all patches",
        ],
        "Use as a backbone": [
            *loaded("AutoBackbone", f"out_features={json.dumps(config.stage_names[-2:])}"),
            "    maps = model(**inputs).feature_maps",
            "print([each.shape for each in maps])",
        ],
    }


def is_classifier(config: LaplaceViTConfig) -> bool:
    return config.architectures == ["LaplaceViTForImageClassification"]


def stages(run: Path) -> list[tuple[Path, dict, dict]]:
    """The stages that made a run's model, first one first: folder, recipe and results of each that is still there."""
    found = []
    while run.is_dir() and run not in [folder for folder, *_ in found]:
        recipe = _read(run / "recipe.yaml")
        if not recipe:
            break
        found.insert(0, (run, recipe, _read(run / "results.json")))
        if not isinstance(recipe.get("model"), str):
            break
        run = Path(recipe["model"]).expanduser()
    return found


def _read(path: Path) -> dict:
    """A YAML or JSON file, {} where it is not there."""
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}


def datasets(recipe: dict) -> list[str]:
    """The datasets of the Hub that a recipe trains on."""
    data = recipe.get("data") or []
    sources = [each["data"] if isinstance(each, dict) else each for each in ([data] if isinstance(data, str) else data)]
    return list(dict.fromkeys(name for source in sources if (name := _hub_name(source))))


def _hub_name(source: str) -> str | None:
    """OWNER/NAME of a source that is a dataset of the Hub, None of others."""
    name = HUB_NAME.fullmatch(source)
    if name is None or any(Path(place).exists() for place in (source, name[1])):  # a split may stand behind a folder
        return None
    return name[1]


def write(folder: Path, repo: str, revision: str, license: str, run: Path, twin: Path | None) -> None:
    """Write README.md, and the picture of the heads, into a staged folder.

    Args:
        folder: the staged folder, which has everything else.
        repo: OWNER/NAME.
        revision: what the snippets are pinned to.
        license: of the weights, in the Hub's short form.
        run: the run it was staged from, whose stages are described.
        twin: a run with 0 Laplacian heads to hold the scores against, if there is one.
    """
    config = AutoConfig.from_pretrained(folder)
    layers = heads_by_layer(config.laplacian_heads, [config.num_attention_heads] * config.num_hidden_layers)
    plots.heads(layers, config.num_attention_heads, folder / PICTURE)
    (folder / PICTURE).with_suffix(".svg").unlink()  # the Hub gets one picture of it
    made = stages(run)
    if isinstance(config, LaplaceGPTConfig):
        kind, limits, pipeline, tags = "nanochat's decoder", TEXT_LIMITS, "text-generation", []
        tasks = _read(folder / results.FILE).get("tasks", {})
        scores, index = _scores(tasks, run, twin), results.model_index(tasks)
    else:
        kind, tags = "DeiT-3's vision transformer", ["vision"]
        if is_classifier(config):
            limits, pipeline = CLASSIFIER_LIMITS + IMAGE_LIMITS, "image-classification"
        else:
            limits, pipeline = BACKBONE_LIMITS + IMAGE_LIMITS, "image-feature-extraction"
        scores, index = [*_accuracy(run, twin), *_frozen(folder)], _accuracy_index(run)
    parts = [
        f"# {repo.partition('/')[2]}",
        _what(kind, config, layers),
        f"![Which heads are Laplacian, by layer]({PICTURE})",
        _facts(config, folder),
        *[
            f"## {name}\n\n```python\n{code}\n```"
            for name, code in snippets(repo, revision, config, (folder / "chat_template.jinja").exists()).items()
        ],
        *_training(made),
        *scores,
        *_geometry(folder),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in [*limits, CODE_LIMIT]),
        "## Citation\n\n" + CITATION,
    ]

    first = made[0][1].get("model") if made else None
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=[config.model_type, "laplacian-heads", *tags],
        base_model=first if first and HUB_NAME.fullmatch(first) and not Path(first).exists() else None,
        datasets=list(dict.fromkeys(name for _, recipe, _ in made for name in datasets(recipe))) or None,
        model_name=repo.partition("/")[2],
        eval_results=index or None,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n").save(folder / "README.md")


def _what(kind: str, config: LaplaceGPTConfig | LaplaceViTConfig, layers: list[list[int]]) -> str:
    counts = sorted({len(heads) for heads in layers})
    if counts == [0]:
        heads = "It has no Laplacian heads: it is the baseline that models with them are held against."
    else:
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        heads = (
            f"Of each layer's {config.num_attention_heads} attention heads {number} are Laplacian: they output "
            "`v - P v` where ordinary heads output `P v`."
        )
    name = type(config).__name__.removesuffix("Config")
    return f"A {name}, {kind} with [Laplacian heads](https://arxiv.org/abs/2602.09297). {heads}"


def _facts(config: LaplaceGPTConfig | LaplaceViTConfig, folder: Path) -> str:
    size, parameters = 0, 0
    for path in folder.glob("*.safetensors"):
        size += path.stat().st_size
        with safe_open(path, "pt") as weights:
            parameters += sum(math.prod(each.get_shape()) for each in map(weights.get_slice, weights.keys()))
    rows = {
        "layers, width, heads": f"{config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads}",
        "`laplacian_heads`": f"`{json.dumps(config.laplacian_heads)}`",
    }
    if isinstance(config, LaplaceGPTConfig):
        rows["context, vocabulary"] = f"{config.max_position_embeddings:,}, {config.vocab_size:,} tokens"
    else:
        image, patch = (" x ".join(map(str, pair(side))) for side in (config.image_size, config.patch_size))
        rows["image, patch"] = f"{image}, {patch} pixels"
        if is_classifier(config):
            rows["classes"] = f"{config.num_labels:,}"
    rows["parameters"] = f"{parameters:,}"
    rows["weights"] = f"{size / 1e6:,.0f} MB, {str(config.dtype).removeprefix('torch.')}"
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _training(made: list[tuple[Path, dict, dict]]) -> list[str]:
    rows = [
        {**found, "hours": found["seconds"] / 3600 if found.get("seconds") else None} for *_, found in made if found
    ]
    if not rows:
        return []
    cells = {
        head: [_cell(row.get(key), form) for row in rows]
        for head, (key, form) in STAGE_COLUMNS.items()
        if any(row.get(key) is not None for row in rows)
    }
    lines = [list(cells), ["---"] * len(cells), *zip(*cells.values(), strict=True)]
    return ["## Training", "\n".join(f"| {' | '.join(line)} |" for line in lines), "`recipe*.yaml` has every setting."]


def _cell(value, form: str) -> str:
    return "" if value is None else format(value, form)


def _geometry(folder: Path) -> list[str]:
    """The report of a staged folder; of a run that was compared with others elsewhere, its figures alone."""
    path = folder / "geometry" / "report.md"
    if path.exists():
        text = re.sub(r"\]\((\w+\.png)\)", r"](geometry/\1)", path.read_text(encoding="utf-8"))
    else:
        path = folder / "geometry.json"
        measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        text = geometry_report.markdown({"this model": measured}, []) if measured.get("layers") else ""
    return [re.sub("^#", "##", text, flags=re.MULTILINE).strip()] if text else []


def _scores(tasks: dict, run: Path, twin: Path | None) -> list[str]:
    if not tasks:
        return []
    lines = ["| task | metric | score | standard error | guessing | items |", "|---" * 6 + "|"]
    for task, entry in tasks.items():
        error, chance = ("" if entry.get(key) is None else f"{entry[key]:.3f}" for key in ("stderr", "chance"))
        value, items = f"{entry['value']:.3f}", results.items(entry)
        lines.append(f"| {task} | {entry['metric']} | {value} | {error} | {chance} | {items} |")
    parts = ["## Scores", "\n".join(lines), "Measured by lm-eval."]
    for task, entry in tasks.items():
        if entry.get("gen_kwargs"):
            parts.append(f"{task} was asked with {', '.join(f'{k} {v}' for k, v in entry['gen_kwargs'].items())}.")
    if twin is not None:
        found = compare.rows({"0 Laplacian heads": [twin], "this model": [run]})
        parts += ["Beside a model that was trained without Laplacian heads:", compare.table(found)]
        parts.append(compare.verdict(*found))
    return parts


def _accuracy(run: Path, twin: Path | None) -> list[str]:
    """The accuracy on held-out images, beside that of a twin."""
    runs = {"this model": run, **({} if twin is None else {"its twin": twin})}
    found = {name: _read(folder / "results.json") for name, folder in runs.items()}
    if found["this model"].get("accuracy") is None:
        return []
    if any(each.get("accuracy") is None for each in found.values()):
        raise ValueError(f"twin is {twin}, whose results.json has no accuracy; allowed is null or the folder of a run.")
    lines = ["| model | Laplacian heads | top-1 | top-5 | held-out images | seed |", "|---" * 6 + "|"]
    for name, each in found.items():
        accuracy, images = each["accuracy"], each["held_out_images"]
        error = math.sqrt(accuracy * (1 - accuracy) / images)
        heads = f"`{json.dumps(each['laplacian_heads'])}`"
        top5 = _cell(each.get("accuracy_top5"), ".4f")
        lines.append(f"| {name} | {heads} | {accuracy:.4f} ± {error:.4f} | {top5} | {images:,} | {each['seed']} |")
    parts = [
        "## Accuracy",
        "\n".join(lines),
        f"Shares of held-out images of {_held_out(run)}; ± is one standard error, of drawing so many images.",
    ]
    if twin is not None:
        recipes = [_read(folder / "recipe.yaml") for folder in (run, twin)]
        keys = dict.fromkeys(key for recipe in recipes for key in recipe if key not in ("output", "laplacian_heads"))
        others = [key for key in keys if recipes[0].get(key) != recipes[1].get(key)]
        if others:
            parts.append(f"The recipes of the two differ in {', '.join(others)} too.")
        parts.append(
            "Each is one run with one seed. Another seed changes the accuracy as well, by an amount that was not "
            "measured here, so the difference tells little of the heads."
        )
    return parts


def _frozen(folder: Path) -> list[str]:
    """What was measured of a staged model's frozen features."""
    if not any((folder / name).exists() for name in compare.FROZEN):
        return []
    lines = ["| measure | score | data | held-out data |", "|---" * 4 + "|"]
    for name, score in compare.read([folder])["scores"].items():
        if score.frozen:
            error = "" if score.stderr is None else f" ± {score.stderr:.4f}"
            lines.append(f"| {name} | {score.value:.4f}{error} | {_named(score.data)} | {_named(score.held_out)} |")
    what = "of drawing so many images"
    return [
        "## Frozen features",
        "\n".join(lines),
        f"± is one standard error, {what}; the files say how each was measured.",
    ]


def _accuracy_index(run: Path) -> list[EvalResult]:
    """Top-1 and top-5 accuracy as results of a model card."""
    found = _read(run / "results.json")
    return [
        EvalResult(
            task_type="image-classification",
            dataset_type=_held_out(run),
            dataset_name=_held_out(run),
            metric_type="accuracy",
            metric_value=found[key],
            metric_name=f"{name} accuracy, {found['held_out_images']:,} held-out images",
        )
        for key, name in (("accuracy", "top-1"), ("accuracy_top5", "top-5"))
        if found.get(key) is not None
    ]


def _held_out(run: Path) -> str:
    """Which data the held-out images of a run are of: OWNER/NAME, or the name of a folder, as cards are published."""
    recipe = _read(run / "recipe.yaml")
    return _named(
        next(each for each in (recipe.get("held_out"), recipe.get("data"), "unknown") if isinstance(each, str))
    )


def _named(source: str) -> str:
    return _hub_name(source) or Path(source).name
