"""A corpus tokenised once: what is in it, going on after a kill, and training from it."""

import json

import pytest
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file
from transformers import AutoTokenizer

from laplacian_heads.__main__ import main
from laplacian_heads.train import prepare

TEXTS = [f"{i} foxes <|bos|> and {i * i} dogs, é😀\n" * (1 + i % 7) for i in range(250)]
SMALL = ["vocab_size=300", "hidden_size=32", "num_hidden_layers=1", "num_attention_heads=2", "laplacian_heads=1"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepare")
    (root / "text").mkdir()
    for i, half in enumerate((TEXTS[:150], TEXTS[150:])):
        Dataset.from_dict({"text": half}).to_parquet(str(root / f"text/{i}.parquet"), batch_size=20)
    tokenizer = ["tokenizer", f"data={root / 'text'}", "vocab_size=300", "context=64"]
    assert main([*tokenizer, f"output={root / 'tokenizer'}"]) == 0
    return root


def command(root, output, *overrides):
    return ["prepare", f"data={root / 'text'}", f"tokenizer={root / 'tokenizer'}", f"output={output}", *overrides]


@pytest.mark.parametrize("processes", [1, 2])
def test_tokens_are_those_of_the_tokenizer(root, tmp_path, monkeypatch, processes):
    monkeypatch.setattr(prepare, "ROWS", 60)  # several files
    assert main(command(root, tmp_path / "tokens", f"processes={processes}")) == 0
    table = load_from_disk(str(tmp_path / "tokens"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokens")
    assert len(list((tmp_path / "tokens").glob("*.arrow"))) == 5
    expected = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in TEXTS]
    assert table["input_ids"][:] == expected
    assert table.features["input_ids"].feature.dtype == "uint16"


def test_interrupted_it_goes_on_with_the_missing_files(root, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "ROWS", 60)
    output, encode = tmp_path / "tokens", prepare._encode
    seen = []

    def cut(*job):
        seen.append(job)
        if len(seen) == 3:
            raise KeyboardInterrupt
        encode(*job)

    monkeypatch.setattr(prepare, "_encode", cut)
    assert main(command(root, output, "processes=1")) == 130
    before = {path: path.stat().st_mtime_ns for path in output.glob("*.arrow")}
    assert len(before) == 2
    assert not (output / "state.json").exists()
    (output / "data-00002-of-00005.arrow.part").write_bytes(b"cut off")
    assert main(command(root, output, "processes=1")) == 0
    assert len(seen) == 6
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(load_from_disk(str(output))) == len(TEXTS)
    assert not list(output.glob("*.part"))
    assert main(command(root, output, "processes=1")) == 0
    assert len(seen) == 6
    assert main(command(root, output, "processes=1", "on_bad_data=skip")) == 1


def test_training_on_tokens_is_training_on_text(root, tmp_path):
    """Also what is held out is the same: the last shard."""
    assert main(command(root, tmp_path / "tokens", "processes=1")) == 0
    for name, data in (("text", root / "text"), ("tokens", tmp_path / "tokens")):
        given = [f"data={data}", f"tokenizer={root / 'tokenizer'}", f"output={tmp_path / name}-run", *SMALL]
        given += ["context=64", "streams=1", "rows_per_step=2", "batch_size=2", "shuffle_shards=0", "eval_rows=8"]
        assert main(["pretrain", *given, "tokens=1280", "logging_steps=1"]) == 0
    one, other = (load_file(tmp_path / f"{name}-run/model.safetensors") for name in ("text", "tokens"))
    assert all((one[key] == other[key]).all() for key in other)
    results = [json.loads((tmp_path / f"{name}-run/results.json").read_text()) for name in ("text", "tokens")]
    assert results[0]["bits_per_byte"] == results[1]["bits_per_byte"]


def test_tokens_of_another_tokenizer_are_refused(root, tmp_path, capsys):
    assert main(command(root, tmp_path / "tokens", "processes=1")) == 0
    other = ["tokenizer", f"data={root / 'text'}", "vocab_size=290", "context=64", f"output={tmp_path / 'other'}"]
    assert main(other) == 0
    given = [f"data={tmp_path / 'tokens'}", f"tokenizer={tmp_path / 'other'}", f"output={tmp_path / 'run'}", *SMALL]
    assert main(["pretrain", *given, "context=64"]) == 1
    assert "was prepared with another tokenizer" in capsys.readouterr().err
    file = next((tmp_path / "tokens").glob("*.arrow"))
    assert main(["pretrain", *given, f"data={file}", "context=64"]) == 1
    assert "was prepared with another tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    # nor can they be tokenised again, or be taken where nothing says whose they are
    again = ["prepare", f"data={tmp_path / 'tokens'}", f"tokenizer={tmp_path / 'other'}", "processes=1"]
    assert main([*again, f"output={tmp_path / 'again'}"]) == 1
    assert "a row is tokens already, allowed is text" in capsys.readouterr().err
    file.rename(tmp_path / "alone.arrow")
    assert main(["pretrain", *given, f"data={tmp_path / 'alone.arrow'}", "context=64", "streams=1"]) == 1
    assert "allowed is less than the tokenizer's 290" in capsys.readouterr().err


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_damaged_row_is_named_or_skipped(root, tmp_path, capfd, caplog, processes, policy):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": tw\n{"text": "three"}\n')
    given = [f"data={tmp_path / 'a.jsonl'}", f"processes={processes}", f"on_bad_data={policy}"]
    status = main(command(root, tmp_path / "tokens", *given))
    assert "a.jsonl cannot be read: line 2 is not JSON" in capfd.readouterr().err + caplog.text
    assert status == (policy == "stop")
    if policy == "skip":
        assert len(load_from_disk(str(tmp_path / "tokens"))) == 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("processes=0", "processes is 0, allowed is at least 1"),
        ("on_bad_data=ignore", "on_bad_data is 'ignore', allowed is stop or skip"),
        ("data=nowhere.txt", "there is no file or folder nowhere.txt"),
        ("tokenizer=./nowhere", "There is no folder ./nowhere"),
    ],
)
def test_mistakes_are_named_before_any_work(root, tmp_path, capsys, override, said):
    assert main(command(root, tmp_path / "tokens", override)) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()
