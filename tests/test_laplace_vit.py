"""LaplaceViT: timm's deit3 without Laplacian heads, the naive reference with them, and usable as a model."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from PIL import Image
from reference import naive_vit, of_timm, redraw, timm_vit, tiny_vit
from safetensors.torch import load_file, save_file
from timm.layers import calculate_drop_path_rates
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForMaskedImageModeling,
    Trainer,
    TrainingArguments,
    UperNetConfig,
    UperNetForSemanticSegmentation,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
    pipeline,
)
from transformers.integrations import flash_attention

from laplacian_heads import (
    LaplaceViTBackbone,
    LaplaceViTConfig,
    LaplaceViTForImageClassification,
    LaplaceViTForMaskedImageModeling,
    LaplaceViTModel,
    recipes,
    set_laplacian_share,
)
from laplacian_heads.configuration import pair
from laplacian_heads.eval import measure
from laplacian_heads.eval.measure import GeometryRecipe
from laplacian_heads.laplacian import heads_by_layer
from laplacian_heads.modeling_laplace_vit import LaplaceViTDropPath
from laplacian_heads.train.geometry import GeometryCallback

LAYOUT = [[0, 2], [1, 2, 3]]
LAYOUTS = [0, 2, 4, [1, 3], LAYOUT, {"start_layer": 1, "increment": 3, "max_count": 3}]
TASKS = {
    LaplaceViTModel: AutoModel,
    LaplaceViTForImageClassification: AutoModelForImageClassification,
    LaplaceViTForMaskedImageModeling: AutoModelForMaskedImageModeling,
    LaplaceViTBackbone: AutoBackbone,
}


def images(batch=2, height=16, width=16, channels=3, seed=0):
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed))


def masks(batch=2, patches=16, seed=0):
    """(batch, patches), half of the patches of each image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(patches, generator=generator) < patches // 2 for _ in range(batch)])


def run(model, pixels, cotangent, seed=0):
    """Logits, and the gradients of their inner product with the cotangent."""
    model.zero_grad()
    torch.manual_seed(seed)
    logits = model(pixels)
    logits = logits if torch.is_tensor(logits) else logits.logits
    (logits * cotangent).sum().backward()
    return {"logits": logits.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def run_timm(model, plain, pixels, cotangent, seed=0):
    """`run` of a model of timm, under the names of a LaplaceViT's parameters."""
    results = run(plain, pixels, cotangent, seed)
    return {"logits": results["logits"], **{name: of_timm(name, results) for name, _ in model.named_parameters()}}


def assert_same(results, expected, tolerance):
    """Every tensor within the tolerance of the expected one, relative to the largest entry of each."""
    assert results.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (results[name] - tensor).abs().max()
        assert difference <= tolerance * max(1.0, tensor.abs().max()), f"{name} differs by {difference:.2e}"


def compare(model, plain, pixels, tolerance):
    cotangent = torch.randn(len(pixels), model.config.num_labels, generator=torch.Generator().manual_seed(1))
    assert_same(run(model, pixels, cotangent), run_timm(model, plain, pixels, cotangent), tolerance)


# Without Laplacian heads

SHAPES = {
    "square": ({}, (16, 16)),
    "smaller": ({}, (8, 8)),
    "larger": ({}, (24, 20)),
    "as many patches": ({}, (8, 32)),
    "oblong": ({"image_size": [16, 24], "patch_size": [4, 8]}, (16, 24)),
    "turned": ({"image_size": [16, 24], "patch_size": [4, 8]}, (24, 16)),
}


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "fields", [{}, {"qk_norm": True}, {"qkv_bias": False, "layer_scale_init_value": None, "num_channels": 1}]
)
def test_without_heads_it_is_deit3_of_timm(fields, shape, attn):
    sizes, (height, width) = SHAPES[shape]
    model = tiny_vit(**fields, **sizes)
    model.set_attn_implementation(attn)
    compare(model, timm_vit(model), images(2, height, width, model.config.num_channels), 1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_with_a_position_of_zero_for_cls_it_is_vit_of_transformers(training):
    """Dropout included, which timm has in other places."""
    dropout = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.2}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = tiny_vit(LaplaceViTModel, **dropout, layer_scale_init_value=None).train(training)
    config = ViTConfig(**sizes, **dropout, image_size=16, patch_size=4, layer_norm_eps=1e-6)
    plain = ViTModel(config, add_pooling_layer=False).train(training)
    weights = model.state_dict()
    positions = weights["embeddings.position_embeddings"]
    weights["embeddings.position_embeddings"] = torch.cat([torch.zeros(1, 1, 32), positions], dim=1)
    plain.load_state_dict(weights)
    outputs = []
    for each in (model, plain):
        each.set_attn_implementation("eager")
        torch.manual_seed(0)
        outputs.append(each(images()).last_hidden_state)
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    assert torch.equal(model(images()).last_hidden_state, outputs[0]) != training


# With Laplacian heads, against the naive reference


