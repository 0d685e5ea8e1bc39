"""The verb segment: a linear head on a frozen vision transformer tells the class of each pixel, as for ADE20K."""

import contextlib
import dataclasses
import importlib.util
import math
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import PIL.Image
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from matplotlib.patches import Patch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, interpolate, pad
from tqdm import tqdm
from transformers import Trainer, TrainingArguments, set_seed

from laplacian_heads import recipes
from laplacian_heads.eval import features, masks, plots
from laplacian_heads.eval.geometry_report import UNKNOWN, markdown_table
from laplacian_heads.eval.iou import IGNORED, ConfusionMatrix, reduced, without_nan
from laplacian_heads.eval.results import results_folder
from laplacian_heads.files import check_checkpoint, locked, make_folder, newest, read_json, weights_hash, write

ENLARGED = 16  # classes whose maps are enlarged at a time: those of all can take gigabytes
SHOWN = 480  # pixels of the longer side of a picture in the figure
NAMED = 24  # classes that the figure's key has at most
REPORTS = ("none", "tensorboard", "wandb", "trackio")
INITIAL_STD = 0.01  # of the classifier's weights
HOW_TO_READ = (
    "head.safetensors has norm, a batch normalisation of the tokens, and classifier, a 1 x 1 convolution, in the order "
    "dropout, norm, classifier; blocks says which tokens are side by side, each after the model's final norm"
)


@dataclasses.dataclass
class SegmentRecipe:
    """Keys of `recipes/segment.yaml`, which says what they mean."""

    model: str | None
    data: str
    held_out: str
    mask: str | None
    classes: int
    names: str | None
    reduce_labels: bool
    ignore_index: int
    blocks: int | list
    shorter_side: int
    scale: list
    crop: int
    stride: int
    flip: float
    dropout: float
    steps: int
    images_per_step: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    bf16: bool
    seed: int
    workers: int
    logging_steps: int
    eval_steps: int | None
    save_steps: int
    report_to: str
    pictures: int
    output: str | None
    trust_remote_code: bool

    def __post_init__(self):
        for name in ("model", "data", "held_out"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is what recipes/segment.yaml says of it.")
        if self.output == "":
            raise ValueError("output is '', allowed is the path of a folder, or null.")
        positive = ("shorter_side", "crop", "stride", "steps", "images_per_step", "batch_size")
        for name in (*positive, "logging_steps", "save_steps", "eval_steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 1.")
        for name in ("workers", "warmup_steps", "pictures"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 0.")
        if self.report_to not in REPORTS:
            raise ValueError(f"report_to is {self.report_to!r}, allowed are {', '.join(REPORTS)}.")
        if self.report_to != "none" and importlib.util.find_spec(self.report_to) is None:
            raise ValueError(f"report_to is {self.report_to}, which is not installed: pip install {self.report_to}.")
        if self.classes < 2:
            raise ValueError(f"classes is {self.classes}, allowed is at least 2.")
        if self.reduce_labels and self.ignore_index != IGNORED:
            raise ValueError(f"ignore_index is {self.ignore_index}, allowed with reduce_labels is {IGNORED}.")
        if 0 <= self.ignore_index < self.classes:
            raise ValueError(f"ignore_index is {self.ignore_index}, allowed is none of the {self.classes} classes.")
        if self.stride > self.crop:
            raise ValueError(f"stride is {self.stride}, allowed is at most crop, {self.crop}.")
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps is {self.warmup_steps}, allowed is less than steps, {self.steps}.")
        blocks = self.blocks if isinstance(self.blocks, list) else [self.blocks]
        if not blocks or not all(
            isinstance(block, int) and not isinstance(block, bool) and block > 0 for block in blocks
        ):
            raise ValueError(f"blocks is {self.blocks}, allowed is a number from 1, or a list of such.")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip is {self.flip}, allowed is a number from 0 to 1.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}, allowed is a number from 0 to below 1.")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate is {self.learning_rate}, allowed is a finite number above 0.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}, allowed is a finite number of at least 0.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}, allowed is 0 to {2**32 - 1}.")
        scale = self.scale
        numbers = len(scale) == 2 and all(isinstance(part, int | float) for part in scale)
        if not numbers or not 0 < scale[0] <= scale[1] < math.inf:
            raise ValueError(f"scale is {scale}, allowed are two numbers above 0, the smaller first.")
        processes = _state().num_processes
        if self.images_per_step % (self.batch_size * processes):
            raise ValueError(
                f"images_per_step is {self.images_per_step}, allowed are multiples of {self.batch_size * processes}, "
                f"which is batch_size times {processes} processes."
            )

    def labels(self, mask: np.ndarray) -> torch.Tensor:
        """A mask as classes from 0 and ignore_index. Raises ValueError for what is neither."""
        labels = torch.from_numpy(mask)
        labels = reduced(labels) if self.reduce_labels else labels
        wrong = (labels != self.ignore_index) & ((labels < 0) | (labels >= self.classes))
        if wrong.any():
            first = int(self.reduce_labels)
            raise ValueError(
                f"has the label {mask[wrong.numpy()][0]}, allowed are {first} to {self.classes - 1 + first}"
                + (f", and 0 and {IGNORED} for none" if first else f", and {self.ignore_index} for none")
            )
        return labels


