"""The command line and the demo under bad input: one sentence, a non-zero exit, nothing lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from laplacian_heads import recipes
from laplacian_heads.__main__ import VERBS, main
from laplacian_heads.train.checkpoints import last_checkpoint

TEXT = "The quick brown fox jumps over the lazy dog, and 1234 other foxes don't. " * 400
MODEL = ["vocab_size=300", "num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "laplacian_heads=1"]
TRAINING = ["context=96", "streams=1", "rows_per_step=2", "batch_size=2", "save_steps=2", "eval_rows=2"]
MIXTURE = '[{data: "generated:arithmetic", rows: 16}, {data: "generated:choice", rows: 16}]'


def block(stage, overrides):
    return [f"{stage}.{override}" for override in overrides]


# The demo with a model of 30,000 parameters and a few steps a stage.
SMALL = [
    "laplacian_heads=[0, 1]",
    *block("tokenizer", ["vocab_size=300", "context=96", "max_characters=20000"]),
    *block("pretrain", [*MODEL[:-1], *TRAINING, "held_out=2", "tokens=512"]),
    *block("midtrain", [*TRAINING, "tokens=512", f"data={MIXTURE}", f"held_out={MIXTURE}"]),
    *block("sft", [*TRAINING[:-1], f"data={MIXTURE}", f"held_out={MIXTURE}"]),
    *block("eval", ["limit=4", "tasks=[generated_choice]", "calculator=false"]),
    *block("geometry", ["tokens=16", "documents=4"]),
]


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i}. {TEXT[:4000]}\n" for i in range(12)))
    return path


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    assert main(["tokenizer", "data=generated:choice", "vocab_size=300", "context=64", f"output={folder}"]) == 0
    return folder


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory):
    """A folder in which the small demo has run to its end, on the user's own text."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "text.txt").write_text("".join(f"{i}. {TEXT[:4000]}\n" for i in range(12)))
    done = demo(folder)
    assert done.returncode == 0, done.stderr
    return folder


def demo(folder, *overrides, **kwargs):
    data = f"data={folder / 'text.txt'}"
    sources = [f"{stage}.{data}" for stage in ("tokenizer", "pretrain", "geometry")]
    return subprocess.run(
        [sys.executable, "-m", "laplacian_heads", "demo", *SMALL, *sources, f"output={folder / 'out'}", *overrides],
        capture_output=True,
        text=True,
        cwd=folder,
        **{"env": {**os.environ, "HF_HUB_OFFLINE": "1"}, **kwargs},
    )


def refusal(capsys, *arguments):
    """The one line a refused command prints, after its exit status was checked."""
    capsys.readouterr()
    assert main(list(arguments)) == 1
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if line.startswith("laplacian-heads")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hiddensize=64", "gpt_tiny_pretrain knows no key 'hiddensize'; the nearest is 'hidden_size'"),
        ("vocab_size=many", "vocab_size is 'many', allowed is int"),
        ("vocab_size=true", "vocab_size is True, allowed is int"),
        ("context=1", "context is 1, allowed is at least 2"),
        ("tokens=0", "tokens is 0, allowed is at least one step's"),
        ("batch_size=3", "rows_per_step is 2, allowed are multiples of 3"),
        ("rows_per_step=0", "rows_per_step is 0, allowed is at least 1"),
        ("held_out=0", "held_out is 0, allowed is at least 1"),
        ("num_attention_heads=3", "num_attention_heads is 3, allowed are divisors of hidden_size 32"),
        ("laplacian_heads=5", "laplacian_heads: the count is 5 in layer 0"),
        ("laplacian_heads=some", "laplacian_heads is 'some', allowed is int or list or dict"),
        ("matrix_lr=.nan", "matrix_lr is nan, allowed is a finite number"),
        ("decay_share=2", "decay_share is 2.0, allowed is a number from 0 to 1"),
        ("hidden_size=6", "head_dim is 3, allowed are even numbers"),
        ("data=''", "data is '', allowed is the name"),
        ("output=''", "output is '', allowed is the path"),
        ("tokenizer=nowhere", "There is no tokenizer in nowhere"),
        ("data=nowhere.txt", "there is no file or folder nowhere.txt"),
        ("data=[unclosed", "is not a YAML value"),
        ("nonsense", "'nonsense' is not of the form key=value"),
        ("a.b=1", "has no block 'a'"),
    ],
)
def test_wrong_key_or_value_names_what_is_allowed(capsys, tmp_path, tokenizer_folder, override, said):
    given = [*MODEL, *TRAINING, "tokens=256", f"tokenizer={tokenizer_folder}", f"output={tmp_path / 'out'}"]
    assert said in refusal(capsys, "pretrain", "gpt_tiny_pretrain", *given, override)
    assert not list(tmp_path.glob("out/*.safetensors"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data=generated:choice", "data is 'generated:choice', allowed is list"),
        ("data=[]", "data is [], allowed is a list of entries"),
        ("data=[{rows: 1}]", "data has the entry {'rows': 1}"),
        ("data=[{data: x, rows: 0}]", "data: rows is 0, allowed is an integer of at least 1"),
        ("model=nowhere", "There is no LaplaceGPT in nowhere"),
    ],
)
@pytest.mark.parametrize("verb", ["midtrain", "sft"])
def test_wrong_mixture_or_model_is_named(capsys, tmp_path, verb, override, said):
    assert said in refusal(capsys, verb, f"output={tmp_path / 'out'}", override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("laplacian_heads=1", "laplacian_heads is 1, allowed is list"),
        ("laplacian_heads=[]", "laplacian_heads is []"),
        ("laplacian_heads=[1, 1]", "laplacian_heads is [1, 1]"),
        ("laplacian_heads=[0, 9]", "laplacian_heads: the count is 9 in layer 0"),
        ("pretrain.seed=1", "pretrain.seed is set by the demo itself"),
        ("pretrain.recipe=gpt_tiny_pretrian", "the nearest is 'gpt_tiny_pretrain'"),
        ("pretrain.widht=1", "knows no key 'widht'"),
    ],
)
def test_wrong_demo_is_refused_before_any_work(capsys, tmp_path, override, said):
    assert said in refusal(capsys, "demo", f"output={tmp_path / 'out'}", override)
    assert not (tmp_path / "out").exists()


