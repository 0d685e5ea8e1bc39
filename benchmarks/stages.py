"""What a stage of training adds to its parts: reading, going on, and the step as a whole, against doing it by hand."""

import contextlib
import functools
import io
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from laplacian_heads import recipes, sources
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.train import run, stage
from laplacian_heads.train.optimizer import MuonAdamW
from laplacian_heads.train.pretrain import PretrainRecipe, pretrain
from laplacian_heads.train.rows import collate_packed, packed
from laplacian_heads.train.streams import DocumentStream, Stream, plain_encoder, text_or_tokens
from laplacian_heads.train.tokenizer import TokenizerRecipe, tokenizer

ROWS = 1_000_000  # after which a run goes on
DOCUMENTS = 400
CONTEXT = 512
STEPS = 30  # of the compared loops, of which the first ten warm up
KEYS = {
    **{"vocab_size": 2048, "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "laplacian_heads": 2},
    **{"context": CONTEXT, "streams": 4, "rows_per_step": 4, "batch_size": 4, "tokens": STEPS * 4 * CONTEXT},
    **{"logging_steps": 10, "eval_steps": None, "eval_rows": 2, "save_steps": 1000, "held_out": 4},
}


def lines(repeats: int) -> list[str]:
    """The measurements as Markdown."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = sources.shards("python_prose")[0].blocks
        Dataset.from_list([row for block in found[:DOCUMENTS] for row in block]).to_parquet(
            str(folder / "text.parquet")
        )
        with contextlib.redirect_stdout(io.StringIO()):
            values = {
                "data": str(folder / "text.parquet"),
                "output": str(folder / "tokenizer"),
                "max_characters": 10**6,
            }
            tokenizer(recipes.load(TokenizerRecipe, "gpt_tiny_tokenizer", values))
        text = AutoTokenizer.from_pretrained(folder / "tokenizer")
        return [
            "## A stage against its parts",
            "",
            "| | | against | ratio |",
            "|---|---|---|---|",
            *reading(folder, text, repeats),
            *going_on(folder, text, repeats),
            *whole_step(folder, repeats),
            "",
        ]


def row(what: str, value: float, against: str, base: float, unit: str = "s") -> str:
    return f"| {what} | {value:.3g} {unit} | {against}, {base:.3g} {unit} | {value / base:.2f} |"


def in_turns(jobs: list, repeats: int) -> list[float]:
    """Median seconds of each job."""
    seconds = [[] for _ in jobs]
    for i in range(repeats + 1):
        for job, times in zip(jobs, seconds, strict=True):
            started = time.perf_counter()
            job()
            if i:  # the first round warms up
                times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in seconds]


def rows_of(path: Path, text, place=None, epochs=None):
    """The rows of a file, in its order."""
    stream = Stream(shards=sources.shards(str(path)), seed="0", window=0, skip=False, convert=text_or_tokens)
    return packed(DocumentStream(stream, text), CONTEXT, place, epochs)


def reading(folder: Path, text, repeats: int) -> list[str]:
    texts = [value["text"] for value in sources.rows(str(folder / "text.parquet"))]
    encoder = plain_encoder(text)

    def encode():
        for start in range(0, len(texts), 64):
            [
                encoding.ids
                for encoding in encoder.encode_batch_fast(texts[start : start + 64], add_special_tokens=False)
            ]

    def pack():
        for _ in rows_of(folder / "text.parquet", text, epochs=1):
            pass

    packing, encoding = in_turns([pack, encode], repeats)
    return [row(f"read, tokenise and pack {DOCUMENTS} documents", packing, "the tokenizer's encoder alone", encoding)]


def going_on(folder: Path, text, repeats: int) -> list[str]:
    path = folder / "many.parquet"
    Dataset.from_dict({"text": [f"document {i} of very many" for i in range(ROWS + 20_000)]}).to_parquet(
        str(path), batch_size=1000
    )
    place = {"epoch": 0, "window": 0, "dealt": 0, "block": ROWS // 1000, "row": 0}
    at_row = {"sequences": place, "token": 0}
    assert f"document {ROWS}" in text.decode(next(rows_of(path, text, at_row))["tokens"])
    late, early = in_turns(
        [lambda: next(rows_of(path, text, at_row)), lambda: next(rows_of(path, text, None))], repeats
    )
    return [row(f"first row after document {ROWS:,}", late, "after document 0", early)]


class Clock(TrainerCallback):
    def __init__(self):
        self.times = []

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.perf_counter())


def whole_step(folder: Path, repeats: int) -> list[str]:
    stages, loops, waits = [], [], {0: [], 1: []}
    for i in range(repeats):
        for workers in (0, 1):
            times, wait = stage_times(folder, f"{i}-{workers}", workers)
            waits[workers].append(wait)
            if workers == 0:
                stages += times
        loops += loop_times(folder)
        print(f"  round {i + 1} of {repeats}", flush=True)
    step, bare = statistics.median(stages), statistics.median(loops)
    share = {workers: f"{statistics.median(values):.2%}" for workers, values in waits.items()}
    return [
        row("a step of pretraining", step, "a loop by hand with the same model, rows and optimizer", bare),
        f"| time a step waits for data | {share[0]} read in the training process | {share[1]} read by a worker | |",
    ]


def recipe_of(folder: Path, name: str, workers: int) -> PretrainRecipe:
    paths = {"data": str(folder / "text.parquet"), "tokenizer": str(folder / "tokenizer")}
    values = {**KEYS, **paths, "output": str(folder / name), "workers": workers}
    return recipes.load(PretrainRecipe, "gpt_tiny_pretrain", values)


def stage_times(folder: Path, name: str, workers: int) -> tuple[list[float], float]:
    """Seconds of each step of a run of the stage, and the share of time it waited for data."""
    clock, trainer = Clock(), stage.StageTrainer
    stage.StageTrainer = lambda **given: trainer(**{**given, "callbacks": [*given["callbacks"], clock]})
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            pretrain(recipe_of(folder, name, workers))
    finally:
        stage.StageTrainer = trainer
    log = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    waits = [entry["data_wait_share"] for entry in log if "data_wait_share" in entry]
    return [b - a for a, b in zip(clock.times[9:], clock.times[10:], strict=False)], statistics.mean(waits)


def loop_times(folder: Path) -> list[float]:
    """Seconds of each step of a loop that does what has to be done and nothing else."""
    recipe = recipe_of(folder, "by-hand", 0)
    text = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = rows_of(folder / "text.parquet", text)
    model = LaplaceGPTForCausalLM(recipe.config()).train()
    optimizer = MuonAdamW(model, recipe.matrix_lr, recipe.embedding_lr, recipe.head_lr)
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=run.has_bf16())
    times = []
    for _ in range(STEPS):
        batch = collate_packed([next(rows) for _ in range(4)])
        with autocast():
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return [b - a for a, b in zip(times[9:], times[10:], strict=False)]
