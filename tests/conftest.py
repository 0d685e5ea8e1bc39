"""Shared fixtures: a tiny model and tokenizer, processes that cannot import the package, and a Hub on this machine."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

# Before anything of Hugging Face is imported: no test reaches the network, but for the Hub of the `hub` fixture.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from reference import redraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM

# The models here are tiny: threads would wait for each other longer than they compute.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

ROOT = Path(__file__).resolve().parents[1]
LOOPBACK_HUB = Path(__file__).with_name("loopback_hub.py")

TINY = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "laplacian_heads": [[0, 2], [1, 2, 3]],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TEXT = "The quick brown fox jumps over the lazy dog. A head that subtracts smooths less than one that adds.\n" * 20


@pytest.fixture(scope="session")
def tiny():
    """tiny(model_class, seed=0, **fields): a small model in evaluation mode whose every parameter is random."""

    def build(model_class=LaplaceGPTForCausalLM, seed=0, **fields):
        return redraw(model_class(LaplaceGPTConfig(**{**TINY, **fields})), seed).eval()

    return build


@pytest.fixture(scope="session")
def input_ids():
    """(2, 12) token ids, none of them special."""
    return torch.randint(3, TINY["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|end|>"}
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["vocab_size"],
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=128, **special)


@pytest.fixture
def fresh_process(tmp_path):
    """fresh_process(code, *arguments, can_import=False, env=()): run code in a new python and return what it prints.

    It starts in an empty folder with caches of its own. Unless can_import, `import laplacian_heads` fails there, as it
    does for a user who has only what the Hub gives.
    """
    return _fresh_process(tmp_path / "process")


@pytest.fixture(scope="module")
def module_process(tmp_path_factory):
    """`fresh_process` for the fixtures of a module, whose processes share their caches."""
    return _fresh_process(tmp_path_factory.mktemp("process"))


def _fresh_process(folder):
    folder.mkdir(exist_ok=True)

    def run(code, *arguments, can_import=False, env=()):
        block = "" if can_import else "import sys; sys.modules['laplacian_heads'] = None\n"
        result = subprocess.run(
            [sys.executable, "-c", block + textwrap.dedent(code), *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", **dict(env)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


class Hub:
    """A Hub on 127.0.0.1. `env` is what a process needs to use it, `files(repo)` the folder of its newest commit."""

    def __init__(self, root, port):
        self.root = root
        self.env = {
            "HF_ENDPOINT": f"http://127.0.0.1:{port}",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": "hf_x",
        }

    def files(self, repo):
        return max((self.root / "models" / repo / "commits").iterdir(), key=lambda commit: commit.stat().st_mtime_ns)


@contextlib.contextmanager
def serving(root, *options):
    """A Hub for as long as it is needed; options are the server's."""
    command = [sys.executable, LOOPBACK_HUB, root, "0", *options]  # any free port
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready, port = server.stdout.readline().split()
        assert ready == "ready"
        yield Hub(root, port)
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("hub")) as served:
        yield served


@pytest.fixture(scope="module")
def seeded_hub(tmp_path_factory):
    """The environment of a process that is to use a Hub with some rows of the datasets that the recipes name."""
    seed = ROOT.parent / "shared" / "hub"
    if not seed.is_dir():
        pytest.skip("rows of the datasets, shared/hub beside the repository, are not here")
    root = tmp_path_factory.mktemp("hub")
    with serving(root / "hub", "--seed", seed) as served:
        yield {**os.environ, **served.env, "HF_HOME": str(root / "home")}
