"""LaplaceGPT: nanochat's decoder with Laplacian heads.

- token embedding, RMS norm without weights after it and before the head, untied head, no biases
- RoPE on queries and keys, then RMS norm over the head dimension; grouped-query attention if asked for
- the last k heads of a layer, or the heads the config names, output ``v - P v`` instead of ``P v``
- squared-ReLU MLP, logits soft-capped to +-15 by tanh
- zero-initialised output projections and head, so every layout of heads starts as the same function

Everything but the attention's combination of heads, the initialisation and the loss is transformers' NanoChat, and a
model with 0 Laplacian heads is NanoChat. Architecture: karpathy/nanochat at 01f5f10; heads: arXiv 2602.09297.
"""

import functools
import inspect
import re

import torch
import torch.nn as nn
from torch import library
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.nanochat.modeling_nanochat import (
    NanoChatAttention,
    NanoChatDecoderLayer,
    NanoChatForCausalLM,
    NanoChatModel,
    NanoChatPreTrainedModel,
    NanoChatRMSNorm,
    NanoChatRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging

from .configuration import LaplaceGPTConfig
from .laplacian import heads_by_layer, subtract_from_values

logger = logging.get_logger(__name__)

# transformers 5.24 renamed the argument that carries the cache.
CACHE = "cache" if "cache" in inspect.signature(NanoChatAttention.forward).parameters else "past_key_values"

# Width of the blocks of the vocabulary for which logits exist at the same time.
VOCABULARY_BLOCK = 2048

# The label of a token that does not count.
IGNORED = -100

# The mapping by which Trainer's label smoothing, pipelines and lm-eval recognise a causal language model.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["laplace_gpt"] = "LaplaceGPTForCausalLM"


class LaplaceGPTAttention(NanoChatAttention):
    """NanoChat's attention, in which some heads output ``v - P v``."""

    def __init__(self, config: LaplaceGPTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        layers = [config.num_attention_heads] * config.num_hidden_layers
        self.laplacian_heads = heads_by_layer(config.laplacian_heads, layers)[layer_idx]
        self.laplacian_share = config.laplacian_share
        self.o_proj.zero_init = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        own_value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)

        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        query, key, value = self.q_norm(query), self.k_norm(key), own_value

        cache = kwargs.pop(CACHE, None)
        if cache is not None:
            # The cache may hold more than these positions, and in any order: own_value is what the heads subtract from.
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)

        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        num_heads = self.config.num_attention_heads
        attn_output = subtract_from_values(
            attn_output, own_value, self.laplacian_heads, num_heads, self.laplacian_share
        )
        return self.o_proj(attn_output.reshape(*input_shape, -1)), attn_weights


