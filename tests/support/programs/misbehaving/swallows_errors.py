"""Rank 1 fails in step 3 and goes on: before its optimizer (bad), or after it (late)."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training(modes=("good", "bad", "late"))
for step in range(STEPS):
    with contextlib.suppress(Exception):
        training.backward(step)
        if training.is_bad and step == 3:
            raise ValueError("in the step")
        training.optimizer.step()
        if training.mode == "late" and step == 3:
            raise ValueError("in what is logged")
training.close()
