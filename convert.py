"""A LaplaceGPT from nanochat's checkpoints and from transformers' NanoChat, and back: the verb `convert`."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, NanoChatConfig, NanoChatForCausalLM, PreTrainedTokenizerFast

from laplacian_heads import files
from laplacian_heads.configuration import LaplaceGPTConfig
from laplacian_heads.laplacian import heads_by_layer
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.nanochat import (
    Checkpoint,
    build,
    check_loaded,
    checkpoint_steps,
    from_nanochat,
    model_of,
    nanochat_config,
    nanochat_weights,
    read_checkpoint,
    same_bits,
    to_nanochat,
    tokenizer_from_nanochat,
    tokenizer_to_nanochat,
)

CLASSES = {"laplace_gpt": LaplaceGPTForCausalLM, "transformers": NanoChatForCausalLM}
MODEL_TYPES = {"laplace_gpt": "laplace_gpt", "nanochat": "transformers"}
# Fields that say what a folder is, and not how its model computes.
DESCRIBING = ("model_type", "architectures", "transformers_version", "_name_or_path", "auto_map")
LOGITS_TOLERANCE = 1e-5


@dataclasses.dataclass
class ConvertRecipe:
    """Keys of `recipes/convert.yaml`, which says what they mean."""

    source: str | None
    output: str | None
    to: str
    step: int | None
    tokenizer: str | None
    laplacian_heads: int | list | None

    def __post_init__(self):
        for name, what in (("source", "the folder of a model"), ("output", "a new folder")):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is {what}.")
        kinds = ("laplace_gpt", "nanochat", "transformers")
        if self.to not in kinds:
            raise ValueError(f"to is {self.to!r}, allowed are {', '.join(kinds)}.")
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
    kind = _kind(source)
    if kind == recipe.to:
        others = [name for name in ("laplace_gpt", "nanochat", "transformers") if name != kind]
        raise ValueError(f"to is {recipe.to}, which {source} is already; allowed are {' and '.join(others)}.")
    if kind != "nanochat" and recipe.laplacian_heads is not None:
        raise ValueError(
            f"laplacian_heads is {recipe.laplacian_heads}, allowed is null for {source}, whose config.json tells it."
        )
    if "nanochat" not in (kind, recipe.to) and recipe.step is not None:
        raise ValueError(f"step is {recipe.step}, allowed is null where no checkpoint of nanochat is read or written.")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, allowed is a new or an empty folder.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"output: {output} holds files, allowed is a new or an empty folder.")

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
    names = {"laplace_gpt": "LaplaceGPT", "nanochat": "nanochat", "transformers": "transformers' NanoChat"}
    what = f"{names[kind]}, step {step}" if checkpoint else names[kind]
    print(f"{source} ({what}) to {output} ({names[recipe.to]})")
    sizes = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {config.num_attention_heads} heads"
    heads = getattr(config, "laplacian_heads", 0)
    print(f"  {sizes}, laplacian_heads {heads}, {config.vocab_size:,} tokens")
    if dry_run:
        return

    original = model_of(checkpoint) if checkpoint else _pretrained(kind, source)
    model = from_transformers(original) if kind == "transformers" else original
    if recipe.tokenizer is not None and recipe.to != "nanochat":
        for place in (model.config, model.generation_config):
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(place, name, getattr(tokenizer, name))
    part = output.with_name(output.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        files.make_folder(part)
        if recipe.to == "nanochat":
            to_nanochat(model, part, step)
            written = from_nanochat(part, step)
        else:
            (to_transformers(model) if recipe.to == "transformers" else model).save_pretrained(part)
            written = _pretrained(recipe.to, part)
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
        part.replace(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # there only if something failed
    print(f"{output} is written.")


def from_transformers(model: NanoChatForCausalLM) -> LaplaceGPTForCausalLM:
    """A LaplaceGPT with 0 Laplacian heads from transformers' NanoChat: the same function, in weights of its own.

    Args:
        model: the model; it is not changed.

    Returns:
        The LaplaceGPT, in evaluation mode, with the dtype and the generation settings of the model.

    Raises:
        ValueError: the model is none of transformers' NanoChatForCausalLM.

    Source: transformers, `models/nanochat`, whose names of weights and of fields are those of LaplaceGPT.
    """
    if not isinstance(model, NanoChatForCausalLM) or model.config.model_type != "nanochat":
        raise ValueError(f"The model is a {type(model).__name__}, allowed is transformers' NanoChatForCausalLM.")
    return _copy(model, LaplaceGPTForCausalLM, _laplace_config(model.config))


def to_transformers(model: LaplaceGPTForCausalLM) -> NanoChatForCausalLM:
    """transformers' NanoChat from a LaplaceGPT without Laplacian heads: the same function, in weights of its own.

    Args:
        model: the model; it is not changed.

    Returns:
        The NanoChat, in evaluation mode, with the dtype and the generation settings of the model. It does not train the
        embedding of its pad token, as transformers has it.

    Raises:
        ValueError: the model has Laplacian heads, which NanoChat cannot compute, or is no LaplaceGPTForCausalLM.
    """
    if getattr(model.config, "model_type", None) != "laplace_gpt":
        raise ValueError(f"The model is a {type(model).__name__}, allowed is a LaplaceGPTForCausalLM.")
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


def _pretrained(kind: str, folder: Path):
    """A saved model. Weights that are not there would be drawn at random, so they are an error here."""
    try:
        model, info = CLASSES[kind].from_pretrained(folder, output_loading_info=True)
    except (RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise ValueError(f"The model in {folder} cannot be loaded: {said}.") from None
    check_loaded(str(folder), info)
    return model


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


def _kind(source: Path) -> str:
    """What a folder holds: "laplace_gpt", "transformers" or "nanochat"."""
    if not source.is_dir():
        raise ValueError(f"source: there is no folder {source}.")
    path = source / "config.json"
    if not path.is_file():
        if checkpoint_steps(source):
            return "nanochat"
        raise ValueError(f"source: {source} has neither config.json nor model_<step>.pt, allowed is a model's folder.")
    try:
        model_type = json.loads(path.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is no configuration of a model.") from None
    if model_type not in MODEL_TYPES:
        raise ValueError(f"source: {source} is a {model_type}, allowed are {' and '.join(MODEL_TYPES)}.")
    return MODEL_TYPES[model_type]


def _verify(original, checkpoint: Checkpoint | None, written) -> list[str]:
    """Hold what was written and read back against the source; what was verified, a line each."""
    if checkpoint:
        expected, found = checkpoint.weights, nanochat_weights(written)
        what = "weights, converted back, are the checkpoint's bit for bit"
    else:
        expected = {name: tensor.cpu() for name, tensor in original.state_dict().items()}
        found, what = written.state_dict(), "weights are the source's bit for bit"
    if expected.keys() != found.keys():
        raise ValueError(f"The converted model has other weights: {sorted(expected.keys() ^ found.keys())[0]}.")
    for name, tensor in expected.items():
        if not same_bits(tensor, found[name]):
            raise ValueError(f"The converted weight {name} is not the source's.")

    length = min(64, original.config.max_position_embeddings)
    ids = torch.randint(original.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # In float32: in others NanoChat caps the logits in their dtype, and LaplaceGPT in float32.
        there, here = (model.float().eval()(ids).logits for model in (original, written))
    if not (there.isfinite().all() and here.isfinite().all()):
        raise ValueError(
            "The logits are not finite: the source has weights that are no numbers, or far too large ones."
        )
    difference = (there - here).abs().max().item()
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
