"""The race detector around units, with a log of what was communicated."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from fsdp_core.device import Device
from fsdp_core.stress import races


@dataclass(frozen=True)
class Collective:
    """One collective: `gather`, `scatter` or `all_reduce`, elements of the larger side, stream."""

    kind: str
    numel: int
    stream: str
    aliased: bool
    """Whether a reduce-scatter's output lies in its input."""


_COLLECTIVES = {
    "c10d::_allgather_base_": "gather",
    "c10d::_reduce_scatter_base_": "scatter",
    "c10d::allreduce_": "all_reduce",
}


class Races(races.Races):
    """Watches operators; `found` lists races, `log` what was communicated, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Collective | str] = []
        """Collectives, and what a program writes between them."""

    @property
    def collectives(self) -> list[Collective]:
        return [entry for entry in self.log if isinstance(entry, Collective)]

    def _collective(self, name: str, args: Any) -> None:
        super()._collective(name, args)
        kind = _COLLECTIVES.get(name)
        if kind is None:
            return
        written = [t for t in tree_iter(args[0]) if isinstance(t, torch.Tensor)]
        read = [args[1]] if kind != "all_reduce" else []
        numel = max(t.numel() for t in (*written, *read))
        places = [t.untyped_storage()._cdata for t in (*written, *read)]
        aliased = kind == "scatter" and places[0] == places[-1]
        stream = self.clocks.current_stream().name
        self.log.append(Collective(kind, numel, stream, aliased))


@contextlib.contextmanager
def watching() -> Iterator[Races]:
    """Units wrapped inside get streams with clocks, and every operator is watched."""
    found, device = Races(), Device("cpu")
    with device.modelling_streams(found.clocks), device.watching_storages(found), found:
        yield found
