"""The card of a published LaplaceGPT: what it is, how to use it, its training, scores and limits."""

import json
import re
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData

from laplacian_heads.configuration import LaplaceGPTConfig
from laplacian_heads.eval import compare, geometry_report, plots, results
from laplacian_heads.laplacian import heads_by_layer

HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(@[\w./-]+)?(:[^:]*){0,2}", re.ASCII)
PICTURE = "heads.png"

LIMITS = [
    "It says what is likely to follow a text, not what is true, and repeats the prejudices of what it was trained on. "
    "It has had no training against harmful requests.",
    "A Laplacian head needs a term of its own in the graph, which transformers' modelling code computes, and what runs "
    "that. GGUF and llama.cpp, and other engines with graphs of their own, have none; a conversion that drops the term "
    "is another model.",
    "The code that comes with it is needed: load it with `trust_remote_code=True`, and pin a revision, so that no code "
    "runs but what you have read.",
]

CITATION = """```bibtex
@inproceedings{zhang2026laplacian,
  title = {Laplacian Heads Improve Transformers by Smoothing Token Representations},
  author = {Zhang, Yuchong and Papyan, Vardan},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2026},
  url = {https://arxiv.org/abs/2602.09297}
}
```"""


def snippets(repo: str, revision: str, chat: bool) -> dict[str, str]:
    """Code of the card by what it is for; each runs by itself where its packages are installed."""
    where = f'"{repo}", revision="{revision}"'
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
    parts = {
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
    return {name: "\n".join(lines) for name, lines in parts.items()}


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
    names = [HUB_NAME.fullmatch(source) for source in sources if not Path(source).expanduser().exists()]
    return list(dict.fromkeys(name[1] for name in names if name))


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
    config = LaplaceGPTConfig.from_pretrained(folder)
    layers = heads_by_layer(config.laplacian_heads, [config.num_attention_heads] * config.num_hidden_layers)
    plots.heads(layers, config.num_attention_heads, folder / PICTURE)
    (folder / PICTURE).with_suffix(".svg").unlink()  # the Hub gets one picture of it
    made = stages(run)
    tasks = _read(folder / results.FILE).get("tasks", {})
    parts = [
        f"# {repo.partition('/')[2]}",
        _what(config, layers),
        f"![Which heads are Laplacian, by layer]({PICTURE})",
        _facts(config, folder),
        *[
            f"## {name}\n\n```python\n{code}\n```"
            for name, code in snippets(repo, revision, (folder / "chat_template.jinja").exists()).items()
        ],
        *_training(made),
        *_scores(tasks, run, twin),
    ]
    parts += [
        *_geometry(folder),
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in LIMITS),
        "## Citation\n\n" + CITATION,
    ]

    first = made[0][1].get("model") if made else None
    data = ModelCardData(
        license=license,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["laplace_gpt", "laplacian-heads"],
        base_model=first if first and HUB_NAME.fullmatch(first) and not Path(first).exists() else None,
        datasets=list(dict.fromkeys(name for _, recipe, _ in made for name in datasets(recipe))) or None,
        model_name=repo.partition("/")[2],
        eval_results=results.model_index(tasks) or None,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n").save(folder / "README.md")


def _what(config: LaplaceGPTConfig, layers: list[list[int]]) -> str:
    counts = sorted({len(heads) for heads in layers})
    if counts == [0]:
        what = "It has no Laplacian heads: it is the baseline that models with them are held against."
    else:
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        what = (
            f"Of each layer's {config.num_attention_heads} attention heads {number} are Laplacian: they output "
            "`v - P v` where ordinary heads output `P v`."
        )
    return f"A LaplaceGPT, nanochat's decoder with [Laplacian heads](https://arxiv.org/abs/2602.09297). {what}"


def _facts(config: LaplaceGPTConfig, folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rows = {
        "layers, width, heads": f"{config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads}",
        "`laplacian_heads`": f"`{json.dumps(config.laplacian_heads)}`",
        "context, vocabulary": f"{config.max_position_embeddings:,}, {config.vocab_size:,} tokens",
        "weights": f"{size / 1e6:,.0f} MB, {str(config.dtype).removeprefix('torch.')}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _training(made: list[tuple[Path, dict, dict]]) -> list[str]:
    if not any(found for *_, found in made):
        return []
    heads = ("stage", "tokens", "steps", "hours", "hardware", "held-out loss, nats", "bits per byte", "seed")
    lines = [heads, ["---"] * len(heads)]
    for _, _, found in made:
        if found:
            hours = f"{found['seconds'] / 3600:.2f}" if found.get("seconds") else ""
            bits = f"{found['bits_per_byte']:.4f}" if found.get("bits_per_byte") else ""
            size = f"{found['tokens']:,}", f"{found['steps']:,}", hours, found.get("hardware", "")
            lines.append((found["stage"], *size, f"{found['loss']:.4f}", bits, str(found["seed"])))
    return ["## Training", "\n".join(f"| {' | '.join(line)} |" for line in lines), "`recipe*.yaml` has every setting."]


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