def segment(recipe: SegmentRecipe, dry_run: bool = False) -> None:
    """Train a linear head on the patches of a frozen model, and measure it on held-out pictures.

    The model's folder, or `recipe.output`, then holds `segment.json`, and in its folder `segment` the head, a figure of
    some held-out pictures, the log and the recipe. A run that was interrupted goes on.

    Raises:
        ValueError: a value of the recipe, its data or its model is not allowed, or there are results of another recipe.
    """
    state = _state()
    name = newest(recipe.model)
    folder = results_folder(name, recipe.output)
    run = folder / "segment"
    recipes.check_output(run, recipe)
    weights = weights_hash(Path(name).expanduser())
    if (run / "backbone.json").exists() and read_json(run / "backbone.json")["weights"] != weights:
        raise ValueError(f"output: {run} holds the results of other weights than {name} has; give another output=.")
    if (run / "head.safetensors").exists():
        print(f"{run} is finished.")
        return
    with state.main_process_first():  # what is fetched, is fetched once
        train, held_out = masks.load(recipe.data, recipe.mask), masks.load(recipe.held_out, recipe.mask)
    names = _names(recipe)
    if state.is_main_process:
        print(
            f"{name}: {recipe.steps:,} steps of {recipe.images_per_step} of {len(train):,} pictures, measured on "
            f"{len(held_out):,}, {recipe.classes} classes, into {folder}"
        )
    if dry_run:
        return

    if state.is_main_process:
        make_folder(run)
    with locked(run, "at work", 1) if state.is_main_process else contextlib.nullcontext():
        _train(recipe, name, folder, weights, train, held_out, names)


def _train(
    recipe: SegmentRecipe,
    name: str,
    folder: Path,
    weights: str | None,
    train: masks.Masked,
    held_out: masks.Masked,
    names: list[str] | None,
) -> None:
    """Train and measure a head, and write what there is of it into the folder."""
    state, run = _state(), folder / "segment"
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    backbone = features.load(name, recipe.trust_remote_code, bf16=recipe.bf16 and has_bf16)
    set_seed(recipe.seed)  # after loading, so that models of one width begin with the same head
    segmenter = Segmenter(backbone, recipe)
    crops, whole = Crops(recipe, train, backbone.processor), Whole(recipe, held_out, backbone.processor)
    for row in (crops[0], whole[0]):  # before there is work to lose
        if isinstance(row, Exception):
            raise row
    backbone.tokens(crops[0]["pixel_values"][None, :, : backbone.patch[0], : backbone.patch[1]], recipe.blocks)
    if state.is_main_process:
        recipes.write(run / "recipe.yaml", recipe)
        write(run / "backbone.json", {"weights": weights})
    state.wait_for_everyone()
    trainer = _trainer(recipe, run, segmenter, crops, whole)
    if trainer.is_fsdp_enabled:
        raise ValueError("segment works in one process or with DDP, not with FSDP.")
    last = _last_checkpoint(run)
    if last and state.is_main_process:
        check_checkpoint(last)
        print(f"going on from {last}")
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    if not all(value.isfinite().all() for value in segmenter.head.state_dict().values()):
        raise ValueError(f"The head is no longer finite; delete {run} and give a lower learning_rate.")
    trainer.evaluate()
    trainer.save_state()
    if not state.is_main_process:
        return
    found = without_nan(trainer.figures)
    per_class = [
        {"class": label, "name": names[label] if names else None, "iou": iou, "accuracy": accuracy, "pixels": pixels}
        for label, (iou, accuracy, pixels) in enumerate(
            zip(found.pop("iou"), found.pop("accuracy"), trainer.pixels, strict=True)
        )
    ]
    asked = {
        key: value for key, value in dataclasses.asdict(recipe).items() if key not in ("model", "output", "workers")
    }
    asked["bf16"] = backbone.bf16  # which not every machine has
    write(
        folder / "segment.json",
        {
            "model": recipe.model,
            "weights": backbone.weights,
            "laplacian_heads": getattr(backbone.model.config, "laplacian_heads", None),
            **found,
            "held_out_pictures": len(held_out),
            "per_class": per_class,
            "recipe": asked,
            "head": HOW_TO_READ,
        },
    )
    _draw(trainer, min(recipe.pictures, len(held_out)), names, run / "segment.png")
    part = run / "head.safetensors.part"
    save_file({key: value.contiguous() for key, value in segmenter.head.state_dict().items()}, part)
    part.replace(run / "head.safetensors")  # last: with it the run is finished
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)
    figures = {name.replace("_", " "): UNKNOWN if value is None else f"{value:.4f}" for name, value in found.items()}
    print(f"\n{recipe.model}: {len(held_out):,} held-out pictures\n")
    print(markdown_table(["", *figures], [["all classes", *figures.values()]]))
    print(f"\n{folder / 'segment.json'}")


