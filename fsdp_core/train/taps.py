"""Taps: digests of what goes through modules, taken where it is computed, in graphs and outside.

    input      tensors in the arguments of a call, together
    output     tensors in what it returns, together
    gradient   of its first output that gets one, as the backward pass brings it

A call's digest is written into the next free row of its tap, with the tap's place in the order of
all that ran in the step. Which row is next, and the place, are counted on the device: a graph that
holds a tap counts on at each replay, as a call does. So rows are the same whoever issues the work,
also where one graph serves several microbatches. A module that is called more often than a tap has
rows, as one that layers share, folds further calls into its last row.

Calls are watched at `Module._call_impl`, around hooks and around whatever stands in for `forward`:
a module is seen once a call, be it captured, replaced by a replay, or eager. Hooks would be taken
away while graphs are captured. Only training passes are seen, not those without gradients.

**Cost** of a tap: its tensors are read once, or copied and read once on CUDA, plus some 15 launches
of small kernels. It needs no sync. Nothing is computed with a digest, so no bit of the run changes.

**Copies** of what is digested, on the same stream right after it, for tensors that a run names:

    grads:layers.0.attn.qkv.weight    a tensor of a digest group, by the name in its records
    grads:*                           every one whose name fits; a star stands for any text
    layers.1.attn:output[1]           a row of taps

A copy is of bits: elements travel as integers of their size. Buffers never move and are made before
anything is captured, so a graph may hold the copying, and each replay overwrites them. On CUDA they
lie in a memory pool of their own: the program's tensors get the addresses that they get without.

    rank's tensor [4, 6] --a box of it [2, 6] at (2, 0)--> of the whole [16, 6], at (10, 0)

What branches of layers return (`layers.1.attn:output[1]`) is a box of all tokens of the microbatch
over the ranks of the data, [B * dp, T, H]; other rows lie nowhere: they are the rank's own.
"""

import contextlib
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_core.checkpoint.pieces import Piece, plain_name
from fsdp_core.config import ConfigError, TapPattern, TrainConfig, tap_pattern
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.graph.digest import (
    INT_OF_SIZE,
    NUM_COLUMNS,
    NUM_LANES,
    Digester,
    digest_tensors,
    empty_rows,
)
from fsdp_core.parallel.context import split
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.param_sharding import Stretch, named_stretches

NEVER = -1
"""Place of a row that no call has written in this step."""
PLACE_COLUMN = NUM_COLUMNS
_FOLD = 0x01000193
"""Odd, so that what was folded stays in all bits: a row times this plus the next, modulo 2**32."""
MOST_KINDS = 64
"""Shapes whose plans are kept; the longest unused goes. What a graph has captured stays."""


