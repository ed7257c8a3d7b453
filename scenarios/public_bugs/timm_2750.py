"""timm #2750: SGDW decays each weight once for every dtype that the model has.

https://github.com/huggingface/pytorch-image-models/pull/2750 (merged in August 2026). Its
multi-tensor path goes over the groups of one dtype each, and in every turn decays all weights.

    torchrun --nproc-per-node 1 timm_2750.py
    torchrun --nproc-per-node 1 timm_2750.py --foreach

The two must agree bit for bit, and do with `--dtypes 1`.
"""

import argparse
import importlib
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import nn


class Model(nn.Module):
    """Two layers, the second in a dtype of its own."""

    def __init__(self, second: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 4, dtype=second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 16] to [n, 4]."""
        result: torch.Tensor = self.second(self.first(x).to(self.second.weight.dtype))
        return result


def optimizers() -> Any:
    """timm's module of SGDW alone: all of timm needs torchvision, which needs a torch like it."""
    spec = importlib.util.find_spec("timm")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for name, inner in (("timm", ""), ("timm.optim", "/optim")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder + inner for folder in folders]
    return importlib.import_module("timm.optim.sgdw")


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtypes", type=int, choices=[1, 2], default=2)
    parser.add_argument("--foreach", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = Model(torch.float64 if options.dtypes == 2 else torch.float32)
    optimizer: torch.optim.Optimizer = optimizers().SGDW(
        model.parameters(), lr=0.1, momentum=0.0, weight_decay=0.05, foreach=options.foreach
    )
    for step in range(options.steps):
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
