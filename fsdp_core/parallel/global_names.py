"""Which global tensors a parameter is made of, where a library has its own idea of parameters.

    te.LayerNormMLP     fc1_weight [2 F / tp, H]     rows 0 to F / tp       part of gate.weight
                                                     the other rows         part of up.weight
    fused experts       gate_up.weight [L, 2 F, H]   likewise, along dim 1

A checkpoint, a seed and a comparison know the names and shapes of the whole model as torch has it,
`layers.7.attn.attention.wq.weight`. A module whose parameters are called or cut otherwise carries a
table from its local names to `Stretch`es; a parameter that no table has is one of its own name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from fsdp_core.parallel.cuts import Cut, named_cuts

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
