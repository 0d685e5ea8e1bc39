"""Frozen features against transformers' own outputs, and the models and images that are refused."""

import shutil

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from reference import redraw
from safetensors.torch import load_file, save_file

from laplacian_heads import LaplaceViTConfig, LaplaceViTForImageClassification, LaplaceViTModel, images
from laplacian_heads.eval import features

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
MLP = {**SHAPE, "intermediate_size": 48}
LAPLACE = {**SHAPE, "laplacian_heads": 2, "num_labels": 3}
# (class that is saved, its configuration, tokens before the patches)
MODELS = {
    "vit": (transformers.ViTModel, transformers.ViTConfig(**MLP), 1),
    "vit_classifier": (transformers.ViTForImageClassification, transformers.ViTConfig(**MLP), 1),
    "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config(**SHAPE), 1),
    "dinov2_classifier": (transformers.Dinov2ForImageClassification, transformers.Dinov2Config(**SHAPE), 1),
    "registers": (
        *(
            transformers.Dinov2WithRegistersModel,
            transformers.Dinov2WithRegistersConfig(**SHAPE, num_register_tokens=3),
        ),
        4,
    ),
    "deit": (transformers.DeiTForImageClassificationWithTeacher, transformers.DeiTConfig(**MLP), 2),
    "ijepa": (transformers.IJepaModel, transformers.IJepaConfig(**MLP), 0),
    "laplace": (LaplaceViTModel, LaplaceViTConfig(**LAPLACE), 1),
    "laplace_classifier": (LaplaceViTForImageClassification, LaplaceViTConfig(**LAPLACE), 1),
}
REFUSED = {
    "gpt2": (
        transformers.GPT2Model,
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=30, bos_token_id=0, eos_token_id=0),
        "is a gpt2 without patch_size, allowed are vision transformers",
    ),
    "convnext": (
        *(transformers.ConvNextModel, transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)),
        "is a convnext without hidden_size",
    ),
    "swin": (
        transformers.SwinModel,
        transformers.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2]),
        "does not give the hidden states of 2 blocks of one size",
    ),
    "beit": (transformers.BeitModel, transformers.BeitConfig(**MLP), "is a BeitModel, which has no final norm"),
    "clip": (
        *(transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**MLP)),
        "does not put the tokens of its last block through its final norm",
    ),
    "mae": (transformers.ViTMAEModel, transformers.ViTMAEConfig(**MLP), "is a vit_mae, which leaves out patches"),
    "grey": (transformers.ViTModel, transformers.ViTConfig(**MLP, num_channels=1), "reads images of 1 channels"),
    "ast": (
        transformers.ASTModel,
        transformers.ASTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16),
        "reads input_values, allowed are models of images alone",
    ),
}


