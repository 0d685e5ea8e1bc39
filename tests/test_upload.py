"""A run becomes a repository: staged, loaded by a process without the package, uploaded to the Hub for tests."""

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils.sha import git_hash
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from laplacian_heads import hub_upload, recipes
from laplacian_heads.hub_upload import UploadRecipe, stage, upload, verify

ROOT = Path(__file__).resolve().parents[1]
CHAT_TEMPLATE = "{% for message in messages %}<|bos|>{{ message.content }}{% endfor %}"
RESULTS = {
    **{"stage": "sft", "laplacian_heads": [[0, 2], [1, 2, 3]], "parameters": 1, "tokens": 4096, "steps": 8},
    **{"seconds": 1.0, "tokens_per_second": 4096.0, "loss": 2.5, "bits_per_byte": 1.25, "seed": 0},
}
TASK = {
    **{"metric": "acc", "value": 0.5, "stderr": 0.02, "items": 500, "of": 500, "chance": 0.25, "dataset": None},
    **{"calculator": True, "others": [{"metric": "acc_centred", "value": 0.375, "stderr": 0.03}]},
}
LIMITED = {**TASK, "items": 20, "dataset": "cais/mmlu", "calculator": False, "others": []}
STAGED = {
    *("config.json", "generation_config.json", "model.safetensors"),
    *("configuration.py", "laplacian.py", "modeling_laplace_gpt.py"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    *("README.md", "recipe.yaml", "results.json", "eval.json", "geometry.json", "geometry.png"),
}


def make_run(folder, model, tokenizer):
    """A run's folder as training and eval leave it, with things that must not be uploaded."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "recipe.yaml").write_text("seed: 0\n")
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "eval.json").write_text(json.dumps({"tasks": {"generated_choice": TASK, "mmlu": LIMITED}}))
    (folder / "geometry.json").write_text("{}")
    (folder / "geometry.png").write_bytes(b"\x89PNG")
    (folder / "checkpoint-1").mkdir()
    torch.save({}, folder / "checkpoint-1" / "optimizer.pt")
    torch.save({}, folder / "training_args.bin")
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def run(tmp_path, tiny, tokenizer):
    return make_run(tmp_path / "run", tiny(), tokenizer)


@pytest.fixture(scope="module")
def staged(tmp_path_factory, tiny, tokenizer):
    """What `stage` wrote for a run, and the file of expected logits; copies of it are tampered with."""
    root = tmp_path_factory.mktemp("staged")
    stage(make_run(root / "run", tiny(), tokenizer), root / "hub", "tester/tiny", root / "expected.safetensors")
    return root


def recipe(run, **values):
    return recipes.load(UploadRecipe, "upload", {"model": str(run), "repo": "tester/tiny-model", **values})


def test_dry_run_stages_and_verifies(run, capsys):
    """Twice: the second takes the place of the first and of what a killed one left, and stages nothing of it."""
    upload(recipe(run), dry_run=True)
    (run / "hub" / "stale.json").write_text("{}")
    shutil.copytree(run / "hub", run / "hub.part")
    upload(recipe(run), dry_run=True)
    assert {path.name for path in (run / "hub").iterdir()} == STAGED
    assert not (run / "hub.part").exists()
    assert not (run / "hub.old").exists()
    for name in ("configuration.py", "laplacian.py", "modeling_laplace_gpt.py"):
        assert (run / "hub" / name).read_bytes() == (ROOT / name).read_bytes()

    printed = capsys.readouterr().out
    assert "bit for bit" in printed
    assert "renders: <|bos|>Hello" in printed
    assert f"{(run / 'hub' / 'model.safetensors').stat().st_size:,} bytes  model.safetensors" in printed
    assert "nothing was uploaded" in printed

    card = (run / "hub" / "README.md").read_text()
    for part in ("license: apache-2.0", "pipeline_tag: text-generation", "library_name: transformers"):
        assert part in card.split("---")[1]
    for part in ("`[[0, 2], [1, 2, 3]]`", "4,096 tokens in 8 steps", "1.2500 bits", "| 0.500 | 0.020 | 0.250 |"):
        assert part in card
    assert 'from_pretrained("tester/tiny-model", trust_remote_code=True)' in card
    assert "first 20 of 500" in card
    found = {
        (each.dataset_name, each.metric_name, each.metric_value, each.dataset_type)
        for each in ModelCard(card).data.eval_results
    }
    assert found == {
        ("generated_choice", "acc", 0.5, "generated_choice"),
        ("generated_choice", "acc_centred", 0.375, "generated_choice"),
        ("mmlu", "acc, first 20 of 500 items, without calculator", 0.5, "cais/mmlu"),
    }


def test_interrupted_exchange_is_undone(run):
    """Killed between its two renames, a call leaves the older folder under another name."""
    upload(recipe(run), dry_run=True)
    (run / "hub" / "README.md").write_text("the older one")
    (run / "hub").rename(run / "hub.old")
    (run / "model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match="[Hh]eader"):
        upload(recipe(run), dry_run=True)
    assert (run / "hub" / "README.md").read_text() == "the older one"


def test_folder_of_something_else_is_not_replaced(run, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(ValueError, match="staging is .*mine, which holds something else"):
        upload(recipe(run, staging=str(tmp_path / "mine")), dry_run=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "dear"


def change_code(folder):
    (folder / "laplacian.py").open("a").write("# changed")


def remove_code(folder):
    (folder / "configuration.py").unlink()


def change_weights(folder):
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def change_auto_map(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]["AutoModel"]
    (folder / "config.json").write_text(json.dumps(config))


def break_template(folder):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('broken') }}")


def add_pickle(folder):
    torch.save({}, folder / "optimizer.pt")


def add_folder(folder):
    (folder / "checkpoint-1").mkdir()


def add_token(folder):
    (folder / "recipe.yaml").write_text("token: hf_" + "a1B2c" * 6)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change_code, "laplacian.py is not the file of this package"),
        (remove_code, "configuration.py is not the file of this package"),
        (change_weights, "gives other logits"),
        (change_auto_map, "does not name the code of every Auto class"),
        (break_template, "fails in a fresh process: .*broken"),
        (add_pickle, r"optimizer.pt is staged, allowed are .*\.safetensors"),
        (add_folder, "checkpoint-1 is staged"),
        (add_token, "recipe.yaml has in it what looks like a token"),
    ],
)
def test_tampered_folder_is_refused(staged, tmp_path, tamper, message):
    shutil.copytree(staged / "hub", tmp_path / "hub")
    tamper(tmp_path / "hub")
    with pytest.raises(ValueError, match=message):
        verify(tmp_path / "hub", staged / "expected.safetensors")


def test_what_fails_is_not_uploaded(run, hub, monkeypatch):
    """And what was staged before stays."""
    for name, value in hub.env.items():
        monkeypatch.setenv(name, value)
    upload(recipe(run), dry_run=True)
    (run / "recipe.yaml").write_text("token: hf_" + "a1B2c" * 6)
    monkeypatch.setattr(hub_upload, "HfApi", None)
    with pytest.raises(ValueError, match="looks like a token"):
        upload(recipe(run))
    assert (run / "hub" / "recipe.yaml").read_text() == "seed: 0\n"


def test_weights_that_are_not_finite_are_refused(tmp_path, tiny, tokenizer):
    model = tiny()
    model.model.layers[1].mlp.fc1.weight.data[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.fc1.weight of .* is not finite"):
        upload(recipe(make_run(tmp_path / "run", model, tokenizer)), dry_run=True)


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path, tiny, tokenizer):
    run = make_run(tmp_path / "run", tiny(vocab_size=299), tokenizer)
    with pytest.raises(ValueError, match="has 300 entries, allowed are at most 299"):
        upload(recipe(run), dry_run=True)


def test_other_models_and_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        upload(recipe(tmp_path), dry_run=True)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="is a gpt2, allowed is a LaplaceGPT"):
        upload(recipe(tmp_path), dry_run=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": None}, "model is None"),
        ({"repo": None}, "repo is None, allowed is OWNER/NAME"),
        ({"repo": "tiny"}, "repo is 'tiny', allowed is OWNER/NAME"),
        ({"repo": "a/b/c"}, "repo is 'a/b/c'"),
        ({"revision": ""}, "revision is ''"),
    ],
)
def test_refusals(values, message):
    with pytest.raises(ValueError, match=message):
        recipe("run", **values)


def test_upload_needs_a_token(run, monkeypatch, tmp_path):
    monkeypatch.setattr(hub_upload, "get_token", lambda: None)
    with pytest.raises(ValueError, match="no token of the Hub"):
        upload(recipe(run))
    assert not (run / "hub").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_file_that_differs_on_the_hub_is_named(staged, name):
    """Files on the Hub of another size, of the same size with another content, and missing ones."""
    folder = staged / "hub"

    def remote(name, data):
        lfs = {"sha256": hashlib.sha256(data).hexdigest()} if name.endswith(".safetensors") else None
        return SimpleNamespace(path=name, size=len(data), lfs=lfs and SimpleNamespace(**lfs), blob_id=git_hash(data))

    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub_upload._compare(folder, [remote(*item) for item in files.items()], "tester/tiny")
    for data in (files[name] + b" ", files[name][:-1] + b" "):
        with pytest.raises(ValueError, match=f"{name} in tester/tiny differs"):
            hub_upload._compare(folder, [remote(*item) for item in {**files, name: data}.items()], "tester/tiny")
    del files[name]
    with pytest.raises(ValueError, match=f"{name} is missing in tester/tiny"):
        hub_upload._compare(folder, [remote(*item) for item in files.items()], "tester/tiny")


def test_uploaded_model_loads_in_a_fresh_process(run, hub, module_process, input_ids, tmp_path):
    """From main, where shards of an older model lay beside the owner's own file, and from a branch."""
    code = """
    import sys
    from huggingface_hub import HfApi
    from laplacian_heads.__main__ import main
    run, branch = sys.argv[1:]
    HfApi().create_repo("tester/tiny-model")
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        HfApi().upload_file(repo_id="tester/tiny-model", path_or_fileobj=b"old", path_in_repo=name)
    assert main(["upload", run, "tester/tiny-model"]) == 0
    assert main(["upload", run, "tester/tiny-model", f"revision={branch}"]) == 0
    """
    printed = module_process(code, run, "v2", can_import=True, env=hub.env)
    assert printed.count("Every file is there with the size and hash it has here") == 2
    assert {path.name for path in hub.files("tester/tiny-model").iterdir()} == {*STAGED, ".gitattributes", "notes.txt"}

    model = AutoModelForCausalLM.from_pretrained(run).eval()
    with torch.no_grad():
        save_file({"ids": input_ids, "logits": model(input_ids).logits}, tmp_path / "expected.safetensors")
    code = """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    expected = load_file(sys.argv[1])
    for revision in ("main", "v2"):
        arguments = {"revision": revision, "trust_remote_code": True}
        model = AutoModelForCausalLM.from_pretrained("tester/tiny-model", **arguments).eval()
        tokenizer = AutoTokenizer.from_pretrained("tester/tiny-model", **arguments)
        with torch.no_grad():
            print(torch.equal(model(expected["ids"]).logits, expected["logits"]), len(tokenizer))
    """
    assert module_process(code, tmp_path / "expected.safetensors", env=hub.env).split() == ["True", "300"] * 2