def _state() -> PartialState:
    return PartialState(cpu=not torch.accelerator.is_available())


def _names(recipe: SegmentRecipe) -> list[str] | None:
    """Names of the classes: of lines with tabs, as in ADE20K's objectInfo150.txt, the last part, below a heading."""
    if recipe.names is None:
        return None
    try:
        lines = Path(recipe.names).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"names: {recipe.names} cannot be read ({error}).") from error
    lines = [line.strip() for line in lines if line.strip()]
    if all("\t" in line for line in lines):
        lines = [line.rpartition("\t")[2].strip() for line in lines[1:]]
    if len(lines) != recipe.classes:
        raise ValueError(f"names: {recipe.names} has {len(lines)} names, allowed is one for each of {recipe.classes}.")
    return lines


class Crops(torch.utils.data.Dataset):
    """All crops that a run trains on, by their place in it: the same whatever processes and workers make them.

    Args:
        pairs: pictures with masks.
        processor: image processor of the backbone.
    """

    def __init__(self, recipe: SegmentRecipe, pairs: masks.Masked, processor):
        self.recipe, self.pairs, self.processor = recipe, pairs, processor
        self.epoch, self.order = None, None

    def __len__(self) -> int:
        return self.recipe.steps * self.recipe.images_per_step

    def __getitem__(self, place: int) -> dict[str, torch.Tensor] | ValueError:
        """pixel_values (3, crop, crop) and labels (crop, crop); of a picture that cannot be read the error."""
        epoch, at = divmod(place, len(self.pairs))
        if epoch != self.epoch:
            order = np.random.default_rng((self.recipe.seed, 0, epoch)).permutation(len(self.pairs))
            self.epoch, self.order = epoch, order
        row = _row(self.recipe, self.pairs, int(self.order[at]))
        if isinstance(row, ValueError):
            return row
        return self._crop(*row, np.random.default_rng((self.recipe.seed, 1, place)))

    def _crop(self, picture: PIL.Image.Image, labels: torch.Tensor, generator: np.random.Generator) -> dict:
        """A part of the picture in a random size, at a random place; beyond its edges nothing that counts."""
        recipe, crop = self.recipe, self.recipe.crop
        sides = np.array(picture.size[::-1])  # height, width
        factor = recipe.shorter_side * generator.uniform(*recipe.scale) / sides.min()
        scaled = np.maximum(np.rint(sides * factor).astype(int), 1)
        size = np.minimum(scaled, crop)
        start = generator.integers(0, scaled - size, endpoint=True)
        (top, left), (bottom, right) = start * sides / scaled, (start + size) * sides / scaled
        # The crop alone is made, not the whole picture in that size.
        part = picture.resize((int(size[1]), int(size[0])), PIL.Image.Resampling.BILINEAR, (left, top, right, bottom))
        rows, columns = (
            torch.from_numpy(((at + np.arange(length) + 0.5) * side / whole).astype(int).clip(max=side - 1))
            for at, length, side, whole in zip(start, size, sides, scaled, strict=True)
        )
        labels = labels[rows[:, None], columns]
        values = masks.pixel_values(part, self.processor)
        if generator.random() < recipe.flip:
            values, labels = values.flip(-1), labels.flip(-1)
        room = (0, crop - int(size[1]), 0, crop - int(size[0]))
        return {"pixel_values": pad(values, room), "labels": pad(labels, room, value=recipe.ignore_index)}


