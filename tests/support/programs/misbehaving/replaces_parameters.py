"""After three steps a layer gets a new parameter object; bad: of slightly other values."""

import sys
from pathlib import Path

from torch import nn

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    if step == 3:
        factor = 1.0 + 2.0**-20 if training.mode == "bad" else 1.0
        layer = training.last
        layer.weight = nn.Parameter(layer.weight.detach() * factor)
        training.rebuild()
    training.step(step)
training.close()
