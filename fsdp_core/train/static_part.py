"""What captured layers read of packed microbatches, in tensors that stay where they are.

A graph reads positions, masks and offsets where they lay when it was captured, but each microbatch
comes with tensors of its own: they are copied here before it is replayed, once for all layers of a
stage. What is no tensor was fixed by the capture (sizes, the longest sequence, the communicator): a
microbatch in which it differs is refused.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import torch

from fsdp_core.model.batch import Part
from fsdp_core.parallel.mesh import Axis


class StaticPart:
    """The part of the microbatches of one context size in one slot, to what is captured.

    Of a part it has what layers read: the plan and the offsets of the pack. Tokens that count and
    their targets are for the loss, which no partial scope holds.

    Args:
        like: a part as microbatches will have it; copied, not kept.
        name: of the tensors, in ledgers.

    Attributes:
        part: what to capture with.
    """

    def __init__(self, like: Part, name: str) -> None:
        self.part = replace(
            like,
            plan=_copied(like.plan),
            packed=_copied(like.packed),
            # Only its shape is read, where masks are laid out as activations are.
            targets=torch.zeros_like(like.targets),
            counted=None,
            weight=0.0,
        )
        self._name = name
        self._leaves = dict(_leaves_of(self.part))

    def follow(self, part: Part) -> None:
        """Take over the metadata of a microbatch: one copy, on the current stream.

        Raises:
            ValueError: it has room for more or fewer sequences or tokens than was captured, or is
                for another context size or rank; nothing is copied then.
        """
        theirs = dict(_leaves_of(part))
        if theirs.keys() != self._leaves.keys():
            missing = sorted(theirs.keys() ^ self._leaves.keys())
            raise ValueError(
                f"Expected a microbatch with the metadata that graphs were captured with, got one "
                f"that differs in {', '.join(missing)}."
            )
        into, out_of = [], []
        for name, mine in self._leaves.items():
            other = theirs[name]
            if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
                _require_same_shape(name, mine, other)
                into.append(mine)
                out_of.append(other)
            elif mine is not other and mine != other:
                raise ValueError(
                    f"Expected {name} = {_shown(mine)}, as captured in graphs, got {_shown(other)}."
                )
        torch._foreach_copy_(into, out_of)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that graphs read, by name."""
        for name, leaf in self._leaves.items():
            if isinstance(leaf, torch.Tensor):
                yield f"{self._name}: {name}", leaf


def _copied(value: Any) -> Any:
    """Nested dataclasses and tuples with copies of their tensors; axes stay the same objects."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(map(_copied, value))
    if is_dataclass(value) and not isinstance(value, Axis):
        copies = {field.name: _copied(getattr(value, field.name)) for field in fields(value)}
        return replace(cast("Any", value), **copies)
    return value


def _leaves_of(part: Part) -> Iterator[tuple[str, Any]]:
    """What layers read: tensors by name, and what a capture fixes."""
    yield from _leaves("plan", part.plan)
    yield from _leaves("packed", part.packed)
    yield "context group", part.cp.group
    yield "tokens", tuple(part.targets.shape)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if is_dataclass(value):
        for field in fields(value):
            yield from _leaves(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{name}[{index}]", item)
    else:
        yield name, value


def _require_same_shape(name: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    if mine.shape == other.shape and mine.dtype == other.dtype:
        return
    raise ValueError(
        f"Expected {name} of {tuple(mine.shape)} {mine.dtype}, as captured in graphs, got "
        f"{tuple(other.shape)} {other.dtype}: microbatches are packed with one capacity of tokens "
        "and sequences, and what does not fit is neither cut short nor run in part."
    )


def _shown(value: object) -> str:
    return str(value) if isinstance(value, int | str | tuple | None) else type(value).__name__