@st.composite
def cases(draw):
    """Fields of a configuration with any layout, and images for it, of its size or of another."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    indices = [sorted(draw(st.sets(st.integers(0, heads - 1)))) for _ in range(layers)]
    schedule = {"start_layer": draw(st.integers(0, 2)), "increment": draw(st.integers(0, 2)), "max_count": heads}
    patch = [draw(st.integers(2, 4)), draw(st.integers(2, 4))]
    grid = [draw(st.integers(1, 3)), draw(st.integers(1, 3))]
    fields = {
        "hidden_size": 8 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": patch,
        "image_size": [patch[0] * grid[0], patch[1] * grid[1]],
        "laplacian_heads": draw(st.sampled_from([indices, [len(entry) for entry in indices], heads // 2, schedule])),
        "laplacian_share": draw(st.sampled_from([1.0, 0.0, 0.4])),
        "attention_probs_dropout_prob": draw(st.sampled_from([0.0, 0.3])),
        "qk_norm": draw(st.booleans()),
        "qkv_bias": draw(st.booleans()),
        "layer_scale_init_value": draw(st.sampled_from([None, 0.1])),
        "num_channels": draw(st.sampled_from([1, 3])),
    }
    grid = draw(st.sampled_from([grid, [grid[1], grid[0]], [2, 3]]))
    pixels = images(2, patch[0] * grid[0], patch[1] * grid[1], fields["num_channels"], draw(st.integers(0, 99)))
    return fields, pixels


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@settings(max_examples=60, deadline=None)
@given(cases(), st.booleans())
def test_any_layout_equals_the_naive_reference(attn, case, training):
    """In training with dropout on P, of which v takes no part."""
    fields, pixels = case
    model = tiny_vit(**fields).train(training)
    model.set_attn_implementation(attn)
    compare(model, naive_vit(model), pixels, 1e-5)


FLEX_CASES = {"plain": {}, "share": {"laplacian_share": 0.4}, "qk_norm": {"qk_norm": True, "image_size": [16, 8]}}


def flex_difference(fields):
    model = tiny_vit(laplacian_heads=LAYOUT, **fields)
    pixels = images(2, *pair(model.config.image_size))
    expected = naive_vit(model)(pixels)
    model.set_attn_implementation("flex_attention")
    return (model(pixels).logits - expected).abs().max()


@torch.no_grad()  # it has no backward on CPU
@pytest.mark.parametrize("case", FLEX_CASES)
def test_flex_attention_equals_the_naive_reference(case):
    with torch.compiler.set_stance("force_eager"):
        assert flex_difference(FLEX_CASES[case]) <= 1e-5


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("case", FLEX_CASES)
def test_compiled_flex_attention_equals_the_naive_reference(case):
    assert flex_difference(FLEX_CASES[case]) <= 1e-5


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}, {"laplacian_share": 0.4}])
def test_flash_attention_equals_the_naive_reference(fields, autocast, monkeypatch):
    """The kernel is played by sdpa here, and takes tensors of one dtype as the real one does."""
    seen = []

    def kernel(query, key, value, attention_mask, query_length, is_causal, softmax_scale=None, **kwargs):
        seen.append(kwargs["attn_implementation"])
        assert not is_causal
        assert query.dtype == key.dtype == value.dtype
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=softmax_scale)
        return output.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    model = tiny_vit(laplacian_heads=LAYOUT, **fields)
    plain = naive_vit(model)
    model.config._attn_implementation_internal = "flash_attention_2"
    if autocast:
        for name, module in model.named_modules():
            if name.endswith(("q_norm", "k_norm")):  # autocast on a GPU computes norms in float32, on a CPU it does not
                module.register_forward_hook(lambda *called: called[-1].float())
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(images()).logits.float(), plain(images()).float(), atol=0.05, rtol=0.05)
    else:
        compare(model, plain, images(), 1e-5)
    assert set(seen) == {"flash_attention_2"}


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_tokens_that_are_masked_out_are_as_if_they_were_not_there(attn):
    """`attention_mask` over CLS and the patches: without the last row the images are those of a smaller model."""
    model = tiny_vit(LaplaceViTModel, laplacian_heads=LAYOUT)
    small = tiny_vit(LaplaceViTModel, laplacian_heads=LAYOUT, image_size=[12, 16])
    weights = model.state_dict()
    weights["embeddings.position_embeddings"] = weights["embeddings.position_embeddings"][:, :12]
    small.load_state_dict(weights)
    model.set_attn_implementation(attn)
    mask = torch.ones(2, 17, dtype=torch.long)
    mask[:, 13:] = 0
    with torch.no_grad():
        kept = model(images(), attention_mask=mask).last_hidden_state[:, :13]
        expected = small(images()[:, :, :12]).last_hidden_state
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("qk_norm", [False, True])
@torch.no_grad()
def test_recorded_attentions_are_p(qk_norm):
    model = tiny_vit(laplacian_heads=LAYOUT, qk_norm=qk_norm, attention_probs_dropout_prob=0.5)
    plain = naive_vit(model)
    plain(images())
    model.set_attn_implementation("eager")
    recorded = model(images(), output_attentions=True).attentions
    assert len(recorded) == 2
    for p, block in zip(recorded, plain.blocks, strict=True):
        assert p.shape == (2, 4, 17, 17)
        torch.testing.assert_close(p, block.attn.naive_p, atol=1e-6, rtol=0)
        torch.testing.assert_close(p.sum(-1), torch.ones(2, 4, 17))
        assert p.min() >= 0


@torch.no_grad()
def test_sdpa_records_no_attentions_and_says_so(caplog):
    model = tiny_vit(laplacian_heads=LAYOUT)
    assert model.config._attn_implementation == "sdpa"
    outputs = model(images(), output_attentions=True)
    assert not outputs.attentions
    assert torch.equal(outputs.logits, model(images()).logits)


@torch.no_grad()
def test_laplacian_heads_subtract_from_the_values_of_every_token():
    """What the output projection reads of a Laplacian head is v - P v, of CLS too, and P v of the others."""
    model = tiny_vit(laplacian_heads=LAYOUT)
    model.set_attn_implementation("eager")
    seen = {}
    for index, layer in enumerate(model.vit.layers):
        layer.attention.v_proj.register_forward_hook(lambda _, args, out, i=index: seen.update({("v", i): out}))
        layer.attention.o_proj.register_forward_pre_hook(lambda _, args, i=index: seen.update({("o", i): args[0]}))
    attentions = model(images(), output_attentions=True).attentions
    for index, heads in enumerate(LAYOUT):
        values, outputs = (seen[name, index].unflatten(-1, (4, 8)).transpose(1, 2) for name in "vo")
        for head in range(4):
            expected = attentions[index][:, head] @ values[:, head]
            if head in heads:
                expected = values[:, head] - expected
            torch.testing.assert_close(outputs[:, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_hidden_states_are_those_of_every_block_before_the_final_norm(layers):
    model = tiny_vit(laplacian_heads=2, num_hidden_layers=layers)
    plain = naive_vit(model)
    caught = []
    plain.blocks[0].register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    for block in plain.blocks:
        block.register_forward_hook(lambda _, args, out: caught.append(out))
    plain(images())
    outputs = model.vit(images(), output_hidden_states=True)
    assert len(outputs.hidden_states) == layers + 1
    for state, expected in zip(outputs.hidden_states, caught, strict=True):
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(model.vit.layernorm(outputs.hidden_states[-1]), outputs.last_hidden_state)
    assert torch.equal(outputs.pooler_output, outputs.last_hidden_state[:, 0])
    classified = model(images(), output_hidden_states=True)
    assert all(map(torch.equal, classified.hidden_states, outputs.hidden_states))
    assert torch.equal(model.classifier(outputs.pooler_output), classified.logits)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True}, {"laplacian_share": 0.4}])
def test_bf16_is_as_exact_as_the_naive_reference_in_bf16(attn, fields):
    """The bound is the reference's own rounding: its distance from float32, over all logits and over all gradients."""
    model = tiny_vit(laplacian_heads=LAYOUT, **fields).to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    model.set_attn_implementation(attn)
    cotangent = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    pixels = images(8)
    true = run_timm(exact, naive_vit(exact), pixels, cotangent)
    ours = run(model, pixels, cotangent.bfloat16())
    theirs = run_timm(model, naive_vit(model), pixels.bfloat16(), cotangent.bfloat16())

    def distance(result, names):
        return torch.cat([(result[name].float() - true[name]).flatten() for name in names]).norm()

    for names in (["logits"], [name for name in true if name != "logits"]):
        assert distance(ours, names) <= 1.5 * distance(theirs, names)


