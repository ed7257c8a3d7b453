"""pytorch #189150: the replay of a graph of many training iterations crashes or corrupts memory.

https://github.com/pytorch/pytorch/issues/189150 (closed). Several iterations of two trainers of
unrolled recurrent modules, forward, backward and AdamW, are captured in one graph. Its capture
succeeds; `replay` ends in SIGSEGV or in an illegal memory access, now in one place, now in another.
Reported clean: one iteration a graph, one trainer, and (iterations, sweeps) of (2, 32), (15, 1) and
(8, 8).

    torchrun --nproc-per-node 1 pytorch_189150.py
    torchrun --nproc-per-node 1 pytorch_189150.py --graph

A step is one replay, or the same iterations eagerly. The two must agree bit for bit. One GPU.
"""

import argparse
import faulthandler
import os
from collections.abc import Callable

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from torch import nn

from harness.recorder import record

MODULES, BATCH, FEATURES, HIDDEN, CLASSES, TIME = 4, 32, 16, 32, 5, 15
WARM_UPS = 3


class Recurrent(nn.Module):
    """An LSTM by hand: (batch, time, features) -> (batch, time, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.from_input = nn.Linear(FEATURES, 4 * HIDDEN)
        self.from_hidden = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Unrolled over time."""
        hidden = memory = x.new_zeros(x.shape[0], HIDDEN)
        outputs = []
        for step in x.unbind(1):
            gates = self.from_input(step) + self.from_hidden(hidden)
            keep, add, value, show = gates.chunk(4, dim=-1)
            memory = keep.sigmoid() * memory + add.sigmoid() * value.tanh()
            hidden = show.sigmoid() * memory.tanh()
            outputs.append(self.head(hidden))
        return torch.stack(outputs, 1)


class Trainer:
    """Modules with one optimizer; `loss` is that of the last iteration."""

    def __init__(self, device: torch.device, data: torch.Generator) -> None:
        self.modules = nn.ModuleList(Recurrent() for _ in range(MODULES)).to(device)
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), lr=1e-3, capturable=True)
        shape = (MODULES, BATCH, TIME)
        self.x = torch.randn(*shape, FEATURES, generator=data).to(device)
        self.target = torch.randn(*shape, CLASSES, generator=data).to(device)
        self.loss = torch.zeros((), device=device)

    def iterate(self, sweeps: int) -> None:
        """One update from the losses of `sweeps` passes over the modules."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = [
            nn.functional.mse_loss(module(x), target)
            for _ in range(sweeps)
            for module, x, target in zip(self.modules, self.x, self.target, strict=True)
        ]
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The replay of a graph of `step`; it keeps the graph alive."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def main() -> None:
    """Warm up, train, and print the losses after each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=15, help="a step")
    parser.add_argument("--sweeps", type=int, default=32, help="passes an iteration")
    parser.add_argument("--graph", action="store_true", help="capture a step")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    faulthandler.enable()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    data = torch.Generator().manual_seed(0)
    trainers = [Trainer(device, data) for _ in range(options.trainers)]

    def iterate() -> None:
        for trainer in trainers:
            trainer.iterate(options.sweeps)

    def step() -> None:
        for _ in range(options.iterations):
            iterate()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            iterate()
    torch.cuda.current_stream().wait_stream(side)
    run = captured(step) if options.graph else step
    recorder = record()  # two optimizers step in turns: only the script knows what a step is
    for number in range(options.steps):
        with recorder.step():
            run()
        torch.cuda.synchronize()
        losses = ", ".join(f"{trainer.loss.item():.9f}" for trainer in trainers)
        print(f"step {number}: losses {losses}", flush=True)


if __name__ == "__main__":
    main()
