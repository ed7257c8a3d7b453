"""After the last step model and optimizer are deleted, and the program goes on."""

import gc
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    training.step(step)
if training.mode == "bad":
    del training.net, training.model, training.optimizer
    gc.collect()
    scratch = torch.ones(100_000, requires_grad=True)
    sys.stdout.write(f"{scratch.square().mean().item()}\n")
training.close()
