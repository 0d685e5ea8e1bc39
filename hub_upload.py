"""A trained LaplaceGPT as a repository on the Hub: stage a folder, load it in a fresh process, upload it.

`laplacian-heads upload RUN OWNER/NAME`, the same as `python hub_upload.py RUN OWNER/NAME`.
"""

import dataclasses
import hashlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from laplacian_heads import laplacian
from laplacian_heads.configuration import AUTO_MAP, LaplaceGPTConfig
from laplacian_heads.eval import results

ROOT = Path(laplacian.__file__).parent
CODE = ("laplacian.py", "configuration.py", "modeling_laplace_gpt.py")
MEASURED = ("recipe.yaml", "results.json", "eval.json", "geometry.json", "*.png")  # copied from the run where it is
SUFFIXES = {".safetensors", ".json", ".jinja", ".md", ".png", ".py", ".yaml"}  # nothing pickled
TOKEN = re.compile(rb"hf_[A-Za-z0-9]{20,}")

# What a user of the Hub's repository does, who does not have this package.
FRESH_PROCESS = """
import sys
sys.modules["laplacian_heads"] = None
import json, torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

folder, expected, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
expected = load_file(expected)
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    logits = model(expected["ids"]).logits
generated = model.generate(expected["ids"][:1, :4], max_new_tokens=4, min_new_tokens=4, do_sample=False)
message = {"role": "user", "content": "Hello"}
chat = tokenizer.chat_template and tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
print(json.dumps({
    "code": [type(thing).__module__.split(".")[0] for thing in (config, model)],
    "equal": torch.equal(logits, expected["logits"]),
    "generated": generated.shape[1] - 4,
    "tokens": len(tokenizer),
    "chat": chat,
}))
"""


@dataclasses.dataclass
class UploadRecipe:
    """Keys of `recipes/upload.yaml`, which says what they mean."""

    model: str | None
    repo: str | None
    private: bool
    revision: str | None
    staging: str | None

    def __post_init__(self):
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is the folder of a run.")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo or "", re.ASCII):
            raise ValueError(f"repo is {self.repo!r}, allowed is OWNER/NAME, in letters, digits, '_', '-' and '.'.")
        for name in ("revision", "staging"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is '', allowed is null or a name.")


def upload(recipe: UploadRecipe, dry_run: bool = False) -> None:
    """Stage a run's model, verify what is staged, and upload it; a dry run does all but the upload.

    The staged folder appears, in the place of an older one, once it is verified.

    Raises:
        ValueError: the run is no LaplaceGPT, has something that must not be uploaded, or fails where it is verified.
        OSError: a file cannot be read or written, or the Hub cannot be reached.
    """
    if not dry_run and not get_token():
        raise ValueError("There is no token of the Hub: call `hf auth login`, or set HF_TOKEN.")
    run = Path(recipe.model).expanduser()
    staging = run / "hub" if recipe.staging is None else Path(recipe.staging).expanduser()
    part, old = (staging.with_name(staging.name + end) for end in (".part", ".old"))
    if staging.exists() and not (staging / "config.json").exists():
        raise ValueError(f"staging is {staging}, which holds something else; allowed is a new folder or a staged one.")
    if old.exists() and not staging.exists():  # a call before this one ended between its two renames
        old.rename(staging)
    for folder in (part, old):
        shutil.rmtree(folder, ignore_errors=True)

    print(f"Staging {run} in {staging}")
    with tempfile.TemporaryDirectory() as folder:
        expected = Path(folder, "expected.safetensors")
        stage(run, part, recipe.repo, expected)
        print("Verifying it in a fresh process without this package")
        for line in verify(part, expected):
            print(f"  {line}")
    if staging.exists():
        staging.rename(old)
    part.rename(staging)
    shutil.rmtree(old, ignore_errors=True)
    for file in sorted(staging.iterdir()):
        print(f"  {file.stat().st_size:13,} bytes  {file.name}")
    if dry_run:
        print(f"A dry run: nothing was uploaded to {recipe.repo}.")
        return

    print(f"Uploading to {recipe.repo}")
    api = HfApi()
    api.create_repo(recipe.repo, private=recipe.private, exist_ok=True)
    if recipe.revision is not None:
        api.create_branch(recipe.repo, branch=recipe.revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=recipe.repo,
        folder_path=staging,
        revision=recipe.revision,
        commit_message="Upload LaplaceGPT",
        delete_patterns=["*.safetensors", "*.safetensors.index.json"],  # a model before it may have had other shards
    )
    _compare(staging, api.list_repo_tree(recipe.repo, revision=commit.oid, recursive=True), recipe.repo)
    print(f"Every file is there with the size and hash it has here: {commit.commit_url}")


def stage(run: Path, folder: Path, repo: str, expected: Path) -> None:
    """Write the repository of a run's model.

    Args:
        run: the run's folder.
        folder: the folder to write, not there yet.
        repo: OWNER/NAME, for the model card.
        expected: the file to write random token ids and the model's logits for them to, for `verify`.

    Raises:
        ValueError: the run is no LaplaceGPT, its weights are not finite, its tokenizer is larger than its embedding,
            or a text file has in it what looks like a token of the Hub.
    """
    if not (run / "config.json").is_file():
        raise ValueError(f"model is {run}, which has no config.json; allowed is the folder of a run.")
    config = AutoConfig.from_pretrained(run)
    if not isinstance(config, LaplaceGPTConfig):
        raise ValueError(f"{run} is a {config.model_type}, allowed is a LaplaceGPT; for others use push_to_hub.")
    model = AutoModelForCausalLM.from_pretrained(run).eval()
    tokenizer = AutoTokenizer.from_pretrained(run, trust_remote_code=False)
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(f"The weight {name} of {run} is not finite everywhere; it is not uploaded.")
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer of {run} has {len(tokenizer)} entries, allowed are at most {config.vocab_size}, the rows "
            "of the model's embedding."
        )

    length = min(64, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, expected)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for pattern in MEASURED:
        for file in run.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    _card(folder, repo, model).save(folder / "README.md")


