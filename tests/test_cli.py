"""The command line and the demo under bad input: one sentence, a non-zero exit, nothing lost."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM, recipes
from laplacian_heads.__main__ import VERBS, main
from laplacian_heads.eval.trigram import Trigram
from laplacian_heads.study import _last_checkpoint
from laplacian_heads.train.data import pack_rows, python_prose, split_documents
from laplacian_heads.train.optimizer import adamw
from laplacian_heads.train.tokenizer import SPECIAL_TOKENS, token_bytes, train_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and 1234 other foxes don't. " * 400
SMALL = [
    "vocab_size=300",
    "num_hidden_layers=1",
    "hidden_size=32",
    "num_attention_heads=2",
    "laplacian_heads=[0, 1]",
    "context=32",
    "batch_size=4",
    "tokens=4096",
    "save_steps=4",
]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def demo(folder, *overrides, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "laplacian_heads", "demo", *SMALL, f"output={folder / 'out'}", *overrides],
        capture_output=True,
        text=True,
        cwd=folder,
        **kwargs,
    )


def refusal(capsys, *arguments):
    """The one line a refused command prints, after its exit status was checked."""
    assert main(list(arguments)) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no file or folder"),
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xff\xfe\x00\x01 binary", "is not UTF-8 text"),
        (b"text with a \0 byte", "zero byte"),
        (b"too short", "context is 32 tokens, but the training text has only"),
    ],
)
def test_bad_data_is_refused_in_one_sentence(capsys, tmp_path, content, said):
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_bytes(content)
    line = refusal(capsys, "demo", *SMALL, f"data={path}", f"output={tmp_path / 'out'}")
    assert said in line
    assert not (tmp_path / "out").exists()


def test_unreadable_data_is_refused_in_one_sentence(capsys, tmp_path, text_file, monkeypatch):
    def denied(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", denied)  # the tests may run as root, for whom no file is unreadable
    line = refusal(capsys, "demo", *SMALL, f"data={text_file}", f"output={tmp_path / 'out'}")
    assert "Permission denied" in line
    assert str(text_file) in line


def test_pipe_is_no_text(capsys, tmp_path):
    """Reading it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    assert "there is no file or folder" in refusal(capsys, "demo", f"data={tmp_path / 'pipe'}")


def test_folder_without_text_is_refused(capsys, tmp_path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "holds no .txt or .md file" in refusal(capsys, "demo", f"data={tmp_path}", f"output={tmp_path / 'out'}")


def test_context_longer_than_the_held_out_text(capsys, tmp_path, text_file):
    line = refusal(capsys, "demo", *SMALL, f"data={text_file}", f"output={tmp_path / 'out'}", "held_out=0.0001")
    assert "context is 32 tokens, but the held-out text has only" in line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("vocabsize=300", "knows no key 'vocabsize'; the nearest is 'vocab_size'"),
        ("vocab_size=many", "vocab_size is 'many', allowed is int"),
        ("vocab_size=true", "vocab_size is True, allowed is int"),
        ("vocab_size=100", "vocab_size is 100, allowed is at least 266"),
        ("context=1", "context is 1, allowed is at least 2"),
        ("tokens=0", "tokens is 0, allowed is at least 1"),
        ("batch_size=100000", "batch_size is 100000, allowed is 1 to 128"),
        ("held_out=1.0", "held_out is 1.0, allowed is a number between 0 and 1"),
        ("num_attention_heads=3", "num_attention_heads is 3, allowed are divisors of hidden_size 32"),
        ("laplacian_heads=[0, 5]", "laplacian_heads: the count is 5 in layer 0"),
        ("laplacian_heads=1", "laplacian_heads is 1, allowed is list"),
        ("laplacian_heads=[]", "laplacian_heads is []"),
        ("laplacian_heads=[1, 1]", "laplacian_heads is [1, 1]"),
        ("matrix_lr=.nan", "matrix_lr is nan, allowed is a finite number"),
        ("decay_share=2", "decay_share is 2.0, allowed is a number from 0 to 1"),
        ("hidden_size=6", "head_dim is 3, allowed are even numbers"),
        ("num_attention_heads=0", "num_attention_heads is 0, allowed is at least 1"),
        ("data=''", "data is '', allowed is the path"),
        ("output=''", "output is '', allowed is the path"),
        ("data=[unclosed", "is not a YAML value"),
        ("nonsense", "is not of the form key=value"),
    ],
)
def test_wrong_key_or_value_names_what_is_allowed(capsys, tmp_path, text_file, override, said):
    line = refusal(capsys, "demo", "demo", *SMALL, f"data={text_file}", f"output={tmp_path / 'out'}", override)
    assert said in line


