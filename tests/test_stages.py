"""The stages of training: optimizer, schedule, exact measurement, resuming, and what a run needs."""

import importlib
import itertools
import json
import math

import pytest
import torch
from runs import killed_run
from safetensors.torch import load_file
from transformers import TrainingArguments

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM, recipes
from laplacian_heads.__main__ import main
from laplacian_heads.train import budget, stage
from laplacian_heads.train.callbacks import TerminationCallback
from laplacian_heads.train.rows import collate_packed
from laplacian_heads.train.sft import SFTRecipe, sft
from laplacian_heads.train.trainer import StageTrainer

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS = 6
COMMON = ["context=96", "rows_per_step=4", "batch_size=2", "save_steps=2", "logging_steps=1", "momentum_warmup_steps=4"]
MIXTURE = '[{data: "generated:arithmetic", rows: 16}, {data: "generated:choice", rows: 8}]'
TOKENS = f"tokens={STEPS * 4 * 96}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A tokenizer and a run of every stage, each from the one before."""
    root = tmp_path_factory.mktemp("runs")
    tokenizer = ["tokenizer", "data=[generated:choice, generated:arithmetic]", "vocab_size=300", "context=96"]
    assert main([*tokenizer, "max_characters=20000", f"output={root / 'tokenizer'}"]) == 0
    for verb in ("pretrain", "midtrain", "sft"):
        assert main(command(verb, root, root / verb)) == 0
    return root


