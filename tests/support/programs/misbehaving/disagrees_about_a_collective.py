"""In step 3 rank 0 calls all_reduce and rank 1 broadcast."""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    training.backward(step)
    for param in training.model.parameters():
        assert param.grad is not None
        if training.is_bad and step == 3:
            dist.broadcast(param.grad, src=1)
        else:
            dist.all_reduce(param.grad)
    training.optimizer.step()
training.close()