class Room:
    """Memory for copies, up to a number of bytes."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self.max_bytes, self.used_bytes, self.device = max_bytes, 0, device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    def bytes_for(self, name: str, num_bytes: int) -> Tensor:
        """A buffer of zero bytes; `ValueError` if there is no room for it."""
        self.used_bytes += num_bytes
        if self.used_bytes > self.max_bytes:
            raise ValueError(
                f"Expected copies of at most {self.max_bytes} bytes on a rank, got "
                f"{self.used_bytes} with {name}; name fewer tensors, or allow more."
            )
        with self._inside():
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """A contiguous buffer of the shape of `tensor`, of integers of the size of its elements."""
        flat = self.bytes_for(name, tensor.nbytes)
        return flat.view(INT_OF_SIZE[tensor.itemsize]).view(tensor.shape)

    def _inside(self) -> contextlib.AbstractContextManager[Any]:
        if self._pool is None:
            return contextlib.nullcontext()
        return torch.cuda.use_mem_pool(self._pool, self.device)


class Copies:
    """Copies of tensors of a fixed shape, and of a fixed place unless `follow` says otherwise."""

    def __init__(self, named: Mapping[str, Tensor], room: Room) -> None:
        self._tensors = dict(named)
        self.buffers = {name: room.like(name, tensor) for name, tensor in named.items()}

    def follow(self, named: Mapping[str, Tensor]) -> None:
        """Copy from these from now on: the same names, shapes and dtypes elsewhere."""
        self._tensors = {name: named[name] for name in self._tensors}

    def take(self) -> None:
        """Copy all; device work alone."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                buffer = self.buffers[name]
                buffer.copy_(tensor.detach().view(buffer.dtype))

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Names and the copies, in the dtypes of what was copied."""
        for name, tensor in self._tensors.items():
            yield name, self.buffers[name].view(tensor.dtype)


class _Kind:
    """The tensors of one call, of certain shapes, in the memory of its row."""

    def __init__(self, tensors: Sequence[Tensor], memory: Sequence[Tensor], written: Tensor):
        self.dtypes = [tensor.dtype for tensor in tensors]
        self.written = written
        self.buffers = [
            room[: tensor.nbytes].view(INT_OF_SIZE[tensor.itemsize]).view(tensor.shape)
            for room, tensor in zip(memory, tensors, strict=True)
        ]

    def take(self, tensors: Sequence[Tensor], hit: Tensor) -> None:
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            buffer.copy_(torch.where(hit, tensor.view(buffer.dtype), buffer))
        self.written.logical_or_(hit)


class Calls:
    """Copies of the tensors of certain calls in a step.

    Shapes may change from call to call: those of a row share its memory, which grows by doubling.

    Args:
        wanted: names of rows, by the number of the tap and of the call.
    """

    def __init__(self, wanted: Mapping[tuple[int, int], str], room: Room) -> None:
        self._room = room
        self._calls: dict[int, list[int]] = {}
        for tap, call in wanted:
            self._calls.setdefault(tap, []).append(call)
        self._names = dict(wanted)
        self._memory: dict[tuple[tuple[int, int], int], Tensor] = {}
        self._outgrown: list[Tensor] = []
        self._kinds: dict[tuple[int, int], dict[Any, _Kind]] = {row: {} for row in wanted}

    def begin(self) -> None:
        """A step begins: nothing is written."""
        for kinds in self._kinds.values():
            for kind in kinds.values():
                kind.written.zero_()

    def record(self, tap: int, seen: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of a call into each wanted row whose turn it is.

        Args:
            seen: calls of the tap before this one: integer scalar on the device.
        """
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        for call in self._calls.get(tap, ()):
            kinds = self._kinds[tap, call]
            if signature not in kinds:
                kinds[signature] = self._new_kind((tap, call), tensors)
            kinds[signature].take(tensors, seen == call)

    def _new_kind(self, row: tuple[int, int], tensors: Sequence[Tensor]) -> _Kind:
        memory = [self._memory_of(row, i, tensor.nbytes) for i, tensor in enumerate(tensors)]
        written = self._room.bytes_for(self._names[row], 1).view(torch.bool)[0]
        return _Kind(tensors, memory, written)

    def _memory_of(self, row: tuple[int, int], part: int, num_bytes: int) -> Tensor:
        have = self._memory.get((row, part))
        if have is not None and have.numel() >= num_bytes:
            return have
        size = num_bytes if have is None else max(num_bytes, 2 * have.numel())
        if have is not None:
            self._outgrown.append(have)  # a graph may write there
        made = self._memory[row, part] = self._room.bytes_for(self._names[row], size)
        return made

    def read(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Names of rows that were written in this step, with their tensors. Waits for the device.

        Of a row that no call has written there is nothing.
        """
        for row, kinds in self._kinds.items():
            for kind in kinds.values():
                if bool(kind.written):
                    pairs = zip(kind.buffers, kind.dtypes, strict=True)
                    yield self._names[row], [buffer.view(dtype) for buffer, dtype in pairs]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a captured call reads or writes beside its arguments."""
        yield from self._memory.values()
        yield from self._outgrown
        for kinds in self._kinds.values():
            for kind in kinds.values():
                yield kind.written


@dataclass(frozen=True)
class Tap:
    """What to watch: a module by its name, and `input`, `output` or `gradient`.

    `stage` is that of the pipeline, for whoever puts ranks in the order of the data.
    """

    name: str
    module: nn.Module
    kind: str
    stage: int = 0


class Taps:
    """Watches modules until `close`.

    Args:
        taps: what to watch.
        calls: rows of each tap: how often its module is called in a step, and one more for calls
            past those.
        device: of the tensors; they are digested on the stream that computes them, one for all.

    Attributes:
        names: of the rows, `layers.3.attn:output[1]`, each tap's `calls` together.
        stages: of the rows.
        rows: int32 [taps * calls, 6]: the digest's five columns, and the place in the step.
        calls_seen: int32 [taps], calls since `begin`.
        kept: copies of what went through some of them.
    """

    def __init__(self, taps: Sequence[Tap], calls: int, device: torch.device) -> None:
        self._taps, self.calls, self.device = tuple(taps), calls, device
        self.kept: Calls | None = None
        self.names = [f"{t.name}:{t.kind}[{i}]" for t in self._taps for i in range(calls)]
        self.stages = [t.stage for t in self._taps for _ in range(calls)]
        self._blank = torch.zeros(len(self.names), NUM_COLUMNS + 1, dtype=torch.int32)
        self._blank[:, PLACE_COLUMN] = NEVER
        self._blank = self._blank.to(device)
        self.rows = self._blank.clone()
        self.calls_seen = torch.zeros(len(self._taps), dtype=torch.int32, device=device)
        self._clock = torch.zeros(1, dtype=torch.int32, device=device)
        self._numbers = torch.arange(calls, dtype=torch.int32).to(device)[:, None]
        self._is_last = self._numbers == calls - 1
        fold = [[_FOLD] * NUM_LANES + [0, 1], [1] * NUM_COLUMNS + [0]]
        self._keep, self._add = torch.tensor(fold, dtype=torch.int32).to(device)[:, None].unbind()
        self._digests: dict[tuple[Any, ...], _Digest] = {}
        modules = dict.fromkeys(tap.module for tap in self._taps)
        self._watched = list(modules)
        for module in modules:
            self._watch(module)

    @property
    def tap_names(self) -> list[str]:
        """`layers.3.attn:output`, in the order of `calls_seen`."""
        return [f"{tap.name}:{tap.kind}" for tap in self._taps]

    def begin(self) -> None:
        """A step begins: no row is written. Device work alone, so a graph may hold it."""
        if self._taps:
            self.rows.copy_(self._blank)
            self.calls_seen.zero_()
            self._clock.zero_()
        if self.kept is not None:
            self.kept.begin()

    def close(self) -> None:
        """Watch no more; graphs that were captured still do."""
        for module in self._watched:
            del module._call_impl
        self._watched = []

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that live on and that a captured tap reads or writes, by name."""
        if not self._taps:
            return
        yield "taps", self.rows
        yield "taps blank", self._blank
        yield "taps calls seen", self.calls_seen
        yield "taps clock", self._clock
        yield "taps numbers", self._numbers
        yield "taps last", self._is_last
        yield "taps fold", self._keep
        for number, digest in enumerate(self._digests.values()):
            for index, tensor in enumerate(digest.tensors()):
                yield f"taps scratch {index} of kind {number}", tensor
        for index, tensor in enumerate(() if self.kept is None else self.kept.tensors()):
            yield f"taps copy {index}", tensor

    def keep(self, calls: Calls) -> None:
        """From now on copy, too, what goes through some of the taps."""
        self.kept = calls

    def is_digest_of(self, row: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether a row, on the host, is the digest of one call with these tensors, on the host."""
        digest = _Digest(tensors, torch.device("cpu"))(tensors)
        return torch.equal(digest[0], row[:NUM_COLUMNS])

    # ---- watching

    def _watch(self, module: nn.Module) -> None:
        mine = {tap.kind: i for i, tap in enumerate(self._taps) if tap.module is module}
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            again = torch._C._current_graph_task_id() != -1  # recomputed in a backward pass
            if again or not (torch.is_grad_enabled() and module.training):
                return original(*args, **kwargs)
            if "input" in mine:
                self._record(mine["input"], [*tensors_in((args, kwargs), open_records=False)])
            result = original(*args, **kwargs)
            if "output" in mine:
                self._record(mine["output"], [*tensors_in(result)])
            if "gradient" in mine:
                self._watch_gradient(mine["gradient"], result)
            return result

        # The instance's own, which `Module.__call__` finds first.
        module._call_impl = call  # type: ignore[method-assign]

    def _watch_gradient(self, tap: int, result: Any) -> None:
        first = next((t for t in tensors_in(result) if t.requires_grad), None)
        if first is not None:
            first.register_hook(functools.partial(self._gradient, tap))

    def _gradient(self, tap: int, grad: Tensor) -> None:
        self._record(tap, [grad])

    # ---- recording

    def _record(self, tap: int, tensors: list[Tensor]) -> None:
        """Write the digest of one call into its row, by operators that a graph can hold."""
        with torch.no_grad():
            tensors = [tensor.detach() for tensor in tensors]
            digest = self._digest_of(tap, tensors)(tensors)
            line = torch.cat((digest, self._clock[:, None]), dim=1)
            seen = self.calls_seen[tap : tap + 1]
            own = self.rows[tap * self.calls : (tap + 1) * self.calls]
            again = self._is_last & (seen >= self.calls)
            folded = own * self._keep + line * self._add
            own.copy_(torch.where(self._numbers == seen, line, torch.where(again, folded, own)))
            if self.kept is not None:
                self.kept.record(tap, seen[0], tensors)
            seen.add_(1)
            self._clock.add_(1)

    def _digest_of(self, tap: int, tensors: list[Tensor]) -> "_Digest":
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        digest = self._digests.pop(signature, None)
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if digest is None:
            if capturing:
                raise RuntimeError(
                    f"Expected {self.tap_names[tap]} to have seen {[*map(str, signature)]} before "
                    "the capture, got it first inside: run a step of these shapes eagerly first."
                )
            try:
                digest = _Digest(tensors, self.device)
            except ValueError as error:
                raise ValueError(
                    f"Expected plain tensors in {self.tap_names[tap]}, got others; leave it out of "
                    f"taps: {error}"
                ) from error
            self._forget_oldest()
        digest.is_captured |= capturing
        self._digests[signature] = digest  # the latest used is last
        return digest

    def _forget_oldest(self) -> None:
        if len(self._digests) >= MOST_KINDS:
            loose = (key for key, digest in self._digests.items() if not digest.is_captured)
            self._digests.pop(next(loose, ()), None)


class _Digest:
    """The digest of a list of tensors of fixed shapes as one row; on CUDA by way of a copy.

    A graph's activations lie where no table can be prepared for, the copies stay where they are.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._copies = [
            torch.empty(t.shape, dtype=INT_OF_SIZE[t.itemsize], device=device)
            for t in (tensors if device.type == "cuda" else ())
        ]
        self._digester = Digester(self._staged(tensors))
        self._each = empty_rows(len(tensors), device)
        self._together = Digester([self._each])
        self._row = empty_rows(1, device)
        self.is_captured = False

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """int32 [1, 5]; overwritten by the next call."""
        self._digester(self._staged(tensors), self._each)
        if len(tensors) == 1:
            return self._each
        # Of several the digest of their digests; flags count as bits.
        self._together([self._each], self._row)
        return self._row

    def _staged(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if not self._copies:
            return list(tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor.view(copy.dtype))
        return [c.view(t.dtype) for c, t in zip(self._copies, tensors, strict=True)]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a call reads or writes beside its arguments."""
        yield from self._copies
        yield from (self._each, self._row)
        yield from self._digester.scratch()
        yield from self._together.scratch()


def tensors_in(value: Any, *, open_records: bool = True) -> Iterator[Tensor]:
    """Tensors in nested tuples, lists and dicts, in order.

    Args:
        open_records: and in dataclasses. Among what a module is given they describe its data, as
            plans do; what it returns may be one.
    """
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, tuple | list):
        items = value
    elif isinstance(value, dict):
        items = value.values()
    elif open_records and is_dataclass(value):
        items = (getattr(value, field.name) for field in fields(value))
    for item in items:
        yield from tensors_in(item, open_records=open_records)


