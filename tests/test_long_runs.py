"""Runs that are killed, asked to stop, run out of disk or diverge, and what is left of them."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import TrainerCallback

from laplacian_heads.__main__ import main
from laplacian_heads.train import classify, dino, stage
from laplacian_heads.train.checkpoints import last_checkpoint

MIXTURE = (
    '[{data: "generated:arithmetic", rows: 40}, {data: "generated:choice", rows: 30}, {data: "generated:spelling"}]'
)
HELD_OUT = '[{data: "generated:choice:test", rows: 8}]'
COMMON = ["context=96", "streams=4", "rows_per_step=4", "batch_size=2", "logging_steps=1", "momentum_warmup_steps=4"]
STEPS = 40


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A tokenizer and a pretrained model."""
    root = tmp_path_factory.mktemp("runs")
    tokenizer = ["tokenizer", "data=[generated:choice, generated:arithmetic]", "vocab_size=300", "context=96"]
    assert main([*tokenizer, "max_characters=20000", f"output={root / 'tokenizer'}"]) == 0
    assert main(command(root, "pretrain", root / "pretrain", "tokens=384")) == 0
    return root


def command(root, verb, output, *overrides):
    if verb in ("classify", "dino"):
        given = ["images=160", "images_per_step=4", "batch_size=2", "epochs=1", "warmup_epochs=0", "logging_steps=1"]
        given += ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1"]
        given += ["drop_path_rate=0.2", "save_steps=3", "eval_steps=4", "held_out=8"]
        given += ["ema_decay=0.9"] if verb == "classify" else ["teacher_momentum=0.9", "local_crops=1", "prototypes=32"]
        return [verb, *given, f"output={output}", *overrides]
    tokens = f"tokens={STEPS * 4 * 96}"
    given = {
        "pretrain": [
            *("data=generated:copying", "held_out=40", "eval_rows=3", "laplacian_heads=1", tokens),
            *("vocab_size=300", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2"),
            f"tokenizer={root / 'tokenizer'}",
        ],
        "midtrain": [f"data={MIXTURE}", f"held_out={HELD_OUT}", "eval_rows=3", tokens, f"model={root / 'pretrain'}"],
        "sft": [f"data={MIXTURE.replace('spelling', 'spelling:test')}", f"held_out={HELD_OUT}", "epochs=1"],
    }[verb]
    if verb == "sft":
        given += [f"model={root / 'pretrain'}", 'data=[{data: "generated:arithmetic", rows: 160}]']
    return [verb, *COMMON, "save_steps=3", "eval_steps=4", *given, f"output={output}", *overrides]


def logged(folder):
    """What a run has logged of its losses, gradients and rates, step by step."""
    names = ("loss", "grad_norm", "learning_rate", "embedding_learning_rate", "eval_loss", "eval_bits_per_byte")
    names += ("eval_accuracy", "eval_ema_accuracy", "eval_knn_accuracy", "teacher_entropy", "teacher_momentum")
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    # The measurement at the end comes once more where a run was killed during it.
    return {
        (entry["step"], name): entry[name]
        for entry in log
        for name in names
        if name in entry and "train_loss" not in entry
    }


# One process imports everything, and each attempt is a fork of it: an import takes longer than the run.
KILLER = """
    import json, os, pathlib, random, signal, sys, time
    from laplacian_heads.__main__ import main

    command, output = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2])

    def start():
        child = os.fork()
        if child == 0:
            nothing = os.open(str(output) + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(nothing, 1), os.dup2(nothing, 2)
            os._exit(main(command))
        return child

    def unfinished():  # also one that was left behind: when it was made
        try:
            return (output / ".unfinished").stat().st_ctime_ns
        except FileNotFoundError:
            return None

    def wait_for(happened, child, seconds=600):
        # Whether it happened before the time was over.
        end = time.monotonic() + seconds
        while not (seen := happened()) and time.monotonic() < end:
            assert not os.waitpid(child, os.WNOHANG)[0], pathlib.Path(str(output) + ".log").read_text()[-2000:]
            time.sleep(0.001)
        return seen

    def saved(but=frozenset()):
        return set(output.glob("checkpoint-*")) - but

    generator = random.Random(0)
    begun = time.monotonic()
    child = start()
    assert wait_for((output / "recipe.yaml").exists, child)
    beginning = time.monotonic() - begun
    assert os.waitpid(child, 0)[1] == 0
    output.rename(output.with_name("uninterrupted"))
    killed = during_save = 0
    for attempt in range(20):
        before, left_behind = saved(), unfinished()
        child = start()
        if attempt % 3 == 0:  # while it begins, loads, or makes its first steps
            wait_for(lambda: saved(before), child, generator.uniform(0, 2) * beginning)
        elif attempt % 3 == 1:  # while it writes a checkpoint
            assert wait_for(lambda: unfinished() not in (None, left_behind), child)
            time.sleep(generator.uniform(0, 0.01))
        else:  # in a step or a measurement
            assert wait_for(lambda: saved(before), child)
            before = saved()
            wait_for(lambda: saved(before), child, generator.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        during_save += unfinished() not in (None, left_behind)
    print(json.dumps({"killed": killed, "during_save": during_save}))
    assert os.waitpid(start(), 0)[1] == 0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "workers"), [("pretrain", 1), ("midtrain", 0), ("sft", 1), ("classify", 1), ("dino", 1)]
)
def test_killed_at_random_moments_it_ends_as_if_never(root, tmp_path, verb, workers):
    output = tmp_path / "run"
    longer = f"tokens={120 * 4 * 96}" if verb in ("pretrain", "midtrain") else "epochs=3"
    arguments = json.dumps(command(root, verb, output, f"workers={workers}", longer))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLER), arguments, str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    kills = json.loads(done.stdout.splitlines()[-1])
    assert kills["killed"] == 20
    assert kills["during_save"] >= 1
    assert logged(output) == logged(tmp_path / "uninterrupted")
    one, other = (load_file(folder / "model.safetensors") for folder in (output, tmp_path / "uninterrupted"))
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("workers", [0, 1])
def test_asked_to_terminate_it_saves_and_goes_on_later(root, tmp_path, workers):
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert main(command(root, "pretrain", whole)) == 0
    arguments = [sys.executable, "-m", "laplacian_heads", *command(root, "pretrain", output, "save_steps=500")]
    arguments.append(f"workers={workers}")
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for line in process.stderr:
        if "'loss'" in line or "'loss'" in process.stdout.readline():
            break
    os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does: the workers too
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    step = last_checkpoint(output)[1]["global_step"]
    assert 0 < step < STEPS
    assert (
        f"{output}: stopped after step {step} of {STEPS}, which is saved; the same command goes on from there." in said
    )
    assert main(command(root, "pretrain", output, "save_steps=500", f"workers={workers}")) == 0
    assert logged(output) == logged(whole)


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft"])
@pytest.mark.parametrize("moment", ["save_model", "evaluate"])
def test_killed_after_the_last_step_it_only_measures_and_writes(root, tmp_path, monkeypatch, verb, moment):
    whole, output = tmp_path / "whole", tmp_path / "run"
    assert main(command(root, verb, whole, "eval_steps=null")) == 0

    def kill(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(stage if moment == "save_model" else stage.StageTrainer, moment, kill)
        assert main(command(root, verb, output, "eval_steps=null")) == 130
    assert last_checkpoint(output)[1]["global_step"] == STEPS
    assert main(command(root, verb, output, "eval_steps=null")) == 0
    one, other = (load_file(folder / "model.safetensors") for folder in (output, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    one, other = (json.loads((folder / "results.json").read_text()) for folder in (output, whole))
    for key in ("loss", "bits_per_byte", "tokens", "steps"):
        assert one[key] == other[key]
    assert one["seconds"] > 0.3 * other["seconds"]  # those of the killed process too
    assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert [entry["epoch"] for entry in log if "loss" in entry] == [(step + 1) / STEPS for step in range(STEPS)]


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "scheduler.pt", "progress.json"])
def test_checkpoint_that_lacks_a_file_is_named(root, tmp_path, monkeypatch, capsys, name):
    output = tmp_path / "run"

    def kill(model):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        with_callback(patched, AtStep(5, kill))
        assert main(command(root, "pretrain", output)) == 130
    (output / "checkpoint-3" / name).unlink()
    assert main(command(root, "pretrain", output)) == 1
    assert f"{output / 'checkpoint-3'} lacks {name}; delete that folder to begin again." in capsys.readouterr().err


@pytest.fixture(scope="module", params=["pretrain", "classify", "dino"])
def interrupted(request, root, tmp_path_factory):
    """A run that was killed after a checkpoint: its verb and folder."""
    output = tmp_path_factory.mktemp("interrupted") / "run"

    def kill(model):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        with_callback(patched, AtStep(5, kill))
        assert main(command(root, request.param, output)) == 130
    return request.param, output


@pytest.mark.parametrize("damage", ["empty", "cut"])
def test_damaged_file_of_a_checkpoint_is_named(root, interrupted, capsys, damage):
    """Each file of it, one after the other; what is there stays as it is."""
    verb, output = interrupted
    checkpoint = output / "checkpoint-3"
    files = sorted(path for path in checkpoint.iterdir() if path.suffix in (".json", ".safetensors", ".pt", ".pth"))
    assert len(files) >= 7
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
        assert main(command(root, verb, output)) == 1
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert said == f"laplacian-heads {verb}: {path} is damaged; delete {checkpoint} to begin again."
        path.write_bytes(content)


def test_checkpoint_without_its_teacher_is_named(root, interrupted, capsys):
    verb, output = interrupted
    if verb == "dino":
        path = output / "checkpoint-3/teacher.safetensors"
        path.rename(output / "aside")
        assert main(command(root, verb, output)) == 1
        assert f"{path.parent} lacks teacher.safetensors; delete that folder to begin again." in capsys.readouterr().err
        (output / "aside").rename(path)


def test_moved_run_goes_on_at_its_new_place(root, tmp_path, monkeypatch):
    def kill(model):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        with_callback(patched, AtStep(5, kill))
        assert main(command(root, "pretrain", tmp_path / "old")) == 130
    (tmp_path / "old").rename(tmp_path / "new")
    assert main(command(root, "pretrain", tmp_path / "new")) == 0
    assert main(command(root, "pretrain", tmp_path / "whole")) == 0
    assert logged(tmp_path / "new") == logged(tmp_path / "whole")


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_output_that_cannot_be_a_folder_is_named(root, tmp_path, capsys, place):
    (tmp_path / "file").write_text("mine")
    output = tmp_path / "file" / ("x" if place == "below a file" else "")
    assert main(command(root, "pretrain", output)) == 1
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("laplacian-heads pretrain: output: ")
    assert (tmp_path / "file").read_text() == "mine"


class AtStep(TrainerCallback):
    def __init__(self, step, do):
        self.step, self.do = step, do

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self.step:
            self.do(model)


def with_callback(monkeypatch, callback):
    for module, name in ((stage, "StageTrainer"), (classify, "ClassifyTrainer"), (dino, "DinoTrainer")):
        trainer = getattr(module, name)

        def with_it(trainer=trainer, **given):
            return trainer(**{**given, "callbacks": [*given["callbacks"], callback]})

        monkeypatch.setattr(module, name, with_it)


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft", "classify", "dino"])
def test_full_disk_leaves_the_checkpoint_before(root, tmp_path, monkeypatch, capsys, verb):
    """A limit on the size of files stands in for the disk, from step 4 on."""
    output, limits = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patched:
        with_callback(patched, AtStep(4, lambda model: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))))
        try:
            assert main(command(root, verb, output)) == 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"laplacian-heads {verb}: ")
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-3"]
    assert main(command(root, verb, output)) == 0
    assert not list(output.glob(".unfinished"))
    assert main(command(root, verb, tmp_path / "whole")) == 0
    assert logged(output) == logged(tmp_path / "whole")


@pytest.mark.parametrize("verb", ["pretrain", "midtrain", "sft", "classify", "dino"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_end_the_run_and_spare_the_checkpoint(
    root, tmp_path, monkeypatch, capsys, verb, value
):
    def spoil(model):
        with torch.no_grad():
            list(model.parameters())[-1].view(-1)[3] = value

    with_callback(monkeypatch, AtStep(4, spoil))
    output = tmp_path / "run"
    assert main(command(root, verb, output)) == 1
    said = capsys.readouterr().err
    assert "no longer finite at step" in said
    assert f"{output / 'checkpoint-3'} is from before" in said
    weights = load_file(output / "checkpoint-3/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_two_runs_in_one_folder_are_refused(root, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run/.lock"):
        assert main(command(root, "pretrain", tmp_path / "run")) == 1
    assert f"another process is training in {tmp_path / 'run'}" in capsys.readouterr().err
    assert main(command(root, "pretrain", tmp_path / "run", "tokens=384")) == 0


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_damage_met_while_training(root, tmp_path, capsys, name, policy):
    """The run ends with the row's name after checkpoints, or goes on, as the recipe says."""
    texts = [f"{i} the quick brown fox jumps over the lazy dog " * 6 for i in range(200)]
    lines = [json.dumps({"text": text}) if name == "a.jsonl" else text * 40 for text in texts]
    content = "\n".join(lines).encode()
    line = 170 if name == "a.jsonl" else 7  # a line of the text file is a document of thousands of tokens
    at = content.index(b"%d the quick" % line)
    (tmp_path / name).write_bytes(content[: at + 8] + b"\xff\xfe" + content[at + 10 :])
    data = [f"data={tmp_path / name}", f"on_bad_data={policy}", "held_out=10", "shuffle_shards=0", "streams=1"]
    status = main(command(root, "pretrain", tmp_path / "run", *data, "tokens=61440", "eval_steps=null"))
    if policy == "stop":
        assert status == 1
        assert f"data: {tmp_path / name} cannot be read: line {line + 1} is not UTF-8 text" in capsys.readouterr().err
        assert (last_checkpoint(tmp_path / "run")[0] is not None) == (name == "a.jsonl")
    else:
        assert status == 0
