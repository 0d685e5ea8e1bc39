"""Several processes: the losses of one, checkpoints in pieces, and going on with another number of them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from laplacian_heads.__main__ import main
from laplacian_heads.train.checkpoints import is_sharded, last_checkpoint

STEPS = 12
COMMON = ["context=96", "streams=4", "rows_per_step=8", "batch_size=2", "logging_steps=1", "save_steps=4", "bf16=false"]
# Muon's products are in bfloat16: rounding them otherwise moves weights by a hundredth of the rate.
COMMON += ["matrix_lr=0.003"]
SMALL = ["vocab_size=300", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1"]
MIXTURE = '[{data: "generated:arithmetic", rows: 64}, {data: "generated:choice", rows: 32}]'
CONFIGS = ROOT / "recipes/accelerate"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tokenizer, and every stage in a single process."""
    root = tmp_path_factory.mktemp("runs")
    tokenizer = ["tokenizer", "data=[generated:choice, generated:arithmetic]", "vocab_size=300", "context=96"]
    assert main([*tokenizer, "max_characters=20000", f"output={root / 'tokenizer'}"]) == 0
    for verb in ("pretrain", "sft"):
        assert main(command(root, verb, root / verb)) == 0
    return root


def command(root, verb, output):
    given = {
        # 7 held-out rows are not a multiple of anything here
        "pretrain": [*SMALL, "data=generated:copying", "held_out=60", "eval_rows=7", f"tokens={STEPS * 8 * 96}"]
        + [f"tokenizer={root / 'tokenizer'}"],
        "sft": [f"data={MIXTURE}", f"held_out={MIXTURE}", f"model={root / 'pretrain'}"],
    }[verb]
    return [verb, *COMMON, *given, "eval_steps=6", f"output={output}"]


def launched(kind, arguments, **kwargs):
    """Two processes under accelerate launch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = ["-m", "laplacian_heads"] if kind == "ddp" else [str(ROOT / "tests/fsdp_on_cpu.py")]
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{kind}.yaml")]
        + ["--num_processes", "2", "--main_process_port", str(port), *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **kwargs,
    )


def finish(process):
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0, said
    return said


def losses(folder):
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("verb", ["pretrain", "sft"])
def test_two_processes_have_the_losses_of_one(root, tmp_path, kind, verb):
    said = finish(launched(kind, command(root, verb, tmp_path / "run")))
    assert said.count("tokens/s, peak memory") == 1  # the main process speaks
    expected, found = losses(root / verb), losses(tmp_path / "run")
    assert found[0] == pytest.approx(expected[0], rel=1e-6)  # before Muon's bfloat16 has its say
    assert found == pytest.approx(expected, rel=1e-4)
    one, other = (json.loads((folder / "results.json").read_text()) for folder in (root / verb, tmp_path / "run"))
    assert other["tokens"] == one["tokens"]
    assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert type(model).__name__ == "LaplaceGPTForCausalLM"
    weights = load_file(tmp_path / "run/model.safetensors")
    assert weights.keys() == load_file(root / verb / "model.safetensors").keys()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {path.name for path in (root / verb).iterdir()}


def test_two_processes_classify_as_one(tmp_path):
    """Mixing and repeated augmentation included; without drop path, which each process draws for itself."""
    given = [
        "images=96",
        "images_per_step=32",
        "batch_size=8",
        "epochs=4",
        "warmup_epochs=1",
        "repeats=3",
        "cutmix=1.0",
    ]
    given += ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1", "logging_steps=1"]
    given += ["ema_decay=0.9", "held_out=digits:test", "eval_steps=5", "save_steps=4", "crop=resized"]
    assert main(["classify", *given, f"output={tmp_path / 'one'}"]) == 0
    said = finish(launched("ddp", ["classify", *given, f"output={tmp_path / 'two'}"]))
    assert said.count("images/s, peak memory") == 1
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    one, other = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    for name in ("accuracy", "accuracy_top5", "ema_accuracy", "held_out_images", "images"):
        assert one[name] == other[name]


@pytest.mark.parametrize("centering", ["softmax", "sinkhorn"])
def test_two_processes_distil_as_one(tmp_path, centering):
    """Of each batch, whose images are masked and kept apart together, one process has all and two have half. Centres
    are of the step; Sinkhorn is over a batch of each process, for which one process has a batch twice as large."""
    given = ["images=96", "images_per_step=32", "epochs=4", "warmup_epochs=1", "held_out=20", "eval_steps=5"]
    given += ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1", "logging_steps=1"]
    given += ["save_steps=4", "prototypes=32", "teacher_momentum=0.9", f"centering={centering}", "local_crops=2"]
    given += ["freeze_last_layer_epochs=0", "warmup_teacher_temperature_epochs=1", "warmup_teacher_temperature=0.06"]
    one, two = ["batch_size=16"], ["batch_size=16"]
    if centering == "sinkhorn":
        given += ["koleo_weight=0", "ibot_weight=0"]
        one = ["batch_size=32"]
    assert main(["dino", *given, *one, f"output={tmp_path / 'one'}"]) == 0
    said = finish(launched("ddp", ["dino", *given, *two, f"output={tmp_path / 'two'}"]))
    assert said.count("images/s, peak memory") == 1
    logs = [json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("one", "two")]
    for name in ("loss", "dino_loss", "ibot_loss", "teacher_entropy", "grad_norm", "eval_knn_accuracy"):
        one, two = ([entry[name] for entry in log if name in entry] for log in logs)
        assert two == pytest.approx(one, rel=1e-4), name
    # Not the weights: the bias of keys has no gradient but rounding, which AdamW makes steps of.
    models = [AutoModel.from_pretrained(tmp_path / name) for name in ("one", "two")]
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    one, two = (model(images).last_hidden_state for model in models)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-3)


def test_mixed_precision_of_shared_weights_does_not_round_the_loss(root, tmp_path):
    """accelerate's policy for FSDP2 returns it in bfloat16, which has eight bits."""
    runs = tmp_path / "one", tmp_path / "two"
    assert main([*command(root, "pretrain", runs[0]), "bf16=true"]) == 0
    finish(launched("fsdp2", [*command(root, "pretrain", runs[1]), "bf16=true"]))
    found = losses(runs[1])
    assert found == pytest.approx(losses(runs[0]), rel=2e-3)
    assert sum(torch.tensor(loss).bfloat16().item() == loss for loss in found) < len(found) / 2


