"""Every form of `data=`, its refusals, and the generated problems."""

import json
import re

import pytest
from datasets import Dataset, DatasetDict

from laplacian_heads.problems import ASKED, KINDS, NOT_ASKED, SPLITS, problems
from laplacian_heads.sources import documents, rows

TEXTS = ["one fox", "two foxes\nand a dog", "three"]


def test_text_files_are_documents_of_whole_lines(tmp_path):
    text = "".join(f"{i} a line with ümlauts\r\n" for i in range(2000))
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    found = list(documents(str(path)))
    assert len(found) > 3
    assert "".join(found) == text
    assert all(piece.endswith("\n") for piece in found)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved", "dict", "mixed"])
def test_tables_and_folders(tmp_path, kind):
    table = Dataset.from_dict({"text": TEXTS, "url": list("abc")})
    path = tmp_path / "data"
    path.mkdir()
    (path / "README.md").write_text("not data")
    if kind == "saved":
        table.save_to_disk(str(path))
    elif kind == "dict":
        DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(path))
    elif kind == "arrow":
        table.save_to_disk(str(tmp_path / "saved"))
        next((tmp_path / "saved").glob("*.arrow")).rename(path / "a.arrow")
    elif kind == "mixed":
        table.select([0, 1]).to_json(str(path / "b.jsonl"))
        (path / "c.txt").write_text(TEXTS[2])
    else:
        write = {"jsonl": table.to_json, "parquet": table.to_parquet}[kind]
        write(str(path / f"d.{kind}"))
    assert sorted(documents(str(path))) == sorted(TEXTS)
    assert sorted(documents([str(path), str(path)])) == sorted(TEXTS * 2)


def test_conversations_count_as_text():
    text = next(documents("generated:copying"))
    assert text.startswith("Repeat: ")
    assert len(text.split("\n")) == 2


def test_python_prose_is_english_the_same_each_time_and_large_enough():
    found = list(documents("python_prose"))
    assert found == list(documents("python_prose"))
    assert sum(map(len, found)) > 1_000_000
    assert sum(" the " in text for text in found) > len(found) / 2


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "data is ''"),
        ("nowhere.txt", "there is no file or folder nowhere.txt"),
        ("a/b/c", "there is no file or folder a/b/c"),
        ("generated:algebra", "data is generated:algebra, allowed is generated:kind"),
        ("generated:choice:dev", "split train or test"),
        ("owner/name:a:b:c", "allowed is owner/name"),
        ("owner/name", "owner/name cannot be read from the Hub"),
    ],
)
def test_no_such_source(data, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        list(rows(data))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe\x00", "a.txt cannot be read: line 1 is not UTF-8 text"),
        ("a.txt", b"a \0 byte", "a.txt cannot be read: line 1 is not text: it holds a zero byte"),
        ("a.png", b"\x89PNG", "holds no file that can be read"),
        ("a.jsonl", json.dumps({"body": "x"}).encode(), "has no column 'text', its columns are body"),
        ("a.jsonl", b'{"text": "whole"}\n{"text": "cu', "a.jsonl cannot be read"),
        ("a.jsonl", b'{"text": "\xff"}', "a.jsonl cannot be read"),
        ("a.jsonl", b'{"text": 5}', "a row has '5' in the column 'text', allowed is text"),
        ("a.parquet", b"PAR1 cut off", "a.parquet cannot be read"),
        ("a.arrow", b"cut off", "a.arrow cannot be read"),
        *((f"a.{kind}", b"", "holds no file that can be read") for kind in ("txt", "jsonl", "parquet", "arrow")),
    ],
)
@pytest.mark.parametrize("whole", ["file", "folder"])
def test_file_that_cannot_be_read(tmp_path, name, content, said, whole):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(said)):
        list(documents(str(path if whole == "file" else tmp_path)))


