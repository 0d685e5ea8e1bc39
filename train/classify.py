"""Training image classifiers: the verb `classify`."""

import dataclasses
import functools
import itertools
import shutil
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainingArguments, set_seed
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from laplacian_heads.accuracy import Accuracy
from laplacian_heads.configuration import LaplaceViTConfig
from laplacian_heads.files import check_model
from laplacian_heads.images import Images
from laplacian_heads.modeling_laplace_vit import LaplaceViTForImageClassification
from laplacian_heads.recipes import SHIPPED, load
from laplacian_heads.train import budget
from laplacian_heads.train.augmentation import Mixing, check_batch_size, check_loss, soft_target_loss, transform
from laplacian_heads.train.callbacks import BriefProgressCallback, TerminationCallback
from laplacian_heads.train.checkpoints import last_checkpoint, read_progress
from laplacian_heads.train.draws import Draws
from laplacian_heads.train.ema import EMACallback
from laplacian_heads.train.geometry import GeometryCallback
from laplacian_heads.train.parameter_groups import OPTIMIZERS, make_optimizer
from laplacian_heads.train.pictures import (
    AugmentedImages,
    HeldOutImages,
    TrainingBatches,
    collate,
    first_rows,
    mixed,
    processor,
    split,
)
from laplacian_heads.train.recipe import ImageRecipe, this_process
from laplacian_heads.train.run import arguments, claimed, complete, finish, is_finished, peak_memory
from laplacian_heads.train.trainer import RunTrainer

# What a new model is made of; a model that is trained on has its own.
SHAPE = ("patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "laplacian_heads", "qk_norm")
SCALE = "layer_scale_init_value"  # which a new model may do without


@dataclasses.dataclass(kw_only=True)
class ClassifyRecipe(ImageRecipe):
    """Keys of the recipes for image classifiers; the shipped ones say what they mean."""

    held_out: str | int
    model: str | None
    patch_size: int | None
    hidden_size: int | None
    num_hidden_layers: int | None
    num_attention_heads: int | None
    laplacian_heads: int | list | dict | None
    qk_norm: bool | None
    layer_scale_init_value: float | None
    optimizer: str
    warmup_learning_rate: float
    layer_decay: float
    eps: float
    ema_decay: float | None
    loss: str
    target_threshold: float | None
    label_smoothing: float
    mixup: float
    cutmix: float
    mix_probability: float
    mix_switch_probability: float
    crop: str
    crop_scale: list
    auto_augment: str | None
    color_jitter: float
    random_erasing: float
    repeats: int

    def __post_init__(self):
        super().__post_init__()
        self.check_least(1, "repeats")
        self.check_numbers("warmup_learning_rate", "eps", "mixup", "cutmix", "color_jitter")
        if self.warmup_learning_rate > self.learning_rate:
            raise ValueError(f"warmup_learning_rate is {self.warmup_learning_rate}, allowed is at most learning_rate.")
        self.check_shares("mix_probability", "mix_switch_probability", "random_erasing")
        self.check_scale("crop_scale")
        for name in ("label_smoothing", "ema_decay"):  # with 1 there would be nothing to learn, and nothing averaged
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a number from 0 to below 1.")
        if not 1e-3 <= self.layer_decay <= 1:
            raise ValueError(f"layer_decay is {self.layer_decay}, allowed is a number from 0.001 to 1.")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}, allowed are {' and '.join(OPTIMIZERS)}.")
        check_batch_size(self.batch_size, self.mixup, self.cutmix)
        self.transform()
        given = [name for name in (*SHAPE, SCALE) if getattr(self, name) is not None]
        if self.model is None:
            for name in SHAPE:
                if name not in given:
                    raise ValueError(f"{name} is null, allowed for a new model is a value.")
            self.config(["a", "b"])  # refuses wrong values before any work
        elif given:
            raise ValueError(f"{given[0]} is {getattr(self, given[0])!r}, allowed is null: model has its own.")

    def config(self, names: list[str]) -> LaplaceViTConfig:
        """Of a new model with these classes."""
        return LaplaceViTConfig(
            **{name: getattr(self, name) for name in (*SHAPE, SCALE, "image_size")},
            drop_path_rate=self.drop_path_rate,
            drop_path_schedule=self.drop_path_schedule,
            id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)},
        )

    def transform(self):
        return transform(
            image_size=self.image_size,
            mean=IMAGENET_DEFAULT_MEAN,
            std=IMAGENET_DEFAULT_STD,
            crop=self.crop,
            crop_scale=self.crop_scale,
            flip=self.flip,
            auto_augment=self.auto_augment,
            color_jitter=self.color_jitter,
            random_erasing=self.random_erasing,
        )


def classify(recipe: ClassifyRecipe, dry_run: bool = False) -> None:
    """Train a LaplaceViT on labelled images, a new one or one that is there.

    Its folder then holds the model, the image processor, `trainer_state.json` with what was logged and, written last,
    `results.json`; with ema_decay the averaged model in `ema`.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another run.
        Stopped: the process was asked to terminate; a checkpoint has been written.
    """
    if dry_run:
        print(_budget(recipe))
        return
    if is_finished(recipe):
        return
    train, held_out = _data(recipe)
    check_loss(recipe.loss, recipe.target_threshold, recipe.label_smoothing, len(train.names))
    set_seed(recipe.seed)
    model = _model(recipe, train.names)
    with claimed(recipe) as output:
        if output is not None:
            _train(recipe, output, model, train, held_out)


