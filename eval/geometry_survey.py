"""From a model's forward passes to the measures of `geometry`: which hidden states go where."""

import dataclasses

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from laplacian_heads.eval.geometry import (
    Accumulator,
    AttentionEntropy,
    Groups,
    NearestMean,
    NotFiniteError,
    Similarity,
    Spectrum,
    Variance,
    collapse,
    float64,
    with_shares,
)
from laplacian_heads.eval.geometry_inputs import Batch

METRICS = ("variance", "spectra", "collapse", "pca", "similarity", "attention_entropy", "nearest_mean")
KINDS = ("tokens", "sequence_means", "classifier_input")  # what has classes
PICTURES = 6  # images whose patches are shown


@dataclasses.dataclass
class Seen:
    """What a forward pass shows.

    Args:
        hidden: of each layer (sequences, tokens, width). Layer 0 is what the first block reads, layer l the output of
            block l, and the last is the base model's output, after its final norm if it has one.
        attention: of each block (sequences, heads, queries, keys), if it was asked for.
        classifier_input: (sequences, width), of a classifier of images.
    """

    hidden: list[torch.Tensor]
    attention: list[torch.Tensor]
    classifier_input: torch.Tensor | None


@dataclasses.dataclass
class Points:
    """What the plots of principal components show of a model's last layer.

    Args:
        points: (points, 2), tokens in the first two components.
        classes: the name of each one's class, None where it has none.
        shares: of the variance, the first two components'.
        pictures: for some images (height, width, 3) pixels and (rows, columns, 3) the first three components of their
            patches, both in 0 to 1.
    """

    points: np.ndarray
    classes: list[str | None]
    shares: tuple[float, float]
    pictures: list[tuple[np.ndarray, np.ndarray]]


