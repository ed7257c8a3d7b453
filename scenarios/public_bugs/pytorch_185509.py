"""torch.compile gives wrong gradients where a convolution and a pool of it meet in torch.where.

https://github.com/pytorch/pytorch/issues/185509. The input is scaled up bilinearly first. Losses of
the first step are right, gradients of the convolution are not.

    torchrun --nproc-per-node 1 pytorch_185509.py --backend none
    torchrun --nproc-per-node 1 pytorch_185509.py --backend inductor
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """A convolution of a scaled image; where it is below the mean of its pool, the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 3, 8, 8] to [n, 4, 6, 7]."""
        y = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear", align_corners=False)
        conv = self.conv(y[:, :, 1:7, 1:8])
        pool = F.max_pool2d(conv, kernel_size=3, stride=1, padding=1)
        is_above = (conv > pool.mean(dim=(2, 3), keepdim=True)).detach()
        return torch.where(is_above, conv, pool)


def main(backend: str, steps: int) -> None:
    """Train on random numbers."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if backend != "none":
        model.compile(backend=backend)
    for _ in range(steps):
        loss = model(torch.randn(2, 3, 8, 8)).square().mean()
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
