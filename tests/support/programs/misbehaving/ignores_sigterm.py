"""Rank 1 hangs after three steps and ignores whoever asks it to end."""

import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training

training = Training()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
for step in range(STEPS):
    if training.is_bad and step == 3:
        threading.Event().wait()
    training.step(step)
training.close()