def _data(recipe: ClassifyRecipe) -> tuple[Images, Images]:
    """What to train on and what to measure on."""
    train, held_out = split(recipe)
    for name, found in (("data", train), ("held_out", held_out)):
        if found.labels is None:
            raise ValueError(f"{name}: {found.data} has no classes.")
    return train, held_out


def _model(recipe: ClassifyRecipe, names: list[str]) -> LaplaceViTForImageClassification:
    if recipe.model is None:
        return LaplaceViTForImageClassification(recipe.config(names))
    check_model(recipe.model)
    dropping = {"drop_path_rate": recipe.drop_path_rate, "drop_path_schedule": recipe.drop_path_schedule}
    try:
        model = LaplaceViTForImageClassification.from_pretrained(recipe.model, dtype=torch.float32, **dropping)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no LaplaceViT in {recipe.model} ({' '.join(str(error).split())[:200]}).") from error
    if list(model.config.id2label.values()) != names:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: number for number, name in enumerate(names)}
        model.num_labels = len(names)
        model.classifier = torch.nn.Linear(model.config.hidden_size, len(names))
        model._init_weights(model.classifier)
    if model.config.image_size != recipe.image_size:
        model.resize_position_embeddings(recipe.image_size)
    return model


class ClassifyTrainer(RunTrainer):
    """Trainer of image classifiers, whose targets are (batch, classes).

    Args:
        recipe: of the run.
        held_out: what to measure on.
        ema: keeps an average of the model; None if there is none.
        Every other: as in `RunTrainer`.
    """

    counted = "images"

    def __init__(self, *args, recipe: ClassifyRecipe, held_out: HeldOutImages, ema: EMACallback | None, **kwargs):
        super().__init__(*args, **kwargs)
        self.recipe, self.held_out, self.ema = recipe, held_out, ema
        self.model_accepts_loss_kwargs = False  # all batches are of one size, so the mean of means is the mean

    def seen(self) -> int:
        return self.state.global_step * self.recipe.images_per_step

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(pixel_values=inputs["pixel_values"])
        loss = soft_target_loss(outputs.logits, inputs["labels"], self.recipe.loss, self.recipe.target_threshold)
        return (loss, outputs) if return_outputs else loss

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Cross-entropy in nats and accuracies on the held-out images, also of the averaged model.

        Every image counts once, whatever batch and process it is in; one that is left out does not. Ends early, and
        says nothing, if the process is asked to end.
        """
        process, processes = self.args.process_index, self.args.world_size
        size = self.args.per_device_train_batch_size
        mine = self.held_out.batches(range(process, len(self.held_out), processes), size, self.recipe.workers)
        models = {"": self.model, **({"ema_": self.ema.model} if self.ema else {})}
        labels, losses, choices = [], dict.fromkeys(models, 0.0), {name: [] for name in models}
        # As many batches in each process, since they ask together whether one is to end.
        count = -(-len(self.held_out) // (processes * size))
        for rows in tqdm(
            itertools.islice(itertools.chain(mine, itertools.repeat([])), count),
            desc="held-out images",
            total=count,
            unit="batch",
            leave=False,
            disable=process > 0 or count < 20,
        ):
            if self.termination.agreed():
                return {}
            if not rows:
                continue
            batch = self._prepare_inputs(self.data_collator(rows))
            labels += batch["labels"].tolist()
            for name, model in models.items():
                model.eval()
                with torch.no_grad(), self.compute_loss_context_manager():
                    logits = model(pixel_values=batch["pixel_values"]).logits.float()
                losses[name] += torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="sum").item()
                choices[name] += logits.topk(min(5, logits.shape[1])).indices.tolist()
        gathered = self.accelerator.gather_for_metrics([(labels, losses, choices)], use_gather_object=True)
        labels = [label for each, _, _ in gathered for label in each]
        if not labels:
            raise ValueError("held_out: none of its images can be read.")
        metrics = {"images": len(labels)}
        for name in models:
            metrics[f"{name}loss"] = sum(each[name] for _, each, _ in gathered) / len(labels)
            ranked = [row for _, _, each in gathered for row in each[name]]
            found = Accuracy(keep_in_memory=True).compute(predictions=ranked, references=labels)
            metrics.update({f"{name}{metric}": value for metric, value in found.items()})
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.ema and self.args.should_save:
            self.ema.save(Path(output_dir))


def _train(recipe, output, model, train, held_out):
    state = this_process()
    draws = Draws(len(train), recipe.images_per_step, recipe.batch_size, recipe.repeats, recipe.seed)
    steps = draws.steps_per_epoch * recipe.epochs
    warmup = recipe.warmup_epochs * draws.steps_per_epoch
    last, saved = last_checkpoint(output)
    seconds_before, _ = read_progress(last)
    mixing = Mixing(
        *(recipe.mixup, recipe.cutmix, recipe.mix_probability, recipe.mix_switch_probability),
        *(recipe.label_smoothing, len(train.names)),
    )
    batches = TrainingBatches(
        AugmentedImages(train, recipe.transform(), recipe.skip),
        *(draws, functools.partial(mixed, mixing), saved.get("global_step", 0)),
        *(state.process_index, state.num_processes, recipe.workers),
    )
    processing = processor(recipe.image_size, recipe.eval_crop)
    measured = HeldOutImages(held_out, processing, recipe.skip)
    ema = None if recipe.ema_decay is None else EMACallback(model, recipe.ema_decay)
    if ema and last:
        ema.load(last)
    termination = TerminationCallback()
    trainer = ClassifyTrainer(
        model=model,
        args=TrainingArguments(
            **arguments(recipe, output, steps, recipe.images_per_step),
            lr_scheduler_type="cosine_warmup_with_min_lr",
            # One more, as it puts the peak a step before the warm-up's end; and without one it never reaches it.
            warmup_steps=warmup + 1,
            lr_scheduler_kwargs={
                "min_lr_rate": recipe.min_learning_rate / recipe.learning_rate,
                "warmup_lr_rate": recipe.warmup_learning_rate / recipe.learning_rate if warmup else 1.0,
            },
        ),
        callbacks=[*([ema] if ema else []), termination],
        eval_dataset=measured,
        processing_class=processing,
        data_collator=collate,
        optimizer=make_optimizer(
            *(model, recipe.optimizer, recipe.learning_rate, recipe.weight_decay, recipe.layer_decay, recipe.eps)
        ),
        batches=None if saved.get("global_step") == steps else batches,
        termination=termination,
        seconds_before=seconds_before,
        flops=budget.flops_per_image(model.config),
        recipe=recipe,
        held_out=measured,
        ema=ema,
    )
    if trainer.is_fsdp_enabled:
        raise ValueError("classify works in one process or with DDP, not with FSDP.")
    rows = first_rows(measured)
    if recipe.geometry_steps is not None:
        if trainer.pop_callback(ProgressCallback):
            trainer.add_callback(BriefProgressCallback())
        trainer.add_callback(GeometryCallback(trainer, rows, recipe.geometry_steps))
    if last:
        print(f"going on at step {saved['global_step']} of {steps}")
    metrics, seconds = complete(trainer, steps, last)

    model = trainer.accelerator.unwrap_model(trainer.model)
    results = {
        "stage": "classify",
        "laplacian_heads": model.config.laplacian_heads,
        "parameters": model.num_parameters(),
        "steps": steps,
        "epochs": recipe.epochs,
        "images": steps * recipe.images_per_step,
        "seconds": seconds,
        "hardware": budget.hardware(state.num_processes),
        "images_per_second": steps * recipe.images_per_step / seconds,
        "peak_memory_gb": peak_memory() / 1e9,
        "loss": metrics["eval_loss"],
        "accuracy": metrics["eval_accuracy"],
        "accuracy_top5": metrics.get("eval_accuracy_top5"),
        "ema_accuracy": metrics.get("eval_ema_accuracy"),
        "held_out_images": metrics["eval_images"],
        "seed": recipe.seed,
    }
    trainer.save_state()
    if state.is_main_process:
        model.save_pretrained(output)
        processing.save_pretrained(output)
        if ema:
            shutil.rmtree(output / "ema", ignore_errors=True)
            ema.model.save_pretrained(output / "ema")
            processing.save_pretrained(output / "ema")
        finish(trainer, results)
        print(
            f"{output}: accuracy {results['accuracy']:.2%} on {results['held_out_images']:,} held-out images, "
            f"{results['images_per_second']:,.0f} images/s, peak memory {results['peak_memory_gb']:.1f} GB"
        )


def _budget(recipe: ClassifyRecipe) -> str:
    """What a run needs. The data are only asked for where the recipe does not say how many images there are."""
    count = recipe.images if recipe.images is not None else len(_data(recipe)[0])
    steps = Draws(count, recipe.images_per_step, recipe.batch_size, recipe.repeats, recipe.seed).steps_per_epoch
    return budget.describe_classifier(
        *(_config(recipe), steps * recipe.epochs, recipe.images_per_step, recipe.batch_size),
        *(recipe.bf16, recipe.gradient_checkpointing, recipe.ema_decay is not None),
    )


def _config(recipe: ClassifyRecipe) -> LaplaceViTConfig:
    """The configuration of a run's model, which may be one that a shipped recipe will write; without its classes."""
    if recipe.model is None:
        return recipe.config([])
    made = [load(ClassifyRecipe, path.stem) for path in SHIPPED.glob("vit_*.yaml")]
    made = [first for first in made if first.output == recipe.model]
    try:
        if made and not Path(recipe.model).is_dir():
            config = _config(made[0])
        else:
            config = LaplaceViTConfig.from_pretrained(recipe.model, num_labels=0)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no LaplaceViT in {recipe.model}, on whose size the budget depends.") from error
    config.image_size = recipe.image_size
    return config
