"""What tests of training do with a run: kill it, and hold its weights against another's."""

import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from laplacian_heads.__main__ import main


class Kill(TrainerCallback):
    """Ends a run as a kill does, at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def killed_run(monkeypatch, module, trainer_class, step, arguments):
    """Begin what the arguments of the command line say, and kill it at the end of a step.

    Args:
        module, trainer_class: where the verb finds its trainer.
    """
    trainer = getattr(module, trainer_class)
    with monkeypatch.context() as patched:
        patched.setattr(
            *(module, trainer_class),
            lambda **given: trainer(**{**given, "callbacks": [*given["callbacks"], Kill(step)]}),
        )
        assert main(arguments) == 130


def weights(folder):
    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)
