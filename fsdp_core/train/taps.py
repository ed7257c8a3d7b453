"""Taps: digests of what goes through modules, and snapshots of tensors that a run names.

    input      tensors in the arguments of a call, together
    output     tensors in what it returns, together
    gradient   of its first output that gets one, as the backward pass brings it

A call's digest is written into the next free row of its tap, with the tap's place in the order of
all that ran in the step. Both are counted on the device: a graph that holds a tap counts on at each
replay. So rows are the same whoever issues the work. Calls beyond the rows of a tap, as of a module
that layers share, are folded into its last row. Calls are watched at `Module._call_impl`: a module
is seen once a call, be it captured, replaced by a replay, or eager, where hooks would be taken away
for captures. Only training passes are seen.

A tap reads its tensors once (on CUDA it copies them first) and launches some 15 small kernels; it
needs no sync. Nothing is computed with a digest, so no bit of the run changes.

**Snapshots** are copies, taken right after the digest on the same stream, of

    grads:layers.0.attn.qkv.weight    a tensor of a digest group, by the name in its records
    grads:*                           every one whose name matches; a star stands for any text
    layers.1.attn:output[1]           a row of taps

Buffers never move and are made before anything is captured, so a graph may hold the copying. On
CUDA they lie in a memory pool of their own: the program's tensors keep their addresses.

    rank's tensor [4, 6] --a box of it [2, 6] at (2, 0)--> of the whole [16, 6], at (10, 0)

What branches of layers return (`layers.1.attn:output[1]`) is a box of all tokens of the microbatch
over the ranks of the data, [B * dp, T, H]; other rows are the rank's own.
"""

import contextlib
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_core.checkpoint.state import Piece, plain_name
from fsdp_core.config import ConfigError, TapPattern, TrainConfig, tap_pattern
from fsdp_core.dispatch import tensors_in
from fsdp_core.fsdp.param_group import ParamGroup
from fsdp_core.graph.digest import NUM_COLUMNS, NUM_LANES, Digester, digest_tensors, empty_rows
from fsdp_core.graph.digest_torch import INT_OF_SIZE
from fsdp_core.parallel.context import split
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import Stretch, named_stretches

NEVER = -1
"""Place of a row that no call has written in this step."""
PLACE_COLUMN = NUM_COLUMNS
_FOLD = 0x01000193
"""Odd, so that what was folded stays in all bits: a row times this plus the next, modulo 2**32."""
MOST_KINDS = 64
"""Shapes whose plans are kept; the longest unused goes. What a graph has captured stays."""

# ---- copies


class SnapshotArena:
    """Memory for snapshots, up to a number of bytes."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        self._max_bytes, self._used_bytes, self._device = max_bytes, 0, device
        self._pool = torch.cuda.MemPool() if device.type == "cuda" else None

    def zeros(self, name: str, num_bytes: int) -> Tensor:
        """A buffer of bytes; `ValueError` if there is no room for it."""
        self._used_bytes += num_bytes
        if self._used_bytes > self._max_bytes:
            raise ValueError(
                f"Expected copies of at most {self._max_bytes} bytes on a rank, got "
                f"{self._used_bytes} with {name}; name fewer tensors, or allow more."
            )
        inside: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self._pool is not None:
            inside = torch.cuda.use_mem_pool(self._pool, self._device)
        with inside:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)


def _bits_like(tensor: Tensor, memory: Tensor) -> Tensor:
    """The first bytes of `memory` in the shape of `tensor`, as integers of its elements' size."""
    return memory[: tensor.nbytes].view(INT_OF_SIZE[tensor.itemsize]).view(tensor.shape)


