"""A run becomes a repository: staged, loaded by a process without the package, uploaded to the Hub for tests."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils.sha import git_hash
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from laplacian_heads import hub_upload, model_card, recipes
from laplacian_heads.eval import geometry_plots, geometry_report
from laplacian_heads.files import weights_hash
from laplacian_heads.hub_upload import UploadRecipe, hashes, stage, upload, verify

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
    *("README.md", "heads.png", "recipe.yaml", "results.json", "eval.json", "geometry.json", "mine.png"),
    *("geometry/report.md", "geometry/variance.png"),
}
GEOMETRY = {
    **{"data": "python_prose", "sequences": 2, "tokens": 32, "classes_are": None},
    "layers": [{"layer": 0, "variance": {"shares": {"within_sequence": 0.625}}}],
}


def make_run(folder, model, tokenizer):
    """A run's folder as training and eval leave it, with things that must not be uploaded."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "recipe.yaml").write_text("seed: 0\n")
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "eval.json").write_text(json.dumps({"tasks": {"generated_choice": TASK, "mmlu": LIMITED}}))
    (folder / "geometry.json").write_text(json.dumps(GEOMETRY))
    (folder / "mine.png").write_bytes(b"\x89PNG")
    (folder / "geometry").mkdir()
    geometry_report.write(
        {"run": GEOMETRY}, geometry_plots.all_of({"run": GEOMETRY}, folder / "geometry"), folder / "geometry"
    )
    (folder / "geometry" / "spectrum.png").write_bytes(b"of an earlier report")
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
    run = make_run(root / "run", tiny(), tokenizer)
    stage(run, root / "hub", recipe(run), root / "expected.safetensors")
    return root


@pytest.fixture
def only_generate(monkeypatch):
    write = model_card.snippets
    monkeypatch.setattr(model_card, "snippets", lambda *given: {"Generate": write(*given)["Generate"]})


@pytest.fixture
def no_snippets(monkeypatch):
    """A card without code, which takes long to try."""
    monkeypatch.setattr(model_card, "snippets", lambda *_: {})


def recipe(run, **values):
    return recipes.load(UploadRecipe, "upload", {"model": str(run), "repo": "tester/tiny-model", **values})


@pytest.mark.slow
def test_the_code_of_the_card_runs(staged):
    """Where no data can be reached, all but the scoring."""
    lines = verify(staged / "hub", staged / "expected.safetensors")
    for name in ("Generate", "Fine-tune with Trainer", "Fine-tune with PEFT"):
        assert f"the card's code runs: {name}" in lines
    assert "the card's code was not run: its data cannot be reached: Score with lm-eval" in lines


def test_dry_run_stages_and_verifies(run, capsys, only_generate):
    """Twice: the second takes the place of the first and of what a killed one left, and stages nothing of it."""
    upload(recipe(run), dry_run=True)
    (run / "hub" / "stale.json").write_text("{}")
    shutil.copytree(run / "hub", run / "hub.part")
    upload(recipe(run), dry_run=True)
    assert hashes(run / "hub").keys() == STAGED
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
    for part in (
        "`[[0, 2], [1, 2, 3]]`",
        "| sft | 4,096 | 8 | 0.00 |",
        "| 2.5000 | 1.2500 | 0 |",
        "| 0.500 | 0.020 | 0.250 | 500 |",
    ):
        assert part in card
    assert 'AutoModelForCausalLM.from_pretrained("tester/tiny-model", revision="model-' in card
    assert "| 20 of 500 |" in card
    found = {(each.metric_name, each.metric_value, each.dataset_type) for each in ModelCard(card).data.eval_results}
    assert found == {
        ("generated_choice acc", 0.5, "generated_choice"),
        ("mmlu acc, 20 of 500 items, without calculator", 0.5, "cais/mmlu"),
    }


