"""Models that earlier versions saved keep loading, by this code and by the code that lies with them.

`python tests/test_compatibility.py` saves one of this version, which is done once for every release.
"""

import tomllib
from pathlib import Path

import pytest
import torch
from reference import redraw
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM
from laplacian_heads.configuration import FORMAT_VERSION

ROOT = Path(__file__).resolve().parents[1]
SAVED = sorted(path for path in (ROOT / "tests" / "saved").iterdir() if path.is_dir())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_this_version_has_one():
    assert VERSION in [path.name for path in SAVED]


@pytest.mark.parametrize("folder", SAVED, ids=lambda path: path.name)
@torch.no_grad()
def test_this_code_loads_it(folder, tmp_path):
    expected = load_file(folder / "expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model) is LaplaceGPTForCausalLM
    torch.testing.assert_close(model(expected["ids"]).logits, expected["logits"], rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(expected["ids"]).logits, model(expected["ids"]).logits)
    assert again.config.format_version <= FORMAT_VERSION
    assert AutoTokenizer.from_pretrained(folder, trust_remote_code=False).bos_token == "<|bos|>"


@pytest.mark.parametrize("folder", SAVED, ids=lambda path: path.name)
def test_its_own_code_loads_it(folder, fresh_process):
    code = """
    import sys, torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    expected = load_file(sys.argv[1] + "/expected.safetensors")
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()
    with torch.no_grad():
        difference = (model(expected["ids"]).logits - expected["logits"]).abs().max().item()
    print(type(model).__module__.split(".")[0], difference)
    """
    where, difference = fresh_process(code, folder).split()
    assert where == "transformers_modules"
    assert float(difference) < 1e-5


def test_a_newer_format_is_refused():
    with pytest.raises(ValueError, match=f"format_version is {FORMAT_VERSION + 1}, allowed is 1 to {FORMAT_VERSION}"):
        LaplaceGPTConfig(format_version=FORMAT_VERSION + 1)
    assert LaplaceGPTConfig().to_diff_dict()["format_version"] == FORMAT_VERSION


@torch.no_grad()
def save(folder: Path) -> None:
    from scripted import chat_tokenizer

    tokenizer = chat_tokenizer()
    shape = {"vocab_size": len(tokenizer), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    layout = {"num_key_value_heads": 2, "laplacian_heads": [[1], [2, 3]], "max_position_embeddings": 64}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model = redraw(LaplaceGPTForCausalLM(LaplaceGPTConfig(**shape, **layout, **special))).eval()
    ids = torch.randint(shape["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file({"ids": ids, "logits": model(ids).logits.contiguous()}, folder / "expected.safetensors")


if __name__ == "__main__":
    save(ROOT / "tests" / "saved" / VERSION)
