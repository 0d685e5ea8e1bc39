"""Training image classifiers: going on, exact measurement, damaged images, averages, and recipes."""

import functools
import io
import json
import math
import os

import numpy as np
import PIL.Image
import pytest
import torch
from runs import killed_run, same, weights
from transformers import AutoImageProcessor, AutoModelForImageClassification, pipeline

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification, images, recipes
from laplacian_heads.__main__ import main
from laplacian_heads.accuracy import Accuracy
from laplacian_heads.train import budget, classify
from laplacian_heads.train.augmentation import Mixing, seeded
from laplacian_heads.train.checkpoints import last_checkpoint
from laplacian_heads.train.draws import Draws
from laplacian_heads.train.ema import EMACallback
from laplacian_heads.train.parameter_groups import make_optimizer
from laplacian_heads.train.pictures import AugmentedImages, HeldOutImages, TrainingBatches, mixed

ROOT = recipes.SHIPPED.parent
VIT = sorted(path.stem for path in recipes.SHIPPED.glob("vit_*.yaml"))
# 64 images of 8 pixels in steps of 16: 4 steps an epoch.
SMALL = [
    *("images=64", "images_per_step=16", "batch_size=8", "epochs=2", "warmup_epochs=1", "save_steps=3"),
    *("hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1", "logging_steps=1"),
    *("eval_steps=4", "geometry_steps=4", "drop_path_rate=0.2", "crop=resized", "held_out=digits:test"),
]
STEPS = 8


def command(output, *overrides):
    return ["classify", *SMALL, f"output={output}", *overrides]


def killed(monkeypatch, step, arguments):
    killed_run(monkeypatch, classify, "ClassifyTrainer", step, arguments)


