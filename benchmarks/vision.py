"""What LaplaceViT costs beside the vision transformers of timm and transformers, and what its Laplacian heads cost.

Run as `python -m benchmarks.vision '{"model": ..., ...}'` it is one measured model in a process of its own, which takes
a training step and an inference for each line it is sent. It answers each line with {"seconds": ..., "transient_gb":
..., "inference_seconds": ...}: the time of forward and backward, how far the process's memory rose above weights and
gradients during them, and the time of a forward pass without gradients.
"""

import ctypes
import json
import sys
import time

import torch
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.worker import memory_gb, reset_peak
from laplacian_heads import LaplaceViTConfig
from laplacian_heads.convert import from_timm, timm_model
from laplacian_heads.train import run

IMAGES = 4
SMALL = LaplaceViTConfig.small()  # the sizes of timm's deit3_small_patch16_224
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "layer_norm_eps")
TIMM = "timm's deit3_small_patch16_224"
VIT = "transformers' ViT, without LayerScale"
NONE, HALF = "LaplaceViT, no Laplacian head", "LaplaceViT, half of the heads"
INTRODUCTION = [
    "## Vision",
    "",
    f"LaplaceViT-S/16 against models of its size: timm's with the same weights, and transformers' with weights of its "
    f"own. {IMAGES} images of {SMALL.image_size} pixels, {SMALL.num_labels:,} classes, sdpa, no dropout and no drop "
    f"path, {torch.get_num_threads()} threads. A step is forward and backward, without an optimizer; inference is a "
    "forward pass without gradients, and its ratio that of images per second. `python -m benchmarks "
    "--compiled-vision` adds the compiled models, which take minutes to compile.",
    "",
]


def lines(compare, repeats: int, compiled: bool) -> list[str]:
    """The measurements as Markdown; compare is that of `benchmarks.__main__`, compiled adds the models compiled."""
    tables = [
        table(compare, repeats, compile_it, bf16)
        for compile_it in ((False, True) if compiled else (False,))
        for bf16 in precisions()
    ]
    return [*INTRODUCTION, *(line for each in tables for line in each)]


def precisions() -> tuple[bool, ...]:
    """Whether bf16 autocast is on: off, and on where the processor has matrix units for it."""
    return (False, True) if run.has_bf16() else (False,)


def table(compare, repeats: int, compiled: bool, bf16: bool) -> list[str]:
    models = {TIMM: "timm", VIT: "vit", NONE: 0, HALF: SMALL.num_attention_heads // 2}
    if compiled:
        del models[VIT]
    how = f"{'compiled (torch.compile)' if compiled else 'eager'}, {'bf16 autocast' if bf16 else 'fp32'}"
    print(f"  {how}", flush=True)
    jobs = {name: {"model": model, "compiled": compiled, "bf16": bf16} for name, model in models.items()}
    workers = compare(jobs, repeats, module="benchmarks.vision")
    base = {key: workers[TIMM].median(key) for key in ("seconds", "transient_gb", "inference_seconds")}
    found = [
        f"| {how} | step time | ratio | transient memory | ratio | inference | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, worker in workers.items():
        seconds, memory, inference = (worker.median(key) for key in base)
        found.append(
            f"| {name} | {seconds:.2f} s | {seconds / base['seconds']:.2f} "
            f"| {memory:.2f} GB | {memory / base['transient_gb']:.2f} "
            f"| {IMAGES / inference:.1f} images/s | {base['inference_seconds'] / inference:.2f} |"
        )
    step, inference = (
        workers[HALF].median(key) / workers[NONE].median(key) for key in ("seconds", "inference_seconds")
    )
    found += [
        "",
        f"Laplacian heads against none: {step:.3f} of the step time, {inference:.3f} of the time of inference.",
        "",
    ]
    return found


def build(model: str | int) -> torch.nn.Module:
    """timm's model, transformers' ViT of the same size, or LaplaceViT with so many Laplacian heads."""
    if model == "vit":
        shape = {name: getattr(SMALL, name) for name in SIZES}
        return ViTForImageClassification(ViTConfig(**shape, num_labels=SMALL.num_labels))
    original = timm_model("deit3_small_patch16_224", pretrained=False)
    return original if model == "timm" else from_timm(original, model)


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = build(job["model"])
    images = torch.randn(IMAGES, SMALL.num_channels, SMALL.image_size, SMALL.image_size)
    labels = torch.randint(SMALL.num_labels, (IMAGES,))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    called = torch.compile(model) if job["compiled"] else model

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job["bf16"]):
            outputs = called(images)
        return outputs if job["model"] == "timm" else outputs.logits

    def step() -> None:
        torch.nn.functional.cross_entropy(forward().float(), labels).backward()

    step()  # what is allocated once and for all
    ctypes.CDLL(None).malloc_trim(0)  # tensors of this size are freed into the heap and would not be seen again
    before = memory_gb("VmRSS")
    reset_peak()
    step()
    transient = memory_gb("VmHWM") - before

    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
        with torch.no_grad():
            start = time.perf_counter()
            forward()
            inference = time.perf_counter() - start
        answer = {"seconds": seconds, "transient_gb": transient, "inference_seconds": inference}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
