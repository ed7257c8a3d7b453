"""TransformerEngine #3207: FusedAdam skips updates when a group ends in an empty tensor.

https://github.com/NVIDIA/TransformerEngine/issues/3207 (fixed by pull request 3212: releases up to
2.17.1 have it, 2.18.0 and later do not). Kernels are launched at the last chunk of a group's last
tensor; an empty tensor has no chunk, so the ones before it wait for ever. Sharded parameters are
empty on the ranks that own none of their rows.

    torchrun --nproc-per-node 1 transformer_engine_3207.py --optimizer te --empty first
    torchrun --nproc-per-node 1 transformer_engine_3207.py --optimizer te --empty last

To see it fail, compile 2.17.1, which is published as source only. Its Python part over a later
release's libraries does not do: since 2.18.0 they refuse empty tensors.

Only the order of the parameters in their group differs: the two must agree bit for bit, and do with
`--optimizer torch`. One GPU.
"""

import argparse
import importlib
import os
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts

import torch
from torch import nn

HIDDEN, BATCH = 64, 8


class Model(nn.Module):
    """A layer and a parameter whose rows are all on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.elsewhere = nn.Parameter(torch.empty(0, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, hidden) -> (batch, hidden); the empty parameter gets a gradient, too."""
        out: torch.Tensor = self.layer(x) + self.elsewhere.sum()
        return out


def make_optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in one group, in the order given."""
    if kind == "torch":
        return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    te: Any = importlib.import_module("transformer_engine.pytorch.optimizers")
    fused: torch.optim.Optimizer = te.FusedAdam(parameters, lr=1e-3, weight_decay=0.01)
    return fused


def main() -> None:
    """Train, and print how far each step moved the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--optimizer", choices=["te", "torch"], default="te")
    parser.add_argument("--empty", choices=["first", "last"], default="first")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1234)
    model = Model().to(device)
    layer = list(model.layer.parameters())
    first = options.empty == "first"
    parameters = [model.elsewhere, *layer] if first else [*layer, model.elsewhere]
    optimizer = make_optimizer(options.optimizer, parameters)
    data = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        x, target = (torch.randn(BATCH, HIDDEN, generator=data).to(device) for _ in range(2))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        before = model.layer.weight.detach().clone()
        optimizer.step()
        update = (model.layer.weight.detach() - before).norm().item()
        print(f"step {step}: loss {loss.item():.9f}, norm of the weight's update {update:.9f}")


if __name__ == "__main__":
    main()
