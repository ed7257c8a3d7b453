"""Each rank starts a process, with the same variables, that trains another model meanwhile."""

import sys
from pathlib import Path

import torch
import torch.multiprocessing
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.support.programs.tiny import STEPS, Training


def helper(index: int) -> None:
    """Train something else."""
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        model(torch.ones(3)).sum().backward()
        optimizer.step()


def main() -> None:
    """Train, with a helper beside."""
    training = Training()
    context = None
    if training.mode == "bad":
        context = torch.multiprocessing.spawn(helper, nprocs=1, join=False)
    for step in range(STEPS):
        training.step(step)
    while context is not None and not context.join():
        pass
    training.close()


if __name__ == "__main__":
    main()
