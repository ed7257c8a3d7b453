"""pytorch #190758: below a memory budget of 1, compiled dropout has another mask in backward.

https://github.com/pytorch/pytorch/issues/190758 (open; pull requests 190759 and 191684). To save
memory the partitioner recomputes random operators in the backward graph, where they draw anew.
Losses of the first step are right.

    torchrun --nproc-per-node 1 pytorch_190758.py --budget 1.0
    torchrun --nproc-per-node 1 pytorch_190758.py --budget 0.5

The backend runs the operators of eager PyTorch. A budget decides what is kept and what is computed
again: the two must agree bit for bit, and do with `--dropout 0`.
"""

import argparse

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

FEATURES, HIDDEN, BATCH = 64, 256, 512


class Model(nn.Module):
    """Two layers with dropout before their activation, and a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, FEATURES] to [n, 1]."""
        for layer in (self.first, self.second):
            x = F.gelu(self.dropout(layer(x)))
        result: torch.Tensor = self.head(x)
        return result


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.5)
    options = parser.parse_args()

    torch._functorch.config.activation_memory_budget = options.budget
    torch.manual_seed(0)
    model = Model(options.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.compile(backend="aot_eager_decomp_partition")
    for step in range(options.steps):
        torch.manual_seed(step)  # backward may draw as much as it likes
        loss = model(torch.randn(BATCH, FEATURES)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