def command(verb, root, output, *overrides):
    given = {
        "pretrain": [
            *(f"{name}={value}" for name, value in SMALL.items()),
            *("data=generated:copying", "held_out=40", "eval_rows=3", "laplacian_heads=1", TOKENS),
            f"tokenizer={root / 'tokenizer'}",
        ],
        "midtrain": [f"data={MIXTURE}", f"held_out={MIXTURE}", "eval_rows=3", TOKENS, f"model={root / 'pretrain'}"],
        "sft": [f"data={MIXTURE}", f"held_out={MIXTURE}", f"model={root / 'midtrain'}"],
    }[verb]
    return [verb, *COMMON, *given, f"output={output}", *overrides]


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_interrupted_run_ends_in_the_same_weights(runs, tmp_path, monkeypatch, capsys, verb, step):
    """Before the first checkpoint, between two, and where one has just been written."""
    output = tmp_path / "run"
    killed_run(monkeypatch, stage, "StageTrainer", step, command(verb, runs, output))
    assert main(command(verb, runs, output)) == 0
    assert ("going on at step" in capsys.readouterr().out) == (step > 2)
    expected, found = (load_file(folder / "model.safetensors") for folder in (runs / verb, output))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    one, other = (json.loads((folder / "results.json").read_text()) for folder in (runs / verb, output))
    for key in ("loss", "bits_per_byte", "tokens", "steps", "parameters"):
        assert one[key] == other[key]
    assert {path.name for path in output.iterdir()} == {path.name for path in (runs / verb).iterdir()}


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
def test_finished_run_is_left_alone_and_another_recipe_refused(runs, capsys, verb):
    before = (runs / verb / "model.safetensors").stat().st_mtime_ns
    assert main(command(verb, runs, runs / verb)) == 0
    assert "is finished" in capsys.readouterr().out
    assert main(command(verb, runs, runs / verb, "seed=7")) == 1
    assert "holds the results of another recipe, in which seed is 0 instead of 7" in capsys.readouterr().err
    assert (runs / verb / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
def test_mistake_does_not_take_the_output_folder(runs, tmp_path, verb):
    """A run that was refused leaves nothing that refuses the corrected one."""
    wrong = "tokenizer=./nowhere" if verb == "pretrain" else "model=./nowhere"
    assert main(command(verb, runs, tmp_path / "run", wrong)) == 1
    assert main(command(verb, runs, tmp_path / "run", "data=[]" if verb != "pretrain" else "data=nowhere.txt")) == 1
    assert not (tmp_path / "run").exists()
    assert main(command(verb, runs, tmp_path / "run")) == 0


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
def test_diverged_run_is_not_accepted(runs, tmp_path, capsys, verb):
    assert main(command(verb, runs, tmp_path / "run", "matrix_lr=1e38")) == 1
    assert "give lower learning rates" in capsys.readouterr().err
    assert not (tmp_path / "run/results.json").exists()


def test_log_has_what_a_run_is_watched_by(runs, tmp_path):
    """In the log of every stage, and where it is reported to."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for verb in ("midtrain", "pretrain", "sft"):
        log = json.loads((runs / verb / "trainer_state.json").read_text())["log_history"]
        line = [entry for entry in log if "loss" in entry][-1]
        rates = {"learning_rate", "embedding_learning_rate", "head_learning_rate"}
        assert {"grad_norm", "tokens_per_second", "flop_utilisation", "data_wait_share", "hours_left", *rates} <= set(
            line
        )
        assert 0 < line["flop_utilisation"] < 1
        assert 0 <= line["data_wait_share"] < 1
        assert line["hours_left"] == 0
    overrides = "report_to=tensorboard", "eval_steps=2"
    assert main(command("pretrain", runs, tmp_path / "run", *overrides)) == 0
    found = set()
    for events in (tmp_path / "run").rglob("events.out.tfevents.*"):
        accumulator = EventAccumulator(str(events))
        accumulator.Reload()
        found |= set(accumulator.Tags()["scalars"])
    assert {"train/loss", "train/flop_utilisation", "train/head_learning_rate", "eval/bits_per_byte"} <= found


def test_reporting_to_what_is_not_there_is_refused(runs, tmp_path, capsys, monkeypatch):
    assert main(command("pretrain", runs, tmp_path / "run", "report_to=excel")) == 1
    assert "report_to is 'excel', allowed are none, tensorboard, wandb, trackio" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(command("pretrain", runs, tmp_path / "run", "report_to=wandb")) == 1
    assert "report_to is wandb, which is not installed: pip install wandb" in capsys.readouterr().err


def test_tokenizer_larger_than_the_model_is_refused(runs, tmp_path, capsys):
    assert main(command("pretrain", runs, tmp_path / "run", "vocab_size=280")) == 1
    assert "has 300 entries, the model only 280" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
def test_learning_rates_are_constant_and_then_linear(runs, verb):
    """As nanochat's get_lr_multiplier: (steps - step) / decay steps in the last ones, and 1 before."""
    recipe = recipes.read(runs / verb / "recipe.yaml")
    log = json.loads((runs / verb / "trainer_state.json").read_text())["log_history"]
    decay, scale = round(STEPS * recipe["decay_share"]), (32 / 768) ** -0.5
    multipliers = [min(1, (STEPS - step) / decay) for step in range(STEPS)]
    for name, rate in (
        ("learning_rate", recipe["matrix_lr"]),
        ("embedding_learning_rate", recipe["embedding_lr"] * scale),
        ("head_learning_rate", recipe["head_lr"] * scale),
    ):
        found = [entry[name] for entry in log if "loss" in entry]
        assert found == pytest.approx([rate * multiplier for multiplier in multipliers])


@pytest.mark.parametrize(
    ("name", "steps", "decay", "clipping"),
    [("pretrain", 21_400, 4_280, 1.0), ("midtrain", 765, 153, 0.0), ("sft", 701, 701, 0.0)],
)
def test_schedule_of_d20_is_nanochats(name, steps, decay, clipping):
    """karpathy/nanochat at 01f5f10: 20 % of pretraining and mid-training, and all of SFT, at falling rates."""
    module = importlib.import_module(f"laplacian_heads.train.{name}")
    classes = {"pretrain": "PretrainRecipe", "midtrain": "MidtrainRecipe", "sft": "SFTRecipe"}
    recipe = recipes.load(getattr(module, classes[name]), f"gpt_d20_{name}")
    rows = 0 if name != "sft" else sum(entry["rows"] * entry.get("repeat", 1) for entry in recipe.data)
    found = recipe.steps(rows) if name == "sft" else recipe.steps
    assert (found, round(found * recipe.decay_share)) == (steps, decay)
    assert recipe.max_grad_norm == clipping
    share = 0.02 if name == "sft" else 1
    rates = recipe.matrix_lr, recipe.embedding_lr, recipe.head_lr
    assert rates == pytest.approx((0.02 * share, 0.2 * share, 0.004 * share))
    assert recipe.warmup_steps == 0
    assert recipe.rows_per_step * recipe.context == (524_288 if name != "sft" else 32 * 2048)


def test_sft_learns_only_what_the_assistant_says(runs, tmp_path, monkeypatch):
    """The rows it trains on have a target where the assistant speaks, calls or ends, and nowhere else."""
    seen = {}

    def keep(name, recipe, model, tokenizer, rows, *arguments, **keywords):
        seen.update(tokenizer=tokenizer, rows=rows)

    monkeypatch.setattr("laplacian_heads.train.sft.train", keep)
    values = recipes.parse(command("sft", runs, tmp_path / "run")[1:])
    sft(recipes.load(SFTRecipe, "gpt_tiny_sft", values))
    rows = list(itertools.islice(seen["rows"](0, None), 24))
    assert len({tuple(row["input_ids"]) for row in rows}) > 6
    for row in rows:
        learnt = seen["tokenizer"].decode([token for token in row["labels"] if token != -100])
        assert learnt.endswith("<|assistant_end|>")
        assert "<|user_start|>" not in learnt
        assert "<|output_start|>" not in learnt


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_evaluation_counts_every_target_once(runs, tmp_path, batch_size):
    """Rows have different numbers of targets: the mean of batch means would be another figure."""
    torch.manual_seed(0)
    model = LaplaceGPTForCausalLM(LaplaceGPTConfig(**SMALL, laplacian_heads=1))
    torch.nn.init.normal_(model.lm_head.weight, std=0.1)
    sizes = [0, *range(1, 300)]  # token 0 stands for no byte
    rows = [{"tokens": torch.randint(300, (13,)).numpy()} for _ in range(5)]
    trainer = StageTrainer(
        model=model,
        args=TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=batch_size,
            remove_unused_columns=False,
            use_cpu=True,
            report_to="none",
        ),
        eval_dataset=rows,
        data_collator=collate_packed,
        optimizer=None,
        batches=None,
        termination=TerminationCallback(),
        seconds_before=0.0,
        flops=1,
        token_bytes=sizes,
    )
    rows[1]["tokens"][3:5] = 0
    metrics = trainer.evaluate()
    nats = targets = spelled = 0.0
    for row in rows:
        tokens = torch.from_numpy(row["tokens"]).long()
        logits = model.eval()(tokens[None, :-1]).logits[0].double()
        for position, target in enumerate(tokens[1:].tolist()):
            if target != 0:
                nats -= logits[position].log_softmax(-1)[target].item()
                targets += 1
                spelled += sizes[target]
    assert metrics["eval_loss"] == pytest.approx(nats / targets, rel=1e-5)
    assert metrics["eval_bits_per_byte"] == pytest.approx(nats / math.log(2) / spelled, rel=1e-5)


