"""pytorch #162504: a checkpoint with random numbers cannot be captured in a CUDA graph.

https://github.com/pytorch/pytorch/issues/162504 (closed; so is 83148 in part). The checkpoint reads
the seed of the generator, to draw the same numbers when it recomputes, which a capture refuses.

    torchrun --nproc-per-node 1 pytorch_162504.py --graph
    torchrun --nproc-per-node 1 pytorch_162504.py --graph --recompute

Recomputation must change no bit, in a graph or out of it. One GPU.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

HIDDEN, BATCH = 128, 32


class Block(nn.Module):
    """A layer with dropout, recomputed or not."""

    def __init__(self, *, recompute: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Dropout(0.1))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> Any:
        """[n, HIDDEN] to the same."""
        if self.recompute:
            return checkpoint(self.layer, x, use_reentrant=False)
        return self.layer(x)


def main() -> None:
    """Train on random numbers, one replay a step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(1234)
    block = Block(recompute=options.recompute).to(device)
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-3)
    train: Any = block
    if options.graph:
        sample = torch.zeros(BATCH, HIDDEN, device=device)
        train = torch.cuda.make_graphed_callables(block, (sample,))
    data = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        torch.cuda.manual_seed(step)
        x = torch.randn(BATCH, HIDDEN, generator=data).to(device)
        loss = train(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.9f}")


if __name__ == "__main__":
    main()
