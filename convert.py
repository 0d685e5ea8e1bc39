"""Models of nanochat, transformers and timm as a LaplaceGPT or a LaplaceViT, and back: the verb `convert`."""

import contextlib
import copy
import dataclasses
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoTokenizer,
    NanoChatConfig,
    NanoChatForCausalLM,
    PreTrainedTokenizerFast,
    ViTModel,
)

from laplacian_heads import files
from laplacian_heads.configuration import LaplaceGPTConfig, pair
from laplacian_heads.deit import (
    VIT_CLASSES,
    bit_processor,
    deit3_weights,
    from_deit3_state_dict,
    from_timm,
    from_vit,
    import_timm,
    timm_data_config,
    timm_model,
    timm_processor,
    timm_weights,
    to_timm,
    to_vit,
)
from laplacian_heads.laplacian import heads_by_layer
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.modeling_laplace_vit import LaplaceViTForImageClassification, LaplaceViTModel
from laplacian_heads.nanochat import (
    Checkpoint,
    checkpoint_steps,
    from_nanochat,
    model_of,
    nanochat_config,
    nanochat_weights,
    read_checkpoint,
    to_nanochat,
    tokenizer_from_nanochat,
    tokenizer_to_nanochat,
)
from laplacian_heads.weights import build, check_loaded, read, same_bits

CLASSES = {"laplace_gpt": LaplaceGPTForCausalLM, "transformers": NanoChatForCausalLM}
# What a source is, by the model_type of its config.json.
MODEL_TYPES = {
    "laplace_gpt": "laplace_gpt",
    "nanochat": "transformers",
    "laplace_vit": "laplace_vit",
    "vit": "vit",
    "dinov2": "vit",
}
NAMES = {
    "laplace_gpt": "LaplaceGPT",
    "nanochat": "nanochat",
    "transformers": "transformers' NanoChat",
    "laplace_vit": "LaplaceViT",
    "vit": "transformers' ViT",
    "timm": "timm's vision transformer",
    "deit3": "DeiT-3's weights",
}
# What each source can become, the default first where it is a model of ours.
TARGETS = {
    "laplace_gpt": ("nanochat", "transformers"),
    "nanochat": ("laplace_gpt", "transformers"),
    "transformers": ("laplace_gpt", "nanochat"),
    "laplace_vit": ("timm", "transformers"),
    "vit": ("laplace_vit",),
    "timm": ("laplace_vit",),
    "deit3": ("laplace_vit",),
}
TEXT = ("laplace_gpt", "nanochat", "transformers")
VISION_CLASSES = {each.__name__: each for each in (LaplaceViTForImageClassification, LaplaceViTModel, *VIT_CLASSES)}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# Fields that say what a folder is, and not how its model computes.
DESCRIBING = ("model_type", "architectures", "transformers_version", "_name_or_path", "auto_map")
LOGITS_TOLERANCE = 1e-5


@dataclasses.dataclass
class ConvertRecipe:
    """Keys of `recipes/convert.yaml`, which says what they mean."""

    source: str | None
    output: str | None
    to: str | None
    step: int | None
    tokenizer: str | None
    laplacian_heads: int | list | None

    def __post_init__(self):
        for name, what in (("source", "a model's folder, its file or its name in timm"), ("output", "a new folder")):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is {what}.")
        kinds = list(dict.fromkeys(to for targets in TARGETS.values() for to in targets))
        if self.to is not None and self.to not in kinds:
            raise ValueError(f"to is {self.to!r}, allowed are null, {', '.join(sorted(kinds))}.")
        if self.step is not None and self.step < 0:
            raise ValueError(f"step is {self.step}, allowed is null or an integer of at least 0.")
        if self.tokenizer == "":
            raise ValueError("tokenizer is '', allowed is null or the folder of a tokenizer.")


