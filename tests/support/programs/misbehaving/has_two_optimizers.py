"""A layer has SGD, the other AdamW; bad: the second one has a decay of weights."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
decay = 0.1 if training.mode == "bad" else 0.0
optimizers = (
    torch.optim.SGD(training.first.parameters(), lr=0.1, momentum=0.9),
    torch.optim.AdamW(training.last.parameters(), lr=0.01, weight_decay=decay),
)
for step in range(STEPS):
    training.backward(step)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
training.close()
