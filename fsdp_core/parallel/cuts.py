"""Which part of a global tensor a rank's parameter is.

    global [6, 4]  --Cut("tp", dim=0, axis_size=2, index=1)-->  rows 3, 4, 5
                   --then Cut("etp", dim=1, axis_size=2, index=0)-->  of those, columns 0 and 1

Cuts are applied in order, also where two cut the same dim: the second cuts what the first left. A
parameter carries its cuts as the attribute `cuts`; without one it is replicated. Torch drops such
attributes when it makes a parameter anew (`copy.deepcopy`, `Module.to_empty` from the meta device),
after which a part would pass for the whole, so modules set them through `CutModule`, which sets
them again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn


@dataclass(frozen=True)
class Cut:
    """Dim `dim` of a tensor is cut into `axis_size` equal chunks; this rank has chunk `index`.

    Attributes:
        axis: name of the parallel axis that has a chunk a rank.

    Raises:
        ValueError: an index outside the axis, or a negative dim.
    """

    axis: str
    dim: int
    axis_size: int
    index: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"Expected a dim >= 0 to cut over {self.axis}, got {self.dim}.")
        if not 0 <= self.index < self.axis_size:
            raise ValueError(
                f"Expected an index in 0..{self.axis_size - 1} on axis {self.axis}, "
                f"got {self.index}."
            )


def cut_of(parameter: torch.Tensor) -> tuple[Cut, ...]:
    """The cuts of a parameter, in the order in which they apply; () if it is replicated."""
    cuts: tuple[Cut, ...] = getattr(parameter, "cuts", ())
    return cuts


def set_cuts(parameter: torch.Tensor, *cuts: Cut) -> None:
    """Declare `parameter` to be the part of a global tensor that `cuts` leave.

    Raises:
        ValueError: a cut of a dim that the parameter does not have, or two over the same axis.
    """
    for cut in cuts:
        if cut.dim >= parameter.dim():
            raise ValueError(
                f"Expected a dim below {parameter.dim()} for a parameter of shape "
                f"{tuple(parameter.shape)}, got {cut}."
            )
    axes = [cut.axis for cut in cuts]
    if len(set(axes)) < len(axes):
        raise ValueError(f"Expected one cut an axis, got {', '.join(axes)}.")
    parameter.cuts = cuts  # type: ignore[attr-defined]


def global_shape(parameter: torch.Tensor) -> torch.Size:
    """Shape of the tensor that `parameter` is a part of."""
    shape = list(parameter.shape)
    for cut in cut_of(parameter):
        shape[cut.dim] *= cut.axis_size
    return torch.Size(shape)


def take(whole: torch.Tensor, cuts: tuple[Cut, ...]) -> torch.Tensor:
    """This rank's part of a global tensor, as a contiguous copy.

    Raises:
        ValueError: a dim is not a multiple of the ranks that it is cut over.
    """
    return _part(whole, cuts).clone(memory_format=torch.contiguous_format)


def place(part: torch.Tensor, whole: torch.Tensor, cuts: tuple[Cut, ...]) -> None:
    """Write `part` where it belongs in the global tensor `whole`: the inverse of `take`.

    Raises:
        ValueError: as `take`, or `part` has not the shape that the cuts leave.
    """
    target = _part(whole, cuts)
    if target.shape != part.shape:
        raise ValueError(
            f"Expected a part of shape {tuple(target.shape)} of {tuple(whole.shape)}, "
            f"got {tuple(part.shape)}."
        )
    target.copy_(part)


def _part(whole: torch.Tensor, cuts: tuple[Cut, ...]) -> torch.Tensor:
    part = whole
    for cut in cuts:
        if cut.dim >= part.dim() or part.shape[cut.dim] % cut.axis_size:
            raise ValueError(
                f"Expected dim {cut.dim} to be a multiple of the {cut.axis_size} ranks of axis "
                f"{cut.axis}, got shape {tuple(part.shape)}."
            )
        length = part.shape[cut.dim] // cut.axis_size
        part = part.narrow(cut.dim, cut.index * length, length)
    return part


def chunk_of(total: int, what: str, axis_name: str, axis_size: int) -> int:
    """Length of one rank's chunk of `total`.

    Raises:
        ValueError: `total` is not a multiple of the ranks; names `what` it is.
    """
    if total % axis_size:
        raise ValueError(
            f"Expected {what} to be a multiple of the {axis_size} ranks of axis {axis_name}, "
            f"got {total}."
        )
    return total // axis_size


class CutModule(nn.Module):
    """A module whose own parameters keep their cuts when torch makes them anew."""

    def __init__(self) -> None:
        super().__init__()
        self._cuts: dict[str, tuple[Cut, ...]] = {}

    def register_cut(self, name: str, parameter: nn.Parameter, *cuts: Cut) -> None:
        """Register `parameter` as attribute `name`, with its cuts."""
        self.register_parameter(name, parameter)
        set_cuts(parameter, *cuts)
        self._cuts[name] = cuts

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002  (torch's signature)
        super()._apply(fn, recurse)
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For `copy.deepcopy`, which copies parameters without their attributes."""
        super().__setstate__(state)
        self._mark()

    def _mark(self) -> None:
        for name, cuts in self._cuts.items():
            parameter = self._parameters[name]
            if parameter is not None:
                set_cuts(parameter, *cuts)


def named_cuts(model: nn.Module) -> dict[str, tuple[Cut, ...]]:
    """The cuts of every parameter by each of its names; () for one that is replicated.

    Asked of the modules, which remember them: FSDP puts parameters of its own in place of theirs.
    """
    found: dict[str, tuple[Cut, ...]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        # Modules of other libraries have the attribute from `global_names`.
        cuts: dict[str, tuple[Cut, ...]] = getattr(module, "_cuts", {})
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[f"{prefix}.{name}".lstrip(".")] = cuts.get(name, ())
    return found
