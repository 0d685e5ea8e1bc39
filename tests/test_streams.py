"""Streams and rows: every document once an epoch, one order for all numbers of processes, going on from any place."""

import itertools
import json
import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from laplacian_heads.shards import ListShard, Part, first_rows
from laplacian_heads.sources import rows, shards
from laplacian_heads.train.chat import conversations
from laplacian_heads.train.rows import Batches, Rows, collate_packed, collate_padded, held_out_rows, one_each, packed
from laplacian_heads.train.streams import DocumentStream, Stream, dealt_out, text_or_tokens

STREAMS = 8
CONTEXT = 16


def documents(count, start=0):
    """Documents of different lengths, each of which says which one it is."""
    generator = random.Random(start)
    return [f"{i} " + "word " * generator.randrange(40) for i in range(start, start + count)]


@pytest.fixture(params=["parquet", "one row group", "jsonl", "txt", "saved", "memory", "few"])
def source(request, tmp_path):
    """A source and its documents."""
    texts = documents(7 if request.param == "few" else 103)
    if request.param == "memory":
        return [ListShard("memory", [[{"text": text} for text in texts[i : i + 5]] for i in range(0, 103, 5)])], texts
    for half, part in enumerate((texts[: len(texts) // 2], texts[len(texts) // 2 :])):
        path = str(tmp_path / f"part-{half}")
        table = Dataset.from_dict({"text": part, "url": ["x"] * len(part)})
        if request.param in ("parquet", "one row group", "few"):
            table.to_parquet(path + ".parquet", batch_size=8 if request.param == "parquet" else 1000)
        elif request.param == "jsonl":
            table.to_json(path + ".jsonl")
        elif request.param == "saved":
            table.save_to_disk(path)
        else:
            (tmp_path / f"part-{half}.txt").write_text("\n".join(part))
    if request.param == "saved":
        return [shard for half in (0, 1) for shard in shards(str(tmp_path / f"part-{half}"))], texts
    if request.param == "txt":
        texts = [row["text"] for row in rows(str(tmp_path))]
    return shards(str(tmp_path)), texts


def stream(found, number=0, streams=1, window=2, convert=text_or_tokens, skip=False, seed="0"):
    return Stream(
        shards=dealt_out(found, streams, skip),
        number=number,
        streams=streams,
        seed=seed,
        window=window,
        skip=skip,
        convert=convert,
    )


@pytest.mark.parametrize("window", [0, 1, 2, 9])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_every_document_is_in_one_stream_once_an_epoch(source, streams, window):
    found, texts = source
    if len(texts) < streams:
        return
    in_order = []
    for number in range(streams):
        rows = stream(found, number, streams, window).rows()
        both = list(itertools.takewhile(lambda row: row[1] < 2, rows))
        by_epoch = [[value for value, number_of_epoch, _ in both if number_of_epoch == e] for e in (0, 1)]
        assert sorted(by_epoch[0]) == sorted(by_epoch[1]) or window
        in_order.append(by_epoch[0])
    assert sorted(itertools.chain(*in_order)) == sorted(texts)
    if streams == 1 and window == 0:
        assert in_order == [texts]
    if window and len(texts) > 50:
        assert in_order != [texts[i::streams] for i in range(streams)]


@pytest.mark.parametrize("window", [0, 2])
def test_stream_goes_on_from_every_place(source, window):
    found, texts = source
    for number in range(2):
        whole = list(itertools.islice(stream(found, number, 2, window).rows(), 2 * len(texts) + 20))
        for at in (0, 1, 7, len(texts) // 2, len(texts)):
            place = json.loads(json.dumps(whole[at][2]))
            again = stream(found, number, 2, window).rows(place)
            assert list(itertools.islice(again, 12)) == whole[at + 1 : at + 13]


def make_packed(found, tokenizer, window=2):
    def make(number, place):
        return packed(DocumentStream(stream(found, number, STREAMS, window), tokenizer), CONTEXT, place)

    return make


def consumed(make, processes=1, workers=0, batch_size=2, batches=6, places=None, collate=collate_packed):
    """What all processes together take, batch by batch, and the places they stand at."""
    found, places_after = [], {}
    loaders = [
        Batches(Rows(make, STREAMS, process, processes, places), batch_size, workers, collate)
        for process in range(processes)
    ]
    for step in zip(*(itertools.islice(loader, batches) for loader in loaders), strict=True):
        # Row n of the training is row n // processes of process n % processes.
        ids = torch.stack([batch["input_ids"] for batch in step], dim=1)
        found += [tuple(row) for row in ids.flatten(0, 1).tolist()]
    for loader in loaders:
        places_after.update(loader.places)
    return found, places_after


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_order_is_the_same_for_every_number_of_processes_and_workers(tmp_path, tokenizer, processes, workers):
    Dataset.from_dict({"text": documents(100)}).to_parquet(str(tmp_path / "a.parquet"), batch_size=8)
    make = make_packed(shards(str(tmp_path)), tokenizer)
    expected, places = consumed(make, batches=24)
    found, places_found = consumed(make, processes, workers, batches=24 // processes)
    assert found == expected
    assert places_found == places
    # and it goes on as if nothing had happened, with another number of them
    places = {int(number): place for number, place in json.loads(json.dumps(places)).items()}
    further, _ = consumed(make, batches=48)
    rest, _ = consumed(make, processes, workers, batches=24 // processes, places=places)
    assert rest == further[len(expected) :]


def test_packed_rows_are_the_documents_behind_each_other(source, tokenizer):
    """Against the plain way: all documents as one list of tokens, cut."""
    found, texts = source
    tokens = [
        token
        for text in texts * 2
        for token in [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    ]
    stream_of_all = DocumentStream(stream(found, window=0), tokenizer)
    rows = list(itertools.islice(packed(stream_of_all, CONTEXT), (len(tokens) - 1) // CONTEXT))
    for i, row in enumerate(rows):
        assert row["tokens"].tolist() == tokens[i * CONTEXT : (i + 1) * CONTEXT + 1]
    batch = collate_packed(rows[:3])
    assert batch["input_ids"].flatten().tolist() == tokens[: 3 * CONTEXT]
    assert batch["shift_labels"].flatten().tolist() == tokens[1 : 3 * CONTEXT + 1]
    assert torch.equal(batch["labels"], batch["shift_labels"])
    for at in (0, 1, 5, len(rows) - 3):
        place = json.loads(json.dumps(rows[at]["place"]))
        again = packed(DocumentStream(stream(found, window=0), tokenizer), CONTEXT, place)
        assert next(again)["tokens"].tolist() == rows[at + 1]["tokens"].tolist()
        assert next(again)["tokens"].tolist() == rows[at + 2]["tokens"].tolist()
    once = list(packed(DocumentStream(stream(found, window=0), tokenizer), CONTEXT, epochs=1))
    assert len(once) == (len(tokens) // 2 - 1) // CONTEXT


def test_mixture_goes_on_from_every_row(tmp_path):
    """One row for each conversation, also over the end of an epoch of one source and of all."""
    for name, count in (("a", 9), ("b", 4), ("c", 5)):
        lines = [{"messages": [{"role": "user", "content": f"{name}{i}"}]} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    entries = [{"data": str(tmp_path / f"{name}.jsonl"), "repeat": 1 + (name == "b")} for name in "abc"]

    def rows(place=None):
        def value(messages):
            return {"said": messages[0]["content"]}

        return one_each(conversations(entries, value, 0, 1, False, 2)(1), place)

    whole = list(itertools.islice(rows(), 60))
    for at in range(40):
        place = json.loads(json.dumps(whole[at]["place"]))
        assert list(itertools.islice(rows(place), 20)) == whole[at + 1 : at + 21]


def test_documents_can_attend_to_themselves_only():
    tokens = np.array([5, 1, 6, 7, 1, 1, 8, 9])
    batch = collate_packed([{"tokens": tokens}], bos=1)
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2, 0, 0, 1]]


def test_padding_is_no_target_and_not_attended_to():
    given = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [1], "labels": [-100]},
    ]
    batch = collate_padded(given, pad=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [-100, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_parts_of_shards(source):
    found, texts = source
    for count in (0, 1, 3, len(texts)):
        part = first_rows(found, count)
        assert [row["text"] for shard in part for block in range(len(shard.counts)) for row in shard.read(block)] == (
            texts[:count]
        )
    (one,) = first_rows(found[:1], sum(found[0].counts))
    size = sum(one.counts)
    read = [row["text"] for b in range(len(one.counts)) for row in one.read(b)]
    cut = Part(one, 2, size - 1)
    assert [row["text"] for b in range(len(cut.counts)) for row in cut.read(b)] == read[2:-1]


def test_fewer_rows_than_streams_are_refused():
    few = [ListShard("few", [[{"text": "a"}, {"text": "b"}]])]
    with pytest.raises(ValueError, match="streams is 3, allowed for few is at most the number of its rows, 2"):
        dealt_out(few, 3, False)


def test_source_without_a_usable_row_does_not_loop_forever():
    empty = [ListShard("empty", [[{"text": " "}] * 3] * 4)]
    with pytest.raises(ValueError, match="empty has no row that can be used in stream 1 of 4"):
        next(stream(empty, 1, 4).rows())


@pytest.mark.parametrize("context", [4, 400])
def test_held_out_data_must_fill_a_row(tokenizer, context):
    found = [ListShard("one", [[{"text": "a fox and a dog"}]])]
    rows = packed(DocumentStream(stream(found), tokenizer), context, epochs=1)
    if context == 4:
        assert held_out_rows(rows, 2, context)
    else:
        with pytest.raises(ValueError, match="context is 400 tokens"):
            held_out_rows(rows, 2, context)


DAMAGE = {
    "json": (
        "a.jsonl",
        b'{"text": "one"}\n{"text": "tw\n{"text": "three"}\n',
        "a.jsonl cannot be read: line 2 is not JSON",
    ),
    "utf-8": ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}\n{"text": "three"}\n', "line 2 is not UTF-8 text"),
    "list": ("a.jsonl", b'{"text": "one"}\n5\n{"text": "three"}\n', "line 2 is no JSON object, but '5'"),
    "no text": ("a.jsonl", b'{"text": "one"}\n{"body": "x"}\n{"text": "three"}\n', "a.jsonl, row 1"),
    "number": ("a.jsonl", b'{"text": "one"}\n{"text": 2}\n{"text": "three"}\n', "a.jsonl, row 1"),
    "half a pair": (
        "a.jsonl",
        b'{"text": "one"}\n{"text": "\\ud800"}\n{"text": "three"}\n',
        "a character that is none",
    ),
    "empty line": ("a.jsonl", b'{"text": "one"}\n\n{"text": ""}\n{"text": null}\n{"text": "three"}\n', None),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_row_is_named_or_skipped(tmp_path, kind, workers, tokenizer, caplog):
    name, content, said = DAMAGE[kind]
    (tmp_path / name).write_bytes(content)

    def read(skip):
        found = shards(str(tmp_path))

        def make(number, place):
            return packed(DocumentStream(stream(found, window=0, skip=skip), tokenizer), 3, place)

        return next(iter(Batches(Rows(make, 1), 2, workers, collate_packed)))

    if said:
        with pytest.raises(ValueError, match=said):
            read(False)
    text = tokenizer.decode(read(True)["input_ids"].flatten())
    assert text.startswith("<|bos|>one<|bos|>t")
    if said and not workers:
        assert said in caplog.text


def test_lines_longer_than_a_block_are_one_document(tmp_path):
    """And what is counted is there, so that the last rows can be held out."""
    lines = ["a" * 35_000, "b" * 100, "c" * 12_000, "d" * 9_000, "e" * 21_000]
    (tmp_path / "a.txt").write_text("\n".join(lines))
    (shard,) = shards(str(tmp_path))
    texts = [row["text"] for block in range(len(shard.counts)) for row in shard.read(block)]
    assert "".join(texts) == "\n".join(lines)
    assert len(texts) == sum(shard.counts)
    assert all(texts)


def test_long_documents_are_not_encoded_many_at_a_time(tokenizer):
    stream_of_one = stream([ListShard("one", [[{"text": "word " * 200_000}]])])
    documents = DocumentStream(stream_of_one, tokenizer)
    seen = []

    class Encoder:
        def encode_batch_fast(self, texts, add_special_tokens):
            seen.append(len(texts))
            return [type("Encoding", (), {"ids": [1]}) for _ in texts]

    documents.encoder = Encoder()
    next(documents.sequences())
    assert seen == [1]


def test_damaged_parquet_is_named_by_row_group_and_the_rest_read(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"{i} {random.Random(i).random()}" for i in range(40)]
    Dataset.from_dict({"text": texts}).to_parquet(str(path), batch_size=10)
    whole = path.read_bytes()
    at = whole.index(b"15 0.")  # in the second row group, as in its dictionary of values
    path.write_bytes(whole[: at - 40] + b"\xff" * 60 + whole[at + 20 :])
    with pytest.raises(ValueError, match="a.parquet cannot be read: row group 1, rows 10 to 19, of the Parquet file"):
        list(itertools.islice(stream(shards(str(path)), window=0).rows(), 40))
    left = itertools.takewhile(lambda row: row[1] < 1, stream(shards(str(path)), window=0, skip=True).rows())
    assert [value for value, *_ in left] == texts[:10] + texts[20:]
    path.rename(tmp_path / "damaged")
    (tmp_path / "c.parquet").write_bytes(whole)
    (tmp_path / "b.parquet").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="b.parquet cannot be read: its footer"):
        list(itertools.islice(stream(shards(str(tmp_path)), window=0, skip=False).rows(), 90))
    left = itertools.takewhile(lambda row: row[1] < 1, stream(shards(str(tmp_path)), window=2, skip=True).rows())
    assert sorted(value for value, *_ in left) == sorted(texts)


@pytest.mark.slow
def test_document_of_ten_megabytes(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "the quick brown fox " * 500_000}) + '\n{"text": "end"}')
    found = shards(str(tmp_path))
    rows = list(packed(DocumentStream(stream(found, window=0), tokenizer), 2048, epochs=1))
    again = packed(DocumentStream(stream(found, window=0), tokenizer), 2048, rows[-2]["place"])
    assert next(again)["tokens"].tolist() == rows[-1]["tokens"].tolist()
    assert sum(len(row["tokens"]) - 1 for row in rows) > 1_000_000
