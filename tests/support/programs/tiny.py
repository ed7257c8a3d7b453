"""A training of a second in plain torch, for programs that misbehave: knows of no harness.

    training = Training(ddp=True)       # reads --mode, --tag; joins the process group of torchrun
    for step in range(STEPS):
        training.step(step)
    training.close()

`--mode bad` is what a program does wrong, `--tag` an axis that changes nothing. Two linear layers
and AdamW; data are drawn by step and rank. Without `ddp` each rank trains by itself.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 6


class Training:
    """What the programs have in common: arguments, process group, model, optimizer, data."""

    def __init__(self, *, ddp: bool = False, modes: Sequence[str] = ("good", "bad")) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--mode", choices=modes, default=modes[0])
        parser.add_argument("--tag", choices=("a", "b"), default="a")
        parser.add_argument("--ddp", action="store_true", default=ddp)
        options = parser.parse_args()
        self.mode, self.ddp = str(options.mode), bool(options.ddp)
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.model = nn.Sequential(self.first, nn.Tanh(), self.last)
        self.rebuild()

    @property
    def is_bad(self) -> bool:
        """Whether this process is the one that misbehaves: rank 1, in mode bad."""
        return self.mode == "bad" and self.rank == 1

    def rebuild(self) -> None:
        """A new optimizer, and a new wrapper, for the parameters that the model has now."""
        self.net: nn.Module = DistributedDataParallel(self.model) if self.ddp else self.model
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def loss(self, step: int) -> Tensor:
        """The loss of a step; float32 []."""
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        inputs = torch.randn(4, 8, generator=generator)
        output: Tensor = self.net(inputs)
        return output.square().mean()

    def backward(self, step: int) -> None:
        """New gradients."""
        self.optimizer.zero_grad()
        self.loss(step).backward()

    def step(self, step: int) -> None:
        """One step of training."""
        self.backward(step)
        self.optimizer.step()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()