def test_unknown_recipe_names_the_nearest(capsys):
    assert "the nearest is 'demo'" in refusal(capsys, "demo", "demos")


@pytest.mark.parametrize("content", ["a: [", "- a list", "", "\0"])
def test_file_that_is_no_recipe(capsys, tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    assert str(path) in refusal(capsys, "demo", str(path))


def test_missing_extra_is_named_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in [name for name in sys.modules if name.startswith(("laplacian_heads.study", "laplacian_heads.train"))]:
        monkeypatch.delitem(sys.modules, name)
    line = refusal(capsys, "demo")
    assert "demo needs datasets: pip install 'laplacian-heads[train]'" in line


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_key_of_the_recipe(capsys, verb):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert recipes.path_of(verb).read_text().strip() in capsys.readouterr().out


def test_dry_run_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--dry-run"]) == 0
    assert "3,096,576 parameters" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_demo_on_the_users_own_text(tmp_path, text_file):
    """It ends with a report and folders that load; called again it trains nothing, and overwrites no other recipe."""
    first = demo(tmp_path, f"data={text_file}")
    assert first.returncode == 0, first.stderr
    report = (tmp_path / "out/report.md").read_text()
    assert report in first.stdout
    for heads in (0, 1):
        folder = tmp_path / f"out/laplacian_heads_{heads}"
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.laplacian_heads == heads
        assert model.config.vocab_size >= len(AutoTokenizer.from_pretrained(folder))
        assert not list(folder.glob("*.bin"))

    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}
    again = demo(tmp_path, f"data={text_file}")
    assert again.returncode == 0, again.stderr
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}

    other = demo(tmp_path, f"data={text_file}", "seed=1")
    assert other.returncode == 1
    assert "holds the results of another recipe" in other.stderr
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}


@pytest.mark.parametrize("damage", [("demo.json", "{}"), ("model.safetensors", "cut"), ("config.json", "")])
def test_damaged_model_is_named_and_left_alone(capsys, tmp_path, text_file, damage):
    file, content = damage
    assert main(["demo", *SMALL, "laplacian_heads=[1]", f"data={text_file}", f"output={tmp_path / 'out'}"]) == 0
    path = tmp_path / "out/laplacian_heads_1" / file
    path.write_text(content)
    capsys.readouterr()
    assert main(["demo", *SMALL, "laplacian_heads=[1]", f"data={text_file}", f"output={tmp_path / 'out'}"]) == 1
    assert f"{path.parent} is damaged; move it away" in capsys.readouterr().err
    assert path.read_text() == content


def test_diverged_model_is_not_accepted(capsys, tmp_path, text_file):
    arguments = [*SMALL, "laplacian_heads=[1]", f"data={text_file}", f"output={tmp_path / 'out'}", "matrix_lr=1e38"]
    assert main(["demo", *arguments]) == 1
    assert "give lower learning rates" in capsys.readouterr().err
    assert not (tmp_path / "out/laplacian_heads_1").exists()


def test_context_shorter_than_the_prompts(tmp_path, text_file):
    """And a home folder in the path of the output."""
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = demo(tmp_path, f"data={text_file}", "context=4", "laplacian_heads=[1]", "output=~/home", env=environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "home/report.md").exists()