@torch.no_grad()
def test_set_laplacian_share_equals_building_with_it(tmp_path):
    model = tiny_vit(laplacian_heads=2)
    before = copy.deepcopy(model)
    set_laplacian_share(model, 0.3)
    model.save_pretrained(tmp_path)
    built = tiny_vit(laplacian_heads=2, laplacian_share=0.3)(images()).logits
    assert torch.equal(model(images()).logits, built)
    assert torch.equal(LaplaceViTForImageClassification.from_pretrained(tmp_path)(images()).logits, built)
    assert not torch.equal(before(images()).logits, built)


@torch.no_grad()
def test_an_image_does_not_depend_on_the_others_of_its_batch():
    model = tiny_vit(laplacian_heads=LAYOUT, qk_norm=True)
    pixels = images(3)
    separate = torch.cat([model(image[None]).logits for image in pixels])
    torch.testing.assert_close(model(pixels).logits, separate, atol=1e-5, rtol=1e-5)


# Sizes of images


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((2, 3, 18, 16), "18 x 16, allowed are multiples of the patch, 4 x 8"),
        ((2, 3, 16, 20), "16 x 20, allowed are multiples of the patch, 4 x 8"),
        ((2, 1, 16, 16), "1 channels, allowed are num_channels, 3"),
    ],
)
def test_images_of_a_wrong_shape_are_refused(shape, said):
    model = tiny_vit(patch_size=[4, 8])
    with pytest.raises(ValueError, match=said):
        model(torch.zeros(shape))


@pytest.mark.parametrize("model_class", TASKS)
def test_other_sizes_can_be_refused(model_class):
    model = tiny_vit(model_class, image_size=[16, 8])
    model(images(height=16, width=8), interpolate_pos_encoding=False)
    with pytest.raises(ValueError, match="8 x 16, allowed without interpolate_pos_encoding is image_size, 16 x 8"):
        model(images(height=8, width=16), interpolate_pos_encoding=False)


@torch.no_grad()
def test_positions_of_a_plane_stay_a_plane():
    """Interpolation keeps positions where they were: of a table that rises along one axis, the inner ones are exact."""
    model = tiny_vit(LaplaceViTModel, image_size=[32, 16])
    embeddings = model.embeddings
    rows = (torch.arange(8.0) + 0.5) / 8
    embeddings.position_embeddings.copy_(rows[:, None, None].expand(8, 4, 32).reshape(1, 32, 32))
    inner = embeddings.positions(16, 4).unflatten(1, (16, 4))[0, 4:-4]
    expected = ((torch.arange(16.0) + 0.5) / 16)[4:-4, None, None].expand_as(inner)
    torch.testing.assert_close(inner, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size", [8, [24, 12], 16])
@torch.no_grad()
def test_another_size_can_be_made_the_models_own(size, tmp_path):
    model = tiny_vit(laplacian_heads=LAYOUT)
    pixels = images(2, *pair(size))
    expected = model(pixels).logits
    model.resize_position_embeddings(size)
    model.save_pretrained(tmp_path)
    for each in (model, LaplaceViTForImageClassification.from_pretrained(tmp_path)):
        assert each.config.image_size == size
        torch.testing.assert_close(each(pixels, interpolate_pos_encoding=False).logits, expected)
    with pytest.raises(ValueError, match="image_size is 10, allowed are multiples of patch_size, 4"):
        model.resize_position_embeddings(10)


# Parameters and initialisation


@pytest.mark.parametrize("heads", [0, 3, [[0, 2]] * 12, {"start_layer": 2, "increment": 1, "max_count": 4}])
@pytest.mark.parametrize(
    ("config", "count"),
    [
        (LaplaceViTConfig.small, 22_059_496),
        (LaplaceViTConfig.base, 86_585_320),
        (lambda **fields: LaplaceViTConfig.base(qk_norm=True, **fields), 86_588_392),
        (LaplaceViTConfig.cifar, 85_169_674),
    ],
)
def test_published_sizes_have_their_parameters_for_every_layout(config, count, heads):
    with torch.device("meta"):
        assert LaplaceViTForImageClassification(config(laplacian_heads=heads)).num_parameters() == count


def fresh(model_class=LaplaceViTForImageClassification, seed=0, **fields):
    torch.manual_seed(seed)
    small = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 100}
    return model_class(LaplaceViTConfig(**{**small, "image_size": 64, "patch_size": 8, **fields}))


def assert_deit_start(named_parameters, config):
    """DeiT's `models_v2.py`: truncated normal for what is linear and for tokens, PyTorch's own for the convolution."""
    std = config.initializer_range
    for name, parameter in named_parameters:
        if "projection." in name:
            bound = std / 0.02 * (config.num_channels * config.patch_size**2) ** -0.5
            assert parameter.abs().max() <= bound, name
            assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.2), name
        elif name.endswith(("cls_token", "position_embeddings")) or parameter.ndim == 2:
            few = parameter.numel() < 1000
            assert parameter.std().item() == pytest.approx(std, rel=0.2 if few else 0.05), name
            assert abs(parameter.mean().item()) < 4 * std / parameter.numel() ** 0.5, name
            kurtosis = ((parameter - parameter.mean()) / parameter.std()).pow(4).mean().item()
            assert kurtosis == pytest.approx(3, abs=0.8 if few else 0.3), name
        elif "lambda1" in name:
            assert torch.equal(parameter, torch.full_like(parameter, config.layer_scale_init_value)), name
        elif "norm" in name and name.endswith("weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert not parameter.any(), name  # biases, and the mask token


@pytest.mark.parametrize("model_class", TASKS)
@pytest.mark.parametrize("fields", [{}, {"qk_norm": True, "layer_scale_init_value": 0.5, "initializer_range": 0.004}])
def test_initialisation_follows_deit(model_class, fields):
    model = fresh(model_class, use_mask_token=True, **fields)
    assert_deit_start(model.named_parameters(), model.config)


def test_every_layout_starts_from_the_same_weights():
    start = fresh().state_dict()
    for layout in LAYOUTS:
        other = fresh(laplacian_heads=layout).state_dict()
        assert other.keys() == start.keys()
        assert all(torch.equal(other[name], start[name]) for name in start)
    assert not torch.equal(fresh(seed=1).classifier.weight, start["classifier.weight"])


def test_what_a_checkpoint_lacks_is_initialised_and_nothing_else_is_drawn(tmp_path):
    """The model is built on the meta device, so that what is not loaded must be initialised afterwards."""
    model = redraw(fresh())
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    lacking = ("q_proj.weight", "lambda1", "position_embeddings", "projection.weight", "cls_token", "norm.bias")
    kept = {name: tensor for name, tensor in weights.items() if not name.endswith(lacking)}
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    for model_class in (LaplaceViTForImageClassification, LaplaceViTForMaskedImageModeling):
        torch.manual_seed(0)
        loaded = model_class.from_pretrained(tmp_path)
        new = [(name, each) for name, each in loaded.named_parameters() if name not in kept]
        assert len(new) > len(weights) - len(kept) - 3
        assert_deit_start(new, loaded.config)
        for name, parameter in loaded.named_parameters():
            assert name not in kept or torch.equal(parameter, kept[name])


def test_a_new_classifier_is_drawn_and_the_rest_is_loaded(tmp_path):
    model = tiny_vit(laplacian_heads=LAYOUT)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = LaplaceViTForImageClassification.from_pretrained(tmp_path, num_labels=70, ignore_mismatched_sizes=True)
    assert loaded.config.laplacian_heads == LAYOUT
    assert loaded.classifier.weight.shape == (70, 32)
    assert loaded.classifier.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not loaded.classifier.bias.any()
    for name, tensor in model.vit.state_dict().items():
        assert torch.equal(loaded.vit.state_dict()[name], tensor)


# Drop path


@pytest.mark.parametrize(("rate", "layers"), [(0.0, 3), (0.3, 1), (0.3, 2), (0.9, 12)])
def test_rates_of_drop_path(rate, layers):
    for schedule, expected in (("constant", [rate] * layers), ("linear", calculate_drop_path_rates(rate, layers))):
        model = tiny_vit(drop_path_rate=rate, drop_path_schedule=schedule, num_hidden_layers=layers)
        rates = [layer.drop_path.rate for layer in model.vit.layers]
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.99])
def test_drop_path_leaves_out_whole_images_and_keeps_the_expectation(rate):
    torch.manual_seed(0)
    branch = torch.randn(20_000, 2, 3)
    dropped = LaplaceViTDropPath(rate).train()(branch)
    kept = dropped.flatten(1).any(dim=1)
    torch.testing.assert_close(dropped[kept], branch[kept] / (1 - rate))
    assert not dropped[~kept].any()
    assert kept.float().mean().item() == pytest.approx(1 - rate, abs=5 * math.sqrt(rate * (1 - rate) / len(branch)))


