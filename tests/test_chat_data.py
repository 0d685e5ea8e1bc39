"""Conversations, mixtures and rows against slow implementations written from nanochat's description."""

import itertools
import json
import re

import pytest
import torch
from conftest import ROOT
from datasets import Dataset
from transformers import AutoTokenizer

from laplacian_heads.problems import KINDS, problems
from laplacian_heads.train.chat import check_mixture, encode, messages_of, mixture
from laplacian_heads.train.data import PackedRows, encode_documents, held_out_rows, pack
from laplacian_heads.train.tokenizer import SPECIAL_TOKENS, token_bytes, train_tokenizer

GSM8K = ROOT.parent / "shared/hub/datasets/openai/gsm8k"
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "6*7"}}}


@pytest.fixture(scope="module")
def chat_tokenizer():
    texts = [turn["content"] for kind in KINDS for turns in problems(kind, "train", 50) for turn in turns]
    return train_tokenizer(texts, 400, context=64)


def rendered(tokenizer, messages):
    """Token by token, as nanochat builds a conversation: the tokens, and whether the assistant's are learnt from."""
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}

    def text(content):
        return tokenizer(content, add_special_tokens=False)["input_ids"]

    pairs = [(special["<|bos|>"], 0)]
    messages = [dict(message) for message in messages]
    if messages[0]["role"] == "system":
        messages[1]["content"] = messages[0]["content"] + "\n\n" + messages[1]["content"]
        messages = messages[1:]
    inside = False
    for message in messages:
        content = text(message["content"])
        if message["role"] == "user":
            ids = [special["<|user_start|>"], *content, special["<|user_end|>"]]
            pairs += [(token, 0) for token in ids]
        elif message["role"] == "tool":
            ids = [special["<|output_start|>"], *content, special["<|output_end|>"]]
            pairs += [(token, 0) for token in ids]
        else:
            if not inside:
                pairs.append((special["<|assistant_start|>"], 0))
            pairs += [(token, 1) for token in content]
            inside = bool(message.get("tool_calls"))
            for call in message.get("tool_calls") or []:
                code = text(call["function"]["arguments"]["code"])
                ids = [special["<|python_start|>"], *code, special["<|python_end|>"]]
                pairs += [(token, 1) for token in ids]
            if not inside:
                pairs.append((special["<|assistant_end|>"], 1))
    return pairs


def conversations():
    yield from (turns for kind in KINDS for turns in problems(kind, "test", 5))
    question = {"role": "user", "content": "How many?"}
    yield [{"role": "system", "content": "Be brief."}, question, {"role": "assistant", "content": "Two."}]
    yield [
        *[
            question,
            {"role": "assistant", "content": "It is ", "tool_calls": [CALL]},
            {"role": "tool", "content": "42"},
        ],
        *[{"role": "assistant", "content": "42, so "}, question, {"role": "assistant", "content": "two."}],
    ]
    if GSM8K.exists():
        rows = Dataset.from_parquet([str(path) for path in sorted(GSM8K.rglob("*.parquet"))][:1])
        yield from (messages_of(row) for row in itertools.islice(rows, 40))


def test_conversations_are_rendered_as_nanochat_does(chat_tokenizer, tmp_path):
    chat_tokenizer.save_pretrained(tmp_path)
    for tokenizer in (chat_tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        for messages in conversations():
            expected = rendered(tokenizer, messages)
            found = encode(tokenizer, messages, None)
            assert found["input_ids"] == [token for token, _ in expected]
            assert found["labels"] == [token if spoken else -100 for token, spoken in expected]
            cut = encode(tokenizer, messages, 9)
            assert cut == {name: ids[:9] for name, ids in found.items()}


def test_prompt_ends_where_the_assistant_begins(chat_tokenizer):
    turns = next(problems("arithmetic", "test", 1))
    whole = encode(chat_tokenizer, turns, None)["input_ids"]
    for said in (1, 3):  # after the question, and after the calculator's result
        prompt = chat_tokenizer.apply_chat_template(turns[:said], add_generation_prompt=True, return_dict=True)
        assert prompt["input_ids"] == whole[: len(prompt["input_ids"])]


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_no_text_passes_for_a_special_token(chat_tokenizer, token):
    plain = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    forged = [{"role": "user", "content": f"a{token}b"}, {"role": "assistant", "content": f"c{token}"}]
    special = set(chat_tokenizer.all_special_ids)

    def count(messages):
        return [token for token in encode(chat_tokenizer, messages, None)["input_ids"] if token in special]

    assert count(forged) == count(plain)
    (ids,) = encode_documents(chat_tokenizer, [f"a {token} b"])
    assert [i for i in ids if i in special] == [chat_tokenizer.bos_token_id]
    assert chat_tokenizer.decode(ids[1:]) == f"a {token} b"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": [{"type": "image"}]},
        {"role": "user", "content": 5},
        {"from": "human", "value": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": {"q": "x"}}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "python", "arguments": '{"code": 1}'}}],
        },
        "x",
    ],
)
def test_conversation_of_another_form_is_named(chat_tokenizer, message):
    with pytest.raises(ValueError, match="the chat template cannot render"):
        encode(chat_tokenizer, [message], None)


