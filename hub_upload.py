"""A trained LaplaceGPT or LaplaceViT as a repository on the Hub: stage a folder, load it in a fresh process, upload it.

`laplacian-heads upload RUN OWNER/NAME`, the same as `python hub_upload.py RUN OWNER/NAME`.
"""

import contextlib
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
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import torch
import transformers
from huggingface_hub import HfApi, get_token, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

from laplacian_heads import laplacian, model_card
from laplacian_heads.configuration import LaplaceGPTConfig, LaplaceViTConfig
from laplacian_heads.eval import compare
from laplacian_heads.files import read_json, weights_hash

ROOT = Path(laplacian.__file__).parent
# The Auto classes that give back what is published: those of which there is a card.
PUBLISHED = {
    LaplaceGPTConfig: ["AutoModelForCausalLM"],
    LaplaceViTConfig: ["AutoModelForImageClassification", "AutoModel", "AutoModelForMaskedImageModeling"],
}
MEASURED = ("results.json", "eval.json", "geometry.json", *compare.FROZEN, "*.png")  # copied from the run where it is
REPORT = "geometry"  # the one folder in a repository, with the Markdown and the pictures of a run's report
SHARD = "2GB"  # of the weights, at most; a broken transfer begins again with a shard
SUFFIXES = {".safetensors", ".json", ".jinja", ".md", ".png", ".py", ".yaml"}  # nothing pickled
# What of an earlier upload must not stay beside this one: other shards, code, recipes and pictures.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py", "recipe*.yaml", f"{REPORT}/*"]
SECRETS = {
    "a token of the Hub": rb"hf_[A-Za-z0-9]{20,}",
    "a token of GitHub": rb"gh[oprsu]_[A-Za-z0-9]{36}|github_pat_\w{40,}",
    "a key of AWS": rb"(?<![A-Z0-9])(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])",
    "a key of OpenAI or Anthropic": rb"sk-(?:proj-|ant-)?[A-Za-z0-9_-]{32,}",
    "a key of Google": rb"AIza[A-Za-z0-9_-]{35}",
    "a token of Slack": rb"xox[abprs]-[A-Za-z0-9-]{20,}",
    "a private key": rb"-----BEGIN [A-Z ]*PRIVATE KEY-----",
}

# Where exceptions come from when there is no connection: the HTTP clients that huggingface_hub has used.
CLIENTS = ("httpx", "httpcore", "requests")
# What a user of the Hub's repository does, who does not have this package.
FRESH_PROCESS = """
import contextlib, io, sys
sys.modules["laplacian_heads"] = None
import huggingface_hub, json, torch, transformers
from safetensors.torch import load_file

folder, expected, auto_class, threads, snippets, *clients = sys.argv[1:]
torch.set_num_threads(int(threads))
expected = load_file(expected)
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    output = model(expected["input"])[0]
found = {
    "code": [type(thing).__module__.split(".")[0] for thing in (config, model)],
    "equal": torch.equal(output, expected["output"]),
    "snippets": {},
}
if "picture" in expected:
    from PIL import Image
    picture = Image.fromarray(expected["picture"].numpy())
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    if not torch.equal(processor(picture, return_tensors="pt")["pixel_values"], expected["input"]):
        raise ValueError("the staged image processor makes other pixel_values than the run's")
    lines = ["AutoImageProcessor loads what makes the same pixel_values of a picture, bit for bit"]
    if auto_class == "AutoModelForImageClassification":
        classify = transformers.pipeline("image-classification", model=folder, trust_remote_code=True)
        names = [answer["label"] for answer in classify(picture, top_k=config.num_labels)]
        if sorted(names) != sorted(config.id2label.values()):
            raise ValueError(f"the pipeline answers with {names}, allowed are the names of id2label")
        lines.append(f"the pipeline image-classification answers with the names of {len(names):,} classes")
else:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    generated = model.generate(expected["input"][:1, :4], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    lines = [
        "AutoTokenizer loads its tokenizer with trust_remote_code=True",
        f"it generates: {generated.shape[1] - 4} tokens; its tokenizer has {len(tokenizer):,} entries",
    ]
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "Hello"}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        lines.append(f"its chat template renders: {chat}")
found["lines"] = lines
del model
# AutoBackbone takes repositories of the Hub only, which the folder is to be.
exists = huggingface_hub.HfApi.repo_exists
huggingface_hub.HfApi.repo_exists = lambda api, repo, **given: repo == folder or exists(api, repo, **given)
for name, code in json.loads(snippets).items() if found["equal"] else ():
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, {})
        found["snippets"][name] = "runs"
    except ImportError as error:
        found["snippets"][name] = f"was not run: there is no {error.name or error}"
    except Exception as error:
        how = f"fails: {type(error).__name__}: {error}"
        module = type(error).__module__
        unconnected = module.startswith(tuple(clients)) and "Connect" in type(error).__name__
        if unconnected or isinstance(error, ConnectionError) or module == "datasets.exceptions":
            how = "was not run: its data cannot be reached"
        found["snippets"][name] = how
print(json.dumps(found))
"""


