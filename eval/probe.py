"""The verbs probe and knn: how well linear classifiers and nearest neighbours read classes off frozen features."""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torchvision.transforms import Compose, InterpolationMode, RandomHorizontalFlip, RandomResizedCrop
from transformers import Trainer, TrainingArguments

from laplacian_heads import images, neighbors
from laplacian_heads.accuracy import Accuracy
from laplacian_heads.eval import plots
from laplacian_heads.eval.features import Backbone, Pictures, Processed, Tokens, begin_worker, collate, load, stream
from laplacian_heads.eval.results import results_folder
from laplacian_heads.files import check_checkpoint, check_writable, locked, newest, read_json, write

# So many damaged images in succession are no accident.
MOST_BAD = 100
READING = (
    "probe/probe.safetensors is the head of by_selection: weight (classes, width of the features) and bias (classes,). "
    "The logits are weight @ features + bias, in the order of names. The features are the class tokens of the last "
    "`blocks` blocks, the earliest first, and with mean_patch after them the mean of the patch tokens of the last "
    "block; every token goes through the model's final norm. "
    "laplacian_heads.eval.features.load(model).tokens(pixel_values, blocks) gives these tokens."
)


@dataclasses.dataclass(kw_only=True)
class _FeaturesRecipe:
    model: str | None
    data: str
    label: str | None
    images: int | None
    held_out: str
    on_bad_data: str
    seed: int
    batch_size: int
    workers: int
    bf16: bool
    output: str | None
    trust_remote_code: bool

    def __post_init__(self):
        for name in ("model", "data", "held_out"):
            if not getattr(self, name):
                what = "a model's folder or its name on the Hub" if name == "model" else "a source of images"
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is {what}.")
        if self.output == "":
            raise ValueError("output is '', allowed is a folder or null.")
        if self.images is not None:
            self.check_least(1, "images")
        self.check_least(1, "batch_size")
        self.check_least(0, "workers")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}, allowed is 0 to {2**32 - 1}.")
        if self.on_bad_data not in ("skip", "stop"):
            raise ValueError(f"on_bad_data is {self.on_bad_data!r}, allowed are skip and stop.")

    def check_least(self, least: int, *names: str) -> None:
        for name in names:
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least {least}.")

    def check_list(self, name: str, allowed: str, right: Callable[[object], bool]) -> None:
        values = getattr(self, name)
        if not values or not all(map(right, values)) or len(set(values)) < len(values):
            raise ValueError(f"{name} is {values}, allowed is a list of {allowed}, each once.")


@dataclasses.dataclass(kw_only=True)
class ProbeRecipe(_FeaturesRecipe):
    """Keys of `recipes/probe.yaml`, which says what they mean."""

    selection: float
    learning_rates: list
    blocks: list
    mean_patch: list
    augment: bool
    epochs: int
    images_per_step: int
    logging_steps: int
    save_steps: int
    report_to: str

    def __post_init__(self):
        super().__post_init__()
        self.check_least(1, "epochs", "images_per_step", "logging_steps", "save_steps")
        self.check_list("learning_rates", "numbers above 0", lambda rate: _is_number(rate) and 0 < rate < math.inf)
        self.check_list("blocks", "whole numbers of at least 1", lambda count: _is_number(count, int) and count >= 1)
        self.check_list("mean_patch", "true and false", lambda value: isinstance(value, bool))
        if not (0 < self.selection < 1 or (self.selection >= 1 and self.selection.is_integer())):
            raise ValueError(
                f"selection is {self.selection}, allowed is a share of data below 1 or a whole number of images."
            )
        if self.images_per_step % self.batch_size:
            raise ValueError(
                f"images_per_step is {self.images_per_step}, allowed are multiples of batch_size, {self.batch_size}."
            )


