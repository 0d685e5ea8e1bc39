"""LaplaceViT: DeiT-3's vision transformer with Laplacian heads.

- position embeddings on the patches only, a CLS token before them, interpolated for images of another size
- pre-norm blocks with biases on queries, keys and values, LayerScale and drop path on both branches
- the last k heads of a block, or the heads the config names, output ``v - P v`` instead of ``P v``; CLS is no exception
- LayerNorm on the queries and keys of each head if asked for, as in the paper's models
- the classifier reads CLS after the final norm

A model with 0 Laplacian heads is timm's `deit3_*`. Architecture: facebookresearch/deit, `models_v2.py` (DeiT III, arXiv
2204.07118); heads: arXiv 2602.09297. Modules are named as in transformers' ViT.
"""

import copy

import torch
import torch.nn as nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.models.vit.modeling_vit import ViTAttention, ViTMLP, eager_attention_forward
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration import LaplaceViTConfig, pair
from .laplacian import heads_by_layer, subtract_from_values

# The mapping by which pipelines recognise an image classifier.
MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["laplace_vit"] = "LaplaceViTForImageClassification"


class LaplaceViTPatchEmbeddings(nn.Module):
    """Patches of an image, each projected to the width: (batch, channels, height, width) to (batch, patches, width)."""

    def __init__(self, config: LaplaceViTConfig):
        super().__init__()
        self.patch_size = pair(config.patch_size)
        self.num_channels = config.num_channels
        self.projection = nn.Conv2d(config.num_channels, config.hidden_size, self.patch_size, stride=self.patch_size)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        _, channels, height, width = pixel_values.shape
        if channels != self.num_channels:
            raise ValueError(f"pixel_values have {channels} channels, allowed are num_channels, {self.num_channels}.")
        if height % self.patch_size[0] or width % self.patch_size[1]:
            raise ValueError(
                f"pixel_values are {height} x {width}, allowed are multiples of the patch, "
                f"{self.patch_size[0]} x {self.patch_size[1]}."
            )
        return self.projection(pixel_values.to(self.projection.weight.dtype)).flatten(2).transpose(1, 2)


