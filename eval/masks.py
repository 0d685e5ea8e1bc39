"""Pictures with masks, which give each pixel the number of its class, and pictures as models take them."""

import dataclasses
import io
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow as pa
import torch

from laplacian_heads import images
from laplacian_heads.images import BadImageError, decode

ALLOWED = (
    "allowed are a folder with the folders images and annotations, as they are or with one folder for each split in "
    "both, one of Dataset.save_to_disk or of Parquet files, a Parquet file, and a dataset of the Hub as "
    "owner/name[@revision][:config[:split]]"
)
SPLITS = {**images.SPLITS, "training": "train", "testing": "test"}
# Columns that hold masks, if the source does not say which does.
MASKS = ("annotation", "annotations", "mask", "masks", "label", "labels", "segmentation", "semantic_segmentation")
PLAIN = ("1", "L", "P")  # modes of PIL with one number a pixel, beside those that start with I


@dataclasses.dataclass(eq=False)
class Masked:
    """Pictures and their masks by number. They can be pickled, and so be read by other processes.

    Args:
        dataset: has the files in its columns `image` and `mask`; mask is None if there are none.
        data: the source.
        root: the folder that the files lie in, if they do.
        drawn: whether these are some of the source's, so that their numbers are not its rows.
    """

    dataset: datasets.Dataset = dataclasses.field(repr=False)
    image: str
    mask: str | None
    data: str
    root: Path | None
    drawn: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def called(self, number: int, column: str | None = None) -> str:
        """What to call a picture, or its mask: the path in the folder, or row 17 of owner/name."""
        if self.root:
            return Path(self.dataset[number][column or self.image]["path"]).relative_to(self.root).as_posix()
        return f"{'picture' if self.drawn else 'row'} {number} of {self.data}"

    def picture(self, number: int) -> PIL.Image.Image:
        """A picture as RGB, upright. Raises BadImageError."""
        return decode(self.dataset[number][self.image], name=None if self.root else f"in {self.called(number)}")

    def pair(self, number: int) -> tuple[PIL.Image.Image, np.ndarray]:
        """A picture, and its mask, (height, width) int64, for the picture as it is upright.

        Raises:
            BadImageError: one of them cannot be read, or they differ in size.
        """
        picture, mask = self.picture(number), self._labels(number)
        if mask.shape != picture.size[::-1]:
            # A picture with an orientation of EXIF is turned, which its mask may not be.
            raise BadImageError(
                f"data: the mask {self.called(number, self.mask)} is {mask.shape[1]} x {mask.shape[0]}, allowed is the "
                f"size of its picture, upright {picture.size[0]} x {picture.size[1]}."
            )
        return picture, mask

    def _labels(self, number: int) -> np.ndarray:
        file = self.dataset[number][self.mask] or {"bytes": None, "path": None}
        try:
            content = file["bytes"]
            if content is None:
                if not file["path"]:
                    raise ValueError("there is none")
                content = Path(file["path"]).read_bytes()
            with PIL.Image.open(io.BytesIO(content)) as mask:
                mask.load()
                PIL.ImageOps.exif_transpose(mask, in_place=True)
                if mask.mode not in PLAIN and not mask.mode.startswith("I"):
                    raise ValueError(f"its pixels are {mask.mode}, allowed is one whole number for each")
                return np.asarray(mask).astype(np.int64)
        except Exception as error:  # damage makes PIL's readers raise nearly anything
            reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            name = self.called(number, self.mask)
            raise BadImageError(f"data: the mask {name} cannot be read ({reason.rstrip('.')}).") from error


