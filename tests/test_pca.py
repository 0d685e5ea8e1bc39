"""The verb pca: components against scikit-learn's, colours that can be compared, and foreground that is found."""

import base64
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import PIL.Image
import pytest
import torch
import transformers
from conftest import ROOT
from sklearn.decomposition import PCA
from sklearn.metrics import jaccard_score

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification, recipes
from laplacian_heads.eval import features
from laplacian_heads.eval.pca import PcaRecipe, Picture, best_union, components, foreground_figures, otsu, pca

REAL = ROOT.parent / "shared" / "images"
real = pytest.mark.skipif(not REAL.is_dir(), reason="real pictures, shared/images beside the repository, are not here")
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def laplace_vit(heads=0, seed=0, **shape):
    torch.manual_seed(seed)
    config = {**SHAPE, **shape, "image_size": 32, "patch_size": 8, "laplacian_heads": heads, "num_labels": 3}
    return LaplaceViTForImageClassification(LaplaceViTConfig(**config, layer_scale_init_value=1.0))


def vit():
    torch.manual_seed(0)
    config = transformers.ViTConfig(**{**SHAPE, "hidden_size": 48}, image_size=32, patch_size=4, intermediate_size=48)
    return transformers.ViTForImageClassification(config)


def dinov2():
    torch.manual_seed(0)
    return transformers.Dinov2Model(transformers.Dinov2Config(**SHAPE, image_size=28, patch_size=7))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, and pictures of discs on stripes, of many sizes, with masks in which 255 is the disc's edge."""
    folder = tmp_path_factory.mktemp("pca")
    processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    models = {"k0": laplace_vit(), "k2": laplace_vit(2, seed=1), "wide": laplace_vit(hidden_size=64)}
    for name, model in {**models, "vit": vit(), "dinov2": dinov2()}.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    generator = np.random.default_rng(0)
    for kind in ("images", "annotations"):
        (folder / "data" / kind).mkdir(parents=True)
    for i, (height, width) in enumerate([(40, 40), (60, 41), (33, 80), (50, 64)]):
        down, across = np.mgrid[:height, :width]
        radius = np.hypot(down - height / 2, across - width / 2) - min(height, width) * 0.35
        pixels = np.where(radius[..., None] < 0, [230, 60, 40], ((across // 4) % 2 * 40 + 40)[..., None])
        pixels = np.clip(pixels + generator.normal(0, 8, pixels.shape), 0, 255).astype(np.uint8)
        mask = np.where(abs(radius) < 1, 255, np.where(radius < 0, 3, 0)).astype(np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"data/images/{i}.png")
        PIL.Image.fromarray(mask).save(folder / f"data/annotations/{i}.png")
    return folder


def recipe(folder, *models, **values):
    given = {"models": [str(folder / name) for name in models], "data": str(folder / "data"), "image_size": 64}
    return recipes.load(PcaRecipe, "pca", {**given, **values})


def drawn(seed, width=10, grids=((4, 5), (6, 3), (7, 7))):
    """Tokens whose components have different variances."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([9.0, 6.0, 4.0, *[1.0] * (width - 3)])
    turned = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
    return [torch.randn(*grid, width, generator=generator) * scales @ turned + 3 for grid in grids]


def test_components_are_those_of_scikit_learn():
    tokens = {"a": drawn(0), "b": drawn(1)}
    found = components(tokens, "per_model")["a"]
    points = torch.cat([each.flatten(0, 1) for each in tokens["a"]]).double().numpy()
    expected = PCA(3, svd_solver="full").fit(points)
    maps = torch.cat([each.flatten(0, 1) for each in found.maps]).numpy()
    np.testing.assert_allclose(maps, expected.transform(points), atol=1e-9)
    np.testing.assert_allclose(found.shares, expected.explained_variance_ratio_, rtol=1e-9)
    assert [each.shape for each in found.maps] == [(4, 5, 3), (6, 3, 3), (7, 7, 3)]
    # One basis for all models.
    shared = components(tokens, "shared")
    points = {name: torch.cat([each.flatten(0, 1) for each in maps]).double().numpy() for name, maps in tokens.items()}
    expected = PCA(3, svd_solver="full").fit(np.concatenate(list(points.values())))
    for name in tokens:
        maps = torch.cat([each.flatten(0, 1) for each in shared[name].maps]).numpy()
        np.testing.assert_allclose(maps, expected.transform(points[name]), atol=1e-9)
    with pytest.raises(
        ValueError, match="basis is shared, allowed for models of one width; there are 10 of a, 12 of b"
    ):
        components({"a": drawn(0), "b": drawn(1, width=12)}, "shared")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_other_models_have_the_order_and_signs_of_the_first(order):
    """The same components with other variances, signs and a turned space, of a model with smaller patches as well."""
    points = torch.randn(96, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.linalg.qr(points - points.mean(0)).Q  # uncorrelated, so that they are the components
    maps = list(points.view(2, 8, 6, 3))
    first = [each * torch.tensor([5.0, 3.0, 2.0]) for each in maps]
    scales = torch.tensor([5.0, 3.0, 2.0])[torch.argsort(torch.tensor(order))]
    turned = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(9)).double()).Q[:3]
    other = [each * scales * torch.tensor([1, -1, 1]) @ turned for each in maps]
    finer = [each.repeat_interleave(2, 0).repeat_interleave(2, 1) for each in other]
    for seen in (other, finer):
        found = components({"first": first, "other": seen}, "per_model")
        for one, two in zip(*(found[name].maps for name in ("first", "other")), strict=True):
            two = two[:: two.shape[0] // 8, :: two.shape[1] // 6]
            for channel in range(3):
                cosine = np.corrcoef(one[..., channel].flatten(), two[..., channel].flatten())[0, 1]
                assert cosine > 0.999
        assert sorted(found["other"].order) == [0, 1, 2]
        variances = torch.cat([each.flatten(0, 1) for each in found["other"].maps]).var(0)
        own = torch.cat([each.flatten() for each in found["other"].first()]).var()
        assert own.item() == pytest.approx(variances.max().item())


def test_otsu_is_the_best_of_all_thresholds():
    generator = np.random.default_rng(0)
    for values in (
        np.concatenate([generator.normal(0, 1, 50), generator.normal(6, 0.5, 17)]),
        generator.integers(0, 5, 40).astype(float),
        np.array([1.0, 2.0]),
    ):
        splits = [(values <= at, values > at) for at in np.unique(values)[:-1]]
        between = [one.mean() * two.mean() * (values[one].mean() - values[two].mean()) ** 2 for one, two in splits]
        one, two = splits[int(np.argmax(between))]
        assert values[one].max() < otsu(values) < values[two].min()
    assert otsu(np.ones(5)) == 1.0
    assert otsu(np.ones(1)) == 1.0


def test_best_union_of_all_is_found():
    generator = np.random.default_rng(0)
    counts = torch.from_numpy(generator.integers(1, 50, (3, 5, 2)))
    labels = np.concatenate([np.full(count, part) for part in range(5) for count in counts.sum(0)[part].tolist()])
    right = np.concatenate([np.full(count, kind) for part in counts.sum(0).tolist() for kind, count in enumerate(part)])
    scores = {
        parts: jaccard_score(right, np.isin(labels, parts))
        for size in range(1, 5)
        for parts in itertools.combinations(range(5), size)
    }
    found = best_union(counts)
    assert found["iou"] == pytest.approx(max(scores.values()))
    assert scores[tuple(found["parts"])] == max(scores.values())


def test_foreground_is_found_whatever_the_sign():
    """Of components that are the mask itself, in another size; with pixels that do not count."""
    masks = [torch.zeros(24, 32, dtype=torch.bool), torch.zeros(40, 16, dtype=torch.bool)]
    masks[0][8:16, 4:24], masks[1][8:32, :8] = True, True
    pictures = [Picture("", None, mask, torch.ones_like(mask)) for mask in masks]
    maps = [mask[::4, ::4].double()[..., None] * torch.tensor([10.0, 0.0, 0.0]) for mask in masks]
    noise = torch.Generator().manual_seed(0)
    maps = [each + 0.1 * torch.randn(each.shape, generator=noise) for each in maps]
    for sign in (1, -1):
        found = components({"only": [each * sign for each in maps]}, "per_model")["only"]
        for figures in foreground_figures(found, pictures, clusters=2, seed=0).values():
            if "iou" in figures:
                # Where components are enlarged corners are cut.
                assert figures["iou"] > 0.9
                assert figures["mean_picture_iou"] > 0.9
    everything = foreground_figures(found, pictures, clusters=4, seed=0)
    assert everything["kmeans"]["iou"] > 0.9
    assert foreground_figures(found, pictures, clusters=4, seed=0) == everything
    # What is wrong at ignored pixels does not matter.
    wrong = [mask.clone() for mask in masks]
    counted = [torch.ones_like(mask) for mask in masks]
    wrong[0][:3], counted[0][:3] = True, False
    pictures = [Picture("", None, *each) for each in zip(wrong, counted, strict=True)]
    assert foreground_figures(found, pictures, clusters=2, seed=0)["first_component"]["iou"] > 0.9


def test_figures_of_a_model_are_those_by_hand(folder, tmp_path):
    """From the files to pca.json with transformers, scikit-learn and numpy, in the masks' own sizes."""
    pca(recipe(folder, "vit", output=str(tmp_path)))
    found = json.loads((tmp_path / "pca/pca.json").read_text())
    assert found["pictures"] == [f"images/{i}.png" for i in range(4)]
    model = transformers.AutoModel.from_pretrained(folder / "vit").eval()
    grids, maps, right = [], [], []
    for i in range(4):
        image = PIL.Image.open(folder / f"data/images/{i}.png")
        factor = 64 / min(image.size)
        grid = [round(side * factor / 4) for side in (image.height, image.width)]
        pixels = np.asarray(image.resize((grid[1] * 4, grid[0] * 4), PIL.Image.Resampling.BICUBIC)) / 127.5 - 1
        with torch.no_grad():
            values = torch.from_numpy(pixels).float().permute(2, 0, 1)[None]
            maps.append(model(values, interpolate_pos_encoding=True).last_hidden_state[0, 1:].double().numpy())
        grids.append(grid)
        right.append(np.asarray(PIL.Image.open(folder / f"data/annotations/{i}.png")))
    fitted = PCA(3, svd_solver="full").fit(np.concatenate(maps))
    of_model = found["models"]["vit"]
    assert of_model["variance_shares"] == pytest.approx(fitted.explained_variance_ratio_, rel=1e-4)
    first = [
        torch.from_numpy(fitted.transform(each)[:, 0]).view(1, 1, *grid) for each, grid in zip(maps, grids, strict=True)
    ]
    threshold = of_model["first_component"]["threshold"]
    assert threshold == pytest.approx(otsu(torch.cat([each.flatten() for each in first]).numpy()), rel=1e-3)
    predicted, expected = [], []
    for each, mask in zip(first, right, strict=True):
        enlarged = torch.nn.functional.interpolate(each, mask.shape, mode="bilinear")[0, 0].numpy()
        predicted.append((enlarged > threshold)[mask != 255])
        expected.append((mask == 3)[mask != 255])
    scores = [jaccard_score(np.concatenate(expected), np.concatenate(predicted) == side) for side in (False, True)]
    assert of_model["first_component"]["iou"] == pytest.approx(max(scores), abs=2e-3)
    assert of_model["first_component"]["parts"] == [int(np.argmax(scores))]
    assert found["all_foreground_iou"] == pytest.approx(np.concatenate(expected).mean())
    # A red disc is easily told from grey stripes, by pixels projected at random even.
    assert of_model["kmeans"]["iou"] > 0.6


def test_models_side_by_side(folder, tmp_path, capsys):
    names = ("k0", "k2", "vit", "dinov2")
    pages = tmp_path / "out"
    pca(recipe(folder, *names, output=str(pages), pictures=3), dry_run=True)
    assert not pages.exists()
    pca(recipe(folder, *names, output=str(pages), pictures=3, clusters=3))
    printed = capsys.readouterr().out
    assert {path.name for path in pages.iterdir()} == {"pca.json", "pca.png", "pca.svg", "report.html"}
    found = json.loads((pages / "pca.json").read_text())
    html = (pages / "report.html").read_text()
    assert list(found["models"]) == list(names)
    assert len(found["pictures"]) == 3
    assert html.count("data:image/png;base64,") == 3 * 5
    assert "k2, 2 Laplacian heads in each layer" in html
    assert "k0, no Laplacian heads" in html
    assert str(folder) not in html  # reports are published
    for name in names:
        score = f"{found['models'][name]['kmeans']['iou']:.4f}"
        assert score in html
        assert score in printed
    assert not re.search(r"(src|href)=\"(?!data:)", html)
    pca(recipe(folder, "k0", "k2", output=str(tmp_path / "shared"), basis="shared", threshold=0.4, invert=True))
    assert "not below 0.4" in (tmp_path / "shared/report.html").read_text()
    with pytest.raises(
        ValueError, match="basis is shared, allowed for models of one width; there are 32 of k0, 64 of w"
    ):
        pca(recipe(folder, "k0", "wide", output=str(tmp_path / "two"), basis="shared"))


def test_colours_are_the_components(folder, tmp_path):
    """Of one model in the page: scikit-learn's components but for the clipped ends, black in the background."""
    pca(recipe(folder, "k0", output=str(tmp_path), threshold=0.5))
    backbone = features.load(str(folder / "k0"))
    found = re.findall(r'class="patches"[^>]*base64,([^"]+)"', (tmp_path / "pca/report.html").read_text())
    images = [np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(each)))) for each in found]
    tokens = []
    for i, image in enumerate(images):
        picture = PIL.Image.open(folder / f"data/images/{i}.png")
        resized = picture.resize((image.shape[1] * 8, image.shape[0] * 8), PIL.Image.Resampling.BICUBIC)
        values = torch.from_numpy(np.asarray(resized) / 127.5 - 1).float().permute(2, 0, 1)[None]
        tokens.append(backbone.tokens(values).patches[0][0].double().numpy())
    points = PCA(3, svd_solver="full").fit_transform(np.concatenate(tokens))
    first = (points[:, 0] - points[:, 0].min()) / np.ptp(points[:, 0])
    shown = np.concatenate([image.reshape(-1, 3) for image in images])
    assert (shown[first < 0.499] == 0).all()
    front = first > 0.501
    low, high = np.percentile(points[front], [1, 99], axis=0)
    expected = ((points[front] - low) / (high - low)).clip(0, 1) * 255
    assert np.abs(shown[front] - expected).max() < 6
    assert 0 < front.mean() < 1


