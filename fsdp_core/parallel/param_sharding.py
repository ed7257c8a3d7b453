"""Which part of which global tensors a rank's parameter is.

    global [6, 4]  --Cut("tp", dim=0, axis_size=2, index=1)-->  rows 3, 4, 5
                   --then Cut("etp", dim=1, axis_size=2, index=0)-->  of those, columns 0 and 1

Cuts are applied in order, also where two cut the same dim. Without any, a parameter is replicated.

A checkpoint, a seed and a comparison know the names and shapes of the whole model as torch has it,
`layers.7.attn.attention.wq.weight`. Some parameters of libraries are made of several such tensors:

    te.LayerNormMLP     fc1_weight [2 F / tp, H]     rows 0 to F / tp       part of gate.weight
                                                     the other rows         part of up.weight
    fused experts       gate_up.weight [L, 2 F, H]   likewise, along dim 1

Modules remember cuts and `Stretch`es by the names of their parameters, not the parameters: FSDP,
`copy.deepcopy` and `Module.to_empty` put others in their place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn


@dataclass(frozen=True)
class Cut:
    """Dim `dim` is cut into `axis_size` equal chunks, one a rank of `axis`; ours is `index`."""

    axis: str
    dim: int
    axis_size: int
    index: int


Cuts = tuple[Cut, ...]


def chunk_of(total: int, what: str, axis_name: str, axis_size: int) -> int:
    """Length of one rank's chunk of `total` (`ValueError`: it is no multiple of the ranks)."""
    if total % axis_size:
        raise ValueError(
            f"Expected {what} to be a multiple of the {axis_size} ranks of axis {axis_name}, "
            f"got {total}."
        )
    return total // axis_size


def take(whole: torch.Tensor, cuts: Cuts) -> torch.Tensor:
    """This rank's part of a global tensor, as a contiguous copy."""
    part = whole
    for cut in cuts:
        what = f"dim {cut.dim} of {tuple(whole.shape)}"
        length = chunk_of(part.shape[cut.dim], what, cut.axis, cut.axis_size)
        part = part.narrow(cut.dim, cut.index * length, length)
    return part.clone(memory_format=torch.contiguous_format)


class CutModule(nn.Module):
    """A module whose own parameters are parts of global tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._cuts: dict[str, Cuts] = {}

    def register_cut(self, name: str, parameter: nn.Parameter, *cuts: Cut) -> None:
        """Register `parameter` as attribute `name`, with its cuts."""
        self.register_parameter(name, parameter)
        self._cuts[name] = cuts


def named_cuts(model: nn.Module) -> dict[str, Cuts]:
    """The cuts of every parameter by each of its names; () for one that is replicated."""
    found: dict[str, Cuts] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        # Modules of other libraries have the attribute from `set_stretches`.
        cuts: dict[str, Cuts] = getattr(module, "_cuts", {})
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found[_join(prefix, name)] = cuts.get(name, ())
    return found


@dataclass(frozen=True)
class Stretch:
    """A stretch of a parameter that is a rank's part of a global tensor.

    name: of the global tensor; in a module's table relative to that module, "../norm.weight" for
        one of the module around it.
    cuts: of the global tensor.
    dim, start, length: the stretch; a length of None: all of the parameter.
    """

    name: str
    cuts: Cuts = ()
    dim: int = 0
    start: int = 0
    length: int | None = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The stretch, as a view."""
        if self.length is None:
            return parameter
        return parameter.narrow(self.dim, self.start, self.length)


Stretches = tuple[Stretch, ...]


def consecutive(named: Mapping[str, int], cuts: Cuts, dim: int = 0) -> Stretches:
    """Stretches one after another along `dim`: names and lengths on this rank, cut alike."""
    found, start = [], 0
    for name, length in named.items():
        found.append(Stretch(name, cuts, dim, start, length))
        start += length
    return tuple(found)


def set_stretches(module: nn.Module, table: Mapping[str, Stretch | Stretches]) -> None:
    """Say what the parameters inside `module` are made of, by their names in it (`ValueError`: a
    name of no parameter, or stretches that are not the whole of one).
    """
    parameters = dict(module.named_parameters())
    checked: dict[str, Stretches] = {}
    for name, stretches in table.items():
        checked[name] = made_of = (stretches,) if isinstance(stretches, Stretch) else stretches
        got = tuple(parameters[name].shape) if name in parameters else None
        lengths = {each.name: each.length for each in made_of if each.length is not None}
        due = consecutive(lengths, made_of[0].cuts, made_of[0].dim)
        is_whole = len(made_of) == 1 and not lengths
        if got is None or not (
            is_whole or (due == made_of and sum(lengths.values()) == got[due[0].dim])
        ):
            raise ValueError(
                f"Expected {type(module).__name__} to have a parameter {name} that consists of "
                f"{made_of}, got shape {got}."
            )
        path, _, attribute = name.rpartition(".")
        owner = module.get_submodule(path)
        owner.__dict__.setdefault("_cuts", {})[attribute] = made_of[0].cuts  # for `named_cuts`
    module._stretches = checked  # type: ignore[assignment]


def named_stretches(stage: nn.Module) -> dict[str, Stretches]:
    """The stretches of every parameter, by its name in `stage`; their names are global."""
    tables: dict[str, Stretches] = {}
    for prefix, module in stage.named_modules():
        table: Mapping[str, Stretches] = getattr(module, "_stretches", {})
        for name, stretches in table.items():
            tables[_join(prefix, name)] = tuple(
                replace(stretch, name=_join(prefix, stretch.name)) for stretch in stretches
            )
    return {
        name: tables.get(name) or (Stretch(name, cuts),) for name, cuts in named_cuts(stage).items()
    }


def _join(prefix: str, name: str) -> str:
    while name.startswith("../"):
        prefix, name = prefix.rpartition(".")[0], name.removeprefix("../")
    return f"{prefix}.{name}" if prefix else name
