"""What a step of self-supervised training costs beside the same step built of timm's model and lightly's parts.

Run as `python -m benchmarks.ssl '{"model": ..., ...}'` it is one measured student and teacher in a process of its own,
which takes a step for each line it is sent and answers with {"seconds": ..., "transient_gb": ...}: the time of the
teacher's forward pass, the student's forward and backward pass and the teacher's step, and how far the process's memory
rose above weights and gradients during it.
"""

import ctypes
import json
import sys
import time
import warnings
from collections.abc import Callable

import torch
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from lightly.models.modules import DINOProjectionHead, MaskedVisionTransformerTIMM
from lightly.models.utils import update_momentum
from timm.models.vision_transformer import vit_small_patch16_224

from benchmarks.vision import precisions
from benchmarks.worker import memory_gb, reset_peak
from laplacian_heads import recipes
from laplacian_heads.train.dino import DinoRecipe
from laplacian_heads.train.dino_network import Teacher

IMAGES, LOCAL_CROPS = 4, 2
LIGHTLY = "timm's ViT-S, lightly's heads and losses"
NONE, PAPER = "LaplaceViT-S, no Laplacian head", "LaplaceViT-S, half of the heads"
INTRODUCTION = [
    "## Self-supervised training",
    "",
    "A step of the recipe dino_vits16_imagenet1k, ViT-S/16 with DINO, iBOT and KoLeo and 65,536 prototypes, but for "
    f"{IMAGES} images of 2 crops of 224 and {LOCAL_CROPS} of 96 pixels, without QK-norm and drop path: the teacher's "
    "forward pass, the student's forward and backward pass, and the teacher's step. The other one is what a user of "
    f"lightly would build. {torch.get_num_threads()} threads.",
    "",
]


def lines(compare, repeats: int) -> list[str]:
    """The measurements as Markdown; compare is that of `benchmarks.__main__`."""
    found = [*INTRODUCTION]
    for bf16 in precisions():
        how = "bf16 autocast" if bf16 else "fp32"
        jobs = {name: {"model": model, "bf16": bf16} for name, model in ((LIGHTLY, "lightly"), (NONE, 0), (PAPER, 3))}
        workers = compare(jobs, repeats, module="benchmarks.ssl")
        base = {key: workers[LIGHTLY].median(key) for key in ("seconds", "transient_gb")}
        found += [f"| {how} | step time | ratio | transient memory | ratio |", "|---|---|---|---|---|"]
        for name, worker in workers.items():
            seconds, memory = (worker.median(key) for key in base)
            found.append(
                f"| {name} | {seconds:.2f} s | {seconds / base['seconds']:.2f} | {memory:.2f} GB "
                f"| {memory / base['transient_gb']:.2f} |"
            )
        ratio = workers[PAPER].median("seconds") / workers[NONE].median("seconds")
        found += ["", f"Laplacian heads against none: {ratio:.3f} of the step time.", ""]
    return found


def recipe(heads: int) -> DinoRecipe:
    values = {"laplacian_heads": heads, "qk_norm": False, "drop_path_rate": 0.0, "batch_size": IMAGES}
    values |= {"images_per_step": IMAGES, "local_crops": LOCAL_CROPS}
    return recipes.load(DinoRecipe, "dino_vits16_imagenet1k", values)


def batch(of: DinoRecipe) -> dict[str, torch.Tensor]:
    sizes = [of.image_size] * 2 + [of.local_size] * of.local_crops
    return of.collate([([torch.randn(3, size, size) for size in sizes], -1, number) for number in range(IMAGES)])


def ours(heads: int) -> tuple[torch.nn.Module, Callable]:
    of = recipe(heads)
    student, twin = of.network(), of.network()
    twin.load_state_dict(student.state_dict())
    teacher, inputs = Teacher(twin, of.centering, of.center_momentum), batch(of)

    def loss() -> torch.Tensor:
        targets, patch_targets, _ = teacher(inputs["pixel_values"], inputs["masked"], of.teacher_temperature)
        found = student(**inputs, targets=targets, patch_targets=patch_targets)
        return found["dino"] + of.ibot_weight * found["ibot"] + of.koleo_weight * found["koleo"]

    return student, loss, lambda: teacher.follow(student, of.teacher_momentum)


class Lightly(torch.nn.Module):
    """A student, or a teacher, as in lightly's examples of DINOv2."""

    def __init__(self, of: DinoRecipe):
        super().__init__()
        self.backbone = MaskedVisionTransformerTIMM(vit_small_patch16_224(dynamic_img_size=True, num_classes=0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.head = DINOProjectionHead(
                *(384, of.head_hidden_size, of.head_bottleneck_size, of.prototypes), norm_last_layer=of.norm_last_layer
            )

    def forward(self, images, masks=None, masked=None):
        tokens = self.backbone.encode(images, mask=masks)
        patches = None if masked is None else self.head(tokens[masked])
        return self.head(tokens[:, 0]), patches, tokens[:, 0]


def theirs() -> tuple[torch.nn.Module, Callable]:
    of = recipe(0)
    student, teacher = Lightly(of), Lightly(of)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    inputs = batch(of)
    images, side = inputs["pixel_values"], of.image_size // of.patch_size
    patches = inputs["bool_masked_pos"]
    masks = torch.cat([torch.zeros(len(patches), 1, dtype=torch.bool), patches], 1)  # CLS is in no block
    dino, ibot, koleo = DINOLoss(of.prototypes), IBOTPatchLoss(of.prototypes), KoLeoLoss()

    def loss() -> torch.Tensor:
        with torch.no_grad():
            targets, patch_targets, _ = teacher(images, masked=masks)
        logits, patch_logits, features = student(images, masks, masks)
        local_logits, _, _ = student(inputs["local_crops"])
        views = [*logits.chunk(2), *local_logits.chunk(of.local_crops)]
        found = dino(list(targets.chunk(2)), views, teacher_temp=of.teacher_temperature)
        found = found + of.ibot_weight * ibot(
            patch_targets, patch_logits, patches.view(-1, side, side), teacher_temp=of.teacher_temperature
        )
        return found + of.koleo_weight * sum(koleo(crop) for crop in features.chunk(2))

    return student, loss, lambda: update_momentum(student, teacher, of.teacher_momentum)


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    student, loss, follow = theirs() if job["model"] == "lightly" else ours(job["model"])
    for parameter in student.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job["bf16"]):
            found = loss()
        found.backward()
        follow()

    step()  # what is allocated once and for all
    ctypes.CDLL(None).malloc_trim(0)  # tensors of this size are freed into the heap and would not be seen again
    for _ in sys.stdin:
        before = memory_gb("VmRSS")
        reset_peak()
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "transient_gb": memory_gb("VmHWM") - before}
        ctypes.CDLL(None).malloc_trim(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
