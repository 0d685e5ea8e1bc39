"""Text to train on: where it is read from, and how it is cut into rows of tokens."""

import ast
import sysconfig
import warnings
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

TEXT_SUFFIXES = (".txt", ".md")


def python_prose() -> list[str]:
    """English prose that comes with Python: the language reference, and the docstrings of each library module."""
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
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
            documents.append(text)
    return documents


def read_documents(data: str) -> list[str]:
    """Read a text file, or every .txt and .md file of a folder, as one document each.

    Raises:
        ValueError: nothing there, nothing in it, or not UTF-8 text; the message names the file.
        OSError: a file that cannot be read.
    """
    path = Path(data).expanduser()
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"data: there is no file or folder {data}.")
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.suffix.lower() in TEXT_SUFFIXES)
        if not files:
            raise ValueError(f"data: the folder {data} holds no {' or '.join(TEXT_SUFFIXES)} file.")
    documents = []
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"data: {file} is not UTF-8 text (byte {error.start}).") from None
        if "\0" in text:
            raise ValueError(f"data: {file} is not text: it holds a zero byte.")
        documents.append(text)
    documents = [text for text in documents if text.strip()]
    if not documents:
        raise ValueError(f"data: {data} is empty.")
    return documents


def split_documents(documents: list[str], held_out: float, seed: int) -> tuple[list[str], list[str]]:
    """Split documents at random into (training, held out), at least one each. A single text is cut near its end."""
    if len(documents) == 1:
        (text,) = documents
        cut = round(len(text) * (1 - held_out))
        return [text[:cut]], [text[cut:]]
    order = np.random.default_rng(seed).permutation(len(documents))
    count = min(max(1, round(len(documents) * held_out)), len(documents) - 1)
    return [documents[i] for i in order[count:]], [documents[i] for i in order[:count]]


def pack_rows(tokenizer: PreTrainedTokenizerFast, documents: list[str], context: int, name: str) -> Dataset:
    """Put documents behind each other, each after a BOS token, and cut the stream into rows.

    Returns:
        A dataset with the columns input_ids and labels, both `context` tokens of the stream; the rest is dropped.

    Raises:
        ValueError: the documents do not fill one row.
    """
    encoded = tokenizer(documents, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    stream = np.concatenate([[tokenizer.bos_token_id, *ids] for ids in encoded]).astype(np.int64)
    rows = len(stream) // context
    if rows == 0:
        raise ValueError(f"context is {context} tokens, but the {name} text has only {len(stream)}; give more text.")
    table = stream[: rows * context].reshape(rows, context)
    return Dataset.from_dict({"input_ids": table, "labels": table}).with_format("torch")
