"""What the stages of training have in common: their recipe's keys, the trainer, and the folder a run is written to."""

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path

import torch
from accelerate import PartialState
from torch.utils.data import Dataset, IterableDataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from laplacian_heads import recipes
from laplacian_heads.files import check_model, write
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.train.callbacks import MomentumWarmupCallback
from laplacian_heads.train.chat import check_mixture
from laplacian_heads.train.optimizer import MuonAdamW


@dataclasses.dataclass(kw_only=True)
class StageRecipe:
    """Keys that pretraining, mid-training and SFT share; the shipped recipes say what they mean."""

    output: str
    seed: int
    context: int
    rows_per_step: int
    batch_size: int
    matrix_lr: float
    embedding_lr: float
    head_lr: float
    momentum_warmup_steps: int
    warmup_steps: int
    decay_share: float
    max_grad_norm: float
    bf16: bool
    compile: bool
    gradient_checkpointing: bool
    logging_steps: int
    eval_steps: int | None
    save_steps: int
    report_to: str

    def __post_init__(self):
        for name in ("rows_per_step", "batch_size", "logging_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 1.")
        if self.context < 2:
            raise ValueError(f"context is {self.context}, allowed is at least 2.")
        if self.eval_steps is not None and self.eval_steps < 1:
            raise ValueError(f"eval_steps is {self.eval_steps}, allowed is at least 1, or null for the end only.")
        for name in ("momentum_warmup_steps", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 0.")
        for name in ("matrix_lr", "embedding_lr", "head_lr", "max_grad_norm"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a finite number of at least 0.")
        if not 0 <= self.decay_share <= 1:
            raise ValueError(f"decay_share is {self.decay_share}, allowed is a number from 0 to 1.")
        if not self.output:
            raise ValueError("output is '', allowed is the path of a folder.")
        rows = self.batch_size * PartialState().num_processes
        if self.rows_per_step % rows:
            raise ValueError(
                f"rows_per_step is {self.rows_per_step}, allowed are multiples of {rows}, which is batch_size times "
                f"{PartialState().num_processes} processes."
            )


@dataclasses.dataclass(kw_only=True)
class ConversationRecipe(StageRecipe):
    """Keys of the stages that train a model on with conversations."""

    model: str
    data: list
    held_out: list

    def __post_init__(self):
        super().__post_init__()
        check_mixture("data", self.data)
        check_mixture("held_out", self.held_out)
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is the folder of a model or its name on the Hub.")


@dataclasses.dataclass(kw_only=True)
class PackedRecipe(StageRecipe):
    """Keys of the stages that train on a stream packed into rows, for a number of tokens."""

    eval_rows: int
    tokens: int

    def __post_init__(self):
        super().__post_init__()
        if self.eval_rows < 1:
            raise ValueError(f"eval_rows is {self.eval_rows}, allowed is at least 1.")
        if self.steps < 1:
            raise ValueError(
                f"tokens is {self.tokens}, allowed is at least one step's, which is rows_per_step times context, "
                f"{self.rows_per_step * self.context}."
            )

    @property
    def steps(self) -> int:
        return self.tokens // (self.rows_per_step * self.context)


class StageTrainer(Trainer):
    """Trainer that measures held-out rows exactly: every target counts the same, whatever row it is in."""

    def __init__(self, *args, token_bytes: list[int] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.token_bytes = None if token_bytes is None else torch.tensor(token_bytes)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The loss in nats per target and, with token_bytes, the bits per byte of the text that the targets spell."""
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        for batch in self.get_eval_dataloader(eval_dataset):
            batch = self._prepare_inputs(batch)
            with torch.no_grad(), self.compute_loss_context_manager():
                nats = self.model(**batch, num_items_in_batch=1).loss
            targets = batch["shift_labels"] if "shift_labels" in batch else batch["labels"][:, 1:]
            targets = targets[targets != -100].cpu()
            spelled = 0 if self.token_bytes is None else self.token_bytes[targets].sum()
            totals += torch.tensor([nats.item(), targets.numel(), spelled], dtype=torch.float64)
        nats, targets, spelled = self.accelerator.reduce(totals.to(self.args.device)).tolist()
        metrics = {f"{metric_key_prefix}_loss": nats / max(targets, 1)}
        if spelled:
            metrics[f"{metric_key_prefix}_bits_per_byte"] = nats / math.log(2) / spelled
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def has_bf16() -> bool:
    """Whether this machine multiplies bfloat16 matrices in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def is_finished(recipe: StageRecipe) -> bool:
    """Whether the run of a recipe is complete, so that nothing is left to do.

    Raises:
        ValueError: the output folder holds the run of another recipe.
    """
    output = Path(recipe.output).expanduser()
    recipes.check_output(output, recipe)
    if (output / "results.json").exists():
        print(f"{output} is finished.")
        return True
    return False


def train(
    stage: str,
    recipe: StageRecipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: Dataset | IterableDataset,
    held_out: list[dict],
    steps: int,
    token_bytes: list[int] | None = None,
    collator=None,
) -> None:
    """Train a model, from its last checkpoint if there is one, and write it to the recipe's output folder.

    The folder then holds the model, the tokenizer, `trainer_state.json` with what was logged, and, written last,
    `results.json`; its checkpoints are deleted.

    Args:
        stage: name of the stage, for the results.
        rows: what to train on; held_out: what to measure the loss on.
        steps: number of optimizer steps.
        token_bytes: bytes each token stands for, for bits per byte; None where the targets are no running text.
        collator: makes a batch of rows; None is for rows of equal length.

    Raises:
        ValueError: the loss is no longer a number.
    """
    output = Path(recipe.output).expanduser()
    output.mkdir(parents=True, exist_ok=True)
    recipes.write(output / "recipe.yaml", recipe)
    trainer = StageTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output),
            max_steps=steps,
            per_device_train_batch_size=recipe.batch_size,
            per_device_eval_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.rows_per_step // (recipe.batch_size * PartialState().num_processes),
            lr_scheduler_type="warmup_stable_decay",
            warmup_steps=recipe.warmup_steps,
            lr_scheduler_kwargs={"num_decay_steps": round(steps * recipe.decay_share), "decay_type": "linear"},
            max_grad_norm=recipe.max_grad_norm,
            bf16=recipe.bf16 and has_bf16(),
            torch_compile=recipe.compile,
            # only where asked for: transformers 5.24 warns of the old name
            **({"gradient_checkpointing": True} if recipe.gradient_checkpointing else {}),
            use_cpu=not torch.accelerator.is_available(),
            seed=recipe.seed,
            logging_steps=recipe.logging_steps,
            eval_strategy="no" if recipe.eval_steps is None else "steps",
            eval_steps=recipe.eval_steps,
            save_steps=recipe.save_steps,
            save_total_limit=1,
            dataloader_pin_memory=torch.cuda.is_available(),
            include_num_input_tokens_seen="non_padding",
            remove_unused_columns=False,  # shift_labels is a keyword of the loss, not an argument of forward
            report_to=recipe.report_to,
        ),
        optimizers=(MuonAdamW(model, recipe.matrix_lr, recipe.embedding_lr, recipe.head_lr), None),
        callbacks=[MomentumWarmupCallback(recipe.momentum_warmup_steps)],
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=collator,
        token_bytes=token_bytes,
    )
    last, state = last_checkpoint(output)
    if last:
        print(f"going on at step {state['global_step']} of {steps}")
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=last)
    seconds = time.perf_counter() - started
    metrics = trainer.evaluate()
    if not math.isfinite(metrics["eval_loss"]):
        raise ValueError(f"The held-out loss is {metrics['eval_loss']}; delete {output} and give lower learning rates.")

    tokens = trainer.state.num_input_tokens_seen
    results = {
        "stage": stage,
        "laplacian_heads": model.config.laplacian_heads,
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": (tokens - state.get("num_input_tokens_seen", 0)) / seconds,
        "loss": metrics["eval_loss"],
        "bits_per_byte": metrics.get("eval_bits_per_byte"),
        "seed": recipe.seed,
    }
    trainer.save_model(str(output))
    trainer.save_state()
    if trainer.is_world_process_zero():
        (output / "training_args.bin").unlink(missing_ok=True)  # a pickle; the recipe says what it says
        write(output / "results.json", results)
        for path in output.glob("checkpoint-*"):
            shutil.rmtree(path)
        figure = f"held-out loss {results['loss']:.4f} nats per target"
        if results["bits_per_byte"] is not None:
            figure = f"{results['bits_per_byte']:.4f} bits per byte"
        print(f"{output}: {figure}, {results['tokens_per_second']:,.0f} tokens/s")


