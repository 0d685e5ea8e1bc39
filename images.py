"""Labelled images of a source, decoded whatever their file is."""

import contextlib
import dataclasses
import functools
import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow as pa
import pyarrow.compute as pc
from transformers.utils import logging

ALLOWED = (
    "allowed are a folder with a folder of images for each class, one of Dataset.save_to_disk or of Parquet files, a "
    "Parquet file, digits, and a dataset of the Hub as owner/name[@revision][:config[:split]]"
)
SPLITS = {"train": "train", "val": "validation", "valid": "validation", "validation": "validation", "test": "test"}
# Images of a stream are drawn from so many at a time, as datasets are often sorted by class.
SHUFFLED = 1000
# So many times as long as wide: with its shorter side at 224 pixels such a picture has 50 million of them.
ELONGATED = 1000
# More classes than any data set has: numbers beyond are ids of something else.
MOST_CLASSES = 1_000_000

logger = logging.get_logger(__name__)


class BadImageError(ValueError):
    """An image cannot be decoded; the message is one sentence with its file or row and the reason."""


@dataclasses.dataclass(eq=False)
class Images:
    """Images by number. They can be pickled, and so be read by other processes.

    Args:
        names: of the classes; [] if the images have none.
        labels: (images,) int64, the class of each image; None if they have none.
        rows: (images,) int64, where each image is in `dataset`.
        dataset: has the files in its column `column`.
        data: the source.
        root: the folder that the files lie in, if they do.
    """

    names: list[str]
    labels: np.ndarray | None
    rows: np.ndarray = dataclasses.field(repr=False)
    dataset: datasets.Dataset = dataclasses.field(repr=False)
    column: str
    data: str
    root: Path | None

    def __len__(self) -> int:
        return len(self.rows)

    def picture(self, number: int) -> PIL.Image.Image:
        """An image as RGB, upright. Raises BadImageError."""
        return decode(self._file(number), name=None if self.root else f"in {self.called(number)}")

    def called(self, number: int) -> str:
        """What to call an image: its path in the folder, such as n01440764/x.JPEG, or row 17 of uoft-cs/cifar10."""
        if self.root:
            return Path(self._file(number)["path"]).relative_to(self.root).as_posix()
        return f"row {self.rows[number]} of {self.data}"

    def select(self, numbers: Sequence[int]) -> "Images":
        """Those with the given numbers, in their order; each is called what it was called."""
        numbers = np.asarray(numbers, dtype=np.int64)
        labels = None if self.labels is None else self.labels[numbers]
        return dataclasses.replace(self, labels=labels, rows=self.rows[numbers])

    def with_classes(self, names: list[str]) -> "Images":
        """Held-out images with the numbers that their classes have among those of the training data, if it has any.

        Raises:
            ValueError: a class is not among them.
        """
        if self.names == names or self.labels is None or not names:
            return self
        unknown = [name for name in self.names if name not in names]
        if unknown:
            raise ValueError(f"held_out: {self.data} has the class {unknown[0]!r}, which data does not have.")
        numbers = np.array([names.index(name) for name in self.names])
        return dataclasses.replace(self, names=names, labels=numbers[self.labels])

    def _file(self, number: int) -> dict | None:
        return self.dataset[int(self.rows[number])][self.column]


class Readable:
    """Images, of which damaged ones may be left out.

    Args:
        images: by number.
        skip: whether damaged images are left out, with a warning, or are errors.
    """

    def __init__(self, images: Images, skip: bool):
        self.images, self.skip = images, skip
        self.warned = set()

    def label(self, number: int) -> int:
        """The class of an image, -1 if the images have none."""
        return -1 if self.images.labels is None else int(self.images.labels[number])

    def read(self, number: int) -> PIL.Image.Image | BadImageError | None:
        """An image; of a damaged one the error or, if such are left out, None, which is warned of once."""
        try:
            return self.images.picture(number)
        except BadImageError as error:
            if not self.skip:
                return error
            if number not in self.warned:
                self.warned.add(number)
                logger.warning(f"{error} It is left out.")
            return None


