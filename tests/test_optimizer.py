"""Muon and AdamW against torch's, against the rule written out, and on matrices that processes share."""

import math
import textwrap

import pytest
import torch
from transformers import Trainer, TrainingArguments

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM
from laplacian_heads.train.callbacks import MomentumWarmupCallback
from laplacian_heads.train.optimizer import MuonAdamW, orthogonal

SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def _steps(optimizers, model, count, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("tied", [False, True])
def test_muon_and_adamw_as_one_are_the_two(tied, tmp_path):
    """Also when a state that was saved is loaded in between."""

    def build():
        torch.manual_seed(0)
        return LaplaceGPTForCausalLM(LaplaceGPTConfig(**SMALL, tie_word_embeddings=tied))

    separate, joined = build(), build()
    scale = (32 / 768) ** -0.5
    embedding, head = separate.model.embed_tokens.weight, separate.lm_head.weight
    matrices = [p for p in separate.parameters() if p is not embedding and p is not head]
    groups = [{"params": [embedding], "lr": 0.2 * scale}]
    if not tied:
        groups.append({"params": [head], "lr": 0.004 * scale})
    two = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, momentum=0.95, nesterov=True),
        torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
    ]
    one = MuonAdamW(joined, 0.02, 0.2, 0.004)
    _steps(two, separate, 3, 1)
    _steps([one], joined, 3, 1)
    torch.save(one.state_dict(), tmp_path / "state.pt")
    one = MuonAdamW(joined, 0.02, 0.2, 0.004)
    one.load_state_dict(torch.load(tmp_path / "state.pt"))
    _steps(two, separate, 2, 2)
    _steps([one], joined, 2, 2)
    for (name, expected), found in zip(separate.named_parameters(), joined.parameters(), strict=True):
        assert torch.equal(expected, found), name


@pytest.mark.parametrize(
    ("steps", "step", "momentum"), [(300, 0, 0.85), (300, 150, 0.9), (300, 900, 0.95), (0, 0, 0.95)]
)
def test_momentum_rises_as_nanochats(steps, step, momentum):
    model = LaplaceGPTForCausalLM(LaplaceGPTConfig(**SMALL))
    optimizer = MuonAdamW(model, 0.02, 0.2, 0.004)
    state = Trainer(model, TrainingArguments("unused", report_to="none", use_cpu=True)).state
    state.global_step = step
    MomentumWarmupCallback(steps).on_step_begin(None, state, None, optimizer=optimizer)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(momentum)
    assert "momentum" not in optimizer.param_groups[1]


def written_out(parameters, embedding, head, gradients, width):
    """nanochat's two rules in float64, from their description: what the parameters are after these gradients."""
    values = {name: parameter.detach().double().clone() for name, parameter in parameters.items()}
    averages = {name: torch.zeros_like(value) for name, value in values.items()}
    squares = {name: torch.zeros_like(value) for name, value in values.items()}
    for step, gradient in enumerate(gradients, start=1):
        for name, value in values.items():
            g = gradient[name].double()
            if name in (embedding, head):
                rate = (0.2 if name == embedding else 0.004) / math.sqrt(width / 768)
                averages[name] = 0.8 * averages[name] + 0.2 * g
                squares[name] = 0.95 * squares[name] + 0.05 * g * g
                mean, square = averages[name] / (1 - 0.8**step), squares[name] / (1 - 0.95**step)
                value -= rate * mean / (square.sqrt() + 1e-10)
            else:
                averages[name] = 0.95 * averages[name] + 0.05 * g
                x = 0.05 * g + 0.95 * averages[name]
                rows, columns = x.shape
                x = x.T if rows > columns else x
                x = x / x.norm()
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if rows > columns else x
                value -= 0.02 * math.sqrt(max(1, rows / columns)) * x
    return values


def test_rule_of_nanochat_written_out():
    torch.manual_seed(0)
    model = LaplaceGPTForCausalLM(LaplaceGPTConfig(**SMALL))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = [{name: torch.randn_like(parameter) for name, parameter in before.items()} for _ in range(4)]
    names = "model.embed_tokens.weight", "lm_head.weight"
    expected = written_out(before, *names, gradients, width=32)
    optimizer = MuonAdamW(model, 0.02, 0.2, 0.004)
    for gradient in gradients:
        for name, parameter in model.named_parameters():
            parameter.grad = gradient[name]
        optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (expected[name] - before[name]).norm()
        error = (parameter.detach().double() - expected[name]).norm()
        # Muon's products are in bfloat16
        assert error < (1e-4 if name in names else 0.03) * moved, name


@pytest.mark.parametrize("shape", [(8, 8), (8, 40), (40, 8)])
def test_singular_values_are_about_one(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_frozen_matrix_is_left_alone():
    model = LaplaceGPTForCausalLM(LaplaceGPTConfig(**SMALL))
    optimizer = MuonAdamW(model, 0.02, 0.2, 0.004)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    optimizer.step()
    assert [name for name, p in model.named_parameters() if not torch.equal(p, before[name])] == ["lm_head.weight"]


SHARED = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM
    from laplacian_heads.train.optimizer import MuonAdamW

    def work(rank, port):
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        mesh = init_device_mesh("cpu", (2,))
        config = dict(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        optimizer = MuonAdamW(LaplaceGPTForCausalLM(LaplaceGPTConfig(**config)), 0.02, 0.2, 0.004)
        generator = torch.Generator().manual_seed(0)
        for shape in ((8, 8), (7, 12), (30, 6)):
            whole = torch.zeros(shape)
            shared = distribute_tensor(whole.clone(), mesh, [Shard(0)])
            for _ in range(3):
                whole.grad = torch.randn(shape, generator=generator)
                shared.grad = distribute_tensor(whole.grad.clone(), mesh, [Shard(0)])
                with torch.no_grad():
                    for parameter in (whole, shared):
                        optimizer._muon_step(parameter, 0.02, 0.95)
                    assert shared.to_local().shape[0] < shape[0]
                    assert optimizer.state[shared]["momentum_buffer"].placements == (Shard(0),)
                    assert torch.equal(shared.full_tensor(), whole)
        print("equal", flush=True)
        os._exit(0)  # threads of gloo outlive the interpreter else

    if __name__ == "__main__":
        import socket
        import torch.multiprocessing as mp
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.start_processes(work, (port,), nprocs=2, start_method="fork")
"""


def test_matrices_that_processes_share_move_as_whole_ones(fresh_process):
    assert fresh_process(textwrap.dedent(SHARED), can_import=True).count("equal") == 2
