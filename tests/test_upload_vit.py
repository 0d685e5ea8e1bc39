"""A LaplaceViT becomes a repository as a LaplaceGPT does; here is what differs, such as the image processor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, metadata_load
from reference import tiny_vit
from safetensors.torch import load_file, save_file
from transformers import BitImageProcessor

from laplacian_heads import (
    LaplaceViTForImageClassification,
    LaplaceViTForMaskedImageModeling,
    LaplaceViTModel,
    hub_upload,
    model_card,
    recipes,
)
from laplacian_heads.hub_upload import UploadRecipe, hashes, stage, upload, verify

ROOT = Path(__file__).resolve().parents[1]
CLASSES = ["tabby cat", "dog", "red fox", "owl", "great white shark"]
RESULTS = {
    **{"stage": "classify", "laplacian_heads": [[0, 2], [3]], "parameters": 1, "steps": 100, "epochs": 10},
    **{"images": 64_000, "seconds": 5400.0, "hardware": "1 x NVIDIA H100", "images_per_second": 520.1},
    **{"peak_memory_gb": 1.2, "loss": 0.61, "accuracy": 0.81, "accuracy_top5": 0.99, "ema_accuracy": None},
    **{"held_out_images": 10_000, "seed": 0},
}
RECIPE = {"output": "runs/vit", "data": "owner/pictures@main:small", "held_out": "owner/pictures::test", "epochs": 10}
STAGED = {
    *("config.json", "model.safetensors", "preprocessor_config.json"),
    *("configuration.py", "laplacian.py", "modeling_laplace_vit.py"),
    *("README.md", "heads.png", "recipe.yaml", "results.json"),
}
SNIPPETS = ["Fine-tune with Trainer", "Get features", "Use as a backbone"]


def make_run(folder, model_class=LaplaceViTForImageClassification, results=RESULTS, **fields):
    """A run's folder as training leaves it, with things that must not be uploaded."""
    names = dict(enumerate(CLASSES))
    labels = {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    model = tiny_vit(model_class, **{"laplacian_heads": [[0, 2], [3]], **labels, **fields})
    model.save_pretrained(folder)
    model.save_pretrained(folder / "ema")
    sizes = {"size": {"shortest_edge": 18}, "crop_size": {"height": 16, "width": 16}}
    BitImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.25] * 3).save_pretrained(folder)
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """What `stage` wrote of a run, the run, and the file for `verify`."""
    root = tmp_path_factory.mktemp("staged")
    run = make_run(root / "run")
    stage(run, root / "hub", recipe(run, tag="v1"), root / "expected.safetensors")
    return root


def recipe(run, **values):
    return recipes.load(UploadRecipe, "upload", {"model": str(run), "repo": "tester/tiny-vit", **values})


def snippets_run(lines):
    """Which pieces of the card's code `verify` ran; "" is one that it could not run."""
    return [line.partition(" runs: ")[2] for line in lines if line.startswith("the card's code")]


def edit_config(run, **values):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **values}))


def test_a_run_is_staged_and_verified(staged, tmp_path):
    """With one piece of the card's code, the only one that asks the Hub whether it has the repository."""
    assert hashes(staged / "hub").keys() == STAGED
    for name in ("configuration.py", "laplacian.py", "modeling_laplace_vit.py"):
        assert (staged / "hub" / name).read_bytes() == (ROOT / name).read_bytes()
    shutil.copytree(staged / "hub", tmp_path / "hub")
    card = (staged / "hub" / "README.md").read_text()
    (tmp_path / "hub" / "README.md").write_text(card[card.index("## Use as a backbone") :])
    lines = verify(tmp_path / "hub", staged / "expected.safetensors")
    assert "AutoConfig and AutoModelForImageClassification load it with trust_remote_code=True" in lines
    assert "the pipeline image-classification answers with the names of 5 classes" in lines
    assert snippets_run(lines) == ["Use as a backbone"]


@pytest.mark.slow
def test_the_code_of_the_card_runs(staged):
    """All of it: none needs a network."""
    lines = verify(staged / "hub", staged / "expected.safetensors")
    assert snippets_run(lines) == ["Classify with a pipeline", "Classify", *SNIPPETS]


