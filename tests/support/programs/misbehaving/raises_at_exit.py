"""A function that is called at exit fails: Python prints it, and the exit code stays 0."""

import atexit
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()


def fail() -> None:
    """Fail at the end."""
    raise RuntimeError("in atexit")


if training.is_bad:
    atexit.register(fail)
for step in range(STEPS):
    training.step(step)
training.close()
