"""Training on datasets by their names on the Hub, from one on this machine that has some of their rows."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from laplacian_heads.train.checkpoints import last_checkpoint

COMMON = ["context=128", "streams=4", "rows_per_step=4", "batch_size=4", "logging_steps=1", "shuffle_shards=2"]
SMALL = ["vocab_size=400", "hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "laplacian_heads=1"]
MIXTURE = """[
    {data: HuggingFaceTB/smol-smoltalk, rows: 200},
    {data: "cais/mmlu:all:auxiliary_train", rows: 200},
    {data: "openai/gsm8k:main", rows: 100, repeat: 2},
    {data: "allenai/ai2_arc:ARC-Easy", rows: 100},
    {data: "allenai/ai2_arc:ARC-Challenge", rows: 100},
]""".replace("\n", "")
HELD_OUT = '[{data: "HuggingFaceTB/smol-smoltalk::test", rows: 20}, {data: "openai/gsm8k:main:test", rows: 20}]'

pytestmark = pytest.mark.slow


def run(env, folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "laplacian_heads", *arguments], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("workers", [0, 1])
def test_every_stage_streams_its_datasets(seeded_hub, tmp_path, workers):
    text = "data=HuggingFaceFW/fineweb-edu"
    run(seeded_hub, tmp_path, "tokenizer", text, "vocab_size=400", "context=128", "max_characters=100_000")
    train = [*COMMON, f"workers={workers}"]
    run(seeded_hub, tmp_path, "pretrain", text, *train, *SMALL, "tokens=10_240", "eval_rows=4", "save_steps=5")
    mixtures = [f"data={MIXTURE}", f"held_out={HELD_OUT}"]
    run(seeded_hub, tmp_path, "midtrain", *train, *mixtures, "tokens=10_240", "eval_rows=4")
    run(seeded_hub, tmp_path, "sft", *train, *mixtures)
    for stage in ("pretrain", "midtrain", "sft"):
        folder = tmp_path / "runs/gpt_tiny" / stage
        assert json.loads((folder / "results.json").read_text())["stage"] == stage
        assert last_checkpoint(folder) == (None, {})
    # nothing of them was fetched as a whole
    assert not list((tmp_path / "home").rglob("*.arrow"))


@pytest.mark.parametrize(
    "name", ["vit_s16_imagenet1k", "vit_b16_imagenet1k", "vit_b16_imagenet1k_authors", "vit_b4_cifar10"]
)
def test_recipe_for_images_runs_two_steps(seeded_hub, tmp_path, name):
    """As it stands, but for the number of images and layers; then the fine-tuning at 224 pixels."""
    few = ["images=32", "images_per_step=16", "batch_size=4", "epochs=1", "warmup_epochs=0", "workers=1"]
    few += ["logging_steps=1", *(["held_out=34"] if name == "vit_b4_cifar10" else [])]
    run(seeded_hub, tmp_path, "classify", name, *few, "num_hidden_layers=2")
    folder = tmp_path / "runs" / name
    results = json.loads((folder / "results.json").read_text())
    assert (results["steps"], results["held_out_images"]) == (2, 34)
    assert len(json.loads((folder / "config.json").read_text())["id2label"]) == (
        10 if name == "vit_b4_cifar10" else 1000
    )
    if name == "vit_b16_imagenet1k":
        run(seeded_hub, tmp_path, "classify", "vit_b16_imagenet1k_224", *few)
        assert json.loads((tmp_path / "runs/vit_b16_imagenet1k_224/config.json").read_text())["image_size"] == 224


@pytest.mark.parametrize("name", ["dino_vits16_imagenet1k", "dino_tiny_cifar10"])
def test_recipe_without_labels_runs_two_steps(seeded_hub, tmp_path, name):
    """As it stands, but for the number of images, layers and prototypes."""
    few = ["images=16", "images_per_step=8", "batch_size=4", "epochs=1", "warmup_epochs=0", "workers=1", "bf16=false"]
    few += ["logging_steps=1", "num_hidden_layers=2", "prototypes=4096", "held_out=20"]
    run(seeded_hub, tmp_path, "dino", name, *few)
    results = json.loads((tmp_path / "runs" / name / "results.json").read_text())
    assert (results["steps"], results["held_out_images"]) == (2, 20)


def test_teacher_and_student_are_published_and_measured_by_name(seeded_hub, tmp_path):
    """Trained, put on the Hub with what was measured of them, and measured again by their names there."""
    small = ["images=64", "images_per_step=16", "batch_size=8", "epochs=1", "warmup_epochs=0", "held_out=20"]
    small += ["hidden_size=16", "num_hidden_layers=2", "num_attention_heads=2", "prototypes=32", "laplacian_heads=1"]
    run(seeded_hub, tmp_path, "dino", *small, "logging_steps=1", "output=run")
    data = ["data=digits", "held_out=digits:test", "workers=0"]
    run(seeded_hub, tmp_path, "knn", "run", *data)
    run(seeded_hub, tmp_path, "upload", "run", "tester/dino-teacher")
    run(seeded_hub, tmp_path, "upload", "run/student", "tester/dino-student")
    code = "import sys, transformers, laplacian_heads; model = transformers.AutoModel.from_pretrained(sys.argv[1]); "
    code += "print(type(model).__name__, model.config.laplacian_heads)"
    pairs = tmp_path / "pairs"
    for place in ("images", "annotations"):
        (pairs / place).mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(4):
        picture = generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        Image.fromarray(picture).save(pairs / "images" / f"{number}.png")
        Image.fromarray((picture[..., 0] > 128).astype(np.uint8) + 1).save(pairs / "annotations" / f"{number}.png")
    for name in ("tester/dino-teacher", "tester/dino-student"):
        asked = [sys.executable, "-c", code, name]
        done = subprocess.run(asked, cwd=tmp_path, env=seeded_hub, capture_output=True, text=True)
        assert done.stdout.split() == ["LaplaceViTModel", "1"], done.stderr
        run(seeded_hub, tmp_path, "knn", name, *data)
    name, found = "tester/dino-teacher", tmp_path / "runs/eval/tester--dino-teacher"
    fast = ["blocks=[1, 2]", "epochs=1", "batch_size=64", "images_per_step=64"]
    run(seeded_hub, tmp_path, "probe", name, *data, *fast)
    few = ["classes=2", "steps=2", "images_per_step=2", "batch_size=2", "crop=16", "stride=8", "shorter_side=16"]
    source = [f"data={pairs}", "workers=0"]
    run(seeded_hub, tmp_path, "segment", name, *source, f"held_out={pairs}", *few, "warmup_steps=0", "bf16=false")
    run(seeded_hub, tmp_path, "pca", name, f"data={pairs}", "image_size=32")
    assert {"knn.json", "probe.json", "segment.json"} <= {path.name for path in found.iterdir()}
    assert "mean IoU" in run(seeded_hub, tmp_path, "compare", name, "tester/dino-student")
    # By name and by folder it is the same model.
    by_name, by_folder = (
        json.loads((tmp_path / path / "knn.json").read_text()) for path in ("runs/eval/tester--dino-teacher", "run")
    )
    assert by_name["neighbors"] == by_folder["neighbors"]
