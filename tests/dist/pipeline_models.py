"""A small decoder in pieces, for pipelines: any part of it is a stage, all of it is the reference.

Parameters have the names and the values of the whole model, whatever part a stage has.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel.pipeline import Microbatch

LAYERS, VOCAB, HIDDEN, SEQ, ROWS = 9, 19, 12, 5, 2


class Block(nn.Module):
    """x + down(tanh(up(norm(x)))), [B, T, H] -> [B, T, H]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Stage(nn.Module):
    """Some layers; the first stage has the embedding, the last one norm, head and loss.

    Attributes:
        slots: the microbatch slot of each forward so far.
    """

    def __init__(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.slots: list[int] = []
        self.embedding = nn.Embedding(VOCAB, HIDDEN) if is_first else None
        self.layers = nn.ModuleDict({str(number): Block() for number in layers})
        self.norm = nn.LayerNorm(HIDDEN) if is_last else None
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False) if is_last else None
        for name, parameter in self.named_parameters():
            fill(name, parameter)

    def forward(
        self, x: torch.Tensor, targets: torch.Tensor | None = None, *, microbatch: int
    ) -> torch.Tensor:
        """Tokens or [B, T, H] -> [B, T, H] or the mean loss."""
        self.slots.append(microbatch)
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is None or self.norm is None:
            return x
        assert targets is not None
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def fill(name: str, parameter: torch.Tensor) -> None:
    """Values that depend on nothing but the name and the shape."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if name.endswith("norm.weight"):
            parameter.add_(1.0)


def whole(tie: bool = False) -> Stage:
    """The model in one piece; with `tie` embedding and head are one parameter."""
    model = Stage(range(LAYERS), is_first=True, is_last=True)
    if tie:
        assert model.head is not None
        assert model.embedding is not None
        model.head.weight = model.embedding.weight
    return model


def batches(number: int, part: int = 0) -> list[Microbatch]:
    """Microbatches of one data-parallel rank, all different."""
    found = []
    for i in range(number):
        generator = torch.Generator().manual_seed(1000 * part + i)
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        found.append(Microbatch(tokens[:, :-1], {"targets": tokens[:, 1:]}))
    return found


def loop(model: nn.Module, microbatches: list[Microbatch]) -> torch.Tensor:
    """The reference: one microbatch after another; losses [microbatches], gradients in `grad`."""
    losses = torch.zeros(len(microbatches))
    for i, batch in enumerate(microbatches):
        loss = model(batch.tokens, microbatch=i, **batch.keywords)
        weight = 1.0 / len(microbatches) if batch.weight is None else batch.weight
        (loss * weight).backward()
        losses[i].copy_(loss.detach())
    return losses


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bits."""
    return tensor.detach().contiguous().numpy().tobytes()


def gradients(modules: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole gradient of every parameter of some stages."""
    for module in modules:
        for name, parameter in module.named_parameters():
            grad: Any = parameter.grad
            assert grad is not None, name
            yield name, grad.full_tensor() if hasattr(grad, "full_tensor") else grad
