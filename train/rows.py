"""Rows of tokens to train on, in an order that no number of processes changes, and batches of them."""

import collections
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch

from laplacian_heads.train.streams import MixedStream

IGNORED = -100


def packed(stream, context: int, place: dict | None = None, epochs: int | None = None) -> Iterator[dict]:
    """Put the sequences of a stream behind each other and cut them into rows, as nanochat does.

    Args:
        stream: a DocumentStream, or a MixedStream of token lists.
        place: the "place" of the row after which to go on.

    Yields:
        tokens, (context + 1,): the inputs and, one later, the targets, so that every token but the first is a target
        once; place, from which the next row can be made. What does not fill a row at the end is dropped.
    """
    place = place or {"sequences": None, "token": 0}
    tokens, start = [], 0
    marks = collections.deque()  # where in tokens a sequence begins, and the place before it
    before, cut = place["sequences"], place["token"]
    for sequence, after in stream.sequences(before, epochs):
        marks.append((len(tokens) - cut, before))
        tokens += sequence[cut:] if cut else sequence
        before, cut = after, 0
        while len(tokens) - start > context:
            row = np.array(tokens[start : start + context + 1], dtype=np.int32)
            start += context
            while len(marks) > 1 and marks[1][0] <= start:
                marks.popleft()
            at, mark = marks[0]
            yield {"tokens": row, "place": {"sequences": mark, "token": start - at}}
        tokens = tokens[start:]
        marks = collections.deque((at - start, mark) for at, mark in marks)
        start = 0


def one_each(stream: MixedStream, place: dict | None = None, epochs: int | None = None) -> Iterator[dict]:
    """A row for each conversation: what the stream gives, and the place from which the next row can be made."""
    for value, after in stream.sequences(place, epochs):
        yield {**value, "place": after}


class Rows(torch.utils.data.IterableDataset):
    """Rows of several streams without end: row n is the next row of stream n % streams.

    Each process and each of its workers reads streams of its own, and the order is the same for any number of them.

    Args:
        make: (stream number, place or None) -> rows with a "place".
        streams: how many there are.
        process, processes: which process this is, and of how many.
        places: where each stream goes on, by its number.
    """

    def __init__(self, make: Callable, streams: int, process: int = 0, processes: int = 1, places: dict | None = None):
        self.make, self.streams, self.process, self.processes = make, streams, process, processes
        self.places = places or {}

    def __iter__(self) -> Iterator[dict | Exception]:
        """Rows with their "stream", or the error that ends them, which is raised where it can be caught."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        numbers = range(self.process + worker * self.processes, self.streams, workers * self.processes)
        try:
            streams = [(number, self.make(number, self.places.get(number))) for number in numbers]
            for number, rows in itertools.cycle(streams):
                yield {**next(rows), "stream": number}
        except ValueError as error:
            yield ValueError(str(error))
        except OSError as error:
            yield OSError(str(error))


class Batches:
    """Batches of rows, and where each stream stands after those that were taken.

    Attributes:
        places: where each stream goes on, by its number.
        waited: seconds in which a batch was waited for.
    """

    def __init__(self, rows: Rows, batch_size: int, workers: int, collate: Callable[[list[dict]], dict]):
        self.places = dict(rows.places)
        self.waited = 0.0
        self.batch_size, self.collate = batch_size, collate
        self.loader = torch.utils.data.DataLoader(
            rows,
            batch_size=None,  # workers give single rows, in turn, so that their number does not change the order
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=2 * batch_size if workers else None,
            worker_init_fn=begin_worker,
            generator=torch.Generator(),  # of its own: the random state of the run stays as it is
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows = iter(self.loader)
        while True:
            started = time.perf_counter()
            batch = []
            for row in itertools.islice(rows, self.batch_size):
                if isinstance(row, Exception):
                    raise row
                self.places[row.pop("stream")] = row.pop("place")
                batch.append(row)
            batch = self.collate(batch)
            self.waited += time.perf_counter() - started
            yield batch


def _as_it_is(row):
    return row


def begin_worker(worker: int) -> None:
    """What a process that reads for a training process does first."""
    # The process that reads from it decides when it ends, and asks for tokens one batch at a time.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def collate_packed(rows: Iterable[dict], bos: int | None = None) -> dict[str, torch.Tensor]:
    """A batch of packed rows.

    Args:
        bos: the token that begins a document, if documents are not to attend to each other.

    Returns:
        input_ids and shift_labels, each (batch, context); labels, equal to shift_labels, tell Trainer that there is a
        loss; position_ids, which begin again with every document, if bos is given.
    """
    tokens = torch.from_numpy(np.stack([row["tokens"] for row in rows])).long()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch = {"input_ids": inputs, "labels": targets, "shift_labels": targets}
    if bos is not None:
        columns = torch.arange(inputs.shape[1]).expand_as(inputs)
        batch["position_ids"] = columns - torch.where(inputs == bos, columns, 0).cummax(1).values
    return batch


def collate_padded(rows: Iterable[dict], pad: int) -> dict[str, torch.Tensor]:
    """A batch of conversations, padded on the right: input_ids, labels and attention_mask, (batch, longest)."""
    padding = {"input_ids": pad, "labels": IGNORED}
    columns = {name: [torch.tensor(row[name]) for row in rows] for name in padding}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence(column, batch_first=True, padding_value=padding[name])
        for name, column in columns.items()
    }
    lengths = torch.tensor([len(ids) for ids in columns["input_ids"]])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def held_out_rows(rows: Iterable[dict], count: int, context: int) -> list[dict]:
    """The first rows of those, to measure on.

    Raises:
        ValueError: there is none.
    """
    rows = list(itertools.islice(rows, count))
    if not rows:
        raise ValueError(f"context is {context} tokens, but the held-out data has fewer; hold out more of it.")
    return rows