@dataclasses.dataclass(kw_only=True)
class KnnRecipe(_FeaturesRecipe):
    """Keys of `recipes/knn.yaml`, which says what they mean."""

    neighbors: list
    temperature: float

    def __post_init__(self):
        super().__post_init__()
        self.check_list("neighbors", "whole numbers of at least 1", lambda count: _is_number(count, int) and count >= 1)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, allowed is a number above 0.")


def _is_number(value, kinds=int | float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear classifier of a probe: what it reads, and the learning rate for 256 images in a step.

    Args:
        blocks: so many of the last blocks give their class tokens.
        mean_patch: whether the mean patch token of the last block is read too.
        learning_rate: before it is scaled by images_per_step / 256.
    """

    blocks: int
    mean_patch: bool
    learning_rate: float

    @property
    def reads(self) -> str:
        blocks = "the last block" if self.blocks == 1 else f"the last {self.blocks} blocks"
        return f"CLS of {blocks}" + (", mean patch" if self.mean_patch else "")


class Heads(torch.nn.Module):
    """Linear classifiers on the features of a frozen backbone, which is not among the weights.

    Args:
        backbone: see `features.load`.
        heads: what each reads.
        classes: number of logits.
        seed: of the weights, which are drawn from N(0, 0.01²); biases are 0.
    """

    def __init__(self, backbone: Backbone, heads: list[Head], classes: int, seed: int):
        super().__init__()
        self.backbone, self.heads = backbone, heads
        self.blocks = max(head.blocks for head in heads)
        self.lowest_loss = math.nan  # of a head, in the last batch
        generator = torch.Generator().manual_seed(seed)
        self.linears = torch.nn.ModuleList()
        for head in heads:
            linear = torch.nn.Linear(backbone.width * (head.blocks + head.mean_patch), classes)
            torch.nn.init.normal_(linear.weight, std=0.01, generator=generator)
            torch.nn.init.zeros_(linear.bias)
            self.linears.append(linear)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The sum of the heads' mean cross-entropies, of which each moves its own head alone.

        Args:
            pixel_values: (images, 3, height, width).
            labels: (images,).
        """
        logits = self.logits(self.backbone.tokens(pixel_values, self.blocks))
        losses = torch.stack([torch.nn.functional.cross_entropy(each, labels) for each in logits])
        self.lowest_loss = losses.detach().nan_to_num(math.inf).min()
        return {"loss": losses.sum()}

    def logits(self, tokens: Tokens) -> torch.Tensor:
        """(heads, images, classes) of the tokens of the last `blocks` blocks."""
        read = {}
        for head in self.heads:
            parts = [*tokens.cls[-head.blocks :], *([tokens.patches[-1].mean(1)] if head.mean_patch else [])]
            read.setdefault((head.blocks, head.mean_patch), torch.cat(parts, dim=1))
        inputs = [read[head.blocks, head.mean_patch] for head in self.heads]
        return torch.stack([linear(each) for linear, each in zip(self.linears, inputs, strict=True)])


class Draws(torch.utils.data.Dataset):
    """The images of all steps one after the other, each epoch in an order of its own.

    What draw n gives depends on the seed and n alone, so that a run goes on as if it had not been interrupted. A
    damaged image that is left out is replaced by the one after it.

    Args:
        pictures: to draw from.
        count: of draws.
        seed: of orders and augmentation.
    """

    def __init__(self, pictures: Pictures, count: int, seed: int):
        self.pictures, self.count, self.seed = pictures, count, seed
        self.epoch, self.order = -1, None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, draw: int) -> tuple[torch.Tensor, int] | images.BadImageError:
        epoch, place = divmod(draw, len(self.pictures))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.pictures))
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(int(np.random.SeedSequence((self.seed, draw)).generate_state(1)[0]))
        try:
            for after in range(MOST_BAD):
                row = self.pictures[(int(self.order[place]) + after) % len(self.pictures)]
                if row is not None:
                    return row
        finally:
            torch.default_generator.set_state(state)
        return images.BadImageError(f"data: {MOST_BAD} images in succession cannot be read.")