def load(data: str, label: str | None = None) -> Images:
    """The images of a source; those of the Hub are downloaded.

    Warns of classes without an image.

    Args:
        data: one of these; where a split can be chosen, it is train if it is not given:

            - digits[:train|:test], scikit-learn's 1,437 and 360 handwritten digits, which need no network
            - a folder with a folder of images for each class, or folder:split if there are such folders in its folders
              train and val, validation or test; images without such folders have no classes
            - a folder of `Dataset.save_to_disk`, or folder:split
            - a Parquet file, or a folder or folder:split of them, as on the Hub
            - a dataset of the Hub as owner/name[@revision][:config[:split]]
        label: the column of the classes. If None, the only one with names of classes, else one of whole numbers that is
            called label or labels.

    Raises:
        ValueError: there is no such source, it has no images, or several or wrong labels.
    """
    dataset, root = dataset_of(data)
    image, candidates = _image_column(data, dataset), _label_columns(dataset.features)
    if label is not None:
        columns = [name for name, feature in dataset.features.items() if _is_label(feature)]
        if label not in columns:
            raise ValueError(f"label is {label!r}, allowed for {data} is one of {', '.join(columns) or 'no columns'}.")
    elif len(candidates) > 1:
        raise ValueError(f"data: {data} has the labels {' and '.join(candidates)}; give label=.")
    else:
        label = candidates[0] if candidates else None
    labels = None if label is None else _labels(dataset, label)
    names = [] if label is None else _names(dataset, label)
    found = Images(names, labels, np.arange(len(dataset)), _undecoded(dataset, image), image, data, root)
    if labels is not None:
        _check_labels(found, label)
    return found


@dataclasses.dataclass
class Sample:
    """Some images of a source.

    Args:
        rows: dicts, of which the column `image` has the file, for `decode`.
        count: how many there are at most.
        image, label: the columns of images and of classes; label is None if there is none.
        names: of the classes, by their number.
    """

    rows: Iterable[dict]
    count: int
    image: str
    label: str | None
    names: list[str]


def sample(data: str, count: int) -> Sample:
    """`count` images of a source, drawn at random, always the same ones; those of the Hub are streamed.

    Of several columns of classes it takes the first. Labels are not checked.

    Args:
        data: as for `load`.

    Raises:
        ValueError: there is no such source, or it has no images.
    """
    dataset, _ = dataset_of(data, stream=True)
    image, candidates = _image_column(data, dataset), _label_columns(dataset.features)
    stored = isinstance(dataset, datasets.Dataset)
    if not stored:  # of a stream the numbers of classes are known at its end only
        candidates = [name for name in candidates if isinstance(dataset.features[name], datasets.ClassLabel)]
    label = candidates[0] if candidates else None
    names = [] if label is None else _names(dataset, label)
    dataset = _undecoded(dataset, image, *candidates[:1])
    if stored:
        count = min(count, len(dataset))
        rows = dataset.shuffle(seed=0).select(range(count))
    else:
        rows = dataset.shuffle(seed=0, buffer_size=SHUFFLED).take(count)
    return Sample(rows, count, image, label, names)


def decode(file: dict | None, channels: int = 3, name: str | None = None) -> PIL.Image.Image:
    """The image in a file, upright: of an animation the first picture.

    Args:
        file: its "bytes", or if they are None its "path".
        channels: 1 for a grey image, 3 for RGB.
        name: what to call it in an error, if not by its path.

    Raises:
        BadImageError: it is damaged, no image, or too large or elongated to work with.
    """
    file = file or {"bytes": None, "path": None}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")  # of what is odd in a file but does no harm
            return _decoded(file, "L" if channels == 1 else "RGB")
    except Exception as error:  # damage makes PIL's readers raise nearly anything
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        name = name or file.get("path") or "without a name"
        raise BadImageError(f"data: the image {name} cannot be read ({reason.rstrip('.')}).") from error


def _decoded(file: dict, mode: str) -> PIL.Image.Image:
    content = file["bytes"]
    if content is None:
        if not file.get("path"):
            raise ValueError("there is none")
        if Path(file["path"]).exists() and not Path(file["path"]).is_file():
            raise ValueError("it is no regular file")  # of which some would be waited for without end
        content = Path(file["path"]).read_bytes()
    if not content:
        raise ValueError("it is empty")
    try:
        picture = PIL.Image.open(io.BytesIO(content))
    except PIL.UnidentifiedImageError:
        raise ValueError("it is no image, or damaged at its beginning") from None
    # PIL itself only warns up to twice its limit.
    width, height = picture.size
    size, limit = f"it has {width} x {height} pixels", PIL.Image.MAX_IMAGE_PIXELS
    if not min(width, height):
        raise ValueError(size)
    if limit and width * height > limit:
        raise ValueError(f"{size}, allowed are {limit:,}")
    if max(width, height) > ELONGATED * min(width, height):
        raise ValueError(f"{size}, allowed is a side {ELONGATED:,} times as long as the other")
    picture.load()
    with contextlib.suppress(Exception):  # damage to what a camera noted is none to the picture
        PIL.ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith("I;16") or (picture.mode, picture.format) == ("I", "PPM"):
        picture = PIL.Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))  # PIL might clip 16 bits to 8
    elif picture.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, of which it does not say what is white")
    # As torchvision and timm convert, and with them most models were trained: the colour below what is transparent
    # stays, and is not mixed with a background.
    return picture.convert(mode)


