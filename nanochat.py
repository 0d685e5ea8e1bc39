"""nanochat's files, checkpoints and tokenizers, read as data only: nothing that a pickle names is run.

The format is that of karpathy/nanochat from 3a5e0bc (October 2025) to ae0bf52 (January 2026), and of the fork of the
paper's authors (yuchongzhang/nanochat), whose checkpoints also tell the number of Laplacian heads.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import operator
import pickle
import re
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from laplacian_heads import files
from laplacian_heads.configuration import LaplaceGPTConfig
from laplacian_heads.laplacian import heads_by_layer
from laplacian_heads.modeling_laplace_gpt import LaplaceGPTForCausalLM
from laplacian_heads.train.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, token_bytes
from laplacian_heads.weights import build, read, same_bits

SUPPORTED = "supported is nanochat from October 2025 (3a5e0bc) to January 2026 (ae0bf52)"
# A size in nanochat's meta_<step>.json and the field of our configuration.
SIZES = {
    "sequence_len": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
}
# What nanochat's code fixes and a configuration could have otherwise.
FIXED = {
    "hidden_act": "relu2",
    "final_logit_softcapping": 15.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
}
# torch's RMS norm without a given eps adds this, on bfloat16 too, for which it computes in float32.
NANOCHAT_EPS = torch.finfo(torch.float32).eps
# A layer's weights in nanochat and here.
WEIGHTS = {
    "attn.c_q": "self_attn.q_proj",
    "attn.c_k": "self_attn.k_proj",
    "attn.c_v": "self_attn.v_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# nanochat's special tokens, of which the tokenizers trained here have one more, the pad.
NANOCHAT_TOKENS = SPECIAL_TOKENS[1:]


@dataclasses.dataclass
class Checkpoint:
    """nanochat's checkpoint as it was read: weights by their names in nanochat, padding rows dropped."""

    step: int
    config: LaplaceGPTConfig
    weights: dict[str, torch.Tensor]


def from_nanochat(
    folder: str | Path, step: int | None = None, laplacian_heads: int | list[int] | None = None
) -> LaplaceGPTForCausalLM:
    """A LaplaceGPT from a checkpoint of nanochat.

    In float32 it computes nanochat's function but for the rotary tables, which nanochat rounds to bfloat16.
    A checkpoint whose weights have several dtypes, such as the bfloat16 embedding among float32 weights that nanochat
    stores on CUDA, becomes a model of the widest, which loses nothing. The ids of bos, and of assistant_end as eos and
    pad, are those of nanochat's tokenizers, whose nine special tokens end the vocabulary.

    Args:
        folder: the folder with model_<step>.pt and meta_<step>.json; optimiser states are ignored.
        step: the step to read; None is the newest.
        laplacian_heads: how many heads are Laplacian, the last ones of every layer, or one number per layer; None is
            what the meta file tells, and 0 if it tells nothing.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: a file or a key is missing, damaged or unknown, weights do not have the shapes that the meta file
            tells, or the file of weights asks for code, of which nothing is run.

    Source: karpathy/nanochat at 01f5f10, `checkpoint_manager.py` and `gpt.py`; the head count is that of
    yuchongzhang/nanochat at 1f70b55.
    """
    return model_of(read_checkpoint(Path(folder), step, laplacian_heads))


def to_nanochat(model: LaplaceGPTForCausalLM, folder: str | Path, step: int = 0) -> Path:
    """Write a LaplaceGPT as a checkpoint of nanochat.

    The embedding is stored in bfloat16, as nanochat has it on CUDA, if that loses nothing, and else as it is, which
    nanochat loads too. A model without Laplacian heads is one for every nanochat of the supported versions; the head
    count of another one is in the meta file under the name that the authors' fork reads, and nanochat itself refuses
    it. nanochat since f1bf69d (December 2025) wants the rows padded to a multiple of 64, which these are only if the
    vocabulary is one. nanochat's RMS norms add 1.19e-07 where a LaplaceGPT trained here adds its `rms_norm_eps` 1e-06.

    Args:
        model: the model.
        folder: the folder to write to, made if it is not there.
        step: the number in the names of the files.

    Returns:
        The file of weights.

    Raises:
        ValueError: the checkpoint is there already, or the model has what nanochat cannot compute: Laplacian heads
            that are not the last ones of their layer, a share other than 1, or another architecture.

    Source: karpathy/nanochat at 01f5f10, `checkpoint_manager.py`.
    """
    if getattr(model.config, "model_type", None) != "laplace_gpt":
        raise ValueError(f"The model is a {type(model).__name__}, allowed is a LaplaceGPTForCausalLM.")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step is {step!r}, allowed is an integer of at least 0.")
    folder = Path(folder)
    config = nanochat_config(model.config)
    path, meta = _paths(folder, step)
    if path.exists():
        raise ValueError(f"{path} is there already, allowed is another folder or step.")
    weights = nanochat_weights(model)
    embedding = weights["transformer.wte.weight"]
    if same_bits(embedding.to(torch.bfloat16), embedding):
        weights["transformer.wte.weight"] = embedding.to(torch.bfloat16)
    files.make_folder(folder)
    files.write(meta, {"step": step, "model_config": config})
    part = path.with_name(path.name + ".part")
    torch.save(weights, part)
    part.replace(path)
    return path


