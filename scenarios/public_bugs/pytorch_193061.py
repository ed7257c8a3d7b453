"""pytorch #193061: inductor never writes a part of the gradient of a shared table.

https://github.com/pytorch/pytorch/issues/193061 (torch 2.10 to 2.13; fixed by 193103). Two norms in
a row take their scales and shifts from slices of one parameter. The gradients of its slices share a
buffer; of one the name is bound anew and the buffer keeps what it held, in later steps the gradient
of the step before. Losses of the first step are right.

    torchrun --nproc-per-node 1 pytorch_193061.py --backend none
    torchrun --nproc-per-node 1 pytorch_193061.py --backend inductor

Only rounding differs; with TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 it does. One GPU.
"""

import argparse
import os

import torch
from torch import nn

HIDDEN, TOKENS = 1024, 4096


class Model(nn.Module):
    """Norms with scales and shifts from a table, as in a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 4, HIDDEN) / HIDDEN**0.5)
        self.first = nn.LayerNorm(HIDDEN, elementwise_affine=False)
        self.second = nn.LayerNorm(HIDDEN, elementwise_affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, n, HIDDEN] to the same."""
        shift, scale, next_shift, next_scale = self.table.chunk(4, dim=1)
        x = self.first(x) * (1 + scale) + shift
        result: torch.Tensor = self.second(x) * (1 + next_scale) + next_shift
        return result


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--backend", default="none")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if options.backend != "none":
        model.compile(backend=options.backend)
    for step in range(options.steps):
        x, target = (torch.randn(1, TOKENS, HIDDEN, device=device) for _ in range(2))
        loss = (model(x) * target).mean() * HIDDEN
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
