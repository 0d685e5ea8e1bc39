"""Models loaded in 4 and 8 bits by bitsandbytes, on a processor, and LoRA trained on top of them."""

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.slow

BITS = {
    8: BitsAndBytesConfig(load_in_8bit=True),
    4: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny(hidden_size=64, head_dim=16).save_pretrained(folder)
    return folder


def weight_of(linear):
    """The weight that a quantised layer stands for."""
    weight = linear.weight
    if hasattr(weight, "quant_state"):
        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    return weight.data.float() * weight.SCB[:, None] / 127


@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_its_outputs_are_those_of_its_rounded_weights(folder, input_ids, bits):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS[bits]).eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder).eval()
    before = rounded(input_ids).logits
    replaced = 0
    for name, module in model.named_modules():
        if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            rounded.get_submodule(name).weight.copy_(weight_of(module))
            replaced += 1
    assert replaced == 2 * 6  # all but the head
    logits, expected = model(input_ids).logits, rounded(input_ids).logits
    # In 8 bits the inputs of a layer are rounded too, and in 4 bits some processors multiply in bfloat16.
    error, rounding = ((each - expected).abs().mean() for each in (logits, before))
    assert error < 0.02 * expected.abs().mean()
    if bits == 4:
        assert error < 0.2 * rounding
    for layer, other in zip(model.model.layers, rounded.model.layers, strict=True):
        assert layer.self_attn.laplacian_heads == other.self_attn.laplacian_heads != []


@pytest.mark.parametrize("bits", BITS)
def test_lora_trains_on_top(folder, input_ids, bits):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=BITS[bits])
    model = prepare_model_for_kbit_training(model)
    adapted = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=True)
    torch.manual_seed(0)
    model = get_peft_model(model, adapted)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(12):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