def dataset_of(data: str, stream: bool = False) -> tuple[datasets.Dataset | datasets.IterableDataset, Path | None]:
    """A source as a dataset, and the folder that its files lie in if it is one with a folder for each class."""
    name, *rest = data.split(":")
    if name == "digits":
        return _digits(data, *rest), None
    path, split = local(data)
    if path is None:
        return _hub(data, stream, *data.split(":")), None
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved(data, path, split), None
    if path.is_dir():
        return _folder(data, path, split)
    if path.suffix.lower() != ".parquet" or split:
        raise ValueError(f"data: {data} cannot be read as images; {ALLOWED}.")
    return _read(data, datasets.Dataset.from_parquet, str(path)), None


def local(data: str) -> tuple[Path | None, str | None]:
    """The file or folder that there is, and the split that is asked of it."""
    folder, _, split = data.rpartition(":")
    for place, of_it in ((data, None), (folder.removesuffix(":"), split or None)):
        place = os.path.expanduser(place)
        if os.path.exists(place):
            return Path(place), of_it
    return None, None


def _read(data: str, read: Callable, *args, **options):
    try:
        return read(*args, **options)
    except Exception as error:  # without a connection, one of the HTTP client that huggingface_hub happens to use
        raise ValueError(f"data: {data} cannot be read as images: {' '.join(str(error).split())}") from error


def _hub(data: str, stream: bool, name: str, config: str = "", split: str = "train", *rest: str):
    name, _, revision = name.partition("@")
    if rest or name.count("/") != 1 or name.startswith((".", "~", "/")) or name.endswith("/"):
        raise ValueError(f"data: {data!r} cannot be read as images: there is no such file or folder; {ALLOWED}.")
    asked = {"split": split or "train", "revision": revision or None, "streaming": stream}
    return _read(data, datasets.load_dataset, name, config or None, **asked)


def _saved(data: str, path: Path, split: str | None) -> datasets.Dataset:
    found = _read(data, datasets.load_from_disk, str(path))
    if isinstance(found, datasets.DatasetDict):
        return found[_known_split(data, split, found)]
    if split:
        _known_split(data, split, ())
    return found


def _known_split(data: str, split: str | None, known: Iterable[str]) -> str:
    split = split or "train"
    if split not in known:
        raise ValueError(f"data: {data} has no split {split!r}, but {', '.join(known) or 'none at all'}.")
    return split


def _digits(data: str, split: str = "train", *rest: str) -> datasets.Dataset:
    if rest or split not in ("train", "test"):
        raise ValueError(f"data is {data}, allowed is digits[:train|:test].")
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ValueError("data: digits comes with scikit-learn; install it with pip install scikit-learn.") from None
    found = load_digits()
    parts = train_test_split(
        np.arange(len(found.target)), test_size=360, stratify=found.target, random_state=0, shuffle=True
    )
    rows = np.sort(parts[split == "test"])
    pixels = np.rint(found.images[rows] * (255 / 16)).astype(np.uint8)
    label = datasets.ClassLabel(names=[str(name) for name in found.target_names])
    return datasets.Dataset.from_dict(
        {"image": list(pixels), "label": found.target[rows]},
        features=datasets.Features({"image": datasets.Image(), "label": label}),
    )