def convert(recipe: ConvertRecipe, dry_run: bool = False) -> None:
    """Convert a model, read the result back, and hold its weights and logits against the source's.

    The output folder appears once all of it is written and verified. A dry run reads and checks what it can without
    converting, and writes nothing.

    Raises:
        ValueError: a value of the recipe, or something in the source, is not allowed, or what was written differs.
        OSError: a file cannot be read or written.
    """
    source, output = Path(recipe.source).expanduser(), Path(recipe.output).expanduser()
    kind = _kind(recipe.source)
    targets = " and ".join(TARGETS[kind])
    allowed = f"allowed {'is' if len(TARGETS[kind]) == 1 else 'are'} {targets}"
    if recipe.to is None:
        if kind.startswith("laplace"):
            raise ValueError(f"to is null, and {source} is a {NAMES[kind]}; {allowed}.")
        recipe = dataclasses.replace(recipe, to=TARGETS[kind][0])
    if recipe.to == kind:
        raise ValueError(f"to is {recipe.to}, which {source} is already; {allowed}.")
    if recipe.to not in TARGETS[kind]:
        raise ValueError(f"to is {recipe.to}, and {source} is {NAMES[kind]}; {allowed}.")
    if kind not in ("nanochat", "timm", "deit3") and recipe.laplacian_heads is not None:
        raise ValueError(
            f"laplacian_heads is {recipe.laplacian_heads}, allowed is null for {source}, whose config.json tells it."
        )
    if "nanochat" not in (kind, recipe.to) and recipe.step is not None:
        raise ValueError(f"step is {recipe.step}, allowed is null where no checkpoint of nanochat is read or written.")
    if kind not in TEXT and recipe.tokenizer is not None:
        raise ValueError(f"tokenizer is {recipe.tokenizer}, allowed is null for {source}, which reads no text.")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, allowed is a new or an empty folder.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"output: {output} holds files, allowed is a new or an empty folder.")
    (_convert_text if kind in TEXT else _convert_vision)(recipe, kind, source, output, dry_run)


def _convert_text(recipe: ConvertRecipe, kind: str, source: Path, output: Path, dry_run: bool) -> None:
    checkpoint = None
    if kind == "nanochat":
        checkpoint = read_checkpoint(source, recipe.step, recipe.laplacian_heads)
        config = checkpoint.config
    else:
        config = CLASSES[kind].config_class.from_pretrained(source)
    if recipe.to == "transformers":
        _check_no_heads(config)
    if recipe.to == "nanochat":
        nanochat_config(config if kind == "laplace_gpt" else _laplace_config(config))
    tokenizer = _tokenizer(source, recipe, config)

    step = recipe.step if recipe.step is not None else checkpoint.step if checkpoint else 0
    what = f"{NAMES[kind]}, step {step}" if checkpoint else NAMES[kind]
    print(f"{source} ({what}) to {output} ({NAMES[recipe.to]})")
    sizes = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads"
    heads = getattr(config, "laplacian_heads", 0)
    print(f"  {sizes}, laplacian_heads {heads}, {config.vocab_size:,} tokens")
    if dry_run:
        return

    original = model_of(checkpoint) if checkpoint else _pretrained(CLASSES[kind], source)
    model = from_transformers(original) if kind == "transformers" else original
    if recipe.tokenizer is not None and recipe.to != "nanochat":
        for place in (model.config, model.generation_config):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(place, name, getattr(tokenizer, name))
    with _new_folder(output) as part:
        if recipe.to == "nanochat":
            to_nanochat(model, part, step)
            written = from_nanochat(part, step)
        else:
            (to_transformers(model) if recipe.to == "transformers" else model).save_pretrained(part)
            written = _pretrained(CLASSES[recipe.to], part)
        if tokenizer is not None:
            if recipe.to == "nanochat":
                tokenizer_to_nanochat(tokenizer, part / "tokenizer")
            else:
                tokenizer.save_pretrained(part)
        for line in _verify(original, checkpoint, written):
            print(f"  verified: {line}")
        if tokenizer is None:
            print("  no tokenizer was written; tokenizer=FOLDER names one")
        else:
            print(f"  tokenizer: {len(tokenizer):,} entries")


