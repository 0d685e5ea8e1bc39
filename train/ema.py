"""An average of a model over the steps of its training."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3
from transformers import PreTrainedModel, TrainerCallback

FILE = "ema.safetensors"  # of a checkpoint


class EMACallback(TrainerCallback):
    """Keeps an exponential moving average of the weights, by timm's ModelEmaV3.

    Args:
        model: the model that is trained.
        decay: share of the average that a step keeps.

    Attributes:
        model: the model with the averaged weights.
    """

    def __init__(self, model: PreTrainedModel, decay: float):
        self.trained = model
        self.ema = ModelEmaV3(model, decay=decay)

    @property
    def model(self) -> PreTrainedModel:
        return self.ema.module

    def on_train_begin(self, args, state, control, **kwargs):
        device = next(self.trained.parameters()).device  # to which Trainer has moved it
        self.model.to(device)

    def on_step_end(self, args, state, control, **kwargs):
        self.ema.update(self.trained)

    def save(self, checkpoint: Path) -> None:
        """Write the average into a checkpoint."""
        save_file(self.model.state_dict(), checkpoint / FILE)

    def load(self, checkpoint: Path) -> None:
        """Go on from the average of a checkpoint."""
        self.model.load_state_dict(load_file(checkpoint / FILE))
