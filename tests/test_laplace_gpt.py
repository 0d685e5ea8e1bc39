"""LaplaceGPT: equal to NanoChat without Laplacian heads, to the naive reference with them, and usable as a model."""

import copy
import math
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import naive_heads, plain_nanochat, redraw, tiny_gpt

from laplacian_heads import (
    LaplaceGPTConfig,
    LaplaceGPTForCausalLM,
    LaplaceGPTForSequenceClassification,
    LaplaceGPTModel,
    set_laplacian_share,
)
from laplacian_heads.laplacian import heads_by_layer, subtract_from_values

VOCABULARY = 97
LAYOUTS = [0, 2, 4, [1, 3], [[0, 2], [1]], {"start_layer": 1, "increment": 3, "max_count": 3}]


def tokens(*shape, seed=0, vocabulary=VOCABULARY):
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def naive(model):
    """The naive reference with the weights and the layout of a LaplaceGPT."""
    config = model.config
    heads = heads_by_layer(config.laplacian_heads, [config.num_attention_heads] * config.num_hidden_layers)
    layout = {f"model.layers.{layer}.self_attn": indices for layer, indices in enumerate(heads)}
    return naive_heads(plain_nanochat(model), layout, config.laplacian_share)


def packed_positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])[None]


def padded_mask(batch, length, padding, side):
    """(batch, length), the first row without padding, the others with it."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1:, slice(None, padding) if side == "left" else slice(length - padding, None)] = 0
    return mask


def run(model, inputs, cotangent, seed=0):
    """Logits where attended to, and the gradients of their inner product with the cotangent."""
    model.zero_grad()
    torch.manual_seed(seed)
    logits = model(**inputs, use_cache=False).logits
    kept = inputs.get("attention_mask", torch.ones(logits.shape[:2]))[..., None] == 1
    logits = logits.where(kept, 0.0)
    (logits * cotangent).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad.float() for name, p in model.named_parameters()}}


def assert_same(results, expected, tolerance):
    """Every tensor within the tolerance of the expected one, relative to the largest entry of each."""
    for name, tensor in expected.items():
        difference = (results[name] - tensor).abs().max()
        assert difference <= tolerance * max(1.0, tensor.abs().max()), f"{name} differs by {difference:.2e}"


def compare(model, reference, inputs, tolerance, seed=0):
    batch, length = (inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]).shape[:2]
    cotangent = torch.randn(batch, length, VOCABULARY, generator=torch.Generator().manual_seed(1)) / length
    assert_same(run(model, inputs, cotangent, seed), run(reference, inputs, cotangent, seed), tolerance)


# Without Laplacian heads


@pytest.mark.parametrize("attn", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"head_dim": 16}, {"tie_word_embeddings": True}])
def test_without_heads_it_is_nanochat(attn, fields):
    model = tiny_gpt(**fields)
    nanochat = plain_nanochat(model)
    model.set_attn_implementation(attn)
    nanochat.set_attn_implementation(attn)
    model.load_state_dict(nanochat.state_dict())
    uncompiled = torch.compiler.set_stance("force_eager") if attn == "flex_attention" else nullcontext()
    with torch.no_grad(), uncompiled:
        assert torch.equal(model(tokens(2, 9)).logits, nanochat(tokens(2, 9)).logits)
    if attn != "flex_attention":  # it has no backward on CPU
        compare(model, nanochat, {"input_ids": tokens(2, 9)}, 1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_scaling_beyond_the_trained_length(rope):
    rope = {"rope_theta": 10000.0, **rope}
    fields = {"max_position_embeddings": 64 if rope["rope_type"] == "yarn" else 16, "rope_parameters": rope}
    model = tiny_gpt(**fields)
    ids = tokens(2, 50)
    with torch.no_grad():
        scaled = model(ids).logits
        assert torch.equal(scaled, plain_nanochat(model)(ids).logits)
        assert not torch.allclose(scaled, tiny_gpt()(ids).logits, atol=1e-3)
    heads = tiny_gpt(laplacian_heads=2, **fields)
    compare(heads, naive(heads), {"input_ids": ids}, 1e-5)


# With Laplacian heads, against the naive reference


@st.composite
def cases(draw):
    """Fields of a configuration with any layout, and inputs for it."""
    layers, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    indices = [sorted(draw(st.sets(st.integers(0, heads - 1)))) for _ in range(layers)]
    fields = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "laplacian_heads": draw(st.sampled_from([indices, [len(entry) for entry in indices], heads // 2])),
        "laplacian_share": draw(st.sampled_from([1.0, 0.0, 0.4])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.3])),
    }
    inputs = {"input_ids": tokens(2, 9, seed=draw(st.integers(0, 99)))}
    form = draw(st.sampled_from(["plain", "left", "right", "packed"]))
    if form == "packed":
        inputs["position_ids"] = packed_positions(4, 5).expand(2, -1)
    elif form != "plain":
        inputs["attention_mask"] = padded_mask(2, 9, draw(st.integers(1, 6)), form)
    return fields, inputs


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@settings(max_examples=100, deadline=None)
@given(cases(), st.booleans())
def test_any_layout_equals_the_naive_reference(attn, case, training):
    fields, inputs = case
    model = tiny_gpt(**fields).train(training)
    model.set_attn_implementation(attn)
    compare(model, naive(model), inputs, 1e-5)


FLEX_CASES = {
    "plain": ({}, {}),
    "grouped queries": ({"num_key_value_heads": 2, "laplacian_share": 0.4}, {}),
    "left padding": ({}, {"attention_mask": padded_mask(2, 9, 3, "left")}),
    "packed": ({}, {"position_ids": packed_positions(4, 5).expand(2, -1)}),
}


def flex_difference(fields, inputs):
    model = tiny_gpt(**{"laplacian_heads": [[0, 2], [1, 2, 3]], **fields})
    reference = naive(model)
    model.set_attn_implementation("flex_attention")
    inputs = {"input_ids": tokens(2, 9), **inputs}
    with torch.no_grad():  # it has no backward on CPU
        difference = (model(**inputs, use_cache=False).logits - reference(**inputs, use_cache=False).logits).abs()
    return difference[inputs.get("attention_mask", torch.ones(2, 9)) == 1].max()


@pytest.mark.parametrize("case", FLEX_CASES)
def test_flex_attention_equals_the_naive_reference(case):
    with torch.compiler.set_stance("force_eager"):
        assert flex_difference(*FLEX_CASES[case]) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", FLEX_CASES)
def test_compiled_flex_attention_equals_the_naive_reference(case):
    assert flex_difference(*FLEX_CASES[case]) <= 1e-5


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"laplacian_share": 0.4}])
def test_bf16_is_as_exact_as_the_naive_reference_in_bf16(attn, fields):
    """The bound is the reference's own rounding: its distance from float32, over all logits and over all gradients."""
    model = tiny_gpt(laplacian_heads=[[0, 2], [1, 2, 3]], **fields).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    model.set_attn_implementation(attn)
    cotangent = torch.randn(2, 9, VOCABULARY, generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens(2, 9)}
    true, ours, theirs = (run(m, inputs, cotangent) for m in (naive(exact), model, naive(model)))

    def distance(result, names):
        return torch.cat([(result[name] - true[name]).flatten() for name in names]).norm()

    for names in (["logits"], [name for name in true if name != "logits"]):
        assert distance(ours, names) <= 1.5 * distance(theirs, names)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_packed_rows_equal_separate_ones(attn):
    model = tiny_gpt(laplacian_heads=2)
    model.set_attn_implementation(attn)
    ids = tokens(1, 12)
    with torch.no_grad():
        packed = model(ids, position_ids=packed_positions(5, 7), use_cache=False).logits
        separate = torch.cat([model(part).logits for part in ids.split([5, 7], dim=1)], dim=1)
    torch.testing.assert_close(packed, separate, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_recorded_attentions_are_p(kv_heads):
    model = tiny_gpt(laplacian_heads=[[0, 2], [1, 2, 3]], num_key_value_heads=kv_heads)
    reference = naive(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        recorded = model(tokens(2, 9), output_attentions=True).attentions
        expected = reference(tokens(2, 9), output_attentions=True).attentions
    assert len(recorded) == 2
    for p, q in zip(recorded, expected, strict=True):
        assert p.shape == (2, 4, 9, 9)
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
        torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 9))
        assert p.min() >= 0


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_laplacian_heads_output_zero_at_the_first_position(attn):
    layout = [[0, 2], [1, 2, 3]]
    model = tiny_gpt(laplacian_heads=layout, num_key_value_heads=2)
    model.set_attn_implementation(attn)
    seen = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(tokens(2, 9))
    for heads, output in zip(layout, seen, strict=True):
        first = output[:, 0].unflatten(-1, (4, -1)).abs().amax(-1)  # (batch, heads)
        assert first[:, heads].max() <= 1e-6
        assert first[:, [head for head in range(4) if head not in heads]].min() > 1e-2