class LaplaceViTEmbeddings(nn.Module):
    """CLS, and patches with their positions: (batch, 1 + patches, width)."""

    def __init__(self, config: LaplaceViTConfig):
        super().__init__()
        self.patch_embeddings = LaplaceViTPatchEmbeddings(config)
        sizes = zip(pair(config.image_size), self.patch_embeddings.patch_size, strict=True)
        self.grid = tuple(image // patch for image, patch in sizes)  # rows and columns of patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, config.hidden_size)) if config.use_mask_token else None
        self.position_embeddings = nn.Parameter(torch.zeros(1, self.grid[0] * self.grid[1], config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def positions(self, rows: int, columns: int) -> torch.Tensor:
        """Position embeddings for a grid of patches, (1, rows * columns, width), interpolated as timm does."""
        if (rows, columns) == self.grid:
            return self.position_embeddings
        table = self.position_embeddings.float().unflatten(1, self.grid).permute(0, 3, 1, 2)
        table = nn.functional.interpolate(table, (rows, columns), mode="bicubic", antialias=True)
        return table.flatten(2).transpose(1, 2).to(self.position_embeddings.dtype)

    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool = True,
    ) -> torch.Tensor:
        patches = self.patch_embeddings(pixel_values)
        if bool_masked_pos is not None:
            if self.mask_token is None:
                raise ValueError("bool_masked_pos is given, allowed only with use_mask_token=True in the config.")
            if bool_masked_pos.shape != patches.shape[:2]:
                raise ValueError(
                    f"bool_masked_pos is {tuple(bool_masked_pos.shape)}, allowed is (batch, patches), "
                    f"{tuple(patches.shape[:2])}."
                )
            patches = torch.where(bool_masked_pos.bool()[..., None], self.mask_token.to(patches.dtype), patches)
        sizes = zip(pixel_values.shape[2:], self.patch_embeddings.patch_size, strict=True)
        grid = tuple(image // patch for image, patch in sizes)
        if grid != self.grid and not interpolate_pos_encoding:
            height, width = (n * patch for n, patch in zip(self.grid, self.patch_embeddings.patch_size, strict=True))
            raise ValueError(
                f"pixel_values are {pixel_values.shape[2]} x {pixel_values.shape[3]}, allowed without "
                f"interpolate_pos_encoding is image_size, {height} x {width}."
            )
        patches = patches + self.positions(*grid)
        return self.dropout(torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1))


class LaplaceViTAttention(ViTAttention):
    """ViT's attention, in which some heads output ``v - P v``, and queries and keys may be normalised."""

    def __init__(self, config: LaplaceViTConfig, layer_idx: int):
        super().__init__(config)
        layers = [config.num_attention_heads] * config.num_hidden_layers
        self.laplacian_heads = heads_by_layer(config.laplacian_heads, layers)[layer_idx]
        self.laplacian_share = config.laplacian_share
        self.layer_idx = layer_idx
        self.num_key_value_groups = 1
        if config.qk_norm:
            self.q_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)
            self.k_norm = nn.LayerNorm(self.head_dim, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if self.config.qk_norm:
            # The norms compute in float32 under autocast, and the backends want one dtype.
            query, key = self.q_norm(query).to(value.dtype), self.k_norm(key).to(value.dtype)

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
        attn_output = subtract_from_values(attn_output, value, self.laplacian_heads, num_heads, self.laplacian_share)
        return self.o_proj(attn_output.reshape(*input_shape, -1)), attn_weights


class LaplaceViTLayerScale(nn.Module):
    """A factor for each channel of a branch."""

    def __init__(self, config: LaplaceViTConfig):
        super().__init__()
        self.lambda1 = nn.Parameter(torch.full((config.hidden_size,), float(config.layer_scale_init_value)))

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        return branch * self.lambda1


class LaplaceViTDropPath(nn.Module):
    """Leaves the branch out for some of the images in training, and scales it up for the others (arXiv 1603.09382)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        if not self.training or self.rate == 0:
            return branch
        kept = torch.rand(branch.shape[0], 1, 1, device=branch.device) >= self.rate
        return branch * (kept / (1 - self.rate)).to(branch.dtype)


class LaplaceViTLayer(GradientCheckpointingLayer):
    def __init__(self, config: LaplaceViTConfig, layer_idx: int):
        super().__init__()
        scaled = config.layer_scale_init_value is not None
        self.layernorm_before = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.attention = LaplaceViTAttention(config, layer_idx)
        self.layer_scale_attention = LaplaceViTLayerScale(config) if scaled else nn.Identity()
        self.layernorm_after = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = ViTMLP(config)
        self.layer_scale_mlp = LaplaceViTLayerScale(config) if scaled else nn.Identity()
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        depth = layer_idx / max(config.num_hidden_layers - 1, 1)
        self.drop_path = LaplaceViTDropPath(
            config.drop_path_rate * (depth if config.drop_path_schedule == "linear" else 1)
        )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> torch.Tensor:
        branch, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = hidden_states + self.drop_path(self.layer_scale_attention(self.dropout(branch)))
        branch = self.mlp(self.layernorm_after(hidden_states))
        return hidden_states + self.drop_path(self.layer_scale_mlp(self.dropout(branch)))


class LaplaceViTPreTrainedModel(PreTrainedModel):
    config: LaplaceViTConfig
    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _no_split_modules = ["LaplaceViTEmbeddings", "LaplaceViTLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": LaplaceViTLayer, "attentions": LaplaceViTAttention}
    _input_embed_layer = "patch_embeddings"

    def _init_weights(self, module: nn.Module) -> None:
        """DeiT's initialisation (`models_v2.py`), scaled by `initializer_range`."""
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            # PyTorch's own for convolutions, times std / 0.02
            bound = std / 0.02 * module.weight[0].numel() ** -0.5
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, LaplaceViTEmbeddings):
            init.trunc_normal_(module.position_embeddings, std=std)
            init.trunc_normal_(module.cls_token, std=std)
            if module.mask_token is not None:
                init.zeros_(module.mask_token)
        elif isinstance(module, LaplaceViTLayerScale):
            init.constant_(module.lambda1, self.config.layer_scale_init_value)

    def resize_position_embeddings(self, image_size: int | list[int] | tuple[int, int]) -> None:
        """Make another size of images the model's own, in place: the position embeddings are interpolated for good.

        Args:
            image_size: height and width, or [height, width], multiples of the patch.
        """
        embeddings = self.base_model.embeddings
        sizes = zip(pair(image_size), embeddings.patch_embeddings.patch_size, strict=True)
        if any(image < 1 or image % patch for image, patch in sizes):
            raise ValueError(
                f"image_size is {image_size}, allowed are multiples of patch_size, {self.config.patch_size}."
            )
        height, width = embeddings.patch_embeddings.patch_size
        grid = pair(image_size)[0] // height, pair(image_size)[1] // width
        with torch.no_grad():
            embeddings.position_embeddings = nn.Parameter(embeddings.positions(*grid).clone())
        embeddings.grid = grid
        self.config.image_size = image_size if isinstance(image_size, int) else list(image_size)


class LaplaceViTModel(LaplaceViTPreTrainedModel):
    """The transformer without a head."""

    _auto_class = "AutoModel"

    def __init__(self, config: LaplaceViTConfig):
        super().__init__(config)
        self.embeddings = LaplaceViTEmbeddings(config)
        self.layers = nn.ModuleList([LaplaceViTLayer(config, i) for i in range(config.num_hidden_layers)])
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool = True,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        """Features of images.

        Args:
            pixel_values: (batch, channels, height, width), height and width multiples of the patch.
            bool_masked_pos: (batch, patches), true where the mask token takes the place of a patch.
            interpolate_pos_encoding: whether images of another size than image_size are allowed, for which the position
                embeddings are interpolated.
            attention_mask: (batch, 1 + patches), 0 where a token is not attended to.

        Returns:
            last_hidden_state, (batch, 1 + patches, width), after the final norm; pooler_output, (batch, width), its
            CLS; as asked for hidden_states, of which the last one is before the final norm, and attentions P.

        Raises:
            ValueError: pixel_values of another shape, or bool_masked_pos for a model without a mask token.
        """
        hidden_states = self.embeddings(pixel_values, bool_masked_pos, interpolate_pos_encoding)
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=hidden_states, attention_mask=attention_mask
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, attention_mask, **kwargs)
        hidden_states = self.layernorm(hidden_states)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states[:, 0])


