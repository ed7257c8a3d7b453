"""A small model with an optimizer, and its bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def model_of(width: int = 3, **options: Any) -> nn.Sequential:
    """A small model, the same bits each time."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width, **options), nn.BatchNorm1d(width), nn.Linear(width, 2))


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """A model and its optimizer after two steps."""
    model = model_of()
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def first_of(model: nn.Module) -> nn.Parameter:
    """The first parameter."""
    return next(model.parameters())


def bits(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, bytes]:
    """Every tensor of both, by name, with its dtype."""
    tensors = dict(model.state_dict())
    if optimizer is not None:
        for index, states in optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{k}": v for k, v in states.items() if torch.is_tensor(v)}
    return {
        name: str(t.dtype).encode() + t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, t in tensors.items()
    }


def names(folder: Path) -> list[str]:
    """Entries of a folder, but for the lock."""
    return sorted(path.name for path in folder.iterdir())