def nanochat_config(config: LaplaceGPTConfig) -> dict:
    """`model_config` of nanochat's meta file for a LaplaceGPT.

    Args:
        config: the configuration of the model.

    Returns:
        nanochat's sizes, and the head count, an int or one per layer, if there are Laplacian heads.

    Raises:
        ValueError: nanochat cannot compute such a model; the message names the field, its value and what is allowed.
    """
    hidden = config.hidden_size
    derived = {"head_dim": hidden // config.num_attention_heads, "intermediate_size": 4 * hidden}
    if hidden % config.num_attention_heads:
        raise ValueError(
            f"num_attention_heads is {config.num_attention_heads}, allowed for nanochat are divisors of {hidden}."
        )
    for name, allowed in {**FIXED, **derived}.items():
        if getattr(config, name) != allowed:
            raise ValueError(f"{name} is {getattr(config, name)!r}, allowed for nanochat is {allowed!r}.")
    if not 0 < config.rms_norm_eps <= 1e-6:
        raise ValueError(
            f"rms_norm_eps is {config.rms_norm_eps}, allowed for nanochat, which has 1.2e-07, is up to 1e-06."
        )
    heads = config.num_attention_heads
    counts = []
    for layer, indices in enumerate(heads_by_layer(config.laplacian_heads, [heads] * config.num_hidden_layers)):
        counts.append(len(indices))
        if indices != list(range(heads - len(indices), heads)):
            raise ValueError(
                f"laplacian_heads: those of layer {layer} are {indices}, allowed for nanochat are the last of {heads}."
            )
    if any(counts) and config.laplacian_share != 1:
        raise ValueError(f"laplacian_share is {config.laplacian_share}, allowed for nanochat is 1.")
    told = {name: getattr(config, field) for name, field in SIZES.items()}
    return {**told, "laplacian_heads": _short(counts)} if any(counts) else told


def _paths(folder: Path, step: int) -> tuple[Path, Path]:
    return folder / f"model_{step:06d}.pt", folder / f"meta_{step:06d}.json"


def _short(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts


def checkpoint_steps(folder: Path) -> list[int]:
    matches = (re.fullmatch(r"model_(\d+)\.pt", path.name) for path in folder.glob("model_*.pt"))
    return sorted(int(match[1]) for match in matches if match)


def read_checkpoint(folder: Path, step: int | None, laplacian_heads) -> Checkpoint:
    steps = checkpoint_steps(folder)
    if not steps:
        raise ValueError(f"{folder} has no model_<step>.pt, allowed is the folder of a checkpoint of nanochat.")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"step is {step}, allowed are those in {folder}: {', '.join(map(str, steps))}.")
    path, meta = _paths(folder, step)
    config = _read_meta(meta, laplacian_heads)
    weights = {}
    for name, tensor in _load_weights(path).items():
        name = name.removeprefix("_orig_mod.")  # torch.compile's
        if name in weights:
            raise ValueError(f"{path} has the weight {name} twice, with the prefix of torch.compile and without it.")
        weights[name] = tensor
    return Checkpoint(step, config, _check_weights(path, weights, config))


def _read_meta(path: Path, laplacian_heads) -> LaplaceGPTConfig:
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"There is no {path}, which a checkpoint of nanochat needs.") from None
    except ValueError:
        raise ValueError(f"{path} is not a JSON file.") from None
    told = meta.get("model_config") if isinstance(meta, dict) else None
    if not isinstance(told, dict):
        raise ValueError(f"{path} lacks the key 'model_config', or it is no dict of sizes.")
    for key in SIZES:
        if key not in told:
            raise ValueError(f"{path} lacks the key {key!r} in model_config.")
        if type(told[key]) is not int or told[key] < 1:
            raise ValueError(f"{path}: {key} is {told[key]!r}, allowed is an integer of at least 1.")
    unknown = [key for key in told if key not in SIZES and key != "laplacian_heads"]
    if unknown:  # such as window_pattern: another function for the same weights
        raise ValueError(f"{path} has the key {unknown[0]!r} in model_config, which is not known here; {SUPPORTED}.")

    all_heads = [told["n_head"]] * told["n_layer"]
    heads = told.get("laplacian_heads")
    if heads is None:
        heads = 0 if laplacian_heads is None else laplacian_heads
    elif laplacian_heads is not None and heads_by_layer(heads, all_heads) != heads_by_layer(laplacian_heads, all_heads):
        raise ValueError(f"laplacian_heads is {laplacian_heads!r}, allowed is null or what {path} tells, {heads!r}.")
    heads_by_layer(heads, all_heads)  # names what is not allowed
    if isinstance(heads, list) and all(type(count) is int for count in heads):
        heads = _short(heads)
    vocab = told["vocab_size"]
    ids = [vocab - len(NANOCHAT_TOKENS) + NANOCHAT_TOKENS.index(name) for name in ("<|bos|>", "<|assistant_end|>")]
    bos, end = ids if ids[0] >= 0 else (None, None)
    return LaplaceGPTConfig(
        **{field: told[name] for name, field in SIZES.items()},
        **copy.deepcopy(FIXED),
        rms_norm_eps=NANOCHAT_EPS,
        laplacian_heads=heads,
        bos_token_id=bos,
        eos_token_id=end,
        pad_token_id=end,
    )


