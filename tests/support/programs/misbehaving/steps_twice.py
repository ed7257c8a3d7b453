"""Each gradient is used for two optimizer steps."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    training.step(step)
    if training.mode == "bad":
        training.optimizer.step()
training.close()
