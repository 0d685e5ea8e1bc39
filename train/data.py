"""Rows of tokens to train on: a stream of documents or conversations, cut into rows."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerFast

BATCH = 64  # documents encoded at a time: enough for the tokenizer's threads


def encode_documents(tokenizer: PreTrainedTokenizerFast, documents: Iterable[str]) -> Iterator[list[int]]:
    """The tokens of each document after a BOS token, special tokens in the text taken as text."""
    documents = iter(documents)
    while batch := list(itertools.islice(documents, BATCH)):
        encoded = tokenizer(
            batch, add_special_tokens=False, return_attention_mask=False, verbose=False, split_special_tokens=True
        )
        for ids in encoded["input_ids"]:
            yield [tokenizer.bos_token_id, *ids]


def pack(sequences: Iterable[list[int]], context: int) -> Iterator[dict[str, torch.Tensor]]:
    """Put sequences of tokens behind each other and cut the stream into rows, as nanochat does.

    Yields:
        input_ids and shift_labels, each (context,): a piece of the stream, and the same piece one token later; labels,
        equal to shift_labels, tell Trainer that there is a loss. Every token of the stream but the first is a target
        once; what does not fill a row at the end is dropped.
    """
    stream = []
    for sequence in sequences:
        stream += sequence
        start = 0
        while len(stream) - start > context:
            piece = torch.tensor(stream[start : start + context + 1])
            yield {"input_ids": piece[:-1], "labels": piece[1:], "shift_labels": piece[1:]}
            start += context
        stream = stream[start:]


class PackedRows(torch.utils.data.IterableDataset):
    """Rows of `pack` without end: the sequences are read again whenever they are used up.

    Args:
        sequences: returns a new iterator over the sequences of tokens.
        context: tokens in a row.
    """

    def __init__(self, sequences: Callable[[], Iterable[list[int]]], context: int):
        self.sequences = sequences
        self.context = context

    def __iter__(self):
        again = itertools.chain.from_iterable(self.sequences() for _ in itertools.count())
        return pack(again, self.context)


def held_out_rows(
    sequences: Iterable[list[int]], context: int, count: int, token_bytes: list[int]
) -> list[dict[str, torch.Tensor]]:
    """The first rows of `pack` for measuring bits per byte: special tokens, which stand for no byte, are no targets.

    Raises:
        ValueError: the sequences do not fill one row.
    """
    rows = list(itertools.islice(pack(sequences, context), count))
    if not rows:
        raise ValueError(f"context is {context} tokens, but the held-out data has fewer; hold out more of it.")
    no_bytes = torch.tensor(token_bytes) == 0
    for row in rows:
        row["shift_labels"] = row["shift_labels"].masked_fill(no_bytes[row["shift_labels"]], -100)
    return rows