def test_hidden_states_are_those_of_every_layer():
    model = tiny_gpt(laplacian_heads=2, num_hidden_layers=3)
    with torch.no_grad():
        outputs = model.model(tokens(2, 9), output_hidden_states=True)
        reference = naive(model).model(tokens(2, 9), output_hidden_states=True)
    assert len(outputs.hidden_states) == 4
    assert torch.equal(outputs.hidden_states[-1], outputs.last_hidden_state)
    for state, expected in zip(outputs.hidden_states, reference.hidden_states, strict=True):
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)


def test_inputs_embeds_and_a_copy_equal_the_model():
    model = tiny_gpt(laplacian_heads=2)
    ids = tokens(2, 9)
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, logits)
        duplicate = copy.deepcopy(model)
        assert torch.equal(duplicate(ids).logits, logits)
        set_laplacian_share(duplicate, 0.3)
        assert not torch.equal(duplicate(ids).logits, logits)
        assert torch.equal(model(ids).logits, logits)


def test_set_laplacian_share_equals_building_with_it(tmp_path):
    model = tiny_gpt(laplacian_heads=2)
    set_laplacian_share(model, 0.3)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        built = tiny_gpt(laplacian_heads=2, laplacian_share=0.3)(tokens(2, 9)).logits
        assert torch.equal(model(tokens(2, 9)).logits, built)
        assert torch.equal(LaplaceGPTForCausalLM.from_pretrained(tmp_path)(tokens(2, 9)).logits, built)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_with_half_of_the_heads_computes_its_half(rank, kv_heads, monkeypatch):
    """The tensor-parallel group is the innermost dimension of the grid: ranks 0 and 2 hold the first half."""
    generator = torch.Generator().manual_seed(0)
    output, value = (torch.randn(shape, generator=generator) for shape in [(2, 5, 4, 8), (2, kv_heads, 5, 8)])
    half = slice(rank % 2 * 2, rank % 2 * 2 + 2)
    kv_half = slice(rank % 2 * kv_heads // 2, (rank % 2 + 1) * kv_heads // 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *args: rank)
    for heads in [[], [0], [3], [1, 2], [0, 2, 3], [0, 1, 2, 3]]:
        whole = subtract_from_values(output, value, heads, 4, 0.7)
        local = subtract_from_values(output[:, :, half], value[:, kv_half], heads, 4, 0.7)
        assert torch.equal(local, whole[:, :, half])


def test_flat_outputs_of_serving_engines_are_combined_alike():
    output, value = torch.randn(1, 5, 4, 8), torch.randn(1, 2, 5, 8)
    whole = subtract_from_values(output, value, [0, 2, 3], 4)
    assert torch.equal(subtract_from_values(output.reshape(5, 32), value, [0, 2, 3], 4), whole.reshape(5, 32))


DISTRIBUTED = """
import os, sys, torch, torch.distributed as dist
from transformers.distributed import DistributedConfig
from laplacian_heads import LaplaceGPTForCausalLM

folder, kind = sys.argv[1:]
model = LaplaceGPTForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**{kind: 2}))
assert dist.get_world_size() == 2
assert model._loss_from_blocks() == (kind == "fsdp_size")
ids = torch.load(f"{folder}/ids.pt")
if kind == "fsdp_size":
    ids = ids.chunk(2)[dist.get_rank()]
loss = model(ids, labels=ids).loss
loss.backward()
results = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
for name, tensor in {"loss": loss.detach()[None], "logits": model(ids).logits.detach()}.items():
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.contiguous())
    results[name] = torch.cat(parts) if kind == "fsdp_size" else parts[0]
results["loss"] = results["loss"].mean()
if dist.get_rank() == 0:
    torch.save(results, f"{folder}/results.pt")
dist.barrier()
dist.destroy_process_group()
# A thread of torch that asks for the interpreter while it shuts down is unwound through C++, which now and then aborts
# the process ("terminate called without an active exception") after all is done: leave without shutting down.
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kind", ["tp_size", "fsdp_size"])
def test_two_processes_equal_one(kind, kv_heads, tmp_path):
    """Tensor parallelism, where each process holds half of the heads, and FSDP2, as transformers sets them up."""
    model = tiny_gpt(laplacian_heads=[[0, 2], [1, 2, 3]], num_key_value_heads=kv_heads, vocab_size=96)
    ids = tokens(4, 9, vocabulary=96)
    expected = {**gradients(model, input_ids=ids, labels=ids), "logits": model(ids).logits.detach()}
    model.save_pretrained(tmp_path)
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "script.py").write_text(DISTRIBUTED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    launch += [tmp_path / "script.py", tmp_path, kind]
    result = subprocess.run(launch, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert_same(torch.load(tmp_path / "results.pt"), expected, 1e-5)


# Initialisation


def fresh(layout=0, seed=0, model_class=LaplaceGPTForCausalLM, **fields):
    torch.manual_seed(seed)
    small = {"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return model_class(LaplaceGPTConfig(**{**small, "laplacian_heads": layout, **fields}))


def test_every_layout_has_the_same_parameters_and_starts_as_the_same_function():
    ids = tokens(2, 9)
    baseline = fresh()
    with torch.no_grad():
        start = baseline.model(ids).last_hidden_state
    for layout in LAYOUTS:
        model = fresh(layout)
        assert model.num_parameters() == baseline.num_parameters()
        with torch.no_grad():
            assert torch.equal(model.model(ids).last_hidden_state, start)
            changed = redraw(fresh(layout)).model(ids).last_hidden_state
        assert torch.equal(changed, redraw(fresh()).model(ids).last_hidden_state) == (layout == 0)


def assert_nanochat_start(model):
    """Standard deviations 1 for the embedding, fan-in for the projections, zero for what writes the residual."""
    scale = model.config.initializer_range
    expected = {"model.embed_tokens.weight": scale}
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "fc2.weight", "lm_head.weight")):
            assert not parameter.any(), name
        elif parameter.ndim == 2:
            out_size, in_size = parameter.shape
            std = expected.get(name, scale / math.sqrt(in_size) * min(1.0, math.sqrt(out_size / in_size)))
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(parameter.mean().item()) < 0.05 * std, name
        else:
            assert not parameter.any(), name  # biases


@pytest.mark.parametrize(
    "fields", [{}, {"num_key_value_heads": 1}, {"initializer_range": 0.5}, {"attention_bias": True}]
)
def test_initialisation_follows_nanochat(fields):
    model = fresh(2, **fields)
    assert_nanochat_start(model)
    ids = tokens(2, 9)
    assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(1000), rel=1e-6)
    assert model(ids, labels=ids, return_logits=True).loss.item() == pytest.approx(math.log(1000), rel=1e-6)


def test_initialisation_in_a_process_that_has_only_the_saved_code(tmp_path):
    """`from_config` with remote code, where the modules belong to another package than transformers'."""
    fresh(2).save_pretrained(tmp_path)
    script = f"""
import sys, torch, math
sys.modules["laplacian_heads"] = None
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
torch.save(model.state_dict(), {str(tmp_path / "start.pt")!r})
ids = torch.arange(9)[None]
assert abs(model(ids, labels=ids).loss.item() - math.log(1000)) < 1e-5
"""
    environment = {"HF_HOME": str(tmp_path / "home"), "PATH": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path, env=environment)
    model = fresh(2)
    model.load_state_dict(torch.load(tmp_path / "start.pt"))
    assert_nanochat_start(model)


def test_a_tied_start_has_logits_of_about_unit_size_and_trains():
    model = fresh(2, tie_word_embeddings=True)
    ids = tokens(4, 16, vocabulary=1000)
    with torch.no_grad():
        logits = model(ids).logits
    others = torch.ones_like(logits, dtype=torch.bool).scatter(-1, ids[..., None], False)
    assert logits[others].std().item() == pytest.approx(1.0, rel=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        losses.append(model(ids, labels=ids).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] < 1.5 * math.log(1000)
    assert losses[-1] < 0.5 * losses[0]


def test_the_row_of_the_padding_token_is_trained():
    model = tiny_gpt(laplacian_heads=2, pad_token_id=5)
    assert model.get_input_embeddings().padding_idx is None
    model(torch.full((1, 4), 5), labels=tokens(1, 4)).loss.backward()
    assert model.get_input_embeddings().weight.grad[5].abs().max() > 1e-4


# Training and precision


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach().float(), **{n: p.grad.float() for n, p in model.named_parameters()}}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant):
    model = tiny_gpt(laplacian_heads=2, attention_dropout=0.2).train()
    ids = tokens(2, 9)
    torch.manual_seed(0)
    expected = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    torch.manual_seed(0)
    assert_same(gradients(model, input_ids=ids, labels=ids), expected, 1e-6)
    assert len(calls) == 2  # forward, and again in backward


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_as_one_graph_equals_eager(autocast):
    model = tiny_gpt(laplacian_heads=[[0, 2], [1, 2, 3]], num_key_value_heads=2).train()
    inputs = {"input_ids": tokens(2, 9), "labels": tokens(2, 9), "use_cache": False}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model, **inputs)
        torch.compiler.reset()
        graphs = []

        def backend(graph, example_inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

        model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
        assert_same(gradients(model, **inputs), expected, 2**-7 if autocast else 1e-5)
    assert len(graphs) == 1


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager():
    model = tiny_gpt(laplacian_heads=[[0, 2], [1, 2, 3]], num_key_value_heads=2).train()
    inputs = {"input_ids": tokens(2, 9), "labels": tokens(2, 9), "use_cache": False}
    expected = gradients(model, **inputs)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert_same(gradients(model, **inputs), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_half_precision(dtype, autocast, attn):
    """Forward, loss, backward and generation run, near float32."""
    model = tiny_gpt(laplacian_heads=2)
    ids = tokens(2, 9)
    expected = gradients(model, input_ids=ids, labels=ids)
    half = copy.deepcopy(model) if autocast else copy.deepcopy(model).to(dtype)
    half.set_attn_implementation(attn)
    with torch.autocast("cpu", dtype, enabled=autocast):
        results = gradients(half, input_ids=ids, labels=ids)
        assert half(ids).logits.dtype == torch.float32
        assert half.generate(ids, max_new_tokens=3, do_sample=False).shape == (2, 12)
    torch.testing.assert_close(results["loss"], expected["loss"], rtol=0.05, atol=0)
    assert all(p.grad.dtype == p.dtype for p in half.parameters())
    mine, true = (torch.cat([r[name].flatten() for name in expected]) for r in (results, expected))
    assert torch.nn.functional.cosine_similarity(mine, true, dim=0) > 0.99


# The vocabulary, saving and loading


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [80, 130])
def test_resized_vocabulary_keeps_the_block_loss(tied, size, tmp_path):
    model = tiny_gpt(laplacian_heads=2, tie_word_embeddings=tied)
    ids = tokens(2, 9, vocabulary=80)
    with torch.no_grad():
        before = model(ids).logits[..., :80]
    model.resize_token_embeddings(size)
    assert model.lm_head.weight.shape == model.get_input_embeddings().weight.shape == (size, 32)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert model._loss_from_blocks()
    outputs = model(ids, labels=ids)
    whole = model(ids, labels=ids, return_logits=True)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, whole.loss, rtol=1e-6, atol=0)
    assert torch.equal(whole.logits[..., :80], before)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = LaplaceGPTForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(loaded(ids).logits, whole.logits)
        assert loaded._loss_from_blocks()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_and_loaded_model_is_equal(layout, tied, tmp_path):
    model = tiny_gpt(laplacian_heads=layout, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    loaded = LaplaceGPTForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    with torch.no_grad():
        logits = model(tokens(2, 9)).logits
        assert torch.equal(loaded(tokens(2, 9)).logits, logits)
        base = LaplaceGPTModel.from_pretrained(tmp_path)
        assert torch.equal(base(tokens(2, 9)).last_hidden_state, model.model(tokens(2, 9)).last_hidden_state)


# Sequence classification


@pytest.mark.parametrize("pad", [0, None])
def test_classification_trains_saves_and_loads(pad, tmp_path):
    """Which of two tokens a sequence holds is learnt; without a padding token one sequence at a time."""
    redraw(tiny_gpt(laplacian_heads=2), std=0.1).save_pretrained(tmp_path / "pretrained")
    torch.manual_seed(0)
    model = LaplaceGPTForSequenceClassification.from_pretrained(tmp_path / "pretrained", num_labels=2, pad_token_id=pad)
    assert model.score.weight.abs().max() > 0
    ids, labels = tokens(16, 6, vocabulary=90) + 1, torch.arange(16) % 2
    ids[:, 2] = 95 + labels
    batches = [slice(None)] if pad is not None else [slice(n, n + 1) for n in range(16)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(15):
        for rows in batches:
            model(ids[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(tmp_path / "trained")
    loaded = LaplaceGPTForSequenceClassification.from_pretrained(tmp_path / "trained").eval()
    with torch.no_grad():
        logits = torch.cat([model(ids[rows]).logits for rows in batches])
        assert torch.equal(torch.cat([loaded(ids[rows]).logits for rows in batches]), logits)
    assert torch.equal(logits.argmax(-1), labels)


def test_classification_reads_the_last_token_that_is_not_padding():
    model = tiny_gpt(LaplaceGPTForSequenceClassification, laplacian_heads=2, num_labels=3, pad_token_id=0)
    ids = tokens(1, 6, vocabulary=90) + 1
    padding = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        alone = model(ids).logits
        right = model(torch.cat([ids, padding], 1)).logits
        mask = torch.cat([padding, torch.ones(1, 6, dtype=torch.long)], 1)
        left = model(torch.cat([padding, ids], 1), attention_mask=mask).logits
    torch.testing.assert_close(right, alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(left, alone, atol=1e-5, rtol=0)


def test_classification_refuses_a_batch_without_a_padding_token():
    model = tiny_gpt(LaplaceGPTForSequenceClassification, laplacian_heads=2)
    with pytest.raises(ValueError, match="padding token"):
        model(tokens(2, 6))


@pytest.mark.parametrize(
    ("labels", "problem"), [(torch.tensor([0.5, 2.0]), "regression"), (torch.tensor([[1.0, 0, 1], [0, 1, 1]]), "multi")]
)
def test_classification_takes_regression_and_multi_label_targets(labels, problem):
    size = 1 if labels.ndim == 1 else 3
    model = tiny_gpt(LaplaceGPTForSequenceClassification, laplacian_heads=2, num_labels=size, pad_token_id=0)
    outputs = model(tokens(2, 6) + 0, labels=labels)
    if problem == "regression":
        expected = torch.nn.functional.mse_loss(outputs.logits.squeeze(), labels)
    else:
        expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels)
    torch.testing.assert_close(outputs.loss, expected)
