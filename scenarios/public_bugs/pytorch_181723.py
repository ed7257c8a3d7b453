"""pytorch #181723: graphed callables hand out the same gradient buffer at each backward pass.

https://github.com/pytorch/pytorch/issues/181723 (open; torch 2.11 has it, and the code of 2.13).
The backward pass of `torch.cuda.make_graphed_callables` returns the buffers that its graph writes.
The first microbatch leaves one of them as the parameter's gradient; the replay of the next
microbatch overwrites it, and the sum is of other gradients than it should be. Nothing is raised.

    torchrun --nproc-per-node 1 pytorch_181723.py
    torchrun --nproc-per-node 1 pytorch_181723.py --graph

The two must agree bit for bit; with `--microbatches 1` they do. One GPU.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from torch import nn

HIDDEN, BATCH = 256, 32


def main() -> None:
    """Train, and print the norm of the gradient that each step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--graph", action="store_true", help="capture forward and backward")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    model = nn.Linear(HIDDEN, HIDDEN).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train: Any = model
    if options.graph:
        sample = torch.zeros(BATCH, HIDDEN, device=device)
        train = torch.cuda.make_graphed_callables(model, (sample,))
    data = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for _ in range(options.microbatches):
            x, target = (torch.randn(BATCH, HIDDEN, generator=data).to(device) for _ in range(2))
            loss = nn.functional.mse_loss(train(x), target) / options.microbatches
            loss.backward()
        norm = nn.utils.get_total_norm(g for g in [model.weight.grad] if g is not None).item()
        print(f"step {step}: loss {loss.item():.9f}, norm of the weight's gradient {norm:.9f}")
        optimizer.step()


if __name__ == "__main__":
    main()
