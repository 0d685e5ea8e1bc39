"""Shards of data: files and what is like them, as blocks of rows that can each be read without those before it."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
from datasets.utils.file_utils import xopen

# The columns that anything here reads. Those of a table that has others too are not fetched.
COLUMNS = ("text", "messages", "question", "choices", "answer", "answerKey", "input_ids")
TABLE_ROWS = 1000  # in a block of a table that has no blocks of its own
TEXT_BYTES = 10_000  # in a block of a text file, which is one document
LINES_BYTES = 1_000_000  # in a block of a file with a row in each line


class Shard:
    """Rows in blocks, a block being what has to be read at once to get at one of its rows.

    Attributes:
        name: what messages call it.
        counts: rows in each block, at most: an empty line, say, is counted and is no row.
    """

    name: str
    counts: list[int]

    def read(self, block: int) -> list[dict | ValueError]:
        """The rows of a block; in the place of one that cannot be read, the error that names it.

        Raises:
            ValueError: the block as a whole cannot be read; the message names it.
        """
        raise NotImplementedError


class ListShard(Shard):
    """Blocks of rows in memory."""

    def __init__(self, name: str, blocks: list[list[dict | ValueError]]):
        self.name, self.blocks = name, blocks
        self.counts = [len(block) for block in blocks]

    def read(self, block):
        return self.blocks[block]


class GeneratedShard(Shard):
    """Rows that a function makes, block by block."""

    def __init__(self, name: str, counts: list[int], make: Callable[[int], list[dict]]):
        self.name, self.counts, self.read = name, counts, make


class TableShard(Shard):
    """A table of the datasets library, mapped into memory.

    Args:
        load: returns it, when it is first needed.
    """

    def __init__(self, name: str, load: Callable[[], datasets.Dataset]):
        self.name, self.load = name, load

    @functools.cached_property
    def table(self):
        try:
            table = self.load()
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"data: {self.name} cannot be read: {_line(error)}") from error
        return table.select_columns(_wanted(table.column_names))

    @functools.cached_property
    def counts(self):
        full, rest = divmod(len(self.table), TABLE_ROWS)
        return [TABLE_ROWS] * full + [rest] * bool(rest)

    def read(self, block):
        columns = self.table[block * TABLE_ROWS : (block + 1) * TABLE_ROWS]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class ParquetShard(Shard):
    """A Parquet file, local or on the Hub, whose blocks are its row groups."""

    def __init__(self, name: str):
        self.name = name

    @property
    def file(self):
        with self._named("its footer"):
            return _parquet_file(self.name, os.getpid())

    @functools.cached_property
    def counts(self):
        footer = self.file.metadata
        return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]

    def read(self, block):
        with self._named(f"row group {block}, rows {sum(self.counts[:block])} to {sum(self.counts[: block + 1]) - 1},"):
            columns = _wanted(self.file.schema_arrow.names)
            return self.file.read_row_group(block, columns=columns, use_threads=False).to_pylist()

    def _named(self, part: str):
        return _Damage(f"data: {self.name} cannot be read: {part} of the Parquet file is damaged")


# Few at a time are in use. Each process has its own: the place in an open file is shared with forked ones.
@functools.lru_cache(maxsize=64)
def _parquet_file(name: str, process: int) -> pyarrow.parquet.ParquetFile:
    # xopen reads hf:// addresses, and tries again where a connection fails
    return pyarrow.parquet.ParquetFile(xopen(name, "rb"))


class _Damage:
    """Turns what pyarrow raises about the content of a file, and not about the way to it, into a ValueError."""

    def __init__(self, message: str):
        self.message = message

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        # An error of the system or the network has a number or a class of its own.
        if isinstance(error, pyarrow.ArrowException) or (kind is OSError and error.errno is None):
            raise ValueError(f"{self.message} ({_line(error)}).") from error
        return False


class FileShard(Shard):
    """A local file of lines. A block is the lines that begin in its range of bytes."""

    size: int  # bytes in a block

    def __init__(self, name: str):
        self.name = name

    @functools.cached_property
    def blocks(self) -> list[int]:
        """The ranges in which a line begins, by their number."""
        found, size = {0}, Path(self.name).stat().st_size
        with open(self.name, "rb") as file:
            for place in range(0, size, 2**20):
                begins = np.flatnonzero(np.frombuffer(file.read(2**20), np.uint8) == ord("\n")) + (place + 1)
                found.update((begins[begins < size] // self.size).tolist())
        return sorted(found)

    def lines(self, block: int) -> Iterator[tuple[int, bytes]]:
        """The lines of a block with the bytes before each."""
        start = self.blocks[block] * self.size
        stop = start + self.size
        with open(self.name, "rb") as file:
            if start:  # the line that reaches into this block, if any, belongs to the one before
                file.seek(start - 1)
                file.readline()
            while (place := file.tell()) < stop and (line := file.readline()):
                yield place, line

    def error(self, place: int, reason: str) -> ValueError:
        """The error that names the line at a byte."""
        with open(self.name, "rb") as file:
            line, left = 1, place
            while left:
                piece = file.read(min(left, 2**20))
                line, left = line + piece.count(b"\n"), left - len(piece)
        return ValueError(f"data: {self.name} cannot be read: line {line} {reason}.")


class TextShard(FileShard):
    """A text file; each block is a document of whole lines."""

    size = TEXT_BYTES

    @property
    def counts(self):
        return [1] * len(self.blocks)

    def read(self, block):
        pieces = []
        for place, line in self.lines(block):
            try:
                pieces.append(line.decode("utf-8-sig" if place == 0 else "utf-8"))
            except UnicodeDecodeError as error:
                return [self.error(place, f"is not UTF-8 text ({error.reason})")]
            if b"\0" in line:
                return [self.error(place, "is not text: it holds a zero byte")]
        return [{"text": "".join(pieces)}] if pieces else []


class JsonLinesShard(FileShard):
    """A file with a JSON object in each line, or a list, which is taken for the messages of a conversation."""

    size = LINES_BYTES

    @functools.cached_property
    def counts(self):
        return [sum(1 for _ in self.lines(block)) for block in range(len(self.blocks))]

    def read(self, block):
        rows = []
        for place, line in self.lines(block):
            try:
                row = json.loads(line.decode("utf-8-sig" if place == 0 else "utf-8")) if line.strip() else {}
            except ValueError as error:
                kind = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else "is not JSON"
                rows.append(self.error(place, f"{kind} ({_line(error)})"))
                continue
            if isinstance(row, list):
                row = {"messages": row}
            if not isinstance(row, dict):
                rows.append(self.error(place, f"is no JSON object, but {str(row)[:50]!r}"))
            elif row:
                rows.append(row)
        return rows


class Part(Shard):
    """Some rows of a shard, one after the other.

    Args:
        first, stop: the first row, and the one after the last.
    """

    def __init__(self, shard: Shard, first: int, stop: int):
        self.shard, self.name = shard, shard.name
        self.ranges = []  # block, its first row, the one after its last
        before = 0
        for block, count in enumerate(shard.counts):
            low, high = max(first - before, 0), min(stop - before, count)
            if low < high:
                self.ranges.append((block, low, high))
            before += count
        self.counts = [high - low for _, low, high in self.ranges]

    def read(self, block):
        block, low, high = self.ranges[block]
        return self.shard.read(block)[low:high]


def first_rows(shards: list[Shard], count: int) -> list[Shard]:
    """The first rows of shards, of which no more are opened than have them."""
    found = []
    for shard in shards:
        size = sum(shard.counts)
        if size >= count:
            return [*found, Part(shard, 0, count)] if count else found
        found.append(shard)
        count -= size
    return found


def _wanted(columns: list[str]) -> list[str]:
    """The columns to read: those that are known or, if none is, all of them for a message to name."""
    return [name for name in columns if name in COLUMNS] or list(columns)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
