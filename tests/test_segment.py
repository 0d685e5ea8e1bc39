"""The verb segment: pictures with masks, windows, a head that learns, runs that go on, and what is refused."""

import json
import math
import re
import shutil
import socket
import subprocess
import sys

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from conftest import ROOT
from filelock import FileLock
from safetensors.torch import load_file
from test_iou import mean_iou

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification, recipes
from laplacian_heads.eval import features, masks
from laplacian_heads.eval.segment import Crops, Head, SegmentRecipe, Whole, likeliest, segment, slide, windows

REAL = ROOT.parent / "shared" / "images" / "ade20k"
real = pytest.mark.skipif(not REAL.is_dir(), reason="real masks, shared/images beside the repository, are not here")
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIDE = {"image_size": 32, "patch_size": 8}


def laplace_vit():
    config = LaplaceViTConfig(**SHAPE, **SIDE, laplacian_heads=2, num_labels=3, layer_scale_init_value=1.0)
    return LaplaceViTForImageClassification(config)


def vit():
    return transformers.ViTModel(transformers.ViTConfig(**SHAPE, **SIDE, intermediate_size=48))


def dinov2():
    return transformers.Dinov2Model(transformers.Dinov2Config(**SHAPE, image_size=28, patch_size=7))


MODELS = {"laplace": laplace_vit, "vit": vit, "dinov2": dinov2}


