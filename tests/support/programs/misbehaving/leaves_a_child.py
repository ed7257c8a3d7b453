"""Rank 1 leaves a process in a session of its own, which holds its stdout for ten minutes."""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
if training.is_bad and os.fork() == 0:
    os.setsid()
    time.sleep(600)
    os._exit(0)
for step in range(STEPS):
    training.step(step)
training.close()
