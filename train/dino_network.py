"""A LaplaceViT with projection heads, and the teacher that follows it."""

import warnings
from pathlib import Path

import torch
import torch.nn as nn
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import update_momentum
from safetensors.torch import load_file, save_file

from laplacian_heads.configuration import LaplaceViTConfig
from laplacian_heads.modeling_laplace_vit import LaplaceViTModel, LaplaceViTPreTrainedModel
from laplacian_heads.train.dino_losses import Center, image_loss, koleo_loss, patch_loss, sinkhorn, softmax

FILE = "teacher.safetensors"  # of a checkpoint
CENTERINGS = ("softmax", "sinkhorn", "none")


class DinoNetwork(LaplaceViTPreTrainedModel):
    """A LaplaceViT whose class token and patches are projected to prototypes. Saved, it is a LaplaceViT to AutoModel.

    The losses are part of the forward pass: logits of 65,536 prototypes are not handed around, nor copied to float32.

    Args:
        config: of the backbone; with use_mask_token patches are projected too.
        hidden_size, bottleneck_size: of the heads' three layers.
        prototypes: number of logits of an image.
        patch_prototypes: of a patch, by a head of its own; None has patches share the head of the images.
        norm_last_layer: whether the prototypes stay of length 1.
    """

    def __init__(
        self,
        config: LaplaceViTConfig,
        hidden_size: int,
        bottleneck_size: int,
        prototypes: int,
        patch_prototypes: int | None,
        norm_last_layer: bool,
    ):
        super().__init__(config)
        self.vit = LaplaceViTModel(config)

        def head(size: int) -> DINOProjectionHead:
            shape = config.hidden_size, hidden_size, bottleneck_size, size
            with warnings.catch_warnings():  # of torch, that there is a newer weight norm than lightly's
                warnings.simplefilter("ignore", FutureWarning)
                return DINOProjectionHead(*shape, norm_last_layer=norm_last_layer)

        self.image_head = head(prototypes)
        self.own_patch_head = head(patch_prototypes) if config.use_mask_token and patch_prototypes else None
        self.post_init()

    @property
    def patch_head(self) -> DINOProjectionHead:
        return self.own_patch_head or self.image_head

    def project(
        self, pixel_values: torch.Tensor, masked: torch.Tensor, bool_masked_pos: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Logits of global crops and of some of their patches, and the crops' class tokens.

        Args:
            pixel_values: (crops, 3, height, width).
            masked: (masked patches,), numbers of patches over all crops.
            bool_masked_pos: (crops, patches), where the mask token is seen in a patch's place; None is nowhere.

        Returns:
            (crops, prototypes); (masked patches, prototypes), None without a mask token; (crops, width).
        """
        outputs = self.vit(pixel_values, bool_masked_pos)
        features = outputs.pooler_output
        patches = None
        if self.config.use_mask_token:
            patches = self.patch_head(outputs.last_hidden_state[:, 1:].flatten(0, 1)[masked])
        return self.image_head(features), patches, features

    def forward(
        self,
        pixel_values: torch.Tensor,
        local_crops: torch.Tensor | None = None,
        bool_masked_pos: torch.Tensor | None = None,
        masked: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        patch_targets: torch.Tensor | None = None,
        temperature: float = 0.1,
        **kwargs,
    ):
        """The student's losses; without targets, the backbone's outputs.

        Args:
            pixel_values: (2 * images, 3, height, width), the first crops of all images, then the second ones.
            local_crops: (crops * images, 3, height, width), in the same order.
            bool_masked_pos, masked: as for `project`.
            counts: (2 * images,), masked patches in each global crop.
            targets: (2 * images, prototypes), the teacher's probabilities.
            patch_targets: (masked patches, prototypes).
            temperature: of the student.

        Returns:
            dino, ibot and koleo, each a scalar; ibot only with a mask token.
        """
        if targets is None:
            return self.vit(pixel_values, bool_masked_pos, **kwargs)
        logits, patches, features = self.project(pixel_values, masked, bool_masked_pos)
        images = len(pixel_values) // 2
        local_logits = logits[:0]
        if local_crops is not None and len(local_crops):
            local_logits = self.image_head(self.vit(local_crops).pooler_output)
        losses = {
            "dino": image_loss(
                *(logits.unflatten(0, (2, images)), local_logits.unflatten(0, (-1, images))),
                *(targets.unflatten(0, (2, images)), temperature),
            ),
            "koleo": koleo_loss(features.unflatten(0, (2, images))),
        }
        if patches is not None:
            losses["ibot"] = patch_loss(patches, patch_targets, counts, temperature)
        return losses


class Teacher(nn.Module):
    """An exponential moving average of a student, and the centers of its logits.

    Args:
        network: of the student's shape, with its weights.
        centering: what keeps its logits from collapsing: "softmax" subtracts their running mean, "sinkhorn" spreads
            them over the prototypes, "none" does nothing.
        center_momentum: share of the running mean that a step keeps.
    """

    def __init__(self, network: DinoNetwork, centering: str, center_momentum: float):
        super().__init__()
        self.network, self.centering = network.eval().requires_grad_(False), centering
        self.center = Center(network.image_head.last_layer.out_features, center_momentum)
        self.patch_center = Center(network.patch_head.last_layer.out_features, center_momentum)

    @torch.no_grad()
    def forward(
        self, pixel_values: torch.Tensor, masked: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """What the student is to match.

        Args:
            pixel_values, masked: as for `DinoNetwork.project`; no patch is masked.
            temperature: of the teacher.

        Returns:
            probabilities (crops, prototypes), and (masked patches, prototypes), None without a mask token; class tokens
            (crops, width).
        """
        logits, patches, features = self.network.project(pixel_values, masked)
        targets = self._probabilities(logits, self.center, temperature)
        return (
            targets,
            None if patches is None else self._probabilities(patches, self.patch_center, temperature),
            features,
        )

    def _probabilities(self, logits: torch.Tensor, center: Center, temperature: float) -> torch.Tensor:
        if self.centering == "sinkhorn":
            return sinkhorn(logits, temperature)
        if self.centering == "softmax":
            center.add(logits)
        return softmax(logits, center.value, temperature)

    @torch.no_grad()
    def follow(self, student: DinoNetwork, momentum: float) -> None:
        """Move towards the student, keeping a share of `momentum`, and update the centers. All processes do it."""
        update_momentum(student, self.network, momentum)
        if self.centering == "softmax":
            self.center.update()
            self.patch_center.update()

    def save(self, checkpoint: Path) -> None:
        """Write what a run needs to go on into a checkpoint."""
        save_file(self.state_dict(), checkpoint / FILE)

    def load(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        self.load_state_dict(load_file(checkpoint / FILE))