def test_drop_path_is_on_both_branches_of_a_block_and_off_in_evaluation():
    """A block adds what its two branches are after drop path, each of which is left out for images of its own."""
    model = tiny_vit(LaplaceViTModel, drop_path_rate=0.5, laplacian_heads=2)
    never = tiny_vit(LaplaceViTModel, laplacian_heads=2)
    with torch.no_grad():
        assert torch.equal(model(images()).last_hidden_state, never(images()).last_hidden_state)
        model.train()
        paths, streams = [], []
        for layer in model.layers:
            layer.drop_path.register_forward_hook(lambda _, args, out: paths.append((args[0], out)))
            layer.register_forward_hook(lambda _, args, out: streams.append((args[0], out)))
        torch.manual_seed(0)
        model(images(64))
    assert len(paths) == 4
    patterns = []
    for branch, out in paths:
        kept = out.flatten(1).any(dim=1)
        patterns.append(tuple(kept.tolist()))
        torch.testing.assert_close(out, torch.where(kept[:, None, None], 2 * branch, 0.0))
        assert 16 < kept.sum() < 48
    assert len(set(patterns)) == 4
    for index, (before, after) in enumerate(streams):
        torch.testing.assert_close(after, before + paths[2 * index][1] + paths[2 * index + 1][1])


def test_drop_path_near_1_stays_finite():
    model = tiny_vit(drop_path_rate=0.9999, laplacian_heads=2).train()
    torch.manual_seed(0)
    outputs = model(images(64), labels=torch.arange(64) % 5)
    outputs.loss.backward()
    assert outputs.loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Masked images


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
@torch.no_grad()
def test_the_mask_token_takes_the_place_of_a_patch_before_positions_are_added(dtype):
    embeddings = tiny_vit(LaplaceViTModel, use_mask_token=True, image_size=[16, 24], patch_size=[4, 6]).embeddings
    pixels, mask = images(width=24), masks()
    found = embeddings(pixels, mask.to(dtype))
    for image in range(2):
        torch.testing.assert_close(found[image, 0], embeddings.cls_token[0, 0])
        for patch in range(16):
            content = embeddings.patch_embeddings(pixels)[image, patch]
            content = embeddings.mask_token[0, 0] if mask[image, patch] else content
            torch.testing.assert_close(found[image, 1 + patch], content + embeddings.position_embeddings[0, patch])


def test_the_gradient_of_masked_patches_goes_to_the_mask_token_only():
    model = tiny_vit(LaplaceViTForMaskedImageModeling, laplacian_heads=2)
    pixels, mask = images().requires_grad_(), masks()
    model(pixels, mask).reconstruction.square().sum().backward()
    reached = torch.nn.functional.unfold(pixels.grad.abs(), 4, stride=4).sum(1) > 0  # (batch, patches)
    assert torch.equal(reached, ~mask)
    assert model.vit.embeddings.mask_token.grad.abs().max() > 1e-4
    model.zero_grad()
    model(images()).reconstruction.sum().backward()
    assert model.vit.embeddings.mask_token.grad is None


@pytest.mark.parametrize("model_class", [LaplaceViTModel, LaplaceViTForImageClassification])
def test_masks_without_a_mask_token_are_refused(model_class):
    with pytest.raises(ValueError, match="bool_masked_pos is given, allowed only with use_mask_token=True"):
        tiny_vit(model_class)(images(), bool_masked_pos=masks())


