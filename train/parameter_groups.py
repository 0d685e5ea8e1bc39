"""Weight decay and learning rate of each parameter of a vision transformer, and the optimizer that takes them."""

import re

import torch
from timm.optim import Lamb

OPTIMIZERS = ("adamw", "lamb")
BLOCK = re.compile(r"(?:^|\.)layers\.(\d+)\.")
EMBEDDING = re.compile(r"(?:^|\.)embeddings\.")
NO_DECAY = ("position_embeddings", "cls_token", "mask_token")


def parameter_groups(model: torch.nn.Module, lr: float, weight_decay: float, layer_decay: float = 1.0) -> list[dict]:
    """The parameters of a LaplaceViT, or of another ViT that names them so, in groups for an optimizer.

    Biases, norms, LayerScale, position embeddings and class and mask tokens do not decay, as in DeiT. With L blocks the
    embeddings are layer 0, block i is layer i + 1, and the last norm and the head are layer L + 1; the rate of layer l
    is lr * layer_decay ** (L + 1 - l). Frozen parameters are in no group.

    Args:
        layer_decay: 1 gives every parameter the same rate.

    Returns:
        groups of params, lr, weight_decay and name, those nearest to the loss first: Trainer logs the first rate.

    Source: Bao et al., "BEiT", 2021 (microsoft/unilm, beit/optim_factory.py).
    """
    # Frozen blocks count, so that freezing changes no rate.
    last = 1 + max((int(index) + 1 for name, _ in model.named_parameters() for index in BLOCK.findall(name)), default=0)
    members = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decays = parameter.ndim > 1 and not name.endswith(NO_DECAY)
        layer = last
        if layer_decay != 1:
            block = BLOCK.search(name)
            if block:
                layer = int(block[1]) + 1
            elif EMBEDDING.search(name):
                layer = 0
        members.setdefault((layer, decays), []).append(parameter)
    groups = []
    for (layer, decays), parameters in sorted(members.items(), key=lambda item: item[0], reverse=True):
        name = "decay" if decays else "no_decay"
        groups.append(
            {
                "params": parameters,
                "lr": lr * layer_decay ** (last - layer),
                "weight_decay": weight_decay if decays else 0.0,
                "name": name if layer_decay == 1 else f"layer_{layer}_{name}",
            }
        )
    return groups


def make_optimizer(
    model: torch.nn.Module, name: str, lr: float, weight_decay: float, layer_decay: float = 1.0, eps: float = 1e-8
) -> torch.optim.Optimizer:
    """AdamW or LAMB with betas of 0.9 and 0.999 over `parameter_groups`.

    LAMB is that of apex's FusedLAMB, which DeiT III uses: decay is part of the update, and only parameters that decay
    have a trust ratio. It does not clip gradients, which apex's does, at norm 1.

    Args:
        name: "adamw" or "lamb".

    Raises:
        ValueError: the name is another one.

    Source: Loshchilov and Hutter, "Decoupled weight decay", 2019; You et al., "LAMB", 2020, by timm.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}, allowed are {', '.join(OPTIMIZERS)}.")
    groups = parameter_groups(model, lr, weight_decay, layer_decay)
    # lr is in every group; schedules of transformers read it from the defaults too
    if name == "lamb":
        return Lamb(groups, lr=lr, eps=eps, max_grad_norm=None)
    return torch.optim.AdamW(groups, lr=lr, eps=eps, fused=True)
