"""Measure what the README and docs claim about speed and memory, and write docs/benchmarks.md.

Everything that is compared runs in one session, in turns: times on a shared machine move by tens of percent, so only
ratios of medians are kept.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from benchmarks import geometry, scoring, ssl, stages, vision

ROOT = Path(__file__).parents[1]

SHAPE = {"vocab_size": 65536, "width": 512, "layers": 8, "heads": 4, "rows": 4, "tokens": 512}


class Worker:
    """A process of a module of benchmarks, such as worker.py, and the answers it has given."""

    def __init__(self, module: str, job: dict):
        command = [sys.executable, "-m", module, json.dumps(job)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.answers = []

    def step(self) -> dict:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.args)} ended with status {self.process.wait()}.")
        return json.loads(line)

    def median(self, key: str) -> float:
        return statistics.median(answer[key] for answer in self.answers)


def compare(jobs: dict[str, dict], repeats: int, module: str = "benchmarks.worker") -> dict[str, Worker]:
    """Run the jobs' steps in turns, after two steps each to compile and warm up."""
    workers = {name: Worker(module, job) for name, job in jobs.items()}
    try:
        for name, worker in workers.items():
            print(f"  warming up {name}", flush=True)
            worker.step(), worker.step()
        for i in range(repeats):
            for worker in workers.values():
                worker.answers.append(worker.step())
            print(f"  round {i + 1} of {repeats}", flush=True)
    finally:
        for worker in workers.values():
            worker.process.stdin.close()
            worker.process.wait()
    return workers


def table(workers: dict[str, Worker], baseline: str) -> list[str]:
    lines = ["| | step time | ratio | transient memory | ratio |", "|---|---|---|---|---|"]
    base = workers[baseline]
    for name, worker in workers.items():
        seconds, memory = worker.median("seconds"), worker.median("transient_gb")
        lines.append(
            f"| {name} | {seconds:.2f} s | {seconds / base.median('seconds'):.2f} "
            f"| {memory:.2f} GB | {memory / base.median('transient_gb'):.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="steps of each model that are counted (default 7)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.md", help="file to write")
    parser.add_argument("--compiled-vision", action="store_true", help="compile the vision transformers too")
    options = parser.parse_args()

    bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`. Medians of training steps (forward, backward, fused AdamW) taken in turns in one",
        "run; the ratios are what to read, the times belong to the machine and the hour. Transient memory is how far",
        "the process rises above weights, gradients and optimiser state during a step.",
        "",
        f"{platform.machine()}, {torch.get_num_threads()} threads, {'bf16 autocast' if bf16 else 'fp32'}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}. "
        "{layers} layers, width {width}, {heads} heads, {rows} x {tokens} tokens, vocabulary {vocab_size:,}; "
        "{repeats} steps each.".format(**SHAPE, repeats=options.repeats),
        "",
    ]
    for compiled in (False, True):
        how = "compiled (torch.compile)" if compiled else "eager"
        print(f"model {how}", flush=True)
        common = {**SHAPE, "compiled": compiled, "bf16": bf16}
        jobs = {
            "transformers' NanoChat": {**common, "model": "nanochat"},
            "LaplaceGPT, no Laplacian head": {**common, "model": "laplace_gpt", "laplacian_heads": 0},
            "LaplaceGPT, half of the heads": {
                **common,
                "model": "laplace_gpt",
                "laplacian_heads": SHAPE["heads"] // 2,
            },
        }
        workers = compare(jobs, options.repeats)
        _, none, half = (worker.median("seconds") for worker in workers.values())
        lines += [f"## Model {how}", "", *table(workers, "transformers' NanoChat"), ""]
        lines += [f"Laplacian heads against none: {half / none:.3f} of the step time.", ""]
    print("stages", flush=True)
    lines += stages.lines(options.repeats)
    print("scoring", flush=True)
    lines += scoring.lines(options.repeats)
    print("geometry", flush=True)
    lines += geometry.lines(options.repeats)
    print("vision", flush=True)
    lines += vision.lines(compare, options.repeats, options.compiled_vision)
    print("self-supervised training", flush=True)
    lines += ssl.lines(compare, options.repeats)
    options.output.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
