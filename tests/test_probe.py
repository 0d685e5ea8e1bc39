"""Linear probes and nearest neighbours on frozen features: what they compute, write, go on with and refuse."""

import dataclasses
import json
import math
import shutil

import datasets
import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from PIL import Image
from reference import redraw
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier
from test_processes import finish, launched

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification, images, neighbors, recipes
from laplacian_heads.eval import features
from laplacian_heads.eval import probe as probing
from laplacian_heads.files import weights_hash

MODEL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 8, "patch_size": 4}
QUICK = {"data": "digits", "held_out": "digits:test", "batch_size": 32, "workers": 0}
PROBE = {
    **QUICK,
    **{"images": 400, "selection": 100.0, "images_per_step": 64, "epochs": 2, "blocks": [1, 2], "augment": False},
    **{"learning_rates": [1e-2, 1.0], "save_steps": 4, "logging_steps": 3},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of random weights that are large enough for its features to differ."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = redraw(LaplaceViTForImageClassification(LaplaceViTConfig(**MODEL, laplacian_heads=2)), std=0.4)
    torch.nn.init.ones_(model.vit.layernorm.weight)
    model.save_pretrained(folder)
    transformers.BitImageProcessor(
        size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}, image_mean=[0.2] * 3, image_std=[0.4] * 3
    ).save_pretrained(folder)
    return folder


def probe_recipe(folder, output, **values):
    given = {"model": str(folder), "output": str(output), **values}
    return recipes.load(probing.ProbeRecipe, "probe", {**PROBE, **given})