class ProbeTrainer(Trainer):
    """Trainer whose data have their order already, and may hold an error."""

    def get_train_dataloader(self) -> torch.utils.data.DataLoader:
        loader = torch.utils.data.DataLoader(
            self.train_dataset,
            batch_size=self.args.train_batch_size,
            collate_fn=_collate,
            num_workers=self.args.dataloader_num_workers,
            worker_init_fn=begin_worker,
            pin_memory=self.args.dataloader_pin_memory,
        )
        return self.accelerator.prepare(loader)

    def training_step(self, model, inputs, *args, **kwargs):
        if "error" in inputs:
            raise inputs["error"]
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:  # the sum, which a head that diverges makes useless
            logs["lowest_loss"] = float(self.accelerator.unwrap_model(self.model).lowest_loss)
        super().log(logs, *args, **kwargs)


def _collate(rows: list) -> dict:
    batch = collate(rows)
    return {"error": batch} if isinstance(batch, Exception) else batch


def probe(recipe: ProbeRecipe, dry_run: bool = False) -> None:
    """Train linear classifiers on a model's frozen features, one of each kind and learning rate, all at once.

    The best of them is chosen twice: on images of the training data that none was trained on, and, as DINOv2 does, on
    the very images that its accuracy is measured on. Into the model's folder, or recipe.output, goes probe.json, and
    into `probe` there a plot and the head of the first choice as probe.safetensors; in training the checkpoints.

    Raises:
        ValueError: a value of the recipe, its data or the model is not allowed, or the folder has another recipe's
            results.
        OSError: a file cannot be written.

    Source: facebookresearch/dinov2, `eval/linear.py` (arXiv 2304.07193).
    """
    state, target = _start(recipe, "probe.json")
    kinds = len(recipe.blocks) * len(recipe.mean_patch)
    if dry_run:
        if state.is_main_process:
            print(f"{kinds * len(recipe.learning_rates)} heads, {recipe.epochs} epochs, held_out: {recipe.held_out}")
        return
    size = recipe.batch_size * state.num_processes
    if recipe.images_per_step % size:
        raise ValueError(
            f"images_per_step is {recipe.images_per_step}, allowed are multiples of {size}, which is batch_size times "
            f"{state.num_processes} processes."
        )
    backbone = _backbone(recipe)
    identity = _identity(recipe, backbone)
    if _is_finished(target / "probe.json", identity):
        return
    heads = _heads(recipe, backbone)
    train, held_out = _data(recipe)
    train, selection = _split(train, recipe)
    steps = recipe.epochs * len(train) // recipe.images_per_step
    if not steps:
        raise ValueError(
            f"images_per_step is {recipe.images_per_step}, allowed is at most the {recipe.epochs * len(train)} images "
            f"of {recipe.epochs} epochs."
        )
    work = target / "probe"
    if state.is_main_process:
        check_writable(work)
    with locked(work, "at work", 1) if state.is_main_process else contextlib.nullcontext():
        if _last_checkpoint(work):
            _check_same(work / "recipe.json", read_json(work / "recipe.json"), identity)
        state.wait_for_everyone()
        if state.is_main_process:
            write(work / "recipe.json", identity)

        model = Heads(backbone, heads, len(train.names), recipe.seed).to(state.device)
        _train(model, train, recipe, steps, work, state)
        model.eval()
        measured = {
            "selection": _choices(model, selection, recipe, "selection"),
            "held_out": _choices(model, held_out, recipe, "held_out"),
        }
        if state.is_main_process:
            found = _found(model, measured, recipe, backbone, len(train), train.names, steps)
            # Not beside the model's weights, by whose hash results know the model.
            _save(model.linears[found["by_selection"]["head"]], found, work / "probe.safetensors")
            plot(found, work / "probe.png")
            write(target / "probe.json", {**identity, **found})
            (work / "recipe.json").unlink()
            for checkpoint in work.glob("checkpoint-*"):
                shutil.rmtree(checkpoint, ignore_errors=True)
            print(_table(found))
            print(f"\n{target / 'probe.json'}")