@dataclasses.dataclass
class UploadRecipe:
    """Keys of `recipes/upload.yaml`, which says what they mean."""

    model: str | None
    repo: str | None
    twin: str | None
    license: str
    private: bool
    exist_ok: bool
    revision: str | None
    create_pr: bool
    tag: str | None
    staging: str | None

    def __post_init__(self):
        if not self.model:
            raise ValueError(f"model is {self.model!r}, allowed is the folder of a run.")
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", self.repo or "", re.ASCII):
            raise ValueError(f"repo is {self.repo!r}, allowed is OWNER/NAME, in letters, digits, '_', '-' and '.'.")
        for name in ("revision", "staging", "twin"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is '', allowed is null or a name.")
        if self.tag is not None and not re.fullmatch(r"[\w.-]+", self.tag, re.ASCII):
            raise ValueError(f"tag is {self.tag!r}, allowed are letters, digits, '_', '-' and '.'.")
        if self.twin is not None and not Path(self.twin).expanduser().is_dir():
            raise ValueError(f"twin is {self.twin!r}, allowed is null or the folder of a run.")


def upload(recipe: UploadRecipe, dry_run: bool = False) -> None:
    """Stage a run's model, verify what is staged, upload it and download it again; a dry run ends before the upload.

    The staged folder appears, in the place of an older one, once it is verified. All files go into one commit. A call
    that was interrupted is finished by the same call, which does not send again what the Hub has.

    Raises:
        ValueError: the run is no LaplaceGPT or LaplaceViT, has something that must not be uploaded, or fails where it
            is verified; the token may not write; or the repository holds something else.
        OSError: a file cannot be read or written, or the Hub cannot be reached.
    """
    run = Path(recipe.model).expanduser()
    _check_run(run)
    if not dry_run:
        with _understood(recipe.repo):
            _check_token(recipe.repo)
    staging = run / "hub" if recipe.staging is None else Path(recipe.staging).expanduser()
    part, old = (staging.with_name(staging.name + end) for end in (".part", ".old"))
    if staging.exists() and not (staging / "config.json").exists() and (staging.is_file() or any(staging.iterdir())):
        raise ValueError(
            f"staging is {staging}, which holds something else; allowed is a new or empty folder, or a staged one."
        )
    if old.exists() and not staging.exists():  # a call before this one ended between its two renames
        old.rename(staging)
    for folder in (part, old):
        shutil.rmtree(folder, ignore_errors=True)

    print(f"Staging {run} in {staging}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            expected = Path(folder, "expected.safetensors")
            tag = stage(run, part, recipe, expected)
            print("Verifying it in a fresh process without this package")
            for line in verify(part, expected):
                print(f"  {line}")
        files = hashes(part)
    except BaseException:  # as large as the model, and of no use
        shutil.rmtree(part, ignore_errors=True)
        raise
    if staging.exists():
        staging.rename(old)
    part.rename(staging)
    shutil.rmtree(old, ignore_errors=True)
    for name in files:
        print(f"  {(staging / name).stat().st_size:13,} bytes  {name}")
    if dry_run:
        print(f"A dry run: nothing was uploaded to {recipe.repo}. The tag would be {tag}.")
        return

    print(f"Uploading to {recipe.repo}")
    with _understood(recipe.repo):
        _upload(staging, files, tag, recipe)


def _check_run(run: Path) -> None:
    """Raise ValueError unless a folder has a model, and what was measured there was measured of it."""
    if not run.is_dir():
        raise ValueError(f"model is {run}, where there is no folder; allowed is the folder of a run.")
    if not (run / "config.json").is_file():
        if any(run.glob("checkpoint-*")):
            raise ValueError(f"model is {run}, whose training is not finished: the command that began it goes on.")
        raise ValueError(f"model is {run}, which has no config.json; allowed is the folder of a run.")
    weights = weights_hash(run)
    for name in ("eval.json", "geometry.json", *compare.FROZEN):
        content = read_json(run / name) if (run / name).exists() else {}
        if content.get("weights") not in (None, weights):
            raise ValueError(
                f"{run / name} is of other weights than {run} has now; call {Path(name).stem} again, or delete it."
            )


@contextlib.contextmanager
def _understood(repo: str) -> Iterator[None]:
    """What the Hub or the way to it refuses, as a sentence."""
    try:
        yield
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise ValueError(f"The token may not write to {repo}.") from error
        raise
    except Exception as error:
        if type(error).__module__.startswith(CLIENTS):
            endpoint = huggingface_hub.constants.ENDPOINT
            raise ValueError(f"The Hub at {endpoint} cannot be reached ({error}); the same call goes on.") from error
        raise


def _check_token(repo: str) -> None:
    if not get_token():
        raise ValueError("There is no token of the Hub: call `hf auth login`, or set HF_TOKEN.")
    try:
        user = HfApi().whoami()
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise ValueError("The Hub does not know the token: call `hf auth login`, or set HF_TOKEN.") from error
        raise
    owner = repo.partition("/")[0]
    names = [user["name"], *(each["name"] for each in user.get("orgs") or [])]
    if owner not in names:
        raise ValueError(f"The token may not write to {repo}, allowed is one of {', '.join(names)} before the '/'.")
    if ((user.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise ValueError(f"The token may not write to {repo}: it is one for reading.")


def stage(run: Path, folder: Path, recipe: UploadRecipe, expected: Path) -> str:
    """Write the repository of a run's model.

    Args:
        run: the run's folder.
        folder: the folder to write, not there yet.
        recipe: of the repository, its tag and twin.
        expected: the file to write for `verify`: safetensors with the model's "input", random token ids or the
            pixel_values of a random "picture", (height, width, 3) in uint8, and its "output" for that.

    Returns:
        The tag that the card's code is pinned to: the recipe's, or one made of the contents.

    Raises:
        ValueError: the run is no LaplaceGPT or LaplaceViT of a class that is published, its weights are not all there
            and finite, its tokenizer is larger than its embedding, or it has no image processor.
    """
    config = AutoConfig.from_pretrained(run)
    if type(config) not in PUBLISHED:
        raise ValueError(
            f"{run} is a {config.model_type}, allowed is a LaplaceGPT or a LaplaceViT; for others use push_to_hub."
        )
    auto_class = getattr(transformers, _auto_class(run, config))
    model, loading = auto_class.from_pretrained(run, dtype="auto", output_loading_info=True)
    for name in sorted(loading["missing_keys"]) + sorted(loading["mismatched_keys"]):
        raise ValueError(f"The weight {name} of {run} is missing or of another shape; it is not uploaded.")
    model.eval()
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise ValueError(f"The weight {name} of {run} is not finite everywhere; it is not uploaded.")
    preparation, example = (_text if isinstance(config, LaplaceGPTConfig) else _picture)(run, config)
    with torch.no_grad():
        save_file({**example, "output": model(example["input"])[0].contiguous()}, expected)
    model.save_pretrained(folder, max_shard_size=SHARD)
    preparation.save_pretrained(folder)
    for pattern in MEASURED:
        for file in run.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    report = run / REPORT / "report.md"
    if report.is_file():
        (folder / REPORT).mkdir()
        shutil.copyfile(report, folder / REPORT / report.name)
        text = report.read_text(encoding="utf-8")
        for file in report.parent.glob("*.png"):
            if f"]({file.name})" in text:  # others are of an earlier report
                shutil.copyfile(file, folder / REPORT / file.name)
    made = model_card.stages(run)
    for i, (made_in, *_) in enumerate(made):
        number = "" if made_in == run else f"_{i + 1}_{made_in.name}"
        shutil.copyfile(made_in / "recipe.yaml", folder / f"recipe{number}.yaml")
    tag = recipe.tag
    if tag is None:
        contents = json.dumps({name: file for name, file in sorted(hashes(folder).items()) if name[-4:] != ".png"})
        tag = f"model-{hashlib.sha256(contents.encode()).hexdigest()[:8]}"
    twin = None if recipe.twin is None else Path(recipe.twin).expanduser()
    model_card.write(folder, recipe.repo, tag, recipe.license, run, twin)
    return tag


def _auto_class(folder: Path, config: LaplaceGPTConfig | LaplaceViTConfig) -> str:
    """The Auto class that gives the class back which a folder was saved from."""
    allowed = {config.auto_classes[name].rpartition(".")[2]: name for name in PUBLISHED[type(config)]}
    saved = (config.architectures or [None])[0]
    if saved not in allowed:
        raise ValueError(
            f"{folder} is a {config.model_type} of the class {saved}, allowed are {', '.join(allowed)}; for others use "
            "push_to_hub."
        )
    return allowed[saved]


def _text(run: Path, config: LaplaceGPTConfig) -> tuple:
    """A run's tokenizer, and random token ids."""
    tokenizer = AutoTokenizer.from_pretrained(run, trust_remote_code=False)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer of {run} has {len(tokenizer)} entries, allowed are at most {config.vocab_size}, the rows "
            "of the model's embedding."
        )
    length = min(64, config.max_position_embeddings)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return tokenizer, {"input": ids}


def _picture(run: Path, config: LaplaceViTConfig) -> tuple:
    """A run's image processor, and a random picture with what it makes of it."""
    if not (run / "preprocessor_config.json").is_file():
        raise ValueError(f"{run} has no preprocessor_config.json, allowed is a run with its image processor.")
    processor = AutoImageProcessor.from_pretrained(run, trust_remote_code=False)
    generator = torch.Generator().manual_seed(0)
    picture = torch.randint(256, (240, 320, config.num_channels), dtype=torch.uint8, generator=generator)
    pixels = processor(Image.fromarray(picture.numpy()), return_tensors="pt")["pixel_values"]
    return processor, {"picture": picture, "input": pixels}


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a folder, by its path in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as data:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(data, "sha256").hexdigest()
    return found


def verify(folder: Path, expected: Path) -> list[str]:
    """Check a staged folder, and load it as a user of the Hub would, in a new process without this package.

    Args:
        folder: the staged folder.
        expected: what `stage` wrote of the run's model.

    Returns:
        What was verified, a line each.

    Raises:
        ValueError: the folder is not as it must be; the message names what is wrong.
    """
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name == REPORT and file.is_dir():
            continue
        if not file.is_file() or file.suffix not in SUFFIXES:
            raise ValueError(f"{name} is staged, allowed are files with the suffixes {', '.join(sorted(SUFFIXES))}.")
        for what, pattern in SECRETS.items():
            if re.search(pattern, _words(file)):
                raise ValueError(f"{name} has in it what looks like {what}; it is not uploaded.")
    config = AutoConfig.from_pretrained(folder)
    code_files = ("laplacian.py", "configuration.py", f"modeling_{config.model_type}.py")
    for name in code_files:
        if not (folder / name).exists() or (folder / name).read_bytes() != (ROOT / name).read_bytes():
            raise ValueError(f"The staged {name} is not the file of this package.")
    if read_json(folder / "config.json").get("auto_map") != config.auto_classes:
        raise ValueError("The staged config.json does not name the code of every Auto class.")

    auto_class = _auto_class(folder, config)
    card = (folder / "README.md").read_text(encoding="utf-8")
    snippets = dict(re.findall(r"^## ([^\n]*)\n\n```python\n(.*?)\n```", card, re.MULTILINE | re.DOTALL))
    local = {name: _local(code, folder) for name, code in snippets.items()}
    with tempfile.TemporaryDirectory() as empty:
        env = {name: value for name, value in os.environ.items() if name not in ("HF_TOKEN", "PYTHONPATH")}
        env |= {"HF_MODULES_CACHE": str(Path(empty, "modules")), "TOKENIZERS_PARALLELISM": "0"}
        arguments = map(str, (folder.resolve(), expected, auto_class, torch.get_num_threads(), json.dumps(local)))
        result = subprocess.run(
            [sys.executable, "-c", FRESH_PROCESS, *arguments, *CLIENTS],
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
        raise ValueError("The staged model gives other outputs than the run's.")
    for name, how in found["snippets"].items():
        if how.startswith("fails"):
            raise ValueError(f"The card's code to {name[0].lower()}{name[1:]} {how}")
    return [
        f"code equal to this package's: {', '.join(code_files)}",
        f"AutoConfig and {auto_class} load it with trust_remote_code=True",
        "its outputs for random inputs are those of the run's model, bit for bit",
        *found["lines"],
        *(f"the card's code {how}: {name}" for name, how in found["snippets"].items()),
        "nothing pickled, no token and no key",
    ]


def _words(file: Path) -> bytes:
    """What of a file could hold a secret: all of it, but of weights the header alone."""
    if file.suffix != ".safetensors":
        return file.read_bytes()
    with file.open("rb") as data:
        return data.read(min(int.from_bytes(data.read(8), "little"), 2**26))


def _local(code: str, folder: Path) -> str:
    """The code of a snippet as it is tried: with the staged folder, which has no revisions, and on two items."""
    code = re.sub(r'"[\w.-]+/[\w.-]+"(?=, (?:"revision"|revision))', lambda _: repr(str(folder.resolve())), code)
    return code.replace('tasks=["arc_easy"]', 'tasks=["arc_easy"], limit=2')


def _upload(staging: Path, files: dict[str, str], tag: str, recipe: UploadRecipe) -> None:
    """Make one commit of a staged folder, tag it, and download it again.

    Args:
        staging: the folder.
        files: the hashes that its files had when they were verified.
        tag: what the card's code is pinned to.
        recipe: where to.
    """
    api, repo = HfApi(), recipe.repo
    if hashes(staging) != files:
        raise ValueError(f"{staging} was changed after it was verified; call again.")
    api.create_repo(repo, private=recipe.private, exist_ok=True)
    try:
        head = api.model_info(repo, revision=recipe.revision).sha
    except RevisionNotFoundError:  # a new branch, which begins where main is
        head = api.model_info(repo).sha
    there = _remote(api, repo, head)
    tagged = _remote(api, repo, tag) if not recipe.create_pr else {}
    if tagged and not _same(tagged, staging):
        raise ValueError(f"tag is {tag}, which {repo} has for other files; give another tag.")
    same = _same(there, staging)
    if not same and set(there) - {".gitattributes"} and not recipe.exist_ok:
        raise ValueError(
            f"{repo} exists and holds other files, or these as they were before; --exist_ok makes a new commit."
        )
    if recipe.revision is not None:
        api.create_branch(repo, branch=recipe.revision, exist_ok=True)
    if same:
        oid = head
        print(f"{repo} has these files already.")
    else:
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=staging,
            revision=recipe.revision,
            create_pr=recipe.create_pr,
            parent_commit=head,  # so that nobody else's commit is written over unseen
            commit_message=f"Upload {read_json(staging / 'config.json')['architectures'][0]}",
            delete_patterns=REPLACED,
        )
        oid = commit.oid
    with tempfile.TemporaryDirectory(dir=staging.parent) as cache:
        print("Downloading it again")
        found = hashes(Path(snapshot_download(repo, revision=oid, cache_dir=cache)))
    for name, file in files.items():
        if found.get(name) != file:
            raise ValueError(f"{name} in {repo} is not what was uploaded; call again.")
    if recipe.create_pr:
        print(f"Every file came back as it was sent. Once it is merged: hf repo tag create {repo} {tag}")
    else:
        if not tagged:
            api.create_tag(repo, tag=tag, revision=oid)
        print(f"Every file came back as it was sent: {repo} at {tag}, commit {oid}.")


def _remote(api: HfApi, repo: str, revision: str) -> dict:
    """The files of a repository at a revision, by path; none where there is no such revision."""
    try:
        tree = api.list_repo_tree(repo, revision=revision, recursive=True)
        return {file.path: file for file in tree if hasattr(file, "size")}
    except (RevisionNotFoundError, RepositoryNotFoundError):
        return {}


def _same(remote: dict, folder: Path) -> bool:
    """Whether a repository has every file of a folder, and of what an upload replaces no other."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    if not paths.keys() <= remote.keys() or any(
        Path(name).match(pattern) for name in remote.keys() - paths.keys() for pattern in REPLACED
    ):
        return False
    for name, path in paths.items():
        file = remote[name]
        if file.lfs is not None:
            with path.open("rb") as data:
                there, here = file.lfs.sha256, hashlib.file_digest(data, "sha256").hexdigest()
        else:
            data = path.read_bytes()
            there, here = file.blob_id, hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()
        if (file.size, there) != (path.stat().st_size, here):
            return False
    return True


if __name__ == "__main__":
    sys.argv.insert(1, "upload")
    runpy.run_module("laplacian_heads", run_name="__main__")
