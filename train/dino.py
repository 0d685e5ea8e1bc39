"""Training a LaplaceViT on images without labels, by DINO, iBOT and KoLeo: the verb `dino`."""

import dataclasses
import itertools
import math
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging

from laplacian_heads import recipes
from laplacian_heads.accuracy import Accuracy
from laplacian_heads.configuration import LaplaceViTConfig
from laplacian_heads.images import Images
from laplacian_heads.neighbors import vote
from laplacian_heads.train import budget
from laplacian_heads.train.callbacks import BriefProgressCallback, TerminationCallback
from laplacian_heads.train.checkpoints import last_checkpoint, read_progress
from laplacian_heads.train.crops import collate, mask_blocks, multi_crop
from laplacian_heads.train.dino_network import CENTERINGS, FILE, DinoNetwork, Teacher
from laplacian_heads.train.draws import Draws
from laplacian_heads.train.geometry import GeometryCallback
from laplacian_heads.train.parameter_groups import make_optimizer
from laplacian_heads.train.pictures import AugmentedImages, HeldOutImages, TrainingBatches, first_rows, processor, split
from laplacian_heads.train.pictures import collate as collate_held_out
from laplacian_heads.train.recipe import ImageRecipe, this_process
from laplacian_heads.train.run import arguments, claimed, complete, finish, is_finished, peak_memory
from laplacian_heads.train.schedules import cosine, linear, warmup_cosine
from laplacian_heads.train.trainer import RunTrainer

logger = logging.get_logger(__name__)

# DINO's k-NN classifier (facebookresearch/dino, eval_knn.py).
NEIGHBORS, NEIGHBOR_TEMPERATURE = 20, 0.07
# A teacher whose outputs tell fewer nats of an image has collapsed, if so many lines of the log in succession say so.
LEAST_TOLD, LINES = 0.005, 3


