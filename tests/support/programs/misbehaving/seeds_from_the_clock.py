"""Data are right; the first weights are drawn with a seed from the clock."""

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
if training.mode == "bad":
    torch.manual_seed(time.time_ns() % 2**31)
    with torch.no_grad():
        training.first.weight.uniform_(-0.1, 0.1)
for step in range(STEPS):
    training.step(step)
training.close()