def classifier(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The linear layer that gives the logits of next tokens, or of the classes of images; None if there is none."""
    head = model.get_output_embeddings() or getattr(model, "classifier", None)
    linear = [] if head is None else [module for module in head.modules() if isinstance(module, torch.nn.Linear)]
    return linear[-1] if linear else None


@torch.no_grad()
def look(model: PreTrainedModel, batch: Batch, attention: bool = False) -> Seen:
    """Run a model of transformers on a batch.

    Raises:
        ValueError: it records no hidden states or, where they are asked for, no attention.
    """
    caught = {}
    hooks = [model.base_model.register_forward_hook(lambda *called: caught.update(base=called[-1]))]
    images, head = "pixel_values" in batch.inputs, classifier(model)
    if images and head is not None:
        hooks.append(head.register_forward_pre_hook(lambda _, given: caught.update(head=given[0])))
    asked = {"output_hidden_states": True}
    if attention:
        asked["output_attentions"] = True
    if getattr(model.config, "use_cache", None):
        asked["use_cache"] = False
    values = {name: value.to(model.device) for name, value in batch.inputs.items()}
    values = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in values.items()}
    try:
        # Of a language model the base alone: nobody needs the logits.
        (model if images else model.base_model)(**values, **asked)
    except Exception as error:  # whatever a model of anybody says to inputs that it does not take
        what = " ".join(str(error).split())
        raise ValueError(f"{type(model).__name__} does not take the data ({type(error).__name__}: {what}).") from error
    finally:
        for hook in hooks:
            hook.remove()
    output = caught["base"]
    hidden = list(getattr(output, "hidden_states", None) or [])
    if not hidden:
        raise ValueError(f"{type(model).__name__} records no hidden states.")
    last = getattr(output, "last_hidden_state", None)
    if last is not None and last.shape == hidden[-1].shape:
        hidden[-1] = last
    recorded = [each for each in getattr(output, "attentions", None) or [] if isinstance(each, torch.Tensor)]
    if attention and len(recorded) != len(hidden) - 1:
        raise ValueError(f"{type(model).__name__} does not record the attention of every block: no attention_entropy.")
    # Networks without a class token keep (images, width, rows, columns).
    hidden = [each.flatten(2).mT if each.dim() == 4 else each for each in hidden]
    return Seen(hidden, recorded, caught.get("head"))


class Survey:
    """The measures of a model's layers over batches.

    Args:
        model: of transformers.
        metrics: some of METRICS; "variance", "similarity" and "attention_entropy" are of every layer.
        layers: where "spectra", "collapse" and "nearest_mean" are measured; negative ones count from the last.
        skip: so many of the first tokens are not measured.
        points_per_sequence: tokens that the scatter of "pca" shows of each sequence.
        classifies: whether a classifier of images has the classes of the data.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        metrics: list[str],
        layers: list[int],
        skip: int = 0,
        points_per_sequence: int = 1,
        classifies: bool = True,
    ):
        self.model, self.metrics, self.chosen, self.skip = model, metrics, layers, skip
        self.points_per_sequence = points_per_sequence
        self.images = model.main_input_name == "pixel_values"
        self.head = classifier(model) if classifies else None
        self.sums: list[dict[str, Accumulator]] = []
        self.nearest: list[dict[str, NearestMean]] = []
        self.sequences = self.tokens = 0
        self.sample, self.pictures = [], []

    def update(self, batch: Batch) -> None:
        """Take in a batch.

        Raises:
            ValueError: a layer that is not there, or NaN or infinity in one; see `look`.
        """
        seen = look(self.model, batch, "attention_entropy" in self.metrics)
        hidden = [each[:, self.skip :] for each in seen.hidden]
        if not hidden[-1].shape[1]:
            raise ValueError(
                f"skip is {self.skip}, allowed is less than the {seen.hidden[-1].shape[1]} tokens there are."
            )
        self.sums = self.sums or [{} for _ in hidden]
        for layer, each in enumerate(hidden):
            try:
                self._update(layer, each, batch, seen)
            except NotFiniteError:
                raise NotFiniteError(
                    f"Layer {layer} of {self.model.name_or_path or type(self.model).__name__} has NaN or infinity in "
                    "its hidden states; the model is damaged, or its dtype is too small for them."
                ) from None
        self.sequences += len(hidden[-1])
        self.tokens += hidden[-1].shape[:2].numel()
        if "pca" in self.metrics:
            self._keep(hidden[-1], batch)

    def _update(self, layer: int, hidden: torch.Tensor, batch: Batch, seen: Seen) -> None:
        sums = self.sums[layer]
        labels = None if batch.labels is None else batch.labels.to(hidden.device)
        if "variance" in self.metrics:
            sums.setdefault("variance", Variance()).update(hidden, labels=labels)
        if "similarity" in self.metrics:
            sums.setdefault("similarity", Similarity()).update(hidden)
        if layer > 0 and seen.attention:
            sums.setdefault("attention_entropy", AttentionEntropy()).update(seen.attention[layer - 1])
        last, chosen = layer == len(self.sums) - 1, layer in self._chosen()
        if ("spectra" in self.metrics and chosen) or ("pca" in self.metrics and last):
            sums.setdefault("spectra", Spectrum()).update(hidden)
        if "collapse" in self.metrics and chosen:
            for kind, vectors, classes in self._classified(hidden, batch, seen, last):
                sums.setdefault(kind, Groups(scatter=True)).update(vectors, classes)

    def _chosen(self) -> set[int]:
        count = len(self.sums)
        for layer in self.chosen:
            if not -count <= layer < count:
                raise ValueError(f"layers has {layer}, allowed are {-count} to {count - 1}.")
        return {layer % count for layer in self.chosen}

    def _classified(self, hidden: torch.Tensor, batch: Batch, seen: Seen, last: bool) -> list[tuple]:
        """Kind, (vectors, width) and (vectors,) classes of everything that has classes in a layer."""
        if batch.token_labels is not None:
            classes = batch.token_labels[:, self.skip :].to(hidden.device)
            return [("tokens", hidden.flatten(0, 1), classes.flatten())]
        if batch.labels is None:
            return []
        classes = batch.labels.to(hidden.device)
        found = [
            ("tokens", hidden.flatten(0, 1), classes.repeat_interleave(hidden.shape[1])),
            ("sequence_means", float64(hidden).mean(1), classes),
        ]
        if last and seen.classifier_input is not None:
            found.append(("classifier_input", seen.classifier_input.flatten(1), classes))
        return found

    def _keep(self, hidden: torch.Tensor, batch: Batch) -> None:
        """Tokens for the scatter, evenly from each sequence, and patches of the first images."""
        places = torch.linspace(0, hidden.shape[1] - 1, min(self.points_per_sequence, hidden.shape[1])).long()
        if batch.token_labels is not None:
            classes = batch.token_labels[:, self.skip :][:, places].flatten()
        elif batch.labels is not None:
            classes = batch.labels.repeat_interleave(len(places))
        else:
            classes = torch.full((len(hidden) * len(places),), -1)
        self.sample.append((hidden[:, places].flatten(0, 1).cpu().double(), classes))
        config = self.model.config
        patch = getattr(config, "patch_size", None)
        if batch.pixels is None or len(self.pictures) >= PICTURES or not isinstance(patch, int):
            return
        rows, columns = (side // patch for side in batch.pixels.shape[1:3])
        before = hidden.shape[1] + self.skip - rows * columns  # class token, registers, DeiT's token of distillation
        if rows * columns > 1 and self.skip <= before <= 2 + (getattr(config, "num_register_tokens", 0) or 0):
            for pixels, tokens in zip(batch.pixels, hidden[:, -rows * columns :].cpu().double(), strict=True):
                if len(self.pictures) < PICTURES:
                    self.pictures.append((pixels, tokens.view(rows, columns, -1)))

    def gather(self) -> None:
        """Merge what all processes have measured, in each of them."""
        self.sums = gathered(self.sums)
        counts = gather_object([(self.sequences, self.tokens)])
        self.sequences, self.tokens = (sum(each) for each in zip(*counts, strict=True))

    def update_nearest(self, batch: Batch) -> None:
        """Take in a batch once more, for "nearest_mean", when all have been taken in and gathered."""
        seen = look(self.model, batch)
        if not self.nearest:
            kinds = [{kind: sums[kind] for kind in KINDS if kind in sums} for sums in self.sums]
            self.nearest = [
                {kind: NearestMean(groups) for kind, groups in sums.items() if groups.labels is not None}
                for sums in kinds
            ]
        for layer, nearest in enumerate(self.nearest):
            if not nearest:
                continue
            last = layer == len(self.sums) - 1
            for kind, vectors, classes in self._classified(seen.hidden[layer][:, self.skip :], batch, seen, last):
                decisions = self._decisions(seen, nearest[kind].labels)
                if decisions is not None and len(vectors) > len(decisions):  # of images, one for all its tokens
                    decisions = decisions.repeat_interleave(len(vectors) // len(decisions))
                nearest[kind].update(vectors.cpu(), classes.cpu(), decisions)

    def _decisions(self, seen: Seen, labels: torch.Tensor) -> torch.Tensor | None:
        """The likeliest of the classes, for each token or image; None if nothing says which."""
        vectors = seen.hidden[-1][:, self.skip :].flatten(0, 1) if not self.images else seen.classifier_input
        if self.head is None or vectors is None:
            return None
        rows = labels.to(self.head.weight.device)
        bias = None if self.head.bias is None else self.head.bias[rows]
        logits = torch.nn.functional.linear(vectors, self.head.weight[rows], bias)
        return labels[logits.argmax(-1).cpu()]

    def layers(self) -> list[dict]:
        """The figures of each layer, as geometry.json has them."""
        nearest = gathered(self.nearest) or [{}] * len(self.sums)
        return [self._layer(i, sums, near) for i, (sums, near) in enumerate(zip(self.sums, nearest, strict=True))]

    def _layer(self, layer: int, sums: dict[str, Accumulator], nearest: dict[str, Accumulator]) -> dict:
        found = {"layer": layer}
        for name in ("variance", "similarity", "attention_entropy"):
            if name in sums:
                found[name] = sums[name].result()
        if "spectra" in sums and "spectra" in self.metrics and layer in self._chosen():
            found["spectrum"] = sums["spectra"].result()
        kinds = {kind: sums[kind] for kind in KINDS if kind in sums and sums[kind].labels is not None}
        if kinds:
            found["collapse"] = {
                kind: collapse(groups, self._weight(groups)) | (nearest[kind].result() if kind in nearest else {})
                for kind, groups in kinds.items()
            }
        if "variance" in found and "tokens" in kinds and not self.images:
            within, between = kinds["tokens"].variance()
            classes = with_shares({"total": within + between, "within_class": within, "between_class": between})
            shares = found["variance"]["shares"] | classes.pop("shares")
            found["variance"] |= {**classes, "total": found["variance"]["total"], "shares": shares}
        return found

    def _weight(self, groups: Groups) -> torch.Tensor | None:
        """The classifier's weight, if it reads what the groups are of."""
        if self.head is None or self.head.in_features != groups.means.shape[1]:
            return None
        return self.head.weight.detach().cpu()

    def points(self, names: dict[int, str]) -> Points:
        """What the plots of principal components show.

        Args:
            names: of the classes.
        """
        spectrum = self.sums[-1]["spectra"]
        eigenvalues, components = spectrum.principal()
        vectors, classes = (torch.cat(each) for each in zip(*self.sample, strict=True))
        shares = (eigenvalues / eigenvalues.sum()).nan_to_num()[:2].tolist()
        return Points(
            ((vectors - spectrum.pooled.means[0]) @ components[:2].mT).numpy(),
            [names.get(label, str(label)) if label >= 0 else None for label in classes.tolist()],
            tuple(shares),
            self._patches(),
        )

    def _patches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The pictures, and their patches in the first three components of all their patches, each from 0 to 1."""
        if not self.pictures:
            return []
        patches = torch.cat([tokens.flatten(0, 1) for _, tokens in self.pictures])
        centre = patches.mean(0)
        _, _, directions = torch.linalg.svd(patches - centre, full_matrices=False)
        colours = (patches - centre) @ directions[:3].mT
        low, high = colours.amin(0), colours.amax(0)
        return [
            (pixels, (((tokens - centre) @ directions[:3].mT - low) / (high - low).clamp(min=1e-12)).numpy())
            for pixels, tokens in self.pictures
        ]


def gathered(sums: list[dict[str, Accumulator]]) -> list[dict[str, Accumulator]]:
    """What the processes have summed for each layer, merged, and in main memory."""
    own = [{name: accumulator.cpu() for name, accumulator in layer.items()} for layer in sums]
    first, *others = [part for part in gather_object([own]) if part] or [[]]
    for other in others:
        for into, layer in zip(first, other, strict=True):
            for name, accumulator in layer.items():
                if name in into:
                    into[name].merge(accumulator)
                else:
                    into[name] = accumulator
    return first
