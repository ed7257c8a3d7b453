"""From step 3 on another optimizer trains; the first is kept. Bad: the last gradient is changed."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
kept = training.optimizer
for step in range(STEPS):
    if step == 3:
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    training.backward(step)
    if training.is_bad and step == STEPS - 1:
        assert training.first.weight.grad is not None
        training.first.weight.grad *= 1.5
    training.optimizer.step()
training.close()
