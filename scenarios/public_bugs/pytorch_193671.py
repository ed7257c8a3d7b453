"""pytorch #193671: the gradient of RReLU under checkpointing is scaled by uninitialised memory.

https://github.com/pytorch/pytorch/issues/193671 (open; pull request 193758). Autograd saves the
random slopes before the kernel has drawn them. The recomputation of `torch.utils.checkpoint` ends
there, so the backward pass multiplies by what the memory held. Losses of the first step are right.

    torchrun --nproc-per-node 1 pytorch_193671.py
    torchrun --nproc-per-node 1 pytorch_193671.py --recompute

The two must agree bit for bit, and do with `--activation leaky`.
"""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--activation", choices=["rrelu", "leaky"], default="rrelu")
    parser.add_argument("--recompute", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    activation = nn.RReLU() if options.activation == "rrelu" else nn.LeakyReLU()
    layer = nn.Sequential(nn.Linear(16, 16), activation)
    model = nn.ModuleDict({"layer": layer, "head": nn.Linear(16, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(options.steps):
        x = torch.randn(8, 16)
        hidden = checkpoint(layer, x, use_reentrant=False) if options.recompute else layer(x)
        loss = model["head"](hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
