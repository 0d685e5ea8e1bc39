"""The verb geometry: how tokens lie in models' hidden states, as geometry.json, plots and a report."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from laplacian_heads import sources
from laplacian_heads.eval import geometry_plots, geometry_report
from laplacian_heads.eval.geometry_inputs import Batch, image_batches, sequences, text_batches
from laplacian_heads.eval.geometry_survey import METRICS, Points, Survey, classifier
from laplacian_heads.eval.results import results_folder
from laplacian_heads.files import check_writable, newest, weights_hash, write
from laplacian_heads.images import sample
from laplacian_heads.laplacian import heads_by_layer

POINTS = 2000  # of the scatter plot
SEQUENCES, IMAGES = 64, 2000  # that are measured if the recipe does not say how many


@dataclasses.dataclass
class GeometryRecipe:
    """Keys of `recipes/geometry.yaml`, which says what they mean."""

    models: list | None
    data: str | list
    documents: int
    tokens: int
    skip: int
    min_count: int
    sequences: int | None
    batch_size: int
    metrics: list | str
    layers: list | int
    output: str | None
    trust_remote_code: bool

    def __post_init__(self):
        if not self.models or not all(isinstance(model, str) and model for model in self.models):
            raise ValueError(f"models is {self.models}, allowed is a list of model folders and ids of the Hub.")
        if len({Path(model).expanduser().absolute() for model in self.models}) < len(self.models):
            raise ValueError(f"models is {self.models}, allowed is each model once.")
        for name in ("data", "output"):
            if getattr(self, name) in ("", []):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, allowed is what recipes/geometry.yaml says of it."
                )
        for name, least in (("documents", 1), ("tokens", 2), ("skip", 0), ("min_count", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least {least}.")
        if self.sequences is not None and self.sequences < 1:
            raise ValueError(f"sequences is {self.sequences}, allowed is at least 1, or null.")
        if self.skip >= self.tokens:
            raise ValueError(f"skip is {self.skip}, allowed is less than tokens, {self.tokens}.")
        self.metrics = [self.metrics] if isinstance(self.metrics, str) else self.metrics
        self.layers = self.layers if isinstance(self.layers, list) else [self.layers]
        for metric in self.metrics:
            if metric not in METRICS:
                raise ValueError(f"metrics has {metric!r}, allowed are {', '.join(METRICS)}.")
        if not self.metrics:
            raise ValueError(f"metrics is [], allowed are {', '.join(METRICS)}.")
        if "nearest_mean" in self.metrics and "collapse" not in self.metrics:
            raise ValueError(f"metrics is {self.metrics}, allowed is nearest_mean only beside collapse.")
        if not self.layers or not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in self.layers):
            raise ValueError(f"layers is {self.layers}, allowed is a list of numbers, such as [0, 6, -1].")


def geometry(recipe: GeometryRecipe, dry_run: bool = False) -> None:
    """Measure models' geometry, print a table for each, and write geometry.json, plots and a report.

    Of one model everything goes to its folder, the plots and report into `geometry` there; of several models the plots
    and the report, which compare them, go to `recipe.output` or runs/geometry.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or a model does not record what is needed.
        OSError: a model cannot be read, or a file not written.
    """
    state = PartialState(cpu=not torch.accelerator.is_available())
    folders = {name: newest(name) for name in recipe.models}
    configs = {name: _config(folder, recipe) for name, folder in folders.items()}
    several = len(recipe.models) > 1
    targets = {name: results_folder(folder, None if several else recipe.output) for name, folder in folders.items()}
    pages = Path(recipe.output or "runs/geometry").expanduser() if several else targets[recipe.models[0]] / "geometry"
    if state.is_main_process:
        for name, config in configs.items():
            print(f"{folders[name]}: {_size(config)}, {', '.join(recipe.metrics)}, into {targets[name]}")
        print(f"data: {recipe.data}; plots and report: {pages}")
    if dry_run:
        return

    for folder in {pages, *targets.values()} if state.is_main_process else ():
        check_writable(folder)
    shown = short(recipe.models)
    measured, points, logs = {}, {}, {}
    for model, folder in folders.items():
        name = shown[model]
        measured[name], points[name] = _measured(folder, configs[model], recipe)
        logs[name] = _log(folder)
        if state.is_main_process:
            write(targets[model] / "geometry.json", measured[name])
            print(f"\n{model}: {measured[name]['sequences']} sequences, {measured[name]['tokens']:,} tokens\n")
            print(geometry_report.tables({name: measured[name]}))
            if "collapse" in recipe.metrics and not any("collapse" in layer for layer in measured[name]["layers"]):
                print("No collapse was measured: no token or image of the data has a class.")
    if state.is_main_process:
        geometry_report.write(measured, geometry_plots.all_of(measured, pages, points, logs), pages)
        print(f"\n{pages / 'report.html'}")


def short(models: list[str]) -> dict[str, str]:
    """What to call each model: its folder's name, if no two are alike; reports are published, paths are private."""
    names = {model: Path(model).name if Path(model).expanduser().is_dir() else model for model in models}
    return names if len(set(names.values())) == len(models) else {model: model for model in models}


