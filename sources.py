"""Where data comes from: what `data=` may be, as shards whose rows can be read from anywhere."""

import ast
import functools
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets

from laplacian_heads.problems import BLOCK, KINDS, SPLITS, problems
from laplacian_heads.shards import (
    TEXT_BYTES,
    GeneratedShard,
    JsonLinesShard,
    ListShard,
    ParquetShard,
    Shard,
    TableShard,
    TextShard,
)

BUILT_IN = ("python_prose", "generated")
GENERATED_BLOCKS = 1000
SHARDS = {
    ".txt": TextShard,
    ".md": TextShard,
    ".jsonl": JsonLinesShard,
    ".parquet": ParquetShard,
    ".arrow": lambda name: TableShard(name, functools.partial(datasets.Dataset.from_file, name)),
}


def shards(data: str | list[str]) -> list[Shard]:
    """The shards of a source, or of several, one after the other.

    Args:
        data: a file (.txt, .md, .jsonl, .parquet, .arrow), a folder of such files (but for README.md), a folder
            written by `Dataset.save_to_disk`, a dataset of the Hub as "owner/name[@revision]", "owner/name:config" or
            "owner/name:config:split" (split "train" if not given, config "default" or the only one), "python_prose"
            (English prose that comes with Python), or "generated:kind[:split]" (see `problems`).

    Returns:
        Shards whose rows are dicts. Text has the column "text", a conversation the column "messages".

    Raises:
        ValueError: there is no such source; the message names it.
    """
    if isinstance(data, list):
        return [shard for source in data for shard in shards(source)]
    name, *rest = data.split(":")
    if not data.strip():
        raise ValueError(f"data is {data!r}, allowed is the name of a source.")
    if data == "python_prose":
        return [ListShard(data, [[{"text": text}] for text in _python_texts()])]
    if name == "generated":
        return [_generated(data, *rest)]
    path = Path(data).expanduser()
    if path.is_file() or path.is_dir():
        return _local(path)
    if path.is_absolute() or name.count("/") != 1 or name.startswith((".", "~", "/")) or name.endswith("/"):
        raise ValueError(
            f"data: there is no file or folder {data}; allowed are one, a dataset of the Hub as owner/name[:config"
            f"[:split]], and {' and '.join(BUILT_IN)}."
        )
    return _hub(data, name, *rest)


def listed(data: str | list[str]) -> list[str]:
    """One source or several as a list."""
    return [data] if isinstance(data, str) else data


def rows(data: str | list[str]) -> Iterator[dict]:
    """The rows of a source, or of several, in their order.

    Raises:
        ValueError: no such source, or a row that cannot be read; the message names it.
    """
    return (row for _, row in _named_rows(data))


def documents(data: str | list[str]) -> Iterator[str]:
    """The texts of a source, or of several, that are not empty: the column "text", or what a conversation says.

    Raises:
        ValueError: no such source, or a row without text; the message names it.
    """
    for name, row in _named_rows(data):
        try:
            text = text_of(row)
        except ValueError as error:
            raise ValueError(f"{str(error).rstrip('.')} ({name}).") from None
        if text.strip():
            yield text


def _named_rows(data: str | list[str]) -> Iterator[tuple[str, dict]]:
    for shard in shards(data):
        before = 0
        for block, count in enumerate(shard.counts):
            for number, row in enumerate(shard.read(block), start=before):
                if isinstance(row, ValueError):
                    raise row
                yield f"{shard.name}, row {number}", row
            before += count


def text_of(row: dict) -> str:
    """The text in a row, or what its conversation says; "" if it is there and empty.

    Raises:
        ValueError: it has neither; the message names its columns.
    """
    text, messages = row.get("text"), row.get("messages")
    if text is None and messages:
        text = "\n".join(message["content"] or "" for message in messages)
    elif "text" not in row and "messages" not in row:
        raise ValueError(f"data: a row has no column 'text', its columns are {', '.join(row)}.")
    elif not isinstance(text, str | None):
        raise ValueError(f"data: a row has {str(text)[:50]!r} in the column 'text', allowed is text.")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"data: a row has a character that is none, {error.object[error.start]!a}.") from error
    return text or ""


def _generated(data: str, kind: str = "", split: str = "train", *rest: str) -> Shard:
    if rest or kind not in KINDS or split not in SPLITS:
        raise ValueError(f"data is {data}, allowed is generated:kind[:split], kind {_or(KINDS)}, split {_or(SPLITS)}.")

    def make(block):
        return [{"messages": messages} for messages in problems(kind, split, BLOCK, block)]

    return GeneratedShard(data, [BLOCK] * GENERATED_BLOCKS, make)


def _or(choices) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}"


def _local(path: Path) -> list[Shard]:
    if path.is_dir() and (path / "dataset_dict.json").exists():
        path = path / "train"
    if path.is_dir() and (path / "state.json").exists():
        return [SHARDS[".arrow"](file["filename"]) for file in _saved(path).cache_files]
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name != "README.md" and file.is_file())
    files = [file for file in files if file.suffix.lower() in SHARDS and file.stat().st_size]
    if not files:
        raise ValueError(
            f"data: {path} is or holds no file that can be read, which are {_or(tuple(SHARDS))}, and not empty."
        )
    return [SHARDS[file.suffix.lower()](str(file)) for file in files]


def _saved(path: Path) -> datasets.Dataset:
    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"data: {path} cannot be read: {' '.join(str(error).split())}") from error


def _hub(data: str, name: str, config: str | None = None, split: str = "train", *rest: str) -> list[Shard]:
    if rest:
        raise ValueError(f"data is {data}, allowed is owner/name[:config[:split]].")
    name, _, revision = name.partition("@")
    try:
        builder = datasets.load_dataset_builder(name, config or None, revision=revision or None)
    except Exception as error:  # without a connection, one of the HTTP client that huggingface_hub happens to use
        raise ValueError(f"data: {data} cannot be read from the Hub: {' '.join(str(error).split())}") from error
    files = {str(split): list(names) for split, names in (builder.config.data_files or {}).items()}
    if split not in files:
        raise ValueError(
            f"data: {data} cannot be read from the Hub: it has no split {split!r}, but {_or(list(files))}."
        )
    if builder.name == "parquet":
        return [ParquetShard(file) for file in files[split]]

    def table(file):  # fetched as a whole when it is first needed
        return datasets.load_dataset(builder.name, data_files=file, split="train")

    return [TableShard(file, functools.partial(table, file)) for file in files[split]]


@functools.cache
def _python_texts() -> list[str]:
    """The language reference, and the docstrings of each library module, in an order that mixes them."""
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    for path in sorted(root.rglob("*.py")):
        if skipped.intersection(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # invalid escapes in other people's strings
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates and files for other versions of Python
            continue
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
        text = "\n\n".join(filter(None, docstrings))
        if text:
            texts.append(text)
    pieces = [piece for text in texts for piece in _pieces(text.split("\n\n"))]
    random.Random(0).shuffle(pieces)
    return pieces


def _pieces(paragraphs: Iterable[str]) -> Iterator[str]:
    """The paragraphs put together again into documents of about TEXT_BYTES at most."""
    piece, length = [], 0
    for paragraph in paragraphs:
        piece.append(paragraph)
        length += len(paragraph)
        if length >= TEXT_BYTES:
            yield "\n\n".join(piece)
            piece, length = [], 0
    if piece:
        yield "\n\n".join(piece)
