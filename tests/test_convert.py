"""Conversion, held against nanochat's model and byte-pair encoding written out here from what they are known to do."""

import json
import os
import pickle
import random
import shutil
import sys
import types
from pathlib import Path

import pytest
import regex
import torch
import torch.nn.functional as F
from reference import redraw, tiny_gpt
from transformers import AutoTokenizer, NanoChatConfig, NanoChatForCausalLM

from laplacian_heads import LaplaceGPTForCausalLM, recipes, sources
from laplacian_heads.convert import (
    ConvertRecipe,
    convert,
    from_nanochat,
    from_transformers,
    to_nanochat,
    to_transformers,
    tokenizer_from_nanochat,
    tokenizer_to_nanochat,
)
from laplacian_heads.train.tokenizer import PATTERN, train_tokenizer

SIZES = {"sequence_len": 64, "vocab_size": 100, "n_layer": 3, "n_head": 4, "n_kv_head": 4, "n_embd": 32}
NANOCHAT_TOKENS = [
    *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
]
IDS = torch.randint(100, (3, 40), generator=torch.Generator().manual_seed(1))


def random_weights(sizes, seed=0):
    """A state dict of nanochat with these sizes, float32."""
    generator = torch.Generator().manual_seed(seed)
    width, vocab = sizes["n_embd"], sizes["vocab_size"]
    kv_width = sizes["n_kv_head"] * width // sizes["n_head"]
    shapes = {"transformer.wte.weight": (vocab, width)}
    for i in range(sizes["n_layer"]):
        for name, shape in {
            **{"attn.c_q": (width, width), "attn.c_k": (kv_width, width), "attn.c_v": (kv_width, width)},
            **{"attn.c_proj": (width, width), "mlp.c_fc": (4 * width, width), "mlp.c_proj": (width, 4 * width)},
        }.items():
            shapes[f"transformer.h.{i}.{name}.weight"] = shape
    shapes["lm_head.weight"] = (vocab, width)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def nanochat_logits(weights, sizes, ids, heads=0, tables=torch.float32):
    """nanochat's forward pass in float32, attention written out.

    heads: Laplacian heads of every layer, or a list of them; tables: dtype that the rotary tables are rounded to.
    """
    weights = {name: tensor.float() for name, tensor in weights.items()}
    n_head, head_dim = sizes["n_head"], sizes["n_embd"] // sizes["n_head"]
    group = n_head // sizes["n_kv_head"]
    batch, length = ids.shape
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    cos, sin = angles.cos().to(tables).float(), angles.sin().to(tables).float()  # (tokens, head_dim / 2)

    def norm(x):
        return F.rms_norm(x, x.shape[-1:])

    def rotated(x):  # (batch, heads, tokens, head_dim), by minus the angle
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)

    def split(x):  # to (batch, query heads, tokens, head_dim)
        x = x.view(batch, length, -1, head_dim).transpose(1, 2)
        return x.repeat_interleave(n_head // x.shape[1], dim=1) if group > 1 else x

    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    x = norm(weights["transformer.wte.weight"][ids])
    for i in range(sizes["n_layer"]):
        layer = {name: weights[f"transformer.h.{i}.{name}.weight"] for name in ("attn.c_q", "attn.c_k", "attn.c_v")}
        q, k, v = (split(norm(x) @ matrix.T) for matrix in layer.values())
        q, k = norm(rotated(q)), norm(rotated(k))
        scores = (q @ k.transpose(2, 3)) / head_dim**0.5
        y = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v
        count = heads[i] if isinstance(heads, list) else heads
        for head in range(n_head - count, n_head):
            y[:, head] = v[:, head] - y[:, head]
        x = x + y.transpose(1, 2).reshape(batch, length, -1) @ weights[f"transformer.h.{i}.attn.c_proj.weight"].T
        hidden = norm(x) @ weights[f"transformer.h.{i}.mlp.c_fc.weight"].T
        x = x + F.relu(hidden).square() @ weights[f"transformer.h.{i}.mlp.c_proj.weight"].T
    return 15 * torch.tanh(norm(x) @ weights["lm_head.weight"].T / 15)


def checkpoint(folder, weights=None, step=500, prefix="", bf16=True, sizes=SIZES, **told):
    """Write nanochat's files; told: further keys of model_config, of which None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(random_weights(sizes) if weights is None else weights)
    if bf16:  # as on CUDA
        weights["transformer.wte.weight"] = weights["transformer.wte.weight"].bfloat16()
    torch.save({prefix + name: tensor for name, tensor in weights.items()}, folder / f"model_{step:06d}.pt")
    config = {name: value for name, value in {**sizes, **told}.items() if value is not None}
    meta = {"step": step, "val_bpb": 0.9, "model_config": config, "user_config": {"run": "dummy"}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    (folder / f"optim_{step:06d}_rank0.pt").write_bytes(b"not read")
    return weights


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def run(model, folder, dry_run=False, **keys):
    convert(recipes.load(ConvertRecipe, "convert", {"source": str(model), "output": str(folder), **keys}), dry_run)


def refusal(function, *arguments, **keywords):
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the callers look at what it says
        function(*arguments, **keywords)
    said = str(refused.value)
    assert "\n" not in said
    assert said.endswith((".", ")."))
    return said


# nanochat's model


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("heads", [0, 1, 4, [0, 3, 4], [2, 2, 2]], ids=str)
def test_a_checkpoint_of_nanochat_gives_its_logits(tmp_path, heads, n_kv_head):
    sizes = {**SIZES, "n_kv_head": n_kv_head}
    told = {} if heads == 0 else {"laplacian_heads": heads}
    weights = checkpoint(tmp_path, prefix="_orig_mod.", sizes=sizes, **told)
    model = from_nanochat(tmp_path)
    assert model.config.rms_norm_eps == torch.finfo(torch.float32).eps
    assert model.config.laplacian_heads == (2 if heads == [2, 2, 2] else heads)
    with torch.no_grad():
        logits = model(IDS).logits
    expected = nanochat_logits(weights, sizes, IDS, heads)
    assert expected.std() > 1  # the comparison sees something
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    if heads:
        assert (expected - nanochat_logits(weights, sizes, IDS, 0)).abs().max() > 0.1


def test_what_nanochats_rounded_rotary_tables_change(tmp_path):
    weights = checkpoint(tmp_path, laplacian_heads=2)
    with torch.no_grad():
        logits = from_nanochat(tmp_path)(IDS).logits
    rounded = nanochat_logits(weights, SIZES, IDS, 2, tables=torch.bfloat16)
    difference = (logits - rounded).abs().max()
    assert 1e-4 < difference < 0.1 * rounded.std()


def test_rms_norm_adds_what_nanochats_does(tmp_path):
    """An embedding of 1e-3 makes the number that the norm adds visible."""
    weights = random_weights(SIZES)
    weights["transformer.wte.weight"] *= 5e-3
    checkpoint(tmp_path, weights, bf16=False)
    model = from_nanochat(tmp_path)
    expected = nanochat_logits(weights, SIZES, IDS)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=0)
        for module in model.modules():
            if hasattr(module, "eps"):
                module.eps = 1e-6
        assert (model(IDS).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("heads", [0, 2, [0, 3, 4]], ids=str)
def test_round_trip_through_laplace_gpt_keeps_every_bit(tmp_path, heads, bf16):
    told = {} if heads == 0 else {"laplacian_heads": heads}
    weights = checkpoint(tmp_path / "there", prefix="_orig_mod.", bf16=bf16, **told)
    model = from_nanochat(tmp_path / "there")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    path = to_nanochat(model, tmp_path / "back", 7)
    assert path.name == "model_000007.pt"
    back = torch.load(path, weights_only=True)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert same_bits(back[name], tensor), name
    meta = json.loads((tmp_path / "back/meta_000007.json").read_text())
    assert meta == {"step": 7, "model_config": {**SIZES, **told}}
    assert not list(tmp_path.glob("back/*.part"))


def test_an_embedding_that_bfloat16_would_change_is_kept(tmp_path):
    model = tiny_gpt(vocab_size=100, hidden_size=32)
    path = to_nanochat(model, tmp_path)
    stored = torch.load(path, weights_only=True)
    assert stored["transformer.wte.weight"].dtype == torch.float32
    back = from_nanochat(tmp_path)
    for name, tensor in model.state_dict().items():
        assert same_bits(back.state_dict()[name], tensor)


def test_dtype_is_the_widest_of_the_checkpoint(tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in random_weights(SIZES).items()}
    checkpoint(tmp_path, weights)
    assert from_nanochat(tmp_path).dtype == torch.bfloat16
    weights["lm_head.weight"] = weights["lm_head.weight"].half()
    checkpoint(tmp_path, weights)
    assert from_nanochat(tmp_path).dtype == torch.float32


def test_model_owns_its_weights(tmp_path):
    checkpoint(tmp_path)
    model = from_nanochat(tmp_path)
    before = model.lm_head.weight.clone()
    with (tmp_path / "model_000500.pt").open("r+b") as file:  # in place: a mapped file would change the model
        file.write(b"\0" * os.path.getsize(file.name))
    assert torch.equal(model.lm_head.weight, before)


def test_padding_rows_of_the_vocabulary_are_dropped(tmp_path):
    weights = random_weights(SIZES)
    padded = dict(weights)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        padded[name] = F.pad(weights[name], (0, 0, 0, 28), value=3.0)
    checkpoint(tmp_path, padded, bf16=False)
    model = from_nanochat(tmp_path)
    assert model.lm_head.weight.shape == (100, 32)
    expected = nanochat_logits(weights, SIZES, IDS)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=0)


def test_steps_and_special_ids(tmp_path):
    for step in (7, 20, 1000000):
        checkpoint(tmp_path, random_weights(SIZES, seed=step), step=step, bf16=False)
    (tmp_path / "model_9000000_backup.pt").write_bytes(b"")
    newest, named = from_nanochat(tmp_path), from_nanochat(str(tmp_path), step=7)
    assert torch.equal(newest.lm_head.weight, random_weights(SIZES, seed=1000000)["lm_head.weight"])
    assert torch.equal(named.lm_head.weight, random_weights(SIZES, seed=7)["lm_head.weight"])
    for config in (newest.config, newest.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (91, 95, 95)
    assert "allowed are those in" in refusal(from_nanochat, tmp_path, step=8)


def test_laplacian_heads_are_given_where_the_file_does_not_tell(tmp_path):
    weights = checkpoint(tmp_path)
    model = from_nanochat(tmp_path, laplacian_heads=[1, 0, 4])
    with torch.no_grad():
        expected = nanochat_logits(weights, SIZES, IDS, [1, 0, 4])
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=0)
    assert "laplacian_heads: the count is 5" in refusal(from_nanochat, tmp_path, laplacian_heads=5)
    checkpoint(tmp_path, laplacian_heads=[1, 1, 1])
    assert from_nanochat(tmp_path, laplacian_heads=1).config.laplacian_heads == 1
    assert "allowed is null or what" in refusal(from_nanochat, tmp_path, laplacian_heads=2)


LATER = {
    "resid_lambdas": (3,),
    "x0_lambdas": (3,),
    "value_embeds.1.weight": (100, 32),
    "transformer.h.1.attn.ve_gate.weight": (4, 12),
    "smear_gate.weight": (1, 24),
    "smear_lambda": (1,),
    "backout_lambda": (1,),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_nanochat_is_refused_by_its_weights(tmp_path, name):
    checkpoint(tmp_path, {**random_weights(SIZES), name: torch.ones(LATER[name])})
    said = refusal(from_nanochat, tmp_path)
    assert f"has the weight {name}" in said
    assert "supported is nanochat from October 2025" in said


@pytest.mark.parametrize("key", ["window_pattern", "use_ve", "n_laplacian"])
def test_a_later_nanochat_is_refused_by_its_configuration(tmp_path, key):
    checkpoint(tmp_path, **{key: "L"})
    assert f"has the key {key!r} in model_config" in refusal(from_nanochat, tmp_path)


@pytest.mark.parametrize("key", SIZES)
def test_a_missing_or_wrong_size_is_named(tmp_path, key):
    checkpoint(tmp_path, **{key: None})
    assert f"lacks the key {key!r}" in refusal(from_nanochat, tmp_path)
    for value in (0, True, "3", 2.0):
        checkpoint(tmp_path, **{key: value})
        assert f"{key} is {value!r}, allowed is an integer" in refusal(from_nanochat, tmp_path)
    checkpoint(tmp_path, **{key: SIZES[key] + 1})
    if key != "sequence_len":  # no weight has it
        assert refusal(from_nanochat, tmp_path)


def test_missing_and_damaged_files(tmp_path):
    assert "has no model_<step>.pt" in refusal(from_nanochat, tmp_path / "nowhere")
    checkpoint(tmp_path)
    model, meta = tmp_path / "model_000500.pt", tmp_path / "meta_000500.json"
    whole = model.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:-30], b"", b"text", pickle.dumps({"a": 1})):
        model.write_bytes(damaged)
        assert "model_000500.pt is no file of weights" in refusal(from_nanochat, tmp_path)
    for content, said in (
        ([torch.ones(2)], "is no state dict"),
        ({"lm_head.weight": 3}, "'lm_head.weight' is int"),
        ({**random_weights(SIZES), "lm_head.weight": torch.ones(100, 32, dtype=torch.int8)}, "is torch.int8"),
        ({**random_weights(SIZES), "lm_head.weight": torch.ones(100, 32, device="meta")}, "allowed are tensors"),
        ({**random_weights(SIZES), "lm_head.weight": torch.ones(100, 32).to_sparse()}, "allowed are tensors"),
        ({**random_weights(SIZES), "lm_head.weight": torch.ones(100, 31)}, "lm_head.weight has the shape (100, 31)"),
        ({**random_weights(SIZES), "_orig_mod.lm_head.weight": torch.ones(100, 32)}, "lm_head.weight twice"),
        ({"lm_head.weight": torch.ones(100, 32)}, "lacks the weight transformer.wte.weight"),
    ):
        torch.save(content, model)
        assert said in refusal(from_nanochat, tmp_path), content
    model.write_bytes(whole)
    for text, said in (("{", "is not a JSON file"), ("[]", "model_config"), ('{"model_config": 3}', "model_config")):
        meta.write_text(text)
        assert said in refusal(from_nanochat, tmp_path)
    meta.unlink()
    assert "There is no" in refusal(from_nanochat, tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"laplacian_heads": [[0], [3]]}, "those of layer 0 are [0]"),
        ({"laplacian_heads": 1, "laplacian_share": 0.5}, "laplacian_share is 0.5"),
        ({"intermediate_size": 64}, "intermediate_size is 64, allowed for nanochat is 128"),
        ({"head_dim": 16}, "head_dim is 16, allowed for nanochat is 8"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm_eps": 1e-3}, "rms_norm_eps is 0.001"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}, "rope_parameters is"),
    ],
)
def test_what_nanochat_cannot_compute_is_refused(tmp_path, fields, said):
    assert said in refusal(to_nanochat, tiny_gpt(**fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_to_nanochat_overwrites_nothing(tmp_path):
    model = tiny_gpt()
    to_nanochat(model, tmp_path, 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "is there already" in refusal(to_nanochat, model, tmp_path, 3)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "step is -1" in refusal(to_nanochat, model, tmp_path, -1)
    assert "allowed is a LaplaceGPT" in refusal(to_nanochat, plain(), tmp_path, 4)


# transformers' NanoChat


def plain(**fields):
    """transformers' NanoChat, small and random."""
    small = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return redraw(NanoChatForCausalLM(NanoChatConfig(**{**small, **fields}))).eval()


@pytest.mark.parametrize(
    "fields",
    [{}, {"attention_bias": True}, {"tie_word_embeddings": True}, {"final_logit_softcapping": 30.0, "head_dim": 16}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nanochat_of_transformers_and_back(fields, dtype):
    theirs = plain(**fields)
    if dtype != torch.float32:  # as a saved model is loaded; .to(dtype) would round the frequencies of RoPE too
        weights = {name: tensor.to(dtype) for name, tensor in theirs.state_dict().items()}
        theirs = NanoChatForCausalLM.from_pretrained(None, config=theirs.config, state_dict=weights, dtype=dtype)
        theirs.config.name_or_path = ""
    theirs.generation_config.eos_token_id = [1, 5]
    ours = from_transformers(theirs)
    again = to_transformers(ours)
    assert type(ours) is LaplaceGPTForCausalLM
    assert type(again) is NanoChatForCausalLM
    assert ours.dtype == again.dtype == dtype
    assert ours.generation_config.eos_token_id == again.generation_config.eos_token_id == [1, 5]
    ids = IDS % 97
    with torch.no_grad():
        states = [model.model(ids).last_hidden_state for model in (theirs, ours, again)]
        logits = [model(ids).logits for model in (theirs, ours, again)]
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    if dtype == torch.float32:  # else NanoChat caps the logits in their dtype, and LaplaceGPT in float32
        assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    state, ours_state = theirs.state_dict(), ours.state_dict()
    assert state.keys() == ours_state.keys() == again.state_dict().keys()
    assert all(torch.equal(state[name], ours_state[name]) for name in state)
    fields = {name: value for name, value in theirs.config.to_dict().items() if name not in ("architectures", "dtype")}
    assert {name: again.config.to_dict()[name] for name in fields} == fields
    with torch.no_grad():  # the weights are copies
        ours.lm_head.weight.zero_()
    assert theirs.lm_head.weight.any()
    assert again.lm_head.weight.any()


def test_only_a_model_of_the_kind_is_taken():
    assert "laplacian_heads is 1, allowed is 0" in refusal(to_transformers, tiny_gpt(laplacian_heads=1))
    assert "allowed is 0" in refusal(to_transformers, tiny_gpt(laplacian_heads=[[], [2]]))
    assert "allowed is a LaplaceGPT" in refusal(to_transformers, plain())
    assert "allowed is transformers' NanoChat" in refusal(from_transformers, tiny_gpt())
    assert "allowed is transformers' NanoChat" in refusal(from_transformers, torch.nn.Linear(2, 2))


# Malicious pickles


class Call:
    """Pickled, it calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def attacks(canary):
    """Objects whose unpickling makes a file, in ways that the filters have to see through."""
    shell = Call(os.system, f"touch {canary}")
    code = Call(eval, f"open({str(canary)!r}, 'w').close()")
    opened = Call(open, str(canary), "w")
    nested = Call(getattr, Call(__import__, "os"), "system")
    return {
        "os.system": shell,
        "eval": code,
        "open": opened,
        "nested": nested,
        "in a list": [1, [shell]],
        "as a key": {("a", code): 1},
        "exec": Call(exec, f"open({str(canary)!r}, 'w').close()"),
    }


NAMES = list(attacks("x"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("raw", [True, False])
def test_a_malicious_model_is_refused_and_not_run(tmp_path, name, raw):
    canary = tmp_path / "canary"
    attack = attacks(canary)[name]
    checkpoint(tmp_path / "there")
    path = tmp_path / "there/model_000500.pt"
    if raw:
        path.write_bytes(pickle.dumps(attack))
    else:
        torch.save({**random_weights(SIZES), "more": attack}, path)
    said = refusal(from_nanochat, tmp_path / "there")
    assert "is no file of weights" in said if raw else "nothing of it was run" in said
    refusal(run, tmp_path / "there", tmp_path / "out")
    assert not canary.exists()
    assert not (tmp_path / "out").exists()
    if name == "eval":  # the attack is one
        pickle.loads(pickle.dumps(attack))
        assert canary.exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("inside", [True, False])
def test_a_malicious_tokenizer_is_refused_and_not_run(tmp_path, encoding, name, inside):
    canary = tmp_path / "canary"
    attack = attacks(canary)[name]
    state = {"name": "rustbpe", "pat_str": PATTERN, "mergeable_ranks": encoding[0], "special_tokens": encoding[1]}
    content = pickled_encoding({**state, "more": attack}) if inside else pickle.dumps(attack)
    (tmp_path / "tokenizer.pkl").write_bytes(content)
    assert "nothing of it was run" in refusal(tokenizer_from_nanochat, tmp_path)
    assert not canary.exists()


def test_tiktoken_itself_is_not_reached_into(tmp_path):
    """A dotted name would lead from the allowed class to anything that its module imports."""
    for name in ("Encoding.__init__", "Encoding.__init__.__globals__", "functools", "ThreadPoolExecutor"):
        (tmp_path / "tokenizer.pkl").write_bytes(
            b"\x80\x04\x8c\x0dtiktoken.core\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        )
        assert f"asks for tiktoken.core.{name}, allowed" in refusal(tokenizer_from_nanochat, tmp_path)


# nanochat's tokenizer


def stand_in_for_tiktoken():
    """Modules tiktoken and tiktoken.core with an Encoding that pickles as tiktoken's does."""

    class Encoding:
        def __init__(self, name, *, pat_str, mergeable_ranks, special_tokens):
            self.all = name, pat_str, mergeable_ranks, special_tokens

        def __getstate__(self):
            return dict(zip(("name", "pat_str", "mergeable_ranks", "special_tokens"), self.all, strict=True))

    Encoding.__module__, Encoding.__qualname__ = "tiktoken.core", "Encoding"
    core, package = types.ModuleType("tiktoken.core"), types.ModuleType("tiktoken")
    core.Encoding = package.Encoding = Encoding
    package.core = core
    return {"tiktoken": package, "tiktoken.core": core}


def pickled_encoding(state, protocol=pickle.DEFAULT_PROTOCOL):
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_in_for_tiktoken().items():
            patch.setitem(sys.modules, name, module)
        encoding = object.__new__(sys.modules["tiktoken"].Encoding)
        type(encoding).__getstate__ = lambda self: state
        return pickle.dumps(encoding, protocol)


@pytest.fixture(scope="module")
def prose():
    return list(sources.documents("python_prose"))


@pytest.fixture(scope="module")
def encoding(prose):
    """Ranks of 2,000 tokens, of which a byte's is its value, and the ids of nanochat's special tokens."""
    text = [document[:20000] for document in prose[:30]]
    trained = train_tokenizer([*text, "1 22 333 4444 55555 \n\n\n   x = f(y)\n\t\tна 你好 " * 50], 2010, 64)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    byte = {chr(value): value for value in printable} | {chr(256 + i): value for i, value in enumerate(others)}
    vocab = json.loads(trained.backend_tokenizer.to_str())["model"]["vocab"]
    tokens = [bytes(byte[c] for c in token) for token in sorted(vocab, key=vocab.get)]
    merged = [token for token in tokens if len(token) > 1]
    ranks = {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *merged])}
    assert len(ranks) == 2000
    return ranks, {name: 2000 + i for i, name in enumerate(NANOCHAT_TOKENS)}


def write_encoding(folder, encoding, protocol=pickle.DEFAULT_PROTOCOL, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    state = {"name": "rustbpe", "pat_str": PATTERN, "mergeable_ranks": encoding[0], "special_tokens": encoding[1]}
    (folder / "tokenizer.pkl").write_bytes(pickled_encoding({**state, **changes}, protocol))
    return folder


def reference_encoder(ranks, pattern=PATTERN):
    """encode(text): ids of a text, by byte-pair encoding as tiktoken defines it."""
    pieces, known = regex.compile(pattern), {}

    def encode_piece(piece):
        parts = [bytes([byte]) for byte in piece]
        while True:
            pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
            if not pairs or min(pairs) == len(ranks):
                return [ranks[part] for part in parts]
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    def encode(text):
        ids = []
        for piece in pieces.findall(text):
            if piece not in known:
                known[piece] = encode_piece(piece.encode())
            ids += known[piece]
        return ids

    return encode


def texts(prose):
    """Prose, code, and random text of many kinds."""
    drawn = random.Random(0)
    kinds = [
        "0123456789",
        "01 2345 ,.\n",
        " \t\n\r\x0b\x0c\x85\u00a0\u2003\u2028\u3000",
        " \n\r'sStTdDmMlLrReEvV",
        "abcdefgh ABCDEFGH",
        "()[]{}<>|=+-*/%_#@!?.,:;'\"\\ \n",
        "aaaaabb",
        "äöüßéèñçøåœÆŒ ",
        "абвгд 你好世界 こんにちは ㄱㅏ한국어 العربية हिन्दी ",
        "٣٤٥६७८一二三ⅣⅫ½²³①",
        "🌍👩‍🚀🏳️‍🌈👍🏽e\u0301\u200d\ufeff\u200b",
        "'ſ'K ſtDž",
    ]
    made = ["".join(drawn.choices(kind, k=drawn.randint(1, 200))) for kind in kinds * 40]
    made += ["".join(drawn.choices("".join(kinds), k=100)) for _ in range(300)]
    assigned = [chr(i) for i in range(0x30000) if not 0xD800 <= i < 0xE000]
    made += ["".join(drawn.choices(assigned[:0x3000], k=60)) for _ in range(200)]
    code = Path(__file__).read_text(encoding="utf-8")
    return [*prose, *made, code, "", " ", "\n", "I'll they'RE DON'T we've", "x" * 3000, "\0\x01\x7f"]


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_the_tokenizer_gives_nanochats_ids(tmp_path, encoding, prose, protocol):
    tokenizer = tokenizer_from_nanochat(write_encoding(tmp_path, encoding, protocol))
    samples = texts(prose if protocol == 4 else prose[:3])
    found = tokenizer(samples, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    encode = reference_encoder(encoding[0])
    for text, ids in zip(samples, found, strict=True):
        assert ids == encode(text), repr(text[:200])
        assert tokenizer.decode(ids) == text
    assert sum(map(len, found)) > (300_000 if protocol == 4 else 30_000)


def test_the_tokenizer_gives_the_ids_of_tiktoken_itself(tmp_path, encoding, prose):
    tiktoken = pytest.importorskip("tiktoken")
    theirs = tiktoken.Encoding("rustbpe", pat_str=PATTERN, mergeable_ranks=encoding[0], special_tokens=encoding[1])
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(theirs))
    written = tmp_path / "tokenizer.pkl"
    assert written.read_bytes() == write_encoding(tmp_path / "b", encoding).joinpath("tokenizer.pkl").read_bytes()
    tokenizer = tokenizer_from_nanochat(tmp_path)
    samples = texts(prose)
    found = tokenizer(samples, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]
    for text, ids in zip(samples, found, strict=True):
        assert ids == theirs.encode_ordinary(text), repr(text[:200])
    tokenizer_to_nanochat(tokenizer, tmp_path / "c")
    again = pickle.loads((tmp_path / "c/tokenizer.pkl").read_bytes())
    assert (again._mergeable_ranks, again._special_tokens, again._pat_str) == (*encoding, PATTERN)


def test_special_tokens_and_the_chat_template(tmp_path, encoding):
    tokenizer = tokenizer_from_nanochat(write_encoding(tmp_path, encoding), context=64)
    assert len(tokenizer) == 2009
    assert tokenizer.model_max_length == 64
    for name, token_id in encoding[1].items():
        assert tokenizer(name, add_special_tokens=False)["input_ids"] == [token_id]
        assert tokenizer.convert_ids_to_tokens(token_id) == name
        assert tokenizer.decode([token_id], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|assistant_end|>")
    assert tokenizer.pad_token == "<|assistant_end|>"
    encode = reference_encoder(encoding[0])
    assert tokenizer("Hello")["input_ids"] == [2000, *encode("Hello")]

    messages = [{"role": "user", "content": "Hi 123"}, {"role": "assistant", "content": "Yes."}]
    rendered = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    answer = encode("Yes.")
    expected = [2000, 2001, *encode("Hi 123"), 2002, 2003, *answer, 2004]
    assert rendered["input_ids"] == expected
    assert sum(rendered["assistant_masks"]) == len(answer) + 1
    tokenizer.save_pretrained(tmp_path / "saved")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again.apply_chat_template(messages, return_dict=True)["input_ids"] == expected


def test_another_pattern_is_taken_as_it_is(tmp_path, encoding):
    three_digits = PATTERN.replace("{1,2}", "{1,3}")
    tokenizer = tokenizer_from_nanochat(write_encoding(tmp_path, encoding, pat_str=three_digits))
    for text in ("4444 55555", "333"):
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert found == reference_encoder(encoding[0], three_digits)(text)
    assert "is no regular expression" in refusal(
        tokenizer_from_nanochat, write_encoding(tmp_path, encoding, pat_str="(")
    )


def test_a_tokenizer_that_is_none_is_refused(tmp_path, encoding):
    ranks, special = encoding
    assert "There is no" in refusal(tokenizer_from_nanochat, tmp_path)
    path = tmp_path / "tokenizer.pkl"
    whole = write_encoding(tmp_path, encoding).joinpath("tokenizer.pkl").read_bytes()
    by_name = pickled_encoding("cl100k_base")
    for content in (b"", b"text", whole[: len(whole) // 2], pickle.dumps({"pat_str": "a"}), by_name, b"\x80\x63."):
        path.write_bytes(content)
        assert "is no pickled tiktoken.Encoding, or is damaged" in refusal(tokenizer_from_nanochat, tmp_path)
    shifted = {name: token_id + 1 for name, token_id in special.items()}
    without = {token: rank for token, rank in ranks.items() if token != b"\x80"}
    swapped = {**ranks, **dict(zip(list(ranks)[256:], reversed(range(256, 2000)), strict=True))}
    for changes, said in (
        ({"pat_str": 3}, "is no pickled"),
        ({"mergeable_ranks": {"a": 1}}, "is no pickled"),
        ({"special_tokens": {"<|bos|>": "1"}}, "is no pickled"),
        ({"special_tokens": {"<|bos|>": 2000}}, "lacks the special token <|user_start|>"),
        ({"special_tokens": shifted}, "<|bos|> has the id 2001, allowed are the ids that follow"),
        ({"mergeable_ranks": without}, "are not 0 to"),
        ({"mergeable_ranks": {t: i for i, t in enumerate(without)}}, "lacks a token for the byte 128"),
        ({"mergeable_ranks": swapped}, "is not the merge of two tokens"),
    ):
        write_encoding(tmp_path, encoding, **changes)
        assert said in refusal(tokenizer_from_nanochat, tmp_path), changes.keys()


def test_a_tokenizer_goes_back_to_nanochat(tmp_path, encoding, monkeypatch, tokenizer):
    converted = tokenizer_from_nanochat(write_encoding(tmp_path, encoding))
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    assert "needs tiktoken: pip install tiktoken" in refusal(tokenizer_to_nanochat, converted, tmp_path / "back")
    for name, module in stand_in_for_tiktoken().items():
        monkeypatch.setitem(sys.modules, name, module)
    path = tokenizer_to_nanochat(converted, tmp_path / "back")
    assert path.read_bytes() == (tmp_path / "tokenizer.pkl").read_bytes()
    counted = torch.load(tmp_path / "back/token_bytes.pt", weights_only=True)
    assert counted.dtype == torch.int32
    assert counted.tolist() == [*map(len, encoding[0]), *[0] * 9]

    own = train_tokenizer(["The quick brown fox and 1234 others. " * 50], 300, 64)  # it has a pad
    tokenizer_to_nanochat(own, tmp_path / "own")
    again = tokenizer_from_nanochat(tmp_path / "own")
    assert again.get_vocab() == own.get_vocab()
    assert again.pad_token == "<|pad|>"
    text = "The quick 1234 dogs, ünd"
    assert again(text)["input_ids"] == own(text)["input_ids"]
    assert "is not of nanochat's kind" in refusal(tokenizer_to_nanochat, tokenizer, tmp_path / "no")
    assert not (tmp_path / "no").exists()


# The verb


@pytest.fixture
def nanochat_folder(tmp_path, encoding):
    """A checkpoint and the tokenizer that belongs to it."""
    sizes = {**SIZES, "vocab_size": 2009}
    checkpoint(tmp_path / "d3", sizes=sizes, prefix="_orig_mod.", laplacian_heads=[0, 1, 4])
    write_encoding(tmp_path / "tokenizer", encoding)
    return tmp_path


def test_from_nanochat_and_back_by_the_verb(nanochat_folder, capsys, monkeypatch):
    there = nanochat_folder
    run(there / "d3", there / "ours", tokenizer=str(there / "tokenizer"))
    said = capsys.readouterr().out
    assert "20 weights, converted back, are the checkpoint's bit for bit" in said
    assert "logits for 128 random tokens are finite and the same within 0.0e+00" in said
    model = LaplaceGPTForCausalLM.from_pretrained(there / "ours")
    tokenizer = AutoTokenizer.from_pretrained(there / "ours")
    assert model.config.laplacian_heads == [0, 1, 4]
    assert tokenizer.model_max_length == 64
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2004
    assert (there / "ours/modeling_laplace_gpt.py").exists()  # the code that the Hub needs

    for name, module in stand_in_for_tiktoken().items():
        monkeypatch.setitem(sys.modules, name, module)
    run(there / "ours", there / "back", to="nanochat", step=500, tokenizer=str(there / "ours"))
    first, second = (torch.load(there / name / "model_000500.pt", weights_only=True) for name in ("d3", "back"))
    assert all(same_bits(first["_orig_mod." + name], tensor) for name, tensor in second.items())
    pickles = [(there / name / "tokenizer.pkl").read_bytes() for name in ("tokenizer", "back/tokenizer")]
    assert pickles[0] == pickles[1]
    assert {path.name for path in there.iterdir()} == {"d3", "tokenizer", "ours", "back"}


def test_every_kind_to_every_other_by_the_verb(tmp_path, capsys):
    checkpoint(tmp_path / "nanochat", bf16=False)
    run(tmp_path / "nanochat", tmp_path / "laplace_gpt")
    run(tmp_path / "nanochat", tmp_path / "transformers", to="transformers")
    folders = ("nanochat", "laplace_gpt", "transformers")
    for source in folders:
        for to in folders:
            if source == to:
                assert "is already" in refusal(run, tmp_path / source, tmp_path / "x", to=to)
                continue
            run(tmp_path / source, tmp_path / f"{source} {to}", to=to)
            assert "bit for bit" in capsys.readouterr().out
    theirs = NanoChatForCausalLM.from_pretrained(tmp_path / "laplace_gpt transformers")
    with torch.no_grad():
        expected = nanochat_logits(random_weights(SIZES), SIZES, IDS)
        torch.testing.assert_close(theirs(IDS).logits, expected, atol=1e-4, rtol=0)


def test_a_model_trained_here_goes_to_nanochat_and_says_what_differs(tmp_path, capsys):
    model = tiny_gpt(laplacian_heads=2)
    model.save_pretrained(tmp_path / "ours")
    run(tmp_path / "ours", tmp_path / "theirs", to="nanochat")
    said = capsys.readouterr().out
    assert "as nanochat's RMS norm adds 1.19e-07 for 1e-06" in said
    assert "no tokenizer was written" in said
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["meta_000000.json", "model_000000.pt"]


def test_a_dry_run_reads_and_writes_nothing(nanochat_folder, capsys):
    before = sorted(nanochat_folder.rglob("*"))
    run(nanochat_folder / "d3", nanochat_folder / "out/deep", dry_run=True)
    assert "laplacian_heads [0, 1, 4], 2,009 tokens" in capsys.readouterr().out
    assert "allowed is 0" in refusal(run, nanochat_folder / "d3", nanochat_folder / "out", True, to="transformers")
    assert sorted(nanochat_folder.rglob("*")) == before


def test_wrong_keys_and_folders(tmp_path, encoding):
    checkpoint(tmp_path / "d3")
    plain().save_pretrained(tmp_path / "theirs")
    write_encoding(tmp_path / "tokenizer", encoding)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "gpt2"}')
    out = tmp_path / "out"
    for source, output, keys, said in (
        ("d3", out, {"to": "gguf"}, "to is 'gguf', allowed are null, laplace_gpt, laplace_vit, nanochat, timm, transf"),
        ("d3", out, {"to": "timm"}, "d3 is nanochat; allowed are laplace_gpt and transformers"),
        ("d3", out, {"step": -1}, "step is -1"),
        ("d3", out, {"step": 3}, "step is 3, allowed are those in"),
        ("d3", out, {"source": None}, "source is None"),
        ("d3", out, {"tokenizer": ""}, "tokenizer is ''"),
        ("d3", out, {"tokenizer": str(tmp_path / "empty")}, "allowed is a folder with tokenizer.pkl"),
        ("d3", out, {"tokenizer": str(tmp_path / "tokenizer")}, "has 2,009 entries, the model 100"),
        ("d3", out, {"laplacian_heads": 9}, "laplacian_heads: the count is 9"),
        ("d3", tmp_path / "full", {}, "holds files, allowed is a new or an empty folder"),
        ("d3", tmp_path / "full/file", {}, "is a file"),
        ("d3", tmp_path / "d3", {}, "holds files"),
        ("nowhere", out, {}, "there is no folder"),
        ("empty", out, {}, "has neither config.json nor model_<step>.pt"),
        ("other", out, {}, "is a gpt2, allowed are laplace_gpt, nanochat"),
        ("theirs", out, {"laplacian_heads": 1}, "laplacian_heads is 1, allowed is null"),
        ("theirs", out, {"step": 1}, "step is 1, allowed is null"),
        ("theirs", out, {"to": "nanochat"}, "intermediate_size is 48, allowed for nanochat is 128"),
    ):
        for dry_run in (True, False):
            assert said in refusal(run, tmp_path / source, output, dry_run, **keys)
    assert not out.exists()
    assert (tmp_path / "full/file").read_text() == "mine"
    run(tmp_path / "d3", tmp_path / "empty")
    assert (tmp_path / "empty/config.json").exists()


def test_weights_that_are_missing_or_not_finite_are_refused(tmp_path):
    weights = random_weights(SIZES)
    weights["lm_head.weight"][3, 3] = torch.nan
    checkpoint(tmp_path / "d3", weights)
    assert "The logits are not finite" in refusal(run, tmp_path / "d3", tmp_path / "out")
    model = plain()
    state = model.state_dict()
    del state["model.layers.1.mlp.fc1.weight"]
    model.save_pretrained(tmp_path / "theirs", state_dict=state)
    assert "model.layers.1.mlp.fc1.weight missing" in refusal(run, tmp_path / "theirs", tmp_path / "out")
    path = tmp_path / "theirs/model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot be loaded" in refusal(run, tmp_path / "theirs", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"d3", "theirs"}


def test_an_interrupted_conversion_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    checkpoint(tmp_path / "d3")
    (tmp_path / "out.part").mkdir()  # of one that was killed
    (tmp_path / "out.part/old").write_text("")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("laplacian_heads.convert._verify", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "d3", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"d3"}
    run(tmp_path / "d3", tmp_path / "out")
    assert not (tmp_path / "out/old").exists()
    shutil.rmtree(tmp_path / "out")


def test_a_conversion_that_changes_a_weight_is_refused(tmp_path, monkeypatch):
    checkpoint(tmp_path / "d3")
    read = LaplaceGPTForCausalLM.from_pretrained

    def flipped(*arguments, **keywords):
        model, info = read(*arguments, **keywords)
        if arguments[0] is not None:
            with torch.no_grad():
                model.model.layers[1].mlp.fc1.weight[0, 0] *= -1
        return model, info

    monkeypatch.setattr(LaplaceGPTForCausalLM, "from_pretrained", flipped)
    assert "mlp.c_fc.weight is not the source's" in refusal(run, tmp_path / "d3", tmp_path / "out")
    assert not (tmp_path / "out").exists()