def test_pictures_without_masks(folder, tmp_path):
    """A folder of pictures, and one with a folder for each class; drawn are always the same ones."""
    for name in ("one", "two"):
        shutil.copytree(folder / "data/images", tmp_path / "classes" / name)
    for data in (folder / "data/images", tmp_path / "classes"):
        for output in ("a", "b"):
            pca(recipe(folder, "k0", data=str(data), output=str(tmp_path / output), pictures=3))
        one, other = ((tmp_path / output / "pca/pca.json").read_text() for output in ("a", "b"))
        assert one == other
        assert "kmeans" not in json.loads(one)["models"]["k0"]
        assert len(json.loads(one)["pictures"]) == 3


@real
def test_real_pictures(folder, tmp_path):
    pca(recipe(folder, "k0", "vit", data=str(REAL / "ade20k"), output=str(tmp_path), foreground=[2], pictures=2))
    found = json.loads((tmp_path / "pca.json").read_text())
    assert found["foreground"] == [2]  # buildings
    for name in ("k0", "vit"):
        assert 0 < found["models"][name]["kmeans"]["iou"] < 1
    with pytest.raises(ValueError, match=r"foreground is \[149\], allowed are labels that the drawn masks have"):
        pca(recipe(folder, "k0", data=str(REAL / "ade20k"), output=str(tmp_path), foreground=[149]))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"models": None}, "models is None"),
        ({"models": ["a", "./a"]}, "allowed is each model once"),
        ({"data": None}, "data is None"),
        ({"basis": "both"}, "basis is 'both', allowed are per_model and shared"),
        ({"threshold": 2.0}, "threshold is 2.0, allowed is a number from 0 to 1"),
        ({"clusters": 1}, "clusters is 1, allowed is 2 to 8"),
        ({"foreground": []}, r"foreground is \[\], allowed is a list of labels"),
        ({"pictures": 0}, "pictures is 0, allowed is at least 1"),
        ({"image_size": 0}, "image_size is 0"),
        ({"output": ""}, "output is ''"),
        ({"models": ["/no/such/folder"]}, "There is no folder /no/such/folder"),
    ],
)
def test_wrong_values_get_one_sentence(folder, tmp_path, values, said):
    with pytest.raises(ValueError, match=said) as raised:
        pca(recipe(folder, "k0", **{"output": str(tmp_path), **values}))
    assert re.fullmatch(r"[^\n]+\.", str(raised.value))


