"""Self-supervised training as a run: going on, processes and batches, what is logged and saved, and recipes."""

import json
import logging

import numpy as np
import PIL.Image
import pytest
import torch
from runs import killed_run, same, weights
from safetensors.torch import load_file
from sklearn.neighbors import KNeighborsClassifier
from transformers import AutoImageProcessor, AutoModel

from laplacian_heads import images, recipes
from laplacian_heads.__main__ import main
from laplacian_heads.train import budget, dino
from laplacian_heads.train.checkpoints import last_checkpoint

DINO = sorted(path.stem for path in recipes.SHIPPED.glob("dino_*.yaml"))
# 64 images of 8 pixels in steps of 16: 4 steps an epoch.
SMALL = [
    *("images=64", "images_per_step=16", "batch_size=8", "epochs=2", "warmup_epochs=1", "save_steps=3"),
    *("hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1", "logging_steps=1"),
    *("eval_steps=4", "geometry_steps=4", "drop_path_rate=0.2", "head_hidden_size=16", "head_bottleneck_size=8"),
    *("prototypes=32", "local_crops=2", "held_out=40", "learning_rate=2e-3"),
    *("centering=softmax", "koleo_weight=0.1"),
]
STEPS = 8
# With a learning rate that is warm from the first step on, and nothing frozen: all parts move.
WARM = ["freeze_last_layer_epochs=0", "teacher_momentum=0.5", "warmup_teacher_temperature_epochs=1"]


def command(output, *overrides):
    return ["dino", *SMALL, f"output={output}", *overrides]


def killed(monkeypatch, step, arguments):
    killed_run(monkeypatch, dino, "DinoTrainer", step, arguments)


def log(folder):
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def figures(folder):
    """What is logged that does not depend on the machine."""
    names = ("loss", "dino_loss", "ibot_loss", "koleo_loss", "teacher_entropy", "feature_spread", "grad_norm")
    names += ("learning_rate", "weight_decay", "teacher_momentum", "teacher_temperature", "eval_knn_accuracy")
    return [entry[name] for entry in log(folder) for name in names if name in entry and "train_loss" not in entry]


@pytest.fixture(scope="module", params=["softmax", "sinkhorn"])
def whole(request, tmp_path_factory):
    """A finished run with everything that has a state, and what it was asked for."""
    folder = tmp_path_factory.mktemp("runs") / request.param
    given = [*WARM, f"centering={request.param}", "patch_prototypes=24", "norm_last_layer=false"]
    assert main(command(folder, *given)) == 0
    return folder, given


@pytest.mark.parametrize("step", [1, 3, 5])
def test_interrupted_run_ends_in_the_same_weights(whole, tmp_path, monkeypatch, capsys, step):
    """Before the first checkpoint, where one has just been written, and after it; in the middle of an epoch."""
    finished, given = whole
    arguments = command(tmp_path / "run", *given)
    killed(monkeypatch, step, arguments)
    assert main(arguments) == 0
    assert ("going on at step" in capsys.readouterr().out) == (step > 3)
    for folder in (".", "student"):
        assert same(weights(tmp_path / "run" / folder), weights(finished / folder))
    assert figures(tmp_path / "run") == figures(finished)
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_teacher_center_and_schedules_of_a_checkpoint_are_those_of_its_step(whole, tmp_path, monkeypatch):
    """Once killed in step 5 and once stopped after it, a run has the same checkpoint of step 6."""
    _, given = whole
    for name, step in (("one", 6), ("two", 4)):
        killed(monkeypatch, step, command(tmp_path / name, *given))
    killed(monkeypatch, 7, command(tmp_path / "one", *given))
    killed(monkeypatch, 7, command(tmp_path / "two", *given))
    one, two = (last_checkpoint(tmp_path / name)[0] for name in ("one", "two"))
    assert one.name == two.name == "checkpoint-6"
    teachers = [load_file(folder / "teacher.safetensors") for folder in (one, two)]
    assert same(*teachers)
    assert same(weights(one), weights(two))
    moved = teachers[0]["center.value"].abs().max() > 0
    assert moved == ("centering=softmax" in given)


def test_finished_run_is_left_alone(whole, capsys):
    folder, given = whole
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(command(folder, *given)) == 0
    assert f"{folder} is finished." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert main(command(folder, *given, "seed=1")) == 1
    assert "holds the results of another recipe" in capsys.readouterr().err