@pytest.mark.parametrize("shape", [(1, 16), (2, 4, 4), (2, 17)])
def test_masks_of_a_wrong_shape_are_refused(shape):
    model = tiny_vit(LaplaceViTForMaskedImageModeling)
    with pytest.raises(ValueError, match=r"bool_masked_pos is \(.*\), allowed is \(batch, patches\), \(2, 16\)"):
        model(images(), torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
@torch.no_grad()
def test_loss_of_masked_images_equals_a_loop(dtype):
    model = tiny_vit(LaplaceViTForMaskedImageModeling, image_size=[16, 24], patch_size=[4, 6], laplacian_heads=2)
    pixels, mask = images(3, 16, 24), masks(3)
    mask[0] = False
    outputs = model(pixels, mask.to(dtype))
    errors = []
    for image in range(3):
        for patch in range(16):
            if mask[image, patch]:
                top, left = patch // 4 * 4, patch % 4 * 6
                window = (image, slice(None), slice(top, top + 4), slice(left, left + 6))
                errors.append((outputs.reconstruction[window] - pixels[window]).abs().mean())
    torch.testing.assert_close(outputs.loss, torch.stack(errors).mean())
    assert model(pixels).loss is None
    assert model(pixels, torch.zeros_like(mask)).loss == 0


@torch.no_grad()
def test_reconstruction_puts_every_pixel_in_its_place():
    """A decoder that knows the patches, laid out as the patch projection reads them, gives the image back."""
    model = tiny_vit(LaplaceViTForMaskedImageModeling, image_size=[12, 24], patch_size=[3, 4])
    pixels = torch.arange(2 * 3 * 12 * 24.0).reshape(2, 3, 12, 24) / 1000
    patches = torch.nn.functional.unfold(pixels, (3, 4), stride=(3, 4)).transpose(1, 2)
    weight = model.vit.embeddings.patch_embeddings.projection.weight
    projected = model.vit.embeddings.patch_embeddings(pixels) - model.vit.embeddings.patch_embeddings.projection.bias
    torch.testing.assert_close(projected, patches @ weight.flatten(1).T)
    model.decoder.register_forward_hook(lambda *called: patches)
    assert torch.equal(model(pixels).reconstruction, pixels)


def test_masked_images_are_learnt_and_the_encoder_is_loaded_into_a_classifier(tmp_path):
    torch.manual_seed(0)
    config = tiny_vit().config
    model = LaplaceViTForMaskedImageModeling(config)
    assert config.use_mask_token is False  # of the config that was given
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    pixels = images(8)[:, :, :1, :1].expand(-1, -1, 16, 16)  # of one colour each
    losses = []
    for step in range(30):
        losses.append(model(pixels, masks(8, seed=step)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]
    model.save_pretrained(tmp_path)
    for model_class in (LaplaceViTForImageClassification, LaplaceViTModel, LaplaceViTBackbone):
        loaded = model_class.from_pretrained(tmp_path)
        encoder = getattr(loaded, "vit", loaded).state_dict()
        assert all(torch.equal(encoder[name], tensor) for name, tensor in model.vit.state_dict().items())


# Training and precision


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return {"loss": loss.detach().float(), **{n: p.grad.float() for n, p in model.named_parameters()}}


CLASSES = {"pixel_values": images(4), "labels": torch.tensor([0, 3, 1, 4])}
MIXED = {"pixel_values": images(4), "labels": torch.rand(4, 5, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_class", [LaplaceViTForImageClassification, LaplaceViTForMaskedImageModeling])
def test_gradient_checkpointing_changes_nothing(model_class, reentrant):
    dropout = {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.1, "drop_path_rate": 0.3}
    model = tiny_vit(model_class, laplacian_heads=2, **dropout).train()
    masked = {"pixel_values": images(4), "bool_masked_pos": masks(4)}
    inputs = CLASSES if model_class is LaplaceViTForImageClassification else masked
    torch.manual_seed(0)
    expected = gradients(model, **inputs)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    model.vit.layers[0].mlp.register_forward_pre_hook(lambda *args: calls.append(1))
    torch.manual_seed(0)
    assert_same(gradients(model, **inputs), expected, 1e-6)
    assert len(calls) == 2  # forward, and again in backward


@pytest.mark.parametrize(("autocast", "inputs"), [(False, MIXED), (True, CLASSES)], ids=["float32", "autocast"])
def test_compiled_as_one_graph_equals_eager(autocast, inputs):
    model = tiny_vit(laplacian_heads=LAYOUT, qk_norm=True).train()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(model, **inputs)
        torch.compiler.reset()
        graphs = []

        def backend(graph, example_inputs):
            graphs.append(graph)
            return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)

        model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
        assert_same(gradients(model, **inputs), expected, 2**-6 if autocast else 1e-5)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "model_class", [LaplaceViTForMaskedImageModeling, pytest.param(LaplaceViTBackbone, marks=pytest.mark.slow)]
)
@torch.no_grad()
def test_other_models_compile_as_one_graph_with_drop_path_and_interpolation(model_class):
    model = tiny_vit(model_class, laplacian_heads=LAYOUT, drop_path_rate=0.5, num_hidden_layers=2).train()
    masked = {"bool_masked_pos": masks(patches=12)} if model_class is LaplaceViTForMaskedImageModeling else {}
    results = []
    for forward in (model.forward, torch.compile(model.forward, fullgraph=True, backend="eager")):
        torch.manual_seed(0)
        results.append(forward(pixel_values=images(height=12), **masked).to_tuple())
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_compiled_by_inductor_equals_eager():
    model = tiny_vit(laplacian_heads=LAYOUT, qk_norm=True).train()
    expected = gradients(model, **CLASSES)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert_same(gradients(model, **CLASSES), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_half_precision(dtype, autocast, attn, qk_norm):
    """Forward, loss and backward of images in float32, also of another size, near float32."""
    model = tiny_vit(laplacian_heads=LAYOUT, qk_norm=qk_norm, drop_path_rate=0.0)
    half = copy.deepcopy(model) if autocast else copy.deepcopy(model).to(dtype)
    half.set_attn_implementation(attn)
    assert all(parameter.dtype == (torch.float32 if autocast else dtype) for parameter in half.parameters())
    for inputs in (CLASSES, {**CLASSES, "pixel_values": images(4, 8, 20)}):
        expected = gradients(model, **inputs)
        with torch.autocast("cpu", dtype, enabled=autocast):
            results = gradients(half, **inputs)
            outputs = half(**inputs, output_hidden_states=True)
        assert outputs.logits.dtype == dtype
        assert outputs.hidden_states[-1].dtype == (torch.float32 if autocast else dtype)
        torch.testing.assert_close(results["loss"], expected["loss"], rtol=0.05, atol=0)
        assert all(p.grad.dtype == p.dtype for p in half.parameters())
        mine, true = (torch.cat([r[name].flatten() for name in expected]) for r in (results, expected))
        assert torch.nn.functional.cosine_similarity(mine, true, dim=0) > 0.99


# Labels


def test_classes_give_cross_entropy_and_mixed_labels_binary_cross_entropy_in_any_order():
    model = tiny_vit(laplacian_heads=2)
    for inputs in (CLASSES, MIXED, CLASSES, MIXED):
        outputs = model(**inputs)
        if inputs is CLASSES:
            expected = torch.nn.functional.cross_entropy(outputs.logits, inputs["labels"])
        else:
            expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, inputs["labels"])
        torch.testing.assert_close(outputs.loss, expected)
    assert model.config.problem_type is None


@pytest.mark.parametrize(
    ("problem", "classes", "labels"),
    [
        ("regression", 1, torch.tensor([0.5, 2.0])),
        ("regression", 3, torch.tensor([[0.5, 2.0, 1.0], [0.1, 0.2, 0.3]])),
        ("single_label_classification", 3, torch.tensor([2, 1])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 1, 1]])),
    ],
)
def test_problem_type_decides_the_loss(problem, classes, labels):
    model = tiny_vit(num_labels=classes, problem_type=problem)
    outputs = model(images(), labels=labels)
    logits = outputs.logits
    expected = {
        "regression": lambda: (logits.squeeze() - labels).square().mean(),
        "single_label_classification": lambda: -logits.log_softmax(-1)[[0, 1], labels].mean(),
        "multi_label_classification": lambda: (
            -(labels * logits.sigmoid().log() + (1 - labels) * (-logits).sigmoid().log()).mean()
        ),
    }[problem]()
    torch.testing.assert_close(outputs.loss, expected)