@dataclasses.dataclass(kw_only=True)
class DinoRecipe(ImageRecipe):
    """Keys of the recipes for self-supervised training; the shipped ones say what they mean."""

    patch_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    laplacian_heads: int | list | dict
    qk_norm: bool
    layer_scale_init_value: float | None
    head_hidden_size: int
    head_bottleneck_size: int
    prototypes: int
    patch_prototypes: int | None
    norm_last_layer: bool
    freeze_last_layer_epochs: int
    final_weight_decay: float
    max_parameter_grad_norm: float
    teacher_momentum: float
    final_teacher_momentum: float
    student_temperature: float
    teacher_temperature: float
    warmup_teacher_temperature: float
    warmup_teacher_temperature_epochs: int
    centering: str
    center_momentum: float
    ibot_weight: float
    koleo_weight: float
    mask_probability: float
    mask_ratio: list
    local_crops: int
    local_size: int
    global_scale: list
    local_scale: list
    color_jitter: list
    color_jitter_probability: float
    grayscale: float
    blur: list
    blur_sigma: list
    solarize: float
    bank_images: int | None
    on_collapse: str

    def __post_init__(self):
        super().__post_init__()
        self.check_least(1, "patch_size", "local_size", "head_hidden_size", "head_bottleneck_size")
        self.check_least(2, "prototypes", *(["patch_prototypes"] if self.patch_prototypes is not None else []))
        self.check_least(0, "freeze_last_layer_epochs", "warmup_teacher_temperature_epochs", "local_crops")
        self.check_numbers("final_weight_decay", "max_parameter_grad_norm", "ibot_weight", "koleo_weight")
        momenta = ("teacher_momentum", "final_teacher_momentum", "center_momentum")
        self.check_shares(*momenta, "mask_probability", "color_jitter_probability", "grayscale", "solarize")
        self.check_scale("global_scale", "local_scale", "mask_ratio")
        for name in ("student_temperature", "teacher_temperature", "warmup_teacher_temperature"):
            if not 1e-3 <= getattr(self, name) <= 10:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is a number from 0.001 to 10.")
        for name, length, most in (("color_jitter", 4, math.inf), ("blur", 3, 1.0), ("blur_sigma", 2, math.inf)):
            value = getattr(self, name)
            numbers = all(isinstance(part, int | float) and 0 <= part <= most for part in value)
            if len(value) != length or not numbers:
                within = "of at least 0" if most == math.inf else "from 0 to 1"
                raise ValueError(f"{name} is {value}, allowed are {length} numbers {within}.")
        if self.color_jitter[3] > 0.5:
            raise ValueError(f"color_jitter is {self.color_jitter}, allowed as its last number, the hue, is up to 0.5.")
        if self.blur_sigma[0] > self.blur_sigma[1]:
            raise ValueError(f"blur_sigma is {self.blur_sigma}, allowed are two numbers, the smaller first.")
        if self.centering not in CENTERINGS:
            raise ValueError(f"centering is {self.centering!r}, allowed are {', '.join(CENTERINGS)}.")
        if self.on_collapse not in ("warn", "stop"):
            raise ValueError(f"on_collapse is {self.on_collapse!r}, allowed are warn and stop.")
        if self.bank_images is not None:
            self.check_least(1, "bank_images")
        if self.koleo_weight and self.batch_size < 2:
            raise ValueError(f"batch_size is {self.batch_size}, allowed with koleo_weight is at least 2.")
        for name in ("image_size", "local_size"):
            if getattr(self, name) % self.patch_size:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, allowed are multiples of patch_size, {self.patch_size}."
                )
        patches = (self.image_size // self.patch_size) ** 2
        if self.masks and patches == 1:
            raise ValueError(f"image_size is {self.image_size}, allowed with masks is more than one patch.")
        if self.masks and int((self.mask_ratio[0] + 1e-6) * patches) < 1:
            raise ValueError(
                f"mask_ratio is {self.mask_ratio}, allowed with {patches} patches is at least {1 / patches:.3g}."
            )
        self.config()  # refuses wrong values before any work

    @property
    def masks(self) -> bool:
        return self.ibot_weight > 0

    def config(self) -> LaplaceViTConfig:
        """Of the student's backbone."""
        names = ("patch_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "laplacian_heads", "qk_norm")
        names += ("layer_scale_init_value", "image_size", "drop_path_rate", "drop_path_schedule")
        return LaplaceViTConfig(**{name: getattr(self, name) for name in names}, use_mask_token=self.masks)

    def network(self) -> DinoNetwork:
        names = ("prototypes", "patch_prototypes", "norm_last_layer")
        sizes = self.head_hidden_size, self.head_bottleneck_size
        return DinoNetwork(self.config(), *sizes, **{name: getattr(self, name) for name in names})

    def transform(self):
        names = ("local_size", "local_crops", "global_scale", "local_scale", "flip", "color_jitter")
        names += ("color_jitter_probability", "grayscale", "blur", "blur_sigma", "solarize")
        return multi_crop(global_size=self.image_size, **{name: getattr(self, name) for name in names})

    def collate(self, rows: list[tuple]) -> dict[str, torch.Tensor]:
        return collate(rows, self._masks if self.masks else None)

    def _masks(self, crops: int) -> torch.Tensor:
        side = self.image_size // self.patch_size
        return mask_blocks(crops, (side, side), self.mask_probability, self.mask_ratio)


@dataclasses.dataclass(frozen=True)
class Schedules:
    """What changes over the steps of a run, each by the number of steps that are done.

    Args:
        recipe: of the run.
        steps: of the run.
        epoch: steps of an epoch.
    """

    recipe: DinoRecipe
    steps: int
    epoch: int

    def learning_rate(self, step: int) -> float:
        recipe = self.recipe
        rates = 0.0, recipe.learning_rate, recipe.min_learning_rate
        return warmup_cosine(step, self.steps, recipe.warmup_epochs * self.epoch, *rates)

    def weight_decay(self, step: int) -> float:
        return cosine(step, self.steps, self.recipe.weight_decay, self.recipe.final_weight_decay)

    def teacher_momentum(self, step: int) -> float:
        return cosine(step, self.steps, self.recipe.teacher_momentum, self.recipe.final_teacher_momentum)

    def teacher_temperature(self, step: int) -> float:
        recipe = self.recipe
        steps = recipe.warmup_teacher_temperature_epochs * self.epoch
        return linear(step, steps, recipe.warmup_teacher_temperature, recipe.teacher_temperature)


class TeacherCallback(TrainerCallback):
    """What happens around an optimizer step: the schedules, the gradient's limits, and the teacher's own step.

    Source: facebookresearch/dino, `main_dino.py`.
    """

    def __init__(self, student: DinoNetwork, teacher: Teacher, schedules: Schedules):
        self.student, self.teacher, self.schedules = student, teacher, schedules

    def on_train_begin(self, args, state, control, **kwargs):
        self.teacher.to(next(self.student.parameters()).device)  # to which Trainer has moved the student

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            if "no_decay" not in group["name"]:
                group["weight_decay"] = self.schedules.weight_decay(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        recipe = self.schedules.recipe
        gradients = [each.grad for each in self.student.parameters() if each.grad is not None]
        if recipe.max_parameter_grad_norm:
            norms = torch._foreach_norm(gradients)
            factors = [(recipe.max_parameter_grad_norm / (norm + 1e-6)).clamp(max=1) for norm in norms]
            torch._foreach_mul_(gradients, factors)
        if state.global_step < recipe.freeze_last_layer_epochs * self.schedules.epoch:
            for head in {self.student.image_head, self.student.patch_head}:
                for parameter in head.last_layer.parameters():
                    parameter.grad = None

    def on_step_end(self, args, state, control, **kwargs):
        self.teacher.follow(self.student, self.schedules.teacher_momentum(state.global_step - 1))


class DinoTrainer(RunTrainer):
    """Trainer of a student that is to give to crops of an image what its teacher gives to others.

    It logs, beside the losses and what the schedules say, by what a collapse shows: `teacher_entropy`, of the teacher's
    probabilities of an image, and `teacher_kl`, their divergence from the student's, both in nats, as in figure 7 of
    DINO's paper; `prototype_entropy`, of their mean over a batch; and `feature_spread`, the deviation of the teacher's
    class tokens over a batch, each of length 1, times the root of their width (Chen and He, "SimSiam", 2021): 0 if all
    are alike, 1 if they are spread evenly.

    Args:
        recipe: of the run.
        teacher: of the model.
        schedules: of the run.
        held_out: what to measure on, and `bank` the training images among which neighbours are looked for; None if
            nothing is to be measured.
        Every other: as in `RunTrainer`.
    """

    counted = "images"

    def __init__(
        self,
        *args,
        recipe: DinoRecipe,
        teacher: Teacher,
        schedules: Schedules,
        held_out: HeldOutImages | None,
        bank: HeldOutImages | None,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.recipe, self.teacher, self.schedules = recipe, teacher, schedules
        self.held_out, self.bank = held_out, bank
        self.model_accepts_loss_kwargs = False  # all batches are of one size, so the mean of means is the mean
        self.figures, self.batches_seen = {}, 0  # sums since the last line of the log, and over how many batches
        self.collapsed = 0  # lines of the log in succession that say so

    def seen(self) -> int:
        return self.state.global_step * self.recipe.images_per_step

    def create_scheduler(self, num_training_steps, optimizer=None):
        # In a circle through the scheduler, the trainer and its progress bar would outlive the training.
        schedules, peak = self.schedules, self.recipe.learning_rate
        self.lr_scheduler = LambdaLR(self.optimizer, lambda step: schedules.learning_rate(step) / peak)
        return self.lr_scheduler

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        temperature = self.schedules.teacher_temperature(self.state.global_step)
        targets, patch_targets, features = self.teacher(inputs["pixel_values"], inputs.get("masked"), temperature)
        losses = model(
            **inputs, targets=targets, patch_targets=patch_targets, temperature=self.recipe.student_temperature
        )
        loss = losses["dino"]
        for name, weight in (("ibot", self.recipe.ibot_weight), ("koleo", self.recipe.koleo_weight)):
            if weight:
                loss = loss + weight * losses[name]
        self._note({f"{name}_loss": each.detach() for name, each in losses.items()} | _signs(targets, features))
        return (loss, losses) if return_outputs else loss

    def _note(self, figures: dict[str, torch.Tensor]) -> None:
        self.batches_seen += 1
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    def log(self, logs, start_time=None):
        if "grad_norm" in logs:
            logs = {**logs, **self._noted()}
            super().log(logs, start_time)
            self._watch(logs)
        else:
            super().log(logs, start_time)

    def _noted(self) -> dict[str, float]:
        """Means since the last line of the log, over all processes, and what the schedules said of its last step."""
        means = torch.stack([each.float() for each in self.figures.values()]) / self.batches_seen
        means = self.accelerator.reduce(means, "mean").tolist()
        found = dict(zip(self.figures, means, strict=True))
        found["teacher_kl"] = found["dino_loss"] - found["teacher_entropy"]
        self.figures, self.batches_seen = {}, 0
        for name in ("weight_decay", "teacher_momentum", "teacher_temperature"):
            found[name] = getattr(self.schedules, name)(self.state.global_step - 1)
        return found

    def _watch(self, logs: dict[str, float]) -> None:
        """Say so when the teacher has collapsed. Raises ValueError where that is to end the run."""
        if self.state.global_step <= self.recipe.warmup_epochs * self.schedules.epoch:
            return  # in the beginning all images look alike to it
        reason = collapse(logs, self.recipe.prototypes)
        self.collapsed = self.collapsed + 1 if reason else 0
        if self.collapsed == LINES:
            sentence = f"The teacher has collapsed at step {self.state.global_step}: {reason}."
            if self.recipe.on_collapse == "stop":
                raise ValueError(f"{sentence} Give another centering, temperature or rate, and another output=.")
            if self.is_world_process_zero():
                logger.warning(sentence)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """The accuracy of the teacher's 20 nearest neighbours and the spread of its features, on held-out images.

        Every image counts once, whatever process it is in; one that is left out does not. Ends early, and says nothing,
        if the process is asked to end.
        """
        if self.held_out is None:
            return {f"{metric_key_prefix}_images": 0}
        found = {}
        for name, some in (("bank", self.bank), ("held-out", self.held_out)):
            if some is not None:
                found[name] = self._features(some, f"{name} images")
                if found[name] is None:
                    return {}
        features, labels = found["held-out"]
        metrics = {"images": len(features), "feature_spread": spread(features).item()}
        if self.bank is not None:
            bank, known = found["bank"]
            classes = len(self.bank.images.names)
            scores = vote(features, bank, known, min(NEIGHBORS, len(bank)), NEIGHBOR_TEMPERATURE, classes)
            ranked = scores.topk(min(5, classes)).indices.tolist()
            accuracy = Accuracy(keep_in_memory=True).compute(predictions=ranked, references=labels.tolist())
            metrics.update({f"knn_{name}": value for name, value in accuracy.items()})
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _features(self, some: HeldOutImages, what: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Class tokens of images, (images, width), and their labels, of all processes; None if one is asked to end."""
        process, processes = self.args.process_index, self.args.world_size
        size = self.args.per_device_train_batch_size
        mine = some.batches(range(process, len(some), processes), size, self.recipe.workers)
        features, labels = [], []
        # As many batches in each process, since they ask together whether one is to end.
        count = -(-len(some) // (processes * size))
        for rows in tqdm(
            itertools.islice(itertools.chain(mine, itertools.repeat([])), count),
            desc=what,
            total=count,
            unit="batch",
            leave=False,
            disable=process > 0 or count < 20,
        ):
            if self.termination.agreed():
                return None
            if rows:
                batch = self._prepare_inputs(collate_held_out(rows))
                with torch.no_grad(), self.compute_loss_context_manager():
                    features.append(self.teacher.network.vit(batch["pixel_values"]).pooler_output.float().cpu())
                labels += batch["labels"].tolist()
        gathered = self.accelerator.gather_for_metrics([(features, labels)], use_gather_object=True)
        features = [part for each, _ in gathered for part in each]
        if not features:
            raise ValueError(f"None of the {what} can be read.")
        return torch.cat(features), torch.tensor([label for _, each in gathered for label in each])

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            self.teacher.save(Path(output_dir))


def spread(features: torch.Tensor) -> torch.Tensor:
    """The deviation over images of features (images, width), each of length 1, times the root of the width: 0 to 1."""
    features = torch.nn.functional.normalize(features.float(), dim=-1)
    return features.std(0, correction=0).square().sum().sqrt()


def _signs(targets: torch.Tensor, features: torch.Tensor) -> dict[str, torch.Tensor]:
    """By what a collapse shows in a batch of teacher's probabilities and class tokens, (2 * images, ...) each."""
    return {
        "teacher_entropy": torch.special.entr(targets).sum(-1).mean(),
        "prototype_entropy": torch.special.entr(targets.mean(0)).sum(),
        "feature_spread": spread(features),
    }


def collapse(logs: dict[str, float], prototypes: int) -> str | None:
    """What in a line of the log says that the teacher gives the same to every image; None if nothing does.

    How many nats a teacher's output tells of the image is the entropy of the mean output less the mean of the
    entropies. It is 0 both if one prototype takes all and if all are as likely, the two ways of collapsing.
    """
    told = logs["prototype_entropy"] - logs["teacher_entropy"]
    if told >= LEAST_TOLD:
        return None
    return (
        f"its outputs tell {told:.2g} nats of an image; teacher_entropy is {logs['teacher_entropy']:.3g}, which is 0 "
        f"if one prototype takes all, and {math.log(prototypes):.3g} if all are as likely; teacher_kl is "
        f"{logs['teacher_kl']:.2g}, feature_spread {logs['feature_spread']:.2g}"
    )


def dino(recipe: DinoRecipe, dry_run: bool = False) -> None:
    """Train a LaplaceViT without labels.

    Its folder then holds the teacher and its image processor, the student in `student`, `trainer_state.json` with what
    was logged and, written last, `results.json`.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds another run.
        Stopped: the process was asked to terminate; a checkpoint has been written.
    """
    if dry_run:
        print(_budget(recipe))
        return
    if is_finished(recipe):
        return
    train, held_out = split(recipe)
    set_seed(recipe.seed)
    student = recipe.network()
    with claimed(recipe) as output:
        if output is not None:
            _train(recipe, output, student, train, held_out)


def _bank(recipe: DinoRecipe, train: Images, held_out: Images | None) -> Images | None:
    """Training images among which neighbours of held-out ones are looked for; None if there are no classes."""
    if held_out is None or train.labels is None or held_out.labels is None:
        return None
    count = min(recipe.bank_images or len(train), len(train))
    return train.select(range(0, len(train), -(-len(train) // count)))


def _train(recipe, output, student, train, held_out):
    state = this_process()
    draws = Draws(len(train), recipe.images_per_step, recipe.batch_size, 1, recipe.seed)
    steps = draws.steps_per_epoch * recipe.epochs
    last, saved = last_checkpoint(output)
    seconds_before, _ = read_progress(last)
    twin = recipe.network()
    twin.load_state_dict(student.state_dict())
    teacher = Teacher(twin, recipe.centering, recipe.center_momentum)
    if last:
        if not (last / FILE).exists():
            raise ValueError(f"{last} lacks {FILE}; delete that folder to begin again.")
        teacher.load(last)
    batches = TrainingBatches(
        AugmentedImages(train, recipe.transform(), recipe.skip),
        *(draws, recipe.collate, saved.get("global_step", 0)),
        *(state.process_index, state.num_processes, recipe.workers),
    )
    processing = processor(recipe.image_size, recipe.eval_crop)
    bank = _bank(recipe, train, held_out)
    measured = {
        name: None if some is None else HeldOutImages(some, processing, recipe.skip)
        for name, some in (("held_out", held_out), ("bank", bank))
    }
    schedules = Schedules(recipe, steps, draws.steps_per_epoch)
    termination = TerminationCallback()
    given = arguments(recipe, output, steps, recipe.images_per_step)
    if held_out is None:
        given["eval_strategy"] = "no"
    trainer = DinoTrainer(
        model=student,
        args=TrainingArguments(**given),
        callbacks=[TeacherCallback(student, teacher, schedules), termination],
        eval_dataset=measured["held_out"],
        processing_class=processing,
        data_collator=collate_held_out,
        optimizer=make_optimizer(student, "adamw", recipe.learning_rate, recipe.weight_decay),
        batches=None if saved.get("global_step") == steps else batches,
        termination=termination,
        seconds_before=seconds_before,
        flops=budget.flops_per_dino_image(recipe),
        recipe=recipe,
        teacher=teacher,
        schedules=schedules,
        **measured,
    )
    if trainer.is_fsdp_enabled:
        raise ValueError("dino works in one process or with DDP, not with FSDP.")
    rows = [] if held_out is None else first_rows(measured["held_out"])
    if recipe.geometry_steps is not None:
        if not rows:
            raise ValueError("held_out is null, allowed with geometry_steps is a source of images, or a number.")
        if trainer.pop_callback(ProgressCallback):
            trainer.add_callback(BriefProgressCallback())
        trainer.add_callback(GeometryCallback(trainer, rows, recipe.geometry_steps))
    if last:
        print(f"going on at step {saved['global_step']} of {steps}")
    metrics, seconds = complete(trainer, steps, last)

    student, logged = trainer.accelerator.unwrap_model(trainer.model), _last_line(trainer.state.log_history)
    results = {
        "stage": "dino",
        "laplacian_heads": student.config.laplacian_heads,
        "parameters": student.vit.num_parameters(),
        "steps": steps,
        "epochs": recipe.epochs,
        "images": steps * recipe.images_per_step,
        "seconds": seconds,
        "hardware": budget.hardware(state.num_processes),
        "images_per_second": steps * recipe.images_per_step / seconds,
        "peak_memory_gb": peak_memory() / 1e9,
        **{
            name: logged.get(name) for name in ("dino_loss", "ibot_loss", "koleo_loss", "teacher_entropy", "teacher_kl")
        },
        "feature_spread": metrics.get("eval_feature_spread", logged.get("feature_spread")),
        "knn_accuracy": metrics.get("eval_knn_accuracy"),
        "held_out_images": metrics["eval_images"],
        "seed": recipe.seed,
    }
    trainer.save_state()
    if state.is_main_process:
        for model, folder in ((teacher.network.vit, output), (student.vit, output / "student")):
            model.save_pretrained(folder)
            processing.save_pretrained(folder)
        recipes.write(output / "student" / "recipe.yaml", recipe)  # by which it is known where it was published
        finish(trainer, results)
        knn = results["knn_accuracy"]
        print(
            f"{output}: {'' if knn is None else f'k-NN accuracy {knn:.2%}, '}feature spread "
            f"{results['feature_spread']:.3f}, {results['images_per_second']:,.0f} images/s, peak memory "
            f"{results['peak_memory_gb']:.1f} GB"
        )


def _last_line(history: list[dict]) -> dict:
    """The newest line of the log that training wrote."""
    return next((line for line in reversed(history) if "dino_loss" in line), {})


def _budget(recipe: DinoRecipe) -> str:
    """What a run needs. The data are only asked for where the recipe does not say how many images there are."""
    count = recipe.images if recipe.images is not None else len(split(recipe)[0])
    steps = Draws(count, recipe.images_per_step, recipe.batch_size, 1, recipe.seed).steps_per_epoch
    return budget.describe_dino(recipe, steps * recipe.epochs)
