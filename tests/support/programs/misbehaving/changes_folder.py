"""Both ranks go to a new folder after three steps, and delete it at the end."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
with tempfile.TemporaryDirectory() as folder:
    for step in range(STEPS):
        if training.mode == "bad" and step == 3:
            os.chdir(folder)
        training.step(step)
training.close()
