"""The command line with FSDP on the CPU, where accelerate would quietly take DDP: run by accelerate launch."""

import sys

from accelerate import DistributedType, PartialState

from laplacian_heads.__main__ import main
from laplacian_heads.train import stage

Arguments = stage.TrainingArguments


def arguments(**values):
    made = Arguments(**values)
    assert made.device.type == "cpu"  # asking for it sets the state up
    PartialState().distributed_type = DistributedType.MULTI_GPU
    return made


class Trainer(stage.StageTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.accelerator.distributed_type == DistributedType.FSDP


if __name__ == "__main__":
    stage.TrainingArguments, stage.StageTrainer = arguments, Trainer
    sys.exit(main(sys.argv[1:]))
