"""Where data comes from: what `data=` may be, read as a stream of rows."""

import ast
import functools
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets

from laplacian_heads.problems import KINDS, SPLITS, problems

BUILT_IN = ("python_prose", "generated")
# Suffix: the builder of the datasets library that reads it; None: text, read here.
SUFFIXES = {".txt": None, ".md": None, ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
DOCUMENT_CHARACTERS = 10_000  # a longer text file is read as several documents, each of whole lines
GENERATED_ROWS = 1_000_000


def rows(data: str) -> datasets.IterableDataset:
    """A stream of the rows of a source.

    Args:
        data: a file (.txt, .md, .jsonl, .parquet, .arrow), a folder of such files (but for README.md), a folder
            written by `Dataset.save_to_disk`, a dataset of the Hub as "owner/name", "owner/name:config" or
            "owner/name:config:split" (split "train" if not given, config "default" or the only one), "python_prose"
            (English prose that comes with Python), or "generated:kind[:split]" (see `problems`).

    Returns:
        Rows as dicts. Text has the column "text", generated conversations the column "messages".

    Raises:
        ValueError: there is no such source; the message names it.
    """
    name, *rest = data.split(":")
    if not data.strip():
        raise ValueError(f"data is {data!r}, allowed is the name of a source.")
    if data == "python_prose":
        return datasets.IterableDataset.from_generator(_python_prose)
    if name == "generated":
        return _generated(data, *rest)
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


def documents(data: str | list[str]) -> Iterator[str]:
    """The texts of one source or several, one after the other: the column "text", or what a conversation says.

    Raises:
        ValueError: no such source, or rows without text; the message names it.
    """
    for source in listed(data):
        for row in rows(source):
            text, messages = row.get("text"), row.get("messages")
            if text is None and messages:
                text = "\n".join(message["content"] or "" for message in messages)
            elif "text" not in row and "messages" not in row:
                raise ValueError(f"data: {source} has no column 'text', its columns are {', '.join(row)}.")
            elif not isinstance(text, str | None):
                raise ValueError(f"data: {source} has {text!r} in the column 'text', allowed is text.")
            if text and text.strip():
                yield text


def _generated(data: str, kind: str = "", split: str = "train", *rest: str) -> datasets.IterableDataset:
    if rest or kind not in KINDS or split not in SPLITS:
        raise ValueError(f"data is {data}, allowed is generated:kind[:split], kind {_or(KINDS)}, split {_or(SPLITS)}.")
    return datasets.IterableDataset.from_generator(_generated_rows, gen_kwargs={"kind": kind, "split": split})


def _generated_rows(kind: str, split: str):
    for messages in problems(kind, split, GENERATED_ROWS):
        yield {"messages": messages}


def _or(choices) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}"


def _local(path: Path) -> datasets.IterableDataset:
    if path.is_dir() and (path / "dataset_dict.json").exists():
        path = path / "train"
    if path.is_dir() and (path / "state.json").exists():
        return datasets.load_from_disk(str(path)).to_iterable_dataset()
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.name != "README.md" and file.is_file())
    files = [str(file) for file in files if file.suffix.lower() in SUFFIXES and file.stat().st_size]
    if not files:
        raise ValueError(
            f"data: {path} is or holds no file that can be read, which are {_or(tuple(SUFFIXES))}, and not empty."
        )
    return datasets.IterableDataset.from_generator(_files_rows, gen_kwargs={"files": files})


def _files_rows(files: list[str]):
    for name in files:
        builder = SUFFIXES[Path(name).suffix.lower()]
        if builder is None:
            yield from _texts(name)
            continue
        try:
            yield from datasets.load_dataset(builder, data_files=name, split="train", streaming=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"data: {name} cannot be read: {' '.join(str(error).split())}") from error


def _texts(name: str):
    with open(name, encoding="utf-8-sig", newline="") as file:
        try:
            for text in _pieces(file, ""):
                if "\0" in text:
                    raise ValueError(f"data: {name} is not text: it holds a zero byte.")
                yield {"text": text}
        except UnicodeDecodeError as error:
            raise ValueError(f"data: {name} is not UTF-8 text ({error.reason}).") from None


def _hub(data: str, name: str, config: str | None = None, split: str = "train", *rest: str):
    if rest:
        raise ValueError(f"data is {data}, allowed is owner/name[:config[:split]].")
    try:
        return datasets.load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:  # without a connection, one of the HTTP client that huggingface_hub happens to use
        raise ValueError(f"data: {data} cannot be read from the Hub: {' '.join(str(error).split())}") from error


def _python_prose():
    for text in _python_texts():
        yield {"text": text}


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
    pieces = [piece for text in texts for piece in _pieces(text.split("\n\n"), "\n\n")]
    random.Random(0).shuffle(pieces)
    return pieces


def _pieces(parts: Iterable[str], between: str) -> Iterator[str]:
    """The parts put together again into documents of about DOCUMENT_CHARACTERS at most."""
    piece, length = [], 0
    for part in parts:
        piece.append(part)
        length += len(part)
        if length >= DOCUMENT_CHARACTERS:
            yield between.join(piece)
            piece, length = [], 0
    if piece:
        yield between.join(piece)