def _load_weights(path: Path) -> dict[str, torch.Tensor]:
    """The dict of tensors in a file of torch.save, mapped into memory and not read yet."""
    weights = read(path, mapped=True)
    if not isinstance(weights, dict) or not weights:
        raise ValueError(f"{path} is no state dict: it holds a {type(weights).__name__}.")
    for name, tensor in weights.items():
        plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not isinstance(name, str) or not plain or tensor.dtype not in DTYPES:
            what = tensor.dtype if plain else type(tensor).__name__
            raise ValueError(f"{path}: {name!r} is {what}, allowed are tensors of float32, bfloat16 and float16.")
    return weights


def _weight_names(layers: int) -> dict[str, str]:
    """Names of all weights, nanochat's to ours."""
    names = {"transformer.wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
    for i in range(layers):
        for there, here in WEIGHTS.items():
            names[f"transformer.h.{i}.{there}.weight"] = f"model.layers.{i}.{here}.weight"
    return names


def _check_weights(path: Path, weights: dict, config: LaplaceGPTConfig) -> dict[str, torch.Tensor]:
    """The weights without padding rows. Raises ValueError for one too many or too few, or of another shape."""
    names = _weight_names(config.num_hidden_layers)
    for name in weights:
        if name not in names:
            raise ValueError(
                f"{path} has the weight {name}, which a nanochat of {config.num_hidden_layers} layers does not have; "
                f"{SUPPORTED}."
            )
    for name in names:
        if name not in weights:
            raise ValueError(f"{path} lacks the weight {name}.")
    width, vocab = config.hidden_size, config.vocab_size
    kv_width = config.num_key_value_heads * config.head_dim
    shapes = {
        **dict.fromkeys(("attn.c_q", "attn.c_proj"), (width, width)),
        **dict.fromkeys(("attn.c_k", "attn.c_v"), (kv_width, width)),
        "mlp.c_fc": (4 * width, width),
        "mlp.c_proj": (width, 4 * width),
    }
    checked = {}
    for name, tensor in weights.items():
        in_layer = re.fullmatch(r"transformer\.h\.\d+\.(.+)\.weight", name)
        shape = shapes[in_layer[1]] if in_layer else (vocab, width)
        padded = (-(-vocab // 64) * 64, width)
        if not in_layer and tuple(tensor.shape) == padded:
            tensor = tensor[:vocab]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{path}: {name} has the shape {tuple(tensor.shape)}, the meta file's sizes need {shape}.")
        checked[name] = tensor
    return checked


def model_of(checkpoint: Checkpoint) -> LaplaceGPTForCausalLM:
    names = _weight_names(checkpoint.config.num_hidden_layers)
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in checkpoint.weights.values()))
    # A copy, since the file that the tensors are mapped from may go.
    weights = {names[name]: tensor.to(dtype, copy=True) for name, tensor in checkpoint.weights.items()}
    return build(LaplaceGPTForCausalLM, copy.deepcopy(checkpoint.config), weights, dtype)


def nanochat_weights(model) -> dict[str, torch.Tensor]:
    weights = model.state_dict()
    return {
        there: weights[here].detach().cpu().contiguous()
        for there, here in _weight_names(model.config.num_hidden_layers).items()
    }


class _Refused(ValueError):
    """A pickle asks for what it does not need."""


class _Encoding:
    """Stands in for tiktoken's Encoding: keeps what a pickle says of it and does nothing."""

    def __setstate__(self, state):
        self.state = state


class _EncodingUnpickler(pickle.Unpickler):
    """Reads the pickle of a tiktoken encoding without tiktoken, and without running anything it names."""

    def find_class(self, module: str, name: str) -> type:
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise _Refused(f"asks for {module}.{name}, allowed is tiktoken.core.Encoding alone; nothing of it was run.")
        return _Encoding


def tokenizer_from_nanochat(folder: str | Path, context: int | None = None) -> PreTrainedTokenizerFast:
    """nanochat's tokenizer as one of transformers, with the same ids for the same text, and the chat template.

    Special tokens in a text become their ids, as everywhere in transformers; nanochat reads a text as text alone, which
    `split_special_tokens=True` does here. Like the project's own tokenizers it puts <|bos|> in front of a text unless
    `add_special_tokens=False`. It pads with <|pad|>, or with <|assistant_end|> where there is none.

    Args:
        folder: the folder with tokenizer.pkl, a pickled `tiktoken.Encoding`. It is read as data: tiktoken is not
            needed, and nothing that the file names is run.
        context: the longest input of the model it is for, in tokens; None is no limit.

    Raises:
        ValueError: there is no tokenizer.pkl, it is something else, it asks for code, or its tokens are no vocabulary
            of byte-pair merges followed by nanochat's special tokens.

    Source: karpathy/nanochat at 01f5f10, `tokenizer.py`.
    """
    path = Path(folder) / "tokenizer.pkl"
    pattern, ranks, special = _read_encoding(path)
    merges = _merges(path, ranks)
    spell = bytes_to_unicode()
    written = {token: "".join(spell[byte] for byte in token) for token in ranks}
    bpe = models.BPE(
        vocab={written[token]: rank for token, rank in ranks.items()},
        merges=[(written[left], written[right]) for left, right in merges],
    )
    tokenizer = Tokenizer(bpe)
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the library has no class of its own for it
        raise ValueError(f"{path}: the pattern {pattern[:50]!r} is no regular expression ({error}).") from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(sorted(special, key=special.get))
    for name, token_id in special.items():
        if tokenizer.token_to_id(name) != token_id:
            raise ValueError(f"{path}: {name} has the id {token_id}, allowed are the ids that follow the merges'.")
    bos = ("<|bos|>", special["<|bos|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|assistant_end|>",
        pad_token="<|pad|>" if "<|pad|>" in special else "<|assistant_end|>",
        additional_special_tokens=sorted(special, key=special.get),
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        **({} if context is None else {"model_max_length": context}),
    )


def tokenizer_to_nanochat(tokenizer: PreTrainedTokenizerFast, folder: str | Path) -> Path:
    """Write a tokenizer in nanochat's form: tokenizer.pkl and token_bytes.pt.

    nanochat unpickles a `tiktoken.Encoding`, so tiktoken, which it needs too, makes the pickle. The bytes of a token
    are counted as they are, where nanochat counts those of the replacement character for a token that ends inside of
    a character.

    Args:
        tokenizer: a byte-level BPE tokenizer with nanochat's special tokens, as the verb `tokenizer` trains it or
            `tokenizer_from_nanochat` returns it.
        folder: the folder to write to, made if it is not there.

    Returns:
        The path of tokenizer.pkl.

    Raises:
        ValueError: tiktoken is not installed, or the tokenizer is of another kind: tiktoken would give other ids.
    """
    try:
        import tiktoken
    except ImportError:
        raise ValueError("nanochat's tokenizer needs tiktoken: pip install tiktoken.") from None
    pattern, ranks, special = _as_encoding(tokenizer)
    encoding = tiktoken.Encoding(name="rustbpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    folder = Path(folder)
    files.make_folder(folder)
    torch.save(torch.tensor(token_bytes(tokenizer), dtype=torch.int32), folder / "token_bytes.pt")
    path = folder / "tokenizer.pkl"
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(encoding))
    part.replace(path)
    return path


def _read_encoding(path: Path) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """The pattern, the ranks of tokens and the ids of special tokens."""
    if not path.is_file():
        raise ValueError(f"There is no {path}; allowed is the folder of nanochat's tokenizer.")
    no_encoding = f"{path} is no pickled tiktoken.Encoding, or is damaged."
    try:
        with path.open("rb") as file:
            encoding = _EncodingUnpickler(file).load()
    except _Refused as refused:
        raise ValueError(f"{path} {refused}") from None
    except Exception:  # the unpickler raises whatever its input makes it stumble over
        raise ValueError(no_encoding) from None
    state = getattr(encoding, "state", None) if type(encoding) is _Encoding else None
    if not isinstance(state, dict):
        raise ValueError(no_encoding)
    pattern, ranks, special = (state.get(name) for name in ("pat_str", "mergeable_ranks", "special_tokens"))
    if not (isinstance(pattern, str) and _maps(ranks, bytes) and _maps(special, str)):
        raise ValueError(no_encoding)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{path}: the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}, each once.")
    for name in NANOCHAT_TOKENS:
        if name not in special:
            raise ValueError(f"{path} lacks the special token {name}.")
    return pattern, ranks, special


def _maps(value, key_type: type) -> bool:
    """Whether a value is a dict from this type to ints."""
    return type(value) is dict and all(type(key) is key_type and type(item) is int for key, item in value.items())


def _merges(what, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that byte-pair encoding merges, in their order.

    tiktoken merges two neighbours if their concatenation is a token, the lowest rank first. A token's pair is what
    remains of its bytes when all tokens of lower rank are merged: in learned ranks no other pair ever meets.
    """
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"{what} lacks a token for the byte {byte}.")
    merges = []
    for token, rank in sorted(ranks.items(), key=operator.itemgetter(1)):
        if len(token) == 1:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(left + right, rank) for left, right in zip(parts, parts[1:], strict=False)]
            lowest = min(joined)
            if lowest >= rank:
                break
            i = joined.index(lowest)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) != 2:
            raise ValueError(
                f"{what}: the token {token!r} of rank {rank} is not the merge of two tokens of lower rank."
            )
        merges.append((parts[0], parts[1]))
    return merges


def _as_encoding(tokenizer: PreTrainedTokenizerFast) -> tuple[str, dict[bytes, int], dict[str, int]]:
    """What `_read_encoding` returns, of a tokenizer. Raises ValueError if tiktoken would not give the same ids."""
    refused = ValueError(
        "The tokenizer is not of nanochat's kind, allowed is byte-level BPE whose text is split by one pattern."
    )
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    pattern = None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        split, byte_level = parts["pre_tokenizer"]["pretokenizers"]
        kinds = (split["type"], split["behavior"], split["invert"], byte_level["type"], parts["model"]["type"])
        if kinds == ("Split", "Isolated", False, "ByteLevel", "BPE"):
            pattern = split["pattern"]["Regex"]
    if pattern is None or parts["normalizer"] or byte_level["add_prefix_space"] or byte_level["use_regex"]:
        raise refused
    special = {token["content"]: token["id"] for token in parts["added_tokens"]}
    for name in NANOCHAT_TOKENS:
        if name not in special:
            raise ValueError(f"The tokenizer lacks the special token {name}, which nanochat needs.")
    spelled = {character: byte for byte, character in bytes_to_unicode().items()}
    to_bytes = functools.partial(_spelled_bytes, spelled)
    try:
        ranks = {to_bytes(token): i for token, i in parts["model"]["vocab"].items() if token not in special}
        merges = [tuple(map(to_bytes, merge)) for merge in parts["model"]["merges"]]
    except KeyError:
        raise refused from None
    if _merges("The tokenizer", ranks) != merges:
        raise refused
    return pattern, ranks, special


def _spelled_bytes(spelled: dict[str, int], token: str) -> bytes:
    return bytes(spelled[character] for character in token)