class Whole(torch.utils.data.Dataset):
    """Held-out pictures by number, for the reader to measure on.

    Args:
        pairs, processor: as of `Crops`.
    """

    def __init__(self, recipe: SegmentRecipe, pairs: masks.Masked, processor):
        self.recipe, self.pairs, self.processor = recipe, pairs, processor

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor] | ValueError:
        """(3, height, width) with a shorter side of shorter_side, and labels in the mask's own size; or the error."""
        row = _row(self.recipe, self.pairs, number)
        if isinstance(row, ValueError):
            return row
        picture, labels = row
        factor = self.recipe.shorter_side / min(picture.size)
        size = tuple(max(round(side * factor), 1) for side in picture.size)
        return masks.pixel_values(picture.resize(size, PIL.Image.Resampling.BILINEAR), self.processor), labels


def _row(recipe: SegmentRecipe, pairs: masks.Masked, number: int) -> tuple | ValueError:
    """A picture and its labels, or what is wrong with them, for the process that reads them to raise."""
    try:
        picture, mask = pairs.pair(number)
    except masks.BadImageError as error:
        return error
    try:
        return picture, recipe.labels(mask)
    except ValueError as error:
        return ValueError(f"data: the mask {pairs.called(number, pairs.mask)} {error}.")


def collate(rows: list) -> dict[str, torch.Tensor]:
    """Rows of `Crops` as a batch; or the first error, which would lose its words on its way from another process."""
    for row in rows:
        if isinstance(row, Exception):
            return {"error": row}
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Head(torch.nn.Module):
    """Dropout of whole channels, batch normalisation and a 1 x 1 convolution.

    Source: the linear head of facebookresearch/dinov3, eval/segmentation.

    Args:
        width: channels of the features.
        classes: how many there are.
        dropout: share of the channels that are left out in training.
        synced: whether the normalisation is over the batches of all processes, which needs GPUs.
    """

    def __init__(self, width: int, classes: int, dropout: float, synced: bool = False):
        super().__init__()
        self.dropout = torch.nn.Dropout2d(dropout)
        self.norm = (torch.nn.SyncBatchNorm if synced else torch.nn.BatchNorm2d)(width)
        self.classifier = torch.nn.Conv2d(width, classes, 1)
        torch.nn.init.normal_(self.classifier.weight, std=INITIAL_STD)
        torch.nn.init.zeros_(self.classifier.bias)

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """(images, width, rows, columns) to (images, classes, rows, columns)."""
        return self.classifier(self.norm(self.dropout(maps)))