def knn(recipe: KnnRecipe, dry_run: bool = False) -> None:
    """Classify images by their nearest neighbours among a model's frozen features of the training data.

    Writes knn.json into the model's folder or recipe.output.

    Raises:
        ValueError, OSError: as `probe`.

    Source: facebookresearch/dino, `eval_knn.py` (arXiv 2104.14294).
    """
    state, target = _start(recipe, "knn.json")
    if dry_run:
        if state.is_main_process:
            print(f"{', '.join(map(str, recipe.neighbors))} neighbours, held_out: {recipe.held_out}")
        return
    backbone = _backbone(recipe)
    identity = _identity(recipe, backbone)
    if _is_finished(target / "knn.json", identity):
        return
    train, held_out = _data(recipe)
    most = max(recipe.neighbors)
    if most > len(train):
        raise ValueError(f"neighbors has {most}, allowed is at most the {len(train)} images of {recipe.data}.")
    if state.is_main_process:
        check_writable(target)
    own = [_features(backbone, each, recipe, name) for name, each in (("data", train), ("held_out", held_out))]
    bank, known = _gathered(*own[0], "data")  # of all processes, each of which classifies its own images
    if most > len(bank):
        raise ValueError(f"neighbors has {most}, allowed is at most the {len(bank)} images that can be read.")
    queries, labels = own[1]
    ranked = {count: [] for count in recipe.neighbors}
    for some in queries.split(neighbors.QUERIES):
        similarities, indices = neighbors.nearest(some.to(backbone.model.device), bank, most)
        voters = known.to(indices.device)[indices]
        for count, choices in ranked.items():
            scores = neighbors.tally(similarities[:, :count], voters[:, :count], recipe.temperature, len(train.names))
            choices.append(scores.topk(min(5, len(train.names))).indices.cpu())
    empty = torch.empty(0, min(5, len(train.names)), dtype=torch.long)
    choices = torch.stack([torch.cat([empty, *each]) for each in ranked.values()], dim=1)  # (images, counts, 5)
    choices, labels = _gathered(choices, labels, "held_out")
    if state.is_main_process:
        found = {
            "laplacian_heads": getattr(backbone.model.config, "laplacian_heads", None),
            "classes": len(train.names),
            "images": len(bank),
            "held_out_images": len(labels),
            "neighbors": [
                {"neighbors": count, **_accuracy(choices[:, i], labels)} for i, count in enumerate(recipe.neighbors)
            ],
        }
        write(target / "knn.json", {**identity, **found})
        rows = [("neighbours", "top-1", "top-5")]
        rows += [(str(each["neighbors"]), *_percent(each)) for each in found["neighbors"]]
        print(_columns(rows))
        print(f"\n{target / 'knn.json'}")


def _start(recipe: _FeaturesRecipe, file: str) -> tuple[PartialState, Path]:
    """The process, and the folder of the results; a model without a folder or a checkpoint is refused."""
    state = PartialState(cpu=not torch.accelerator.is_available())
    folder = newest(recipe.model)
    target = results_folder(folder, recipe.output)
    if state.is_main_process:
        print(f"{folder}: {recipe.data}, into {target / file}")
    return state, target


def _backbone(recipe: _FeaturesRecipe) -> Backbone:
    bf16 = recipe.bf16 and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return load(recipe.model, recipe.trust_remote_code, bf16=bf16)


def _identity(recipe: _FeaturesRecipe, backbone: Backbone) -> dict:
    """What results depend on: by this they are known again."""
    values = dataclasses.asdict(recipe)
    del values["output"]  # a folder may be moved
    return {"model": backbone.name, "weights": backbone.weights, "recipe": values}


