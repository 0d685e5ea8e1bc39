"""What the measures of geometry cost: time against the forward pass and in training, memory against tokens."""

import contextlib
import functools
import io
import statistics
import tempfile
import time

import torch
from transformers import Trainer, TrainingArguments

from benchmarks.stages import in_turns, row
from benchmarks.worker import memory_gb, reset_peak
from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM, recipes
from laplacian_heads.eval.geometry import Groups, Similarity, Spectrum, Variance
from laplacian_heads.eval.geometry_inputs import text_batches
from laplacian_heads.eval.geometry_survey import Survey
from laplacian_heads.train import run
from laplacian_heads.train.geometry import GeometryCallback
from laplacian_heads.train.pretrain import PretrainRecipe
from laplacian_heads.train.stage import GEOMETRY_ROWS

SHAPE = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
VOCABULARY, SEQUENCES, TOKENS, ROWS = 8192, 16, 256, 8
DEFAULT = ["variance", "spectra", "collapse", "pca"]
# Tokens after which the peak is read, in batches of so many sequences of so many tokens and a width of so much.
COUNTS = (10**5, 10**6, 10**7)
BATCH, WIDTH, CLASSES = (20, 500), 64, 1000


def lines(repeats: int) -> list[str]:
    """The measurements as Markdown."""
    risen = peaks()  # before the forward passes leave memory to be used again
    torch.manual_seed(0)
    config = LaplaceGPTConfig(
        **SHAPE, vocab_size=VOCABULARY, intermediate_size=2048, laplacian_heads=2, max_position_embeddings=TOKENS
    )
    model = LaplaceGPTForCausalLM(config).eval()
    # Words of natural text: the n-th has a share of about 1/n.
    ids = torch.multinomial(1 / torch.arange(1.0, VOCABULARY + 1), SEQUENCES * (TOKENS + 1), replacement=True)
    batches = list(text_batches(ids.view(SEQUENCES, TOKENS + 1), ROWS, skip=0, min_count=10))

    @torch.no_grad()
    def forward():
        for batch in batches:
            model.model(**batch.inputs, use_cache=False)

    def survey(metrics):
        measured = Survey(model, metrics, [-1])
        for batch in batches:
            measured.update(batch)
        measured.gather()
        if "nearest_mean" in metrics:
            for batch in batches:
                measured.update_nearest(batch)
        measured.layers()

    sets = {
        "the default set": DEFAULT,
        "variance at every layer": ["variance"],
        "spectra of the last layer": ["spectra"],
        "next-token classes of the last layer": ["collapse"],
        "similarity at every layer": ["similarity"],
        "classes and nearest means, two passes": ["collapse", "nearest_mean"],
    }
    base, *seconds = in_turns([forward, *(functools.partial(survey, each) for each in sets.values())], repeats)
    # By eager attention, which makes P, against the same forward pass.
    model.set_attn_implementation("eager")
    eager, entropy = in_turns([forward, lambda: survey(["attention_entropy"])], repeats)
    return [
        "## Geometry",
        "",
        "{num_hidden_layers} layers, width {hidden_size}, ".format(**SHAPE)
        + f"{SEQUENCES} sequences of {TOKENS} tokens, {ROWS} at a time, classes seen at least 10 times. The forward "
        "pass is that of the base model, without logits; what is measured includes it.",
        "",
        "| | | against | ratio |",
        "|---|---|---|---|",
        *(row(name, each, "the forward pass", base) for name, each in zip(sets, seconds, strict=True)),
        row("attention entropy", entropy, "the forward pass by eager attention", eager),
        "",
        f"Peak memory of the accumulators beside that of a batch, width {WIDTH}, {CLASSES:,} classes: "
        + ", ".join(f"{peak:.0f} MB after {count:,} tokens" for count, peak in risen.items())
        + ".",
        "",
        in_training(2 * repeats + 2),
        "",
    ]


class Timed(GeometryCallback):
    """Keeps the seconds that each measurement takes, and each step without it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.measurements, self.durations = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.begun = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        begun = time.perf_counter()
        super().on_pre_optimizer_step(args, state, control, **kwargs)
        self.of_norms = time.perf_counter() - begun

    def on_step_end(self, args, state, control, **kwargs):
        self.durations.append(time.perf_counter() - self.begun - self.of_norms)
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        due, begun = self.due, time.perf_counter()
        super().on_log(args, state, control, logs, **kwargs)
        if due:
            self.measurements.append(time.perf_counter() - begun + self.of_norms)


def in_training(steps: int) -> str:
    """What the callback costs beside the steps of the recipe for a tiny model."""
    recipe = recipes.load(PretrainRecipe, "gpt_tiny_pretrain", {"output": "none"})
    rows = torch.randint(recipe.vocab_size, (recipe.rows_per_step * steps, recipe.context))
    rows = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=recipe.batch_size,
            gradient_accumulation_steps=recipe.rows_per_step // recipe.batch_size,
            max_steps=steps,
            bf16=run.has_bf16(),
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = Trainer(LaplaceGPTForCausalLM(recipe.config()), arguments, train_dataset=rows)
        callback = Timed(trainer, rows[:GEOMETRY_ROWS], steps=2)
        trainer.add_callback(callback)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
    measurement, step = (statistics.median(each[1:]) for each in (callback.measurements, callback.durations))
    share = measurement / (measurement + recipe.geometry_steps * step)
    return (
        f"Training by gpt_tiny_pretrain: a measurement takes {measurement:.2f} s, a step {step:.2f} s; every "
        f"{recipe.geometry_steps} steps that is {share:.1%} of the time."
    )


def peaks() -> dict[int, float]:
    """How far the process rises, in MB, up to each of COUNTS."""
    generator = torch.Generator().manual_seed(0)
    accumulators = Variance(), Spectrum(), Similarity(), Groups(scatter=True)
    found, fed = {}, 0
    reset_peak()
    before = memory_gb("VmRSS")
    for count in COUNTS:
        while fed < count:
            hidden = torch.randn(*BATCH, WIDTH, generator=generator)
            *sequences, classes = accumulators
            for accumulator in sequences:
                accumulator.update(hidden)
            labels = torch.randint(CLASSES, (hidden.shape[0] * hidden.shape[1],), generator=generator)
            classes.update(hidden.flatten(0, 1), labels)
            fed += len(labels)
        found[count] = 1000 * (memory_gb("VmHWM") - before)
    return found