def test_workers_change_nothing(tmp_path):
    for workers in (0, 2):
        assert (
            main(command(tmp_path / str(workers), f"workers={workers}", "eval_steps=null", "geometry_steps=null")) == 0
        )
    assert same(weights(tmp_path / "0"), weights(tmp_path / "2"))


def test_accumulated_batches_are_the_step(tmp_path):
    """Without what is within batches (KoLeo, masks) and drop path, a step of two batches is that of one; the centre,
    which changes once a step, included."""
    plain = ["koleo_weight=0", "ibot_weight=0", "drop_path_rate=0", "eval_steps=null", "geometry_steps=null", *WARM]
    for size in (8, 16):
        assert main(command(tmp_path / str(size), f"batch_size={size}", *plain)) == 0
    lines = [[entry["dino_loss"] for entry in log(tmp_path / size) if "dino_loss" in entry] for size in ("8", "16")]
    assert lines[0] == pytest.approx(lines[1], rel=1e-5)
    assert len(set(lines[0])) == STEPS


def test_results_are_what_the_saved_teacher_gives(whole):
    """k-NN again from the folder alone: scikit-learn's, with DINO's weights, through the saved image processor."""
    folder, _ = whole
    results = json.loads((folder / "results.json").read_text())
    model, processor = AutoModel.from_pretrained(folder).eval(), AutoImageProcessor.from_pretrained(folder)
    data = images.load("digits")
    drawn = np.random.default_rng(0).permutation(len(data))
    found = {}
    for name, some in (("train", data.select(np.sort(drawn[40:104]))), ("test", data.select(np.sort(drawn[:40])))):
        pictures = [some.picture(number) for number in range(len(some))]
        with torch.no_grad():
            features = model(**processor(pictures, return_tensors="pt")).pooler_output
        found[name] = torch.nn.functional.normalize(features, dim=1).double().numpy(), some.labels

    def by_similarity(distances):  # of unit vectors: similarity is 1 - d^2 / 2
        return np.exp((1 - distances**2 / 2) / 0.07)

    knn = KNeighborsClassifier(20, weights=by_similarity, algorithm="brute").fit(*found["train"])
    assert results["knn_accuracy"] == pytest.approx(knn.score(*found["test"]), abs=1.5 / 40)
    features = found["test"][0]
    spread = np.sqrt(((features - features.mean(0)) ** 2).mean(0).sum())
    assert results["feature_spread"] == pytest.approx(spread, rel=1e-4)
    assert results["held_out_images"] == 40
    assert results["images"] == STEPS * 16
    assert results["parameters"] == model.num_parameters()


def test_student_and_teacher_are_two_models(whole):
    folder, _ = whole
    teacher, student = (AutoModel.from_pretrained(each) for each in (folder, folder / "student"))
    assert type(teacher).__name__ == type(student).__name__ == "LaplaceViTModel"
    assert teacher.config.laplacian_heads == student.config.laplacian_heads == 1
    assert not same(teacher.state_dict(), student.state_dict())
    assert teacher.embeddings.mask_token is not None


def test_checkpoint_of_a_run_is_a_model(whole, tmp_path, monkeypatch):
    """So that geometry, probe and the like read a run that is still in training."""
    _, given = whole
    killed(monkeypatch, 7, command(tmp_path / "run", *given))
    checkpoint = last_checkpoint(tmp_path / "run")[0]
    model = AutoModel.from_pretrained(checkpoint)
    assert type(model).__name__ == "LaplaceViTModel"
    for name, tensor in weights(checkpoint).items():
        if name.startswith("vit."):
            assert torch.equal(model.state_dict()[name.removeprefix("vit.")], tensor)


def test_log_has_losses_signs_of_collapse_and_geometry(whole):
    folder, given = whole
    entries = log(folder)
    assert {"geometry/token_similarity/layer_00", "gradient_norm/layer_02"} <= {key for each in entries for key in each}
    lines = [entry for entry in entries if "dino_loss" in entry]
    assert len(lines) == STEPS
    for line in lines:
        total = line["dino_loss"] + line["ibot_loss"] + 0.1 * line["koleo_loss"]
        assert line["loss"] == pytest.approx(total, rel=1e-3)
        assert line["teacher_kl"] == pytest.approx(line["dino_loss"] - line["teacher_entropy"])
        assert 0 < line["teacher_entropy"] <= line["prototype_entropy"] + 1e-5 <= np.log(32) + 2e-5
        assert 0 < line["feature_spread"] <= 1
    assert [line["teacher_temperature"] for line in lines] == pytest.approx([0.04] * STEPS)
    assert lines[0]["weight_decay"] == pytest.approx(0.04)
    assert lines[0]["teacher_momentum"] == pytest.approx(0.5)
    rates = [line["learning_rate"] for line in lines]
    cosine = [1e-5 + (2e-3 - 1e-5) * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)]
    assert rates == pytest.approx([*np.linspace(0, 2e-3, 4), *cosine])


