"""Rank 1 prints 1 GB before it trains, as a warning in a loop would."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
if training.is_bad:
    line = b"train.py:212: UserWarning: loss=2.3456 lr: 3.0e-04 tokens/s 123456, layers.3.attn\n"
    block = (line * (1 + (1 << 20) // len(line)))[: 1 << 20]
    for _ in range(1000):
        view = memoryview(block)
        while view:
            view = view[os.write(2, view) :]
for step in range(STEPS):
    training.step(step)
training.close()