def _folder(data: str, path: Path, split: str | None) -> tuple[datasets.Dataset, Path | None]:
    """Folders of images by class, read here: of a million files `imagefolder` makes a copy, and takes their names, such
    as dog/train_1.jpg, for those of splits. It gets what has metadata, and its fellows what has no images."""
    folders = _read(data, _folders, path)
    parts = {SPLITS[name]: path / name for name in folders if name in SPLITS}
    if not split and len(parts) < min(len(folders), 2):
        parts = {}  # a class may be called train
    root = parts.get(SPLITS.get(split or "train", split), path)
    files = _read(data, lambda: sorted(_files(str(root))))
    pictures = [name for name in files if name.lower().endswith(suffixes())]
    if not pictures or any(name.endswith(".parquet") or name.startswith("metadata.") for name in files):
        return _read(data, datasets.load_dataset, str(path), split=split or "train"), None
    if root is path and (parts or split):
        _known_split(data, split, parts)
    names = sorted({name for part in parts.values() or [path] for name in _folders(part)})
    classes = [name.partition(os.sep)[0] if os.sep in name else None for name in pictures]
    loose = classes.count(None)
    if 0 < loose < len(pictures):
        name = pictures[classes.index(None)]
        raise ValueError(f"data: {root} has the image {name} beside folders of images; put it into one, or elsewhere.")
    table = {
        "image": pa.StructArray.from_arrays(
            [pa.nulls(len(pictures), pa.binary()), pa.array([os.path.join(root, name) for name in pictures])],
            ["bytes", "path"],
        )
    }
    features = datasets.Features({"image": datasets.Image(decode=False)})
    if not loose and len(names) > 1:
        numbers = {name: number for number, name in enumerate(names)}
        table["label"] = pa.array([numbers[name] for name in classes])
        features["label"] = datasets.ClassLabel(names=names)
    return datasets.Dataset(pa.table(table), info=datasets.DatasetInfo(features=features)), root


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: str, inner: str = "") -> Iterator[str]:
    """Paths within a folder, without hidden ones. Unlike `os.walk`, it raises OSError where it may not look."""
    with os.scandir(os.path.join(folder, inner)) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = os.path.join(inner, entry.name)
            if entry.is_dir():
                yield from _files(folder, name)
            else:
                yield name


@functools.cache
def suffixes() -> tuple[str, ...]:
    return tuple(end for end, kind in PIL.Image.registered_extensions().items() if kind in PIL.Image.OPEN)


def _image_column(data: str, dataset) -> str:
    features = dataset.features or {}
    for name, feature in features.items():
        # What others than `datasets` write has the schema, but not the name of the feature.
        if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and feature.keys() >= {"bytes"}):
            return name
    raise ValueError(f"data: {data} has no images, its columns are {', '.join(features) or 'unknown'}.")


def _undecoded(dataset, image: str, *others: str):
    """The columns that are needed, with images as files: a damaged one could not be named otherwise."""
    dataset = dataset.select_columns([image, *others])
    if isinstance(dataset.features[image], datasets.Image):
        dataset = dataset.cast_column(image, datasets.Image(decode=False))
    return dataset


def _is_label(feature) -> bool:
    whole = isinstance(feature, datasets.Value) and feature.dtype.startswith(("int", "uint"))
    return whole or isinstance(feature, datasets.ClassLabel)


def _label_columns(features: datasets.Features) -> list[str]:
    """Columns with names of classes; if there are none, one of whole numbers that is called label or labels."""
    named = [name for name, feature in features.items() if isinstance(feature, datasets.ClassLabel)]
    return named or [name for name in ("label", "labels") if _is_label(features.get(name))][:1]


def _labels(dataset: datasets.Dataset, column: str) -> np.ndarray:
    """(rows,) int64, -1 where there is none."""
    values = dataset.select_columns([column]).with_format("arrow")[:][column]
    return pc.fill_null(values.cast(pa.int64()), -1).to_numpy()


def _names(dataset, column: str) -> list[str]:
    feature = dataset.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return feature.names
    return [str(number) for number in range(min(int(_labels(dataset, column).max()) + 1, MOST_CLASSES))]


def _check_labels(found: Images, column: str) -> None:
    labels, classes = found.labels, len(found.names)
    if labels.max() == labels.min() == -1:
        raise ValueError(f"data: {found.data} has no labels, its column {column!r} has only -1; give another split.")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        raise ValueError(
            f"data: {found.called(wrong[0])} has {labels[wrong[0]]} in the column {column!r}, allowed is 0 to "
            f"{classes - 1}."
        )
    empty = np.flatnonzero(np.bincount(labels, minlength=classes) == 0)
    if len(empty):
        some = ("such as " if len(empty) > 5 else "") + ", ".join(found.names[number] for number in empty[:5])
        logger.warning(f"{found.data} has no image of {len(empty)} of its {classes} classes: {some}.")