def load(data: str, mask: str | None = None, needed: bool = True, drawn: int | None = None) -> Masked:
    """Pictures of a source with their masks; those of the Hub are downloaded.

    Args:
        data: one of these; where a split can be chosen, it is train if it is not given:

            - a folder with images in its folder images and masks of the same names in annotations, or folder:split if
              these have a folder for each split, such as training and validation
            - a folder of `Dataset.save_to_disk`, or folder:split
            - a Parquet file, or a folder or folder:split of them, as on the Hub
            - a dataset of the Hub as owner/name[@revision][:config[:split]]
        mask: the column of the masks. If None, the only one of images with a name such as annotation, mask or label.
        needed: whether there have to be masks.
        drawn: of a dataset of the Hub only so many are downloaded, drawn at random, always the same ones.

    Raises:
        ValueError: there is no such source, it has no pictures, or none or several of masks where they are needed.
    """
    path, split = images.local(data)
    if path is not None and all((path / name).is_dir() for name in ("images", "annotations")):
        return _folder(data, path, split)
    if path is not None and path.is_dir() and needed and not any(path.rglob("*.parquet")) and not _is_saved(path):
        raise ValueError(f"data: {data} has no folders images and annotations; {ALLOWED}.")
    dataset, root = images.dataset_of(data, stream=drawn is not None)
    columns = [
        name
        for name, feature in (dataset.features or {}).items()
        if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and feature.keys() >= {"bytes", "path"})
    ]
    if mask is not None and mask not in columns:
        raise ValueError(f"mask is {mask!r}, allowed for {data} is one of {', '.join(columns) or 'no columns'}.")
    masks = [mask] if mask else [name for name in columns if name in MASKS]
    if len(masks) > 1 or (needed and not masks):
        found = ", ".join(masks or columns) or "none"
        raise ValueError(f"data: {data} has the columns {found} of images; give mask=, the one of the masks.")
    pictures = [name for name in columns if name not in masks]
    if len(pictures) != 1 and "image" not in pictures:
        raise ValueError(f"data: {data} has the columns {', '.join(pictures) or 'none'} of pictures, allowed is one.")
    picture = "image" if "image" in pictures else pictures[0]
    dataset = dataset.select_columns([picture, *masks])
    for name in (picture, *masks):
        dataset = dataset.cast_column(name, datasets.Image(decode=False))
    streamed = isinstance(dataset, datasets.IterableDataset)
    if streamed:
        rows = dataset.shuffle(seed=0, buffer_size=images.SHUFFLED).take(drawn)
        dataset = datasets.Dataset.from_list(list(rows), features=dataset.features)
    return Masked(dataset, picture, masks[0] if masks else None, data, root, streamed)


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def _folder(data: str, path: Path, split: str | None) -> Masked:
    known = sorted(entry.name for entry in (path / "images").iterdir() if entry.is_dir())
    inner = ""
    if known or split:
        split = split or "train"
        same = [name for name in known if SPLITS.get(name, name) == SPLITS.get(split, split)]
        if not same:
            raise ValueError(f"data: {path} has no split {split!r}, but {', '.join(known) or 'none at all'}.")
        inner = same[0]
    pictures, masks = (_files(path / kind / inner) for kind in ("images", "annotations"))
    if not pictures:
        raise ValueError(f"data: {path / 'images' / inner} has no images.")
    for stem, picture in pictures.items():
        if stem not in masks:
            raise ValueError(f"data: {path / 'annotations' / inner} has no mask of {picture.name}.")
    table = {
        "image": [{"bytes": None, "path": str(picture)} for picture in pictures.values()],
        "mask": [{"bytes": None, "path": str(masks[stem])} for stem in pictures],
    }
    features = datasets.Features(dict.fromkeys(table, datasets.Image(decode=False)))
    dataset = datasets.Dataset(pa.table(table, features.arrow_schema), datasets.DatasetInfo(features=features))
    return Masked(dataset, "image", "mask", data, path)


def _files(folder: Path) -> dict[str, Path]:
    """Images of a folder by their names without the ending."""
    if not folder.is_dir():
        raise ValueError(f"data: there is no folder {folder}.")
    known = images.suffixes()
    return {
        path.stem: path
        for path in sorted(folder.iterdir())
        if path.suffix.lower() in known and path.is_file() and not path.name.startswith(".")
    }


def pixel_values(picture: PIL.Image.Image, processor) -> torch.Tensor:
    """(3, height, width) of an RGB picture in its own size, with the mean and deviation of an image processor."""
    values = torch.from_numpy(np.array(picture, dtype=np.float32)).permute(2, 0, 1) / 255
    if getattr(processor, "do_normalize", True):
        mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (processor.image_mean, processor.image_std))
        values = (values - mean) / std
    return values