def _is_finished(path: Path, identity: dict) -> bool:
    """Whether results are there already. Raises ValueError if they are another recipe's."""
    if not path.exists():
        return False
    _check_same(path, read_json(path), identity)
    if PartialState().is_main_process:
        print(f"{path} is finished.")
    return True


def _check_same(path: Path, there: dict, here: dict) -> None:
    flat = [{"weights": each.get("weights"), **(each.get("recipe") or {})} for each in (there, here)]
    for key in {**flat[0], **flat[1]}:
        if key != "model" and flat[0].get(key) != flat[1].get(key):
            raise ValueError(
                f"output: {path} holds the results of another recipe, in which {key} is {flat[0].get(key)!r} instead "
                f"of {flat[1].get(key)!r}; give another output=."
            )


def _data(recipe: _FeaturesRecipe) -> tuple[images.Images, images.Images]:
    """What classifiers learn from and what they are measured on, with the same numbers of the same classes."""
    with PartialState().main_process_first():  # what is fetched, is fetched once
        train, held_out = (images.load(source, recipe.label) for source in (recipe.data, recipe.held_out))
    for name, found in (("data", train), ("held_out", held_out)):
        if found.labels is None:
            raise ValueError(f"{name}: {found.data} has no classes.")
    held_out = held_out.with_classes(train.names)
    if recipe.images is not None:
        if recipe.images > len(train):
            raise ValueError(f"images is {recipe.images}, allowed are at most the {len(train)} of {recipe.data}.")
        order = np.random.default_rng(recipe.seed).permutation(len(train))
        train = train.select(np.sort(order[: recipe.images]))
    return train, held_out


def _split(train: images.Images, recipe: ProbeRecipe) -> tuple[images.Images, images.Images]:
    """The images to train on, and those of them that the best head is chosen on instead."""
    count = int(recipe.selection) if recipe.selection >= 1 else round(recipe.selection * len(train))
    if not 1 <= count < len(train):
        raise ValueError(
            f"selection is {recipe.selection:g}, allowed is what leaves some of the {len(train)} images to select on "
            "and some to train on."
        )
    order = np.random.default_rng((recipe.seed, 1)).permutation(len(train))
    return train.select(np.sort(order[count:])), train.select(np.sort(order[:count]))


def _heads(recipe: ProbeRecipe, backbone: Backbone) -> list[Head]:
    """All kinds of heads that the model has the blocks for."""
    blocks = [count for count in recipe.blocks if count <= backbone.depth]
    if not blocks:
        raise ValueError(f"blocks is {recipe.blocks}, allowed is at most {backbone.depth}, those of {backbone.name}.")
    if len(blocks) < len(recipe.blocks) and PartialState().is_main_process:
        dropped = " and ".join(str(count) for count in recipe.blocks if count not in blocks)
        print(f"{backbone.name} has {backbone.depth} blocks: no head reads the last {dropped}.")
    return [
        Head(count, mean_patch, rate)
        for count in blocks
        for mean_patch in recipe.mean_patch
        for rate in recipe.learning_rates
    ]


def _transform(backbone: Backbone, augment: bool) -> Callable[[PIL.Image.Image], torch.Tensor]:
    """The model's own processing or, to augment, a random part of the image in the same size, mirrored at random."""
    own = Processed(backbone.processor)
    if not augment:
        return own
    height, width = own(PIL.Image.new("RGB", (64, 64))).shape[1:]
    return Compose(
        [
            RandomResizedCrop((height, width), interpolation=InterpolationMode.BICUBIC),
            RandomHorizontalFlip(),
            Processed(backbone.processor, do_resize=False, do_center_crop=False),
        ]
    )