def log(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [{key: value for key, value in entry.items() if "per_second" not in key} for entry in history]


def losses(folder):
    return [entry[name] for entry in log(folder) for name in ("loss", "eval_loss", "eval_accuracy") if name in entry]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with everything that has a state: mixing, drop path, LAMB, an average."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(command(folder, "optimizer=lamb", "ema_decay=0.5", "mixup=0.8", "cutmix=1.0")) == 0
    return folder


@pytest.mark.parametrize("step", [1, 3, 5])
def test_interrupted_run_ends_in_the_same_weights(whole, tmp_path, monkeypatch, capsys, step):
    """Before the first checkpoint, where one has just been written, and after it; in the middle of an epoch."""
    arguments = command(tmp_path / "run", "optimizer=lamb", "ema_decay=0.5", "mixup=0.8", "cutmix=1.0")
    killed(monkeypatch, step, arguments)
    assert main(arguments) == 0
    assert ("going on at step" in capsys.readouterr().out) == (step > 3)
    assert same(weights(tmp_path / "run"), weights(whole))
    assert same(weights(tmp_path / "run/ema"), weights(whole / "ema"))
    assert losses(tmp_path / "run") == losses(whole)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_finished_run_is_left_alone(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert main(command(whole, "optimizer=lamb", "ema_decay=0.5", "mixup=0.8", "cutmix=1.0")) == 0
    assert f"{whole} is finished." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before
    assert main(command(whole, "seed=1")) == 1
    assert "holds the results of another recipe" in capsys.readouterr().err


def test_workers_change_nothing(tmp_path):
    for workers in (0, 2):
        assert main(command(tmp_path / str(workers), f"workers={workers}", "eval_steps=null", "epochs=2")) == 0
    assert same(weights(tmp_path / "0"), weights(tmp_path / "2"))
    assert losses(tmp_path / "0") == losses(tmp_path / "2")


def test_accumulated_batches_are_the_step(tmp_path):
    """Without mixing within batches and drop path, a step of two batches is that of one."""
    plain = ["mixup=0", "drop_path_rate=0", "bf16=false", "eval_steps=null"]
    for size in (8, 16):
        assert main(command(tmp_path / str(size), f"batch_size={size}", *plain)) == 0
    assert losses(tmp_path / "8") == pytest.approx(losses(tmp_path / "16"), rel=1e-4)


def test_results_are_what_the_saved_model_gives(whole):
    """Accuracy, top-5 and loss again, from the folder alone, through the image processor that was saved."""
    results = json.loads((whole / "results.json").read_text())
    found = images.load("digits:test")
    for folder, key in ((whole, "accuracy"), (whole / "ema", "ema_accuracy")):
        model = AutoModelForImageClassification.from_pretrained(folder).eval()
        processor = AutoImageProcessor.from_pretrained(folder)
        pictures = [found.picture(number) for number in range(len(found))]
        with torch.no_grad():
            logits = model(**processor(pictures, return_tensors="pt")).logits
        labels = torch.from_numpy(found.labels)
        assert results[key] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
        if key == "accuracy":
            assert results["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
            top = (logits.topk(5).indices == labels[:, None]).any(1).float().mean().item()
            assert results["accuracy_top5"] == pytest.approx(top)
    assert results["held_out_images"] == 360
    assert results["images"] == STEPS * 16
    assert results["parameters"] == model.num_parameters()
    assert results["images_per_second"] == pytest.approx(results["images"] / results["seconds"])


def test_log_has_geometry_speed_and_schedule(whole):
    entries = log(whole)
    assert {"geometry/token_similarity/layer_00", "gradient_norm/layer_02"} <= {key for each in entries for key in each}
    rates = [entry["learning_rate"] for entry in entries if "learning_rate" in entry]
    warm, peak, least = 4, 5e-3, 1e-5
    expected = [1e-6 + (peak - 1e-6) * step / warm for step in range(warm)]
    decay = STEPS - 1 - warm
    expected += [least + (peak - least) * (1 + math.cos(math.pi * step / decay)) / 2 for step in range(decay + 1)]
    assert rates == pytest.approx(expected)


def test_saved_classes_are_those_of_the_data(whole):
    classify = pipeline("image-classification", model=str(whole))
    assert {each["label"] for each in classify(PIL.Image.new("RGB", (9, 9)), top_k=10)} == set("0123456789")


def test_average_follows_the_weights():
    model = LaplaceViTForImageClassification(
        LaplaceViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
    )
    callback = EMACallback(model, 0.9)
    expected = {name: tensor.clone().double() for name, tensor in model.state_dict().items()}
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        callback.on_step_end(None, None, None)
        expected = {name: 0.9 * expected[name] + 0.1 * tensor for name, tensor in model.state_dict().items()}
    for name, tensor in callback.model.state_dict().items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_batches_are_the_draws(tmp_path):
    """Each image once an epoch, augmented by its own seed, whichever of two processes takes it."""
    found = images.load("digits")
    draws = Draws(len(found), 64, 16, 1, 0)
    calls = []

    def transform(picture):
        calls.append(torch.rand(()).item())
        return torch.tensor(np.asarray(picture)[..., 0]).float()

    augmented = AugmentedImages(found, transform, False)
    mixing = functools.partial(mixed, Mixing(0, 0, 1.0, 0.5, 0.0, 10))
    state = torch.get_rng_state()
    parts = [iter(TrainingBatches(augmented, draws, mixing, 1, process, 2)) for process in (0, 1)]
    taken = [next(parts[number % 2]) for number in range(4)]
    assert torch.equal(torch.get_rng_state(), state)
    for number, batch in enumerate(taken):
        for row, draw in enumerate(draws.batch(4 + number)):
            assert batch["labels"][row].argmax() == found.labels[draw.index]
            assert torch.equal(batch["pixel_values"][row], transform(found.picture(draw.index)))
            with seeded(draw.seed):
                assert calls[number * 16 + row] == torch.rand(()).item()


def damaged(folder, bad, good=20):
    """Two classes of pictures, of which some files are damaged."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(good):
            value = number * 12 if name == "cat" else 255 - number * 12
            PIL.Image.new("RGB", (10, 12), (value, 90, 90)).save(folder / name / f"{number}.png")
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    return folder


def truncated():
    data = io.BytesIO()
    PIL.Image.effect_noise((64, 64), 90).save(data, "JPEG")
    return data.getvalue()[:600]


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_image_does_not_end_a_run_unless_it_shall(tmp_path, capsys, workers):
    bad = {"cat/bad.jpg": truncated(), "dog/empty.png": b"", "dog/text.png": b"not an image"}
    data = damaged(tmp_path / "data", bad)
    os.mkfifo(data / "dog/pipe.png")
    held_out = damaged(tmp_path / "val", {"cat/bad.jpg": truncated()}, good=5)
    arguments = ["images=null", "images_per_step=8", "epochs=2", f"data={data}", f"held_out={held_out}"]
    output, arguments = tmp_path / "run", [*arguments, "geometry_steps=3", f"workers={workers}"]
    assert main(command(output, *arguments)) == 0
    assert json.loads((output / "results.json").read_text())["held_out_images"] == 10
    assert main(command(tmp_path / "stopped", *arguments, "on_bad_data=stop")) == 1
    said = capsys.readouterr().err.rpartition("laplacian-heads classify: ")[2]  # after the progress bar
    assert said.startswith("data: the image ")
    assert any(name in said for name in (*bad, "pipe.png"))


def test_all_images_damaged_is_said(tmp_path, capsys):
    data = tmp_path / "data"
    for name in ("cat", "dog"):
        (data / name).mkdir(parents=True)
        for number in range(8):
            (data / name / f"{number}.png").write_bytes(b"nothing")
    assert main(command(tmp_path / "run", "images=null", "images_per_step=8", f"data={data}", "held_out=2")) == 1
    assert "held_out: none of the first 32 images can be read." in capsys.readouterr().err.strip().splitlines()[-1]


def test_classes_of_the_held_out_images_go_by_name(tmp_path):
    """A folder that lacks a class numbers the others differently."""
    data, held_out = damaged(tmp_path / "data", {}), damaged(tmp_path / "val", {}, good=4)
    (data / "ape").mkdir()
    for number in range(4):
        PIL.Image.new("RGB", (8, 8)).save(data / "ape" / f"{number}.png")
    recipe = recipes.load(classify.ClassifyRecipe, "vit_tiny_digits", {"data": str(data), "held_out": str(held_out)})
    recipe.images = None
    train, found = classify._data(recipe)
    assert train.names == found.names == ["ape", "cat", "dog"]
    assert sorted(set(found.labels)) == [1, 2]
    assert all(found.called(n).split("/")[0] == found.names[found.labels[n]] for n in range(len(found)))


def test_number_of_held_out_images_is_taken_from_the_data(tmp_path):
    recipe = recipes.load(classify.ClassifyRecipe, "vit_tiny_digits", {"held_out": 100, "images": 200})
    train, held_out = classify._data(recipe)
    assert (len(train), len(held_out)) == (200, 100)
    assert not set(train.rows) & set(held_out.rows)
    again = classify._data(recipe)
    assert np.array_equal(again[0].rows, train.rows)
    other = classify._data(
        recipes.load(classify.ClassifyRecipe, "vit_tiny_digits", {"held_out": 100, "seed": 1, "images": 200})
    )
    assert not np.array_equal(other[1].rows, held_out.rows)


def test_trained_model_goes_on_with_other_sizes_and_classes(whole, tmp_path):
    """Fine-tuning: positions are interpolated, the classifier is new, the rest is the model's."""
    data = damaged(tmp_path / "data", {})
    nulls = [f"{name}=null" for name in (*classify.SHAPE, classify.SCALE)]
    arguments = ["image_size=16", f"model={whole}", f"data={data}", "held_out=8", "images=null", "epochs=2"]
    arguments += ["learning_rate=1e-9", "warmup_learning_rate=0", "min_learning_rate=0", "mixup=0"]
    assert main(command(tmp_path / "run", *arguments, *nulls)) == 0
    model, before = (AutoModelForImageClassification.from_pretrained(folder) for folder in (tmp_path / "run", whole))
    assert model.config.image_size == 16
    assert list(model.config.id2label.values()) == ["cat", "dog"]
    assert model.config.laplacian_heads == before.config.laplacian_heads
    before.resize_position_embeddings(16)
    for name, tensor in model.vit.state_dict().items():
        torch.testing.assert_close(tensor, before.vit.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=nowhere/images"], "data: nowhere/images cannot be read as images: "),
        (["held_out=digits:val"], "digits:val"),
        (["held_out=5000"], "held_out is 5000, allowed is less than the 1437 images of data."),
        (["images=5000"], "images is 5000, allowed are at most the 1437 of digits."),
        (["images=8"], "images_per_step is 16, allowed is at most 8, the number of images."),
        (["label=colour"], "label is 'colour', allowed for digits is one of label."),
        (["images_per_step=20"], "images_per_step is 20, allowed are multiples of 8"),
        (["batch_size=1", "mixup=0.5"], "batch_size is 1, allowed with mixup or cutmix are even numbers."),
        (["warmup_epochs=2"], "warmup_epochs is 2, allowed is less than epochs, 2."),
        (["learning_rate=0"], "learning_rate is 0.0, allowed is a number above 0."),
        (["min_learning_rate=1"], "min_learning_rate is 1.0, allowed is at most learning_rate."),
        (["optimizer=sgd"], "optimizer is 'sgd', allowed are adamw and lamb."),
        (["loss=hinge"], "loss is 'hinge', allowed are cross_entropy, binary_cross_entropy."),
        (["target_threshold=0.0"], "target_threshold is 0.0, allowed with the loss cross_entropy is null."),
        (["loss=binary_cross_entropy", "target_threshold=0.0"], "target_threshold is 0.0, allowed is a number above"),
        (["crop=centre"], "crop is 'centre', allowed are resized, padded, none."),
        (["crop_scale=[1, 0.5]"], "crop_scale is [1, 0.5], allowed are two numbers above 0 and up to 1"),
        (["auto_augment=rand-foo"], "auto_augment is 'rand-foo', allowed are null, 3a, or rand"),
        (["flip=2"], "flip is 2.0, allowed is a number from 0 to 1."),
        (["layer_decay=0"], "layer_decay is 0.0, allowed is a number from 0.001 to 1."),
        (["ema_decay=1.5"], "ema_decay is 1.5, allowed is a number from 0 to below 1."),
        (["image_size=9"], "image_size is 9, allowed are multiples of patch_size, 4."),
        (["laplacian_heads=3"], "laplacian_heads: the count is 3 in layer 0, allowed is an integer from 0 to"),
        (["hidden_size=null"], "hidden_size is null, allowed for a new model is a value."),
        (["model=x"], "is 4, allowed is null: model has its own."),
        (["drop_path_schedule=up"], "drop_path_schedule is 'up', allowed are constant and linear."),
        (["label_smoothing=1"], "label_smoothing is 1.0, allowed is a number from 0 to below 1."),
        (["eval_crop=1e-9"], "eval_crop is 1e-09, allowed is a number from 0.1 to 1."),
        (["held_out=0"], "held_out is 0, allowed is a source of images, or a number of at least 1."),
        (["seed=-1"], "seed is -1, allowed is 0 to 4294967295."),
        (["repeats=0"], "repeats is 0, allowed is at least 1."),
    ],
)
def test_wrong_values_end_in_a_sentence(tmp_path, capsys, overrides, said):
    assert main(command(tmp_path / "run", *overrides)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("laplacian-heads classify: ")
    assert said in error
    assert not (tmp_path / "run/results.json").exists()


def test_images_without_classes_are_refused(tmp_path, capsys):
    data = tmp_path / "data"
    data.mkdir()
    PIL.Image.new("RGB", (8, 8)).save(data / "a.png")
    assert main(command(tmp_path / "run", f"data={data}", "images=null")) == 1
    assert f"data: {data} has no classes." in capsys.readouterr().err


@pytest.mark.parametrize("name", VIT)
def test_dry_run_needs_no_data(name, capsys, monkeypatch):
    monkeypatch.setattr(images, "load", lambda *_: pytest.fail("asked for the data"))
    monkeypatch.setattr(budget, "matmul_flops", lambda bf16: 1e12)
    assert main(["classify", name, "--dry-run"]) == 0
    said = capsys.readouterr().out
    recipe = recipes.load(classify.ClassifyRecipe, name)
    assert f"{recipe.images // recipe.images_per_step * recipe.epochs:,} of {recipe.images_per_step:,} images" in said


def test_flops_are_what_pytorch_counts():
    """Twice a product's sides forward, and twice that backward, but for the gradient of the pixels."""
    from torch.utils.flop_counter import FlopCounterMode

    config = LaplaceViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=16, patch_size=4, num_labels=7
    )
    model = LaplaceViTForImageClassification(config)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 3, 16, 16)).logits.sum().backward()
    patches = 2 * 16 * 48 * 32
    assert budget.flops_per_image(config) == counter.get_total_flops() + patches


