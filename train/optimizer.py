"""AdamW with a learning rate for each kind of parameter."""

import torch
from transformers import PreTrainedModel


def adamw(
    model: PreTrainedModel, matrix_lr: float, embedding_lr: float, head_lr: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over three groups: the matrices of the layers, which decay, the token embedding, and the head.

    nanochat starts embeddings at unit size and the head at 0, so each needs a rate of its own; betas and eps are
    nanochat's (karpathy/nanochat at 01f5f10, `GPT.setup_optimizers`).
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    matrices = [p for p in model.parameters() if p is not embedding and p is not head]
    groups = [
        {"params": matrices, "lr": matrix_lr, "weight_decay": weight_decay},
        {"params": [embedding], "lr": embedding_lr},
        {"params": [head], "lr": head_lr},
    ]
    return torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0, fused=True)