def trainer(model, folder, rows, **arguments):
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 0.05, "logging_steps": 1}
    given |= {"optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "save_strategy": "no"}
    given |= {"report_to": "none", "use_cpu": True, "seed": 0, "train_sampling_strategy": "sequential"}
    return Trainer(model, TrainingArguments(str(folder), **{**given, **arguments}), train_dataset=rows)


def labelled_rows(inputs, count=16):
    numbers = [i % 4 for i in range(count)]
    pixels = images(count)
    return [{"pixel_values": pixels[i], "labels": inputs["labels"][number]} for i, number in enumerate(numbers)]


@pytest.mark.parametrize("inputs", [CLASSES, MIXED], ids=["classes", "mixed labels"])
def test_gradient_accumulation_leaves_loss_and_gradients_alone(inputs, tmp_path):
    def logged(**arguments):
        training = trainer(tiny_vit(laplacian_heads=2), tmp_path, labelled_rows(inputs), **arguments)
        training.train()
        return torch.tensor(
            [(entry["loss"], entry["grad_norm"]) for entry in training.state.log_history if "loss" in entry]
        )

    in_four = logged(per_device_train_batch_size=1, gradient_accumulation_steps=4)
    torch.testing.assert_close(in_four, logged(), rtol=1e-4, atol=1e-4)


def test_trainer_learns_mixed_labels_and_evaluates_classes(tmp_path):
    """As with mixup: the labels of training are shares of classes, those of evaluation are classes."""
    torch.manual_seed(0)
    model = LaplaceViTForImageClassification(tiny_vit(laplacian_heads=2, layer_scale_init_value=1.0).config)
    classes = labelled_rows({"labels": torch.arange(4)}, 8)
    mixed = [{**row, "labels": torch.nn.functional.one_hot(row["labels"], 5).float()} for row in classes]
    training = trainer(model, tmp_path, mixed, max_steps=40, optim="adamw_torch", learning_rate=3e-3)
    training.compute_metrics = lambda found: {"right": (found.predictions.argmax(-1) == found.label_ids).mean()}
    before = training.evaluate(classes)
    training.train()
    after = training.evaluate(classes)
    assert after["eval_loss"] < before["eval_loss"]
    assert after["eval_right"] == 1
    training.save_model(str(tmp_path / "trained"))
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "trained")
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)