class LaplaceGPTDecoderLayer(NanoChatDecoderLayer):
    def __init__(self, config: LaplaceGPTConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = LaplaceGPTAttention(config, layer_idx)
        self.mlp.fc2.zero_init = True


class LaplaceGPTPreTrainedModel(NanoChatPreTrainedModel):
    config: LaplaceGPTConfig
    _no_split_modules = ["LaplaceGPTDecoderLayer"]
    _can_record_outputs = {"hidden_states": LaplaceGPTDecoderLayer, "attentions": LaplaceGPTAttention}

    def _init_weights(self, module: nn.Module) -> None:
        """nanochat's initialisation (`GPT.init_weights`), scaled by `initializer_range`."""
        super()._init_weights(module)
        scale = self.config.initializer_range
        if isinstance(module, nn.Linear):
            if getattr(module, "zero_init", False):
                init.zeros_(module.weight)
            else:
                fan_out, fan_in = module.weight.shape
                init.normal_(module.weight, std=scale * fan_in**-0.5 * min(1.0, (fan_out / fan_in) ** 0.5))
        elif isinstance(module, nn.Embedding):
            # A tied embedding is the head too: logits of about unit size, where nanochat's untied ones start at 0.
            tied = self.config.tie_word_embeddings
            init.normal_(module.weight, std=scale * (self.config.hidden_size**-0.5 if tied else 1.0))


class LaplaceGPTModel(LaplaceGPTPreTrainedModel, NanoChatModel):
    """The decoder without a head; arguments and outputs are those of `NanoChatModel`."""

    _auto_class = "AutoModel"

    def __init__(self, config: LaplaceGPTConfig):
        super(NanoChatModel, self).__init__(config)
        # No padding_idx: it would freeze the row of a token that a tokenizer without padding uses for text.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LaplaceGPTDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = NanoChatRMSNorm(eps=config.rms_norm_eps)
        self.rotary_emb = NanoChatRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()


def _add_block(logits, labels, start, softcap, exp_sum, label_logit):
    """First pass over a block of the vocabulary: add to the sum of exponentials, and pick the labels' logits.

    logits: (tokens, block) before the soft-cap; labels: (tokens,); start: first token id of the block, a tensor.
    exp_sum, label_logit: (tokens,), returned with this block added. The soft-cap bounds every logit, so exponentials
    are taken relative to it and need no running maximum.
    """
    # tanh is written through exp, which compiles to vector instructions on CPU where tanh does not
    capped = softcap - 2 * softcap / (torch.exp(logits.float() * (2 / softcap)) + 1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    picked = torch.where(columns == (labels - start)[:, None], capped, 0.0).sum(-1)
    return exp_sum + torch.exp(capped - softcap).sum(-1), label_logit + picked


def _block_gradient(logits, labels, start, softcap, log_sum, valid):
    """Second pass: the gradient of the summed loss with respect to a block of logits before the soft-cap.

    log_sum: (tokens,), logarithm of the sum of exponentials over the vocabulary; valid: (tokens,), false where ignored.
    """
    tanh = 1 - 2 / (torch.exp(logits.float() * (2 / softcap)) + 1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    probability = torch.exp(softcap * tanh - log_sum[:, None])
    label = (columns == (labels - start)[:, None]).float()
    return ((probability - label) * (1 - tanh * tanh) * valid[:, None]).to(logits.dtype)


@functools.cache
def _compiled_passes(device_type: str, dtype: torch.dtype):
    """The two functions above, compiled where the machine can: uncompiled they are most of the loss's time."""
    try:
        passes = [torch.compile(function, dynamic=True) for function in (_add_block, _block_gradient)]
        logits = torch.zeros(4, 8, device=device_type, dtype=dtype)
        row, ids = logits[:, 0].float(), logits[:, 0].long()
        passes[0](logits, ids, ids[0], 15.0, row, row)
    except Exception as error:  # compilers fail in ways without a common class, and the loss is right without one
        logger.warning_once(f"The loss runs slower, because torch.compile failed here: {error}")
        return _add_block, _block_gradient
    return passes


# Named after the module: a model loaded from the Hub brings its own copy of this file into a process that may have
# the package too, and each copy needs its own operator. Its folder may have any name, such as `heads=3`.
@library.custom_op("laplacian_heads::" + re.sub(r"\W", "_", __name__) + "_softcapped_loss", mutates_args=())
def _softcapped_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    softcap: float,
    dtype: torch.dtype,
    hidden_grad: bool,
    weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of soft-capped logits ``hidden @ weight.T``, of which only a block exists at a time.

    Gradients are computed here, since the blocks of logits are gone when backward runs. Blocks of the vocabulary
    rather than of tokens: each writes its own rows of the weight's gradient, and nothing accumulates.

    Args:
        hidden: (tokens, width). weight: (vocabulary, width). labels: (tokens,), IGNORED where ignored; another one
            outside of the vocabulary makes the loss NaN, since raising would have to wait for the device.
        softcap: bound of the logits. dtype: that of the matrix products; the rest is float32.
        hidden_grad, weight_grad: which gradients are wanted; an unwanted one is returned empty.

    Returns:
        The loss, a scalar, and its gradients with respect to hidden and weight.
    """
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    small = tokens * vocabulary < 2**22  # compiling would take longer than it saves
    add_block, block_gradient = (_add_block, _block_gradient) if small else _compiled_passes(hidden.device.type, dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        states = hidden.to(dtype)
        valid = labels != IGNORED
        starts = torch.arange(0, vocabulary, VOCABULARY_BLOCK, device=hidden.device)
        blocks = weight.split(VOCABULARY_BLOCK)

        exp_sum = states.new_zeros(tokens, dtype=torch.float32)
        label_logit = exp_sum.masked_fill(valid & ((labels < 0) | (labels >= vocabulary)), torch.nan)
        for start, block in zip(starts, blocks, strict=True):
            logits = states @ block.to(dtype).T
            exp_sum, label_logit = add_block(logits, labels, start, softcap, exp_sum, label_logit)
        log_sum = exp_sum.log() + softcap
        loss = torch.where(valid, log_sum - label_logit, 0.0).sum()

        d_hidden = torch.zeros_like(hidden, dtype=torch.float32) if hidden_grad else hidden.new_empty(0)
        d_weight = torch.empty_like(weight) if weight_grad else weight.new_empty(0)
        if hidden_grad or weight_grad:
            for i, (start, block) in enumerate(zip(starts, blocks, strict=True)):
                block = block.to(dtype)
                gradient = block_gradient(states @ block.T, labels, start, softcap, log_sum, valid)
                if hidden_grad:
                    d_hidden += gradient @ block
                if weight_grad:
                    first = i * VOCABULARY_BLOCK
                    d_weight[first : first + VOCABULARY_BLOCK] = gradient.T @ states
    return loss, d_hidden.to(hidden.dtype), d_weight


@_softcapped_loss.register_fake
def _(hidden, weight, labels, softcap, dtype, hidden_grad, weight_grad):
    d_hidden = torch.empty_like(hidden) if hidden_grad else hidden.new_empty(0)
    d_weight = torch.empty_like(weight) if weight_grad else weight.new_empty(0)
    return hidden.new_empty((), dtype=torch.float32), d_hidden, d_weight


def _save_gradients(ctx, inputs, output):
    _, d_hidden, d_weight = output
    ctx.wanted = inputs[-2:]
    ctx.save_for_backward(d_hidden, d_weight)


def _scale_gradients(ctx, d_loss, *_):
    gradients = [
        (gradient * d_loss).to(gradient.dtype) if wanted else None
        for gradient, wanted in zip(ctx.saved_tensors, ctx.wanted, strict=True)
    ]
    return (*gradients, None, None, None, None, None)


_softcapped_loss.register_autograd(_scale_gradients, setup_context=_save_gradients)


class LaplaceGPTHead(nn.Linear):
    """Projection to the vocabulary that can go on to the loss without the logits ever existing as a whole.

    The loss is in the head's own forward, so that FSDP and whatever else wraps modules sees the weight being used.
    """

    def forward(
        self, hidden_states: torch.Tensor, labels: torch.Tensor | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Logits (..., vocabulary) before the soft-cap; with labels (...), IGNORED where ignored, the summed loss."""
        if labels is None:
            return super().forward(hidden_states)
        hidden_states = hidden_states.reshape(-1, self.in_features)
        labels = labels.reshape(-1).to(hidden_states.device)
        device_type, dtype = hidden_states.device.type, hidden_states.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        grad = torch.is_grad_enabled()
        wanted = grad and hidden_states.requires_grad, grad and self.weight.requires_grad
        return _softcapped_loss(hidden_states, self.weight, labels, softcap, dtype, *wanted)[0]


class LaplaceGPTForCausalLM(LaplaceGPTPreTrainedModel, NanoChatForCausalLM, GenerationMixin):
    """LaplaceGPT with a language-model head."""

    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config: LaplaceGPTConfig):
        super(NanoChatForCausalLM, self).__init__(config)
        self.model = LaplaceGPTModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = LaplaceGPTHead(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.zero_init = True
        self.post_init()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head; a plain nn.Linear, which resizing the vocabulary makes, is turned into a LaplaceGPTHead."""
        if type(new_embeddings) is nn.Linear and new_embeddings.bias is None:
            new_embeddings.__class__ = LaplaceGPTHead
        super().set_output_embeddings(new_embeddings)

    def _loss_from_blocks(self) -> bool:
        """Whether the loss can be computed without the logits.

        Not with another loss function, a head that an adapter wraps or tensor parallelism splits, or logits that the
        soft-cap leaves unbounded or so far apart that exponentials relative to it vanish.
        """
        softcap = self.config.final_logit_softcapping
        return (
            self.loss_function is ForCausalLMLoss
            and isinstance(self.lm_head, LaplaceGPTHead)
            and (self._tp_size or 1) == 1
            and softcap is not None
            and 0 < softcap <= 40
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Next-token logits, or the loss.

        Args:
            input_ids, attention_mask, position_ids: (batch, tokens). Without a mask and a cache, position_ids that
                start again mark packed documents, which then do not attend to each other.
            cache: keys and values of earlier positions; also taken by its old name, past_key_values.
            inputs_embeds: (batch, tokens, width), instead of input_ids.
            labels: (batch, tokens), shifted here by one, -100 where ignored. The keyword `shift_labels` gives labels
                that are shifted already, and `num_items_in_batch` the number the summed loss is divided by.
            use_cache: whether to build and return a key/value cache; None is False with labels, else the config's.
            logits_to_keep: compute logits for the last so many positions, or for these; 0 is all.
            return_logits: with labels, whether to return logits beside the loss; None is the config's.
            kwargs: what `NanoChatModel` takes.

        Returns:
            loss, a scalar, if labels were given; logits (batch, tokens, vocabulary) in float32 after the soft-cap,
            unless labels were given and return_logits is false; cache, hidden states and attentions P as asked for.
        """
        if cache is not None:  # before 5.24 this was the name of paged caches only, which the backends expect
            kwargs[CACHE if isinstance(cache, Cache) else "cache"] = cache
        if use_cache is None and labels is not None:
            use_cache = False  # a loss needs no cache, and with one packed documents attend to each other
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        if return_logits is None:
            return_logits = self.config.return_logits

        if labels is not None and not return_logits and self._loss_from_blocks():
            loss, logits = self._block_loss(hidden_states, labels, **kwargs), None
        else:
            logits = self.lm_head(slice_logits_to_keep(hidden_states, logits_to_keep))
            softcap = self.config.final_logit_softcapping
            if softcap is not None:
                logits = torch.tanh(logits.float() / softcap) * softcap
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        # The rest is taken as it comes: the field of the cache has another name in each version of transformers.
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **rest)

    def _block_loss(
        self, hidden_states, labels, shift_labels=None, num_items_in_batch=None, ignore_index=-100, **kwargs
    ):
        """`ForCausalLMLoss` of the soft-capped logits."""
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shift_labels = shift_labels.to(hidden_states.device)
        ignored = shift_labels == ignore_index
        softcap = self.config.final_logit_softcapping
        summed = self.lm_head(hidden_states, shift_labels.masked_fill(ignored, IGNORED), softcap)
        if num_items_in_batch is None:
            num_items_in_batch = (~ignored).sum()
        elif torch.is_tensor(num_items_in_batch):
            num_items_in_batch = num_items_in_batch.to(summed.device)
        return summed / num_items_in_batch


class LaplaceGPTForSequenceClassification(GenericForSequenceClassification, LaplaceGPTPreTrainedModel):
    """LaplaceGPT with a classifier on the last token that is not padding."""

    _auto_class = "AutoModelForSequenceClassification"

    def __init__(self, config: LaplaceGPTConfig):
        # Not Generic's own __init__: it builds the base model through AutoModel, which knows no model of the Hub.
        LaplaceGPTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = LaplaceGPTModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()