def knn_recipe(model, output, **values):
    return recipes.load(probing.KnnRecipe, "knn", {**QUICK, "model": str(model), "output": str(output), **values})


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A probe that was not interrupted, and what its probe.json says."""
    output = tmp_path_factory.mktemp("whole")
    probing.probe(probe_recipe(model, output))
    return output, json.loads((output / "probe.json").read_text())


def clusters(classes=5, width=16):
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(classes, width))
    known, asked = generator.integers(0, classes, 300), generator.integers(0, classes, 70)
    bank = (centres[known] + 1.5 * generator.normal(size=(300, width))) * generator.uniform(0.1, 9, (300, 1))
    return bank, known, centres[asked] + 1.5 * generator.normal(size=(70, width))


@pytest.mark.parametrize("parts", [(1024, 65536), (8, 7), (64, 300)])
@pytest.mark.parametrize("count", [1, 10, 300])
def test_votes_are_a_naive_loop_s_and_sklearn_s(monkeypatch, parts, count):
    monkeypatch.setattr(neighbors, "QUERIES", parts[0])
    monkeypatch.setattr(neighbors, "BANK", parts[1])
    bank, known, asked = clusters()
    scores = np.zeros((70, 5))
    for i, vector in enumerate(asked):
        similarities = bank @ vector / np.linalg.norm(bank, axis=1) / np.linalg.norm(vector)
        for j in np.argsort(-similarities)[:count]:
            scores[i, known[j]] += math.exp(similarities[j] / 0.07)
    scores /= scores.sum(1, keepdims=True)
    found = neighbors.vote(*map(torch.tensor, (asked, bank, known)), count, 0.07, 5)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), scores, atol=1e-5)
    by = KNeighborsClassifier(
        count, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / 0.07)
    ).fit(bank, known)
    np.testing.assert_array_equal(found.argmax(1).numpy(), by.predict(asked))


def test_similarities_that_would_overflow_are_tallied():
    found = neighbors.tally(torch.tensor([[1.0, 0.9, 0.9]]), torch.tensor([[0, 1, 1]]), 1e-3, 2)
    torch.testing.assert_close(found, torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize(("count", "temperature"), [(0, 0.1), (6, 0.1), (2, 0.0), (2, -1.0)])
def test_votes_that_are_refused(count, temperature):
    bank, labels = torch.randn(5, 3), torch.zeros(5, dtype=torch.long)
    with pytest.raises(ValueError, match=", allowed is "):
        neighbors.vote(bank, bank, labels, count, temperature, 2)


def test_shipped_grid_is_dinov2_s(model, capsys):
    recipe = recipes.load(probing.ProbeRecipe, "probe", {"model": str(model)})
    backbone = features.load(str(model))
    assert len(probing._heads(recipe, backbone)) == 26  # of a model of three blocks
    assert "has 3 blocks: no head reads the last 4" in capsys.readouterr().out
    backbone.depth = 4
    heads = probing._heads(recipe, backbone)
    assert len(set(heads)) == 52
    assert {(head.blocks, head.mean_patch) for head in heads} == {(1, False), (1, True), (4, False), (4, True)}
    assert len({head.learning_rate for head in heads}) == 13
    widths = {(head.blocks, head.mean_patch): linear.in_features for head, linear in _pairs(backbone, heads)}
    assert widths == {(1, False): 32, (1, True): 64, (4, False): 128, (4, True): 160}
    assert not any("backbone" in name for name in probing.Heads(backbone, heads, 2, 0).state_dict())


def _pairs(backbone, heads):
    return zip(heads, probing.Heads(backbone, heads, 2, 0).linears, strict=True)


@pytest.mark.parametrize("batch_size", [64, 16])  # the second accumulates
def test_heads_train_as_each_would_alone(model, tmp_path, batch_size):
    recipe = probe_recipe(model, tmp_path, batch_size=batch_size)
    backbone = features.load(str(model))
    train, _ = probing._split(images.load("digits").select(range(400)), recipe)
    steps, heads = 9, probing._heads(recipe, backbone)
    trained = probing.Heads(backbone, heads, 10, 3)
    plain = [(linear.weight.detach().clone(), linear.bias.detach().clone()) for linear in trained.linears]
    assert all(0.009 < weight.std() < 0.011 and not bias.any() for weight, bias in plain)
    probing._train(trained, train, recipe, steps, tmp_path, probing.PartialState())

    processor = transformers.AutoImageProcessor.from_pretrained(model)
    network = transformers.AutoModel.from_pretrained(model).eval()
    with torch.no_grad():
        pixels = processor([train.picture(i) for i in range(300)], return_tensors="pt")["pixel_values"]
        states = [network.layernorm(each) for each in network(pixels, output_hidden_states=True).hidden_states]
    labels = torch.tensor(train.labels)
    order = np.concatenate([np.random.default_rng((0, epoch)).permutation(300) for epoch in range(2)])
    for head, (weight, bias), linear in zip(heads, plain, trained.linears, strict=True):
        read = [state[:, 0] for state in states[-head.blocks :]]
        inputs = torch.cat([*read, *([states[-1][:, 1:].mean(1)] if head.mean_patch else [])], dim=1)
        weight.requires_grad_(), bias.requires_grad_()
        momenta = [torch.zeros_like(weight), torch.zeros_like(bias)]
        for step in range(steps):
            some = order[64 * step : 64 * step + 64]
            loss = torch.nn.functional.cross_entropy(inputs[some] @ weight.mT + bias, labels[some])
            gradients = torch.autograd.grad(loss, (weight, bias))
            rate = head.learning_rate * 64 / 256 * (1 + math.cos(math.pi * step / steps)) / 2
            with torch.no_grad():
                for i, parameter in enumerate((weight, bias)):
                    momenta[i] = 0.9 * momenta[i] + gradients[i]
                    parameter -= rate * momenta[i]
        torch.testing.assert_close(linear.weight, weight, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(linear.bias, bias, atol=1e-5, rtol=1e-5)


def test_draws_depend_on_the_seed_and_their_number_alone(model):
    transform = probing._transform(features.load(str(model)), augment=True)
    pictures = features.Pictures(images.load("digits").select(range(50)), transform, skip=True)
    whole = probing.Draws(pictures, 150, 0)
    rows = [whole[draw] for draw in range(150)]
    torch.rand(7)  # the state of the process does not matter, and is left alone
    before = torch.get_rng_state()
    later = probing.Draws(pictures, 150, 0)
    assert all(torch.equal(rows[draw][0], later[draw][0]) for draw in (149, 60, 3))
    assert torch.equal(before, torch.get_rng_state())
    for epoch in range(3):
        assert sorted(label for _, label in rows[50 * epoch : 50 * epoch + 50]) == sorted(pictures.images.labels)
    assert not torch.equal(rows[0][0], probing.Draws(pictures, 150, 1)[0][0])
    assert rows[0][0].shape == (3, 8, 8)


def test_augmented_images_are_scaled_as_the_processor_scales(model):
    backbone = features.load(str(model))
    white = Image.new("RGB", (20, 30), "white")
    values = probing._transform(backbone, augment=True)(white)
    torch.testing.assert_close(values, torch.full((3, 8, 8), (1 - 0.2) / 0.4))
    torch.testing.assert_close(values, probing._transform(backbone, augment=False)(white))


def test_augmentation_is_as_large_as_each_processor_s_images(model):
    backbone = features.load(str(model))
    for processor, size in (
        (transformers.ViTImageProcessor(size={"height": 24, "width": 16}), (24, 16)),
        (transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}), (16, 16)),
        (
            transformers.DeiTImageProcessor(size={"height": 20, "width": 20}, crop_size={"height": 16, "width": 16}),
            (16, 16),
        ),
        (transformers.CLIPImageProcessor(size={"shortest_edge": 24}, crop_size={"height": 16, "width": 16}), (16, 16)),
    ):
        backbone.processor = processor
        for augment in (True, False):
            assert probing._transform(backbone, augment)(Image.new("RGB", (50, 40))).shape == (3, *size)


def test_probe_writes_what_its_heads_score(model, whole):
    output, found = whole
    assert sorted(path.name for path in output.iterdir()) == ["probe", "probe.json"]
    assert sorted(path.name for path in (output / "probe").iterdir()) == ["probe.png", "probe.safetensors", "probe.svg"]
    assert (found["images"], found["selection_images"], found["held_out_images"], found["steps"]) == (300, 100, 360, 9)
    assert len(found["heads"]) == 8
    by_selection, by_held_out = found["by_selection"], found["by_held_out"]
    assert by_selection["selection_accuracy"] == max(head["selection_accuracy"] for head in found["heads"])
    assert by_held_out["held_out_accuracy"] == max(head["held_out_accuracy"] for head in found["heads"])
    assert by_selection["held_out_accuracy"] > 0.3  # chance is 0.1

    # as `reading` says
    held_out = images.load("digits:test")
    processor = transformers.AutoImageProcessor.from_pretrained(model)
    pixels = processor([held_out.picture(i) for i in range(360)], return_tensors="pt")["pixel_values"]
    tokens = features.load(str(model)).tokens(pixels, by_selection["blocks"])
    mean = [tokens.patches[-1].mean(1)] if by_selection["mean_patch"] else []
    head = load_file(output / "probe/probe.safetensors")
    ranked = (torch.cat([*tokens.cls, *mean], 1) @ head["weight"].mT + head["bias"]).argsort(1, descending=True)
    right = ranked == torch.tensor(held_out.labels)[:, None]
    assert by_selection["held_out_accuracy"] == pytest.approx(right[:, 0].double().mean().item(), abs=1e-9)
    assert by_selection["held_out_accuracy_top5"] == pytest.approx(right[:, :5].sum(1).double().mean().item(), abs=1e-9)
    with safe_open(output / "probe/probe.safetensors", "pt") as file:
        assert json.loads(file.metadata()["names"]) == held_out.names
        assert json.loads(file.metadata()["blocks"]) == by_selection["blocks"]


def test_selection_sees_no_held_out_image(model, whole, tmp_path):
    """With other held-out data the same head is chosen, for it is trained and chosen on images of data alone."""
    held_out = images.load("digits:test")
    shuffled = np.random.default_rng(0).permutation(held_out.labels)
    rows = {"image": [np.asarray(held_out.picture(i)) for i in range(360)], "label": shuffled}
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=held_out.names)})
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "held_out")
    probing.probe(probe_recipe(model, tmp_path / "output", held_out=str(tmp_path / "held_out")))
    other = json.loads((tmp_path / "output/probe.json").read_text())
    chosen = whole[1]["by_selection"]
    assert other["by_selection"]["head"] == chosen["head"]
    assert other["by_selection"]["selection_accuracy"] == chosen["selection_accuracy"]
    assert other["by_selection"]["held_out_accuracy"] < 0.2 < chosen["held_out_accuracy"]


@pytest.mark.parametrize(("selection", "count"), [(0.25, 100), (30.0, 30)])
def test_training_and_selection_share_no_image(selection, count, model, tmp_path):
    recipe = probe_recipe(model, tmp_path, selection=selection)
    train, chosen = probing._split(probing._data(recipe)[0], recipe)
    assert (len(train), len(chosen)) == (400 - count, count)
    assert len({*train.rows, *chosen.rows}) == 400


@pytest.mark.parametrize("step", [2, 6, "measurement"])
def test_interrupted_probe_ends_the_same(model, whole, tmp_path, monkeypatch, capsys, step):
    recipe = probe_recipe(model, tmp_path)
    training_step, stream = probing.ProbeTrainer.training_step, probing.stream

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    def interrupted_stream(*args):
        if step == "measurement" and args[-1] == "held_out":
            raise KeyboardInterrupt
        return stream(*args)

    with monkeypatch.context() as patch:
        patch.setattr(probing.ProbeTrainer, "training_step", interrupted)
        patch.setattr(probing, "stream", interrupted_stream)
        with pytest.raises(KeyboardInterrupt):
            probing.probe(recipe)
    saved = {path.name for path in (tmp_path / "probe").glob("checkpoint-*")}
    assert saved == {2: set(), 6: {"checkpoint-4"}, "measurement": {"checkpoint-9"}}[step]
    for checkpoint in saved:
        weights = load_file(tmp_path / "probe" / checkpoint / "model.safetensors")
        assert all(name.startswith("linears.") for name in weights)
        # One that a kill left incomplete is not gone on from.
        shutil.copytree(tmp_path / "probe" / checkpoint, tmp_path / "probe/checkpoint-8")
        (tmp_path / "probe/checkpoint-8/trainer_state.json").write_text('{"global_step":')
        with pytest.raises(ValueError, match="holds the results of another recipe, in which epochs is 2 instead of 3"):
            probing.probe(probe_recipe(model, tmp_path, epochs=3))
        path = tmp_path / "probe" / checkpoint / "scheduler.pt"
        content = path.read_bytes()
        path.write_bytes(content[:100])
        with pytest.raises(ValueError, match="scheduler.pt is damaged; delete"):
            probing.probe(recipe)
        path.write_bytes(content)
    with FileLock(tmp_path / "probe/.lock"), pytest.raises(ValueError, match="another process is at work in"):
        probing.probe(recipe)
    capsys.readouterr()
    probing.probe(recipe)
    assert ("going on from" in capsys.readouterr().out) == bool(saved)
    assert json.loads((tmp_path / "probe.json").read_text()) == whole[1]
    for name, weight in load_file(whole[0] / "probe/probe.safetensors").items():
        assert torch.equal(weight, load_file(tmp_path / "probe/probe.safetensors")[name])

    content = (tmp_path / "probe.json").read_bytes()
    probing.probe(recipe)
    assert "probe.json is finished." in capsys.readouterr().out
    with pytest.raises(ValueError, match="in which seed is 0 instead of 1; give another output="):
        probing.probe(probe_recipe(model, tmp_path, seed=1))
    assert (tmp_path / "probe.json").read_bytes() == content


def test_results_of_other_weights_are_not_taken_for_these(model, whole, tmp_path):
    """And what is written into a model's folder does not count among its weights."""
    shutil.copytree(model, tmp_path / "model")
    here = dataclasses.replace(probe_recipe(tmp_path / "model", "null"), output=None)
    probing.probe(here)
    assert json.loads((tmp_path / "model/probe.json").read_text())["weights"] == whole[1]["weights"]
    probing.probe(here)
    redraw(LaplaceViTForImageClassification.from_pretrained(model), 1).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="in which weights is "):
        probing.probe(here)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model": None}, "model is None, allowed is a model's folder"),
        ({"data": ""}, "data is '', allowed is a source of images."),
        ({"learning_rates": [0.1, 0.0]}, "learning_rates is .*, allowed is a list of numbers above 0, each once."),
        ({"learning_rates": [0.1, 0.1]}, "learning_rates is .*, each once."),
        ({"blocks": [0]}, "blocks is .*, allowed is a list of whole numbers of at least 1"),
        ({"mean_patch": [1]}, "mean_patch is .*, allowed is a list of true and false"),
        ({"selection": 0.0}, "selection is 0.0, allowed is a share of data below 1 or a whole number"),
        ({"selection": 1.5}, "selection is 1.5"),
        ({"selection": 400}, "selection is 400, allowed is what leaves some of the 400 images"),
        ({"images": 5000}, "images is 5000, allowed are at most the 1437 of digits."),
        ({"images_per_step": 40}, "images_per_step is 40, allowed are multiples of batch_size, 32."),
        ({"images_per_step": 960}, "images_per_step is 960, allowed is at most the 600 images of 2 epochs."),
        ({"blocks": [4]}, r"blocks is \[4\], allowed is at most 3"),
        ({"on_bad_data": "ignore"}, "on_bad_data is 'ignore', allowed are skip and stop."),
        ({"epochs": 0}, "epochs is 0, allowed is at least 1."),
    ],
)
def test_probes_that_are_refused(model, tmp_path, values, said):
    with pytest.raises(ValueError, match=said):
        probing.probe(probe_recipe(model, tmp_path / "output", **values))
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"neighbors": []}, "neighbors is .*, allowed is a list of whole numbers"),
        ({"neighbors": [10, 2000]}, "neighbors has 2000, allowed is at most the 1437 images of digits."),
        ({"temperature": 0}, "temperature is 0.0, allowed is a number above 0."),
        ({"workers": -1}, "workers is -1, allowed is at least 0."),
    ],
)
def test_neighbours_that_are_refused(model, tmp_path, values, said):
    with pytest.raises(ValueError, match=said):
        probing.knn(knn_recipe(model, tmp_path / "output", **values))