def kill_all(process):
    children = psutil.Process(process.pid).children(recursive=True)
    for each in (process, *children):
        each.kill()
    psutil.wait_procs(children, timeout=30)
    process.communicate()


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def killed(request, root, tmp_path_factory):
    """A run of two processes that were killed after a checkpoint."""
    output = tmp_path_factory.mktemp("killed") / "run"
    process = launched(request.param, command(root, "pretrain", output))
    deadline = time.monotonic() + 120
    while not list(output.glob("checkpoint-*")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    kill_all(process)
    assert is_sharded(last_checkpoint(output)[0]) == (request.param == "fsdp2")
    return request.param, output


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_run_goes_on_with_another_number_of_processes(root, killed, tmp_path, processes):
    kind, before = killed
    output = tmp_path / "run"
    output.mkdir()
    for path in before.iterdir():
        subprocess.run(["cp", "-r", str(path), str(output)], check=True)
    recipe = output / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(before), str(output)))
    if processes == 1:
        assert main(command(root, "pretrain", output)) == 0
    else:
        assert "going on at step" in finish(launched(kind, command(root, "pretrain", output)))
    assert losses(output) == pytest.approx(losses(root / "pretrain"), rel=1e-4)
    one, other = (load_file(folder / "model.safetensors") for folder in (output, root / "pretrain"))
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0.02)


def test_two_processes_asked_to_terminate_save_and_go_on(root, tmp_path):
    output = tmp_path / "run"
    longer = [*command(root, "pretrain", output), f"tokens={60 * 8 * 96}", "save_steps=100"]
    process = launched("ddp", longer)
    for line in process.stdout:
        if "'loss'" in line:
            break
    children = psutil.Process(process.pid).children(recursive=True)
    trainers = [child for child in children if "laplacian_heads" in child.cmdline()]
    trainers[-1].send_signal(signal.SIGTERM)  # one is enough
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert "which is saved; the same command goes on from there" in said
    step = last_checkpoint(output)[1]["global_step"]
    assert 0 < step < 60
    assert "going on at step" in finish(launched("ddp", longer))