def verify(folder: Path, expected: Path) -> list[str]:
    """Check a staged folder, and load it as a user of the Hub would, in a new process without this package.

    Args:
        folder: the staged folder.
        expected: safetensors with token "ids" (rows, tokens) and the source model's "logits" for them.

    Returns:
        What was verified, a line each.

    Raises:
        ValueError: the folder is not as it must be; the message names what is wrong.
    """
    for file in sorted(folder.iterdir()):
        if not file.is_file() or file.suffix not in SUFFIXES:
            raise ValueError(
                f"{file.name} is staged, allowed are files with the suffixes {', '.join(sorted(SUFFIXES))}."
            )
        if file.suffix not in (".safetensors", ".png") and TOKEN.search(file.read_bytes()):
            raise ValueError(f"{file.name} has in it what looks like a token of the Hub; it is not uploaded.")
    for name in CODE:
        if not (folder / name).exists() or (folder / name).read_bytes() != (ROOT / name).read_bytes():
            raise ValueError(f"The staged {name} is not the file of this package.")
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map") != AUTO_MAP:
        raise ValueError("The staged config.json does not name the code of every Auto class.")

    with tempfile.TemporaryDirectory() as empty:
        env = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "PYTHONPATH")}
        env |= {"HF_MODULES_CACHE": str(Path(empty, "modules")), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
        arguments = map(str, (folder.resolve(), expected, torch.get_num_threads()))
        result = subprocess.run(
            [sys.executable, "-c", FRESH_PROCESS, *arguments],
            cwd=empty,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"The staged folder fails in a fresh process: {last}")
    found = json.loads(result.stdout.splitlines()[-1])
    if set(found["code"]) != {"transformers_modules"}:
        raise ValueError(f"The fresh process did not run the staged code but {found['code']}.")
    if not found["equal"]:
        raise ValueError("The staged model gives other logits than the run's.")
    lines = [
        f"code equal to this package's: {', '.join(CODE)}",
        "AutoConfig, AutoModelForCausalLM and AutoTokenizer load it with trust_remote_code=True",
        "its logits for random tokens are those of the run's model, bit for bit",
        f"it generates: {found['generated']} tokens; its tokenizer has {found['tokens']:,} entries",
    ]
    if found["chat"]:
        lines.append(f"its chat template renders: {found['chat']}")
    return [*lines, "nothing pickled, no token of the Hub"]


def _compare(folder: Path, remote, repo: str) -> None:
    """Refuse files that the Hub has not as they are here: large ones by their SHA-256, others by git's hash."""
    remote = {file.path: file for file in remote if hasattr(file, "size")}
    for path in folder.iterdir():
        file = remote.get(path.name)
        if file is None:
            raise ValueError(f"{path.name} is missing in {repo} after the upload; call again.")
        if file.lfs is not None:
            with path.open("rb") as data:
                there, here = file.lfs.sha256, hashlib.file_digest(data, "sha256").hexdigest()
        else:
            data = path.read_bytes()
            there, here = file.blob_id, hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()
        if (file.size, there) != (path.stat().st_size, here):
            raise ValueError(f"{path.name} in {repo} differs from the uploaded one; call again.")


def _card(folder: Path, repo: str, model) -> ModelCard:
    config = model.config
    heads = [len(layer.self_attn.laplacian_heads) for layer in model.model.layers]
    layout = str(heads[0]) if len(set(heads)) == 1 else f"{min(heads)} to {max(heads)}"
    if any(heads):
        kind = f"Of each layer's {config.num_attention_heads} attention heads {layout} are Laplacian: they output"
        what = f"{kind} `v - P v` where ordinary heads output `P v`."
    else:
        what = "It has no Laplacian heads: it is the baseline that models with them are held against."
    lines = [
        f"# {repo.partition('/')[2]}",
        "",
        "A LaplaceGPT, nanochat's decoder with [Laplacian heads](https://arxiv.org/abs/2602.09297). " + what,
        "",
        "| | |",
        "|---|---|",
        f"| parameters | {model.num_parameters():,} |",
        f"| layers, width, heads | {config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads} |",
        f"| `laplacian_heads` | `{json.dumps(config.laplacian_heads)}` |",
        f"| context, vocabulary | {config.max_position_embeddings:,}, {config.vocab_size:,} tokens |",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{repo}", trust_remote_code=True)',
        f'tokenizer = AutoTokenizer.from_pretrained("{repo}", trust_remote_code=True)',
    ]
    if (folder / "chat_template.jinja").exists():
        lines += [
            'messages = [{"role": "user", "content": "What is 47 plus 85?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        lines.append('inputs = tokenizer("The value of the", return_tensors="pt")')
    lines += [
        "text = model.generate(**inputs, max_new_tokens=40)",
        "print(tokenizer.decode(text[0]))",
        "```",
        "",
    ]
    if (folder / "results.json").exists():
        trained = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        recipe = " `recipe.yaml` has every setting." if (folder / "recipe.yaml").exists() else ""
        bits = trained.get("bits_per_byte")
        lines += [
            "## Training",
            "",
            f"Last stage: {trained['stage']}, {trained['tokens']:,} tokens in {trained['steps']:,} steps, seed "
            f"{trained['seed']}, held-out loss {trained['loss']:.4f} nats per token"
            + (f", {bits:.4f} bits per byte." if bits else ".")
            + recipe,
            "",
        ]
    scores = None
    if (folder / results.FILE).exists():
        tasks = json.loads((folder / results.FILE).read_text(encoding="utf-8"))["tasks"]
        scores = results.model_index(tasks)
        lines += ["## Scores", "", "| task | metric | score | standard error | guessing | items |", "|" + "---|" * 6]
        for task, entry in tasks.items():
            error, chance = ("" if entry[key] is None else f"{entry[key]:.3f}" for key in ("stderr", "chance"))
            value = f"{entry['value']:.3f}"
            lines.append(f"| {task} | {entry['metric']} | {value} | {error} | {chance} | {results.items(entry)} |")
        lines += ["", "Measured by lm-eval; one seed.", ""]
    if (folder / "geometry.png").exists():
        lines += ["## Geometry", "", "![Within-sequence variance and components by layer](geometry.png)", ""]
    data = ModelCardData(
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["laplace_gpt", "laplacian-heads"],
        model_name=repo.partition("/")[2],
        eval_results=scores,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines))


if __name__ == "__main__":
    sys.argv.insert(1, "upload")
    runpy.run_module("laplacian_heads", run_name="__main__")
