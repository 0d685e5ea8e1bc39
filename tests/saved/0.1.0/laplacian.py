"""Laplacian heads: attention heads that output ``v - P v`` instead of ``P v``.

P is the attention matrix after softmax and v the values, so a Laplacian head applies I - P. No parameter is added and
the attention kernels stay as they are: the difference is taken after the backend has returned. Source: "Laplacian
Heads Improve Transformers by Smoothing Token Representations", arXiv 2602.09297, section 2.

LaplaceGPT and `laplacianize`, which gives Laplacian heads to any model of transformers that calls the attention
interface, share this file. It is one of those that travel with a model to the Hub, hence no import from the rest of
the package.
"""

import copy
import functools
import inspect
import math
import re
from collections.abc import Sequence

import torch
import torch.nn as nn
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

SCHEDULE_KEYS = ("start_layer", "increment", "max_count")


def _is_count(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def heads_by_layer(laplacian_heads, num_heads: Sequence[int]) -> list[list[int]]:
    """The indices of the Laplacian heads of every layer.

    Args:
        laplacian_heads: one of
            an int k: the last k heads of every layer;
            one int per layer: the last k heads of that layer;
            one list of head indices per layer;
            a schedule `{"start_layer": s, "increment": i, "max_count": m}`: layer l, counted from 0, has no Laplacian
            head if l < s and else its last min(m, i * (l - s + 1)) heads.
        num_heads: the number of heads of each layer, one entry a layer.

    Returns:
        One increasing list of head indices per layer.

    Raises:
        ValueError: the value is none of these; the message names field, value, layer and what is allowed.
    """
    layers = len(num_heads)

    def last(count, layer, what):
        if not _is_count(count) or count > num_heads[layer]:
            raise ValueError(
                f"laplacian_heads: {what} is {count!r} in layer {layer}, allowed is an integer from 0 to the number of "
                f"heads there, {num_heads[layer]}."
            )
        return list(range(num_heads[layer] - count, num_heads[layer]))

    if isinstance(laplacian_heads, dict):
        if set(laplacian_heads) != set(SCHEDULE_KEYS):
            raise ValueError(
                f"laplacian_heads: the schedule {laplacian_heads!r} must have the keys {', '.join(SCHEDULE_KEYS)} and "
                "no other."
            )
        start, increment, most = (laplacian_heads[key] for key in SCHEDULE_KEYS)
        for key in ("start_layer", "increment"):
            if not _is_count(laplacian_heads[key]):
                raise ValueError(
                    f"laplacian_heads: {key} is {laplacian_heads[key]!r}, allowed is an integer of at least 0."
                )
        for layer in range(layers):
            last(most, layer, "max_count")
        return [last(max(0, min(most, increment * (layer - start + 1))), layer, "count") for layer in range(layers)]

    if not isinstance(laplacian_heads, (list, tuple)):
        if not _is_count(laplacian_heads):
            raise ValueError(
                f"laplacian_heads is {laplacian_heads!r}, allowed are an integer of at least 0, one integer per layer, "
                f"one list of head indices per layer, or a schedule with the keys {', '.join(SCHEDULE_KEYS)}."
            )
        return [last(laplacian_heads, layer, "the count") for layer in range(layers)]

    if len(laplacian_heads) != layers:
        raise ValueError(
            f"laplacian_heads: {laplacian_heads!r} has {len(laplacian_heads)} entries, the model has {layers} layers "
            "and needs one entry per layer."
        )
    if not any(isinstance(entry, (list, tuple)) for entry in laplacian_heads):
        return [last(entry, layer, "the entry") for layer, entry in enumerate(laplacian_heads)]

    for layer, indices in enumerate(laplacian_heads):
        allowed = f"allowed are distinct head indices from 0 to {num_heads[layer] - 1}"
        if not isinstance(indices, (list, tuple)):
            raise ValueError(
                f"laplacian_heads: the entry of layer {layer} is {indices!r} while others are lists, {allowed}."
            )
        for index in indices:
            if not _is_count(index) or index >= num_heads[layer]:
                raise ValueError(f"laplacian_heads: head {index!r} in layer {layer} does not exist, {allowed}.")
        if len(set(indices)) != len(indices):
            raise ValueError(f"laplacian_heads: {indices!r} in layer {layer} repeats a head, {allowed}.")
    return [sorted(indices) for indices in laplacian_heads]


def check_share(laplacian_share) -> float:
    """`laplacian_share` as a float; ValueError unless it is a finite number of at least 0."""
    number = isinstance(laplacian_share, (int, float)) and not isinstance(laplacian_share, bool)
    if not number or not 0 <= laplacian_share < math.inf:
        raise ValueError(f"laplacian_share is {laplacian_share!r}, allowed is a finite number of at least 0.")
    return float(laplacian_share)


def _local_heads(heads: list[int], num_heads: int, local: int) -> list[int]:
    """The Laplacian heads among the `local` heads this process holds, counted from the first of them.

    Under tensor parallelism a process sees a contiguous block of heads. The tensor-parallel group is the innermost
    dimension of the process grid in transformers, vLLM and SGLang alike, so the rank gives the block.
    """
    if local == num_heads or not heads:
        return heads
    first = torch.distributed.get_rank() % (num_heads // local) * local
    return [head - first for head in heads if first <= head < first + local]


def subtract_from_values(
    attn_output: torch.Tensor, value: torch.Tensor, heads: list[int], num_heads: int, share: float = 1.0
) -> torch.Tensor:
    """Turn the outputs P v of the Laplacian heads into ``share * v - P v`` and leave the other heads as they are.

    Args:
        attn_output: what the attention backend returned, (batch, tokens, heads, dim), or (tokens, heads * dim) as
            serving engines do.
        value: the values of the query positions themselves, (batch, key/value heads, tokens, dim). Under
            grouped-query attention each is used by heads / key-value heads consecutive heads.
        heads: increasing indices of the Laplacian heads among the layer's `num_heads`.
        num_heads: heads of the layer over all tensor-parallel processes.
        share: the factor of v; 1 is the paper's operator, 0 is attention with its sign turned.

    Returns:
        A tensor of attn_output's shape.
    """
    if not heads:
        return attn_output
    batch, kv_heads, tokens, dim = value.shape
    output = attn_output.reshape(batch, tokens, -1, dim)
    local = output.shape[2]
    value = value.transpose(1, 2)  # (batch, tokens, key/value heads, dim)
    if local != kv_heads:
        value = value.repeat_interleave(local // kv_heads, dim=2)

    # Slices and one concatenation are cheaper than a mask over all heads, and autograd sees no in-place write.
    heads = _local_heads(heads, num_heads, local)
    firsts = [head for head in heads if head - 1 not in heads]
    ends = [head + 1 for head in heads if head + 1 not in heads]
    parts, done = [], 0
    for first, end in zip(firsts, ends, strict=True):  # one run of neighbouring heads at a time
        own = value[:, :, first:end] if share == 1 else share * value[:, :, first:end]
        parts += [output[:, :, done:first], (own - output[:, :, first:end]).to(output.dtype)]
        done = end
    parts.append(output[:, :, done:])
    return torch.cat(parts, dim=2).reshape(attn_output.shape)


def set_laplacian_share(model: nn.Module, laplacian_share: float) -> None:
    """Set the share of v in every Laplacian head of a model, now and in the config that is saved with it.

    Raises:
        ValueError: the share is not a finite number of at least 0, or the model is one without Laplacian heads.
    """
    share = check_share(laplacian_share)
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = [config for config in configs if hasattr(config, "laplacian_share")]
    if not configs:
        raise ValueError(f"{type(model).__name__} has no Laplacian heads whose share could be set.")
    for config in configs:
        config.laplacian_share = share
    for module in model.modules():
        if hasattr(module, "laplacian_share"):
            module.laplacian_share = share


# Laplacian heads for the models of transformers

# Each copy of this file registers backends of its own: one that came with a model from the Hub may be another version.
PREFIX = f"{__name__}|"


class _AttentionConfig:
    """The config as a Laplacian attention module sees it: the model's own, but for the name of the backend.

    Only the attention module asks for the Laplacian backend; the model around it, which builds masks, caches and flash
    kernels by the backend's name, goes on seeing ``sdpa``, whatever sets it and whenever.
    """

    def __init__(self, config, registry, eager):
        self.model_config, self.registry, self.eager = config, registry, eager

    def __getattr__(self, name):
        if name == "model_config":  # not there yet while a copy is being built
            raise AttributeError(name)
        return getattr(self.model_config, name)

    @property
    def _attn_implementation(self):
        return _register_backend(self.model_config._attn_implementation)

    def plain_attention(self):
        """The function of the backend itself, which the module would call without its Laplacian heads."""
        return self.registry.get_interface(self.model_config._attn_implementation, self.eager)


class _PlainModule:
    """An attention module as the backend must see it: flash attention reads its own name from the module's config."""

    def __init__(self, module):
        self.module = module
        self.config = module.config.model_config

    def __getattr__(self, name):
        return getattr(self.module, name)


def _laplacian_attention(module, query, key, value, *args, **kwargs):
    """An attention function of transformers: the backend's, with ``share * v - P v`` from the Laplacian heads."""
    tokens = query.shape[2]
    if value.shape[2] != tokens and not module.laplacian_cache:
        raise ValueError(
            f"{type(module).__name__} attends from {tokens} positions to {value.shape[2]}, so it is not self-attention "
            "and cannot have Laplacian heads."
        )
    output, weights = module.config.plain_attention()(_PlainModule(module), query, key, value, *args, **kwargs)
    own = value[:, :, -tokens:]  # the cache holds the query's own values last
    heads, num_heads = module.laplacian_heads, module.laplacian_num_heads
    return subtract_from_values(output, own, heads, num_heads, module.laplacian_share), weights


def _register_backend(backend: str | None) -> str:
    """The name of the Laplacian attention around a backend; the name is registered when it is first asked for."""
    name = PREFIX + (backend or "eager")
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _laplacian_attention)
    return name


for _backend in ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]:
    if "laplacian|" not in _backend:  # not one of another copy's: their number would double with each copy
        _register_backend(_backend)


def _check_call(module, args, kwargs):
    """Refuse a call in which the last values are not those of the query positions."""
    if kwargs.get("key_value_states") is not None or kwargs.get("encoder_hidden_states") is not None:
        raise ValueError(f"{type(module).__name__} was called as cross-attention, which cannot have Laplacian heads.")
    module.laplacian_cache = False
    for argument in (*args, *kwargs.values()):
        cache = argument.self_attention_cache if isinstance(argument, EncoderDecoderCache) else argument
        if isinstance(cache, PagedAttentionCache) or (
            isinstance(cache, Cache) and any(isinstance(layer, StaticLayer) for layer in cache.layers)
        ):
            raise ValueError(
                f"A laplacianized model needs a cache that holds the newest values last, such as DynamicCache; "
                f"{type(cache).__name__} does not. LaplaceGPT works with any cache."
            )
        module.laplacian_cache |= isinstance(cache, Cache)


@functools.cache
def _interface(module_class: type) -> tuple | None:
    """The registry and the eager function that a module class calls its attention through; None if it calls none."""
    try:
        forward = inspect.unwrap(module_class.forward)
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        return None
    call = re.search(
        r"ALL_ATTENTION_FUNCTIONS(?:\.get_interface\(|\[)\s*self\.config\._attn_implementation(?:,\s*(\w+))?", source
    )
    if call is None:
        return None
    # GPT-2 may compare it with "eager", to go round the interface; under the Laplacian name it does not.
    if re.search(r'_attn_implementation (?:in|!=|== (?!"eager"))', source):
        raise ValueError(
            f"{module_class.__name__} computes something else for each name of a backend, so it cannot have Laplacian "
            "heads, which go by a name of their own."
        )
    return forward.__globals__["ALL_ATTENTION_FUNCTIONS"], forward.__globals__.get(call[1])


def _is_cross_attention(name: str, module: nn.Module) -> bool:
    words = ".".join([*name.split(".")[-2:], type(module).__name__])
    named = re.search(r"cross|encoder_attn|encdec|encoder_decoder", words, re.IGNORECASE)
    return bool(named) or getattr(module, "is_cross_attention", False)


def _self_attentions(model: PreTrainedModel) -> dict[str, nn.Module]:
    found = {
        name: module
        for name, module in model.named_modules()
        if _interface(type(module)) and not _is_cross_attention(name, module)
    }
    if not found:
        raise ValueError(
            f"{type(model).__name__} cannot be laplacianized: none of its self-attention goes through transformers' "
            "attention interface."
        )
    return found


def _num_heads(module: nn.Module) -> int:
    names = ("num_attention_heads", "num_heads", "n_heads")
    return next((getattr(module, name) for name in names if hasattr(module, name)), module.config.num_attention_heads)


OUTPUT_PROJECTIONS = (
    *("o_proj", "out_proj", "c_proj", "dense", "proj", "o", "wo", "Wo", "projection", "projection_layer"),
    *("linear_out", "out_lin", "output"),
)


def _output_projection(model: nn.Module, name: str) -> nn.Module:
    """The projection that mixes the heads of an attention module: its own, or beside it as in BERT's `output.dense`."""
    module = model.get_submodule(name)
    projection = next((getattr(module, path) for path in OUTPUT_PROJECTIONS if hasattr(module, path)), None)
    if projection is None:
        parent = model.get_submodule(name.rpartition(".")[0])
        projection = getattr(getattr(parent, "output", None), "dense", None)
    # A quantised weight or an adapter's layer cannot be negated slice by slice.
    if type(projection) not in (nn.Linear, Conv1D) or not projection.weight.is_floating_point():
        raise ValueError(
            f"{type(model).__name__} cannot be converted with keep_outputs: {name} has no output projection that is "
            "found by its name and is a plain linear layer."
        )
    return projection


@torch.no_grad()
def _negate_output(projection: nn.Module, heads: list[int], num_heads: int) -> None:
    # nn.Linear holds (out, in), the Conv1D of GPT-2 holds (in, out)
    weight = projection.weight.T if isinstance(projection, Conv1D) else projection.weight
    weight.unflatten(1, (num_heads, -1))[:, heads] *= -1


def _refuse_save(*args, **kwargs):
    raise ValueError(
        "This is a part of a laplacianized model and would be saved without its Laplacian heads; save the whole model."
    )


def _install(model: PreTrainedModel) -> None:
    """Give a freshly built model the Laplacian heads its config asks for."""
    config = model.config
    attentions = _self_attentions(model).values()
    num_heads = [_num_heads(module) for module in attentions]
    layout = heads_by_layer(config.laplacian_heads, num_heads)
    for module, heads, total in zip(attentions, layout, num_heads, strict=True):
        # A head of transformers may have built its base model as a Laplacian one, whose modules are ready.
        if heads and not hasattr(module, "laplacian_heads"):
            module.laplacian_heads, module.laplacian_num_heads = heads, total
            module.laplacian_share, module.laplacian_cache = config.laplacian_share, False
            module.config = _AttentionConfig(module.config, *_interface(type(module)))
            module.register_forward_pre_hook(_check_call, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is not config:
            module.save_pretrained = _refuse_save


MODEL_TYPE_PREFIX = "laplacian_"

# What a saved config asks for and no transformers has: a stock class that is pointed at the folder raises, instead of
# loading the model without its heads. The second is for a call that names an attention implementation itself.
_MARK = "Laplacian heads: load with trust_remote_code=True"
MARKS = {"attn_implementation": _MARK, "experts_implementation": _MARK}


def _marked(entries: dict) -> dict:
    """A config as a dict with the marks in it and in its sub-configs, which stock classes load too."""
    nested = {
        key: _marked(value) for key, value in entries.items() if isinstance(value, dict) and "model_type" in value
    }
    return {**entries, **nested, **MARKS}


def _unmarked(entries: dict) -> dict:
    """Undo `_marked` and the prefix of the model type."""
    entries = {
        key: _unmarked(value) if isinstance(value, dict) else value
        for key, value in entries.items()
        if key not in MARKS or value != _MARK
    }
    if isinstance(entries.get("model_type"), str):
        entries["model_type"] = entries["model_type"].removeprefix(MODEL_TYPE_PREFIX)
    return entries


class _LaplacianConfig:
    """What the Laplacian variant of a config class adds: the two fields, and a saved form that no stock class loads.

    Only what is saved has a model type of its own. In memory the model keeps the plain one, by which transformers
    knows what Whisper's prompts are and how the names of weights changed.
    """

    laplacian_heads = 0
    laplacian_share = 1.0
    _auto_class = "AutoConfig"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.laplacian_share = check_share(self.laplacian_share)

    def to_dict(self):
        return {**_marked(super().to_dict()), "model_type": MODEL_TYPE_PREFIX + self.model_type}

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        if "laplacian_heads" not in config_dict:
            raise ValueError(
                "The config of a laplacianized model lacks laplacian_heads, which says what its heads are."
            )
        return super().from_dict(_unmarked(config_dict), **kwargs)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        return _unmarked(config_dict), kwargs

    def save_pretrained(self, *args, **kwargs):
        # The code is saved beside the config, so the entries point there and not to where this model came from.
        entries = {"AutoConfig": type(self).__name__, **_auto_models(self.model_type)}
        self.auto_map = {auto_class: f"laplacian.{name}" for auto_class, name in entries.items()}
        super().save_pretrained(*args, **kwargs)


class _LaplacianModel:
    """What the Laplacian variant of a model class adds: building the heads its config asks for."""

    _auto_class = "AutoModel"

    def __init__(self, config, *args, **kwargs):
        _register_auto_models(type(config))
        super().__init__(config, *args, **kwargs)
        _install(self)

    @classmethod
    def is_custom_code(cls):
        # Its modules are those of transformers: their weights are to be initialised and converted as they are there.
        return False


def _auto_models(model_type: str) -> dict[str, str]:
    """{Auto class: Laplacian class} for every Auto class that knows the plain model under its own config."""
    entries = {}
    for name, auto_class in vars(modeling_auto).items():
        if name.startswith("Auto") and hasattr(auto_class, "_model_mapping"):
            known = auto_class._model_mapping._model_mapping.get(model_type)
            base = getattr(transformers, known if isinstance(known, str) else known[0], None) if known else None
            if base is not None and base.config_class.model_type == model_type:
                entries[name] = f"Laplacian{base.__name__}"
    return entries


@functools.cache
def _register_auto_models(config_class: type) -> None:
    """Make the Laplacian variants known in this process.

    Heads of transformers build their base model through the Auto classes, and Trainer and the pipelines go by the
    names of the classes there.
    """
    for name, class_name in _auto_models(config_class.model_type).items():
        auto_class = getattr(modeling_auto, name)
        auto_class.register(config_class, __getattr__(class_name), exist_ok=True)
        auto_class._model_mapping._model_mapping[MODEL_TYPE_PREFIX + config_class.model_type] = class_name


@functools.cache
def _variant(base: type) -> type:
    """The Laplacian variant of a model or config class of transformers."""
    name = f"Laplacian{base.__name__}"
    if issubclass(base, PreTrainedConfig):
        return type(name, (_LaplacianConfig, base), {"__module__": __name__})
    # What is known of older names of a class's weights is filed under the name of the class.
    conversions = get_checkpoint_conversion_mapping(base.__name__)
    if conversions is not None:
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    attributes = {"__module__": __name__, "config_class": _variant(base.config_class)}
    return type(name, (_LaplacianModel, base), attributes)


def __getattr__(name: str):
    """`LaplacianLlamaForCausalLM` and the like, which `auto_map` of a saved laplacianized model names."""
    base = getattr(transformers, name.removeprefix("Laplacian"), None) if name.startswith("Laplacian") else None
    if not isinstance(base, type) or not issubclass(base, (PreTrainedModel, PreTrainedConfig)):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _variant(base)


def laplacianize(
    model: PreTrainedModel, laplacian_heads, laplacian_share: float = 1.0, keep_outputs: bool = False
) -> PreTrainedModel:
    """Give Laplacian heads to a model of transformers, in place.

    Works for every model whose self-attention calls the attention interface; cross-attention is left alone. Layers are
    counted over the self-attention modules in the order of `model.named_modules()`, an encoder before its decoder. The
    model becomes an instance of a subclass that `save_pretrained` writes with its own model type and code, so that the
    folder loads with `trust_remote_code=True` and with the right heads, or not at all.

    Args:
        model: a model of a class that transformers exports.
        laplacian_heads: see `heads_by_layer`.
        laplacian_share: a in ``a * v - P v``.
        keep_outputs: negate the slices of the output projections that belong to Laplacian heads. With
            laplacian_share 0 the model then computes what it computed before, and `LaplacianShareCallback` can raise
            the share to 1 while it is fine-tuned.

    Returns:
        The same model.

    Raises:
        ValueError: the model has Laplacian heads already, is not a class of transformers, has no self-attention that
            goes through the interface, has one that also goes by the backend's name otherwise, has no output projection
            that keep_outputs could negate, or a value is not allowed. The model is then left as it was.
    """
    base = type(model)
    if hasattr(getattr(model, "config", None), "laplacian_heads"):
        raise ValueError(f"{base.__name__} has Laplacian heads already; set laplacian_heads when you build it.")
    if not isinstance(model, PreTrainedModel) or any(
        getattr(transformers, cls.__name__, None) is not cls for cls in (base, type(model.config))
    ):
        raise ValueError(f"laplacianize takes a model of a class that transformers exports, not {base.__name__}.")
    share = check_share(laplacian_share)
    attentions = _self_attentions(model)
    num_heads = [_num_heads(module) for module in attentions.values()]
    layout = heads_by_layer(laplacian_heads, num_heads)
    if keep_outputs:
        laplacian = [entry for entry in zip(attentions, layout, num_heads, strict=True) if entry[1]]
        projections = [_output_projection(model, name) for name, _, _ in laplacian]
        for projection, (_, heads, total) in zip(projections, laplacian, strict=True):
            _negate_output(projection, heads, total)

    _own_config(model)
    model.config.__class__ = _variant(type(model.config))
    model.config.laplacian_heads, model.config.laplacian_share = copy.deepcopy(laplacian_heads), share
    model.__class__ = _variant(base)
    _register_auto_models(type(model.config))
    _install(model)
    return model


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a copy of its config, which other models may have been built from."""
    copies = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copies.get(id(value), value))