def processor(side=32):
    return transformers.BitImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def saved(folder, kind, config):
    torch.manual_seed(0)
    model = redraw(kind(config)).eval()
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (kind, config, _) in MODELS.items():
        saved(folder / name, kind, config)
    return folder


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_transformers_own(folder, name, size):
    kind, _, before = MODELS[name]
    base = kind.from_pretrained(folder / name).eval().base_model
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    asked = {} if name in ("dinov2", "dinov2_classifier", "registers") else {"interpolate_pos_encoding": True}
    with torch.no_grad():
        output = base(pixels, output_hidden_states=True, **asked)
        states = [base.layernorm(hidden) for hidden in output.hidden_states]
    assert torch.equal(states[-1], output.last_hidden_state)
    backbone = features.load(str(folder / name))
    assert (backbone.depth, backbone.width, backbone.patch) == (3, 32, (8, 8))
    for blocks, numbers in ((1, [3]), (3, [1, 2, 3]), ([1, 3], [1, 3]), ([2], [2])):
        tokens = backbone.tokens(pixels, blocks)
        assert tokens.grid == (size[0] // 8, size[1] // 8)
        assert len(tokens.cls) == len(tokens.patches) == len(numbers)
        for cls, patches, number in zip(tokens.cls, tokens.patches, numbers, strict=True):
            patch_states = states[number][:, before:]
            assert torch.equal(patches, patch_states)
            assert torch.equal(cls, states[number][:, 0] if before else patch_states.mean(1))
            assert patches.shape == (2, tokens.grid[0] * tokens.grid[1], 32)


def test_backbone_is_frozen_and_its_tokens_can_be_learned_from(folder):
    backbone = features.load(str(folder / "laplace"))
    assert not backbone.model.training
    assert not any(parameter.requires_grad for parameter in backbone.model.parameters())
    tokens = backbone.tokens(torch.randn(2, 3, 32, 32))
    head = torch.nn.Linear(32, 2)
    (head(tokens.cls[0]).sum() + head(tokens.patches[0]).sum()).backward()
    assert head.weight.grad.abs().sum() > 0


def test_tokens_in_bfloat16_are_nearly_the_same_and_float32(folder):
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    exact, rounded = (features.load(str(folder / "vit"), bf16=bf16).tokens(pixels, 2) for bf16 in (False, True))
    for one, other in zip(exact.cls + exact.patches, rounded.cls + rounded.patches, strict=True):
        assert one.dtype == other.dtype == torch.float32
        assert not torch.equal(one, other)
        assert (one - other).norm() < 0.1 * one.norm()
    with torch.autocast("cpu", torch.bfloat16):  # of what it is used in
        assert torch.equal(features.load(str(folder / "vit")).tokens(pixels, 2).cls[1], exact.cls[1])


@pytest.mark.parametrize("blocks", [0, 4, [], [0, 1], [4], -1])
def test_blocks_that_are_not_there(folder, blocks):
    with pytest.raises(ValueError, match="allowed is 1 to 3, the blocks of"):
        features.load(str(folder / "vit")).tokens(torch.zeros(1, 3, 32, 32), blocks)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_used(tmp_path, name):
    kind, config, said = REFUSED[name]
    saved(tmp_path / name, kind, config)
    with pytest.raises(ValueError, match=said) as error:
        features.load(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_missing_processor_weight_and_model(folder, tmp_path):
    shutil.copytree(folder / "vit", tmp_path / "vit")
    (tmp_path / "vit/preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match="There is no image processor in"):
        features.load(str(tmp_path / "vit"))
    shutil.copytree(folder / "laplace", tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged/model.safetensors")
    del weights["layernorm.weight"]
    save_file(weights, tmp_path / "damaged/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="The weight layernorm.weight of .* is missing or of another shape"):
        features.load(str(tmp_path / "damaged"))
    with pytest.raises(ValueError, match="There is no folder"):
        features.load(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="There is no model in"):
        features.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="cannot be read, neither as a folder nor from the Hub"):
        features.load("nobody/nothing")


def test_newest_checkpoint_of_a_run_in_training_is_taken(folder, tmp_path):
    for step, name in ((9, "vit"), (10, "laplace")):
        shutil.copytree(folder / name, tmp_path / f"run/checkpoint-{step}")
    assert features.load(str(tmp_path / "run")).name == str(tmp_path / "run/checkpoint-10")


@pytest.fixture
def pictures(tmp_path):
    """Five pictures in each of two classes, one of which is damaged."""
    generator = np.random.default_rng(0)
    for name in ("a", "b"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(5):
            values = generator.integers(0, 255, (40, 36, 3), dtype=np.uint8)
            Image.fromarray(values).save(tmp_path / "pictures" / name / f"{i}.png")
    (tmp_path / "pictures/b/1.png").write_bytes((tmp_path / "pictures/b/2.png").read_bytes()[:300])
    return str(tmp_path / "pictures")


@pytest.mark.parametrize("workers", [0, 1])
def test_images_are_streamed(folder, pictures, workers, caplog):
    backbone, found = features.load(str(folder / "laplace")), images.load(pictures)
    batches = list(features.stream(backbone, found, 2, 4, workers))
    assert [labels.tolist() for _, labels in batches] == [[0, 0, 0, 0], [0, 1, 1], [1, 1]]  # 6 is left out
    kept = [number for number in range(10) if number != 6]
    values = processor()([found.picture(number) for number in kept], return_tensors="pt")["pixel_values"]
    tokens = backbone.tokens(values, 2)
    for block in range(2):
        for part in ("cls", "patches"):
            streamed = torch.cat([getattr(batch, part)[block] for batch, _ in batches])
            assert torch.allclose(streamed, getattr(tokens, part)[block], atol=1e-5)
    if not workers:  # another process warns for itself
        assert caplog.text.count("b/1.png cannot be read") == 1
    with pytest.raises(images.BadImageError, match=r"^data: the image .*b/1.png cannot be read \([^\n]*\)\.$"):
        list(features.stream(backbone, found, 2, 4, workers, skip=False))


def test_images_of_different_sizes_are_refused(folder, pictures):
    backbone, found = features.load(str(folder / "laplace")), images.load(pictures)
    Image.new("RGB", (80, 40)).save(f"{pictures}/a/0.png")
    backbone.processor = transformers.BitImageProcessor(size={"shortest_edge": 32}, do_center_crop=False)
    with pytest.raises(ValueError, match="The image processor makes images of 32 x 64 and of .* allowed is one size"):
        list(features.stream(backbone, found, 1, 4))


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    model = LaplaceViTModel(LaplaceViTConfig(**LAPLACE))
    with torch.no_grad():
        model.layers[1].mlp.fc1.bias[0] = float("nan")
    model.save_pretrained(tmp_path)
    transformers.BitImageProcessor().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"The weight layers.1.mlp.fc1.bias of .* is not finite everywhere"):
        features.load(str(tmp_path))
