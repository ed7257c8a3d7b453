"""What a stage's layers compute in (fp8), eagerly and where graphs stand in for parts of them.

    eager     with around(): the layers            scales move at its end, and in the backward
    warm-up,  with around.captured(): a part       nothing moves but what kernels of the part write
    capture
    replay    begin(); replay; after its backward, what `begin` returned

Whoever captures puts back what those kernels wrote.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

Getter = Callable[[], torch.Tensor | None]
"""Looks a tensor up where it is kept; None while there is none."""

After = Callable[[], None]
"""What is to be done once a backward has been replayed."""

Begin = Callable[[], After | None]
"""Called before each forward replay that stands in for the same modules."""


class Around(Protocol):
    """Makes the context of one forward pass."""

    def __call__(self) -> AbstractContextManager[Any]:
        """Of one that runs for its result."""

    def captured(self) -> AbstractContextManager[Any]:
        """Of a part that is warmed up or captured: what happens once a pass is left out."""

    def replays(self, modules: Iterable[nn.Module]) -> Begin:
        """What replays do for these modules that their forward and backward would have done."""

    def state(self, root: nn.Module) -> Iterator[tuple[str, Getter]]:
        """Names of what kernels of the modules inside write from pass to pass, past torch."""

    def remember(self, root: nn.Module) -> Callable[[], None]:
        """Puts the state back to what it is now; what did not exist, to what it began with."""


class Plain:
    """`Around` without anything."""

    def __call__(self) -> AbstractContextManager[Any]:
        """Nothing."""
        return contextlib.nullcontext()

    def captured(self) -> AbstractContextManager[Any]:
        """Nothing."""
        return contextlib.nullcontext()

    def replays(self, modules: Iterable[nn.Module]) -> Begin:
        """Nothing."""
        del modules
        return _nothing

    def state(self, root: nn.Module) -> Iterator[tuple[str, Getter]]:
        """None."""
        del root
        return iter(())

    def remember(self, root: nn.Module) -> Callable[[], None]:
        """Nothing."""
        del root
        return _nothing


def _nothing() -> None:
    return None
