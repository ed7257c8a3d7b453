"""A small decoder in pieces, for pipelines: any part of it is a stage, all of it is the reference.

Parameters have the names and the values of the whole model, whatever part a stage has.
"""

import weakref
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core.parallel.pipeline import Microbatch

LAYERS, VOCAB, HIDDEN, SEQ, ROWS = 9, 19, 12, 5, 2


class Watch:
    """Counts autograd graphs and outputs that are alive when a forward begins.

    Attributes:
        peak_graphs: graphs of earlier forwards and the one that begins, at most.
        peak_outputs: outputs of earlier forwards, at most.
    """

    def __init__(self) -> None:
        self.peak_graphs = self.peak_outputs = 0
        self._graphs: list[Any] = []
        self._outputs: list[Any] = []

    def look(self) -> None:
        """A forward begins."""
        self.peak_graphs = max(self.peak_graphs, 1 + _alive(self._graphs))
        self.peak_outputs = max(self.peak_outputs, _alive(self._outputs))

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """The output as new memory that autograd does not need, from a node that is watched."""
        out: torch.Tensor = _Copied.apply(x)
        self._graphs.append(weakref.ref(out.grad_fn))
        self._outputs.append(weakref.ref(out.untyped_storage()))
        return out


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        del ctx
        return grad


def _alive(references: list[Any]) -> int:
    return sum(reference() is not None for reference in references)


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
        watch: counts what each forward keeps, and its outputs.
    """

    def __init__(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.slots: list[int] = []
        self.watch = Watch()
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
        self.watch.look()
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if x.requires_grad:
            x = self.watch.keep(x)
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


def whole() -> Stage:
    """The model in one piece."""
    return Stage(range(LAYERS), is_first=True, is_last=True)


def batches(number: int, part: int = 0) -> list[Microbatch]:
    """Microbatches of one data-parallel rank, all different."""
    found = []
    for i in range(number):
        generator = torch.Generator().manual_seed(1000 * part + i)
        tokens = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
        found.append(Microbatch(tokens[:, :-1], {"targets": tokens[:, 1:]}))
    return found


def loop(
    model: nn.Module, microbatches: list[Microbatch], number: int | None = None
) -> torch.Tensor:
    """The reference: one microbatch after another; losses [microbatches], gradients in `grad`.

    Args:
        number: microbatches of the whole pass, if more than these.
    """
    losses = torch.zeros(len(microbatches))
    for i, batch in enumerate(microbatches):
        loss = model(batch.tokens, microbatch=i, **batch.keywords)
        (loss * (1.0 / (number or len(microbatches)))).backward()
        losses[i].copy_(loss.detach())
    return losses


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bits."""
    return tensor.detach().contiguous().numpy().tobytes()


def gradients(modules: Iterable[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and gradient of every parameter of some stages."""
    for module in modules:
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None, name
            yield name, parameter.grad
