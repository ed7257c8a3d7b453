"""Which part of a global tensor a rank's parameter is.

    global [6, 4]  --Cut("tp", dim=0, axis_size=2, index=1)-->  rows 3, 4, 5
                   --then Cut("etp", dim=1, axis_size=2, index=0)-->  of those, columns 0 and 1

Cuts are applied in order, also where two cut the same dim: the second cuts what the first left. A
parameter carries its cuts as the attribute `cuts`; without one it is replicated. Torch drops such
attributes when it makes a parameter anew (`copy.deepcopy`, `Module.to_empty` from the meta device),
after which a part would pass for the whole, so modules set them through `CutModule`, which sets
them again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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


_TABLE = "_stretches"


@dataclass(frozen=True)
class Stretch:
    """A stretch of a parameter that is a rank's part of a global tensor.

    Attributes:
        name: of the global tensor; in a module's table relative to that module, "../norm.weight"
            for one of the module around it.
        cuts: of the global tensor.
        dim, start, length: the stretch; a length of None: all of the parameter.
    """

    name: str
    cuts: tuple[Cut, ...] = ()
    dim: int = 0
    start: int = 0
    length: int | None = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stretch, as a view."""
        if self.length is None:
            return parameter
        return parameter.narrow(self.dim, self.start, self.length)


Stretches = tuple[Stretch, ...]


def consecutive(named: Mapping[str, int], cuts: tuple[Cut, ...], dim: int = 0) -> Stretches:
    """Stretches one after another along `dim`: names and lengths on this rank, cut alike."""
    found, start = [], 0
    for name, length in named.items():
        found.append(Stretch(name, cuts, dim, start, length))
        start += length
    return tuple(found)


def set_stretches(module: nn.Module, table: Mapping[str, Stretch | Stretches]) -> None:
    """Say what the parameters inside `module` are made of, by their names in it.

    Raises:
        ValueError: a name of no parameter; stretches that leave some of it out, overlap, or are cut
            over different axes.
    """
    parameters = dict(module.named_parameters())
    checked: dict[str, Stretches] = {}
    for name, stretches in table.items():
        if name not in parameters:
            raise ValueError(f"Expected a parameter of {type(module).__name__}, got {name!r}.")
        checked[name] = (stretches,) if isinstance(stretches, Stretch) else stretches
        _check(name, parameters[name], checked[name])
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        # What `named_cuts` looks for: of several stretches all are cut over the same axes.
        owner.__dict__.setdefault("_cuts", {})[attribute] = checked[name][0].cuts
    setattr(module, _TABLE, checked)


def _check(name: str, parameter: torch.Tensor, stretches: Stretches) -> None:
    if len({frozenset(cut.axis for cut in stretch.cuts) for stretch in stretches}) != 1:
        raise ValueError(
            f"Expected stretches of {name} that are cut over the same axes, got others."
        )
    if len(stretches) == 1 and stretches[0].length is None:
        return
    end = 0
    for stretch in stretches:
        if stretch.length is None or stretch.dim != stretches[0].dim or stretch.start != end:
            raise ValueError(f"Expected stretches of {name} one after another, got {stretch}.")
        end += stretch.length
    if end != parameter.shape[stretches[0].dim]:
        size = parameter.shape[stretches[0].dim]
        raise ValueError(f"Expected stretches of {name} of {size} together, got {end}.")


def named_stretches(stage: nn.Module) -> dict[str, Stretches]:
    """The stretches of every parameter, by its name in `stage`; their names are global.

    Asked of the modules, which remember them: FSDP puts parameters of its own in place of theirs.
    """
    tables: dict[str, Stretches] = {}
    for prefix, module in stage.named_modules():
        for name, stretches in getattr(module, _TABLE, {}).items():
            tables[_join(prefix, name)] = tuple(
                replace(stretch, name=_join(prefix, stretch.name)) for stretch in stretches
            )
    return {
        name: tables.get(name) or (Stretch(name, cuts),) for name, cuts in named_cuts(stage).items()
    }


def join_stretches(stretches: Stretches, parts: list[torch.Tensor]) -> torch.Tensor:
    """The parameter out of a rank's parts of the global tensors, in the order of `stretches`."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, stretches[0].dim)


def _join(prefix: str, name: str) -> str:
    while name.startswith("../"):
        prefix, name = prefix.rpartition(".")[0], name.removeprefix("../")
    return f"{prefix}.{name}" if prefix else name
