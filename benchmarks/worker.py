"""One measured model in a process of its own: it takes a training step for each line it is sent.

Run as `python -m benchmarks.worker '{"model": ..., ...}'`. It answers each line with
{"seconds": ..., "transient_gb": ...}: the time of the step, and how far the process's memory rose above weights,
gradients and optimiser state during it.
"""

import json
import re
import sys
import time
from pathlib import Path

import torch
from transformers import NanoChatConfig, NanoChatForCausalLM

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM


def build(job: dict) -> torch.nn.Module:
    shape = {
        "vocab_size": job["vocab_size"],
        "hidden_size": job["width"],
        "intermediate_size": 4 * job["width"],
        "num_hidden_layers": job["layers"],
        "num_attention_heads": job["heads"],
        "use_cache": False,
    }
    if job["model"] == "nanochat":
        model = NanoChatForCausalLM(NanoChatConfig(**shape))
    else:
        model = LaplaceGPTForCausalLM(LaplaceGPTConfig(**shape, laplacian_heads=job["laplacian_heads"]))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def memory_gb(field: str) -> float:
    """A field of this process's status, VmRSS (now) or VmHWM (peak since it was last reset)."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 2**20


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = build(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(job["vocab_size"], (job["rows"], job["tokens"]))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates its state
    step_model = torch.compile(model) if job["compiled"] else model

    for _ in sys.stdin:
        before = memory_gb("VmRSS")
        reset_peak()
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=job["bf16"]):
            loss = step_model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        answer = {"seconds": time.perf_counter() - start, "transient_gb": memory_gb("VmHWM") - before}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