def test_known_rows_become_conversations():
    mmlu = {"question": "Why?", "choices": ["a", "b", "c", "d"], "answer": 2, "subject": "x"}
    arc = {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"}
    gsm8k = {"question": "How many?", "answer": "2*3 = <<2*3=6>>6 apples.\n#### 6"}
    end = "\n\nRespond only with the letter of the correct answer."
    assert messages_of(mmlu) == [
        {"role": "user", "content": "Multiple Choice question: Why?\n- a=A\n- b=B\n- c=C\n- d=D" + end},
        {"role": "assistant", "content": "C"},
    ]
    assert messages_of(arc) == [
        {"role": "user", "content": "Multiple Choice question: Why?\n- a=1\n- b=2" + end},
        {"role": "assistant", "content": "2"},
    ]
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "2*3"}}}
    assert messages_of(gsm8k) == [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "2*3 = ", "tool_calls": [call]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "6 apples.\n#### 6"},
    ]
    with pytest.raises(ValueError, match="columns text is no conversation"):
        messages_of({"text": "x"})


def test_mixture_takes_what_the_recipe_says(tmp_path):
    for name, count in (("a", 5), ("b", 3)):
        lines = [{"messages": [{"role": "user", "content": f"{name}{i}"}]} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    entries = [
        {"data": str(tmp_path / "a.jsonl"), "rows": 4, "repeat": 2},
        {"data": str(tmp_path / "b.jsonl"), "rows": 100},
    ]

    def drawn(seed):
        return [messages[0]["content"] for messages in mixture(entries, seed)]

    assert sorted(drawn(0)) == sorted(["a0", "a1", "a2", "a3"] * 2 + ["b0", "b1", "b2"])
    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "data is [], allowed is a list of entries"),
        ([{"data": "x"}], "allowed is a list of entries"),
        ([{"data": "x", "rows": 1, "weight": 2}], "allowed is a list of entries"),
        ([{"data": "", "rows": 1}], "data is '', allowed"),
        ([{"data": "x", "rows": 0}], "rows is 0, allowed"),
        ([{"data": "x", "rows": True}], "rows is True, allowed"),
        ([{"data": "x", "rows": 1, "repeat": 1.5}], "repeat is 1.5, allowed"),
    ],
)
def test_mixture_of_another_form_is_refused(entries, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check_mixture("data", entries)


def test_rows_are_the_stream_with_its_next_tokens():
    sequences = [list(range(7)), [70], list(range(100, 111))]
    stream = [token for sequence in sequences for token in sequence]
    found = list(pack(sequences, 4))
    assert torch.cat([row["input_ids"] for row in found]).tolist() == stream[: len(found) * 4]
    assert torch.cat([row["shift_labels"] for row in found]).tolist() == stream[1 : len(found) * 4 + 1]
    assert len(found) == (len(stream) - 1) // 4
    again = list(itertools.islice(PackedRows(lambda: sequences, 4), 14))
    assert torch.cat([row["input_ids"] for row in again]).tolist() == (stream * 3)[:56]


def test_special_tokens_are_no_targets_of_bits_per_byte(chat_tokenizer):
    texts = ["a fox", "the dog and the fox"]
    size_of = token_bytes(chat_tokenizer)
    found = held_out_rows(encode_documents(chat_tokenizer, texts), 4, 10, size_of)
    for row in found:
        special = row["labels"] == chat_tokenizer.bos_token_id
        assert torch.equal(row["shift_labels"], row["labels"].masked_fill(special, -100))
    assert any((row["shift_labels"] == -100).any() for row in found)
    with pytest.raises(ValueError, match="context is 400 tokens"):
        held_out_rows(encode_documents(chat_tokenizer, texts), 400, 10, size_of)


def test_tokenizer_survives_saving_and_any_bytes(chat_tokenizer, tmp_path):
    chat_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("naïve 😀 \r\n\t  x", "".join(map(chr, range(1, 300))), "1234567"):
        ids = loaded(text)["input_ids"]
        assert ids == chat_tokenizer(text)["input_ids"]
        assert ids[0] == loaded.bos_token_id
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert sum(token_bytes(loaded)[i] for i in ids) == len(text.encode())
    special = loaded.convert_tokens_to_ids(SPECIAL_TOKENS)
    assert special == list(range(len(loaded) - len(SPECIAL_TOKENS), len(loaded)))
