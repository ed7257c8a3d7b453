"""Rank 1 leaves by `os._exit(0)` in the middle of step 3: no clean-up, no traceback."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    training.backward(step)
    if training.is_bad and step == 3:
        os._exit(0)
    training.optimizer.step()
training.close()