def test_card_of_a_classifier(staged):
    card = staged / "hub" / "README.md"
    assert metadata_load(card) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "tags": ["laplace_vit", "laplacian-heads", "vision"],
        "datasets": ["owner/pictures"],
        "model-index": [
            {
                "name": "tiny-vit",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"type": "owner/pictures", "name": "owner/pictures"},
                        "metrics": [
                            {"type": "accuracy", "value": 0.81, "name": "top-1 accuracy, 10,000 held-out images"},
                            {"type": "accuracy", "value": 0.99, "name": "top-5 accuracy, 10,000 held-out images"},
                        ],
                    }
                ],
            }
        ],
    }
    text = ModelCard.load(card).text
    for part in (
        "A LaplaceViT, DeiT-3's vision transformer with [Laplacian heads]",
        "Of each layer's 4 attention heads 1 to 2 are Laplacian",
        "| image, patch | 16 x 16, 4 x 4 pixels |",
        "| classes | 5 |",
        f"| parameters | {sum(each.numel() for each in load_file(staged / 'hub/model.safetensors').values()):,} |",
        "| stage | images seen | steps | epochs | hours | hardware | held-out loss, nats | seed |",
        "| classify | 64,000 | 100 | 10 | 1.50 | 1 x NVIDIA H100 | 0.6100 | 0 |",
        "| this model | `[[0, 2], [3]]` | 0.8100 ± 0.0039 | 0.9900 | 10,000 | 0 |",
        "Shares of held-out images of owner/pictures;",
        'model="tester/tiny-vit", revision="v1", trust_remote_code=True',
    ):
        assert part in text