class TensorCopies:
    """Copies of tensors of fixed names, shapes and dtypes."""

    def __init__(self, named: Mapping[str, Tensor], arena: SnapshotArena) -> None:
        self._dtypes = {name: tensor.dtype for name, tensor in named.items()}
        self.buffers = {n: _bits_like(t, arena.zeros(n, t.nbytes)) for n, t in named.items()}

    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy those of its names; device work alone."""
        with torch.no_grad():
            for name, tensor in named:
                if (buffer := self.buffers.get(name)) is not None:
                    buffer.copy_(tensor.detach().view(buffer.dtype))

    def read(self) -> Iterator[tuple[str, Tensor]]:
        for name, buffer in self.buffers.items():
            yield name, buffer.view(self._dtypes[name])


@dataclass(frozen=True)
class _CallBuffers:
    """Copies of the tensors of one call of certain shapes; `written` says, on the device, if so."""

    dtypes: list[torch.dtype]
    buffers: list[Tensor]
    written: Tensor


class CallCopies:
    """Copies of the tensors of certain calls in a step. Calls of other shapes share the memory of
    their row, which at least doubles when it grows. `wanted`: names of rows, by the number of the
    tap and of the call.
    """

    def __init__(self, wanted: Mapping[tuple[int, int], str], arena: SnapshotArena) -> None:
        self._names, self._arena = dict(wanted), arena
        self._kinds: dict[tuple[int, int], dict[Any, _CallBuffers]] = {row: {} for row in wanted}
        self._memory: dict[tuple[tuple[int, int], int], list[Tensor]] = {}

    def begin(self) -> None:
        for kinds in self._kinds.values():
            for kind in kinds.values():
                kind.written.zero_()

    def record(self, tap: int, seen: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of a call into each wanted row whose turn it is. `seen`: calls of the
        tap before this one: integer scalar on the device.
        """
        signature = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        for row, kinds in self._kinds.items():
            if row[0] != tap:
                continue
            if signature not in kinds:
                kinds[signature] = self._new_kind(row, tensors)
            hit = seen == row[1]
            for buffer, tensor in zip(kinds[signature].buffers, tensors, strict=True):
                buffer.copy_(torch.where(hit, tensor.view(buffer.dtype), buffer))
            kinds[signature].written.logical_or_(hit)

    def _new_kind(self, row: tuple[int, int], tensors: Sequence[Tensor]) -> _CallBuffers:
        buffers = [_bits_like(t, self._memory_of(row, i, t.nbytes)) for i, t in enumerate(tensors)]
        written = self._arena.zeros(self._names[row], 1).view(torch.bool)[0]
        return _CallBuffers([tensor.dtype for tensor in tensors], buffers, written)

    def _memory_of(self, row: tuple[int, int], part: int, num_bytes: int) -> Tensor:
        made = self._memory.setdefault((row, part), [])
        if not made or made[-1].numel() < num_bytes:
            # The old one stays: a graph may write there.
            size = max(num_bytes, 2 * made[-1].numel()) if made else num_bytes
            made.append(self._arena.zeros(self._names[row], size))
        return made[-1]

    def read(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Names and tensors of rows that were written in this step; waits for the device."""
        for row, kinds in self._kinds.items():
            for kind in kinds.values():
                if bool(kind.written):
                    pairs = zip(kind.buffers, kind.dtypes, strict=True)
                    yield self._names[row], [buffer.view(dtype) for buffer, dtype in pairs]

    def tensors(self) -> Iterator[Tensor]:
        """Everything that a captured call reads or writes beside its arguments."""
        for made in self._memory.values():
            yield from made
        for kinds in self._kinds.values():
            yield from (kind.written for kind in kinds.values())


# ---- taps


@dataclass(frozen=True)
class Tap:
    """What to watch: a module by its name, and `input`, `output` or `gradient`. `stage` is that of
    the pipeline, for whoever puts ranks in the order of the data.
    """

    name: str
    module: nn.Module
    kind: str
    stage: int = 0


class Taps:
    """Watches modules from now on.

    calls: rows of each tap: how often its module is called in a step, and one more for calls past
        those.
    device: of the tensors; they are digested on the stream that computes them, one for all.
    names: of the rows, `layers.3.attn:output[1]`, each tap's `calls` together.
    stages: of the rows.
    rows: int32 [taps * calls, 6]: the digest's five columns, and the place in the step.
    calls_seen: int32 [taps], calls since `begin`.
    copies: of what goes through some of the taps.
    """

    def __init__(self, taps: Sequence[Tap], calls: int, device: torch.device) -> None:
        self._taps, self.calls, self.device = tuple(taps), calls, device
        self.copies: CallCopies | None = None
        self.names = [f"{t.name}:{t.kind}[{i}]" for t in self._taps for i in range(calls)]
        self.stages = [t.stage for t in self._taps for _ in range(calls)]
        blank = torch.zeros(len(self.names), NUM_COLUMNS + 1, dtype=torch.int32)
        blank[:, PLACE_COLUMN] = NEVER
        self._blank = blank.to(device)
        self.rows = self._blank.clone()
        self.calls_seen = torch.zeros(len(self._taps), dtype=torch.int32, device=device)
        self._clock = torch.zeros(1, dtype=torch.int32, device=device)
        self._numbers = torch.arange(calls, dtype=torch.int32).to(device)[:, None]
        self._is_last = self._numbers == calls - 1
        fold = [[_FOLD] * NUM_LANES + [0, 1], [1] * NUM_COLUMNS + [0]]
        self._keep, self._add = torch.tensor(fold, dtype=torch.int32).to(device)[:, None].unbind()
        self._digests: dict[tuple[Any, ...], _CallDigest] = {}
        for module in dict.fromkeys(tap.module for tap in self._taps):
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
        if self.copies is not None:
            self.copies.begin()

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that live on and that a captured tap reads or writes, by name."""
        if not self._taps:
            return
        yield from {
            "taps": self.rows, "taps blank": self._blank, "taps calls seen": self.calls_seen,
            "taps clock": self._clock, "taps numbers": self._numbers, "taps last": self._is_last,
            "taps fold": self._keep,
        }.items()  # fmt: skip
        for number, digest in enumerate(self._digests.values()):
            for index, tensor in enumerate(digest.tensors()):
                yield f"taps scratch {index} of kind {number}", tensor
        for index, tensor in enumerate(() if self.copies is None else self.copies.tensors()):
            yield f"taps copy {index}", tensor

    def _watch(self, module: nn.Module) -> None:
        mine = {tap.kind: i for i, tap in enumerate(self._taps) if tap.module is module}
        original: Callable[..., Any] = module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return original(*args, **kwargs)
            again = torch._C._current_graph_task_id() != -1  # recomputed in a backward pass
            if "input" in mine and not again:
                self._record(mine["input"], _tensors((args, kwargs), open_records=False))
            result = original(*args, **kwargs)
            if "output" in mine and not again:
                self._record(mine["output"], _tensors(result))
            if "gradient" in mine:  # that of a reentrant checkpoint comes to what is recomputed
                first = next((t for t in _tensors(result) if t.requires_grad), None)
                if first is not None:
                    first.register_hook(lambda grad: self._record(mine["gradient"], [grad]))
            return result

        # The instance's own, which `Module.__call__` finds first.
        module._call_impl = call  # type: ignore[method-assign]

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
            if self.copies is not None:
                self.copies.record(tap, seen[0], tensors)
            seen.add_(1)
            self._clock.add_(1)

    def _digest_of(self, tap: int, tensors: list[Tensor]) -> "_CallDigest":
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
                digest = _CallDigest(tensors, self.device)
            except ValueError as error:
                raise ValueError(
                    f"Expected plain tensors in {self.tap_names[tap]}, got others; leave it out of "
                    f"taps: {error}"
                ) from error
            if len(self._digests) >= MOST_KINDS:
                loose = (key for key, other in self._digests.items() if not other.is_captured)
                self._digests.pop(next(loose, ()), None)
        digest.is_captured |= capturing
        self._digests[signature] = digest  # the latest used is last
        return digest


def _tensors(value: Any, *, open_records: bool = True) -> list[Tensor]:
    """Those of a call. Dataclasses among arguments describe data, as plans do: they stay shut."""
    return [tensor for _, tensor in tensors_in(value, open_records=open_records)]


class _CallDigest:
    """The digest of a list of tensors of fixed shapes as one row; on CUDA by way of a copy. A
    graph's activations lie where no table can be prepared for, the copies stay where they are.
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
        yield from (*self._copies, self._each, self._row)
        yield from (*self._digester.scratch(), *self._together.scratch())


def open_taps(
    config: TrainConfig, stages: Sequence[nn.Module], pp: Axis, device: torch.device
) -> Taps:
    """Watch what `config.taps` means of these stages; collective where there are any
    (`ConfigError`: a pattern that means no module on any rank).
    """
    patterns = [tap_pattern(text) for text in config.taps]
    modules = [
        (name, module, chunk * pp.size + pp.rank)
        for chunk, stage in enumerate(stages)
        for name, module in stage.named_modules()
        if name and not isinstance(module, nn.ModuleDict | nn.ModuleList)
    ]
    chosen = [
        [Tap(name, module, each.kind, at) for name, module, at in modules if each.matches(name)]
        for each in patterns
    ]
    if patterns:
        _require_found(patterns, chosen, [name for name, _, _ in modules], device)
    # Two patterns may mean one module; it is looked into once.
    taps = {(tap.name, tap.kind): tap for each in chosen for tap in each}
    # A row more than a module is called by itself: calls of one that others share go on into it.
    return Taps(list(taps.values()), config.microbatches + 1, device)


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


# ---- snapshots, and where they lie in the whole model


@dataclass(frozen=True)
class GlobalBox:
    """A box of a rank's tensor, and where it lies in a tensor of the whole model.

    name, shape: of the whole tensor.
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
class Snapshot:
    """One tensor of a rank as it was digested.

    name: as it was asked for, without stars.
    part: which tensor of a row of taps, which may be of several; else 0.
    tensor: on the CPU.
    places: where it lies in the whole model; of parameters and what has their shape.
    as_digested: whether the copy gives the digest that the step recorded. It does not where
        something else wrote the tensor between the two, or where a row is of several calls.
    """

    name: str
    part: int
    tensor: torch.Tensor
    places: tuple[GlobalBox, ...]
    as_digested: bool


RowPlaces = Callable[[str, torch.Tensor], tuple[GlobalBox, ...]]


class Snapshots:
    """Copies of the tensors that match `names`, overwritten by every step.

    names: as in the module's docstring; those that this rank does not have are passed over.
    max_bytes: of all copies on this rank; `ValueError` if they would take more.
    digested: names and tensors of each group.
    copies: what is taken with the digests of a group; entered here.
    places: of every parameter by its name; `places_of` gives them.
    row_places: of a tensor of a row of taps, by the row's name.
    """

    def __init__(
        self,
        names: Sequence[str],
        max_bytes: int,
        *,
        digested: Mapping[str, tuple[list[str], list[torch.Tensor]]],
        copies: dict[str, TensorCopies],
        taps: Taps,
        places: Iterable[tuple[str, tuple[GlobalBox, ...]]],
        row_places: RowPlaces = lambda name, tensor: (),
    ) -> None:
        self._digested, self._copies, self._taps = digested, copies, taps
        self._places, self._row_places = dict(places), row_places
        arena = SnapshotArena(max_bytes, taps.device)
        for group, (known, tensors) in digested.items():
            named = zip(known, tensors, strict=True)
            wanted = {n: tensor for n, tensor in named if matches(names, f"{group}:{n}")}
            if wanted:
                copies[group] = TensorCopies(wanted, arena)
        rows = enumerate(taps.names)
        wanted_rows = {divmod(i, taps.calls): name for i, name in rows if matches(names, name)}
        if wanted_rows:
            taps.copies = CallCopies(wanted_rows, arena)

    def read(self, digests: Mapping[str, torch.Tensor]) -> list[Snapshot]:
        """Those of the step that has just been issued; `digests` are its own. It waits."""
        return [*self._read_state(digests), *self._read_rows()]

    def _read_state(self, digests: Mapping[str, torch.Tensor]) -> Iterator[Snapshot]:
        for group, copies in self._copies.items():
            rows = dict(zip(self._digested[group][0], digests[group].cpu(), strict=True))
            for name, copy in copies.read():
                tensor, again = copy.cpu(), empty_rows(1, "cpu")
                digest_tensors([tensor], again)
                same = torch.equal(again[0], rows[name])
                yield Snapshot(f"{group}:{name}", 0, tensor, self._places_of(name, tensor), same)

    def _read_rows(self) -> Iterator[Snapshot]:
        if self._taps.copies is None:
            return
        rows = dict(zip(self._taps.names, self._taps.rows.cpu(), strict=True))
        for name, parts in self._taps.copies.read():
            tensors = [part.cpu() for part in parts]
            row = _CallDigest(tensors, torch.device("cpu"))(tensors)[0]
            same = torch.equal(row, rows[name][:NUM_COLUMNS])
            for number, tensor in enumerate(tensors):
                yield Snapshot(name, number, tensor, self._row_places(name, tensor), same)

    def _places_of(self, name: str, tensor: torch.Tensor) -> tuple[GlobalBox, ...]:
        stem, suffix = name, ""
        if name not in self._places:
            stem, dot, last = name.rpartition(".")
            suffix = dot + last
        if stem not in self._places:
            # Of no parameter: experts' biases and counters are the same on every rank.
            zeros = (0,) * tensor.dim()
            return (GlobalBox(name, tuple(tensor.shape), zeros, zeros, tuple(tensor.shape)),)
        return tuple(replace(each, name=each.name + suffix) for each in self._places[stem])


def branch_places(config: TrainConfig, axes: Axes) -> RowPlaces:
    """Places of what branches of layers return; of packs, which layouts cut otherwise, none."""
    if config.parallel.dynamic_cp:
        return lambda name, tensor: ()
    seq = config.model.seq
    mine = split(torch.arange(seq), 0, axes.cp.size, axes.cp.rank)
    if axes.tp.cuts_sequence:
        mine = mine.chunk(axes.tp.size)[axes.tp.rank]
    positions = mine.tolist()
    starts = [i for i, at in enumerate(positions) if not i or at != positions[i - 1] + 1]
    runs = list(zip(starts, [*starts[1:], len(positions)], strict=True))
    rank = axes.dp_outer.rank * axes.dp.size + axes.dp.rank

    def places(name: str, tensor: torch.Tensor) -> tuple[GlobalBox, ...]:
        layer, _, branch = name.partition("[")[0].removeprefix("layers.").partition(".")
        if not layer.isdecimal() or branch not in ("attn:output", "mlp:output"):
            return ()
        if tensor.dim() != 3 or tensor.shape[1] != len(positions):
            return ()
        rows, _, width = tensor.shape
        whole = (rows * axes.dp_outer.size * axes.dp.size, seq, width)
        return tuple(
            GlobalBox(
                name, whole, (rank * rows, positions[begin], 0), (0, begin, 0),
                (rows, end - begin, width),
            )
            for begin, end in runs
        )  # fmt: skip

    return places


def matches(names: Iterable[str], name: str) -> bool:
    """Whether a name is one of `names`, whose stars stand for any text."""
    return any(_pattern(each).fullmatch(name) for each in names)


@functools.cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part) for part in text.split("*")), re.DOTALL)


def places_of(
    stages: Sequence[nn.Module], groups: Iterable[ParamGroup]
) -> Iterator[tuple[str, tuple[GlobalBox, ...]]]:
    """Of every parameter by its name, of which this rank may have no row at all."""
    stretches = {
        plain_name(name): each for stage in stages for name, each in named_stretches(stage).items()
    }
    for group in groups:
        for name, parameter in zip(group.names, group.sharded, strict=True):
            made_of = stretches.get(plain_name(name), (Stretch(name),))
            yield name, tuple(p for each in made_of for p in _place(parameter, each))


def _place(parameter: torch.Tensor, stretch: Stretch) -> Iterator[GlobalBox]:
    piece = Piece.of(parameter, stretch)
    local = Piece.of(parameter, Stretch("")).local
    box = piece.local
    for chunk in piece.__create_chunk_list__():
        start, at = int(box.storage_offset() - local.storage_offset()), list[int]()
        for stride in local.stride():
            index, start = divmod(start, stride)
            at.append(index)
        sizes, whole = tuple(chunk.sizes), tuple(piece.shape)
        yield GlobalBox(plain_name(stretch.name), whole, tuple(chunk.offsets), tuple(at), sizes)
