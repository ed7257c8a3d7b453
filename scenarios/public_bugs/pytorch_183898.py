"""pytorch #183898: inductor's gradient of slice_scatter ignores the slice on GPUs.

https://github.com/pytorch/pytorch/issues/183898 (also 180164, 180771; torch 2.11 has it). What the
slice overwrote must get a gradient of zero, the rest one of its own; the compiled backward pass
gives all of them the same. Losses of the first step are right.

    torchrun --nproc-per-node 1 pytorch_183898.py --backend none
    torchrun --nproc-per-node 1 pytorch_183898.py --backend inductor

Only rounding differs. One GPU; `--device cpu` is right.
"""

import argparse
import os

import torch
from torch import nn


class Model(nn.Module):
    """A table whose first rows are written over."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16))
        self.rows = nn.Parameter(torch.randn(6))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        written = torch.slice_scatter(self.table, self.rows, dim=0, start=2, end=8)
        return written.sum() * scale


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backend", default="none")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if options.backend != "none":
        model.compile(backend=options.backend)
    for step in range(options.steps):
        loss = model(torch.ones((), device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
