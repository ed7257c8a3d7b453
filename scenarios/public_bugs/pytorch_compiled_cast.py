"""torch.compile of PyTorch 2.11 gives gradients of zero to a custom autograd function.

Its forward ends in a cast to the dtype that the result has already. Such a cast returns the tensor
that it was given, and the compiler also holds that tensor for an intermediate without a gradient.
Losses of the first step are right. PyTorch 2.13 is right.

    torchrun --nproc-per-node 1 pytorch_compiled_cast.py --backend none
    torchrun --nproc-per-node 1 pytorch_compiled_cast.py --backend aot_eager

`aot_eager` runs the operators of eager PyTorch: the two must agree bit for bit.
"""

import argparse
from typing import Any

import torch
from torch import nn


class Scale(torch.autograd.Function):
    """x * weight, in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[n, m] and [m] to [n, m]."""
        ctx.save_for_backward(x, weight)
        return (x * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of both."""
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Model(nn.Module):
    """A linear layer and a scaled output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 16] to [n, 16]."""
        result: torch.Tensor = Scale.apply(self.linear(x), self.scale)  # type: ignore[no-untyped-call]
        return result


def main(backend: str, steps: int) -> None:
    """Train on random numbers."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    # Of the module itself, whose parameters keep their names.
    if backend != "none":
        model.compile(backend=backend)
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="none")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    main(arguments.backend, arguments.steps)
