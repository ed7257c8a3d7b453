"""Rank 1 has a parameter that rank 0 lacks; bad: it begins with another value."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
extra = nn.Parameter(torch.tensor(1.0 + 2.0**-20 if training.mode == "bad" else 1.0))
if training.rank == 1:
    training.model.register_parameter("extra", extra)
training.rebuild()
for step in range(STEPS):
    training.backward(step)
    if training.rank == 1:
        (training.first.weight.detach().sum() * extra).backward()
    training.optimizer.step()
training.close()