def _convert_vision(recipe: ConvertRecipe, kind: str, source: Path, output: Path, dry_run: bool) -> None:
    heads = recipe.laplacian_heads or 0
    weights = None
    if kind == "timm":
        name = recipe.source.removeprefix("timm:")
        original = timm_model(name if name != recipe.source else f"local-dir:{source}", pretrained=not dry_run)
        model = from_timm(original, heads)
    elif kind == "deit3":
        weights = deit3_weights(read(source))
        if recipe.laplacian_heads is None and "blocks.0.attn.q_norm.weight" in weights:
            raise ValueError(
                f"laplacian_heads is null, allowed for {source} is their number: its weights do not tell it, and have "
                "norms of queries as those of the models with Laplacian heads."
            )
        original = model = from_deit3_state_dict(weights, heads)
    else:
        original = _vision_model(source)
        model = {"laplace_vit": from_vit, "timm": to_timm, "transformers": to_vit}[recipe.to](original)

    to = "vit" if recipe.to == "transformers" else recipe.to
    print(f"{recipe.source} ({NAMES[kind]}) to {output} ({NAMES[to]})")
    config = original.config if kind == "laplace_vit" else model.config
    (height, width), patch = pair(config.image_size), " x ".join(map(str, pair(config.patch_size)))
    classes = config.num_labels if hasattr(model, "classifier") or hasattr(original, "classifier") else 0
    sizes = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads"
    print(
        f"  {sizes}, laplacian_heads {config.laplacian_heads}, images of {height} x {width}, patches of {patch}, "
        f"{classes:,} classes"
    )
    if kind == "vit":
        print("  for images of another size the functions differ: LaplaceViT interpolates positions with antialiasing")
    if dry_run:
        return

    with _new_folder(output) as part:
        processor = _processor(kind, source, original, config)
        if recipe.to == "timm":
            _save_for_timm(model, config, processor, part)
            written = timm_model(f"local-dir:{part}")
        else:
            model.save_pretrained(part)
            arguments = {}
            if isinstance(model, ViTModel):
                arguments = {"add_pooling_layer": False, "use_mask_token": config.use_mask_token}
            written = _pretrained(type(model), part, **arguments)
            if processor:
                files.write(part / "preprocessor_config.json", processor)
        for line in _verify_vision(kind, recipe.to, original, model, written, weights):
            print(f"  verified: {line}")
        if not processor:
            print("  no image processor was written: the source has none")