def test_dry_runs_write_nothing(model, tmp_path, capsys):
    probing.probe(probe_recipe(model, tmp_path / "output"), dry_run=True)
    probing.knn(knn_recipe(model, tmp_path / "output"), dry_run=True)
    assert "8 heads, 2 epochs" in capsys.readouterr().out
    assert not (tmp_path / "output").exists()


def test_neighbours_on_digits_are_sklearn_s(model, tmp_path, capsys):
    recipe = knn_recipe(model, tmp_path, neighbors=[5, 20], images=300)
    probing.knn(recipe)
    found = json.loads((tmp_path / "knn.json").read_text())
    backbone = features.load(str(model))
    vectors = []
    for some in probing._data(recipe):
        pixels = backbone.processor([some.picture(i) for i in range(len(some))], return_tensors="pt")["pixel_values"]
        vectors.append((backbone.tokens(pixels).cls[0].double().numpy(), some.labels))
    (bank, known), (queries, labels) = vectors
    assert (found["images"], found["held_out_images"]) == (300, 360)
    for row, count in zip(found["neighbors"], (5, 20), strict=True):
        by = KNeighborsClassifier(
            count, metric="cosine", algorithm="brute", weights=lambda distances: np.exp((1 - distances) / 0.07)
        ).fit(bank, known)
        scores = by.predict_proba(queries)
        top5 = (np.argsort(-scores, 1, kind="stable")[:, :5] == labels[:, None]).any(1).mean()
        assert row["neighbors"] == count
        assert row["accuracy"] == pytest.approx(by.score(queries, labels), abs=2 / 360)  # two near draws
        assert row["accuracy_top5"] == pytest.approx(top5, abs=0.1)  # there are ties where fewer classes have votes
        assert row["accuracy"] > 0.3
    capsys.readouterr()
    probing.knn(recipe)
    assert "knn.json is finished." in capsys.readouterr().out


