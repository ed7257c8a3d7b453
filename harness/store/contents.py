"""Contents of tensors that a run has kept: one file a rank, written whole or not at all.

    rank0.contents    {"run": ..., "step": 3, "tensors": [{"name": ..., "dtype": ...}, ...], ...}
                      a line of JSON, then the bytes of all tensors

What is damaged or missing is left out and named in `problems`.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.records import Json, KeepSpec, RecordError, RunSpec, dumps
from harness.store.files import parsed, read_plain, told, write_atomic
from harness.store.folder import changed_files

ITEM_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "bool": 1, "uint8": 1,
    "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
}  # fmt: skip
"""Bytes of an element, by the name of its dtype; bytes are in little-endian order."""
MAX_INDEX_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Place(Json):
    """A box of `sizes` at `local_offsets` of a rank's tensor, and where it lies in the tensor of
    the whole model, which has this `name` and `shape`: at `offsets`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KeptTensor(Json):
    """What the index says of one tensor of a rank.

    `name` is that of its records, with the group; `part` the tensor of a row of taps, which may be
    of several; `dtype` a key of `ITEM_BYTES`. `as_digested`: these bytes give the digest that the
    step recorded. `places`: where it lies in the whole model; none for what is the rank's own.
    """

    name: str
    part: int
    dtype: str
    shape: tuple[int, ...]
    as_digested: bool
    places: tuple[Place, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Index(Json):
    run: str
    rank: int
    step: int
    tensors: tuple[KeptTensor, ...]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """One tensor of one rank, with its bytes, row-major."""

    about: KeptTensor
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a run has kept of `step` (-1: nothing was to be kept), by rank."""

    step: int
    ranks: tuple[tuple[Loaded, ...], ...]
    problems: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of tensors that any rank has, in the order of ranks and their indexes."""
        return tuple(dict.fromkeys(each.about.name for rank in self.ranks for each in rank))

    def held(self, name: str) -> list[tuple[int, Loaded]]:
        return [(n, e) for n, rank in enumerate(self.ranks) for e in rank if e.about.name == name]


def contents_path(folder: Path, rank: int) -> Path:
    """Where the contents that a rank has kept lie."""
    return folder / f"rank{rank}.contents"


def write_contents(
    folder: Path, run: str, rank: int, step: int, tensors: Iterable[tuple[KeptTensor, bytes]]
) -> None:
    """Write a rank's file, whole or not at all (`Infrastructure`: the disk refused)."""
    listed = list(tensors)
    index = _Index(run=run, rank=rank, step=step, tensors=tuple(about for about, _ in listed))
    head = dumps(index).encode() + b"\n"
    write_atomic(contents_path(folder, rank), head + b"".join(data for _, data in listed))


def read_contents(folder: Path, spec: RunSpec) -> Contents:
    """What the run in `folder` has kept, in whatever state its files are."""
    keep = spec.keep
    if keep is None:
        return Contents(step=-1, ranks=(), problems=("the run was not asked to keep anything",))
    ranks, problems, changed = [], list[str](), changed_files(folder)
    for rank in range(spec.world_size):
        path = contents_path(folder, rank)
        held: tuple[Loaded, ...] = ()
        try:
            if path.name in changed:
                raise RecordError(changed[path.name])
            held = _read_rank(path, spec.key, rank, keep)
        except FileNotFoundError:
            problems.append(f"rank {rank} kept nothing: it did not end step {keep.step}")
        except (OSError, RecordError) as error:
            problems.append(f"{path.name}: {told(error).removeprefix(f'{path.name}: ')}")
        ranks.append(held)
    names = {each.about.name for rank in ranks for each in rank}
    problems += [
        f"no rank has kept {name}: expected a tensor of its records, or a tap of step {keep.step}"
        for name in keep.names
        if "*" not in name and name not in names
    ]
    if not names and not problems:
        problems.append(f"no rank has a tensor that fits {', '.join(keep.names)}")
    return Contents(step=keep.step, ranks=tuple(ranks), problems=tuple(problems))


def _read_rank(path: Path, key: str, rank: int, keep: KeepSpec) -> tuple[Loaded, ...]:
    head, _, body = read_plain(path, keep.max_bytes + MAX_INDEX_BYTES).partition(b"\n")
    index = _Index.from_json(parsed(head, path.name))
    expected, got = (key, rank, keep.step), (index.run, index.rank, index.step)
    if got != expected:
        raise RecordError(f"run, rank and step: expected {expected}, got {got}")
    if any(about.dtype not in ITEM_BYTES for about in index.tensors):
        raise RecordError(f"dtype: expected one of {', '.join(ITEM_BYTES)}")
    sizes = (math.prod(each.shape) * ITEM_BYTES[each.dtype] for each in index.tensors)
    ends = [0, *itertools.accumulate(sizes)]
    if len(body) != ends[-1]:
        raise RecordError(f"expected {ends[-1]} bytes of tensors, got {len(body)}")
    parts = zip(index.tensors, itertools.pairwise(ends), strict=True)
    return tuple(Loaded(about=about, data=body[first:last]) for about, (first, last) in parts)
