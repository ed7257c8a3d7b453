"""Keeps copies of named tensors as they were digested, and says where each lies in the whole model.

    grads:layers.0.attn.qkv.weight    a tensor of a digest group, by the name in its records
    grads:*                           every one whose name fits; a star stands for any text
    layers.1.attn:output[1]           a row of taps

    rank's tensor [4, 6] --a box of it [2, 6] at (2, 0)--> of the whole [16, 6], at (10, 0)

Of rows of taps, what branches of layers return (`layers.1.attn:output[1]`) is a box of all tokens
of the microbatch over the ranks of the data, [B * dp, T, H]; others lie nowhere: they are the
rank's own.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_core.checkpoint.pieces import Piece, plain_name
from fsdp_core.config import TrainConfig
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.graph.digest import digest_tensors, empty_rows
from fsdp_core.graph.kept import Calls, Copies, Room
from fsdp_core.graph.taps import Taps
from fsdp_core.parallel.context import split
from fsdp_core.parallel.mesh import Axes
from fsdp_core.parallel.param_sharding import Stretch, named_stretches
from fsdp_core.train.outputs import Digests, StepOutputs


@dataclass(frozen=True)
class Place:
    """A box of a rank's tensor, and where it lies in a tensor of the whole model.

    Attributes:
        name: of the whole tensor.
        shape: of the whole tensor.
        offsets: of the box in the whole tensor.
        local_offsets: of the box in the rank's tensor.
        sizes: of the box.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Kept:
    """One tensor of a rank as it was digested, on the host.

    Attributes:
        name: as it was asked for, without stars.
        part: which tensor of a row of taps, which may be of several; else 0.
        tensor: on the CPU.
        places: where it lies in the whole model; of parameters and what has their shape.
        as_digested: whether the copy gives the digest that the step recorded. It does not where
            something else wrote the tensor between the two, or where a row of taps is of several
            calls.
    """

    name: str
    part: int
    tensor: torch.Tensor
    places: tuple[Place, ...]
    as_digested: bool


RowPlaces = Callable[[str, torch.Tensor], tuple[Place, ...]]


class Keeping:
    """Copies of the tensors that fit `names`, overwritten by every step.

    Args:
        names: as in the module's docstring; those that this rank does not have are passed over.
        max_bytes: of all copies on this rank.
        places: of every parameter by its name; `places_of` gives them.
        row_places: of a tensor of a row of taps, by the row's name.

    Raises:
        ValueError: they would take more.
    """

    def __init__(
        self,
        names: Sequence[str],
        max_bytes: int,
        *,
        digests: Digests,
        taps: Taps,
        places: Iterable[tuple[str, tuple[Place, ...]]],
        row_places: RowPlaces = lambda name, tensor: (),
    ) -> None:
        self._digests, self._taps, self._row_places = digests, taps, row_places
        room = Room(max_bytes, taps.device)
        self._places = dict(places)
        for group, (known, tensors) in digests.digested.items():
            wanted = {
                name: tensor
                for name, tensor in zip(known, tensors, strict=True)
                if fits(names, f"{group}:{name}")
            }
            if wanted:
                digests.keep(group, Copies(wanted, room))
        rows = {
            divmod(number, taps.calls): name
            for number, name in enumerate(taps.names)
            if fits(names, name)
        }
        if rows:
            taps.keep(Calls(rows, room))

    def read(self, outputs: StepOutputs) -> list[Kept]:
        """What was kept of the step that has just been issued. Waits for the device."""
        return [*self._read_state(outputs), *self._read_rows()]

    def _read_state(self, outputs: StepOutputs) -> Iterator[Kept]:
        for group, copies in self._digests.kept.items():
            rows = outputs.digests[group].cpu()
            numbers = {name: i for i, name in enumerate(self._digests.digested[group][0])}
            for name, copy in copies.read():
                tensor = copy.cpu()
                again = empty_rows(1, "cpu")
                digest_tensors([tensor], again)
                same = torch.equal(again[0], rows[numbers[name]])
                yield Kept(f"{group}:{name}", 0, tensor, self._places_of(name, tensor), same)

    def _read_rows(self) -> Iterator[Kept]:
        if self._taps.kept is None:
            return
        rows = dict(zip(self._taps.names, self._taps.rows.cpu(), strict=True))
        for name, parts in self._taps.kept.read():
            tensors = [part.cpu() for part in parts]
            same = self._taps.is_digest_of(rows[name], tensors)
            for number, tensor in enumerate(tensors):
                yield Kept(name, number, tensor, self._row_places(name, tensor), same)

    def _places_of(self, name: str, tensor: torch.Tensor) -> tuple[Place, ...]:
        stem, suffix = name, ""
        if name not in self._places:
            stem, dot, last = name.rpartition(".")
            suffix = dot + last
        if stem not in self._places:
            # Of no parameter: experts' biases and counters are the same on every rank.
            zeros = (0,) * tensor.dim()
            return (Place(name, tuple(tensor.shape), zeros, zeros, tuple(tensor.shape)),)
        return tuple(
            Place(each.name + suffix, each.shape, each.offsets, each.local_offsets, each.sizes)
            for each in self._places[stem]
        )


