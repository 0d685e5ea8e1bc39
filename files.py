"""Files: written so that a kill or a full disk loses nothing that was there, and missing ones named."""

import contextlib
import hashlib
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout  # huggingface_hub, and so transformers, has it
from safetensors import SafetensorError, safe_open

CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class Stopped(Exception):
    """A run was stopped from outside, and what it has done is saved; the message says how to go on."""


def write(path: Path, content: str | dict) -> None:
    """Write a text, or a dict as JSON, as a whole or not at all."""
    if isinstance(content, dict):
        content = json.dumps(content, indent=1) + "\n"
    part = path.with_name(path.name + ".part")
    part.write_text(content, encoding="utf-8")
    part.replace(path)


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if it is damaged, OSError if it is not there."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged; move it away and make it again ({error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged; move it away and make it again.")
    return content


def weights_hash(folder: Path) -> str | None:
    """SHA-256 of the weights in a folder, by which what was measured knows them again; None if there are none."""
    digest, files = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest() if files else None


def make_folder(path: Path) -> None:
    """Make a folder and those it lies in. Raises ValueError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"output: the folder {path} cannot be made ({error.strerror}).") from error


def check_model(model: str) -> None:
    """Raise ValueError for what is no folder and looks like one, before it is looked for on the Hub."""
    path = Path(model)
    looks_local = path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") > 1
    if path.parent != Path("."):
        looks_local |= path.parent.is_dir()
    if looks_local and not path.is_dir():
        raise ValueError(f"There is no folder {model}.")


def newest(name: str) -> str:
    """The folder of a model; of a run that is still in training the newest checkpoint, if there is one."""
    check_model(name)
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").exists():
        checkpoints = {
            int(match[1]): path
            for path in folder.iterdir()
            if (match := CHECKPOINT.fullmatch(path.name)) and any(path.glob("*.safetensors"))
        }
        if not checkpoints:
            raise ValueError(f"There is no model in {name}, nor a checkpoint of a run.")
        return str(checkpoints[max(checkpoints)])
    return name


def check_writable(folder: Path) -> None:
    """Raise ValueError unless files can be made in a folder, before there is work to lose."""
    make_folder(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"output: {folder} cannot be written to ({error.strerror}).") from error


@contextlib.contextmanager
def locked(folder: Path, doing: str, seconds: float) -> Iterator[None]:
    """Have a folder that is there to oneself.

    Args:
        doing: what the process does there that has it, such as "training".
        seconds: to wait for it.

    Raises:
        ValueError: another process has it.
    """
    lock = FileLock(folder / ".lock", timeout=seconds)
    try:
        with lock:
            yield
    except Timeout:
        raise ValueError(f"output: another process is {doing} in {folder}.") from None
    (folder / ".lock").unlink(missing_ok=True)


def check_checkpoint(folder: Path) -> None:
    """Raise ValueError with the first file of a checkpoint of Trainer that is damaged."""
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
            elif path.suffix in (".pt", ".pth"):
                with zipfile.ZipFile(path) as archive:  # as torch.save writes it
                    if archive.testzip():
                        raise zipfile.BadZipFile
        except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
            raise ValueError(f"{path} is damaged; delete {folder} to begin again.") from None
