"""What a run needs: parameters, tokens or images, FLOPs, memory and hours, known before it starts."""

import platform
import time
from collections.abc import Callable

import torch
import yaml
from torch._subclasses import FakeTensorMode
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from laplacian_heads.configuration import LaplaceGPTConfig, LaplaceViTConfig, pair
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.modeling_laplace_vit import LaplaceViTForImageClassification, LaplaceViTModel
from laplacian_heads.recipes import SHIPPED

H100_FLOPS = 989e12  # dense bf16 (NVIDIA's data sheet)
UTILISATION = 0.45  # of the peak; nanochat's d20 on eight H100 (its report at 01f5f10) is near it


def parameters(config: LaplaceGPTConfig) -> int:
    """Number of parameters of a model, counted without making them."""
    with torch.device("meta"):
        return LaplaceGPTForCausalLM(config).num_parameters()


def flops_per_token(config: LaplaceGPTConfig, context: int) -> int:
    """FLOPs of forward and backward for one token, as nanochat counts them (`GPT.estimate_flops` at 01f5f10): six for
    every parameter but the token embedding's, and twelve for each query component and position in view."""
    counted = parameters(config) - config.vocab_size * config.hidden_size
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 6 * counted + 12 * attention * context


def memory(config: LaplaceGPTConfig, rows: int, bf16: bool, gradient_checkpointing: bool) -> tuple[int, int]:
    """Bytes a process needs for a step, without parallelism over parameters.

    Args:
        rows: rows of max_position_embeddings tokens at a time.
        bf16: whether matrices are multiplied in bfloat16 under autocast.

    Returns:
        Bytes of weights, gradients and optimizer state in float32; bytes of what the forward pass keeps for the
        backward pass, counted on a model without data. What else a device holds for a moment comes on top.
    """
    with FakeTensorMode():
        model = LaplaceGPTForCausalLM(config)
        embeddings = sum(p.numel() for p in {model.get_input_embeddings().weight, model.get_output_embeddings().weight})
        matrices = model.num_parameters() - embeddings
        ids = torch.zeros(rows, model.config.max_position_embeddings, dtype=torch.long)
        kept = _kept_bytes(model, lambda: model(ids, labels=ids), bf16, gradient_checkpointing)
    return matrices * (4 + 4 + 4) + embeddings * (4 + 4 + 8), kept


def _kept_bytes(model: PreTrainedModel, forward: Callable, bf16: bool, gradient_checkpointing: bool) -> int:
    if gradient_checkpointing:
        # the new name, since transformers 5.24
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    model.train()
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            kept[storage._cdata] = storage.nbytes(), storage  # the storage too: a freed one's address is used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", enabled=bf16):
        forward()
    return sum(size for size, _ in kept.values())


def matmul_flops(bf16: bool) -> float:
    """FLOPs a second of a matrix product on this machine's device, measured in about a second."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    size = 1024 if device.type == "cpu" else 8192
    generator = torch.Generator(device).manual_seed(0)  # the random state of a run stays as it is
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if bf16 else torch.float32, generator=generator)
    best = 0.0
    started = time.perf_counter()
    while time.perf_counter() - started < 1:
        before = time.perf_counter()
        (a @ a)[0, 0].item()  # .item() waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - before))
    return best


def hardware(processes: int) -> str:
    """What a run is trained on, as "8 x NVIDIA H100" or "2 threads of x86_64".

    Args:
        processes: of the training, each on a device of its own or all on one processor.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return f"{processes * torch.get_num_threads()} threads of {platform.machine()}"
    name = torch.cuda.get_device_name() if accelerator.type == "cuda" else accelerator.type
    return f"{processes} x {name}"


def report(recipe, steps: int) -> None:
    """Print the budget of a stage that trains on from a model, of which only the configuration is needed.

    Raises:
        ValueError: the model is not there, and no shipped recipe makes it.
    """
    config = _config_of(recipe.model)
    config.max_position_embeddings = recipe.context
    print(describe(config, steps, recipe.rows_per_step, recipe.batch_size, recipe.bf16, recipe.gradient_checkpointing))


def _config_of(model: str) -> LaplaceGPTConfig:
    """The configuration of a model, or of the one that a shipped recipe will write there."""
    try:
        return LaplaceGPTConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        for path in SHIPPED.glob("*.yaml"):
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            if values.get("output") == model and values.get("model"):
                return _config_of(values["model"])
            if values.get("output") == model and "vocab_size" in values and "hidden_size" in values:
                names = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "laplacian_heads")
                return LaplaceGPTConfig(**{name: values[name] for name in names})
        raise ValueError(f"There is no LaplaceGPT in {model}, on whose size the budget depends.") from error


def describe(
    config: LaplaceGPTConfig, steps: int, rows_per_step: int, rows: int, bf16: bool, gradient_checkpointing: bool
) -> str:
    """The budget of a run as a table of text, an upper bound where rows are padded."""
    per_step = rows_per_step * config.max_position_embeddings
    flops = flops_per_token(config, config.max_position_embeddings)
    total = flops * steps * per_step
    states, kept = memory(config, rows, bf16, gradient_checkpointing)
    return _table(
        {
            "parameters": f"{parameters(config):,}",
            "tokens": f"{steps * per_step:,}",
            "steps": f"{steps:,} of {per_step:,} tokens",
            "FLOPs": f"{total:.2e}, {flops:.6e} a token",
            "memory": _memory(states, kept, f"{rows} rows"),
            "hours": _hours(total, bf16),
        }
    )