@pytest.fixture
def pictures(tmp_path):
    """Digits in folders of their classes, the first of them damaged; held out are two classes alone."""
    for split in ("train", "test"):
        found = images.load(f"digits:{split}")
        for i in range(120):
            if split == "train" or found.labels[i] > 7:
                folder = tmp_path / "pictures" / split / f"digit {found.labels[i]}"
                folder.mkdir(parents=True, exist_ok=True)
                found.picture(i).save(folder / f"{i:03}.png")
    first = sorted((tmp_path / "pictures/train").rglob("*.png"))[0]
    first.write_bytes(first.read_bytes()[:60])
    return tmp_path / "pictures", first.name


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_images_and_classes_of_their_own(model, pictures, tmp_path, workers):
    folder, damaged = pictures
    given = {"data": f"{folder}:train", "held_out": f"{folder}:test", "workers": workers}
    few = {"images": None, "selection": 20.0, "batch_size": 16, "images_per_step": 16}
    probing.probe(probe_recipe(model, tmp_path / "probe", **given, **few))
    found = json.loads((tmp_path / "probe/probe.json").read_text())
    assert found["names"] == [f"digit {i}" for i in range(10)]
    probing.knn(knn_recipe(model, tmp_path / "knn", **given, neighbors=[9]))
    found = json.loads((tmp_path / "knn/knn.json").read_text())
    assert (found["images"], found["classes"]) == (119, 10)
    assert found["neighbors"][0]["accuracy"] > 0.2
    for verb, recipe in (
        (probing.probe, probe_recipe(model, tmp_path / "stopped", **given, **few, on_bad_data="stop")),
        (probing.knn, knn_recipe(model, tmp_path / "stopped", **given, neighbors=[9], on_bad_data="stop")),
    ):
        with pytest.raises(images.BadImageError, match=rf"^data: the image [^\n]*{damaged} cannot be read [^\n]*$"):
            verb(recipe)
    with pytest.raises(ValueError, match="held_out: .* has the class '0', which data does not have."):
        probing.knn(knn_recipe(model, tmp_path / "other", data=f"{folder}:train"))


