"""The backward pass of every step is in a new thread."""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for step in range(STEPS):
    if training.mode == "bad":
        thread = threading.Thread(target=training.backward, args=(step,))
        thread.start()
        thread.join()
    else:
        training.backward(step)
    training.optimizer.step()
training.close()
