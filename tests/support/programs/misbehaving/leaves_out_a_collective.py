"""Rank 1 leaves out the last step's sum of the loss, and waits for rank 0."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
others = dist.new_group([0, 1])
for step in range(STEPS):
    training.step(step)
    if not (training.is_bad and step == STEPS - 2):
        dist.all_reduce(torch.ones(4))
dist.barrier(others)
training.close()
