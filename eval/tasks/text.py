"""Any text as documents of a task."""

import itertools

from datasets import Dataset

from laplacian_heads.sources import documents


def texts(data: str | None = None, documents_at_most: int = 1000, **_) -> dict[str, Dataset]:
    """The first documents of a source, in any of the forms that `sources.shards` reads.

    Raises:
        ValueError: no source is given, or it cannot be read.
    """
    if data is None:
        raise ValueError(
            "bits_per_byte needs the text to score, a file, a folder or a dataset of the Hub: data=TEXT, or "
            """--metadata '{"data": "TEXT"}' of lm-eval's command line."""
        )
    return {
        "test": Dataset.from_list([{"text": text} for text in itertools.islice(documents(data), documents_at_most)])
    }
