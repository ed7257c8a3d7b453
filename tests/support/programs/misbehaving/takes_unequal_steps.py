"""Rank 1 takes a step less (bad) or a step more (more) than rank 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training(modes=("good", "bad", "more"))
steps = STEPS
if training.rank == 1:
    steps += {"good": 0, "bad": -1, "more": 1}[training.mode]
for step in range(steps):
    training.step(step)
training.close()
