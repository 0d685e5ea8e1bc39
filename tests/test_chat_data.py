"""Conversations, mixtures and rows against slow implementations written from nanochat's description."""

import itertools
import json
import re

import pytest
from conftest import ROOT
from datasets import Dataset
from transformers import AutoTokenizer

from laplacian_heads.problems import KINDS, problems
from laplacian_heads.train.chat import check_mixture, conversation_count, conversations, encode, messages_of
from laplacian_heads.train.streams import plain_encoder
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


def known_conversations():
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
        for messages in known_conversations():
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
    ids = plain_encoder(chat_tokenizer).encode_batch_fast([f"a {token} b"], add_special_tokens=False)[0].ids
    assert not special.intersection(ids)
    assert chat_tokenizer.decode(ids) == f"a {token} b"


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
    for damaged in ({**mmlu, "answer": 9}, {**arc, "choices": None}, {**arc, "choices": {"text": ["a"], "label": []}}):
        with pytest.raises(ValueError, match="a row is damaged"):
            messages_of(damaged)
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

    def drawn(seed, streams=1, epochs=1):
        mixed = [conversations(entries, first_words, seed, 1, False, streams)(i) for i in range(streams)]
        return [value for stream in mixed for value, _ in stream.sequences(epochs=epochs)]

    epoch = sorted(["a0", "a1", "a2", "a3"] * 2 + ["b0", "b1", "b2"])
    assert sorted(drawn(0)) == epoch
    assert sorted(drawn(0, streams=3)) == epoch
    assert drawn(0) == drawn(0)
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1
    first, second = drawn(0, epochs=2)[:11], drawn(0, epochs=2)[11:]
    assert sorted(first) == sorted(second) == epoch
    assert first != second
    assert conversation_count(entries) == 11
    assert conversation_count([{"data": str(tmp_path / "b.jsonl")}]) == 3


def first_words(messages):
    return messages[0]["content"]


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "data is [], allowed is a list of entries"),
        ([{"rows": 1}], "allowed is a list of entries"),
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