def branch_places(config: TrainConfig, axes: Axes) -> RowPlaces:
    """Places of what branches of layers return; of packs, which layouts cut otherwise, none."""
    if config.parallel.dynamic_cp:
        return lambda name, tensor: ()
    seq = config.model.seq
    mine = split(torch.arange(seq), 0, axes.cp.size, axes.cp.rank)
    if axes.sequence_parallel:
        mine = mine.chunk(axes.tp.size)[axes.tp.rank]
    positions = mine.tolist()
    starts = [i for i, at in enumerate(positions) if not i or at != positions[i - 1] + 1]
    runs = list(zip(starts, [*starts[1:], len(positions)], strict=True))
    rank = axes.dp_outer.rank * axes.dp.size + axes.dp.rank

    def places(name: str, tensor: torch.Tensor) -> tuple[Place, ...]:
        layer, _, branch = name.partition("[")[0].removeprefix("layers.").partition(".")
        if not layer.isdecimal() or branch not in ("attn:output", "mlp:output"):
            return ()
        if tensor.dim() != 3 or tensor.shape[1] != len(positions):
            return ()
        rows, _, width = tensor.shape
        whole = (rows * axes.dp_outer.size * axes.dp.size, seq, width)
        return tuple(
            Place(
                name, whole, (rank * rows, positions[begin], 0), (0, begin, 0),
                (rows, end - begin, width),
            )
            for begin, end in runs
        )  # fmt: skip

    return places


def fits(names: Iterable[str], name: str) -> bool:
    """Whether a name is one of `names`, whose stars stand for any text."""
    return any(_pattern(each).fullmatch(name) for each in names)


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in text.split("*")), re.DOTALL)


def places_of(
    stages: Sequence[nn.Module], groups: Iterable[ParamGroup]
) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """Of every parameter by its name, of which this rank may have no row at all."""
    stretches = {
        plain_name(name): each for stage in stages for name, each in named_stretches(stage).items()
    }
    for group in groups:
        for name, parameter in zip(group.names, group.sharded, strict=True):
            made_of = stretches.get(plain_name(name), (Stretch(name),))
            yield name, tuple(p for each in made_of for p in _place(parameter, each))


def _place(parameter: torch.Tensor, stretch: Stretch) -> Iterator[Place]:
    piece = Piece.of(parameter, stretch)
    local = Piece.of(parameter, Stretch("")).local
    box = piece.local
    for chunk in piece.__create_chunk_list__():
        start, at = int(box.storage_offset() - local.storage_offset()), list[int]()
        for stride in local.stride():
            index, start = divmod(start, stride)
            at.append(index)
        sizes, whole = tuple(chunk.sizes), tuple(piece.shape)
        yield Place(plain_name(stretch.name), whole, tuple(chunk.offsets), tuple(at), sizes)