def _forward_flops(config: LaplaceViTConfig, image_size: int | list[int]) -> int:
    """FLOPs of LaplaceViTModel for one image, counted as for a token of a language model; the backward pass has twice
    as many."""
    with torch.device("meta"):
        model = LaplaceViTModel(config)
    blocks, patches = (part.parameters() for part in (model.layers, model.embeddings.patch_embeddings))
    blocks, patches = (sum(p.numel() for p in part if p.ndim > 1) for part in (blocks, patches))
    (height, width), (patch_height, patch_width) = pair(image_size), pair(config.patch_size)
    tokens = (height // patch_height) * (width // patch_width) + 1
    attention = config.num_hidden_layers * config.hidden_size * tokens
    return 2 * (blocks * tokens + patches * (tokens - 1)) + 4 * attention * tokens


def flops_per_image(config: LaplaceViTConfig) -> int:
    """FLOPs of forward and backward of a classifier for one image of the model's size."""
    return 3 * _forward_flops(config, config.image_size) + 6 * config.hidden_size * config.num_labels


def flops_per_dino_image(recipe) -> int:
    """FLOPs of a step of `dino` for one image: the student forward and backward on all crops, the teacher forward on
    the global ones, and the heads, also of as many masked patches as there are on average."""
    config, large = recipe.config(), _forward_flops(recipe.config(), recipe.image_size)
    small = recipe.local_crops * _forward_flops(config, recipe.local_size)
    width, bottleneck = recipe.head_hidden_size, recipe.head_bottleneck_size
    head = config.hidden_size * width + width**2 + width * bottleneck
    masked = 0
    if recipe.masks:
        patches = (recipe.image_size // recipe.patch_size) ** 2
        masked = 2 * recipe.mask_probability * sum(recipe.mask_ratio) / 2 * patches
    of_image = head + bottleneck * recipe.prototypes
    of_patch = head + bottleneck * (recipe.patch_prototypes or recipe.prototypes)
    student = 2 * large + small + 2 * ((2 + recipe.local_crops) * of_image + masked * of_patch)
    teacher = 2 * large + 2 * (2 * of_image + masked * of_patch)
    return round(3 * student + teacher)


def describe_dino(recipe, steps: int) -> str:
    """The budget of a run of `dino` as a table of text."""
    flops = flops_per_dino_image(recipe)
    total = flops * steps * recipe.images_per_step
    crops = {2: recipe.image_size, recipe.local_crops: recipe.local_size}
    with FakeTensorMode(), no_init_weights():
        student = recipe.network()
        kept = sum(
            _kept_bytes(
                student.vit,
                lambda number=number, size=size: student.vit(torch.zeros(number * recipe.batch_size, 3, size, size)),
                *(recipe.bf16, recipe.gradient_checkpointing),
            )
            for number, size in crops.items()
            if number
        )
        backbone, count = student.vit.num_parameters(), student.num_parameters()
    rows = recipe.batch_size * (2 + recipe.local_crops)
    return _table(
        {
            "parameters": f"{backbone:,}, and {count - backbone:,} of the heads",
            "images": f"{steps * recipe.images_per_step:,}",
            "steps": f"{steps:,} of {recipe.images_per_step:,} images",
            "FLOPs": f"{total:.2e}, {flops:.6e} an image",
            "memory": _memory(count * (4 + 4 + 8 + 4), kept, f"{recipe.batch_size} images")
            + f"; logits of {rows} crops are {rows * recipe.prototypes * 4 / 1e9:.2g} GB in float32",
            "hours": _hours(total, recipe.bf16),
        }
    )


def describe_classifier(
    config: LaplaceViTConfig,
    steps: int,
    images_per_step: int,
    batch_size: int,
    bf16: bool,
    gradient_checkpointing: bool,
    averaged: bool,
) -> str:
    """The budget of an image classifier's run as a table of text.

    Args:
        batch_size: images that a process computes at a time.
        averaged: whether an average of the weights is kept.
    """
    flops = flops_per_image(config)
    total = flops * steps * images_per_step
    with FakeTensorMode(), no_init_weights():  # drawing truncated normals looks at values
        model = LaplaceViTForImageClassification(config)
        pixels = torch.zeros(batch_size, config.num_channels, *pair(config.image_size))
        kept = _kept_bytes(model, lambda: model(pixels), bf16, gradient_checkpointing)
        count = model.num_parameters()
    states = count * (4 + 4 + 8 + 4 * averaged)
    classes = "" if config.num_labels else ", and of the classifier, whose classes are known when the data are there"
    return _table(
        {
            "parameters": f"{count:,}{classes}",
            "images": f"{steps * images_per_step:,}",
            "steps": f"{steps:,} of {images_per_step:,} images",
            "FLOPs": f"{total:.2e}, {flops:.6e} an image",
            "memory": _memory(states, kept, f"{batch_size} images"),
            "hours": _hours(total, bf16),
        }
    )


def _memory(states: int, kept: int, batch: str) -> str:
    return (
        f"{states / 1e9:.2g} GB of weights, gradients and optimizer state, and {kept / 1e9:.2g} GB kept for the "
        f"backward pass of {batch}, in each process"
    )


def _hours(flops: float, bf16: bool) -> str:
    here = matmul_flops(bf16)
    return (
        f"{flops / (H100_FLOPS * UTILISATION) / 3600:.2g} H100 hours at {UTILISATION:.0%} of the peak; "
        f"{flops / (here * UTILISATION) / 3600:.2g} hours here, at {UTILISATION:.0%} of {here / 1e12:.2g} TFLOP/s "
        "measured in matrix products"
    )


def _table(lines: dict[str, str]) -> str:
    return "\n".join(f"{name:<11} {value}" for name, value in lines.items())
