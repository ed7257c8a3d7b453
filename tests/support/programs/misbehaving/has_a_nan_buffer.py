"""A buffer that nothing reads holds a NaN: on both ranks (always), or on rank 1 (bad)."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training(modes=("good", "always", "bad"))
holds_nan = training.mode == "always" or training.is_bad
training.model.register_buffer("unused", torch.tensor([1.0, float("nan") if holds_nan else 2.0]))
for step in range(STEPS):
    training.step(step)
training.close()