@pytest.mark.parametrize("held_out", ["null", "17"])
def test_images_without_classes_are_trained_on(tmp_path, held_out):
    data = tmp_path / "data"
    data.mkdir()
    generator = np.random.default_rng(0)
    for number in range(81):
        PIL.Image.fromarray(generator.integers(0, 256, (11, 9, 3), dtype=np.uint8)).save(data / f"{number}.png")
    given = [f"data={data}", "images=null", f"held_out={held_out}", "geometry_steps=null"]
    assert main(command(tmp_path / "run", *given)) == 0
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results["knn_accuracy"] is None
    assert results["held_out_images"] == (0 if held_out == "null" else 17)
    assert 0 < results["feature_spread"] <= 1


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("choice", ["skip", "stop"])
def test_damaged_image_is_replaced_or_named(tmp_path, capsys, workers, choice):
    data = tmp_path / "data"
    data.mkdir()
    for number in range(32):
        PIL.Image.new("RGB", (9, 9), (number, 0, 0)).save(data / f"{number:02}.png")
    (data / "07.png").write_bytes((data / "08.png").read_bytes()[:40])
    given = [f"data={data}", "images=null", "held_out=null", "geometry_steps=null", f"workers={workers}"]
    status = main(command(tmp_path / "run", *given, f"on_bad_data={choice}", "epochs=2"))
    assert status == (choice == "stop")
    if choice == "stop":
        assert "07.png cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data=nowhere/images"], "data: nowhere/images cannot be read as images: "),
        (["images=5000"], "images is 5000, allowed are at most the 1397 of digits."),
        (["images=8"], "images_per_step is 16, allowed is at most 8, the number of images."),
        (["images_per_step=20"], "images_per_step is 20, allowed are multiples of 8"),
        (["batch_size=1"], "batch_size is 1, allowed with koleo_weight is at least 2."),
        (["learning_rate=0"], "learning_rate is 0.0, allowed is a number above 0."),
        (["image_size=9"], "image_size is 9, allowed are multiples of patch_size, 2."),
        (["local_size=3"], "local_size is 3, allowed are multiples of patch_size, 2."),
        (["prototypes=1"], "prototypes is 1, allowed is at least 2."),
        (["patch_prototypes=0"], "patch_prototypes is 0, allowed is at least 2."),
        (["centering=mean"], "centering is 'mean', allowed are softmax, sinkhorn, none."),
        (["center_momentum=2"], "center_momentum is 2.0, allowed is a number from 0 to 1."),
        (["teacher_momentum=-1"], "teacher_momentum is -1.0, allowed is a number from 0 to 1."),
        (["teacher_temperature=0"], "teacher_temperature is 0.0, allowed is a number from 0.001 to 10."),
        (["mask_ratio=[0.01, 0.5]"], "mask_ratio is [0.01, 0.5], allowed with 16 patches is at least 0.0625."),
        (["mask_ratio=[0.5]"], "mask_ratio is [0.5], allowed are two numbers above 0 and up to 1"),
        (["global_scale=[1, 0.5]"], "global_scale is [1, 0.5], allowed are two numbers above 0 and up to 1"),
        (["color_jitter=[1, 1]"], "color_jitter is [1, 1], allowed are 4 numbers of at least 0."),
        (["color_jitter=[1, 1, 1, 1]"], "color_jitter is [1, 1, 1, 1], allowed as its last number, the hue, is up to"),
        (["blur=[1, 2, 1]"], "blur is [1, 2, 1], allowed are 3 numbers from 0 to 1."),
        (["blur_sigma=[2, 1]"], "blur_sigma is [2, 1], allowed are two numbers, the smaller first."),
        (["on_collapse=die"], "on_collapse is 'die', allowed are warn and stop."),
        (["bank_images=0"], "bank_images is 0, allowed is at least 1."),
        (["held_out=null"], "held_out is null, allowed with geometry_steps is a source of images, or a number."),
        (["laplacian_heads=3"], "laplacian_heads: the count is 3 in layer 0, allowed is an integer from 0 to"),
        (["local_crops=-1"], "local_crops is -1, allowed is at least 0."),
        (["max_parameter_grad_norm=-1"], "max_parameter_grad_norm is -1.0, allowed is a finite number of at least 0."),
    ],
)
def test_wrong_values_end_in_a_sentence(tmp_path, capsys, overrides, said):
    assert main(command(tmp_path / "run", *overrides)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("laplacian-heads dino: ")
    assert said in error
    assert not (tmp_path / "run/results.json").exists()


@pytest.mark.parametrize("name", DINO)
def test_dry_run_needs_no_data(name, capsys, monkeypatch):
    monkeypatch.setattr(dino, "split", lambda *_: pytest.fail("asked for the data"))
    monkeypatch.setattr(budget, "matmul_flops", lambda bf16: 1e12)
    assert main(["dino", name, "--dry-run"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["parameters", "images", "steps", "FLOPs", "memory", "hours"]


@pytest.mark.parametrize("crops", [0, 3])
@pytest.mark.parametrize("own", ["null", "24"])
def test_flops_are_what_pytorch_counts(crops, own):
    """A step by torch's counter, which leaves attention's products out in one backend: eager has them all."""
    from torch.utils.flop_counter import FlopCounterMode

    given = recipes.parse([each for each in SMALL if "local_crops" not in each])
    given |= {"local_size": 6, "local_crops": crops, "patch_prototypes": None if own == "null" else int(own)}
    recipe = recipes.load(dino.DinoRecipe, "dino_tiny_digits", given)
    student, twin = recipe.network(), recipe.network()
    student.set_attn_implementation("eager"), twin.set_attn_implementation("eager")
    teacher = dino.Teacher(twin, "none", 0.9)
    count = 400  # so that the masked patches of a batch are nearly as many as on average
    batch = recipe.collate(
        [
            ([torch.randn(3, 8, 8), torch.randn(3, 8, 8), *torch.randn(crops, 3, 6, 6)], 0, number)
            for number in range(count)
        ]
    )
    with FlopCounterMode(display=False) as counter:
        targets, patch_targets, _ = teacher(batch["pixel_values"], batch["masked"], 0.04)
        losses = student(**batch, targets=targets, patch_targets=patch_targets)
        (losses["dino"] + losses["ibot"]).backward()
    # The image itself has no gradient, and less than the mean is masked where blocks do not fit.
    assert budget.flops_per_dino_image(recipe) == pytest.approx(counter.get_total_flops() / count, rel=0.06)


@pytest.mark.parametrize("choice", ["warn", "stop"])
def test_collapse_without_centring_is_reported(tmp_path, capsys, caplog, monkeypatch, choice):
    """A run that has nothing against collapse; the figures of its log say so too."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    given = ["images=256", "images_per_step=32", "batch_size=32", "epochs=12", "patch_size=4", "local_size=4"]
    given += ["koleo_weight=0", "ibot_weight=0", "eval_steps=null", "geometry_steps=null", "logging_steps=8"]
    given += ["held_out=null"]
    status = main(command(tmp_path / "run", *given, "centering=none", f"on_collapse={choice}"))
    said = capsys.readouterr().err + caplog.text
    assert "The teacher has collapsed at step " in said
    assert status == (choice == "stop")
    if choice == "warn":
        last = [line for line in log(tmp_path / "run") if "dino_loss" in line][-1]
        assert last["teacher_entropy"] < 0.1
        assert last["teacher_kl"] < 0.1
        assert said.count("The teacher has collapsed") == 1


@pytest.mark.parametrize(
    ("entropy", "of_mean", "collapsed"),
    [(0.0, 0.004, True), (4.157, 4.16, True), (1.0, 4.0, False), (0.0, 4.0, False), (4.1, 4.16, False)],
)
def test_both_ways_of_collapsing_are_told(entropy, of_mean, collapsed):
    """One prototype for all, and all alike; not an output that is sure but differs from image to image."""
    line = {"teacher_entropy": entropy, "prototype_entropy": of_mean, "teacher_kl": 0.0, "feature_spread": 0.1}
    assert (dino.collapse(line, 64) is not None) == collapsed