def test_pictures_that_cannot_be_used(folder, tmp_path):
    shutil.copytree(folder / "data", tmp_path / "data")
    asked = recipe(folder, "k0", data=str(tmp_path / "data"), output=str(tmp_path / "out"))
    PIL.Image.new("L", (9, 9)).save(tmp_path / "data/annotations/2.png")
    with pytest.raises(ValueError, match="the mask annotations/2.png is 9 x 9, allowed is the size of its picture"):
        pca(asked)
    for kind in ("images", "annotations"):
        PIL.Image.new("L", (90, 9)).save(tmp_path / f"data/{kind}/2.png")
    with pytest.raises(ValueError, match="images/2.png is 90 x 9, allowed is a side 8 times as long as the other"):
        pca(asked)
    (tmp_path / "data/images/2.png").write_bytes(b"no")
    with pytest.raises(ValueError, match="the image .*images/2.png cannot be read"):
        pca(asked)


@pytest.mark.slow
def test_pictures_of_the_hub(seeded_hub, folder, tmp_path):
    """Drawn from a stream, so that no data set is fetched whole for a few pictures."""
    code = f"""
        from laplacian_heads import recipes
        from laplacian_heads.eval.pca import PcaRecipe, pca
        values = {{"models": [{str(folder / "k0")!r}], "data": "uoft-cs/cifar10:plain_text:test", "image_size": 32}}
        for output in ("a", "b"):
            pca(recipes.load(PcaRecipe, "pca", {{**values, "pictures": 3, "output": output}}))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, env=seeded_hub, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    one, other = ((tmp_path / output / "pca/pca.json").read_text() for output in ("a", "b"))
    assert one == other
    names = json.loads(one)["pictures"]
    assert names == [f"picture {number} of uoft-cs/cifar10:plain_text:test" for number in range(3)]
    assert f"<span>{names[0]}</span>" in (tmp_path / "a/pca/report.html").read_text()