def _train(
    model: Heads, train: images.Images, recipe: ProbeRecipe, steps: int, work: Path, state: PartialState
) -> None:
    """Train the heads up to the last step, from the newest checkpoint in `work` if there is one."""
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.images_per_step // (recipe.batch_size * state.num_processes),
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,  # a norm over all heads would tie them to each other
        use_cpu=state.device.type == "cpu",
        seed=recipe.seed,
        dataloader_num_workers=recipe.workers,
        dataloader_pin_memory=state.device.type == "cuda",
        logging_steps=recipe.logging_steps,
        logging_nan_inf_filter=False,
        save_steps=recipe.save_steps,
        save_total_limit=1,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        report_to=recipe.report_to,
    )
    arguments._n_gpu = 1  # one process of several GPUs would copy the heads, but not the backbone
    scale = recipe.images_per_step / 256
    optimizer = torch.optim.SGD(
        [
            {"params": list(linear.parameters()), "lr": head.learning_rate * scale}
            for head, linear in zip(model.heads, model.linears, strict=True)
        ],
        momentum=0.9,
        weight_decay=0.0,
    )
    pictures = Pictures(train, _transform(model.backbone, recipe.augment), recipe.on_bad_data == "skip")
    trainer = ProbeTrainer(
        model=model,
        args=arguments,
        train_dataset=Draws(pictures, steps * recipe.images_per_step, recipe.seed),
        optimizers=(optimizer, None),
    )
    checkpoint = _last_checkpoint(work)
    if checkpoint and state.is_main_process:
        check_checkpoint(checkpoint)
        print(f"going on from {checkpoint}")
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)


def _last_checkpoint(work: Path) -> Path | None:
    """The newest complete one: trainer_state.json is written last."""
    found = {}
    for path in work.glob("checkpoint-*"):
        try:
            found[read_json(path / "trainer_state.json")["global_step"]] = path
        except (OSError, ValueError, KeyError):
            continue
    return found[max(found)] if found else None


def _choices(
    model: Heads, measured: images.Images, recipe: ProbeRecipe, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, heads, up to 5) each head's likeliest classes, the likeliest first, and (images,) the right ones."""
    ranked, labels = [], []
    skip = recipe.on_bad_data == "skip"
    for tokens, right in stream(model.backbone, measured, model.blocks, recipe.batch_size, recipe.workers, skip, name):
        with torch.no_grad():
            logits = model.logits(tokens)
        ranked.append(logits.topk(min(5, logits.shape[2])).indices.transpose(0, 1).cpu())
        labels.append(right)
    return _gathered(*_joined(ranked, labels), name)