def _config(name: str, recipe: GeometryRecipe):
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=recipe.trust_remote_code)
    except (OSError, ValueError) as error:  # of which not all name the model
        if "trust_remote_code" in str(error):
            raise ValueError(f"{name} comes with code of its own: --trust_remote_code lets it run.") from None
        raise ValueError(f"{name} cannot be read, neither as a folder nor from the Hub: {error}") from error
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and recipe.tokens > context:
        raise ValueError(f"tokens is {recipe.tokens}, allowed for {name} is at most its context, {context}.")
    return config


def _size(config) -> str:
    layers, width = (getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size"))
    return config.model_type if None in (layers, width) else f"{layers} layers of width {width}"


def _log(folder: str) -> list[dict]:
    """What Trainer logged, [] where nothing did or the file is damaged: no plot of it is worth the measurement."""
    try:
        state = json.loads((Path(folder).expanduser() / "trainer_state.json").read_text(encoding="utf-8"))
        return [entry for entry in state["log_history"] if "step" in entry]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def load(name: str, config, recipe: GeometryRecipe) -> PreTrainedModel:
    """A model with the head it was saved with, for next tokens or for classes of images, or with none."""
    saved, code = set(config.architectures or []), getattr(config, "auto_map", {})
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__ in saved
    if causal or "AutoModelForCausalLM" in code:
        kind = AutoModelForCausalLM
    elif any(each.endswith("ForImageClassification") for each in saved):
        kind = AutoModelForImageClassification
    else:
        kind = AutoModel
    # Attention is recorded by the one implementation that makes P.
    eager = {"attn_implementation": "eager"} if "attention_entropy" in recipe.metrics else {}
    asked = {"trust_remote_code": recipe.trust_remote_code, "output_loading_info": True, **eager}
    try:
        model, loading = kind.from_pretrained(name, **asked)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
    for weight in sorted({*loading["missing_keys"], *loading["mismatched_keys"]}):
        if "pooler" not in weight:  # on which no hidden state depends, and which many are saved without
            raise ValueError(f"The weight {weight} of {name} is missing or of another shape.")
    if getattr(config, "mask_ratio", None):
        raise ValueError(f"{name} is a {config.model_type}, which leaves out patches at random.")
    return model.to(PartialState().device).eval()


def _measured(name: str, config, recipe: GeometryRecipe) -> tuple[dict, Points | None]:
    """What geometry.json says of a model, and the points to plot."""
    model = load(name, config, recipe)
    state = PartialState()
    read = _images if model.main_input_name == "pixel_values" else _text
    batches, count, names, classifies = read(name, model, recipe)

    def mine(what: str) -> Iterator[Batch]:
        """The batches of this process."""
        some = batches(process=state.process_index, processes=state.num_processes)
        total = -(-count // (recipe.batch_size * state.num_processes))
        return tqdm(some, f"{Path(name).name}, {what}", total, unit="batch", disable=not state.is_main_process)

    points = max(1, POINTS // count)
    survey = Survey(model, recipe.metrics, recipe.layers, recipe.skip, points, classifies)
    for batch in mine("geometry"):
        survey.update(batch)
    survey.gather()
    if "nearest_mean" in recipe.metrics:
        for batch in mine("nearest means"):
            survey.update_nearest(batch)
    found = {
        "model": name,
        "weights": weights_hash(Path(name).expanduser()),
        "data": recipe.data,
        "sequences": survey.sequences,
        "tokens": survey.tokens,
        "classes_are": ("labels" if survey.images else "next tokens") if names else None,
        "laplacian_heads": heads(config),
        "layers": survey.layers(),
    }
    plotted = "pca" in recipe.metrics and state.is_main_process
    return found, survey.points(names) if plotted else None


def _text(name: str, model: PreTrainedModel, recipe: GeometryRecipe) -> tuple[Callable, int, dict[int, str], bool]:
    """Batches of a language model, how many sequences they have, and the names of the classes; as `_images`."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=recipe.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no tokenizer in {name} ({' '.join(str(error).split())[:200]}).") from error
    documents = itertools.islice(sources.documents(recipe.data), recipe.documents)
    ids = sequences(tokenizer, documents, recipe.tokens, recipe.sequences or SEQUENCES)
    rows = model.get_input_embeddings().num_embeddings
    if ids.max() >= rows:
        raise ValueError(f"The tokenizer in {name} gives the token {ids.max()}, the model has {rows}.")
    # What is trained to see both sides predicts no next token.
    masked = type(model.config) in MODEL_FOR_MASKED_LM_MAPPING and model.get_output_embeddings() is None
    names = {} if masked else {token: repr(tokenizer.decode([token])) for token in ids.unique().tolist()}
    least = ids.numel() + 1 if masked else recipe.min_count
    return functools.partial(text_batches, ids, recipe.batch_size, recipe.skip, least), len(ids), names, True


def _images(name: str, model: PreTrainedModel, recipe: GeometryRecipe) -> tuple[Callable, int, dict[int, str], bool]:
    """Batches of a model of images, how many there are, names of the classes, and whether its classifier has those.

    Classes of the data that the model knows by name have the model's numbers.
    """
    if not isinstance(recipe.data, str) or recipe.data in sources.BUILT_IN:
        raise ValueError(
            f"data is {recipe.data!r}, allowed for {name}, which reads images, is a folder with a folder for each "
            "class, or a dataset of the Hub."
        )
    try:
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=recipe.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no image processor in {name} ({' '.join(str(error).split())[:200]}).") from error
    found = sample(recipe.data, recipe.sequences or IMAGES)
    known = {label: number for number, label in (model.config.id2label or {}).items()}
    # Names that a config makes up, LABEL_0 and so on, say nothing.
    unnamed = all(str(label).startswith("LABEL_") for label in known) and len(known) == len(found.names)
    by_name = set(found.names) <= known.keys()
    if found.names and not by_name and not unnamed and classifier(model) is not None:
        print(f"{name} classifies other classes than {recipe.data} has: nothing is compared with its classifier.")
    numbers = [known[label] if by_name else number for number, label in enumerate(found.names)]
    channels = getattr(model.config, "num_channels", 3)
    batches = functools.partial(image_batches, found, numbers, processor, channels, recipe.batch_size)
    return batches, found.count, dict(zip(numbers, found.names, strict=True)), by_name or unnamed


def heads(config) -> list[list[int]] | None:
    heads = getattr(config, "laplacian_heads", None)
    if heads is None:
        return None
    return heads_by_layer(heads, [config.num_attention_heads] * config.num_hidden_layers)
