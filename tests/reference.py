"""What the tests compare with: Laplacian heads written out naively, and parameters in which no head can hide."""

import torch
from transformers import NanoChatConfig, NanoChatForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laplacian_heads import LaplaceGPTConfig, LaplaceGPTForCausalLM


def redraw(model, seed=0, std=0.2):
    """Draw every parameter at random: zero-initialised projections would hide every head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def naive_attention(
    module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, softcap=None, position_bias=None, **_
):
    """Attention one head at a time, with a I - P in the heads of `module.naive_heads` and P in the others."""
    heads, share = getattr(module, "naive_heads", ([], 1.0))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    group = query.shape[1] // key.shape[1]
    tokens, past = query.shape[2], key.shape[2] - query.shape[2]
    outputs, maps = [], []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // group].transpose(1, 2) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if position_bias is not None:
            scores = scores + position_bias[:, head]
        if attention_mask is not None:
            scores = scores + attention_mask[:, head if attention_mask.shape[1] > 1 else 0]
        maps.append(torch.softmax(scores.float(), dim=-1).to(query.dtype))
    weights = torch.stack(maps, dim=1)
    dropped = torch.nn.functional.dropout(weights, p=dropout, training=module.training)
    for head in range(query.shape[1]):
        p = dropped[:, head]
        if head in heads:
            own_position = torch.eye(tokens, dtype=p.dtype)
            p = share * torch.nn.functional.pad(own_position, (past, 0)) - p
        outputs.append(p @ value[:, head // group])
    return torch.stack(outputs, dim=2), weights


ALL_ATTENTION_FUNCTIONS.register("naive", naive_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register("naive", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def naive_heads(model, layout, share=1.0):
    """Make a plain model of transformers compute Laplacian heads the slow way; in place.

    Args:
        model: a model without Laplacian heads, whose attention goes through the attention interface.
        layout: {name of an attention module: indices of its Laplacian heads}.
        share: a in a I - P.
    """
    for name, heads in layout.items():
        model.get_submodule(name).naive_heads = heads, share
    model.set_attn_implementation("naive")
    return model


def tiny_gpt(model_class=LaplaceGPTForCausalLM, **fields):
    """A small LaplaceGPT with random parameters, in evaluation mode."""
    small = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return redraw(model_class(LaplaceGPTConfig(**{**small, "max_position_embeddings": 64, **fields}))).eval()


def plain_nanochat(model):
    """transformers' NanoChat with the fields and the weights of a LaplaceGPT."""
    fields = {name: getattr(model.config, name) for name in (*NanoChatConfig().to_dict(), "head_dim")}
    for name in ("model_type", "architectures", "transformers_version", "_name_or_path"):
        del fields[name]
    plain = NanoChatForCausalLM(NanoChatConfig(**fields))
    plain.load_state_dict(model.state_dict())
    return plain.to(model.dtype).train(model.training)
