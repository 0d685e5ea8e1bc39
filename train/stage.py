"""A run of a stage of language models, from what it starts with to the folder it is written to."""

from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProgressCallback,
    TrainingArguments,
    set_seed,
)

from laplacian_heads.files import check_model
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.train import budget
from laplacian_heads.train.callbacks import BriefProgressCallback, MomentumWarmupCallback, TerminationCallback
from laplacian_heads.train.checkpoints import is_sharded, last_checkpoint, made_whole, read_progress
from laplacian_heads.train.geometry import GeometryCallback
from laplacian_heads.train.optimizer import MuonAdamW
from laplacian_heads.train.recipe import StageRecipe, this_process
from laplacian_heads.train.rows import Batches, Rows
from laplacian_heads.train.run import arguments, claimed, complete, finish, peak_memory
from laplacian_heads.train.trainer import StageTrainer

# Held-out rows that geometry is measured on: as many whatever the batch size, so that runs can be compared.
GEOMETRY_ROWS = 8


def train(
    stage: str,
    recipe: StageRecipe,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    rows: Callable,
    held_out: list[dict],
    steps: int,
    collate: Callable[[list[dict]], dict],
    token_bytes: list[int] | None = None,
) -> None:
    """Train a model, from its last checkpoint if there is one, and write it to the recipe's output folder.

    The folder then holds the model, the tokenizer, `trainer_state.json` with what was logged, and, written last,
    `results.json`; its checkpoints are deleted.

    Args:
        stage: name of the stage, for the results.
        rows: what to train on, as `Rows` takes it; held_out: what to measure the loss on.
        steps: number of optimizer steps.
        collate: makes a batch of rows.
        token_bytes: bytes each token stands for, for bits per byte; None where the targets are no running text.

    Raises:
        ValueError: the loss is no longer a number, or another process trains in this folder.
        Stopped: the process was asked to terminate; a checkpoint has been written.
    """
    with claimed(recipe) as output:
        if output is not None:
            _train(stage, recipe, output, model, tokenizer, rows, held_out, steps, collate, token_bytes)


def _train(stage, recipe, output, model, tokenizer, rows, held_out, steps, collate, token_bytes):
    state = this_process()
    config = model.config
    lora = getattr(recipe, "lora", None)
    if lora:
        set_seed(recipe.seed)  # for what LoRA adds
        model = with_lora(model, lora)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lora["lr"], fused=True)
    else:
        optimizer = MuonAdamW(model, recipe.matrix_lr, recipe.embedding_lr, recipe.head_lr)
    last, saved = last_checkpoint(output)
    seconds_before, places = read_progress(last)
    batches = Batches(
        Rows(rows, recipe.streams, state.process_index, state.num_processes, places),
        recipe.batch_size,
        recipe.workers,
        collate,
    )
    termination = TerminationCallback()
    trainer = StageTrainer(
        model=model,
        args=TrainingArguments(
            **arguments(recipe, output, steps, recipe.rows_per_step),
            lr_scheduler_type="warmup_stable_decay",
            warmup_steps=recipe.warmup_steps,
            lr_scheduler_kwargs={"num_decay_steps": round(steps * recipe.decay_share), "decay_type": "linear"},
            include_num_input_tokens_seen="non_padding",
        ),
        callbacks=[MomentumWarmupCallback(recipe.momentum_warmup_steps), termination],
        eval_dataset=held_out,
        processing_class=tokenizer,
        data_collator=collate,
        optimizer=optimizer,
        batches=None if saved.get("global_step") == steps else batches,
        termination=termination,
        seconds_before=seconds_before,
        token_bytes=token_bytes,
        flops=budget.flops_per_token(config, recipe.context),
    )
    if recipe.geometry_steps is not None:
        if trainer.pop_callback(ProgressCallback):
            trainer.add_callback(BriefProgressCallback())
        trainer.add_callback(GeometryCallback(trainer, held_out[:GEOMETRY_ROWS], recipe.geometry_steps))
    if last:
        print(f"going on at step {saved['global_step']} of {steps}")
        if is_sharded(last) and not trainer.is_fsdp_enabled:
            last = made_whole(last, trainer.unfinished / "whole", model, optimizer)
        elif trainer.is_fsdp_enabled and not is_sharded(last):
            raise ValueError(f"{last} was not written by FSDP, so FSDP cannot go on from it; give another output=.")
    metrics, seconds = complete(trainer, steps, last)
    tokens = trainer.state.num_input_tokens_seen
    results = {
        "stage": stage,
        "laplacian_heads": config.laplacian_heads,
        "parameters": budget.parameters(config),
        "steps": steps,
        "tokens": tokens,
        "seconds": seconds,
        "hardware": budget.hardware(state.num_processes),
        "tokens_per_second": tokens / seconds,
        "peak_memory_gb": peak_memory() / 1e9,
        "loss": metrics["eval_loss"],
        "bits_per_byte": metrics.get("eval_bits_per_byte"),
        "seed": recipe.seed,
    }
    save_model(trainer, output)
    trainer.save_state()
    if state.is_main_process:
        tokenizer.save_pretrained(output)
        finish(trainer, results)
        figure = f"held-out loss {results['loss']:.4f} nats per target"
        if results["bits_per_byte"] is not None:
            figure = f"{results['bits_per_byte']:.4f} bits per byte"
        speed = f"{results['tokens_per_second']:,.0f} tokens/s"
        print(f"{output}: {figure}, {speed}, peak memory {results['peak_memory_gb']:.1f} GB")


def with_lora(model: PreTrainedModel, lora: dict) -> PeftModel:
    """A model whose matrices stay as they are but for what LoRA adds.

    Args:
        lora: r, alpha, targets (names of modules, or "all-linear"), and lr, which is the optimizer's.
    """
    config = LoraConfig(
        r=lora["r"], lora_alpha=lora["alpha"], target_modules=lora["targets"], task_type="CAUSAL_LM", bias="none"
    )
    return get_peft_model(model, config)


def save_model(trainer: StageTrainer, output: Path) -> None:
    """Write the model as one that `from_pretrained` loads, from whatever pieces it is in; an adapter also beside it."""
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if not this_process().is_main_process:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    config = model.config
    if isinstance(model, PeftModel):
        model.save_pretrained(output / "adapter")
        weights = model.merge_and_unload().state_dict()
    with torch.device("meta"):  # without what wrapping has made of its class
        model = LaplaceGPTForCausalLM(config)
    model.save_pretrained(output, state_dict=weights)


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
