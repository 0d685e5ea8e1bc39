"""Conversations: how rows of known datasets become messages, how messages become tokens, and mixtures of sources."""

import itertools
import random
import re
from collections.abc import Iterator

import jinja2
from transformers import PreTrainedTokenizerFast

from laplacian_heads import sources


def messages_of(row: dict) -> list[dict]:
    """The conversation in a row, in the form of transformers' chat templates.

    Known are rows with `messages`, GSM8K's (its `<< >>` become calls of the calculator), MMLU's and ARC's (both become
    letter choice, worded as in karpathy/nanochat at 01f5f10, `tasks/common.py`).

    Raises:
        ValueError: the row is none of these; the message names its columns.
    """
    if row.get("messages"):
        return row["messages"]
    if "choices" in row and "answerKey" in row:
        return _letter_choice(row["question"], row["choices"]["text"], row["choices"]["label"], row["answerKey"])
    if "choices" in row and isinstance(row.get("answer"), int):
        letters = "ABCDEFGH"[: len(row["choices"])]
        return _letter_choice(row["question"], row["choices"], letters, letters[row["answer"]])
    if "question" in row and "####" in (row.get("answer") or ""):
        return [{"role": "user", "content": row["question"]}, *_calculations(row["answer"])]
    raise ValueError(
        f"data: a row with the columns {', '.join(row)} is no conversation; known are messages, GSM8K's question and "
        "answer, MMLU's question, choices and answer, and ARC's question, choices and answerKey."
    )


def _letter_choice(question, choices, letters, right):
    lines = [f"- {choice}={letter}" for choice, letter in zip(choices, letters, strict=True)]
    content = "\n".join(
        [f"Multiple Choice question: {question}", *lines, "", "Respond only with the letter of the correct answer."]
    )
    return [{"role": "user", "content": content}, {"role": "assistant", "content": right}]


def _calculations(answer: str) -> Iterator[dict]:
    """GSM8K's answer: text, `<<expression=result>>`, text, ..."""
    text, *rest = re.split(r"<<([^>]*)>>", answer)
    for calculation, after in zip(rest[::2], rest[1::2], strict=True):
        expression, _, result = calculation.rpartition("=")
        call = {"type": "function", "function": {"name": "python", "arguments": {"code": expression}}}
        yield {"role": "assistant", "content": text, "tool_calls": [call]}
        yield {"role": "tool", "content": result}
        text = after
    yield {"role": "assistant", "content": text}


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[dict], max_tokens: int) -> dict[str, list[int]]:
    """Tokens of a conversation as the tokenizer's chat template renders it, cut after max_tokens.

    Returns:
        input_ids, and labels, equal to them where the assistant speaks, calls or ends, else -100.

    Raises:
        ValueError: the template does not know such a conversation.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False}
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"data: the chat template cannot render {str(messages)[:200]}: {error}") from error
    ids, mask = rendered["input_ids"][:max_tokens], rendered["assistant_masks"][:max_tokens]
    return {"input_ids": ids, "labels": [token if spoken else -100 for token, spoken in zip(ids, mask, strict=True)]}


def mixture(entries: list[dict], seed: int) -> Iterator[list[dict]]:
    """Conversations of several sources, mixed at random: each source in its own order, none kept in memory.

    Args:
        entries: {"data": a source, "rows": how many of its rows at most, "repeat": how often each, 1 if not given}.

    Raises:
        ValueError: a row is no conversation, or a source has none.
    """
    generator = random.Random(seed)
    left = [entry["rows"] * entry.get("repeat", 1) for entry in entries]
    streams = [_repeated(entry) for entry in entries]
    while any(left):
        (chosen,) = generator.choices(range(len(left)), weights=left)
        row = next(streams[chosen], None)
        if row is None:  # the source has fewer rows than the recipe allows
            left[chosen] = 0
            continue
        left[chosen] -= 1
        yield messages_of(row)


def _repeated(entry: dict) -> Iterator[dict]:
    for _ in range(entry.get("repeat", 1)):
        empty = True
        for row in itertools.islice(sources.rows(entry["data"]), entry["rows"]):
            empty = False
            yield row
        if empty:
            raise ValueError(f"data: {entry['data']} is empty.")


def check_mixture(name: str, entries: list) -> None:
    """Raise ValueError unless entries is what `mixture` takes; name is the key of the recipe."""
    allowed = "a list of entries {data: source, rows: number, repeat: number}"
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{name} is {entries!r}, allowed is {allowed}.")
    for entry in entries:
        if not isinstance(entry, dict) or not {"data", "rows"} <= set(entry) <= {"data", "rows", "repeat"}:
            raise ValueError(f"{name} has the entry {entry!r}, allowed is {allowed}, repeat being optional.")
        if not isinstance(entry["data"], str) or not entry["data"]:
            raise ValueError(f"{name}: data is {entry['data']!r}, allowed is the name of a source.")
        for key in ("rows", "repeat"):
            value = entry.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {key} is {value!r}, allowed is an integer of at least 1.")