def test_unknown_recipe_and_verb(capsys):
    assert "the nearest is 'gpt_d20_pretrain'" in refusal(capsys, "pretrain", "gpt_d20_pretrian")
    with pytest.raises(SystemExit) as stop:
        main(["fly"])
    assert stop.value.code == 2


def test_recipe_of_another_verb_names_what_is_wrong(capsys):
    assert "gpt_tiny_pretrain knows no key" in refusal(capsys, "sft", "gpt_tiny_pretrain")


@pytest.mark.parametrize("verb", ["eval", "geometry", "compare", "chat", "upload"])
def test_verb_that_needs_a_model_says_so(capsys, verb):
    assert "model" in refusal(capsys, verb)


@pytest.mark.parametrize(
    ("verb", "key"),
    [
        ("eval", ""),
        ("geometry", ""),
        ("chat", ""),
        ("midtrain", "model="),
        ("sft", "model="),
        ("pretrain", "tokenizer="),
    ],
)
@pytest.mark.parametrize("name", ["./nowhere", "runs/a/b", "runs/a"])
def test_missing_folder_is_not_looked_for_on_the_hub(capsys, tmp_path, monkeypatch, verb, key, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert f"There is no folder {name}." in refusal(capsys, verb, key + name)


@pytest.mark.parametrize("content", ["[1, 2", "- a\n- b\n", "just text", "\x00"])
def test_file_that_is_no_recipe(capsys, tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_text(content)
    assert str(path) in refusal(capsys, "pretrain", str(path))


def test_folder_with_an_equals_sign_is_a_model(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "heads=3").mkdir()
    assert "There is no results.json" in refusal(capsys, "compare", "heads=3")


@pytest.mark.parametrize(("verb", "package"), [("pretrain", "datasets"), ("eval", "lm_eval")])
def test_missing_extra_is_named_with_the_command_that_installs_it(verb, package, tmp_path):
    code = f"import sys; sys.modules[{package!r}] = None; from laplacian_heads.__main__ import main; "
    code += f"sys.exit(main([{verb!r}, *sys.argv[1:]]))"
    arguments = ["runs/none"] if verb == "eval" else []
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    extra = VERBS[verb][3]
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last == f"laplacian-heads {verb}: {verb} needs {package}: pip install 'laplacian-heads[{extra}]'."


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_key_of_the_recipe(capsys, verb):
    with pytest.raises(SystemExit) as stop:
        main([verb, "--help"])
    assert stop.value.code == 0
    assert recipes.path_of(VERBS[verb][5]).read_text().strip() in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(recipes.SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_dry_run_of_every_recipe_writes_nothing(capsys, tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    verb = {"vit": "classify", "dino": "dino", "demo": path.stem.replace("_", "-")}.get(
        path.stem.split("_")[0], path.stem.split("_")[-1]
    )
    if verb in ("eval", "geometry", "compare", "chat", "convert", "upload", "probe", "knn", "segment", "pca"):
        return  # about a model, which is not there
    assert main([verb, path.stem, "--dry-run"]) == 0
    said = capsys.readouterr().out
    if verb in ("pretrain", "midtrain", "sft"):
        assert [line.split()[0] for line in said.splitlines()] == [
            *("parameters", "tokens", "steps", "FLOPs", "memory", "hours")
        ]
    assert not list(tmp_path.iterdir())


def test_demo_ends_with_everything_a_visitor_needs(finished_demo):
    out = finished_demo / "out"
    report = (out / "report.md").read_text()
    assert "one seed is no evidence" in report
    assert {"scores.png", "variance.png", "loss.png"} <= {path.name for path in out.iterdir()}
    for heads in (0, 1):
        folder = out / f"laplacian_heads_{heads}/hub"
        assert AutoModelForCausalLM.from_pretrained(folder).config.laplacian_heads == heads
        assert AutoTokenizer.from_pretrained(folder).chat_template
        results = json.loads((out / f"laplacian_heads_{heads}/pretrain/results.json").read_text())
        assert f"{results['bits_per_byte']:.4f}" in report
        assert not list(out.rglob("checkpoint-*"))
        assert not list(out.rglob("*.bin"))
    same = [yaml.safe_load((out / f"laplacian_heads_{heads}/sft/recipe.yaml").read_text()) for heads in (0, 1)]
    assert same[0]["data"] == same[1]["data"]
    assert same[0]["seed"] == same[1]["seed"]


def test_finished_demo_is_not_run_again(finished_demo):
    before = {path: path.stat().st_mtime_ns for path in (finished_demo / "out").rglob("*.safetensors")}
    again = demo(finished_demo)
    assert again.returncode == 0, again.stderr
    other = demo(finished_demo, "seed=1")
    assert other.returncode == 1
    assert "holds the results of another recipe" in other.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (finished_demo / "out").rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("file", "said"),
    [("pretrain/results.json", "is damaged"), ("midtrain/config.json", "There is no LaplaceGPT in")],
)
def test_damaged_file_of_a_demo_is_named_and_left_alone(finished_demo, tmp_path, file, said):
    shutil.copytree(finished_demo, tmp_path / "copy")
    root = tmp_path / "copy"
    path = root / "out/laplacian_heads_1" / file
    path.write_text("cut")
    if file.startswith("midtrain"):
        shutil.rmtree(root / "out/laplacian_heads_1/sft")
    recipe = root / "out/recipe.yaml"  # the copy is at another path
    for written in [recipe, *(root / "out").rglob("recipe.yaml")]:
        written.write_text(written.read_text().replace(str(finished_demo), str(root)))
    done = demo(root)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert path.read_text() == "cut"


def test_killed_demo_goes_on_at_its_checkpoint(tmp_path, text_file):
    longer = ["laplacian_heads=[1]", "pretrain.tokens=12800"]
    sources = [f"{stage}.data={text_file}" for stage in ("tokenizer", "pretrain", "geometry")]
    command = [sys.executable, "-m", "laplacian_heads", "demo", *SMALL, *sources, *longer, f"output={tmp_path / 'out'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = tmp_path / "out/laplacian_heads_1/pretrain"
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert last_checkpoint(run)[0]
    done = demo(tmp_path, *longer)
    assert done.returncode == 0, done.stderr
    assert "going on at step" in done.stdout
    assert (tmp_path / "out/report.md").exists()


def test_full_disk_is_one_sentence_and_loses_nothing(tmp_path, text_file):
    """A limit on the size of a file stands in for the disk: the tokenizer fits, a model does not."""
    one = "laplacian_heads=[1]"
    done = demo(tmp_path, one, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)))
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("laplacian-heads demo: ")
    assert "too large" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    done = demo(tmp_path, one)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        Exception("No space left on device (os error 28)"),
        OSError(28, "No space left on device", "model.safetensors"),
    ],
    ids=["torch", "rust", "python"],
)
def test_full_disk_is_named_whichever_library_writes(capsys, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("laplacian_heads.study.demo", fail)
    assert "the disk is probably full" in refusal(capsys, "demo")


def test_an_error_that_is_no_users_mistake_keeps_its_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("a bug")

    monkeypatch.setattr("laplacian_heads.study.demo", fail)
    with pytest.raises(TypeError):
        main(["demo"])
