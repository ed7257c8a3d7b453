"""After three steps: saves and loads everything (whole), or the weights alone (bad)."""

import io
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training(modes=("good", "whole", "bad"))
for step in range(STEPS):
    if step == 3 and training.mode != "good":
        file = io.BytesIO()
        torch.save((training.model.state_dict(), training.optimizer.state_dict()), file)
        file.seek(0)
        weights, state = torch.load(file)
        training.model.load_state_dict(weights)
        training.rebuild()
        if training.mode == "whole":
            training.optimizer.load_state_dict(state)
    training.step(step)
training.close()