@contextlib.contextmanager
def _new_folder(output: Path):
    """A folder to write to, which takes the place of the output once the block has ended without an error."""
    part = output.with_name(output.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        files.make_folder(part)
        yield part
        part.replace(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # there only if something failed
    print(f"{output} is written.")


def from_transformers(model):
    """A model of ours with 0 Laplacian heads from one of transformers: the same function, in weights of its own.

    Args:
        model: a NanoChatForCausalLM, or what `deit.from_vit` takes, a ViTForImageClassification, ViTModel or
            Dinov2Model, for which see there; it is not changed.

    Returns:
        The LaplaceGPTForCausalLM, LaplaceViTForImageClassification or LaplaceViTModel, in evaluation mode, with the
        dtype and, of a NanoChat, the generation settings of the model.

    Raises:
        ValueError: the model is none of these, or LaplaceViT cannot compute it.

    Source: transformers, `models/nanochat`, whose names of weights and of fields are those of LaplaceGPT.
    """
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) in ("vit", "dinov2"):
        return from_vit(model)
    if not isinstance(model, NanoChatForCausalLM) or config.model_type != "nanochat":
        others = ", ".join(each.__name__ for each in VIT_CLASSES)
        raise ValueError(
            f"The model is a {type(model).__name__}, allowed is transformers' NanoChatForCausalLM, {others}."
        )
    return _copy(model, LaplaceGPTForCausalLM, _laplace_config(config))


def to_transformers(model):
    """A model of transformers from one of ours without Laplacian heads: the same function, in weights of its own.

    Args:
        model: a LaplaceGPTForCausalLM, or what `deit.to_vit` takes, a LaplaceViTForImageClassification or
            LaplaceViTModel, for which see there; it is not changed.

    Returns:
        The NanoChatForCausalLM, ViTForImageClassification or ViTModel, in evaluation mode, with the dtype and, of a
        LaplaceGPT, the generation settings of the model. NanoChat does not train the embedding of its pad token, as
        transformers has it.

    Raises:
        ValueError: the model is none of these, or has what the one of transformers cannot compute, such as Laplacian
            heads.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    if model_type == "laplace_vit":
        return to_vit(model)
    if model_type != "laplace_gpt":
        raise ValueError(
            f"The model is a {type(model).__name__}, allowed is a LaplaceGPTForCausalLM, a "
            "LaplaceViTForImageClassification or a LaplaceViTModel."
        )
    _check_no_heads(model.config)
    fields = model.config.to_dict()
    for name in (*DESCRIBING, "laplacian_heads", "laplacian_share", "return_logits", "format_version"):
        fields.pop(name, None)
    return _copy(model, NanoChatForCausalLM, NanoChatConfig(**fields))


def _laplace_config(config: NanoChatConfig) -> LaplaceGPTConfig:
    if config.model_type == "laplace_gpt":
        return config
    fields = {name: value for name, value in config.to_dict().items() if name not in DESCRIBING}
    return LaplaceGPTConfig(**{"head_dim": None, **fields}, laplacian_heads=0)


def _check_no_heads(config) -> None:
    heads = getattr(config, "laplacian_heads", 0)
    if any(heads_by_layer(heads, [config.num_attention_heads] * config.num_hidden_layers)):
        raise ValueError(f"laplacian_heads is {heads!r}, allowed is 0: transformers' NanoChat has no Laplacian heads.")


def _copy(model, model_class: type, config):
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    copied = build(model_class, config, weights, model.dtype)
    copied.generation_config = copy.deepcopy(model.generation_config)
    return copied.to(model.device)


def _pretrained(model_class: type, folder: Path, **arguments):
    """A saved model. Weights that are not there would be drawn at random, so they are an error here."""
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True, **arguments)
    except (RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise ValueError(f"The model in {folder} cannot be loaded: {said}.") from None
    if model_class is ViTModel:
        pooler = {name for name in info["unexpected_keys"] if name.startswith("pooler.")}
        if pooler:
            print(f"  {folder}: ViTModel's pooler is left out; LaplaceViT's pooler_output is CLS after the final norm")
        info["unexpected_keys"] = set(info["unexpected_keys"]) - pooler
    check_loaded(str(folder), info)
    return model


def _vision_model(folder: Path):
    """The LaplaceViT, ViT or Dinov2 in a folder."""
    names = files.read_json(folder / "config.json").get("architectures") or [None]
    if names[0] not in VISION_CLASSES:
        allowed = ", ".join(VISION_CLASSES)
        raise ValueError(f"source: {folder} is a {names[0]} by its config.json, allowed are {allowed}.")
    model_class = VISION_CLASSES[names[0]]
    return _pretrained(model_class, folder, **({"add_pooling_layer": False} if model_class is ViTModel else {}))


def _processor(kind: str, source: Path, original, config) -> dict | None:
    """preprocessor_config.json for a model; None if its source has none."""
    if kind == "timm":
        return timm_processor(original, config)
    if kind == "deit3":
        # DeiT evaluates without a margin, and with ImageNet's mean on every data set.
        channels = config.num_channels == 3
        return bit_processor(config, 1.0, IMAGENET_MEAN, IMAGENET_STD) if channels else None
    path = source / "preprocessor_config.json"
    return files.read_json(path) if path.is_file() else None


def _save_for_timm(model, config, processor: dict | None, folder: Path) -> None:
    timm = import_timm()
    labels = [config.id2label[i] for i in range(model.num_classes)]
    named = any(label != f"LABEL_{i}" for i, label in enumerate(labels))
    timm.models.save_for_hf(
        model,
        folder,
        model_config={"label_names": labels} if named else None,
        safe_serialization=True,
        data_config=timm_data_config(processor, config) if processor else {"input_size": _input_size(config)},
    )


def _input_size(config) -> tuple[int, int, int]:
    return config.num_channels, *pair(config.image_size)


def _tokenizer(source: Path, recipe: ConvertRecipe, config) -> PreTrainedTokenizerFast | None:
    """The tokenizer to write, checked against the model; None if there is none."""
    own = recipe.tokenizer is None
    if own and (recipe.to == "nanochat" or not (source / "tokenizer.json").is_file()):
        return None
    folder = source if own else Path(recipe.tokenizer).expanduser()
    if (folder / "tokenizer.pkl").is_file():
        tokenizer = tokenizer_from_nanochat(folder, config.max_position_embeddings)
    elif (folder / "tokenizer.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    else:
        raise ValueError(f"tokenizer is {folder}, allowed is a folder with tokenizer.pkl or tokenizer.json.")
    entries = len(tokenizer)
    # nanochat asks for equality: other numbers are the sign of another model's tokenizer.
    if (not own and entries != config.vocab_size) or entries > config.vocab_size:
        raise ValueError(
            f"The tokenizer in {folder} has {entries:,} entries, the model {config.vocab_size:,}; allowed is its own."
        )
    return tokenizer


def _kind(named: str) -> str:
    """What a source is, a key of TARGETS."""
    if named.startswith("timm:"):
        return "timm"
    source = Path(named).expanduser()
    if source.is_file():
        return "deit3"
    if not source.is_dir():
        raise ValueError(f"source: there is no folder {source}.")
    path = source / "config.json"
    if not path.is_file():
        if checkpoint_steps(source):
            return "nanochat"
        raise ValueError(f"source: {source} has neither config.json nor model_<step>.pt, allowed is a model's folder.")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        model_type = "timm" if "architecture" in told and "model_type" not in told else told["model_type"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no configuration of a model.") from None
    if model_type == "timm":
        return "timm"
    if model_type not in MODEL_TYPES:
        raise ValueError(f"source: {source} is a {model_type}, allowed are {', '.join(MODEL_TYPES)} and timm's models.")
    return MODEL_TYPES[model_type]


def _verify(original, checkpoint: Checkpoint | None, written) -> list[str]:
    """Hold what was written and read back against the source; what was verified, a line each."""
    if checkpoint:
        expected, found = checkpoint.weights, nanochat_weights(written)
        what = "weights, converted back, are the checkpoint's bit for bit"
    else:
        expected = {name: tensor.cpu() for name, tensor in original.state_dict().items()}
        found, what = written.state_dict(), "weights are the source's bit for bit"
    _check_same_weights(expected, found)
    length = min(64, original.config.max_position_embeddings)
    ids = torch.randint(original.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # In float32: in others NanoChat caps the logits in their dtype, and LaplaceGPT in float32.
        there, here = (model.float().eval()(ids).logits for model in (original, written))
    difference = _difference(there, here)
    eps = [model.config.rms_norm_eps for model in (original, written)]
    same = f"logits for {ids.numel()} random tokens are finite"
    if eps[0] == eps[1]:
        if difference > LOGITS_TOLERANCE:
            raise ValueError(
                f"The converted model's logits differ by {difference:.1e} at most, allowed is {LOGITS_TOLERANCE}."
            )
        return [f"{len(expected)} {what}", f"{same} and the same within {difference:.1e}"]
    return [
        f"{len(expected)} {what}",
        f"{same}; they differ by {difference:.1e} at most, as nanochat's RMS norm adds {eps[1]:.3g} for {eps[0]:.3g}",
    ]


def _verify_vision(kind: str, to: str, original, model, written, weights: dict | None) -> list[str]:
    """As `_verify`; model is the one that was written, weights are those of a file."""
    back = "weights, converted back, are the source's bit for bit"
    if kind == "deit3":
        expected, found, what = weights, timm_weights(written), back
    elif kind == "timm" and original.no_embed_class:
        expected, found, what = original.state_dict(), timm_weights(written), back
    elif to == "timm":
        expected, found, what = timm_weights(original), written.state_dict(), back
    else:
        expected, found = model.state_dict(), written.state_dict()
        what = "weights are those of the converted model bit for bit"
    _check_same_weights(expected, found)

    config = model.config if hasattr(model, "config") else original.config
    dtype = next(model.parameters()).dtype
    # A class token with its position, or a projection with its LayerScale, is rounded to the dtype.
    tolerance = LOGITS_TOLERANCE if what == back or dtype == torch.float32 else 10 * torch.finfo(dtype).eps
    images = torch.randn(2, *_input_size(config), generator=torch.Generator().manual_seed(0))
    with_heads = kind == "timm" and any(
        heads_by_layer(config.laplacian_heads, [config.num_attention_heads] * config.num_hidden_layers)
    )
    with torch.no_grad():
        outputs = [each.float().eval()(images) for each in (model if with_heads else original, written)]
    there, here = (_logits(output) for output in outputs)
    difference, scale = _difference(there, here), max(there.abs().max().item(), 1.0)
    if difference > tolerance * scale:
        raise ValueError(
            f"The converted model's logits differ by {difference:.1e} at most, allowed is {tolerance * scale:.1e}."
        )
    of = "the converted model, as timm has no Laplacian heads" if with_heads else "the source"
    said = f"logits for {len(images)} random images are finite and those of {of} within {difference:.1e}"
    return [f"{len(expected)} {what}", f"{said}, at {scale:.1e} at most"]


def _logits(output) -> torch.Tensor:
    """(images, classes), or of a model without a classifier CLS after the final norm, (images, width)."""
    if isinstance(output, torch.Tensor):  # timm's
        return output
    return output.logits if "logits" in output else output.last_hidden_state[:, 0]


def _check_same_weights(expected: dict, found: dict) -> None:
    if expected.keys() != found.keys():
        raise ValueError(f"The converted model has other weights: {sorted(expected.keys() ^ found.keys())[0]}.")
    for name, tensor in expected.items():
        if not same_bits(tensor, found[name]):
            raise ValueError(f"The converted weight {name} is not the source's.")


def _difference(there: torch.Tensor, here: torch.Tensor) -> float:
    """The largest one of logits. Raises ValueError if some are not finite."""
    if not (there.isfinite().all() and here.isfinite().all()):
        raise ValueError(
            "The logits are not finite: the source has weights that are no numbers, or far too large ones."
        )
    return (there - here).abs().max().item()