def test_budget_of_d20_is_the_published_one(capsys, tmp_path, monkeypatch):
    """karpathy/nanochat at 01f5f10 prints these figures, and so do the reports of others who ran it."""
    monkeypatch.chdir(tmp_path)
    assert main(["pretrain", "gpt_d20_pretrain", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for figure in ("560,988,160", "11,219,763,200", "21,400 of 524,288 tokens", "3.92e+19, 3.491758e+09 a token"):
        assert figure in said
    assert main(["midtrain", "gpt_d20_midtrain", "--dry-run"]) == 0
    assert "765 of 524,288 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", [path.stem for path in sorted(recipes.SHIPPED.glob("gpt_*.yaml"))])
def test_every_shipped_recipe_has_a_dry_run(capsys, tmp_path, monkeypatch, name):
    """Which writes nothing, and of a stage needs none of the models and data before it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(budget, "matmul_flops", lambda bf16: 1e12)  # measures for a second
    verb = name.rsplit("_", 1)[1]
    assert main([verb, name, "--dry-run"]) == 0
    said = {"tokenizer": "a tokenizer of", "prepare": "the tokens of"}.get(verb, "parameters")
    assert said in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_memory_counts_what_is_kept():
    config = LaplaceGPTConfig(**SMALL, max_position_embeddings=64)
    matrices = 2 * 12 * 32 * 32
    states, one = budget.memory(config, 1, True, False)
    assert states == 12 * matrices + 16 * 2 * 300 * 32
    rows = {count: budget.memory(config, count, True, False)[1] for count in (2, 4, 8)}
    assert rows[8] - rows[4] == 2 * (rows[4] - rows[2])
    assert one < rows[2]
    assert budget.memory(config, 4, True, True)[1] < budget.memory(config, 4, True, False)[1]