def test_lora_on_every_linear_layer_trains_merges_and_keeps_a_new_classifier(tmp_path):
    torch.manual_seed(0)
    base = tiny_vit(laplacian_heads=LAYOUT)
    lora = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["classifier"])
    model = get_peft_model(copy.deepcopy(base), lora)
    adapted = [name.partition(".lora_A")[0] for name, _ in model.named_modules() if "lora_A" in name]
    assert {name.rpartition(".")[2] for name in adapted} == {"q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"}
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    losses = []
    for _ in range(40):
        losses.append(model(**CLASSES).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    model.eval().save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(copy.deepcopy(base), tmp_path).eval()
    with torch.no_grad():
        logits = model(images()).logits
        torch.testing.assert_close(loaded(images()).logits, logits)
        torch.testing.assert_close(model.merge_and_unload()(images()).logits, logits, atol=1e-4, rtol=1e-4)


# Export


@torch.no_grad()
@pytest.mark.parametrize("layout", [0, 4, LAYOUT], ids=["no head", "every head", "mixed"])
@pytest.mark.parametrize("size", [16, 12])
def test_torch_export_gives_equal_logits_for_another_batch(layout, size):
    model = tiny_vit(laplacian_heads=layout, qk_norm=True)

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, pixels):
            return self.model(pixels).logits

    sizes = {"pixels": {0: torch.export.Dim("batch")}}
    program = torch.export.export(Logits(), (images(2, size, size),), dynamic_shapes=sizes)
    other = images(5, size, size, seed=1)
    torch.testing.assert_close(program.module()(other), model(other).logits, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.slow
def test_onnx_gives_equal_logits_for_another_batch(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = tiny_vit(laplacian_heads=LAYOUT, qk_norm=True)
    sizes = {"pixel_values": {0: torch.export.Dim("batch")}}
    torch.onnx.export(model, (images(),), tmp_path / "vit.onnx", dynamic_shapes=sizes, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "vit.onnx", providers=["CPUExecutionProvider"])
    other = images(5, seed=1)
    (logits,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    torch.testing.assert_close(torch.as_tensor(logits), model(other).logits, atol=1e-5, rtol=1e-4)


# Saving and loading


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model_class", TASKS)
@torch.no_grad()
def test_saved_and_loaded_model_is_equal(model_class, layout, tmp_path):
    model = tiny_vit(model_class, laplacian_heads=layout, qk_norm=True, image_size=[16, 12])
    model.save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names == {name for name, _ in model.named_parameters()} == set(model.state_dict())
    # AutoBackbone of transformers 5.24 takes any folder for a repository of the Hub.
    loaders = [model_class] if model_class is LaplaceViTBackbone else [model_class, TASKS[model_class]]
    assert type(TASKS[model_class].from_config(model.config)) is model_class
    for loader in loaders:
        loaded, info = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is model_class
        assert not any(info.values())
        assert not loaded.training
        assert loaded.config.to_dict().items() >= {"laplacian_heads": layout, "qk_norm": True}.items()
        pixels = images(width=12)
        for one, other in zip(loaded(pixels).to_tuple(), model(pixels).to_tuple(), strict=True):
            assert all(map(torch.equal, one, other))


@torch.no_grad()
def test_base_models_load_from_a_classifier_and_a_classifier_from_a_base_model(tmp_path):
    model = tiny_vit(laplacian_heads=LAYOUT)
    model.save_pretrained(tmp_path / "classifier")
    expected = model.vit(images()).last_hidden_state
    base = LaplaceViTModel.from_pretrained(tmp_path / "classifier")
    assert torch.equal(base(images()).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    classifier = LaplaceViTForImageClassification.from_pretrained(tmp_path / "base")
    assert torch.equal(classifier.vit(images()).last_hidden_state, expected)
    backbone = LaplaceViTBackbone.from_pretrained(tmp_path / "classifier", reshape_hidden_states=False)
    assert torch.equal(backbone(images()).feature_maps[0], expected)


@torch.no_grad()
def test_tuples_are_the_outputs_in_order_and_a_model_without_classes_gives_its_features():
    for model_class in TASKS:
        model = tiny_vit(model_class, laplacian_heads=LAYOUT)
        options = {"output_hidden_states": True, "output_attentions": True}
        model.set_attn_implementation("eager")
        named, plain = model(images(), **options), model(images(), **options, return_dict=False)
        assert isinstance(plain, tuple)
        assert len(plain) == len(named.to_tuple()) >= 3
        for one, other in zip(named.to_tuple(), plain, strict=True):
            assert all(map(torch.equal, one, other))
    model = tiny_vit(num_labels=0)
    assert torch.equal(model(images()).logits, model.vit(images()).pooler_output)


@torch.no_grad()
def test_pipelines_take_pictures(tmp_path):
    names = dict(enumerate("abcde"))
    model = tiny_vit(laplacian_heads=LAYOUT, id2label=names, label2id={name: number for number, name in names.items()})
    processor = ViTImageProcessorPil(size={"height": 16, "width": 16})
    for each in (model, processor):
        each.save_pretrained(tmp_path)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    classify = pipeline("image-classification", str(tmp_path), top_k=5)
    pixels = classify.image_processor(picture, return_tensors="pt")["pixel_values"]
    found = classify(picture)
    expected = model(pixels).logits[0].softmax(-1)
    scores = {each["label"]: each["score"] for each in found}
    assert scores == pytest.approx({names[i]: p.item() for i, p in enumerate(expected)}, abs=1e-6)
    features = pipeline("image-feature-extraction", str(tmp_path))(picture)
    torch.testing.assert_close(torch.tensor(features), model.vit(pixels).last_hidden_state, atol=1e-5, rtol=1e-5)


# Backbone


@pytest.mark.parametrize("layernorm", [True, False])
@pytest.mark.parametrize("reshape", [True, False])
@torch.no_grad()
def test_feature_maps_are_the_hidden_states_of_their_stages(reshape, layernorm):
    fields = {"num_hidden_layers": 3, "image_size": [16, 24], "laplacian_heads": 2, "out_indices": [0, 2, 3]}
    fields |= {"reshape_hidden_states": reshape, "apply_layernorm": layernorm}
    backbone = tiny_vit(LaplaceViTBackbone, **fields)
    assert backbone.out_features == ["stem", "stage2", "stage3"]
    assert backbone.channels == [32, 32, 32]
    for height, width in ((16, 24), (24, 8)):
        pixels = images(2, height, width)
        outputs = backbone(pixels, output_hidden_states=True)
        states = LaplaceViTModel.forward(backbone, pixels, output_hidden_states=True).hidden_states
        assert all(map(torch.equal, outputs.hidden_states, states))
        assert len(outputs.feature_maps) == 3
        for found, stage in zip(outputs.feature_maps, (0, 2, 3), strict=True):
            state = backbone.layernorm(states[stage]) if layernorm else states[stage]
            if not reshape:
                assert torch.equal(found, state)
                continue
            assert found.shape == (2, 32, height // 4, width // 4)
            for row in range(height // 4):
                for column in range(width // 4):
                    assert torch.equal(found[:, :, row, column], state[:, 1 + row * (width // 4) + column])
    assert backbone(pixels).hidden_states is None


@pytest.mark.parametrize(
    ("fields", "stages"),
    [
        ({}, ["stage3"]),
        ({"out_indices": [-1]}, ["stage3"]),
        ({"out_indices": (1, 2)}, ["stage1", "stage2"]),
        ({"out_features": ["stem", "stage3"]}, ["stem", "stage3"]),
    ],
)
def test_stages_of_a_backbone_are_saved(fields, stages, tmp_path):
    backbone = tiny_vit(LaplaceViTBackbone, num_hidden_layers=3, **fields)
    backbone.save_pretrained(tmp_path)
    for each in (backbone, LaplaceViTBackbone.from_pretrained(tmp_path)):
        assert each.out_features == stages
        assert len(each(images()).feature_maps) == len(stages)
    backbone.out_indices = [1]
    assert len(backbone(images()).feature_maps) == 1
    assert backbone.out_features == ["stage1"]


def test_backbone_gradients_reach_every_parameter():
    backbone = tiny_vit(LaplaceViTBackbone, laplacian_heads=LAYOUT, out_indices=[1, 2])
    sum(found.square().sum() for found in backbone(images()).feature_maps).backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in backbone.parameters())


def test_a_segmentation_model_of_transformers_takes_it_as_backbone(tmp_path):
    backbone = tiny_vit(num_hidden_layers=4, laplacian_heads=2, out_indices=[1, 2, 3, 4], image_size=32).config
    sizes = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_in_channels": 32, "auxiliary_channels": 8}
    model = redraw(UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone, num_labels=3, **sizes)))
    assert type(model.backbone) is LaplaceViTBackbone
    pixels, labels = images(2, 32, 48), torch.randint(3, (2, 32, 48), generator=torch.Generator().manual_seed(0))
    outputs = model(pixels, labels=labels)
    assert outputs.logits.shape == (2, 3, 32, 48)
    outputs.loss.backward()
    assert model.backbone.embeddings.cls_token.grad.abs().max() > 0
    model.eval().save_pretrained(tmp_path)
    loaded = UperNetForSemanticSegmentation.from_pretrained(tmp_path)
    assert loaded.config.backbone_config.laplacian_heads == 2
    assert loaded.backbone.layers[0].attention.laplacian_heads == [2, 3]
    with torch.no_grad():
        assert torch.equal(loaded(pixels).logits, model(pixels).logits)


# Configuration


@pytest.mark.parametrize(
    "fields",
    [
        *({"num_labels": count} for count in (0, 1, 2, 5, 1000)),
        {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}},
        *({"laplacian_heads": layout} for layout in LAYOUTS[:3]),
        {"laplacian_heads": [[0, 2]] * 12, "laplacian_share": 0.25},
        {"laplacian_heads": ((0, 2),) * 12},
        {"laplacian_heads": [1, 3] * 6},
        {"laplacian_heads": {"start_layer": 1, "increment": 3, "max_count": 3}},
        {"image_size": [64, 32], "patch_size": [4, 2]},
        {"image_size": (64, 32), "patch_size": 2},
        {"layer_scale_init_value": None, "qk_norm": True, "qkv_bias": False, "use_mask_token": True},
        {"drop_path_rate": 0.1, "drop_path_schedule": "linear", "attention_probs_dropout_prob": 0},
        {"out_features": ["stage2", "stage12"], "apply_layernorm": False, "reshape_hidden_states": False},
        {"out_indices": [0, -1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("trip", ["json", "dict", "folder", "auto"])
def test_config_round_trip_leaves_the_meaning_unchanged(fields, trip, tmp_path):
    saved = LaplaceViTConfig(**fields)
    if trip == "json":
        loaded = LaplaceViTConfig(**json.loads(saved.to_json_string(use_diff=False)))
    elif trip == "dict":
        loaded = LaplaceViTConfig.from_dict(saved.to_diff_dict())
    else:
        saved.save_pretrained(tmp_path)
        loaded = (LaplaceViTConfig if trip == "folder" else AutoConfig).from_pretrained(tmp_path)
    assert type(loaded) is LaplaceViTConfig
    assert {**loaded.to_dict(), "_name_or_path": ""} == saved.to_dict()
    assert loaded.out_features == saved.out_features
    for name, value in fields.items():
        if name == "out_indices":
            continue
        as_json = value if name == "id2label" else json.loads(json.dumps(value))
        assert getattr(loaded, name) == getattr(saved, name) == as_json, name
    heads = [loaded.num_attention_heads] * loaded.num_hidden_layers
    assert heads_by_layer(loaded.laplacian_heads, heads) == heads_by_layer(fields.get("laplacian_heads", 0), heads)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(
            ({name: 0}, f"{name} is 0, allowed is an integer of at least 1")
            for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels")
        ),
        ({"hidden_size": 100}, "num_attention_heads is 12, allowed are divisors of hidden_size 100"),
        ({"image_size": 100}, "image_size is 100, allowed are multiples of patch_size, 16"),
        ({"image_size": [224, 100]}, r"image_size is \[224, 100\], allowed are multiples of patch_size, 16"),
        ({"image_size": 0}, "image_size is 0, allowed are multiples of patch_size, 16"),
        ({"image_size": [224]}, r"image_size is \[224\], allowed is an integer or \[height, width\]"),
        ({"patch_size": [4, 4, 4]}, r"patch_size is \[4, 4, 4\], allowed is an integer or \[height, width\]"),
        ({"patch_size": 0}, "patch_size is 0, allowed are integers of at least 1"),
        ({"patch_size": [4, -4]}, r"patch_size is \[4, -4\], allowed are integers of at least 1"),
        *(
            ({name: value}, f"{name} is {value}, allowed is a number from 0 to below 1")
            for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate")
            for value in (1, -0.1, math.nan)
        ),
        ({"drop_path_schedule": "cosine"}, "drop_path_schedule is 'cosine', allowed are constant and linear"),
        ({"laplacian_heads": 13}, "laplacian_heads: the count is 13 in layer 0, allowed is .* 12"),
        ({"laplacian_heads": [1, 2]}, "has 2 entries, the model has 12 layers"),
        ({"laplacian_share": -1.0}, "laplacian_share is -1.0, allowed is a finite number of at least 0"),
        ({"laplacian_head": 2}, "There is no field laplacian_head, allowed are laplacian_heads and laplacian_share"),
        ({"format_version": 2}, "format_version is 2, allowed is 1 to 1: newer code saved the model"),
        ({"out_features": ["stage13"]}, "out_features must be a subset of stage_names"),
        ({"out_indices": [2, 1]}, "out_indices must be in the same order as stage_names"),
    ],
    ids=str,
)
def test_wrong_value_is_named_with_what_is_allowed(fields, said):
    with pytest.raises(ValueError, match=said):
        LaplaceViTConfig(**fields)
    saved = {name: value for name, value in LaplaceViTConfig().to_dict().items() if not name.startswith("out_")}
    with pytest.raises(ValueError, match=said):
        LaplaceViTConfig.from_dict({**saved, **fields})


def test_config_does_not_share_the_callers_lists():
    heads, size = [[0], [1]], [32, 16]
    kept = LaplaceViTConfig(num_hidden_layers=2, laplacian_heads=heads, image_size=size)
    heads[0].append(3)
    size[0] = 1
    assert kept.laplacian_heads == [[0], [1]]
    assert kept.image_size == [32, 16]


def test_named_sizes_take_overrides():
    small = LaplaceViTConfig.small(num_labels=7, drop_path_rate=0.05, laplacian_heads=2)
    assert (small.hidden_size, small.num_attention_heads, small.num_labels, small.laplacian_heads) == (384, 6, 7, 2)
    cifar = LaplaceViTConfig.cifar(id2label={i: str(i) for i in range(100)})
    assert (cifar.image_size, cifar.patch_size, cifar.num_labels, cifar.hidden_size) == (32, 4, 100, 768)
    assert LaplaceViTConfig.base().num_labels == 1000
    assert LaplaceViTConfig(hidden_size=24, num_attention_heads=3).intermediate_size == 96


# Geometry


def test_geometry_is_logged_while_it_trains(tmp_path):
    model = tiny_vit(laplacian_heads=LAYOUT)
    training = trainer(model, tmp_path, labelled_rows(CLASSES), max_steps=2)
    held_out = labelled_rows(CLASSES, 4)
    training.add_callback(GeometryCallback(training, held_out, steps=2))
    training.train()
    logged = {name: value for entry in training.state.log_history for name, value in entry.items() if "/" in name}
    with torch.no_grad():
        pixels = torch.stack([row["pixel_values"] for row in held_out])
        states = model.eval()(pixels, output_hidden_states=True).hidden_states
    for layer, hidden in enumerate(states):
        hidden = hidden.double()
        within = (hidden - hidden.mean(1, keepdim=True)).square().sum()
        share = within / (hidden - hidden.mean((0, 1))).square().sum()
        assert logged[f"geometry/within_sequence_share/layer_{layer:02}"] == pytest.approx(share.item(), rel=1e-5)
    norms = {f"gradient_norm/{part}" for part in ("embedding", "layer_01", "layer_02")}
    assert norms <= logged.keys()


def test_geometry_of_pictures_is_measured(tmp_path):
    model = tiny_vit(laplacian_heads=LAYOUT, id2label={0: "dark", 1: "light"}, label2id={"dark": 0, "light": 1})
    for each in (model, ViTImageProcessorPil(size={"height": 16, "width": 16})):
        each.save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 120)):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(4):
            picture = Image.fromarray(generator.integers(low, low + 120, (20, 20, 3), dtype=np.uint8))
            picture.save(tmp_path / "pictures" / name / f"{number}.png")
    given = {"models": [str(tmp_path / "model")], "data": str(tmp_path / "pictures"), "layers": [0, -1]}
    metrics = ["variance", "attention_entropy", "collapse"]
    measure.geometry(recipes.load(GeometryRecipe, "geometry", {**given, "metrics": metrics}))
    found = json.loads((tmp_path / "model" / "geometry.json").read_text())
    layers = found["layers"]
    assert (found["sequences"], found["classes_are"], len(layers)) == (8, "labels", 3)
    assert all(len(layer["attention_entropy"]["nats"]) == 4 for layer in layers[1:])
    assert "collapse" in layers[-1]
