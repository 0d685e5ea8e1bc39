"""Conversations: how rows of known datasets become messages, how messages become tokens, and mixtures of sources."""

import re
from collections.abc import Callable, Iterator

import jinja2
from transformers import PreTrainedTokenizerFast

from laplacian_heads import sources
from laplacian_heads.problems import letter_question
from laplacian_heads.shards import Shard, first_rows
from laplacian_heads.train.streams import MixedStream, Stream, dealt_out


def messages_of(row: dict) -> list[dict]:
    """The conversation in a row, in the form of transformers' chat templates.

    Known are rows with `messages`, GSM8K's (its `<< >>` become calls of the calculator), MMLU's and ARC's (both become
    letter choice, worded as in karpathy/nanochat at 01f5f10, `tasks/common.py`).

    Raises:
        ValueError: the row is none of these; the message names its columns.
    """
    try:
        if row.get("messages"):
            return row["messages"]
        if "choices" in row and "answerKey" in row:
            return _letter_choice(row["question"], row["choices"]["text"], row["choices"]["label"], row["answerKey"])
        if "choices" in row and isinstance(row.get("answer"), int):
            letters = "ABCDEFGH"[: len(row["choices"])]
            return _letter_choice(row["question"], row["choices"], letters, letters[row["answer"]])
        if "question" in row and "####" in (row.get("answer") or ""):
            return [{"role": "user", "content": row["question"]}, *_calculations(row["answer"])]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise ValueError(f"data: a row is damaged: {str(row)[:200]} ({error}).") from error
    raise ValueError(
        f"data: a row with the columns {', '.join(row)} is no conversation; known are messages, GSM8K's question and "
        "answer, MMLU's question, choices and answer, and ARC's question, choices and answerKey."
    )


def _letter_choice(question, choices, letters, right):
    content = letter_question(question, choices, letters)
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


def conversations(
    entries: list[dict],
    convert: Callable[[list[dict]], object],
    seed: int,
    window: int,
    skip: bool,
    streams: int = 1,
) -> Callable[[int], MixedStream]:
    """Conversations of several sources, mixed at random and dealt out to streams. The sources are opened once for all.

    Args:
        entries: {"data": a source, "rows": how many of its first rows, all if not given, "repeat": how often each in
            an epoch, 1 if not given}.
        convert: what is made of the messages of each, None for one that is left out.
        seed, window, skip, streams: as for `Stream`.

    Returns:
        The stream of a number.

    Raises:
        ValueError: there is no such source, or it has fewer rows than streams.
    """
    found = [dealt_out(entry_shards(entry), streams, skip) for entry in entries]
    repeats = [entry.get("repeat", 1) for entry in entries]

    def mixed(number: int) -> MixedStream:
        each = [
            Stream(
                shards=shards,
                number=number,
                streams=streams,
                seed=f"{seed} {i}",
                window=window,
                skip=skip,
                convert=lambda row: convert(messages_of(row)),
            )
            for i, shards in enumerate(found)
        ]
        weights = [sum(sum(stream.counts(shard)) for shard in stream.shards) for stream in each]
        return MixedStream(each, weights, repeats)

    return mixed


def entry_shards(entry: dict) -> list[Shard]:
    """The shards of an entry of a mixture."""
    shards = sources.shards(entry["data"])
    return first_rows(shards, entry["rows"]) if entry.get("rows") else shards


def conversation_count(entries: list[dict]) -> int:
    """Conversations in an epoch of a mixture, at most."""
    return sum(sum(sum(shard.counts) for shard in entry_shards(entry)) * entry.get("repeat", 1) for entry in entries)


def check_mixture(name: str, entries: list) -> None:
    """Raise ValueError unless entries is what `conversations` takes; name is the key of the recipe."""
    allowed = "a list of entries {data: source, rows: number, repeat: number}, the last two being optional"
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{name} is {entries!r}, allowed is {allowed}.")
    for entry in entries:
        if not isinstance(entry, dict) or not {"data"} <= set(entry) <= {"data", "rows", "repeat"}:
            raise ValueError(f"{name} has the entry {entry!r}, allowed is {allowed}.")
        if not isinstance(entry["data"], str) or not entry["data"]:
            raise ValueError(f"{name}: data is {entry['data']!r}, allowed is the name of a source.")
        for key in ("rows", "repeat"):
            value = entry.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: {key} is {value!r}, allowed is an integer of at least 1.")
