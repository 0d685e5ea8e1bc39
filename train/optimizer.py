"""Muon and AdamW as one optimizer."""

import torch
from transformers import PreTrainedModel


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for the token embedding and the head, as one object for Trainer.

    nanochat's rule (karpathy/nanochat at 01f5f10, `GPT.setup_optimizers`): the rates of AdamW are scaled by
    (width / 768) ** -0.5, betas are 0.8 and 0.95, eps 1e-10, nothing decays, and Muon's momentum is Nesterov's.

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
        self.muon = torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.0, momentum=0.95, nesterov=True)
        self.adamw = torch.optim.AdamW(
            [{"params": [parameter], "lr": rate} for parameter, rate in rates],
            lr=embedding_lr,
            betas=(0.8, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=True,
        )
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of both. They work on this object's groups and state, which loading a checkpoint replaces."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self.muon.state = self.adamw.state = self.state
        self.muon.step()
        self.adamw.step()
        return loss