@pytest.mark.parametrize("source", ["pictures", "pictures:test"])
def test_a_folder_is_no_dataset_of_the_hub(tmp_path, monkeypatch, source):
    """Nor is a split of it; the card does not tell where it lies."""
    (tmp_path / "my" / "pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for data in (f"my/{source}", str(tmp_path / "my" / source)):
        run = make_run(tmp_path / f"run-{len(data)}")
        (run / "recipe.yaml").write_text(json.dumps({"data": data, "held_out": None}))
        stage(run, run / "hub", recipe(run), tmp_path / "expected.safetensors")
        card = ModelCard.load(run / "hub" / "README.md")
        assert card.data.datasets is None
        assert {each.dataset_name for each in card.data.eval_results} == {source}
        assert str(tmp_path) not in card.content


def test_card_without_accuracies(tmp_path):
    """No top-5 of few classes, none at all where there was no held-out image, and a run that tells nothing."""
    few = {**RESULTS, "accuracy_top5": None}
    none = {**few, "accuracy": None, "held_out_images": 0, "loss": None}
    for number, (results, accuracies) in enumerate([(few, 1), (none, 0), ({}, 0)]):
        run = make_run(tmp_path / str(number), results=results)
        stage(run, run / "hub", recipe(run), tmp_path / "expected.safetensors")
        card = ModelCard.load(run / "hub" / "README.md")
        assert len(card.data.eval_results or []) == card.text.count("## Accuracy") == accuracies
        assert "None" not in card.text


def test_card_beside_a_twin(tmp_path):
    run = make_run(tmp_path / "run")
    twin = make_run(tmp_path / "twin", laplacian_heads=0, results={**RESULTS, "laplacian_heads": 0, "accuracy": 0.79})
    (twin / "recipe.yaml").write_text(json.dumps({**RECIPE, "output": "elsewhere", "laplacian_heads": 0, "epochs": 20}))
    stage(run, run / "hub", recipe(run, twin=str(twin)), tmp_path / "expected.safetensors")
    text = (run / "hub" / "README.md").read_text()
    assert "| its twin | `0` | 0.7900 ± 0.0041 | 0.9900 | 10,000 | 0 |" in text
    assert "The recipes of the two differ in epochs too." in text
    assert "Each is one run with one seed." in text
    (twin / "results.json").unlink()
    with pytest.raises(ValueError, match="twin is .*, whose results.json has no accuracy"):
        stage(run, run / "again", recipe(run, twin=str(twin)), tmp_path / "expected.safetensors")


def test_card_of_a_run_without_laplacian_heads(tmp_path):
    run = make_run(tmp_path / "run", laplacian_heads=0)
    stage(run, run / "hub", recipe(run), tmp_path / "expected.safetensors")
    assert "It has no Laplacian heads" in (run / "hub" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_class", [LaplaceViTModel, LaplaceViTForMaskedImageModeling])
def test_a_backbone_is_staged_and_verified(tmp_path, model_class):
    """What was trained without labels: its outputs are features, or images."""
    results = {**RESULTS, "stage": "simmim", "accuracy": None, "accuracy_top5": None}
    run = make_run(tmp_path / "run", model_class, results=results)
    stage(run, run / "hub", recipe(run), tmp_path / "expected.safetensors")
    lines = verify(run / "hub", tmp_path / "expected.safetensors")
    assert snippets_run(lines) == SNIPPETS
    card = ModelCard.load(run / "hub" / "README.md")
    assert (card.data.pipeline_tag, card.data.eval_results) == ("image-feature-extraction", None)
    assert "It gives features" in card.text
    assert "| classes |" not in card.text


def without_processor(run):
    (run / "preprocessor_config.json").unlink()


def with_other_type(run):
    edit_config(run, model_type="vit")


def with_other_class(run):
    edit_config(run, architectures=["LaplaceViTBackbone"])


def with_type_of_laplace_gpt(run):
    edit_config(run, model_type="laplace_gpt")


def without_a_weight(run):
    weights = load_file(run / "model.safetensors")
    del weights["vit.layers.1.mlp.fc1.weight"]
    save_file(weights, run / "model.safetensors", {"format": "pt"})


def with_nan(run):
    weights = load_file(run / "model.safetensors")
    weights["vit.embeddings.cls_token"][0, 0, 3] = torch.nan
    save_file(weights, run / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_processor, "has no preprocessor_config.json, allowed is a run with its image processor"),
        (with_other_type, "is a vit, allowed is a LaplaceGPT or a LaplaceViT"),
        (with_other_class, "is a laplace_vit of the class LaplaceViTBackbone, allowed are LaplaceViTForImageClass"),
        (with_type_of_laplace_gpt, "is a laplace_gpt of the class LaplaceViTFor.*, allowed are LaplaceGPTForCausalLM"),
        (without_a_weight, "vit.layers.1.mlp.fc1.weight of .* is missing"),
        (with_nan, "vit.embeddings.cls_token of .* is not finite"),
    ],
)
def test_what_is_no_whole_model_is_refused(tmp_path, change, message):
    run = make_run(tmp_path / "run")
    change(run)
    with pytest.raises(ValueError, match=message):
        upload(recipe(run), dry_run=True)
    assert not (run / "hub.part").exists()


def change_code(folder):
    (folder / "modeling_laplace_vit.py").open("a").write("# changed")


def code_of_the_other_model(folder):
    shutil.copyfile(ROOT / "modeling_laplace_gpt.py", folder / "modeling_laplace_vit.py")


def change_auto_map(folder):
    edit_config(folder, auto_map={"AutoConfig": "configuration.LaplaceViTConfig"})


@pytest.mark.parametrize("tamper", [change_code, code_of_the_other_model])
def test_other_code_is_refused(staged, tmp_path, tamper):
    shutil.copytree(staged / "hub", tmp_path / "hub")
    tamper(tmp_path / "hub")
    with pytest.raises(ValueError, match="The staged modeling_laplace_vit.py is not the file of this package"):
        verify(tmp_path / "hub", staged / "expected.safetensors")


def test_missing_names_of_code_are_refused(staged, tmp_path):
    shutil.copytree(staged / "hub", tmp_path / "hub")
    change_auto_map(tmp_path / "hub")
    with pytest.raises(ValueError, match="does not name the code of every Auto class"):
        verify(tmp_path / "hub", staged / "expected.safetensors")


def change_processor(folder):
    path = folder / "preprocessor_config.json"
    path.write_text(path.read_text().replace('"shortest_edge": 18', '"shortest_edge": 17'))


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["classifier.bias"][0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "message"),
    [(change_processor, "image processor makes other pixel_values"), (change_weights, "gives other outputs")],
)
def test_what_computes_something_else_is_refused(staged, tmp_path, tamper, message):
    shutil.copytree(staged / "hub", tmp_path / "hub")
    tamper(tmp_path / "hub")
    with pytest.raises(ValueError, match=message):
        verify(tmp_path / "hub", staged / "expected.safetensors")


@pytest.mark.slow
def test_uploaded_model_loads_by_every_auto_class(staged, hub, module_process, tmp_path):
    """The code of the card runs as it stands, with AutoBackbone, which takes repositories of the Hub only."""
    code = """
    import sys
    from laplacian_heads import hub_upload
    from laplacian_heads.__main__ import main
    hub_upload.verify = lambda *_: []  # which takes long, and is tested above
    assert main(["upload", sys.argv[1], "tester/tiny-vit", "tag=v1"]) == 0
    """
    run = shutil.copytree(staged / "run", tmp_path / "run")
    printed = module_process(code, run, can_import=True, env=hub.env)
    assert "Every file came back as it was sent: tester/tiny-vit at v1" in printed
    assert hashes(hub.files("tester/tiny-vit")).keys() == {*STAGED, ".gitattributes"}

    code = """
    import json, sys
    import torch, transformers
    from safetensors.torch import load_file
    expected, classes, snippets = load_file(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    found = {}
    with torch.no_grad():
        for name in classes:
            load = getattr(transformers, name).from_pretrained
            model = load("tester/tiny-vit", revision="v1", trust_remote_code=True).eval()
            found[name] = type(model).__name__
            if name == "AutoModelForImageClassification":
                assert torch.equal(model(expected["input"])[0], expected["output"])
    for snippet in snippets:
        exec(snippet, {})
    print(json.dumps(found))
    """
    config = tiny_vit().config
    classes = {name: path.rpartition(".")[2] for name, path in config.auto_classes.items() if name != "AutoConfig"}
    config.architectures = ["LaplaceViTForImageClassification"]
    snippets = list(model_card.snippets("tester/tiny-vit", "v1", config, False).values())
    arguments = staged / "expected.safetensors", json.dumps(list(classes)), json.dumps(snippets)
    assert json.loads(module_process(code, *arguments, env=hub.env).splitlines()[-1]) == classes


def test_every_published_class_has_an_auto_class():
    for config, names in hub_upload.PUBLISHED.items():
        assert set(names) <= config.auto_classes.keys()


def test_card_has_what_was_measured_of_frozen_features(tmp_path):
    run = make_run(
        tmp_path / "run", LaplaceViTModel, {"stage": "dino", "seed": 0, "knn_accuracy": 0.5, "held_out_images": 9}
    )
    asked = {"data": "owner/pictures", "held_out": "owner/pictures::test"}
    measured = {
        "probe.json": {"by_selection": {"held_out_accuracy": 0.71}, "held_out_images": 100, "recipe": asked},
        "knn.json": {"neighbors": [{"neighbors": 20, "accuracy": 0.6}], "held_out_images": 100, "recipe": asked},
        "segment.json": {"mean_iou": 0.31, "recipe": {"data": str(tmp_path / "ade"), "held_out": "ade:validation"}},
    }
    for name, content in measured.items():
        (run / name).write_text(json.dumps(content))
    stage(run, tmp_path / "hub", recipe(run, tag="v1"), tmp_path / "expected.safetensors")
    assert measured.keys() <= hashes(tmp_path / "hub").keys()
    text = ModelCard.load(tmp_path / "hub" / "README.md").text
    for row in (
        "| linear probe | 0.7100 ± 0.0454 | owner/pictures | owner/pictures |",
        "| 20-NN | 0.6000 ± 0.0490 | owner/pictures | owner/pictures |",
        "| mean IoU | 0.3100 | ade |",
        "k-NN accuracy",
    ):
        assert row in text
    assert str(tmp_path) not in text


@pytest.mark.parametrize("name", ["probe.json", "knn.json", "segment.json"])
def test_figures_of_other_weights_are_refused(tmp_path, name):
    run = make_run(tmp_path / "run", LaplaceViTModel)
    (run / name).write_text(json.dumps({"weights": "0" * 64}))
    with pytest.raises(ValueError, match=rf"{name} is of other weights than .*; call {name[:-5]} again, or delete it"):
        upload(recipe(run), dry_run=True)