@pytest.mark.parametrize("where", ["in the run", "elsewhere", "nowhere"])
def test_card_shows_geometry(run, where):
    """The report where the run has one; the figures alone where it lies with that of other runs."""
    if where != "in the run":
        shutil.rmtree(run / "geometry")
    if where == "nowhere":
        (run / "geometry.json").unlink()
    stage(run, run / "hub", recipe(run), run / "expected.safetensors")
    card = (run / "hub" / "README.md").read_text()
    assert card.count("\n## Geometry\n") == (where != "nowhere")
    assert bool(re.search(r"^\| share within sequences +\| 0.625 +\|$", card, re.MULTILINE)) == (where != "nowhere")
    pictures = re.findall(r"!\[.*?\]\((geometry/.*?)\)", card)
    assert pictures == (["geometry/variance.png"] if where == "in the run" else [])
    assert all((run / "hub" / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert not re.search(r"^# (?!run|tiny-model)", card.partition("\n---\n")[2], re.MULTILINE)


def test_card_tells_of_every_stage_and_of_the_twin(run, tmp_path, tiny, tokenizer, no_snippets):
    first = make_run(tmp_path / "pretrain", tiny(), tokenizer)
    mixture = {"data": ["HuggingFaceFW/fineweb-edu:sample-10BT", "python_prose", str(tmp_path)], "model": "owner/base"}
    (first / "recipe.yaml").write_text(json.dumps(mixture))
    (first / "results.json").write_text(json.dumps({**RESULTS, "stage": "pretrain", "hardware": "8 x NVIDIA H100"}))
    (run / "recipe.yaml").write_text(json.dumps({"model": str(first), "data": [{"data": "openai/gsm8k:main"}]}))
    twin = make_run(tmp_path / "twin", tiny(laplacian_heads=0), tokenizer)
    (twin / "eval.json").write_text(json.dumps({"tasks": {"generated_choice": {**TASK, "value": 0.3}}}))
    upload(recipe(run, twin=str(twin), license="mit", tag="v1.0"), dry_run=True)
    folder = run / "hub"
    assert {"recipe.yaml", "recipe_1_pretrain.yaml"} <= {path.name for path in folder.iterdir()}
    card = ModelCard.load(folder / "README.md")
    assert card.data.datasets == ["HuggingFaceFW/fineweb-edu", "openai/gsm8k"]
    assert (card.data.base_model, card.data.license) == ("owner/base", "mit")
    assert "| pretrain | 4,096 | 8 | 0.00 | 8 x NVIDIA H100 |" in card.content
    assert "generated_choice better (0.500 ± 0.020 against 0.300 ± 0.020" in card.content
    assert "## Generate" not in card.content


def test_interrupted_exchange_is_undone(run, no_snippets):
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


def add_key_to_weights(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", {"format": "pt", "key": "-----BEGIN RSA PRIVATE KEY-----"})


def add_key_to_picture(folder):
    (folder / "geometry" / "variance.png").write_bytes(b"\x89PNG AKIA" + b"ABCDEFGH" * 2 + b" ")


def add_page(folder):
    (folder / "geometry" / "report.html").write_text("<html>")


def add_folder_to_report(folder):
    (folder / "geometry" / "more").mkdir()


def replace_report(folder):
    shutil.rmtree(folder / "geometry")
    (folder / "geometry").write_text("")


def break_snippet(folder):
    card = (folder / "README.md").read_text().partition("## Fine-tune")[0]
    (folder / "README.md").write_text(card.replace("max_new_tokens=40", "max_new_tokens=40, temprature=1"))


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (change_code, "laplacian.py is not the file of this package"),
        (remove_code, "configuration.py is not the file of this package"),
        (change_weights, "gives other outputs"),
        (change_auto_map, "does not name the code of every Auto class"),
        (break_template, "fails in a fresh process: .*broken"),
        (add_pickle, r"optimizer.pt is staged, allowed are .*\.safetensors"),
        (add_folder, "checkpoint-1 is staged"),
        (add_token, "recipe.yaml has in it what looks like a token of the Hub"),
        (add_key_to_weights, "model.safetensors has in it what looks like a private key"),
        (add_key_to_picture, "geometry/variance.png has in it what looks like a key of AWS"),
        (add_page, "geometry/report.html is staged"),
        (add_folder_to_report, "geometry/more is staged"),
        (replace_report, "geometry is staged"),
        (break_snippet, "The card's code to generate fails: .*temprature"),
    ],
)
def test_tampered_folder_is_refused(staged, tmp_path, tamper, message):
    shutil.copytree(staged / "hub", tmp_path / "hub")
    tamper(tmp_path / "hub")
    with pytest.raises(ValueError, match=message):
        verify(tmp_path / "hub", staged / "expected.safetensors")


def test_what_fails_is_not_uploaded(run, hub, monkeypatch, no_snippets):
    """And what was staged before stays."""
    for name, value in hub.env.items():
        monkeypatch.setenv(name, value)
    upload(recipe(run), dry_run=True)
    (run / "recipe.yaml").write_text("token: hf_" + "a1B2c" * 6)
    monkeypatch.setattr(hub_upload, "_check_token", lambda _: None)
    monkeypatch.setattr(hub_upload, "_upload", None)
    with pytest.raises(ValueError, match="looks like a token"):
        upload(recipe(run))
    assert (run / "hub" / "recipe.yaml").read_text() == "seed: 0\n"


def test_weights_that_are_not_finite_are_refused(tmp_path, tiny, tokenizer):
    model = tiny()
    model.model.layers[1].mlp.fc1.weight.data[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.fc1.weight of .* is not finite"):
        upload(recipe(make_run(tmp_path / "run", model, tokenizer)), dry_run=True)


def test_missing_weights_are_refused(tmp_path, tiny, tokenizer):
    """from_pretrained would draw them at random."""
    run = make_run(tmp_path / "run", tiny(), tokenizer)
    weights = load_file(run / "model.safetensors")
    del weights["model.layers.1.mlp.fc1.weight"]
    save_file(weights, run / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.fc1.weight of .* is missing"):
        upload(recipe(run), dry_run=True)


def test_tokenizer_larger_than_the_embedding_is_refused(tmp_path, tiny, tokenizer):
    run = make_run(tmp_path / "run", tiny(vocab_size=299), tokenizer)
    with pytest.raises(ValueError, match="has 300 entries, allowed are at most 299"):
        upload(recipe(run), dry_run=True)


@pytest.mark.parametrize("name", ["eval.json", "geometry.json"])
def test_what_was_measured_of_other_weights_is_refused(run, name):
    content = json.loads((run / name).read_text())
    for weights in (None, weights_hash(run)):
        (run / name).write_text(json.dumps({**content, "weights": weights}))
        hub_upload._check_run(run)
    (run / name).write_text(json.dumps({**content, "weights": "0" * 64}))
    with pytest.raises(ValueError, match=rf"{name} is of other weights than .* has now; call (eval|geometry) again"):
        upload(recipe(run), dry_run=True)
    (run / name).write_text("{")
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        upload(recipe(run), dry_run=True)


@pytest.mark.slow
def test_code_of_the_card_that_cannot_reach_its_data_is_no_fault(run, monkeypatch, capsys):
    code = "from huggingface_hub.utils import get_session\nget_session().get('http://127.0.0.1:9')"
    monkeypatch.setattr(model_card, "snippets", lambda *_: {"Score with lm-eval": code})
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    upload(recipe(run), dry_run=True)
    assert "the card's code was not run: its data cannot be reached: Score with lm-eval" in capsys.readouterr().out


def test_a_run_that_is_not_there_or_not_finished(tmp_path):
    with pytest.raises(ValueError, match="where there is no folder"):
        upload(recipe(tmp_path / "none"), dry_run=True)
    (tmp_path / "checkpoint-10").mkdir()
    with pytest.raises(ValueError, match="whose training is not finished"):
        upload(recipe(tmp_path), dry_run=True)


def test_a_failure_leaves_no_half_of_a_model(run, monkeypatch, tmp_path):
    """An empty folder may be staged in, and is what it was."""
    (tmp_path / "empty").mkdir()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_upload, "verify", interrupted)
    with pytest.raises(KeyboardInterrupt):
        upload(recipe(run, staging=str(tmp_path / "empty")), dry_run=True)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("empty")] == ["empty"]
    monkeypatch.setattr(hub_upload, "verify", lambda *_: [])
    upload(recipe(run, staging=str(tmp_path / "empty")), dry_run=True)
    assert (tmp_path / "empty/config.json").exists()


def test_a_hub_that_cannot_be_reached_is_named(run, module_process, hub):
    code = """
    import sys
    from laplacian_heads.__main__ import main
    sys.stderr = sys.stdout
    assert main(["upload", sys.argv[1], "tester/gone"]) == 1
    """
    nowhere = {**hub.env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "The Hub at http://127.0.0.1:9 cannot be reached" in module_process(code, run, can_import=True, env=nowhere)


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
        ({"tag": "a b"}, "tag is 'a b', allowed are letters"),
        ({"twin": "nowhere"}, "twin is 'nowhere', allowed is null or the folder of a run"),
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


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "geometry/variance.png"])
def test_a_repository_is_the_same_only_with_every_byte(staged, name):
    """Files on the Hub of another size, of the same size with another content, missing ones, and shards too many."""
    folder = staged / "hub"

    def remote(name, data):
        lfs = {"sha256": hashlib.sha256(data).hexdigest()} if name.endswith(".safetensors") else None
        return SimpleNamespace(path=name, size=len(data), lfs=lfs and SimpleNamespace(**lfs), blob_id=git_hash(data))

    def same(files):
        return hub_upload._same({path: remote(path, data) for path, data in files.items()}, folder)

    files = {name: (folder / name).read_bytes() for name in hashes(folder)}
    assert same(files)
    assert same({**files, "notes.txt": b""})
    assert not same({**files, "model-00001-of-00002.safetensors": b""})
    assert not same({**files, "geometry/spectrum.png": b""})
    for data in (files[name] + b" ", files[name][:-1] + b" "):
        assert not same({**files, name: data})
    del files[name]
    assert not same(files)