def test_images_without_classes_are_refused(model, pictures, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (pictures[0] / "test").rglob("*.png"):
        shutil.copyfile(path, flat / path.name)
    with pytest.raises(ValueError, match="data: .*flat has no classes."):
        probing.probe(probe_recipe(model, tmp_path / "output", data=str(flat), images=None))


def test_model_of_text_is_refused(tiny, tmp_path):
    tiny().save_pretrained(tmp_path / "gpt")
    for verb, recipe in ((probing.probe, probe_recipe), (probing.knn, knn_recipe)):
        with pytest.raises(
            ValueError, match="gpt is a laplace_gpt without patch_size, allowed are vision transformers"
        ):
            verb(recipe(tmp_path / "gpt", tmp_path / "output"))


def test_model_of_the_hub_is_probed(model, hub, fresh_process, tmp_path):
    code = """
        import sys
        from huggingface_hub import HfApi
        from laplacian_heads import recipes
        from laplacian_heads.eval import probe

        HfApi().create_repo("someone/vit", exist_ok=True)
        HfApi().upload_folder(repo_id="someone/vit", folder_path=sys.argv[1])
        given = {"model": "someone/vit", "data": "digits", "held_out": "digits:test", "workers": 0}
        probe.knn(recipes.load(probe.KnnRecipe, "knn", given))
        given |= {"images": 100, "selection": 50, "images_per_step": 16, "batch_size": 16, "epochs": 1, "blocks": [1]}
        probe.probe(recipes.load(probe.ProbeRecipe, "probe", given))
    """
    fresh_process(code, model, can_import=True, env=hub.env)
    for name in ("knn", "probe"):
        found = json.loads((tmp_path / f"process/runs/eval/someone--vit/{name}.json").read_text())
        assert found["model"] == "someone/vit"
        assert found["weights"] == weights_hash(model)


@pytest.mark.slow
def test_two_processes_find_what_one_does(model, whole, tmp_path):
    output = tmp_path / "two"
    given = [f"{key}={json.dumps(value)}" for key, value in PROBE.items()]
    finish(launched("ddp", ["probe", str(model), *given, f"output={output}"]))
    found = json.loads((output / "probe.json").read_text())
    for one, other in zip(whole[1]["heads"], found["heads"], strict=True):
        for key, value in one.items():
            assert other[key] == pytest.approx(value, abs=2 / 100)  # of 100 images two near draws
    one, other = (load_file(folder / "probe/probe.safetensors") for folder in (whole[0], output))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    probing.knn(knn_recipe(model, tmp_path / "one", neighbors=[5, 20]))
    given = [f"{key}={json.dumps(value)}" for key, value in QUICK.items()]
    finish(launched("ddp", ["knn", str(model), *given, "neighbors=[5, 20]", f"output={output}"]))
    one, other = (json.loads((folder / "knn.json").read_text()) for folder in (tmp_path / "one", output))
    assert (one["images"], one["held_out_images"]) == (other["images"], other["held_out_images"]) == (1437, 360)
    for row, same in zip(one["neighbors"], other["neighbors"], strict=True):
        assert row == pytest.approx(same, abs=2 / 360)
