"""Streams: the rows of shards, dealt out, mixed and encoded, from any place on."""

import dataclasses
import itertools
import logging
import random
from collections.abc import Callable, Iterator

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from laplacian_heads.shards import ListShard, Shard
from laplacian_heads.sources import text_of

logger = logging.getLogger(__name__)

# Documents encoded at a time, enough for the tokenizer's threads, and characters after which they are not more.
BATCH, BATCH_CHARACTERS = 64, 500_000


@dataclasses.dataclass(kw_only=True)
class Stream:
    """One of several streams that the rows of shards are dealt out to, without end.

    In each epoch every row goes to one stream. The shards of a window have their blocks mixed, and each block its rows;
    the blocks are dealt out in turn, so a stream reads whole blocks. Everything follows from the seed.

    Attributes:
        shards: what to read; see `dealt_out` for few blocks.
        number, streams: which stream it is, and of how many.
        seed: of the order.
        window: shards whose blocks are mixed; 0 keeps the order of the files.
        skip: whether a row that cannot be used is left out with a warning, or ends the run.
        convert: makes of a row what the stream gives, None for nothing; raises ValueError for a row it cannot use.
    """

    shards: list[Shard]
    number: int = 0
    streams: int = 1
    seed: str
    window: int
    skip: bool
    convert: Callable[[dict], object]

    def rows(self, place: dict | None = None) -> Iterator[tuple[object, int, dict]]:
        """What is made of the rows after a place, each with its epoch and the place after it, from which to go on.

        Raises:
            ValueError: a row cannot be used, or none of a whole epoch can.
        """
        at = place or _beginning(0)
        for epoch in itertools.count(at["epoch"]):
            whole, found = at == _beginning(epoch), False
            for value, after in self._epoch(at):
                found = True
                yield value, epoch, after
            if whole and not found:
                part = f" in stream {self.number} of {self.streams}" if self.streams > 1 else ""
                raise ValueError(
                    f"data: {self.shards[0].name} has no row that can be used{part}: all are empty, damaged, or have "
                    "no target within the context."
                )
            at = _beginning(epoch + 1)

    def _epoch(self, at: dict) -> Iterator[tuple[object, dict]]:
        epoch, dealt, first_block, first_row = at["epoch"], at["dealt"], at["block"], at["row"]
        shards = self._mixed(self.shards, epoch)
        size = self.window or 1
        for window in range(at["window"], -(-len(shards) // size)):
            blocks = [
                (shard, block)
                for shard in shards[window * size : (window + 1) * size]
                for block in range(len(self.counts(shard)))
            ]
            blocks = self._mixed(blocks, epoch, window)
            for i, (shard, block) in enumerate(blocks[first_block:], start=first_block):
                if (dealt + i) % self.streams != self.number:
                    continue
                rows = self._mixed(list(enumerate(self._read(shard, block))), epoch, window, i)
                for r, (row_number, row) in enumerate(rows[first_row:], start=first_row + 1):
                    value = self._converted(row, shard, block, row_number)
                    if value is not None:
                        yield value, {"epoch": epoch, "window": window, "dealt": dealt, "block": i, "row": r}
                first_row = 0
            dealt += len(blocks)
            first_block = first_row = 0

    def _mixed(self, items: list, *what: int) -> list:
        if self.window:
            items = list(items)
            random.Random(f"{self.seed} {what}").shuffle(items)
        return items

    def counts(self, shard: Shard) -> list[int]:
        """Rows in each block of a shard; none if it cannot be opened and is to be skipped."""
        try:
            return shard.counts
        except ValueError as error:
            self._unusable(error)
            return []

    def _read(self, shard: Shard, block: int) -> list:
        try:
            return shard.read(block)
        except ValueError as error:
            return [error]

    def _converted(self, row, shard, block, row_number):
        try:
            if isinstance(row, ValueError):
                raise row
            return self.convert(row)
        except ValueError as error:
            if error is not row:
                row_number += sum(shard.counts[:block])
                error = ValueError(f"{str(error).rstrip('.')} ({shard.name}, row {row_number}).")
            self._unusable(error)
            return None

    def _unusable(self, error: ValueError) -> None:
        if not self.skip:
            raise error
        logger.warning("skipped: %s", error)


def _beginning(epoch: int) -> dict:
    """The place at which an epoch begins."""
    return {"epoch": epoch, "window": 0, "dealt": 0, "block": 0, "row": 0}


def dealt_out(shards: list[Shard], streams: int, skip: bool) -> list[Shard]:
    """Shards for so many streams: where they have fewer blocks than that, their rows are dealt out one by one.

    Raises:
        ValueError: there are fewer rows than streams.
    """
    reader = Stream(shards=shards, seed="", window=0, skip=skip, convert=lambda row: row)
    blocks = 0
    for shard in shards:
        blocks += len(reader.counts(shard))
        if blocks >= streams:
            return shards
    rows = [row for shard in shards for block in range(len(reader.counts(shard))) for row in reader._read(shard, block)]
    name = shards[0].name if shards else "a source"
    if len(rows) < streams:
        raise ValueError(f"streams is {streams}, allowed for {name} is at most the number of its rows, {len(rows)}.")
    return [ListShard(name, [rows[i::streams] for i in range(streams)])]


def text_or_tokens(row: dict, vocab_size: int | None = None) -> str | list[int] | None:
    """The text of a row, or the tokens of one that `prepare` wrote; None if it is empty.

    Args:
        vocab_size: entries of the tokenizer the tokens are to be of; None takes no tokens.

    Raises:
        ValueError: it has no text that can be encoded, or tokens that are not of this tokenizer.
    """
    tokens = row.get("input_ids")
    if tokens is None:
        text = text_of(row)
        return text if text.strip() else None
    if vocab_size is None:
        raise ValueError("data: a row is tokens already, allowed is text.")
    if max(tokens, default=0) >= vocab_size:
        raise ValueError(f"data: a row has the token {max(tokens)}, allowed is less than the tokenizer's {vocab_size}.")
    return tokens


class DocumentStream:
    """The tokens of documents, each after a BOS token; special tokens in the text are taken as text.

    Args:
        stream: gives texts, or lists of tokens that are taken as they are.
    """

    def __init__(self, stream: Stream, tokenizer: PreTrainedTokenizerFast):
        self.stream = stream
        self.bos = tokenizer.bos_token_id
        self.encoder = plain_encoder(tokenizer)

    def sequences(self, place: dict | None = None, epochs: int | None = None) -> Iterator[tuple[list[int], dict]]:
        """The documents after a place, each with the place after it."""
        rows = self.stream.rows(place)
        if epochs is not None:
            rows = itertools.takewhile(lambda row: row[1] < epochs, rows)
        while batch := _batch(rows):
            texts = [value for value, *_ in batch if isinstance(value, str)]
            encoded = iter(self.encoder.encode_batch_fast(texts, add_special_tokens=False))
            for value, _, after in batch:
                yield [self.bos, *next(encoded).ids] if isinstance(value, str) else value, after


def _batch(rows: Iterator[tuple]) -> list[tuple]:
    batch, length = [], 0
    for row in itertools.islice(rows, BATCH):
        batch.append(row)
        length += len(row[0])
        if length > BATCH_CHARACTERS:
            break
    return batch


def plain_encoder(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """The tokenizer's own encoder, for text in which special tokens mean nothing."""
    encoder = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


class MixedStream:
    """Conversations of several streams, mixed at random, an epoch being every row of each so often as is wanted.

    Args:
        streams: one for each source.
        weights: rows that each gives in an epoch, all its streams together.
        repeats: epochs of each in one of the mixture.
    """

    def __init__(self, streams: list[Stream], weights: list[int], repeats: list[int]):
        self.streams, self.weights, self.repeats = streams, weights, repeats

    def sequences(self, place: dict | None = None, epochs: int | None = None) -> Iterator[tuple[object, dict]]:
        """What the streams give after a place, each with the place after it."""
        of = self.streams[0]
        place = place or {
            "epoch": 0,
            "draws": 0,
            "drawn": [0] * len(self.streams),
            "places": [None] * len(self.streams),
        }
        epoch, draws, drawn, places = place["epoch"], place["draws"], list(place["drawn"]), list(place["places"])
        rows = [stream.rows(at) for stream, at in zip(self.streams, places, strict=True)]
        waiting = [next(each) for each in rows]
        while epochs is None or epoch < epochs:
            left = [
                max(weight * repeat / of.streams - count, 1) if following[1] < (epoch + 1) * repeat else 0
                for weight, repeat, count, following in zip(self.weights, self.repeats, drawn, waiting, strict=True)
            ]
            if not any(left):
                epoch, drawn = epoch + 1, [0] * len(self.streams)
                continue
            (i,) = random.Random(f"{of.seed} {of.number} {draws}").choices(range(len(left)), weights=left)
            value, _, places[i] = waiting[i]
            draws += 1
            drawn[i] += 1
            after = {"epoch": epoch, "draws": draws, "drawn": list(drawn), "places": list(places)}
            waiting[i] = next(rows[i])
            yield value, after
