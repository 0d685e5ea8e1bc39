"""Geometry and gradient norms by layer, logged while training: against sums by hand, and without any trace in it."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import transformers
from conftest import ROOT
from peft import LoraConfig, get_peft_model
from reference import redraw
from safetensors.torch import load_file
from torch.nn.utils import clip_grad_norm_, get_total_norm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM
from laplacian_heads.__main__ import main
from laplacian_heads.train import geometry, stage
from laplacian_heads.train.callbacks import BriefProgressCallback
from laplacian_heads.train.geometry import METRICS, GeometryCallback, gradient_norms

LAYERS, CLIP, RATE = 4, 0.05, 0.1
SHAPE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
LLAMA = {**SHAPE, "intermediate_size": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LENGTHS = [12, 9, 12, 5, 7, 12, 12, 8]


def llama(**fields):
    return redraw(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **fields})))


def laplace_gpt():
    return redraw(LaplaceGPTForCausalLM(LaplaceGPTConfig(**SHAPE, laplacian_heads=1)))


def gpt2():
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=LAYERS, n_head=2, n_positions=16, **dropout)
    return redraw(GPT2LMHeadModel(config))


def with_lora():
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


MODELS = {"llama": llama, "tied": lambda: llama(tie_word_embeddings=True), "laplace_gpt": laplace_gpt}
MODELS |= {"gpt2": gpt2, "lora": with_lora}


def some_rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 64, (n,), generator=generator)} for n in (LENGTHS * count)[:count]]


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (ids > 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100  # no target, but Trainer counts it among those of some models
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def make_trainer(model, folder, **arguments):
    """Plain SGD over 16 rows in their order, clipped at every step."""
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "logging_steps": 100, "max_grad_norm": CLIP}
    given |= {"report_to": "none", "use_cpu": True, "save_strategy": "no", "optim": "sgd", "learning_rate": RATE}
    given |= {"lr_scheduler_type": "constant", "remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    arguments = TrainingArguments(str(folder), **{**given, **arguments})
    return Trainer(model, arguments, train_dataset=some_rows(16, 0), data_collator=collate)


def figures(trainer):
    """What was logged, by step and name."""
    return {
        (entry["step"], name): value
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if "/" in name
    }


def naive_geometry(hidden_states, mask):
    """Every figure from its definition, token by token."""
    expected = {}
    for layer, hidden in enumerate(hidden_states):
        rows = [row[kept].double() for row, kept in zip(hidden, mask.bool(), strict=True)]
        tokens = torch.cat(rows)
        within = sum((row - row.mean(0)).square().sum() for row in rows)
        expected[f"within_sequence_share/layer_{layer:02}"] = within / (tokens - tokens.mean(0)).square().sum()
        cosines = []
        for row in rows:
            pairs = [(i, j) for i in range(len(row)) for j in range(len(row)) if i != j]
            cosines.append(torch.stack([torch.cosine_similarity(row[i], row[j], dim=0) for i, j in pairs]).mean())
        expected[f"token_similarity/layer_{layer:02}"] = torch.stack(cosines).mean()
    ranks, components = [], []
    for row in rows:
        shares = torch.linalg.svdvals(row - row.mean(0)).square()
        shares = shares[shares > 1e-12 * shares.sum()] / shares.sum()
        ranks.append((-(shares * shares.log()).sum()).exp())
        components.append(float((shares.cumsum(0) < 0.99).sum() + 1))
    expected[f"effective_rank/layer_{layer:02}"] = torch.stack(ranks).mean()
    expected[f"components_99/layer_{layer:02}"] = sum(components) / len(components)
    return {f"geometry/{name}": float(value) for name, value in expected.items()}


def naive_norms(model):
    """By the names of parameters, from the gradients as they are."""
    by_part = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        number = next((int(word) for word in name.split(".") if word.isdigit()), None)
        if number is not None:
            part = f"layer_{number + 1:02}"
        elif "embed_tokens" in name or "wte" in name:
            part = "embedding"
        else:
            part = "head" if "lm_head" in name else "rest"
        by_part.setdefault(part, []).append(parameter.grad)
    return {f"gradient_norm/{part}": float(get_total_norm(own)) for part, own in by_part.items() if part != "rest"}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_figures_are_those_of_a_loop_by_hand(tmp_path, kind, accumulation):
    """Step by step, with every gradient clipped; the rows are of different lengths and take two batches."""
    trainer = make_trainer(
        MODELS[kind](),
        tmp_path,
        max_steps=4 // accumulation,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulation,
    )
    held_out = some_rows(7, 1)
    trainer.add_callback(GeometryCallback(trainer, held_out, steps=2 // accumulation))
    trainer.train()

    model, rows, expected = MODELS[kind](), some_rows(16, 0), {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, RATE)
    size = 4 * accumulation
    for step in range(1, 4 // accumulation + 1):
        batch = collate(rows[size * (step - 1) : size * step])
        model.train()
        model(**batch, use_cache=False).loss.backward()
        norms = naive_norms(model)
        assert clip_grad_norm_(trained, CLIP) > CLIP
        optimizer.step()
        optimizer.zero_grad()
        if step % (2 // accumulation) == 0:
            batch = collate(held_out)
            model.eval()
            with torch.no_grad():
                outputs = model(**batch, output_hidden_states=True, use_cache=False)
            found = naive_geometry(outputs.hidden_states, batch["attention_mask"])
            expected |= {(step, name): value for name, value in (found | norms).items()}

    found = figures(trainer)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    steps = {step for step, _ in found}
    per_layer = {name for _, name in found if name.startswith("gradient_norm/layer")}
    assert len(steps) == 2
    assert len(per_layer) == LAYERS
    assert any(name == "gradient_norm/embedding" for _, name in found) == (kind != "lora")


def test_model_of_which_only_another_head_is_trained_has_no_gradient_norms(tmp_path):
    model = LlamaForSequenceClassification(LlamaConfig(**LLAMA))
    model.model.requires_grad_(False)
    trainer = make_trainer(model, tmp_path, max_steps=1)
    trainer.data_collator = lambda rows: {**collate(rows), "labels": torch.zeros(len(rows), dtype=torch.long)}
    trainer.add_callback(GeometryCallback(trainer, some_rows(2, 1), steps=1))
    trainer.train()
    assert {name.split("/")[0] for _, name in figures(trainer)} == {"geometry"}


def test_trainer_is_not_kept_alive(tmp_path):
    trainer = make_trainer(llama(), tmp_path, max_steps=1)
    alone = sys.getrefcount(trainer)
    trainer.add_callback(GeometryCallback(trainer, some_rows(2, 1), steps=1))
    assert sys.getrefcount(trainer) == alone


def test_only_chosen_metrics_are_logged(tmp_path):
    for metric in METRICS:
        trainer = make_trainer(llama(), tmp_path, max_steps=1)
        trainer.add_callback(GeometryCallback(trainer, some_rows(2, 1), steps=1, metrics=[metric]))
        trainer.train()
        assert {name.split("/")[-2] for _, name in figures(trainer)} == {metric}


def test_last_line_of_each_measured_step_is_the_only_addition_to_the_log(tmp_path):
    trainer = make_trainer(llama(), tmp_path, logging_steps=2)
    trainer.add_callback(GeometryCallback(trainer, some_rows(2, 1), steps=2))
    trainer.train()
    lines = [(entry["step"], "loss" in entry) for entry in trainer.state.log_history[:-1]]
    assert lines == [(2, True), (2, False), (4, True), (4, False)]


class Drawing:
    """A collator that draws, as one that masks does."""

    def __call__(self, rows):
        torch.rand(3)
        return collate(rows)


@pytest.mark.parametrize("kind", ["llama", "laplace_gpt"])
def test_training_is_the_same_bit_by_bit(tmp_path, kind):
    """With dropout, which would show any draw from the random state, and a module that is to stay in evaluation."""
    weights, modes = [], []
    for measured in (False, True):
        model = llama(attention_dropout=0.5) if kind == "llama" else laplace_gpt()
        trainer = make_trainer(model, tmp_path, max_steps=6)
        trainer.data_collator = Drawing()
        if measured:
            trainer.add_callback(GeometryCallback(trainer, some_rows(5, 1), steps=1))

        class Modes(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **kwargs):
                model.model.norm.eval()

            def on_log(self, args, state, control, model=None, **kwargs):
                modes.append((model.training, model.model.norm.training, model.model.layers[0].training))

        trainer.add_callback(Modes())
        torch.manual_seed(0)
        trainer.train()
        weights.append(model.state_dict())
        assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert set(modes) == {(True, True, True)}


def test_resumed_run_logs_the_same(tmp_path):
    runs = {}
    for name in ("whole", "part"):
        steps = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
        trainer = make_trainer(llama(), tmp_path / name, **steps)
        trainer.add_callback(GeometryCallback(trainer, some_rows(5, 1), steps=2))
        trainer.train()
        if name == "part":
            trainer = make_trainer(llama(), tmp_path / name, **steps)
            trainer.add_callback(GeometryCallback(trainer, some_rows(5, 1), steps=2))
            trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-3"))
        runs[name] = figures(trainer)
    assert {step for step, _ in runs["whole"]} == {2, 4, 6}
    assert runs["part"] == runs["whole"]


def warnings_of(monkeypatch):
    said = []
    monkeypatch.setattr(geometry.logger, "warning", said.append)
    return said


def test_warns_when_gradients_grow_or_vanish_and_not_while_they_are_so(tmp_path, monkeypatch):
    said = warnings_of(monkeypatch)
    trainer = make_trainer(llama(), tmp_path, max_steps=1)
    callback = GeometryCallback(trainer, some_rows(2, 1))
    names = [*(f"layer_{block:02}" for block in range(1, LAYERS + 1)), "embedding", "head"]
    usual = dict.fromkeys(names, 0.1)
    steps = [
        (1, usual, 0.2),
        (2, {**usual, "layer_02": 20.0}, 20.0),
        (3, {**usual, "layer_02": 30.0}, 30.0),
        (4, usual, 0.2),
        (5, {**usual, "layer_01": 1e-6}, 0.2),  # none of the last ones
        (6, {**usual, "layer_04": 1e-6}, 0.2),
        (7, {**usual, "layer_04": 1e-7}, 0.2),
        (8, {**usual, "layer_02": 20.0}, 20.0),
    ]
    for step, norms, total in steps:
        trainer.state.global_step = step
        callback.norms = norms
        callback._gradient(total)
    assert len(said) == 3
    assert "The norm of the gradient is 20 at step 2, above 10" in said[0]
    assert "layer_02" in said[0]
    assert said[1].startswith("The norm of the gradient of layer_04 is ")
    assert said[1].endswith(" at step 6, below 0.0001.")
    assert "at step 8, above 10" in said[2]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_no_numbers_are_said_once_and_end_nothing(tmp_path, monkeypatch, value):
    said = warnings_of(monkeypatch)

    class Spoil(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                with torch.no_grad():
                    model.model.layers[1].mlp.down_proj.weight[0, 0] = value

    trainer = make_trainer(llama(), tmp_path)
    trainer.add_callback(Spoil())
    trainer.add_callback(GeometryCallback(trainer, some_rows(5, 1), steps=1))
    trainer.train()
    assert trainer.state.global_step == 4
    assert sum("The hidden states of layer 2 are not finite at step 2." in sentence for sentence in said) == 1
    assert sum("not finite" in sentence for sentence in said) == 1
    spoilt = {name for step, name in figures(trainer) if step == 2 and name.startswith("geometry/")}
    measures = ("within_sequence_share", "token_similarity")
    assert spoilt == {f"geometry/{name}/layer_{layer:02}" for name in measures for layer in (0, 1)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"steps": 0}, "steps is 0, allowed is an integer of at least 1."),
        ({"steps": True}, "steps is True, allowed is an integer of at least 1."),
        ({"steps": 1.5}, "steps is 1.5, allowed is an integer of at least 1."),
        ({"rows": []}, "rows is empty, allowed is at least one row."),
        ({"metrics": ["rank"]}, "metrics has 'rank', allowed are within_sequence_share, token_similarity, "),
        ({"metrics": []}, "metrics is [], allowed is a list of within_sequence_share, "),
        ({"metrics": "gradient_norm"}, "metrics is 'gradient_norm', allowed is a list of "),
    ],
)
def test_wrong_values_are_refused(tmp_path, arguments, sentence):
    trainer = make_trainer(llama(), tmp_path)
    with pytest.raises(ValueError, match="allowed") as error:
        GeometryCallback(trainer, **{"rows": some_rows(2, 1), **arguments})
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_models_it_cannot_measure_are_refused(tmp_path):
    trainer = make_trainer(llama(), tmp_path)
    trainer.model.config.num_hidden_layers = 7
    with pytest.raises(ValueError, match="LlamaForCausalLM has no list of 7 blocks"):
        GeometryCallback(trainer, some_rows(2, 1))
    trainer.model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="model is a Linear, allowed is a model of transformers"):
        GeometryCallback(trainer, some_rows(2, 1))
    t5 = {"vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    trainer.model = transformers.T5ForConditionalGeneration(transformers.T5Config(**t5))
    with pytest.raises(ValueError, match="allowed is one without both encoder and decoder"):
        GeometryCallback(trainer, some_rows(2, 1))


def test_parts_of_a_model_without_embeddings_are_its_blocks():
    """transformers raises for the embedding of some models of images."""
    config = transformers.ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4)
    config.num_hidden_layers = 4
    model = transformers.ConvNextForImageClassification(config)
    model(torch.randn(2, 3, 32, 32)).logits.sum().backward()
    assert list(gradient_norms(model)) == ["layer_01", "layer_02", "layer_03", "layer_04", "rest"]


def test_terminal_shows_a_range_of_what_each_layer_has(tmp_path, capsys):
    callback, control = BriefProgressCallback(), None
    trainer = make_trainer(llama(), tmp_path)
    trainer.state.max_steps = 1
    callback.on_train_begin(trainer.args, trainer.state, control)
    logs = {f"gradient_norm/layer_{layer:02}": float(layer) for layer in range(1, 21)}
    logs |= {"gradient_norm/head": 0.25, "geometry/effective_rank/layer_20": 7.5}
    callback.on_log(trainer.args, trainer.state, control, logs)
    callback.on_train_end(trainer.args, trainer.state, control)
    said = capsys.readouterr().out
    assert "'gradient_norm': '1 to 20'" in said
    assert "'gradient_norm/head': '0.25'" in said
    assert "'geometry/effective_rank': '7.5'" in said
    assert "layer_" not in said
    assert len(logs) == 22


# In the stages

COMMON = ["context=64", "rows_per_step=4", "batch_size=2", "save_steps=2", "logging_steps=1", "geometry_steps=2"]
SMALL = ["vocab_size=300", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1"]
MIXTURE = '[{data: "generated:arithmetic", rows: 24}]'
STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    tokenizer = ["tokenizer", "data=[generated:choice, generated:arithmetic]", "vocab_size=300", "context=64"]
    assert main([*tokenizer, "max_characters=20000", f"output={root / 'tokenizer'}"]) == 0
    for verb in ("pretrain", "midtrain", "sft"):
        assert main(command(root, verb, root / verb)) == 0
    return root


def command(root, verb, output, *overrides):
    tokens = f"tokens={STEPS * 4 * 64}"
    conversations = [f"data={MIXTURE}", f"held_out={MIXTURE}", f"model={root / 'pretrain'}"]
    given = {
        "pretrain": [*SMALL, "data=generated:copying", "held_out=40", "eval_rows=9", tokens]
        + [f"tokenizer={root / 'tokenizer'}"],
        "midtrain": [*conversations, "eval_rows=9", tokens],
        "sft": conversations,
    }[verb]
    return [verb, *COMMON, *given, f"output={output}", *overrides]


def logged(folder):
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {(entry["step"], name): value for entry in log for name, value in entry.items() if "/" in name}


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
def test_stage_logs_them_and_ends_in_the_weights_it_would_have(root, tmp_path, verb):
    found = logged(root / verb)
    names = {f"geometry/{name}/layer_{layer:02}" for name in METRICS[:2] for layer in range(3)}
    names |= {f"geometry/{name}/layer_02" for name in METRICS[2:4]}
    names |= {f"gradient_norm/{part}" for part in ("layer_01", "layer_02", "embedding", "head")}
    steps = {step for step, _ in found}
    assert {2, 4} <= steps
    assert found.keys() == {(step, name) for step in steps for name in names}
    shares = [value for (_, name), value in found.items() if "share" in name]
    assert all(0 < share < 1 for share in shares)
    assert main(command(root, verb, tmp_path / "run", "geometry_steps=null")) == 0
    assert logged(tmp_path / "run") == {}
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", root / verb))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("verb", ["pretrain", "sft"])
def test_killed_stage_logs_the_same_at_the_same_steps(root, tmp_path, monkeypatch, verb):
    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    trainer = stage.StageTrainer
    with monkeypatch.context() as patched:
        patched.setattr(
            stage, "StageTrainer", lambda **given: trainer(**{**given, "callbacks": [*given["callbacks"], Kill()]})
        )
        assert main(command(root, verb, tmp_path / "run")) == 130
    assert main(command(root, verb, tmp_path / "run")) == 0
    assert logged(tmp_path / "run") == logged(root / verb)


def test_stage_refuses_wrong_steps(root, tmp_path, capsys):
    assert main(command(root, "pretrain", tmp_path / "run", "geometry_steps=0")) == 1
    assert "geometry_steps is 0, allowed is at least 1, or null for never." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_log_what_one_does(root, tmp_path, kind):
    quiet = "bf16=false", "matrix_lr=0.0001"  # Muon's products are in bfloat16, and rounded otherwise
    assert main(command(root, "pretrain", tmp_path / "one", *quiet)) == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = ["-m", "laplacian_heads"] if kind == "ddp" else [str(ROOT / "tests/fsdp_on_cpu.py")]
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--main_process_port", str(port)]
        + ["--config_file", str(ROOT / f"recipes/accelerate/{kind}.yaml"), *program]
        + command(root, "pretrain", tmp_path / "two", *quiet),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    one, two = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert two.keys() == one.keys()
    measured = len({step for step, _ in one})
    assert (done.stdout + done.stderr).count("'geometry/effective_rank'") == measured  # the main process speaks
    for key, value in one.items():
        assert two[key] == pytest.approx(value, rel=1e-2), key