class Segmenter(torch.nn.Module):
    """A head on a backbone, which is frozen and not part of the weights."""

    def __init__(self, backbone: features.Backbone, recipe: SegmentRecipe):
        super().__init__()
        self.backbone, self.recipe = backbone, recipe
        count = recipe.blocks if isinstance(recipe.blocks, int) else len(recipe.blocks)
        synced = _state().num_processes > 1 and _state().device.type == "cuda"
        self.head = Head(backbone.width * count, recipe.classes, recipe.dropout, synced)

    def logits(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(images, classes, height, width) of (images, 3, height, width).

        Sides that are no multiple of the patch are filled up with the mean colour, to the right and below.
        """
        height, width = pixel_values.shape[2:]
        room = [-side % patch for side, patch in zip((height, width), self.backbone.patch, strict=True)]
        pixel_values = pad(pixel_values, (0, room[1], 0, room[0]))
        tokens = self.backbone.tokens(pixel_values, self.recipe.blocks)
        maps = torch.cat(tokens.patches, dim=2).mT.unflatten(2, tokens.grid)
        logits = interpolate(self.head(maps), pixel_values.shape[2:], mode="bilinear")
        return logits[..., :height, :width]

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the pixels that have a class."""
        logits, ignored = self.logits(pixel_values), self.recipe.ignore_index
        loss = cross_entropy(logits, labels, ignore_index=ignored, reduction="sum")
        return loss / (labels != ignored).sum().clamp(min=1)


def windows(height: int, width: int, size: int, stride: int) -> list[tuple[slice, slice]]:
    """Rows and columns of windows that cover a picture, all of one size.

    That is `size`, or the picture's side where it is shorter. The last ones end at the picture's edge, and overlap more
    with those before them.
    """

    def starts(side):
        last = max(side - size, 0)
        return [*range(0, last, stride), last]

    return [
        (slice(top, min(top + size, height)), slice(left, min(left + size, width)))
        for top in starts(height)
        for left in starts(width)
    ]


@torch.no_grad()
def slide(
    logits: Callable[[torch.Tensor], torch.Tensor], pixel_values: torch.Tensor, size: int, stride: int, batch_size: int
) -> torch.Tensor:
    """Probabilities of a whole picture, where windows overlap their mean.

    Args:
        logits: of (windows, 3, height, width) the (windows, classes, height, width).
        pixel_values: (3, height, width).
        size, stride: see `windows`.
        batch_size: windows that `logits` gets at once.

    Returns:
        (classes, height, width).
    """
    places = windows(*pixel_values.shape[1:], size, stride)
    total, counts = 0, torch.zeros(pixel_values.shape[1:], device=pixel_values.device)
    for start in range(0, len(places), batch_size):
        some = places[start : start + batch_size]
        found = logits(torch.stack([pixel_values[:, rows, columns] for rows, columns in some])).softmax(1)
        if start == 0:
            total = found.new_zeros(found.shape[1], *pixel_values.shape[1:])
        for (rows, columns), probabilities in zip(some, found, strict=True):
            total[:, rows, columns] += probabilities
            counts[rows, columns] += 1
    return total / counts


def likeliest(probabilities: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(height, width), the likeliest class of each pixel of (classes, rows, columns) in another size."""
    best, label = None, None
    for start in range(0, len(probabilities), ENLARGED):
        some = probabilities[None, start : start + ENLARGED]
        values, labels = interpolate(some, (height, width), mode="bilinear")[0].max(0)
        if best is None:
            best, label = values, labels
        else:
            label = torch.where(values > best, labels + start, label)
            best = torch.maximum(values, best)
    return label


class SegmentTrainer(Trainer):
    """Trainer of a head, which is measured on whole pictures, one at a time.

    Args:
        recipe: of the run.
        Every other: as in Trainer; eval_dataset is a `Whole`.

    Attributes:
        figures, pixels: `ConfusionMatrix.result` and the pixels of each class, of the last measurement.
    """

    def __init__(self, *args, recipe: SegmentRecipe, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe = recipe

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "error" in inputs:
            raise inputs["error"]
        loss = model(**inputs)
        return (loss, {}) if return_outputs else loss

    def predicted(self, pixel_values: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """(height, width), the likeliest classes in the given size, of (3, height, width)."""
        recipe = self.recipe
        logits = self.accelerator.unwrap_model(self.model).eval().logits
        values = pixel_values.to(self.args.device)
        return likeliest(slide(logits, values, recipe.crop, recipe.stride, recipe.batch_size), *size)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Mean IoU and accuracies on the held-out pictures, each in its mask's own size."""
        process, processes = self.args.process_index, self.args.world_size
        loader = torch.utils.data.DataLoader(
            self.eval_dataset,
            batch_size=None,
            sampler=range(process, len(self.eval_dataset), processes),
            num_workers=self.recipe.workers,
            worker_init_fn=features.begin_worker,
            generator=torch.Generator(),  # of its own: the random state of the training stays as it is
        )
        matrix = ConfusionMatrix(self.recipe.classes, self.recipe.ignore_index)
        for row in tqdm(loader, "held-out pictures", leave=False, disable=process > 0):
            if isinstance(row, Exception):
                raise row
            pixel_values, labels = row
            matrix.update(self.predicted(pixel_values, labels.shape), labels.to(self.args.device))
        matrix.counts = torch.stack(gather_object([matrix.counts.cpu()])).sum(0)
        self.figures, self.pixels = matrix.result(), matrix.counts.sum(1).tolist()
        metrics = {f"{metric_key_prefix}_{name}": self.figures[name] for name in list(self.figures)[:3]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _trainer(recipe: SegmentRecipe, run: Path, segmenter: Segmenter, crops: Crops, whole: Whole) -> SegmentTrainer:
    arguments = TrainingArguments(
        output_dir=str(run),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.images_per_step // (recipe.batch_size * _state().num_processes),
        lr_scheduler_type="cosine",
        warmup_steps=recipe.warmup_steps,
        max_grad_norm=0,
        train_sampling_strategy="sequential",  # the places are in a random order already
        dataloader_num_workers=recipe.workers,
        eval_strategy="no" if recipe.eval_steps is None else "steps",
        eval_steps=recipe.eval_steps,
        save_steps=recipe.save_steps,
        save_total_limit=1,
        logging_steps=recipe.logging_steps,
        seed=recipe.seed,
        use_cpu=not torch.accelerator.is_available(),
        remove_unused_columns=False,
        report_to=recipe.report_to,
        logging_nan_inf_filter=False,
        ddp_find_unused_parameters=False,
    )
    arguments._n_gpu = 1  # one process of several GPUs would copy the head, but not the backbone
    optimizer = torch.optim.AdamW(
        segmenter.head.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.999), weight_decay=recipe.weight_decay
    )
    return SegmentTrainer(
        model=segmenter,
        args=arguments,
        train_dataset=crops,
        eval_dataset=whole,
        data_collator=collate,
        optimizers=(optimizer, None),
        recipe=recipe,
    )


def _last_checkpoint(run: Path) -> Path | None:
    """The newest checkpoint that is complete: Trainer writes its state last."""
    found = {
        int(path.parent.name.rpartition("-")[2]): path.parent for path in run.glob("checkpoint-*/trainer_state.json")
    }
    return found[max(found)] if found else None


def _draw(trainer: SegmentTrainer, count: int, names: list[str] | None, path: Path) -> None:
    """Held-out pictures, their masks and what is predicted, side by side."""
    if not count:
        return
    recipe = trainer.recipe
    hues = (np.arange(recipe.classes) * 0.618) % 1  # neighbouring numbers lie far apart
    lightness = 0.55 + 0.4 * (np.arange(recipe.classes) % 3) / 2
    colours = matplotlib.colors.hsv_to_rgb(np.stack([hues, np.full_like(hues, 0.75), lightness], 1))
    shown = {}  # pixels by class
    figure, all_axes = plots.panels(3 * count, columns=3, width=11, height=2.9)
    for row, axes in enumerate(zip(*[iter(all_axes)] * 3, strict=True)):
        pixel_values, labels = trainer.eval_dataset[row]
        predicted = trainer.predicted(pixel_values, labels.shape).cpu()
        step = max(1, -(-max(labels.shape) // SHOWN))
        picture = np.asarray(trainer.eval_dataset.pairs.picture(row))[::step, ::step]
        both = [each[::step, ::step].numpy() for each in (labels, predicted)]
        for each in both:
            for label, pixels in zip(*np.unique(each, return_counts=True), strict=True):
                shown[int(label)] = shown.get(int(label), 0) + int(pixels)
        painted = [
            np.where((each == recipe.ignore_index)[..., None], 1, colours[each % recipe.classes]) for each in both
        ]
        titles = ("picture", "mask (white: no class)", "prediction") if row == 0 else ("", "", "")
        for panel, image, title in zip(axes, (picture, *painted), titles, strict=True):
            panel.imshow(image, interpolation="nearest")
            panel.set_title(title)
            panel.set_axis_off()
    shown.pop(recipe.ignore_index, None)
    most = sorted(sorted(shown, key=shown.get, reverse=True)[:NAMED])
    called = [textwrap.shorten(names[label], 24, placeholder=" …") if names else str(label) for label in most]
    key = [Patch(color=colours[label], label=plots.written(name)) for label, name in zip(most, called, strict=True)]
    figure.set_figheight(figure.get_figheight() + 0.25 * -(-len(key) // 4))
    figure.legend(handles=key, loc="outside lower center", ncols=4, frameon=False)
    plots.write(figure, path)