@pytest.mark.slow
def test_uploaded_model_loads_in_a_fresh_process(run, hub, module_process, input_ids, tmp_path):
    """From main, where shards of an older model lay beside the owner's own file, and from a branch."""
    code = """
    import sys
    from huggingface_hub import HfApi
    from laplacian_heads import hub_upload, model_card
    from laplacian_heads.__main__ import main
    run, branch = sys.argv[1:]
    write = model_card.snippets
    model_card.snippets = lambda *given: {"Generate": write(*given)["Generate"]}
    HfApi().create_repo("tester/tiny-model")
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "geometry/ranks.png", "notes.txt"):
        HfApi().upload_file(repo_id="tester/tiny-model", path_or_fileobj=b"old", path_in_repo=name)
    assert main(["upload", run, "tester/tiny-model"]) == 1  # there is something, and nobody agreed
    assert main(["upload", run, "tester/tiny-model", "--exist_ok"]) == 0
    hub_upload.verify = lambda *_: []  # which takes long, and is done
    assert main(["upload", run, "tester/tiny-model"]) == 0  # it is there already
    assert main(["upload", run, "tester/tiny-model", f"revision={branch}"]) == 0
    """
    printed = module_process(code, run, "v2", can_import=True, env=hub.env)
    assert printed.count("Every file came back as it was sent: tester/tiny-model at model-") == 3
    assert printed.count("tester/tiny-model has these files already") == 2
    assert hashes(hub.files("tester/tiny-model")).keys() == {*STAGED, ".gitattributes", "notes.txt"}

    model = AutoModelForCausalLM.from_pretrained(run).eval()
    with torch.no_grad():
        save_file({"ids": input_ids, "logits": model(input_ids).logits}, tmp_path / "expected.safetensors")
    code = """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
    expected = load_file(sys.argv[1])
    tag = sys.argv[2]
    for revision in ("main", "v2", tag):
        arguments = {"revision": revision, "trust_remote_code": True}
        model = AutoModelForCausalLM.from_pretrained("tester/tiny-model", **arguments).eval()
        tokenizer = AutoTokenizer.from_pretrained("tester/tiny-model", **arguments)
        with torch.no_grad():
            print(torch.equal(model(expected["ids"]).logits, expected["logits"]), len(tokenizer))
        generator = pipeline("text-generation", model="tester/tiny-model", **arguments)
        answer = generator([{"role": "user", "content": "Hello"}], max_new_tokens=4, do_sample=False)
        assert answer[0]["generated_text"][-1]["role"] == "assistant"
    """
    (tag,) = set(re.findall(r"at (model-\w+), commit", printed))
    card = (run / "hub" / "README.md").read_text()
    assert card.count(f'revision="{tag}"') == 2
    assert module_process(code, tmp_path / "expected.safetensors", tag, env=hub.env).split() == ["True", "300"] * 3