def test_files_of_different_columns_lie_in_one_folder(tmp_path):
    """Rows without text, and files without rows, give no document."""
    (tmp_path / "a.jsonl").write_text('{"text": null, "n": 1}\n{"text": "one", "n": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"n": "3", "text": "two"}\n')
    turns = [{"role": "user", "content": "three"}, {"role": "assistant", "content": None}]
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": turns}))
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "e").mkdir()
    (tmp_path / "e/F.TXT").write_text("four")
    assert list(documents(str(tmp_path))) == ["one", "two", "three\n", "four"]


def test_datasets_of_the_hub_by_config_and_split(hub, fresh_process):
    """Streamed from a Hub; one that is not there, or lacks the config or the split, is named."""
    code = """
        from datasets import Dataset
        from laplacian_heads.sources import documents
        for config in ("small", "large"):
            for split in ("train", "test"):
                Dataset.from_dict({"text": [f"{config} {split}"]}).push_to_hub("tester/texts", config, split=split)
        print(list(documents(["tester/texts:small", "tester/texts:large:test"])))
        for data in ("tester/nothing", "tester/texts:huge", "tester/texts:small:dev"):
            try:
                list(documents(data))
            except ValueError as error:
                assert f"data: {data} cannot be read from the Hub" in str(error), error
            else:
                raise AssertionError(data)
    """
    assert "['small train', 'large test']" in fresh_process(code, can_import=True, env=hub.env)


def test_no_connection_is_no_traceback(monkeypatch):
    """The HTTP client's errors are neither OSError nor ValueError. The true one comes after half a minute of tries."""

    def refuse(*arguments, **keywords):
        raise Exception("Connection refused")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(ValueError, match="data: tester/texts cannot be read from the Hub: Connection refused"):
        list(rows("tester/texts"))


@pytest.mark.parametrize("kind", KINDS)
def test_problems_are_the_same_each_time_and_no_test_is_trained_on(kind):
    counts = {"spelling": {"train": 300, "test": 50}}.get(kind, {"train": 3000, "test": 300})
    found = {split: list(problems(kind, split, counts[split])) for split in SPLITS}
    assert found["train"] == list(problems(kind, "train", counts["train"]))
    asked = {split: {_asked(kind, turns[0]["content"]) for turns in found[split]} for split in SPLITS}
    assert asked["train"]
    assert asked["test"]
    assert not asked["train"] & asked["test"]


def _asked(kind, question):
    """What a question asks for, however it is worded, read from its text."""
    if kind == "arithmetic":
        a, b = re.findall(r"\d+", question)
        sign = re.search(r"[-+*]|plus|minus|times", question)[0]
        return a, {"plus": "+", "minus": "-", "times": "*"}.get(sign, sign), b
    if kind == "choice":
        return frozenset(re.findall(r"- (\w+)=", question))
    return question


def test_problems_are_answered_right():
    signs = {"+": int.__add__, "plus": int.__add__, "-": int.__sub__, "minus": int.__sub__}
    signs |= {"*": int.__mul__, "times": int.__mul__}
    for question, call, output, answer in problems("arithmetic", "test", 200):
        a, b = map(int, re.findall(r"\d+", question["content"]))
        result = str(signs[re.search(r"[-+*]|plus|minus|times", question["content"])[0]](a, b))
        assert output["content"] == answer["content"] == result
        assert call["tool_calls"][0]["function"]["arguments"]["code"].startswith(str(a))
    for question, answer in problems("choice", "test", 200):
        choices = {letter: word for word, letter in re.findall(r"- (\w+)=(\w)", question["content"])}
        category = re.match(r"Which of these is (.*)\?", question["content"])[1]
        assert choices.pop(answer["content"]) in ASKED[category]
        assert all(any(word in words for words in NOT_ASKED) for word in choices.values())
    for question, answer in problems("spelling", "train", 50):
        assert answer["content"].replace(",", "") in question["content"]
    for question, answer in problems("copying", "test", 50):
        assert question["content"] == f"Repeat: {answer['content']}"
