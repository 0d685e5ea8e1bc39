"""Sources of labelled images, and files of every kind, good and bad."""

import io
import logging
import pickle
import re
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import torchvision

from laplacian_heads import images

ROOT = Path(__file__).resolve().parents[1]
REAL = ROOT.parent / "shared" / "images"
COLOURS = {"blue": (20, 40, 200), "green": (10, 180, 30), "red": (220, 0, 0)}
REFERENCE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)  # (height, width, RGB)
DEEP = REFERENCE[..., 0] * np.uint16(256) + (255 - REFERENCE[..., 0])  # of 16 bits

real = pytest.mark.skipif(not REAL.is_dir(), reason="real pictures, shared/images beside the repository, are not here")


def packed(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def coloured(name, shade=0):
    return PIL.Image.new("RGB", (5, 4), tuple(max(part - shade, 0) for part in COLOURS[name]))


def class_folders(root, counts):
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            coloured(name, i).save(root / name / f"{i}.png")
    return root


def table(count=6, **columns):
    names = [sorted(COLOURS)[i % 3] for i in range(count)]
    files = [{"bytes": packed(coloured(name, i)), "path": f"{i}.png"} for i, name in enumerate(names)]
    return {"image": files, "label": [i % 3 for i in range(count)], **columns}


def dataset(label=None, count=6, **columns):
    classes = datasets.ClassLabel(names=sorted(COLOURS))
    features = {"image": datasets.Image(), "label": label or classes, **dict.fromkeys(columns, classes)}
    return datasets.Dataset.from_dict(table(count, **columns), features=datasets.Features(features))


def colours(found):
    """The name of what colour each picture has."""
    pixels = [np.array(found.picture(i)).mean((0, 1)) for i in range(len(found))]
    return [min(COLOURS, key=lambda name: np.abs(mean - COLOURS[name]).sum()) for mean in pixels]


def check(found, count=6):
    assert (len(found), found.labels.dtype, found.labels.shape) == (count, np.int64, (count,))
    assert [found.names[label] for label in found.labels] == colours(found)


def refused(said, *args, **options):
    with pytest.raises(ValueError, match=said) as error:
        images.load(*map(str, args), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_digits_are_split_once_and_for_all():
    from sklearn.datasets import load_digits

    train, test = images.load("digits"), images.load("digits:test")
    assert (len(train), len(test), train.names) == (1437, 360, [str(i) for i in range(10)])
    assert np.array_equal(images.load("digits:train").labels, train.labels)
    # Together they are all the digits, each once.
    source, got = load_digits(), []
    for found in (train, test):
        for i in range(len(found)):
            pixels = np.array(found.picture(i))
            assert pixels.shape == (8, 8, 3)
            got.append((found.labels[i], np.rint(pixels[..., 1] * (16 / 255)).astype(int).tolist()))
    assert max(map(np.max, (np.array(train.picture(i)) for i in range(9)))) == 255
    assert sorted(got) == sorted(zip(source.target, source.images.astype(int).tolist(), strict=True))
    for found in (train, test):
        shares = np.bincount(found.labels) / len(found)
        assert np.abs(shares - np.bincount(source.target) / 1797).max() < 0.002
    assert train.called(3) == "row 3 of digits"
    # the split itself, which measurements are compared by
    assert test.labels[:10].tolist() == [1, 4, 8, 6, 5, 9, 9, 1, 3, 2]


@pytest.mark.parametrize("data", ["digits:val", "digits:", "digits:test:more"])
def test_digits_have_two_splits(data):
    refused(r"allowed is digits\[:train\|:test\]", data)


@pytest.mark.parametrize("name", ["pictures", "a:b", "a:test", "a[b]*", "ümlaut and space"])
def test_folders_are_classes(tmp_path, name):
    root = class_folders(tmp_path / name, {"red": 2, "blue": 3, "green": 1})
    for hidden in (".cache", "red/.hidden"):
        (root / hidden).mkdir()
        coloured("blue").save(root / hidden / "0.png")
    (root / "notes.txt").write_text("no image")
    # names that `imagefolder` takes for splits, suffixes in capitals, and folders in folders
    (root / "red/0.png").rename(root / "red/test_1.PNG")
    (root / "blue/deeper").mkdir()
    (root / "blue/0.png").rename(root / "blue/deeper/train.png")
    found = images.load(str(root))
    check(found)
    assert (found.names, found.labels.tolist()) == (["blue", "green", "red"], [0, 0, 0, 1, 2, 2])
    called = ["blue/1.png", "blue/2.png", "blue/deeper/train.png", "green/0.png", "red/1.png", "red/test_1.PNG"]
    assert [found.called(i) for i in range(6)] == called
    (root / "red/test_1.PNG").write_bytes(b"")
    with pytest.raises(images.BadImageError, match=re.escape(str(root / "red/test_1.PNG"))):
        found.picture(5)


def test_folders_have_the_numbers_of_torchvision(tmp_path):
    root = class_folders(tmp_path / "pictures", {"red": 2, "green": 2, "blue": 2})
    (root / "empty").mkdir()
    found, theirs = images.load(str(root)), torchvision.datasets.ImageFolder(root, allow_empty=True)
    assert found.names == theirs.classes
    assert found.labels.tolist() == theirs.targets
    assert all(np.array_equal(found.picture(i), theirs[i][0]) for i in range(6))


@pytest.mark.parametrize("held_out", ["val", "valid", "validation", "test"])
def test_folders_of_splits(tmp_path, held_out, caplog):
    class_folders(tmp_path / "train", {"red": 3, "blue": 2, "green": 1})
    class_folders(tmp_path / held_out, {"red": 1, "green": 1})
    check(images.load(str(tmp_path)))
    check(images.load(f"{tmp_path}:train"))
    asked = {"val": "validation", "validation": "val"}.get(held_out, held_out)
    assert not caplog.records
    for split in (held_out, asked):
        found = images.load(f"{tmp_path}:{split}")
        assert (found.names, found.labels.tolist()) == (["blue", "green", "red"], [1, 2])  # as in train
        assert found.called(0) == "green/0.png"
        check(found, 2)
    assert "has no image of 1 of its 3 classes: blue." in caplog.text
    refused("has no split 'dev', but (train, |.*, train)", f"{tmp_path}:dev")
    check(images.load(str(tmp_path / "train")))


def test_a_class_may_be_called_train(tmp_path):
    class_folders(tmp_path, {"red": 2, "blue": 1}).joinpath("red").rename(tmp_path / "train")
    found = images.load(str(tmp_path))
    assert (found.names, found.labels.tolist()) == (["blue", "train"], [0, 1, 1])
    refused("has no split 'test', but train", f"{tmp_path}:test")


def test_a_folder_without_its_split_says_which_it_has(tmp_path):
    class_folders(tmp_path / "validation", {"red": 2, "blue": 1})
    refused("has no split 'train', but validation", tmp_path)
    check(images.load(f"{tmp_path}:val"), 3)
    class_folders(tmp_path / "plain", {"red": 2, "blue": 1})
    refused("has no split 'test', but none at all", f"{tmp_path}/plain:test")


def test_images_without_folders_have_no_classes(tmp_path):
    for name in ("red", "blue"):
        coloured(name).save(tmp_path / f"{name}.png")
    found = images.load(str(tmp_path))
    assert (len(found), found.names, found.labels, found.called(1)) == (2, [], None, "red.png")
    assert found.select([1]).labels is None
    class_folders(tmp_path / "in", {"red": 1})
    refused("has the image blue.png beside folders of images", tmp_path)


def test_folders_with_metadata_are_read_as_imagefolder(tmp_path):
    for i in range(6):
        coloured(sorted(COLOURS)[i % 3]).save(tmp_path / f"{i}.png")
    rows = [f'{{"file_name": "{i}.png", "label": {i % 3}}}\n' for i in range(6)]
    (tmp_path / "metadata.jsonl").write_text("".join(rows))
    found = images.load(str(tmp_path))
    assert (found.labels.tolist(), found.names) == ([0, 1, 2, 0, 1, 2], ["0", "1", "2"])
    assert colours(found) == sorted(COLOURS) * 2


@pytest.mark.parametrize("kind", ["named", "numbered"])
def test_saved_datasets(tmp_path, kind):
    label = datasets.ClassLabel(names=sorted(COLOURS)) if kind == "named" else datasets.Value("int8")
    dataset(label).select([5, 4, 3, 2, 1]).save_to_disk(tmp_path / "one")
    found = images.load(str(tmp_path / "one"))
    assert found.labels.tolist() == [2, 1, 0, 2, 1]
    assert found.names == (sorted(COLOURS) if kind == "named" else ["0", "1", "2"])
    assert [sorted(COLOURS)[label] for label in found.labels] == colours(found)
    assert found.called(2) == f"row 2 of {tmp_path}/one"
    refused("has no split 'test', but none", f"{tmp_path}/one:test")
    datasets.DatasetDict(train=dataset(label), test=dataset(label, 3)).save_to_disk(tmp_path / "two")
    for split, count in {"": 6, ":train": 6, ":test": 3, "::test": 3}.items():
        assert len(images.load(f"{tmp_path}/two{split}")) == count
    refused("has no split 'val', but train, test", f"{tmp_path}/two:val")


@pytest.mark.parametrize("by", ["datasets", "others", "others with large types"])
def test_parquet(tmp_path, by):
    for split, count in {"train": 6, "test": 3}.items():
        path = tmp_path / f"{split}-00000-of-00001.parquet"
        if by == "datasets":
            dataset(count=count).to_parquet(path)
        else:
            large = "large" in by
            binary, text = (pa.large_binary(), pa.large_string()) if large else (pa.binary(), pa.string())
            schema = {"image": pa.struct({"bytes": binary, "path": text}), "label": pa.int32()}
            pa.parquet.write_table(pa.table(table(count), schema=pa.schema(schema)), path)
    names = sorted(COLOURS) if by == "datasets" else ["0", "1", "2"]
    for data, count in {path: 3, tmp_path: 6, f"{tmp_path}:train": 6, f"{tmp_path}:test": 3}.items():
        found = images.load(str(data))
        assert (found.names, found.labels.tolist()) == (names, [0, 1, 2] * (count // 3))
        assert colours(found) == sorted(COLOURS) * (count // 3)
        assert found.called(1) == f"row 1 of {data}"
    refused("validation", f"{tmp_path}:validation")
    refused("allowed are", f"{path}:test")
    path.write_bytes(path.read_bytes()[:300])
    refused(f"{path.name} cannot be read as images", path)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("", "data: '' cannot be read as images"),
        ("no_such_thing", "there is no such file or folder"),
        ("no/such", "cannot be read as images"),
        ("./no/such:test", "there is no such file or folder"),
        ("/no/such/folder", "there is no such file or folder"),
        ("owner/name:config:split:more", "there is no such file or folder"),
        ("empty", "cannot be read as images"),
        ("words.txt", "words.txt cannot be read as images; allowed are"),
        ("x" * 5000, "there is no such file or folder"),
    ],
)
def test_what_is_no_source_is_named(tmp_path, monkeypatch, data, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.txt").write_text("words")
    assert data in refused(said, data)


def test_what_has_no_images_names_its_columns(tmp_path):
    pa.parquet.write_table(pa.table({"text": ["a"], "label": [0]}), tmp_path / "text.parquet")
    refused("has no images, its columns are text, label", tmp_path / "text.parquet")
    dataset().select([]).to_parquet(tmp_path / "none.parquet")
    dataset().select([]).save_to_disk(tmp_path / "none")
    for data in ("none.parquet", "none"):
        refused(f"{data} cannot be read as images: ", tmp_path / data)


def test_the_labels_that_are_meant_must_be_said(tmp_path):
    columns = {"fine": [2, 1, 0, 2, 1, 0], "number": [0, 0, 0, 0, 1, 0]}
    two = dataset(fine=columns["fine"]).rename_column("label", "coarse").add_column("number", columns["number"])
    two.save_to_disk(tmp_path / "two")
    refused(r"data: .*two has the labels coarse and fine; give label=\.", tmp_path / "two")
    assert images.load(str(tmp_path / "two"), label="fine").labels.tolist() == columns["fine"]
    assert images.load(str(tmp_path / "two"), label="coarse").labels.tolist() == [0, 1, 2] * 2
    assert images.load(str(tmp_path / "two"), "number").labels.tolist() == columns["number"]
    for wrong in ("image", "nothing"):
        refused(f"label is '{wrong}', allowed for .*two is one of coarse, fine, number", tmp_path / "two", label=wrong)
    assert images.sample(str(tmp_path / "two"), 3).label == "coarse"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([0, 1, 3, 7, 1, 0], "row 2 of .* has 3 in the column 'label', allowed is 0 to 2"),
        ([0, 1, -1, 2, 1, 0], "row 2 of .* has -1 in the column 'label', allowed is 0 to 2"),
        ([0, 1, 2, 2, 1, None], "row 5 of .* has -1 in the column 'label'"),
        ([-1] * 6, "has no labels, its column 'label' has only -1; give another split"),
        ([None] * 6, "has no labels"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_labels_beyond_the_classes_are_named(tmp_path, labels, said, named):
    schema = pa.schema({"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "label": pa.int64()})
    if named:
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=sorted(COLOURS))})
        schema = features.arrow_schema
    elif labels[2] == 3:  # without names there are as many classes as numbers, up to what cannot be one
        labels, said = [0, 1, 10**15, 2, 1, 0], f"row 2 of .* has {10**15} in the column"
    path = tmp_path / "wrong.parquet"
    pa.parquet.write_table(pa.table(table(label=labels), schema=schema), path)
    refused(said, path)


def test_classes_without_an_image_are_warned_of_once(tmp_path, caplog):
    root = class_folders(tmp_path / "pictures", {"red": 2, "blue": 2})
    for i in range(6):
        (root / f"s{i}").mkdir()
        (root / f"s{i}" / "about.txt").write_text("no image")
    found = images.load(str(root))
    assert (len(found), found.names) == (4, ["blue", "red", "s0", "s1", "s2", "s3", "s4", "s5"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.endswith("has no image of 6 of its 8 classes: such as s0, s1, s2, s3, s4.")


def test_a_selection_keeps_what_images_are_called(tmp_path):
    dataset().to_parquet(tmp_path / "x.parquet")
    found = images.load(str(tmp_path / "x.parquet"))
    some = found.select([4, 0, 5]).select(np.array([2, 0]))
    assert (len(some), some.labels.tolist(), some.names) == (2, [2, 1], found.names)
    assert some.called(0) == f"row 5 of {tmp_path}/x.parquet"
    assert np.array_equal(some.picture(0), found.picture(5))
    assert len(found.select([])) == 0
    with pytest.raises(IndexError):
        some.picture(2)


def test_no_image_is_decoded_before_it_is_asked_for(tmp_path, monkeypatch):
    dataset().save_to_disk(tmp_path / "saved")
    root = class_folders(tmp_path / "pictures", {"red": 2, "blue": 1})
    monkeypatch.setattr(PIL.Image, "open", None)
    for data in (tmp_path / "saved", root, "digits"):
        found = images.load(str(data))
        assert found.labels is not None
        with pytest.raises(images.BadImageError):
            found.picture(0)


class Pictures(torch.utils.data.Dataset):
    def __init__(self, found):
        self.found = found

    def __len__(self):
        return len(self.found)

    def __getitem__(self, number):
        return np.array(self.found.picture(number)), self.found.labels[number]


@pytest.mark.parametrize("kind", ["folder", "saved", "digits"])
def test_images_can_be_pickled(tmp_path, kind):
    dataset().save_to_disk(tmp_path / "saved")
    root = class_folders(tmp_path / "pictures", {"red": 2, "blue": 1})
    found = images.load({"folder": str(root), "saved": str(tmp_path / "saved"), "digits": "digits:test"}[kind])
    again = pickle.loads(pickle.dumps(found.select([2, 1])))
    assert again.called(0) == found.called(2)
    assert np.array_equal(again.picture(1), found.picture(1))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_images(tmp_path, method):
    (tmp_path / "pictures").mkdir()
    found = images.load(str(class_folders(tmp_path / "pictures", {"red": 3, "blue": 2, "green": 1})))
    rows = found.select([5, 0, 3, 1])
    if method == "spawn":  # there the test's own classes cannot be imported
        with torch.multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(rows.called, range(4)) == [rows.called(i) for i in range(4)]
            assert all(map(np.array_equal, pool.map(rows.picture, range(4)), map(rows.picture, range(4))))
        return
    loader = torch.utils.data.DataLoader(Pictures(rows), batch_size=2, num_workers=2, multiprocessing_context=method)
    pixels, labels = map(torch.cat, zip(*loader, strict=True))
    assert labels.tolist() == rows.labels.tolist()
    assert np.array_equal(pixels, np.stack([rows.picture(i) for i in range(4)]))
    (tmp_path / "pictures/green/0.png").write_bytes(b"")
    with pytest.raises(images.BadImageError, match="green.*it is empty"):
        list(torch.utils.data.DataLoader(Pictures(found), num_workers=1, multiprocessing_context=method))


def test_a_sample_is_drawn_alike_each_time(tmp_path):
    root = class_folders(tmp_path / "pictures", {"red": 9, "blue": 9, "green": 2})
    found, again = images.sample(str(root), 7), images.sample(str(root), 7)
    rows = list(found.rows)
    assert rows == list(again.rows) == list(found.rows)
    assert (found.count, len(rows), found.names) == (7, 7, ["blue", "green", "red"])
    assert all(Path(row[found.image]["path"]).parent.name == found.names[row[found.label]] for row in rows)
    assert rows != sorted(rows, key=lambda row: row["label"])
    assert images.sample(str(root), 100).count == len(list(images.sample(str(root), 100).rows)) == 20
    assert images.sample("digits:test", 5).names == [str(i) for i in range(10)]


def as_file(content):
    return {"bytes": content, "path": None}


def grey(mode="L"):
    return PIL.Image.fromarray(REFERENCE).convert(mode)


def with_alpha(mode):
    picture = PIL.Image.fromarray(REFERENCE).convert(mode)
    picture.putalpha(PIL.Image.fromarray(REFERENCE[..., 0]))
    return picture


def palette():
    return PIL.Image.fromarray(REFERENCE).quantize(30)


GOOD = {
    "rgb png": (packed(PIL.Image.fromarray(REFERENCE)), REFERENCE),
    "rgb bmp": (packed(PIL.Image.fromarray(REFERENCE), "BMP"), REFERENCE),
    "rgb tiff": (packed(PIL.Image.fromarray(REFERENCE), "TIFF"), REFERENCE),
    "rgb webp": (packed(PIL.Image.fromarray(REFERENCE), "WEBP", lossless=True), REFERENCE),
    "one pixel": (packed(PIL.Image.fromarray(REFERENCE[:1, :1])), REFERENCE[:1, :1]),
    "as long as may be": (packed(PIL.Image.new("L", (1, images.ELONGATED))), np.zeros((images.ELONGATED, 1))),
    "grey": (packed(grey()), np.array(grey())),
    "one bit": (packed(grey("1")), np.array(grey("1")) * 255),
    "palette": (packed(palette()), np.array(palette().convert("RGB"))),
    # The colours below what is transparent stay.
    "palette with a transparent colour": (packed(palette(), transparency=3), np.array(palette().convert("RGB"))),
    "palette with transparencies": (
        packed(palette(), transparency=bytes(range(0, 240, 8))),
        np.array(palette().convert("RGB")),
    ),
    "rgba": (packed(with_alpha("RGB")), REFERENCE),
    "grey with alpha": (packed(with_alpha("L")), np.array(grey())),
    "grey 16 bits png": (
        packed(PIL.Image.fromarray(DEEP)),
        REFERENCE[..., 0],
    ),
    "grey 16 bits tiff": (
        packed(PIL.Image.fromarray(DEEP), "TIFF"),
        REFERENCE[..., 0],
    ),
    "grey 16 bits big-endian pgm": (
        b"P5 9 6 65535\n" + DEEP.astype(">u2").tobytes(),
        REFERENCE[..., 0],
    ),
    "animated gif": (
        packed(palette(), "GIF", save_all=True, append_images=[PIL.Image.new("P", (9, 6))] * 2),
        np.array(palette().convert("RGB")),
    ),
    "animated webp": (
        packed(
            PIL.Image.fromarray(REFERENCE),
            "WEBP",
            lossless=True,
            save_all=True,
            append_images=[PIL.Image.new("RGB", (9, 6))],
        ),
        REFERENCE,
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_every_kind_of_image_becomes_rgb(case):
    content, pixels = GOOD[case]
    picture = images.decode(as_file(content))
    pixels = pixels if pixels.ndim == 3 else np.stack([pixels] * 3, -1)
    assert (picture.mode, picture.size) == ("RGB", pixels.shape[1::-1])
    assert np.array_equal(picture, pixels)
    single = images.decode(as_file(content), channels=1)
    assert (single.mode, single.size) == ("L", picture.size)
    assert np.abs(np.array(single, int) - np.array(picture.convert("L"))).max() <= 1


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg_of_every_mode(mode):
    smooth = PIL.Image.linear_gradient("L").resize((64, 48)).convert("RGB")
    picture = images.decode(as_file(packed(smooth.convert(mode), "JPEG", quality=95)))
    assert picture.mode == "RGB"
    assert np.abs(np.array(picture, int) - np.array(smooth)).max() <= 6


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "16 bits"])
def test_images_are_upright(orientation, kind):
    upright = np.kron(np.array([[250, 120, 60], [0, 30, 180]], np.uint8), np.ones((16, 16), np.uint8))
    undo = {1: 0, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1], 5: lambda a: a.T}
    undo |= {6: lambda a: np.rot90(a), 7: lambda a: a[::-1, ::-1].T, 8: lambda a: np.rot90(a, -1)}
    stored = np.ascontiguousarray(upright if orientation == 1 else undo[orientation](upright))
    exif = PIL.Image.Exif()
    exif[PIL.Image.ExifTags.Base.Orientation] = orientation
    if kind == "16 bits":
        content = packed(PIL.Image.fromarray(stored.astype(np.uint16) * 257), exif=exif)
    else:
        content = packed(PIL.Image.fromarray(stored), kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    picture = images.decode(as_file(content))
    assert np.abs(np.array(picture, int)[..., 0] - upright).max() <= 3


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_exif_costs_no_picture(damage):
    exif = PIL.Image.Exif()
    exif[PIL.Image.ExifTags.Base.Orientation] = 6
    exif[PIL.Image.ExifTags.Base.Artist] = "somebody" * 20
    body = exif.tobytes()
    body = body[:20] if damage == "cut" else body[:6] + bytes(np.random.default_rng(0).integers(0, 256, 80, np.uint8))
    picture = images.decode(as_file(packed(PIL.Image.fromarray(REFERENCE), exif=body)))
    assert np.array_equal(picture, REFERENCE)


def test_warnings_of_pil_do_not_flood_the_log():
    exif = PIL.Image.Exif()
    exif[PIL.Image.ExifTags.Base.Artist] = "somebody" * 20
    odd = [
        packed(PIL.Image.fromarray(REFERENCE), exif=exif.tobytes()[:60]),
        packed(palette(), transparency=bytes(range(0, 240, 8))),
    ]
    for content in odd:
        with warnings.catch_warnings(record=True, action="always") as said:
            picture = PIL.Image.open(io.BytesIO(content))
            picture.getexif()
            picture.convert("RGB")
        assert said
        with warnings.catch_warnings(action="error"):
            assert images.decode(as_file(content)).size == (9, 6)


def png(width, height, data=b""):
    """A PNG file of the given size, whatever its data."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def half(content):
    return content[: len(content) // 2]


PHOTO = PIL.Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8))
BAD = {
    "empty": (b"", "it is empty"),
    "text": (b"<html>404 Not Found</html>", "it is no image, or damaged"),
    "zeros": (bytes(5000), "it is no image, or damaged"),
    "the first bytes of a jpeg": (packed(PHOTO, "JPEG")[:10], ""),
    **{f"half a {kind}": (half(packed(PHOTO, kind)), "") for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")},
    "a flipped byte in a png": (bytes([*packed(PHOTO)[:900], 255 - packed(PHOTO)[900], *packed(PHOTO)[901:]]), ""),
    "above PIL's limit": (png(10_000, 10_000), "10000 x 10000 pixels, allowed are 89,478,485"),
    "above twice PIL's limit": (png(20_000, 20_000), "400000000 pixels"),
    "long": (packed(PIL.Image.new("L", (60_000, 1))), "60000 x 1 pixels, allowed is a side 1,000 times"),
    "high": (packed(PIL.Image.new("L", (1, 60_000))), "1 x 60000 pixels"),
    "no pixels": (png(0, 5), ""),
    "no pixels in a gif": (b"GIF89a" + bytes(7) + b";", ""),
    "floats": (packed(PIL.Image.fromarray(REFERENCE[..., 0].astype(np.float32)), "TIFF"), "its pixels have 32 bits"),
    "32 bits": (packed(PIL.Image.fromarray(REFERENCE[..., 0].astype(np.int32)), "TIFF"), "its pixels have 32 bits"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_named_with_the_reason(tmp_path, case):
    content, reason = BAD[case]
    names = {"in its file": f"{tmp_path}/pictures/red/0.png", "in a row": f"in row 1 of {tmp_path}/x.parquet"}
    root = class_folders(tmp_path / "pictures", {"blue": 1, "red": 1})
    (root / "red/0.png").write_bytes(content)
    rows = [{"bytes": packed(PHOTO), "path": None}, as_file(content)]
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    datasets.Dataset.from_dict({"image": rows, "label": [0, 1]}, features=features).to_parquet(tmp_path / "x.parquet")
    for where, data in {"in its file": root, "in a row": tmp_path / "x.parquet"}.items():
        found = images.load(str(data))
        found.picture(0)
        with warnings.catch_warnings(action="error"), pytest.raises(images.BadImageError) as error:
            found.picture(1)
        said = str(error.value)
        start = f"data: the image {names[where]} cannot be read ("
        assert said.startswith(start)
        assert len(said) > len(start) + 8
        assert reason in said
        assert said.endswith(").")
        assert "BytesIO" not in said
        assert "\n" not in said


@pytest.mark.parametrize("file", [None, {"bytes": None, "path": None}, {"bytes": None, "path": "no/such.png"}])
def test_files_that_are_not_there(file):
    with pytest.raises(images.BadImageError, match=r"there is none|no/such\.png cannot be read \(No such file"):
        images.decode(file)


def test_a_file_that_is_gone_is_named(tmp_path):
    root = class_folders(tmp_path / "pictures", {"blue": 1, "red": 1})
    found = images.load(str(root))
    (root / "red/0.png").unlink()
    with pytest.raises(images.BadImageError, match="red/0.png cannot be read"):
        found.picture(1)


@real
def test_real_pictures_are_read_as_by_torchvision():
    """Photos of all sizes, and small ones in folders of splits."""
    photos = images.load(str(REAL / "imagenet"))
    assert photos.labels is None
    for i in range(len(photos)):
        theirs = torchvision.datasets.folder.default_loader(REAL / "imagenet" / photos.called(i))
        assert np.array_equal(photos.picture(i), theirs)
    train, test = images.load(str(REAL / "cifar10")), images.load(f"{REAL / 'cifar10'}:test")
    assert len(train) + len(test) == len(list((REAL / "cifar10").rglob("*.jpg")))
    assert train.names == test.names
    assert np.bincount(train.labels).min() == np.bincount(train.labels).max() > 0
    theirs = torchvision.datasets.ImageFolder(REAL / "cifar10/test")
    assert test.labels.tolist() == theirs.targets
    assert all(np.array_equal(test.picture(i), theirs[i][0]) for i in range(0, len(test), 9))


@pytest.mark.slow
def test_datasets_of_the_hub(seeded_hub, tmp_path):
    code = """
        import numpy as np
        from laplacian_heads import images

        cifar = images.load("uoft-cs/cifar10::test")
        assert len(cifar) > 0 and len(cifar.names) == 10 and cifar.labels.max() == 9
        assert cifar.called(17) == "row 17 of uoft-cs/cifar10::test"
        assert cifar.picture(17).size == (32, 32)
        drawn = images.sample("uoft-cs/cifar10:plain_text:test", 5)
        rows = list(drawn.rows)
        assert len(rows) == 5 and drawn.names == cifar.names
        same = [i for i in np.flatnonzero(cifar.labels == rows[0]["label"])
                if cifar.picture(i) == images.decode(rows[0][drawn.image])]
        assert len(same) >= 1
        photos = images.load("ILSVRC/imagenet-1k@main::validation")
        assert len(photos.names) == 1000 and photos.picture(0).mode == "RGB"
        for data, said in {"uoft-cs/cifar10::dev": "dev", "uoft-cs/nothing": "nothing"}.items():
            for read in (images.load, lambda data: images.sample(data, 1)):
                try:
                    read(data)
                except ValueError as error:
                    assert f"data: {data} cannot be read as images" in str(error) and said in str(error), error
                else:
                    raise AssertionError(data)
        """
    code = "\n".join(line.removeprefix("        ") for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=seeded_hub, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
