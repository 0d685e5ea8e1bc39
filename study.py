"""Studies: runs that train models and compare them, the only module that composes train and eval."""

import dataclasses
import json
import math
import re
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import yaml
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed

from laplacian_heads.configuration import LaplaceGPTConfig
from laplacian_heads.eval.trigram import Trigram
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.train.data import pack_rows, python_prose, read_documents, split_documents
from laplacian_heads.train.optimizer import adamw
from laplacian_heads.train.tokenizer import token_bytes, train_tokenizer

PROMPTS = ("The value of the", "If the file does not exist,", "Return a list of")


@dataclasses.dataclass
class DemoRecipe:
    """Keys of `recipes/demo.yaml`, which says what they mean."""

    data: str | None
    output: str
    seed: int
    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    laplacian_heads: list
    held_out: float
    context: int
    batch_size: int
    tokens: int
    matrix_lr: float
    embedding_lr: float
    head_lr: float
    weight_decay: float
    decay_share: float
    bf16: bool
    save_steps: int

    def __post_init__(self):
        for name in ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "tokens", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 1.")
        if self.context < 2:
            raise ValueError(f"context is {self.context}, allowed is at least 2.")
        if self.batch_size < 1 or self.batch_size * self.context > self.tokens:
            raise ValueError(
                f"batch_size is {self.batch_size}, allowed is 1 to {self.tokens // self.context}, so that a step has "
                f"at most all {self.tokens} tokens."
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, allowed is a number between 0 and 1.")
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"decay_share is {self.decay_share}, allowed is a number from 0 to 1.")
        for name in ("matrix_lr", "embedding_lr", "head_lr", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a finite number of at least 0.")
        if not self.laplacian_heads:
            raise ValueError("laplacian_heads is [], allowed is a list with one entry for each model.")
        if len({_folder_name(heads) for heads in self.laplacian_heads}) < len(self.laplacian_heads):
            raise ValueError(f"laplacian_heads is {self.laplacian_heads}, allowed are entries with names of their own.")
        for name in ("data", "output"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is '', allowed is the path of a file or folder.")

    @property
    def steps(self) -> int:
        return self.tokens // (self.batch_size * self.context)

    def config(self, laplacian_heads) -> LaplaceGPTConfig:
        return LaplaceGPTConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.context,
            laplacian_heads=laplacian_heads,
            use_cache=False,
        )


def has_bf16() -> bool:
    """Whether this machine multiplies bfloat16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def demo(recipe: DemoRecipe, dry_run: bool = False) -> None:
    """Train one LaplaceGPT for each entry of `laplacian_heads` with plain Trainer, and compare them.

    Writes the tokenizer, one model folder for each entry, and `report.md` into `recipe.output`, and prints the report.
    What is there already is kept: a finished model is not trained again, an interrupted one goes on at its last
    checkpoint.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another recipe's results.
    """
    configs = [recipe.config(heads) for heads in recipe.laplacian_heads]  # refuses wrong values before any work
    with torch.device("meta"):
        parameters = [LaplaceGPTForCausalLM(config).num_parameters() for config in configs]
    print(
        f"{len(configs)} models of {parameters[0]:,} parameters, laplacian_heads {recipe.laplacian_heads}: "
        f"{recipe.steps} steps of {recipe.batch_size * recipe.context:,} tokens each, into {recipe.output}"
    )
    if dry_run:
        return

    documents = python_prose() if recipe.data is None else read_documents(recipe.data)
    train_documents, held_out_documents = split_documents(documents, recipe.held_out, recipe.seed)
    tokenizer = train_tokenizer(train_documents, recipe.vocab_size, recipe.context)
    train = pack_rows(tokenizer, train_documents, recipe.context, "training")
    held_out = pack_rows(tokenizer, held_out_documents, recipe.context, "held-out")
    print(
        f"{len(train):,} rows of {recipe.context} tokens to train on, {len(held_out):,} held out; the tokenizer has "
        f"{len(tokenizer):,} entries"
    )

    output = Path(recipe.output).expanduser()
    _claim(output, recipe)
    # Tokens after the first of each row are predicted, so they and their bytes are counted.
    rows = np.asarray(held_out.with_format("numpy")["input_ids"])
    predicted = rows[:, 1:]
    bits_per_byte = 1 / (math.log(2) * np.asarray(token_bytes(tokenizer))[predicted].sum())  # for one nat in all

    results = []
    for heads in recipe.laplacian_heads:
        config = recipe.config(heads)
        for name in ("bos", "eos", "pad"):
            setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
        folder = output / _folder_name(heads)
        if not folder.exists():
            _train(recipe, config, tokenizer, train, held_out, folder)
        result = {"laplacian_heads": heads, "folder": folder, **_measure(recipe, tokenizer, folder)}
        result["bits_per_byte"] = result["nats_per_token"] * predicted.size * bits_per_byte
        results.append(result)

    trigram = Trigram(np.asarray(train.with_format("numpy")["input_ids"]).ravel(), len(tokenizer))
    trigram_bits = sum(map(trigram.nats, rows.tolist())) * bits_per_byte
    report = _report(recipe, parameters[0], results, trigram_bits)
    _write(output / "report.md", report)
    print(report)


def _folder_name(heads) -> str:
    # Letters, digits and underscores: transformers makes a module name of it when it loads the code.
    return "laplacian_heads_" + re.sub(r"\W+", "_", json.dumps(heads)).strip("_")


def _claim(output: Path, recipe: DemoRecipe) -> None:
    """Make the output folder this recipe's, or refuse it."""
    values = dataclasses.asdict(recipe)
    path = output / "recipe.yaml"
    if path.exists():
        try:
            same = yaml.safe_load(path.read_text(encoding="utf-8")) == values
        except (yaml.YAMLError, UnicodeDecodeError):
            same = False
        if not same:
            raise ValueError(f"output: {output} holds the results of another recipe; give another output=.")
        return
    output.mkdir(parents=True, exist_ok=True)
    _write(path, yaml.safe_dump(values, sort_keys=False))


def _write(path: Path, text: str) -> None:
    """Write a file as a whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _train(
    recipe: DemoRecipe,
    config: LaplaceGPTConfig,
    tokenizer: PreTrainedTokenizerFast,
    train: Dataset,
    held_out: Dataset,
    folder: Path,
) -> None:
    """Train a model, from its last checkpoint if there is one; the folder appears when it is complete."""
    set_seed(recipe.seed)
    model = LaplaceGPTForCausalLM(config)
    checkpoints = folder.with_name(folder.name + ".checkpoints")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(checkpoints),
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=recipe.batch_size,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={"num_decay_steps": round(recipe.steps * recipe.decay_share), "decay_type": "linear"},
            bf16=recipe.bf16 and has_bf16(),
            use_cpu=not torch.accelerator.is_available(),
            seed=recipe.seed,
            logging_steps=25,
            save_steps=recipe.save_steps,
            save_total_limit=1,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
        ),
        optimizers=(
            adamw(model, recipe.matrix_lr, recipe.embedding_lr, recipe.head_lr, recipe.weight_decay),
            None,  # Trainer makes the schedule
        ),
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    last, steps_before = _last_checkpoint(checkpoints)
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=last)
    seconds = time.perf_counter() - started
    loss = trainer.evaluate()["eval_loss"]
    if not math.isfinite(loss):
        raise ValueError(
            f"The held-out loss is {loss} after training; delete {checkpoints} and give lower learning rates."
        )
    speed = (recipe.steps - steps_before) * recipe.batch_size * recipe.context / seconds
    model.config.use_cache = True
    part = folder.with_name(folder.name + ".part")
    trainer.model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    _write(part / "demo.json", json.dumps({"nats_per_token": loss, "tokens_per_second": speed}))
    part.replace(folder)
    shutil.rmtree(checkpoints)


def _measure(recipe: DemoRecipe, tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict:
    """What was measured when a model was trained, and samples from it."""
    try:
        measured = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
        measured = {key: measured[key] for key in ("nats_per_token", "tokens_per_second")}
        model = LaplaceGPTForCausalLM.from_pretrained(folder)
    except Exception as error:  # each file of the folder fails in a way of its own
        raise ValueError(f"{folder} is damaged; move it away and call again ({error}).") from error
    set_seed(recipe.seed)
    samples = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", truncation=True, max_length=recipe.context // 2)
        text = model.generate(
            **inputs,
            max_new_tokens=min(40, recipe.context - inputs["input_ids"].shape[1]),
            do_sample=True,
            top_k=50,
            temperature=0.8,
            eos_token_id=[tokenizer.eos_token_id, tokenizer.bos_token_id],
        )
        samples.append(tokenizer.decode(text[0], skip_special_tokens=True))
    return {**measured, "samples": samples}


def _last_checkpoint(checkpoints: Path) -> tuple[str | None, int]:
    """The newest complete checkpoint and its step; (None, 0) if there is none. Trainer writes its own state last."""
    complete = {}
    for path in checkpoints.glob("checkpoint-*/trainer_state.json"):
        try:
            complete[json.loads(path.read_text())["global_step"]] = str(path.parent)
        except ValueError:
            continue  # cut off while it was written
    step = max(complete, default=0)
    return complete.get(step), step


def _report(recipe: DemoRecipe, parameters: int, results: list[dict], trigram_bits: float) -> str:
    """The comparison as Markdown; trigram_bits are the trigram model's bits per byte."""
    lines = [
        "# LaplaceGPT demo",
        "",
        f"{parameters:,} parameters, {recipe.steps * recipe.batch_size * recipe.context:,} tokens, seed {recipe.seed}, "
        f"text: {recipe.data or 'the English prose of this Python installation'}.",
        "",
        "| model | held-out bits per byte | tokens/s | folder |",
        "|---|---|---|---|",
    ]
    for result in results:
        lines.append(
            f"| LaplaceGPT, laplacian_heads {result['laplacian_heads']} | {result['bits_per_byte']:.4f} "
            f"| {result['tokens_per_second']:,.0f} | {result['folder']} |"
        )
    lines += [f"| token trigram, same training text | {trigram_bits:.4f} | | |", ""]
    best = min(results, key=lambda result: result["bits_per_byte"])
    lines += [
        f"Lowest here: laplacian_heads {best['laplacian_heads']}. One seed on one small text is no evidence for or "
        "against Laplacian heads.",
        "",
    ]
    for result in results:
        lines += [f"## Samples, laplacian_heads {result['laplacian_heads']}", ""]
        lines += [line for sample in result["samples"] for line in ("```text", sample, "```", "")]
    folder = results[-1]["folder"]
    lines += [
        "## Load it",
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
