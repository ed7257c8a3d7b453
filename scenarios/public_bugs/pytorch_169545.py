"""pytorch #169545: CUDA graphs of torch.compile refuse to accumulate gradients.

https://github.com/pytorch/pytorch/issues/169545 (closed by 184003 with a clearer message). The
graph of the backward pass gives its own memory away as gradients; the next microbatch replays it.

    torchrun --nproc-per-node 1 pytorch_169545.py --mode default
    torchrun --nproc-per-node 1 pytorch_169545.py --mode reduce-overhead

The same kernels run in both: the two must agree bit for bit, and do with `--microbatches 1`. One
GPU.
"""

import argparse
import os

import torch
from torch import nn

HIDDEN, BATCH = 128, 32


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--mode", default="default")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1)).to(device)
    compiled = torch.compile(model, mode=options.mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        for _ in range(options.microbatches):
            torch.compiler.cudagraph_mark_step_begin()
            loss = compiled(torch.randn(BATCH, HIDDEN, device=device)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