def test_killed_demo_goes_on_at_its_checkpoint(tmp_path, text_file):
    command = [sys.executable, "-m", "laplacian_heads", "demo", *SMALL, "tokens=12800", f"data={text_file}"]
    process = subprocess.Popen(
        [*command, f"output={tmp_path / 'out'}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    checkpoints = tmp_path / "out/laplacian_heads_0.checkpoints"
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = demo(tmp_path, "tokens=12800", f"data={text_file}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/report.md").exists()
    assert not checkpoints.exists()


def test_full_disk_is_one_sentence_and_loses_nothing(tmp_path, text_file):
    """A limit on the size of a file stands in for the disk: the first model is finished, the second cannot be."""
    assert demo(tmp_path, f"data={text_file}", "laplacian_heads=[0]").returncode == 0
    kept = tmp_path / "out/laplacian_heads_0/model.safetensors"
    before = kept.read_bytes()
    (tmp_path / "out/recipe.yaml").unlink()  # the same output folder for a second recipe
    done = demo(
        tmp_path, f"data={text_file}", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("laplacian-heads demo: ")
    assert "too large" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert kept.read_bytes() == before
    done = demo(tmp_path, f"data={text_file}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        Exception("No space left on device (os error 28)"),
        OSError(28, "No space left on device", "model.safetensors"),
    ],
    ids=["torch", "rust", "python"],
)
def test_full_disk_is_named_whichever_library_writes(capsys, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("laplacian_heads.study.demo", fail)
    assert "the disk is probably full" in refusal(capsys, "demo")


def test_an_error_that_is_no_users_mistake_keeps_its_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("a bug")

    monkeypatch.setattr("laplacian_heads.study.demo", fail)
    with pytest.raises(TypeError):
        main(["demo"])


def test_checkpoint_cut_off_while_written_is_passed_over(tmp_path):
    for step, state in ((4, '{"global_step": 4}'), (8, '{"glob'), (12, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if state:
            (folder / "trainer_state.json").write_text(state)
    assert _last_checkpoint(tmp_path) == (str(tmp_path / "checkpoint-4"), 4)


def test_python_prose_is_english_and_large_enough_for_the_demo():
    documents = python_prose()
    assert sum(map(len, documents)) > 1_000_000
    assert "the" in documents[0]


def test_split_keeps_every_document_once():
    documents = [str(i) for i in range(50)]
    train, held_out = split_documents(documents, 0.1, seed=0)
    assert sorted(train + held_out) == sorted(documents)
    assert len(held_out) == 5
    assert ["".join(part) for part in zip(*split_documents(["abcdefghij"], 0.2, 0), strict=True)] == ["abcdefghij"]


def test_rows_are_the_stream_of_documents_after_bos():
    tokenizer = train_tokenizer([TEXT], 300, context=8)
    rows = pack_rows(tokenizer, ["the fox", "a dog"], 4, "training")
    stream = []
    for document in ("the fox", "a dog"):
        stream += [tokenizer.bos_token_id, *tokenizer(document, add_special_tokens=False)["input_ids"]]
    whole = len(stream) // 4 * 4
    assert torch.cat(list(rows["input_ids"])).tolist() == stream[:whole]
    assert torch.equal(rows["labels"][0], rows["input_ids"][0])


def test_tokenizer_survives_saving_and_any_bytes(tmp_path):
    tokenizer = train_tokenizer([TEXT], 400, context=64)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    for text in (TEXT[:200], "naïve 😀 \r\n\t  x", "".join(map(chr, range(1, 300)))):
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        assert ids[0] == loaded.bos_token_id
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert np.asarray(token_bytes(loaded))[ids].sum() == len(text.encode())
    ids = loaded.convert_tokens_to_ids(SPECIAL_TOKENS)
    assert ids == list(range(len(loaded) - len(SPECIAL_TOKENS), len(loaded)))


def test_every_parameter_has_its_learning_rate():
    model = LaplaceGPTForCausalLM(LaplaceGPTConfig.from_depth(1, vocab_size=300))
    optimizer = adamw(model, matrix_lr=1.0, embedding_lr=2.0, head_lr=3.0, weight_decay=0.5)
    rates = {p: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    expected = {"model.embed_tokens.weight": (2.0, 0.0), "lm_head.weight": (3.0, 0.0)}
    for name, parameter in model.named_parameters():
        assert rates[parameter] == expected.get(name, (1.0, 0.5))


def test_trigram_is_a_distribution_and_learns():
    tokens = np.random.default_rng(0).integers(7, size=300)
    model = Trigram(tokens, vocab_size=9)
    for context in ((), (3,), (3, 4), (8, 8), tuple(tokens[5:7].tolist())):
        assert sum(model.probability(token, context) for token in range(9)) == pytest.approx(1)
    repeated = Trigram(np.tile([1, 2, 3], 200), vocab_size=9)
    assert repeated.nats([1, 2, 3, 1, 2, 3]) < 0.1 * Trigram(tokens, 9).nats([1, 2, 3, 1, 2, 3])


def test_recipe_is_kept_beside_the_results(tmp_path, text_file):
    assert demo(tmp_path, f"data={text_file}", "laplacian_heads=[1]").returncode == 0
    speed = json.loads((tmp_path / "out/laplacian_heads_1/demo.json").read_text())["tokens_per_second"]
    assert speed > 0
    assert os.path.exists(tmp_path / "out/recipe.yaml")
