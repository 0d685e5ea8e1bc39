"""How far the tokens of a sequence spread in a model's hidden states, layer by layer.

Two figures, after arXiv 2602.09297: the share of the tokens' variance that lies within sequences, and the number of
principal components that hold 99 % of the variance.
"""

import dataclasses
import itertools
from collections.abc import Iterable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from laplacian_heads import sources
from laplacian_heads.files import check_model, write

# A variance this small beside the mean square is rounding.
ROUNDING = torch.finfo(torch.float64).eps


@dataclasses.dataclass
class GeometryRecipe:
    """Keys of `recipes/geometry.yaml`, which says what they mean."""

    models: list | None
    data: str | list
    documents: int
    tokens: int
    sequences: int
    batch_size: int
    output: str | None
    trust_remote_code: bool

    def __post_init__(self):
        if not self.models or not all(isinstance(model, str) and model for model in self.models):
            raise ValueError(f"models is {self.models}, allowed is a list of model folders and ids of the Hub.")
        if self.output is not None and len(self.models) > 1:
            raise ValueError(f"output is {self.output!r} for {len(self.models)} models, allowed is null or one model.")
        for name in ("data", "output"):
            if getattr(self, name) in ("", []):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, allowed is what recipes/geometry.yaml says of it."
                )
        for name, least in (("documents", 1), ("tokens", 2), ("sequences", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least {least}.")


def within_sequence_share(hidden: torch.Tensor) -> float:
    """E|x - mean of its sequence|^2 / E|x - mean of all|^2, from 0 to 1; 0 if nothing varies.

    The other part of the variance, to 1, is that of the sequences' means: a one-way analysis of variance whose groups
    are the sequences.

    Args:
        hidden: (sequences, tokens, width).
    """
    hidden = hidden.double()
    means = hidden.mean(1, keepdim=True)
    within = (hidden - means).square().sum(-1).mean()
    between = (means - means.mean(0, keepdim=True)).square().sum(-1).mean()
    total = within + between
    if total <= ROUNDING * hidden.square().sum(-1).mean():
        return 0.0
    return (within / total).item()


def components(hidden: torch.Tensor, share: float = 0.99) -> torch.Tensor:
    """The number of principal components that hold `share` of the variance of the tokens; 0 if nothing varies.

    Args:
        hidden: (..., tokens, width); tokens are centred over their own dimension.
        share: from 0 to 1.

    Returns:
        (...), int64.
    """
    hidden = hidden.double()
    centred = hidden - hidden.mean(-2, keepdim=True)
    tokens, width = centred.shape[-2:]
    # The smaller of the two products has the eigenvalues of the covariance that are not zero, times tokens.
    product = centred.mT @ centred if width < tokens else centred @ centred.mT
    eigenvalues = torch.linalg.eigvalsh(product).flip(-1).clamp(min=0)
    held = eigenvalues.cumsum(-1)
    total = held[..., -1:]
    varies = total[..., 0] > ROUNDING * hidden.square().sum((-2, -1))
    return torch.where(varies, (held < share * total).sum(-1) + 1, 0)


def sequences(tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], tokens: int, count: int) -> torch.Tensor:
    """The first `tokens` tokens of each document, after BOS if there is one; shorter documents are left out.

    Returns:
        (sequences, tokens), `count` sequences at most.

    Raises:
        ValueError: no document is long enough.
    """
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length = tokens - len(start)
    rows, longest = [], 0
    for document in documents:
        ids = tokenizer(document, add_special_tokens=False, truncation=True, max_length=length)["input_ids"]
        longest = max(longest, len(start) + len(ids))
        if len(ids) == length:
            rows.append(start + ids)
        if len(rows) == count:
            break
    if not rows:
        raise ValueError(f"tokens is {tokens}, but the longest document has {longest} tokens; give a smaller number.")
    return torch.tensor(rows)


@torch.no_grad()
def measure(model: PreTrainedModel, ids: torch.Tensor, batch_size: int) -> list[dict]:
    """The geometry of every hidden state that a model records.

    Layer 0 is what the first block reads: the embeddings, normed where the model norms them, as LaplaceGPT does. Layer
    l is the output of block l, but the last one is that output after the model's final norm, in all of transformers'
    language models that have one. So the last two layers differ by a norm too.

    Args:
        model: a causal language model of transformers.
        ids: (sequences, tokens).
        batch_size: sequences in one forward pass.

    Returns:
        A dict for each layer: its number, the share of `within_sequence_share`, and the `components` for 99 %, as the
        mean over the sequences ("components_99") and of all tokens together ("components_99_pooled").

    Raises:
        ValueError: the model records no hidden states, or they are not finite.
    """
    model.eval()
    layers = None
    for batch in tqdm(ids.split(batch_size), desc="hidden states", unit="batch"):
        # The base model: nobody needs the logits.
        outputs = model.base_model(input_ids=batch.to(model.device), output_hidden_states=True, use_cache=False)
        hidden_states = getattr(outputs, "hidden_states", None)
        if not hidden_states:
            raise ValueError(f"{type(model).__name__} records no hidden states.")
        layers = layers or [[] for _ in hidden_states]
        for layer, hidden in zip(layers, hidden_states, strict=True):
            layer.append(hidden.float().cpu())

    result = []
    for i in tqdm(range(len(layers)), desc="components", unit="layer"):
        hidden, layers[i] = torch.cat(layers[i]), None
        if not hidden.isfinite().all():
            raise ValueError(f"The hidden states of layer {i} are not finite; the model is damaged.")
        result.append(
            {
                "layer": i,
                "within_sequence_share": within_sequence_share(hidden),
                "components_99": torch.stack([components(sequence) for sequence in hidden]).double().mean().item(),
                "components_99_pooled": components(hidden.flatten(0, 1)).item(),
            }
        )
    return result


def geometry(recipe: GeometryRecipe, dry_run: bool = False) -> None:
    """Measure models' geometry, print a table for each, and write geometry.json and geometry.png into their folders.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or a model does not record what is needed.
        OSError: a model cannot be read, or a file not written.
    """
    for model in recipe.models:
        check_model(model)
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=recipe.trust_remote_code)
        except (OSError, ValueError) as error:  # of which not all name the model
            raise ValueError(f"{model} cannot be read, neither as a folder nor from the Hub: {error}") from error
        context = getattr(config, "max_position_embeddings", None)
        if context is not None and recipe.tokens > context:
            raise ValueError(f"tokens is {recipe.tokens}, allowed for {model} is at most its context, {context}.")
        print(
            f"{model}: {config.num_hidden_layers} layers of width {config.hidden_size}, at most {recipe.sequences} "
            f"sequences of {recipe.tokens} tokens from {recipe.data}, into {results_folder(model, recipe.output)}"
        )
    if dry_run:
        return

    from laplacian_heads.eval import plots  # here, so that the measures come without matplotlib

    documents = list(itertools.islice(sources.documents(recipe.data), recipe.documents))
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    for name in recipe.models:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=recipe.trust_remote_code)
        ids = sequences(tokenizer, documents, recipe.tokens, recipe.sequences)
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=recipe.trust_remote_code).to(device)
        layers = measure(model, ids, recipe.batch_size)

        folder = results_folder(name, recipe.output)
        folder.mkdir(parents=True, exist_ok=True)
        result = {"layers": layers, "data": recipe.data, "sequences": len(ids), "tokens": recipe.tokens}
        write(folder / "geometry.json", result)
        plots.geometry({name: layers}, folder / "geometry.png")
        print(f"\n{name}: {len(ids)} sequences of {recipe.tokens} tokens\n")
        print("layer  within-sequence share  components for 99 %: of a sequence  of all tokens")
        for layer in layers:
            print(
                f"{layer['layer']:5}  {layer['within_sequence_share']:21.3f}  {layer['components_99']:31.1f}"
                f"  {layer['components_99_pooled']:13}"
            )


def results_folder(model: str, output: str | None = None) -> Path:
    """Where what was measured of a model lies: its own folder; for an id of the Hub runs/eval/OWNER--NAME."""
    if output is not None:
        return Path(output).expanduser()
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else Path("runs", "eval", model.replace("/", "--"))
