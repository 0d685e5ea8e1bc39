"""What the tests compare with: Laplacian heads written out naively, and parameters in which no head can hide."""

import functools

import torch
from transformers import NanoChatConfig, NanoChatForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from laplacian_heads import (
    LaplaceGPTConfig,
    LaplaceGPTForCausalLM,
    LaplaceViTConfig,
    LaplaceViTForImageClassification,
)
from laplacian_heads.configuration import pair
from laplacian_heads.laplacian import heads_by_layer


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


def tiny_vit(model_class=LaplaceViTForImageClassification, **fields):
    """A small LaplaceViT with random parameters, in evaluation mode."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    return redraw(model_class(LaplaceViTConfig(**{**small, "num_labels": 5, **fields}))).eval()


TIMM_NAMES = {
    "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
    "vit.embeddings.cls_token": "cls_token",
    "vit.embeddings.position_embeddings": "pos_embed",
    "vit.layernorm": "norm",
    "vit.layers": "blocks",
    "classifier": "head",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.o_proj": "attn.proj",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "layer_scale_attention.lambda1": "ls1.gamma",
    "layer_scale_mlp.lambda1": "ls2.gamma",
}


def of_timm(name, tensors):
    """The tensor of a LaplaceViT's parameter among those of timm, which has q, k and v in one."""
    for ours, theirs in TIMM_NAMES.items():
        name = name.replace(ours, theirs)
    for third, part in enumerate("qkv"):
        if f"attention.{part}_proj" in name:
            return tensors[name.replace(f"attention.{part}_proj", "attn.qkv")].chunk(3)[third]
    return tensors[name]


def timm_vit(model):
    """timm's deit3 with the fields and the weights of a LaplaceViT that classifies, but for its Laplacian heads."""
    # Not above: every test imports this file, few need timm.
    from timm.models.vision_transformer import VisionTransformer

    config = model.config
    plain = VisionTransformer(
        img_size=pair(config.image_size),
        patch_size=pair(config.patch_size),
        in_chans=config.num_channels,
        num_classes=config.num_labels,
        embed_dim=config.hidden_size,
        depth=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        mlp_ratio=config.intermediate_size / config.hidden_size,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        init_values=config.layer_scale_init_value,
        attn_drop_rate=config.attention_probs_dropout_prob,
        norm_layer=functools.partial(torch.nn.LayerNorm, eps=config.layer_norm_eps),
        no_embed_class=True,
        dynamic_img_size=True,
    ).to(model.dtype)
    with torch.no_grad():
        theirs = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            of_timm(name, theirs).copy_(parameter)
    return plain.train(model.training)


def naive_vit(model):
    """`timm_vit` that computes the Laplacian heads of a LaplaceViT the slow way."""
    plain, config = timm_vit(model), model.config
    layout = heads_by_layer(config.laplacian_heads, [config.num_attention_heads] * config.num_hidden_layers)
    for block, heads in zip(plain.blocks, layout, strict=True):
        block.attn.naive_heads = heads, config.laplacian_share
        block.attn.forward = functools.partial(_naive_timm_attention, block.attn)
    return plain


def _naive_timm_attention(module, hidden_states, **_):
    query, key, value = module.qkv(hidden_states).unflatten(2, (3, module.num_heads, -1)).transpose(1, 3).unbind(2)
    query, key = module.q_norm(query), module.k_norm(key)
    output, module.naive_p = naive_attention(module, query, key, value, dropout=module.attn_drop.p)
    return module.proj(output.flatten(2))
