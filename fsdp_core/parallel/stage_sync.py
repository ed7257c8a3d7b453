"""When the sharded modules of a pipeline stage reduce their gradients."""

from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

from torch import nn

GradientSync = Literal["last", "every"]


@runtime_checkable
class Sharded(Protocol):
    """What FSDP modules have, ours and torch's."""

    def set_is_last_backward(self, is_last_backward: bool) -> None: ...  # noqa: FBT001
    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...  # noqa: FBT001


def sharded_roots(stage: nn.Module) -> Iterator[Sharded]:
    """The outermost sharded modules of a stage."""
    if isinstance(stage, Sharded):
        yield stage
        return
    for child in stage.children():
        yield from sharded_roots(child)


def announce_backward(stage: nn.Module, sync: GradientSync, *, is_last: bool) -> None:
    """Tell a stage's sharded modules whether its next backward is the last before the optimizer.

    With "last" only that one communicates gradients; until then they are kept at full size.
    """
    for module in sharded_roots(stage):
        module.set_is_last_backward(is_last)
        if sync == "last":
            module.set_requires_gradient_sync(is_last)
