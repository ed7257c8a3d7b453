"""Rank 1 leaves with exit code 0 after three of six steps."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    if training.is_bad and step == 3:
        sys.exit(0)
    training.step(step)
training.close()