def test_a_token_that_may_not_write_is_refused_before_any_work(run, hub, module_process):
    code = """
    import os, sys
    from laplacian_heads import hub_upload
    from laplacian_heads.__main__ import main
    hub_upload.stage = None
    sys.stderr = sys.stdout
    for token, repo in (("hf_read", "tester/new"), ("hf_x", "somebody/new"), ("hf_unknown", "tester/new")):
        os.environ["HF_TOKEN"] = token
        assert main(["upload", sys.argv[1], repo]) == 1
    """
    said = module_process(code, run, can_import=True, env=hub.env)
    assert "The token may not write to tester/new: it is one for reading." in said
    assert "The token may not write to somebody/new, allowed is one of tester before the '/'." in said
    assert "The Hub does not know the token" in said
    assert not (run / "hub").exists()


KILLED_UPLOADS = """
import json, os, random, signal, sys, time
from pathlib import Path
from huggingface_hub import HfApi, snapshot_download
from laplacian_heads import hub_upload, recipes
from laplacian_heads.hub_upload import UploadRecipe, hashes

old, new = map(Path, sys.argv[1:3])
api = HfApi()

def upload(folder, repo):
    recipe = recipes.load(UploadRecipe, "upload", {"model": str(folder), "repo": repo, "exist_ok": True})
    hub_upload._upload(folder, hashes(folder), f"tag-{folder.name}", recipe)

def forked(*arguments):
    pid = os.fork()
    if pid == 0:
        upload(*arguments)
        os._exit(0)
    return pid

def head(repo):
    files = hashes(Path(snapshot_download(repo, revision=api.model_info(repo).sha)))
    files.pop(".gitattributes", None)
    return files

started = time.perf_counter()
assert os.waitpid(forked(old, "tester/whole"), 0)[1] == 0
whole = time.perf_counter() - started
seen = []
for i in range(10):
    repo = f"tester/killed-{i}"
    upload(old, repo)
    pid = forked(new, repo)
    time.sleep(whole * (i + 0.5) / 10)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = head(repo)
    assert found in (hashes(old), hashes(new))  # never a mixture
    seen.append("old" if found == hashes(old) else "new")
    upload(new, repo)
    assert head(repo) == hashes(new)
    tags = {tag.name: tag.target_commit for tag in api.list_repo_refs(repo).tags}
    assert tags["tag-new"] == api.model_info(repo).sha
print("SEEN", *seen)
"""


@pytest.mark.slow
def test_an_upload_killed_at_ten_moments_is_the_old_commit_or_the_new(tmp_path, tiny, tokenizer, hub, module_process):
    for name, seed in (("old", 0), ("new", 1)):
        run = make_run(tmp_path / f"run-{name}", tiny(seed=seed), tokenizer)
        stage(run, tmp_path / name, recipe(run, tag=f"tag-{name}"), tmp_path / f"{name}.safetensors")
    printed = module_process(KILLED_UPLOADS, tmp_path / "old", tmp_path / "new", can_import=True, env=hub.env)
    seen = printed.partition("SEEN ")[2].split()
    assert len(seen) == 10
    assert "old" in seen