def textured(generator, size):
    """A picture, one part of which has stripes and the other squares, and where: 1 and 2, and 0 at the border."""
    height, width = size
    down, across = np.mgrid[:height, :width]
    stripes, squares = (across // 2) % 2 * 200, ((across // 4 + down // 4) % 2) * 120 + 60
    edge = generator.integers(width // 4, 3 * width // 4)
    left = across < edge
    if generator.random() < 0.5:
        left = ~left
    pixels = np.where(left, stripes, squares)[..., None] + generator.normal(0, 10, (height, width, 3))
    mask = np.where(left, 1, 2)
    mask[:2] = 0
    return np.clip(pixels, 0, 255).astype(np.uint8), mask.astype(np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with their image processors, and textures of many sizes, split as ADE20K is."""
    folder = tmp_path_factory.mktemp("segment")
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    for name, build in MODELS.items():
        torch.manual_seed(0)
        build().save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    generator = np.random.default_rng(0)
    for split, count in {"training": 12, "validation": 5}.items():
        for kind in ("images", "annotations"):
            (folder / "data" / kind / split).mkdir(parents=True)
        for i in range(count):
            pixels, mask = textured(generator, generator.integers(30, 70, 2))
            PIL.Image.fromarray(pixels).save(folder / "data/images" / split / f"{i}.png")
            PIL.Image.fromarray(mask).save(folder / "data/annotations" / split / f"{i}.png")
    return folder


def recipe(folder, model="laplace", **values):
    data = str(folder / "data")
    small = {
        **{
            "model": model and str(folder / model),
            "data": f"{data}:training",
            "held_out": f"{data}:validation",
            "classes": 2,
        },
        **{"shorter_side": 32, "crop": 32, "stride": 20, "scale": [0.8, 1.5], "steps": 60, "images_per_step": 4},
        **{"batch_size": 4, "learning_rate": 1e-2, "warmup_steps": 5, "workers": 0, "save_steps": 20, "bf16": False},
        **{"pictures": 0, "logging_steps": 10},
    }
    return recipes.load(SegmentRecipe, "segment", {**small, **values})


def result(output):
    return json.loads((output / "segment.json").read_text())


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "whole"
    segment(recipe(folder, output=str(output), pictures=3))
    return output


def test_head_learns_textures(whole):
    found = result(whole)
    # With half of the pixels of each class, a guess has an IoU of a third.
    assert found["mean_iou"] > 0.6
    assert found["overall_accuracy"] > 0.75
    assert [each["class"] for each in found["per_class"]] == [0, 1]
    assert found["mean_iou"] == pytest.approx(np.mean([each["iou"] for each in found["per_class"]]))
    assert found["held_out_pictures"] == 5
    assert found["laplacian_heads"] == 2
    assert found["recipe"]["stride"] == 20
    names = {path.name for path in (whole / "segment").iterdir()}
    assert names >= {"recipe.yaml", "head.safetensors", "trainer_state.json", "segment.png", "segment.svg"}
    assert not any(name.startswith("checkpoint") or name.endswith(".part") for name in names)
    assert all(key.startswith(("norm.", "classifier.")) for key in load_file(whole / "segment/head.safetensors"))


def test_figures_are_those_of_the_saved_head(folder, whole):
    """From the files alone: window after window by hand, the metric in numpy, each mask in its own size."""
    backbone = features.load(str(folder / "laplace"))
    head = Head(32, 2, 0.1)
    head.load_state_dict(load_file(whole / "segment/head.safetensors"))
    head.eval()
    predictions, references = [], []
    for path in sorted((folder / "data/images/validation").iterdir()):
        picture = PIL.Image.open(path)
        factor = 32 / min(picture.size)
        size = [round(side * factor) for side in picture.size]
        pixels = np.asarray(picture.resize(size, PIL.Image.Resampling.BILINEAR), dtype=np.float64)
        values = torch.from_numpy((pixels / 255 - 0.5) / 0.5).float().permute(2, 0, 1)
        total, count = np.zeros((2, *values.shape[1:])), np.zeros(values.shape[1:])
        for top in {*range(0, size[1] - 32, 20), size[1] - 32}:
            for left in {*range(0, size[0] - 32, 20), size[0] - 32}:
                window = values[None, :, top : top + 32, left : left + 32]
                with torch.no_grad():
                    tokens = backbone.tokens(window).patches[0]
                    logits = head(tokens.view(1, 4, 4, 32).permute(0, 3, 1, 2))
                    logits = torch.nn.functional.interpolate(logits, (32, 32), mode="bilinear")
                total[:, top : top + 32, left : left + 32] += logits[0].softmax(0).numpy()
                count[top : top + 32, left : left + 32] += 1
        mask = np.asarray(PIL.Image.open(folder / "data/annotations/validation" / path.name))
        mean = torch.from_numpy(total / count)[None]
        predictions.append(torch.nn.functional.interpolate(mean, mask.shape, mode="bilinear")[0].argmax(0).numpy())
        references.append(mask)
    expected = mean_iou(predictions, references, 2, reduce_labels=True)
    found = result(whole)
    for name in ("mean_iou", "mean_accuracy", "overall_accuracy"):
        assert found[name] == pytest.approx(expected[name], abs=2e-3)  # a pixel on the line may fall to either side
    pixels = sum((mask > 0).sum() for mask in references)
    assert sum(each["pixels"] for each in found["per_class"]) == pixels


def test_interrupted_run_ends_in_the_same_head(folder, whole, tmp_path, monkeypatch, capsys):
    """Stopped after a checkpoint, and beside one that was not finished; dropout and crops go on where they were."""
    asked = recipe(folder, output=str(tmp_path), pictures=3)
    step = transformers.Trainer.training_step

    def stopped(self, *args, **kwargs):
        if self.state.global_step == 33:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    monkeypatch.setattr(transformers.Trainer, "training_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        segment(asked)
    checkpoint = tmp_path / "segment/checkpoint-20"
    keys = load_file(checkpoint / "model.safetensors").keys()
    assert all(key.startswith("head.") for key in keys)  # the backbone is not saved again and again
    (tmp_path / "segment/checkpoint-30").mkdir()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="in which learning_rate is 0.01 instead of 0.02; give another output="):
        segment(recipe(folder, output=str(tmp_path), pictures=3, learning_rate=0.02))
    content = (checkpoint / "optimizer.pt").read_bytes()
    (checkpoint / "optimizer.pt").write_bytes(content[:100])
    with pytest.raises(ValueError, match=r"checkpoint-20/optimizer.pt is damaged; delete .*checkpoint-20 to begin"):
        segment(asked)
    (checkpoint / "optimizer.pt").write_bytes(content)
    with FileLock(tmp_path / "segment/.lock"), pytest.raises(ValueError, match="another process is at work in"):
        segment(asked)
    segment(asked)
    assert "going on from" in capsys.readouterr().out
    one, other = (load_file(output / "segment/head.safetensors") for output in (tmp_path, whole))
    for key in one:
        assert torch.equal(one[key], other[key]), key
    assert {**result(tmp_path), "protocol": None} == {**result(whole), "protocol": None}


def test_run_that_ended_while_measuring_goes_on_there(folder, whole, tmp_path, monkeypatch):
    asked = recipe(folder, output=str(tmp_path), pictures=3)
    monkeypatch.setattr("laplacian_heads.eval.segment.slide", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        segment(asked)
    monkeypatch.undo()
    monkeypatch.setattr(transformers.Trainer, "training_step", lambda *_: 1 / 0)
    segment(asked)
    assert result(tmp_path)["mean_iou"] == result(whole)["mean_iou"]


def test_finished_run_is_left_alone(folder, whole, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    segment(recipe(folder, output=str(whole), pictures=3))
    assert "is finished." in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds the results of another recipe, in which stride is 20 instead of 10"):
        segment(recipe(folder, output=str(whole), pictures=3, stride=10))
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
    # The same recipe with a model that has been trained on.
    shutil.copytree(whole, tmp_path / "whole")
    shutil.copytree(folder / "laplace", tmp_path / "laplace")
    values = (
        (tmp_path / "whole/segment/recipe.yaml").read_text().replace(str(folder / "laplace"), str(tmp_path / "laplace"))
    )
    (tmp_path / "whole/segment/recipe.yaml").write_text(values)
    moved = recipe(folder, output=str(tmp_path / "whole"), pictures=3, model=str(tmp_path / "laplace"))
    segment(moved)
    torch.manual_seed(1)
    laplace_vit().save_pretrained(tmp_path / "laplace")
    with pytest.raises(ValueError, match="holds the results of other weights than .*laplace has"):
        segment(moved)


def test_workers_change_nothing(folder, tmp_path):
    plain = {"steps": 6, "warmup_steps": 0, "dropout": 0.0, "data": f"{folder / 'data'}:train"}
    for name, values in {"plain": {}, "workers": {"workers": 2}}.items():
        segment(recipe(folder, output=str(tmp_path / name), **plain, **values))
    one, other = (load_file(tmp_path / name / "segment/head.safetensors") for name in ("plain", "workers"))
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("model", ["vit", "dinov2"])
def test_models_of_transformers(folder, tmp_path, model):
    """Of which one has a patch that crops are no multiple of; several blocks side by side."""
    segment(recipe(folder, model, output=str(tmp_path), blocks=[1, 2], eval_steps=30))
    assert result(tmp_path)["mean_iou"] > 0.6
    assert load_file(tmp_path / "segment/head.safetensors")["classifier.weight"].shape == (2, 64, 1, 1)
    log = json.loads((tmp_path / "segment/trainer_state.json").read_text())["log_history"]
    assert [each["step"] for each in log if "eval_mean_iou" in each] == [30, 60, 60]


def test_schedule_and_loss_are_those_of_plain_torch(folder, tmp_path):
    """The same head after the same crops, by a loop over AdamW, a warm-up and a cosine to 0."""
    asked = recipe(folder, output=str(tmp_path), dropout=0.0, steps=8, warmup_steps=3, save_steps=100)
    torch.manual_seed(3)
    segment(asked)
    backbone = features.load(asked.model)
    transformers.set_seed(asked.seed)
    head = Head(32, 2, 0.0).train()
    crops = Crops(asked, masks.load(asked.data), backbone.processor)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1.0, weight_decay=1e-3)
    for step in range(8):
        rows = [crops[step * 4 + i] for i in range(4)]
        pixels, labels = (torch.stack([row[key] for row in rows]) for key in ("pixel_values", "labels"))
        logits = head(backbone.tokens(pixels).patches[0].mT.unflatten(2, (4, 4)))
        logits = torch.nn.functional.interpolate(logits, (32, 32), mode="bilinear")
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        rate = step / 3 if step < 3 else (1 + math.cos(math.pi * (step - 3) / 5)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * rate
        optimizer.step()
    saved = load_file(tmp_path / "segment/head.safetensors")
    for key, value in head.state_dict().items():
        torch.testing.assert_close(saved[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [(50, 70), (32, 32), (20, 90), (11, 13), (33, 64)])
def test_windows_give_back_what_is_known(size):
    """Of a picture whose pixels are its logits every window gives its part, and the mean of equals is the same."""
    logits = torch.randn(3, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = slide(lambda given: given, logits, 32, 20, batch_size=4)
    torch.testing.assert_close(found, logits.softmax(0), rtol=0, atol=1e-12)
    covered = np.zeros(size, dtype=int)
    for rows, columns in windows(*size, 32, 20):
        covered[rows, columns] += 1
        assert (rows.stop - rows.start, columns.stop - columns.start) == tuple(min(side, 32) for side in size)
    assert covered.min() >= 1


def test_overlaps_are_averaged():
    """Against a loop over pixels and windows, with logits that depend on where in the window a pixel is."""
    pixels = torch.randn(3, 41, 57, generator=torch.Generator().manual_seed(0))
    places = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1))
    found = slide(lambda given: given + places, pixels, 16, 9, batch_size=3)
    tops, lefts = [0, 9, 18, 25], [0, 9, 18, 27, 36, 41]
    expected = torch.zeros_like(pixels)
    for down in range(41):
        for across in range(57):
            seen = [
                (pixels[:, down, across] + places[:, down - top, across - left]).softmax(0)
                for top in tops
                for left in lefts
                if 0 <= down - top < 16 and 0 <= across - left < 16
            ]
            expected[:, down, across] = torch.stack(seen).mean(0)
    torch.testing.assert_close(found, expected)


def test_classes_are_enlarged_in_parts_as_at_once():
    probabilities = torch.rand(50, 9, 11, generator=torch.Generator().manual_seed(0))
    for size in ((31, 23), (5, 40), (9, 11)):
        expected = torch.nn.functional.interpolate(probabilities[None], size, mode="bilinear")[0].argmax(0)
        assert torch.equal(likeliest(probabilities, *size), expected)


def test_crops_have_the_classes_of_their_pixels(folder):
    """The colours of each crop are those of its labels: resized, cut, mirrored and filled up together."""
    colours = np.array([[0, 0, 0], [250, 0, 0], [0, 250, 0], [0, 0, 250]], dtype=np.uint8)
    generator = np.random.default_rng(0)
    rows = []
    for size in ((60, 90), (25, 17), (200, 40)):
        mask = np.kron(generator.integers(1, 4, (3, 3)), np.ones((1, 1), dtype=int))
        mask = mask[np.arange(size[0]) * 3 // size[0]][:, np.arange(size[1]) * 3 // size[1]].astype(np.uint8)
        rows.append((PIL.Image.fromarray(colours[mask]), PIL.Image.fromarray(mask)))
    data = datasets.Dataset.from_dict(
        {"image": [image for image, _ in rows], "annotation": [mask for _, mask in rows]},
        features=datasets.Features({"image": datasets.Image(), "annotation": datasets.Image()}),
    )
    pairs = masks.Masked(data.cast_column("image", datasets.Image(decode=False)), "image", "annotation", "made", None)
    pairs.dataset = pairs.dataset.cast_column("annotation", datasets.Image(decode=False))
    plain = transformers.ViTImageProcessorPil(do_normalize=False)
    crops = Crops(recipe(folder, classes=3, crop=48, scale=[0.5, 3.0]), pairs, plain)
    sizes, filled = set(), 0
    for place in range(60):
        row = crops[place]
        labels, pixels = row["labels"].numpy(), row["pixel_values"].numpy()
        assert (labels.shape, pixels.shape) == ((48, 48), (3, 48, 48))
        inside = labels != 255
        filled += not inside.all()
        sizes.add(int(inside.sum()))
        assert (pixels[:, ~inside] == 0).all()
        # Away from edges between classes the colour is pure.
        strongest = pixels.argmax(0)
        pure = inside & (pixels.max(0) > 0.9)
        assert pure[inside].mean() > 0.5
        assert (strongest[pure] == labels[pure]).mean() > 0.97
    assert len(sizes) > 5
    assert 0 < filled < 60
    again = Crops(crops.recipe, pairs, plain)[7]
    assert all(torch.equal(again[key], value) for key, value in crops[7].items())
    # Every picture once in each epoch.
    seen = [crops.order.tolist() for place in (0, 3, 6) if crops[place]]
    assert all(sorted(order) == [0, 1, 2] for order in seen)


@real
def test_real_pictures_and_masks(folder, tmp_path):
    """ADE20K's files as they are, with its names of classes; measured in the masks' own sizes."""
    pairs = masks.load(str(REAL))
    assert len(pairs) == 3
    for number in range(3):
        picture, mask = pairs.pair(number)
        assert mask.shape == picture.size[::-1]
        assert mask.max() <= 150
    values = {"data": str(REAL), "held_out": str(REAL), "classes": 150, "shorter_side": 64, "crop": 64, "stride": 43}
    names = str(REAL / "objectInfo150.txt")
    segment(recipe(folder, output=str(tmp_path), steps=30, names=names, pictures=2, **values))
    found = result(tmp_path)
    counted = sum((pairs.pair(number)[1] > 0).sum() for number in range(3))
    assert sum(each["pixels"] for each in found["per_class"]) == counted
    assert found["per_class"][0]["name"] == "wall"
    assert found["per_class"][149]["name"].startswith("flag")
    assert any(each["iou"] is None for each in found["per_class"])
    assert 0 < found["mean_iou"] < 1


@pytest.mark.parametrize("form", ["parquet", "folder", "saved", "split"])
def test_columns_of_datasets(folder, tmp_path, form):
    source = masks.load(f"{folder / 'data'}:val")
    rows = [source.pair(number) for number in range(5)]
    table = {
        "label": [PIL.Image.fromarray(mask.astype(np.uint8)) for _, mask in rows],  # before the picture
        "image": [picture for picture, _ in rows],
        "scene": ["x"] * 5,
    }
    features_ = datasets.Features(
        {"label": datasets.Image(), "image": datasets.Image(), "scene": datasets.Value("string")}
    )
    made = datasets.Dataset.from_dict(table, features=features_)
    if form == "parquet":
        made.to_parquet(tmp_path / "rows.parquet")
        data = str(tmp_path / "rows.parquet")
    elif form == "folder":
        (tmp_path / "data").mkdir()
        made.to_parquet(tmp_path / "data/validation-00000-of-00001.parquet")
        data = f"{tmp_path}:validation"
    elif form == "saved":
        made.save_to_disk(tmp_path / "saved")
        data = str(tmp_path / "saved")
    else:
        datasets.DatasetDict({"validation": made}).save_to_disk(tmp_path / "saved")
        data = f"{tmp_path / 'saved'}:validation"
    found = masks.load(data)
    assert (found.image, found.mask, len(found)) == ("image", "label", 5)
    for number, (picture, mask) in enumerate(rows):
        one, other = found.pair(number)
        assert np.array_equal(np.asarray(one), np.asarray(picture))
        assert np.array_equal(other, mask)
    assert found.called(3) == f"row 3 of {data}"
    with pytest.raises(ValueError, match="mask is 'scene', allowed for .* is one of label, image"):
        masks.load(data, "scene")


def test_kinds_of_masks(tmp_path):
    """A palette, 8 bits, 16 bits and 1 bit; a picture that a camera has turned, and the mask that is upright."""
    mask = np.arange(12, dtype=np.uint8).reshape(3, 4)
    paletted = PIL.Image.fromarray(mask).convert("P")
    paletted.putdata(mask.flatten().tolist())
    paletted.putpalette([200, 10, 30] * 256)
    kinds = {
        "p": (paletted, mask),
        "l": (PIL.Image.fromarray(mask), mask),
        "i": (PIL.Image.fromarray(mask.astype(np.uint16) * 300), mask.astype(int) * 300),
        "b": (PIL.Image.fromarray(mask > 5), (mask > 5).astype(int)),
    }
    for kind in ("images", "annotations"):
        (tmp_path / kind).mkdir()
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    for name, (image, _) in kinds.items():
        image.save(tmp_path / "annotations" / f"{name}.png")
        PIL.Image.new("RGB", (3, 4)).save(tmp_path / "images" / f"{name}.jpg", exif=exif)
    found = masks.load(str(tmp_path))
    for number, name in enumerate(sorted(kinds)):
        picture, labels = found.pair(number)
        assert picture.size == (4, 3)
        assert labels.dtype == np.int64
        assert np.array_equal(labels, kinds[name][1]), name
    PIL.Image.new("L", (3, 4)).save(tmp_path / "annotations/p.png")  # of the picture as it lies in the file
    with pytest.raises(
        ValueError, match="mask annotations/p.png is 3 x 4, allowed is the size of its picture, upright 4"
    ):
        found.pair(3)


@pytest.fixture
def spoiled(folder, tmp_path):
    """A copy of the data, of which a test may spoil a file, and a recipe for it."""
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.copytree(folder / "laplace", tmp_path / "laplace")
    return tmp_path, recipe(tmp_path, steps=6, warmup_steps=0)


def all_of(path, content):
    for file in path.iterdir():
        file.write_bytes(content) if isinstance(content, bytes) else content.save(file)


BAD = [
    ("annotations/training", b"", r"data: the mask annotations/training/\d+.png cannot be read \(.*\)\."),
    ("annotations/training", b"no", r"data: the mask annotations/training/\d+.png cannot be read"),
    ("images/training", b"no", r"data: the image .*images/training/\d+.png cannot be read \(it is no image"),
    ("annotations/training", PIL.Image.new("RGB", (50, 50)), r"its pixels are RGB, allowed is one whole number"),
    ("annotations/training", PIL.Image.new("L", (9, 8)), r"is 9 x 8, allowed is the size of its picture, upright"),
    ("annotations/validation", b"no", r"the mask annotations/validation/\d.png cannot be read"),
]


@pytest.mark.parametrize(
    ("where", "content", "said", "workers"), [(*bad, 0) for bad in BAD] + [(*BAD[2], 1), (*BAD[5], 1)]
)
def test_bad_files_are_named(spoiled, where, content, said, workers):
    """The first picture is read before there is work to lose; the second by the process that makes crops."""
    root, asked = spoiled
    asked.workers = workers
    kept = {}
    if workers:
        crops = Crops(asked, masks.load(asked.data), transformers.ViTImageProcessorPil())
        crops[0]
        number = int(crops.order[0]) if "training" in where else 0
        names = sorted(path.name for path in (root / "data" / where).iterdir())
        kept = {root / "data" / where / names[number]: (root / "data" / where / names[number]).read_bytes()}
    all_of(root / "data" / where, content)
    for path, good in kept.items():
        path.write_bytes(good)
    with pytest.raises(ValueError, match=said) as raised:
        segment(asked)
    assert "\n" not in str(raised.value)
    assert not (root / "laplace/segment.json").exists()


def test_labels_that_are_no_class_are_named(spoiled):
    root, asked = spoiled
    for path in (root / "data/annotations/validation").iterdir():
        size = PIL.Image.open(path).size
        PIL.Image.new("L", size, 7).save(path)
    with pytest.raises(
        ValueError,
        match=r"mask annotations/validation/0.png has the label 7, allowed are 1 to 2, and 0 and 255 for none",
    ):
        segment(asked)
    for path in (root / "data/annotations/validation").iterdir():
        PIL.Image.new("L", PIL.Image.open(path).size, 0).save(path)
    segment(asked)  # nothing there counts, and that is no reason to fail
    assert result(root / "laplace")["mean_iou"] is None


def test_wrong_sources(spoiled):
    root, asked = spoiled

    def refused(said, data):
        with pytest.raises(ValueError, match=said):
            masks.load(data)

    refused("has no split 'test', but training, validation", f"{root / 'data'}:test")
    refused("has no folders images and annotations; allowed are a folder", str(root / "laplace"))
    refused("cannot be read as images: there is no such file or folder", str(root / "nowhere"))
    refused("has the columns image of images; give mask=", "digits")
    (root / "data/annotations/training/3.png").unlink()
    refused("annotations/training has no mask of 3.png", str(root / "data"))
    shutil.rmtree(root / "data/images/validation")
    (root / "data/images/validation").mkdir()
    refused("images/validation has no images", f"{root / 'data'}:validation")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": None}, "model is None"),
        ({"data": ""}, "data is ''"),
        ({"classes": 1}, "classes is 1, allowed is at least 2"),
        ({"ignore_index": 0}, "ignore_index is 0, allowed with reduce_labels is 255"),
        ({"ignore_index": 1, "reduce_labels": False}, "ignore_index is 1, allowed is none of the 2 classes"),
        ({"stride": 33}, "stride is 33, allowed is at most crop, 32"),
        ({"stride": 0}, "stride is 0, allowed is at least 1"),
        ({"scale": [2.0, 0.5]}, r"scale is \[2.0, 0.5\], allowed are two numbers"),
        ({"scale": [0.0, 0.5]}, "allowed are two numbers above 0"),
        ({"blocks": 0}, "blocks is 0, allowed is a number from 1"),
        ({"blocks": ["last"]}, r"blocks is \['last'\]"),
        ({"blocks": 3}, "blocks is 3, allowed is 1 to 2"),
        ({"warmup_steps": 60}, "warmup_steps is 60, allowed is less than steps, 60"),
        ({"images_per_step": 6}, "images_per_step is 6, allowed are multiples of 4"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, allowed is a finite number above 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"report_to": "paper"}, "report_to is 'paper', allowed are none, tensorboard, wandb, trackio"),
        ({"output": ""}, "output is ''"),
        ({"names": "/no/such/file"}, "names: /no/such/file cannot be read"),
        ({"model": "/no/such/folder"}, "There is no folder /no/such/folder"),
    ],
)
def test_wrong_values_get_one_sentence(folder, tmp_path, values, said):
    with pytest.raises(ValueError, match=said) as raised:
        segment(recipe(folder, **{"output": str(tmp_path), **values}))
    assert re.fullmatch(r"[^\n]+\.", str(raised.value))


def test_head_that_is_not_finite_is_no_result(folder, tmp_path):
    with pytest.raises(ValueError, match="The head is no longer finite; delete .* and give a lower learning_rate"):
        segment(recipe(folder, output=str(tmp_path), steps=8, warmup_steps=0, learning_rate=1e20))
    assert not (tmp_path / "segment.json").exists()


@pytest.mark.slow
def test_two_processes_measure_each_picture_once(folder, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from laplacian_heads import recipes\n"
        "from laplacian_heads.eval.segment import SegmentRecipe, segment\n"
        "segment(recipes.load(SegmentRecipe, sys.argv[1]))\n"
    )
    recipes.write(tmp_path / "recipe.yaml", recipe(folder, output=str(tmp_path / "out"), batch_size=2, pictures=1))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "recipes/accelerate/ddp.yaml",
    ]
    command += ["--cpu", "--num_processes=2", f"--main_process_port={port}", program, tmp_path / "recipe.yaml"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = result(tmp_path / "out")
    held_out = masks.load(f"{folder / 'data'}:validation")
    counted = [sum((held_out.pair(number)[1] == label).sum() for number in range(5)) for label in (1, 2)]
    assert [each["pixels"] for each in found["per_class"]] == counted
    assert found["mean_iou"] > 0.5


def test_dry_run_writes_nothing(folder, tmp_path, capsys):
    segment(recipe(folder, output=str(tmp_path / "out")), dry_run=True)
    assert "60 steps of 4 of 12 pictures, measured on 5, 2 classes" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    names = tmp_path / "names.txt"
    names.write_text("stripes\nsquares\nmore\n")
    with pytest.raises(ValueError, match=r"has 3 names, allowed is one for each of 2"):
        segment(recipe(folder, names=str(names)), dry_run=True)


def test_held_out_pictures_keep_their_shape(folder):
    asked = recipe(folder)
    pairs = masks.load(asked.held_out)
    whole = Whole(asked, pairs, transformers.ViTImageProcessorPil())
    for number in range(len(whole)):
        values, labels = whole[number]
        picture, mask = pairs.pair(number)
        assert min(values.shape[1:]) == 32
        assert values.shape[1] / values.shape[2] == pytest.approx(picture.size[1] / picture.size[0], rel=0.05)
        assert labels.shape == mask.shape