class LaplaceViTForImageClassification(LaplaceViTPreTrainedModel):
    """LaplaceViT with a classifier on CLS."""

    _auto_class = "AutoModelForImageClassification"
    # The losses are means over the batch. Trainer takes them for sums over num_items_in_batch otherwise, and multiplies
    # them by the number of processes and of accumulated batches.
    accepts_loss_kwargs = False

    def __init__(self, config: LaplaceViTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vit = LaplaceViTModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        """Logits, and the loss if labels are given.

        Args:
            pixel_values, interpolate_pos_encoding: as `LaplaceViTModel` takes them.
            labels: (batch,), classes, of which cross-entropy is the loss; or (batch, classes) in floating point, of
                which binary cross-entropy is, as transformers has it.

        Returns:
            logits, (batch, classes); loss, a scalar; hidden states and attentions P as asked for.
        """
        outputs = self.vit(pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs)
        logits = self.classifier(outputs.pooler_output)
        loss = None
        if labels is not None:
            # The loss writes problem_type into the config, and classes could not follow on mixed labels.
            loss = self.loss_function(labels, logits, copy.copy(self.config), **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LaplaceViTForMaskedImageModeling(LaplaceViTPreTrainedModel):
    """LaplaceViT with a mask token and a projection of each patch to its pixels (SimMIM, arXiv 2111.09886)."""

    _auto_class = "AutoModelForMaskedImageModeling"

    def __init__(self, config: LaplaceViTConfig):
        config = copy.deepcopy(config)
        config.use_mask_token = True
        super().__init__(config)
        self.vit = LaplaceViTModel(config)
        height, width = pair(config.patch_size)
        self.decoder = nn.Linear(config.hidden_size, config.num_channels * height * width)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor,
        bool_masked_pos: torch.BoolTensor | None = None,
        interpolate_pos_encoding: bool = True,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedImageModelingOutput:
        """The image as it is reconstructed, and the mean absolute error in the masked patches if there are any.

        Args:
            pixel_values, bool_masked_pos, interpolate_pos_encoding: as `LaplaceViTModel` takes them.

        Returns:
            reconstruction, (batch, channels, height, width); loss, a scalar, if bool_masked_pos is given; hidden states
            and attentions P as asked for.
        """
        outputs = self.vit(pixel_values, bool_masked_pos, interpolate_pos_encoding, **kwargs)
        (height, width), channels = pair(self.config.patch_size), self.config.num_channels
        rows, columns = pixel_values.shape[2] // height, pixel_values.shape[3] // width
        pixels = self.decoder(outputs.last_hidden_state[:, 1:])
        pixels = pixels.unflatten(2, (channels, height, width)).unflatten(1, (rows, columns))
        # (batch, rows, columns, channels, height, width) to (batch, channels, rows, height, columns, width)
        reconstruction = pixels.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        loss = None
        if bool_masked_pos is not None:
            mask = bool_masked_pos.bool().unflatten(1, (1, rows, columns))
            mask = mask.repeat_interleave(height, 2).repeat_interleave(width, 3)
            error = (reconstruction - pixel_values).abs() * mask
            loss = error.sum() / (mask.sum() * channels).clamp(min=1)
        return MaskedImageModelingOutput(
            loss=loss, reconstruction=reconstruction, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LaplaceViTBackbone(BackboneMixin, LaplaceViTModel):
    """LaplaceViT as the backbone of models for detection and segmentation, which read feature maps of its blocks."""

    _auto_class = "AutoBackbone"

    def __init__(self, config: LaplaceViTConfig):
        super().__init__(config)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: torch.Tensor, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        """Feature maps of the stages that `config.out_features` names; stage n is block n, counted from 1.

        Args:
            pixel_values: (batch, channels, height, width).

        Returns:
            feature_maps: a tuple of (batch, width, rows, columns), or of (batch, 1 + patches, width) with
            reshape_hidden_states=False; hidden states and attentions P as asked for.
        """
        outputs = LaplaceViTModel.forward(self, pixel_values, **kwargs)  # super's is BackboneMixin's, which has none
        height, width = self.embeddings.patch_embeddings.patch_size
        grid = pixel_values.shape[2] // height, pixel_values.shape[3] // width
        maps = []
        for stage, hidden in zip(self.stage_names, outputs.hidden_states, strict=True):
            if stage in self.out_features:
                if self.config.apply_layernorm:
                    hidden = self.layernorm(hidden)
                if self.config.reshape_hidden_states:
                    hidden = hidden[:, 1:].transpose(1, 2).unflatten(2, grid).contiguous()
                maps.append(hidden)
        return BackboneOutput(
            feature_maps=tuple(maps), hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