@pytest.mark.parametrize("name", ["vit_b16_imagenet1k", "vit_s16_imagenet1k", "vit_b16_imagenet1k_authors"])
def test_recipes_differ_from_digits_where_they_must(name):
    """The choices of DeiT-3 and of the authors' script that a slip of the pen would change."""
    recipe = recipes.load(classify.ClassifyRecipe, name)
    common = (
        recipe.loss,
        recipe.auto_augment,
        recipe.mixup,
        recipe.cutmix,
        recipe.color_jitter,
        recipe.images_per_step,
    )
    assert common == ("binary_cross_entropy", "3a", 0.8, 1.0, 0.3, 2048)
    expected = {
        "vit_b16_imagenet1k": ("lamb", 3e-3, 192, 800, 0.2, 3, 0.0, 0.0),
        "vit_s16_imagenet1k": ("lamb", 4e-3, 224, 800, 0.05, 3, 0.0, 0.0),
        "vit_b16_imagenet1k_authors": ("adamw", 2e-3, 192, 400, 0.2, 1, None, 0.1),
    }[name]
    found = (recipe.optimizer, recipe.learning_rate, recipe.image_size, recipe.epochs, recipe.drop_path_rate)
    assert (*found, recipe.repeats, recipe.target_threshold, recipe.label_smoothing) == expected
    assert recipe.qk_norm


