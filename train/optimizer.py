"""Muon and AdamW as one optimizer."""

import torch
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for the token embedding and the head, as one object for Trainer.

    nanochat's rule (karpathy/nanochat at 01f5f10, `GPT.setup_optimizers`): the rates of AdamW are scaled by
    (width / 768) ** -0.5, betas are 0.8 and 0.95, eps 1e-10, nothing decays, and Muon's momentum is Nesterov's.

    On a single device Muon's step is that of torch.optim.Muon, bit by bit. Under FSDP, where torch's communicates in
    every matrix product, each matrix is gathered once, made orthogonal, and its share taken back.

    Args:
        model: a language model, whose parameters are all matrices.
        matrix_lr: learning rate of Muon.
        embedding_lr, head_lr: learning rates of AdamW at width 768. Tied weights count as the embedding.

    The groups are in this order; the first one is the learning rate that Trainer logs.
    """

    def __init__(self, model: PreTrainedModel, matrix_lr: float, embedding_lr: float, head_lr: float):
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        matrices = [p for p in model.parameters() if p is not embedding and p is not head]
        scale = (model.config.hidden_size / 768) ** -0.5
        rates = [(embedding, embedding_lr * scale)]
        if head is not embedding:
            rates.append((head, head_lr * scale))
        self.adamw = torch.optim.AdamW(
            [{"params": [parameter], "lr": rate} for parameter, rate in rates],
            lr=embedding_lr,
            betas=(0.8, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=True,
        )
        muon = {"params": matrices, "lr": matrix_lr, "momentum": 0.95}
        super().__init__([muon, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both. AdamW works on this object's groups and state, which loading a checkpoint replaces."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, *adamw = self.param_groups
        for parameter in muon["params"]:
            if parameter.grad is not None:
                self._muon_step(parameter, muon["lr"], muon["momentum"])
        self.adamw.param_groups, self.adamw.state = adamw, self.state
        self.adamw.step()
        return loss

    def _muon_step(self, parameter: torch.Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        average = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        update = parameter.grad.lerp(average, momentum)
        if isinstance(update, DTensor):
            whole = DTensor.from_local(orthogonal(update.full_tensor()), update.device_mesh, [Replicate()])
            update = whole.redistribute(placements=update.placements)
        else:
            update = orthogonal(update)
        rows, columns = parameter.shape
        parameter.add_(update, alpha=-lr * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U V' of a matrix U S V', nearly: its singular values become about 1, between 0.7 and 1.2.

    Five steps of a Newton-Schulz iteration in bfloat16 (Keller Jordan, Muon, 2024); returns bfloat16.
    """
    wide = matrix.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        wide = wide.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        wide = torch.addmm(wide, polynomial, wide, beta=3.4445)
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide
