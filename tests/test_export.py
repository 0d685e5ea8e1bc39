"""Graphs and serving engines: exported models compute the same, and engines find what they read where they read it."""

import copy
import json

import pytest
import torch
from reference import redraw
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter
from transformers.exporters.utils import decompose_for_generation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laplacian_heads import LaplaceGPTModel, laplacianize

LAPLACEGPT_LAYOUTS = {"no head": 0, "every head": 4, "mixed": [[0, 2], [1, 2, 3]]}


def laplacianized_llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=300, num_attention_heads=4, num_key_value_heads=2, **sizes)
    return redraw(laplacianize(LlamaForCausalLM(config), LAPLACEGPT_LAYOUTS["mixed"])).eval()


@pytest.fixture(params=[*LAPLACEGPT_LAYOUTS, "laplacianized Llama"])
def model(request, tiny):
    if request.param in LAPLACEGPT_LAYOUTS:
        return tiny(laplacian_heads=LAPLACEGPT_LAYOUTS[request.param])
    return laplacianized_llama()


@torch.no_grad()
def test_torch_export_gives_equal_logits_at_other_sizes(model, input_ids):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            return self.model(input_ids, use_cache=False).logits

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", min=2, max=100)}
    program = torch.export.export(Logits(), (input_ids,), dynamic_shapes={"input_ids": sizes})
    other = input_ids[:1, :7]
    torch.testing.assert_close(program.module()(other), model(other).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("exporter", "config"),
    [
        pytest.param(DynamoExporter, DynamoConfig(dynamic=True), id="dynamo"),
        pytest.param(OnnxExporter, OnnxConfig(dynamic=True), id="onnx"),
        pytest.param(OnnxExporter, OnnxConfig(dynamic=False), id="onnx of one size", marks=pytest.mark.slow),
    ],
)
def test_exporters_of_transformers_give_equal_logits(exporter, config, model, input_ids):
    """With left padding, and where the sizes are dynamic with others than those of the export."""
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    exported = exporter().export(model, {**inputs, "use_cache": False}, config=config)
    inputs["attention_mask"][0, :3] = 0
    if config.dynamic:
        inputs = {name: value[:, :9] for name, value in inputs.items()}
    logits = torch.as_tensor(exported(**inputs)["logits"])
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[kept], model(**inputs).logits[kept], atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(("exporter", "config"), [(DynamoExporter, DynamoConfig), (OnnxExporter, OnnxConfig)])
def test_exported_prefill_and_cached_step_give_equal_logits(exporter, config, model, input_ids):
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    for part, part_inputs in decompose_for_generation(model, inputs).values():
        expected = part(**copy.deepcopy(part_inputs)).logits
        exported = exporter().export(part, copy.deepcopy(part_inputs), config=config(dynamic=True))
        logits = torch.as_tensor(exported(**part_inputs)["logits"])
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


# vLLM's Transformers backend and SGLang's, as far as a model can see them: one row that holds the tokens of every
# request, no mask and no cache, an attention function that returns (tokens, heads * dim) and finds what it needs in
# `attention_instances`, which the model must pass down untouched.


INSTANCES = {0: "attention of layer 0", 1: "attention of layer 1"}


@pytest.fixture
def engine():
    """An attention backend like theirs, registered as "engine"; `calls` lists the layers that called it."""

    def attention(module, query, key, value, attention_mask, attention_instances=None, scaling=None, **kwargs):
        assert attention_mask is None
        assert query.shape[0] == 1
        assert attention_instances is INSTANCES
        assert scaling == module.scaling == query.shape[-1] ** -0.5
        attention.calls.append(module.layer_idx)
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, scale=scaling, is_causal=module.is_causal, enable_gqa=True
        )
        return output.transpose(1, 2).reshape(query.shape[2], -1), None

    attention.calls = []
    ALL_ATTENTION_FUNCTIONS["engine"] = attention
    yield attention
    del ALL_ATTENTION_FUNCTIONS["engine"]


@torch.no_grad()
@pytest.mark.parametrize("family", ["LaplaceGPT", "laplacianized Llama"])
def test_engine_backend_gives_the_same_hidden_states(family, engine, tiny, input_ids):
    model = tiny(LaplaceGPTModel) if family == "LaplaceGPT" else laplacianized_llama().model
    ids = input_ids[:1]
    expected = model(ids).last_hidden_state
    model.set_attn_implementation("engine")
    (hidden,) = model(
        input_ids=ids,
        position_ids=torch.arange(ids.shape[1])[None],
        attention_instances=INSTANCES,
        use_cache=False,
        return_dict=False,
    )
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)
    assert engine.calls == [0, 1]


@pytest.mark.parametrize("family", ["LaplaceGPT", "laplacianized Llama"])
def test_saved_model_is_what_engines_look_for(family, tiny, tmp_path):
    """config.json and the attributes of the base model, which is the only class the engines build."""
    if family == "LaplaceGPT":
        model, base = tiny(), "modeling_laplace_gpt.LaplaceGPTModel"
    else:
        model, base = laplacianized_llama(), "laplacian.LaplacianLlamaModel"
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == base
    assert config["num_attention_heads"] == 4
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 8
    assert config["vocab_size"] == 300
    assert config["max_position_embeddings"] > 0
    assert config["tie_word_embeddings"] is False
    if family == "LaplaceGPT":
        assert config["final_logit_softcapping"] == 15.0

    model = model.base_model
    assert model._supports_attention_backend
    assert type(model.get_input_embeddings()) is torch.nn.Embedding
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "o_proj")]
    assert [attention.layer_idx for attention in attentions] == [0, 1]
    for attention in attentions:
        assert attention.is_causal
        assert attention.scaling == 8**-0.5
    assert set(model.config.base_model_tp_plan.values()) <= {"colwise", "rowwise"}  # the engines know no other
