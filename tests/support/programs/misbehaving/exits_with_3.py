"""Rank 1 ends with exit code 3 after all of its steps."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    training.step(step)
training.close()
if training.is_bad:
    sys.exit(3)