def last_checkpoint(output: Path) -> tuple[str | None, dict]:
    """The newest complete checkpoint and its state; (None, {}) if there is none. Trainer writes its own state last."""
    complete = {}
    for path in output.glob("checkpoint-*/trainer_state.json"):
        try:
            state = json.loads(path.read_text())
        except ValueError:
            continue  # cut off while it was written
        complete[state["global_step"]] = str(path.parent), state
    return complete[max(complete)] if complete else (None, {})


def load_tokenizer(name: str, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer by folder or Hub id.

    Raises:
        ValueError: none is there, it has more entries than the model, no BOS token, or no chat template.
    """
    check_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no tokenizer in {name} ({' '.join(str(error).split())[:200]}).") from error
    if len(tokenizer) > vocab_size:
        raise ValueError(f"The tokenizer in {name} has {len(tokenizer)} entries, the model only {vocab_size}.")
    for attribute in ("bos_token", "chat_template"):
        if getattr(tokenizer, attribute) is None:
            raise ValueError(f"The tokenizer in {name} has no {attribute}.")
    return tokenizer


def load_model(name: str, context: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A LaplaceGPT to train on from, and its tokenizer, by folder or Hub id.

    Raises:
        ValueError: none is there, its context is shorter, or its tokenizer does not suit it.
    """
    check_model(name)
    try:
        model = LaplaceGPTForCausalLM.from_pretrained(name, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no LaplaceGPT in {name} ({' '.join(str(error).split())[:200]}).") from error
    if context > model.config.max_position_embeddings:
        raise ValueError(
            f"context is {context}, allowed for {name} is at most its {model.config.max_position_embeddings}."
        )
    return model, load_tokenizer(name, model.config.vocab_size)