def test_step_of_a_recipe_is_the_step_of_its_parts(tmp_path, monkeypatch):
    """One step of the verb, against the model, loss and optimizer put together by hand."""
    output = tmp_path / "run"
    given = [
        "optimizer=lamb",
        "drop_path_rate=0",
        "bf16=false",
        "max_grad_norm=0",
        "warmup_epochs=0",
        "weight_decay=0.3",
    ]
    killed(monkeypatch, 3, command(output, *given, "save_steps=1"))
    recipe = recipes.load(classify.ClassifyRecipe, str(output / "recipe.yaml"))
    train, _ = classify._data(recipe)
    classify.set_seed(recipe.seed)
    model = classify._model(recipe, train.names)
    optimizer = make_optimizer(model, "lamb", recipe.learning_rate, 0.3)
    draws = Draws(64, 16, 8, 1, 0)
    batches = iter(
        TrainingBatches(
            AugmentedImages(train, recipe.transform(), True),
            *(draws, functools.partial(mixed, Mixing(0.4, 0, 1, 0.5, 0.1, 10))),
        )
    )
    for step in range(2):
        for _ in range(2):
            batch = next(batches)
            loss = -(batch["labels"] * model(batch["pixel_values"]).logits.log_softmax(-1)).sum(-1).mean() / 2
            loss.backward()
        progress = step / (STEPS - 1)
        for group in optimizer.param_groups:
            group["lr"] = 1e-5 + (recipe.learning_rate - 1e-5) * (1 + math.cos(math.pi * progress)) / 2
        optimizer.step()
        optimizer.zero_grad()
    checkpoint, _ = last_checkpoint(output)
    assert checkpoint.name == "checkpoint-2"
    for name, tensor in weights(checkpoint).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-6)


def test_accuracy_is_the_share_of_right_answers():
    generator = np.random.default_rng(0)
    ranked = np.argsort(generator.random((200, 9)), axis=1)[:, :5]
    right = generator.integers(9, size=200)
    found = Accuracy().compute(predictions=ranked.tolist(), references=right)
    assert found == {
        "accuracy": (ranked[:, 0] == right).mean(),
        "accuracy_top5": (ranked == right[:, None]).any(1).mean(),
    }
    assert Accuracy().compute(predictions=ranked[:, 0], references=right) == {"accuracy": found["accuracy"]}
    assert Accuracy().compute(predictions=ranked[:, :3].tolist(), references=right) == {"accuracy": found["accuracy"]}


def test_held_out_rows_are_the_processors(whole):
    found = images.load("digits:test")
    processor = AutoImageProcessor.from_pretrained(whole)
    row = HeldOutImages(found, processor, False)[3]
    expected = processor(found.picture(3), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(row["pixel_values"], expected)
    assert row["labels"] == found.labels[3]