def open_taps(
    config: TrainConfig, stages: Sequence[nn.Module], pp: Axis, device: torch.device
) -> Taps:
    """Watch what `config.taps` means of these stages; collective where there are any.

    Raises:
        ConfigError: a pattern that means no module on any rank.
    """
    patterns = [tap_pattern(text) for text in config.taps]
    chosen = [
        [
            Tap(name, module, pattern.kind, chunk * pp.size + pp.rank)
            for chunk, stage in enumerate(stages)
            for name, module in _callable(stage)
            if pattern.matches(name)
        ]
        for pattern in patterns
    ]
    if patterns:
        names = [name for stage in stages for name, _ in _callable(stage)]
        _require_found(patterns, chosen, names, device)
    # Two patterns may mean one module; it is looked into once.
    taps = {(tap.name, tap.kind): tap for each in chosen for tap in each}
    # A row more than a module is called by itself: calls of one that others share go on into it.
    return Taps(list(taps.values()), config.microbatches + 1, device)


def _callable(stage: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that are called, by the names that they have in the whole model."""
    for name, module in stage.named_modules():
        if name and not isinstance(module, nn.ModuleDict | nn.ModuleList):
            yield name, module


def _require_found(
    patterns: Sequence[TapPattern],
    chosen: Sequence[Sequence[Tap]],
    names: Sequence[str],
    device: torch.device,
) -> None:
    """No rank has all modules, so the ranks ask each other; `names` are those of this rank."""
    found = torch.tensor([len(each) for each in chosen], device=device)
    dist.all_reduce(found)
    for pattern, number in zip(patterns, found.tolist(), strict=True):
        if not number:
            near = difflib.get_close_matches(pattern.modules, names, n=3, cutoff=0.3)
            expected = "a pattern that means a module"
            if near:
                expected += f" (names like it: {', '.join(near)})"
            raise ConfigError("taps", expected=expected, got=f"{pattern.modules}:{pattern.kind}")


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
        digested: names and tensors of each group.
        copies: what is taken with the digests of a group; entered here.
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
        digested: Mapping[str, tuple[list[str], list[torch.Tensor]]],
        copies: dict[str, Copies],
        taps: Taps,
        places: Iterable[tuple[str, tuple[Place, ...]]],
        row_places: RowPlaces = lambda name, tensor: (),
    ) -> None:
        self._digested, self._copies = digested, copies
        self._taps, self._row_places = taps, row_places
        room = Room(max_bytes, taps.device)
        self._places = dict(places)
        for group, (known, tensors) in digested.items():
            wanted = {
                name: tensor
                for name, tensor in zip(known, tensors, strict=True)
                if fits(names, f"{group}:{name}")
            }
            if wanted:
                copies[group] = Copies(wanted, room)
        rows = {
            divmod(number, taps.calls): name
            for number, name in enumerate(taps.names)
            if fits(names, name)
        }
        if rows:
            taps.keep(Calls(rows, room))

    def read(self, digests: Mapping[str, torch.Tensor]) -> list[Kept]:
        """What was kept of the step that has just been issued; `digests` are its own. It waits."""
        return [*self._read_state(digests), *self._read_rows()]

    def _read_state(self, digests: Mapping[str, torch.Tensor]) -> Iterator[Kept]:
        for group, copies in self._copies.items():
            rows = digests[group].cpu()
            numbers = {name: i for i, name in enumerate(self._digested[group][0])}
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