def _features(
    backbone: Backbone, found: images.Images, recipe: KnnRecipe, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(images, width) class tokens of the last block and (images,) labels of this process's images."""
    vectors, labels = [], []
    skip = recipe.on_bad_data == "skip"
    for tokens, right in stream(backbone, found, 1, recipe.batch_size, recipe.workers, skip, name):
        vectors.append(tokens.cls[0].cpu())
        labels.append(right)
    return _joined(vectors, labels)


def _joined(*parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.cat(each) if each else torch.empty(0, dtype=torch.long) for each in parts]


def _gathered(values: torch.Tensor, labels: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What all processes have, in each of them. Raises ValueError if it is nothing."""
    gathered = [each for each in gather_object([(values, labels)]) if len(each[1])]
    if not gathered:
        raise ValueError(f"{name}: none of its images can be read.")
    values, labels = zip(*gathered, strict=True)
    return torch.cat(values), torch.cat(labels)


def _accuracy(ranked: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    return Accuracy(keep_in_memory=True).compute(predictions=ranked.tolist(), references=labels.tolist())


def _found(
    model: Heads,
    measured: dict[str, tuple[torch.Tensor, torch.Tensor]],
    recipe: ProbeRecipe,
    backbone: Backbone,
    count: int,
    names: list[str],
    steps: int,
) -> dict:
    """What probe.json says beside the recipe."""
    heads = []
    for i, head in enumerate(model.heads):
        row = {"head": i, **dataclasses.asdict(head)}
        for name, (ranked, labels) in measured.items():
            accuracy = _accuracy(ranked[:, i], labels)
            row |= {f"{name}_accuracy": accuracy["accuracy"], f"{name}_accuracy_top5": accuracy.get("accuracy_top5")}
        heads.append(row)
    return {
        "laplacian_heads": getattr(backbone.model.config, "laplacian_heads", None),
        "classes": len(names),
        "names": names,
        "steps": steps,
        "images": count,
        "selection_images": len(measured["selection"][1]),
        "held_out_images": len(measured["held_out"][1]),
        # The first was not chosen by what it is measured on, the second was, as in DINOv2.
        "by_selection": max(heads, key=lambda head: head["selection_accuracy"]),
        "by_held_out": max(heads, key=lambda head: head["held_out_accuracy"]),
        "learning_rate_scale": recipe.images_per_step / 256,
        "reading": READING,
        "heads": heads,
    }


def _save(linear: torch.nn.Linear, found: dict, path: Path) -> None:
    """Write the chosen head as a whole or not at all."""
    chosen = {key: found["by_selection"][key] for key in ("blocks", "mean_patch")}
    metadata = {key: json.dumps(value) for key, value in {**chosen, "names": found["names"]}.items()}
    part = path.with_name(path.name + ".part")
    save_file({"weight": linear.weight.detach().cpu(), "bias": linear.bias.detach().cpu()}, part, metadata)
    part.replace(path)


def plot(found: dict, path: Path) -> None:
    """Accuracies by learning rate, a line for each kind of features, and rings around the heads that were chosen.

    Args:
        found: what probe.json holds.
        path: the PNG file to write; the SVG lies beside it.
    """
    figure, all_axes = plots.panels(2)
    for name, title, axes in zip(
        ("selection", "held_out"), ("Held-out part of the training data", "Held-out data"), all_axes, strict=True
    ):
        kinds = {}
        for row in found["heads"]:
            head = Head(row["blocks"], row["mean_patch"], row["learning_rate"])
            kinds.setdefault(head.reads, []).append((head.learning_rate, row[f"{name}_accuracy"]))
        for i, (reads, points) in enumerate(kinds.items()):
            axes.plot(*zip(*sorted(points), strict=True), label=reads, markersize=4, **plots.style(i))
        chosen = found[f"by_{name}"]
        axes.plot(
            *([chosen["learning_rate"]], [chosen[f"{name}_accuracy"]]),
            **{"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": "black", "linestyle": "none"},
            label="the best head",
        )
        axes.set(title=title, xscale="log", xlabel="learning rate for 256 images in a step", ylabel="top-1 accuracy")
    plots.save(figure, all_axes[0], path)


def _table(found: dict) -> str:
    """The best learning rate of each kind of features, and the two choices."""
    rows = [("head", "learning rate", "selection top-1", "held-out top-1", "held-out top-5")]

    def row(what: str, head: dict) -> tuple[str, ...]:
        measured = {"accuracy": head["held_out_accuracy"], "accuracy_top5": head["held_out_accuracy_top5"]}
        return what, f"{head['learning_rate']:g}", f"{head['selection_accuracy']:.2%}", *_percent(measured)

    best = {}
    for head in sorted(found["heads"], key=lambda head: -head["selection_accuracy"]):
        best.setdefault((head["blocks"], head["mean_patch"]), head)
    for kind in sorted(best):
        rows.append(row(Head(*kind, 0.0).reads, best[kind]))
    for what, key in (("chosen by selection", "by_selection"), ("chosen by held-out", "by_held_out")):
        chosen = found[key]
        reads = Head(chosen["blocks"], chosen["mean_patch"], 0.0).reads
        rows.append(row(f"{what}: {reads}", chosen))
    return _columns(rows)


def _percent(accuracy: dict) -> tuple[str, str]:
    top5 = accuracy.get("accuracy_top5")
    return f"{accuracy['accuracy']:.2%}", "" if top5 is None else f"{top5:.2%}"


def _columns(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(sized))
        for sized in (list(zip(row, widths, strict=True)) for row in rows)
    )
