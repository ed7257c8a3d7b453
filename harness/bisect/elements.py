"""Contents that runs have kept: the first element that differs, and whole tensors of their pieces.

    bytes of both runs, rank by rank  ->  flat places that differ
      -> their places in the whole tensor (`contents.Place`)  ->  the first of all ranks

Bits are compared as integers: -0.0 is not 0.0, and NaNs with other payloads differ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.bisect.found import Element, Location
from harness.records import DIGEST_GROUPS, CaseSpec
from harness.store import RunFolder
from harness.store.contents import ITEM_BYTES, Contents, KeptTensor, Loaded, Place, read_contents

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]


class Format(NamedTuple):
    """A format of floating-point numbers with a sign bit: exponent and mantissa, bits of each.

    `special` says which patterns are no finite numbers: "ieee" ones of the highest exponent, "fn"
    all ones alone (a NaN), "fnuz" the pattern of minus zero alone (a NaN).
    """

    exponent: int
    mantissa: int
    special: Literal["ieee", "fn", "fnuz"] = "ieee"


FORMATS = {
    "float64": Format(11, 52), "float32": Format(8, 23), "bfloat16": Format(8, 7),
    "float16": Format(5, 10), "float8_e5m2": Format(5, 2), "float8_e4m3fn": Format(4, 3, "fn"),
    "float8_e4m3fnuz": Format(4, 3, "fnuz"), "float8_e5m2fnuz": Format(5, 2, "fnuz"),
}  # fmt: skip
NUMBERS = ("float64", "float32", "bfloat16", "float16")
"""Types whose elements become numbers in whole tensors; others are left out of these."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What comparing one tensor of two runs has shown.

    Attributes:
        tensor: name of the whole tensor that holds the first differing element, as the model
            without any sharding has it; the name asked for where nothing differs.
        rank: that holds it, the lowest of those that do.
        ranks: all ranks whose part differs anywhere.
        element: the first that differs; None where `message` says why there is none.
        notes: what makes the answer doubtful, a sentence each.
    """

    tensor: str
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    element: Element | None = None
    message: str
    notes: tuple[str, ...] = ()


class _First(NamedTuple):
    """The first element that differs on one rank; tuples are ordered as the whole tensor is."""

    order: tuple[int, ...]
    rank: int
    part: int
    name: str
    at: tuple[int, ...]
    local: int


def compare(reference: Contents, candidate: Contents, name: str) -> Compared:
    """The first differing element of a tensor, in the order of the whole tensor, over all ranks.

    Of what lies nowhere in the model, as a row of taps, ranks are looked at in their order and
    `index` is that in the rank's own tensor.

    Args:
        reference, candidate: kept at the same step of runs on the same layout.
        name: of a tensor in both.
    """
    runs = {"reference": reference, "candidate": candidate}
    notes = [f"{run}: {problem}" for run, kept in runs.items() for problem in kept.problems]
    if reference.step != candidate.step:
        message = f"kept at other steps: {reference.step} and {candidate.step}"
        return Compared(tensor=name, message=message)
    held = {
        run: {(rank, each.about.part): each for rank, each in kept.held(name)}
        for run, kept in runs.items()
    }
    for run, loaded in held.items():
        bad = dict.fromkeys(str(rank) for (rank, _), e in loaded.items() if not e.about.as_digested)
        if bad:
            notes.append(
                f"the copy of {name} in the {run} does not give the digest of its step on rank "
                f"{', '.join(bad)}: it was written between the two, or is of one of several calls"
            )
    ours, theirs = held.values()
    refusals, different = list[str](), dict[tuple[int, int], Indices]()
    for key in sorted(ours.keys() | theirs.keys()):
        why = _why_unlike(key, name, *(loaded.get(key) for loaded in held.values()))
        if why:
            refusals.append(why)
        elif (places := np.flatnonzero(_bits(ours[key]) != _bits(theirs[key]))).size:
            different[key] = places
    if not different:
        same = f"{name} has the same bits in both runs on every rank: the difference did not come"
        is_known = len(refusals) < len(ours.keys() | theirs.keys())
        message = f"{same} back" if is_known else f"no rank has kept {name} in both runs"
        message = "; ".join(refusals) or message
        return Compared(tensor=name, message=message, notes=tuple(notes))
    first = min(_first(key, ours[key].about, places) for key, places in different.items())
    key = first.rank, first.part
    e = _element(ours[key], theirs[key], first, different[key])
    return Compared(
        tensor=first.name, rank=first.rank, ranks=tuple(sorted({rank for rank, _ in different})),
        element=e, notes=(*notes, *refusals),
        message=f"{first.name}[{', '.join(map(str, e.index))}] on rank {first.rank}: "
        f"{e.reference} ({e.reference_bits}) became {e.candidate} ({e.candidate_bits})",
    )  # fmt: skip


def _bits(loaded: Loaded) -> npt.NDArray[np.unsignedinteger]:
    return np.frombuffer(loaded.data, f"<u{ITEM_BYTES[loaded.about.dtype]}")


def _why_unlike(key: tuple[int, int], name: str, a: Loaded | None, b: Loaded | None) -> str:
    """Why the parts that two runs have of a tensor cannot be compared; "" if they can."""
    rank, part = key
    called = f"tensor {part} of {name}" if part else name
    if a is None or b is None:
        return f"rank {rank} has no {called} in the {'candidate' if b is None else 'reference'}"
    shown = [f"{each.about.dtype} {list(each.about.shape)}" for each in (a, b)]
    if shown[0] == shown[1]:
        return ""
    return f"{called} on rank {rank} is {shown[0]} in the reference and {shown[1]} in the candidate"


def _first(key: tuple[int, int], about: KeptTensor, different: Indices) -> _First:
    """The first in the whole tensor of the elements that differ on one rank."""
    found = []
    axes = np.unravel_index(different, about.shape) if about.shape else ()
    for number, place in enumerate(about.places):
        inside, whole = np.ones(different.shape, bool), np.zeros(different.shape, np.int64)
        for at, first, size, offset, length in zip(
            axes, place.local_offsets, place.sizes, place.offsets, place.shape, strict=True
        ):
            inside &= (at >= first) & (at < first + size)
            whole = whole * length + (at - first + offset)
        if inside.any():
            chosen = np.flatnonzero(inside)[np.argmin(whole[inside])]
            flat, local = int(whole[chosen]), int(different[chosen])
            index = _unravelled(flat, place.shape)
            found.append(_First((number, flat), *key, place.name, index, local))
    # Of none of the model's, it is the rank's own: ranks in their order, then parts.
    local = int(different[0])
    own = _First((*key, local), *key, about.name, _unravelled(local, about.shape), local)
    return min(found, default=own)


def _unravelled(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(flat, shape)) if shape else ()


def _element(ours: Loaded, theirs: Loaded, first: _First, different: Indices) -> Element:
    dtype, shape = ours.about.dtype, ours.about.shape
    axes = np.unravel_index(different, shape) if shape else ()
    a, b = int(_bits(ours)[first.local]), int(_bits(theirs)[first.local])
    width = 2 * ITEM_BYTES[dtype]
    return Element(
        index=first.at, local=first.local, dtype=dtype,
        reference_bits=f"{a:0{width}x}", candidate_bits=f"{b:0{width}x}",
        reference=shown(a, dtype), candidate=shown(b, dtype),
        num_different=int(different.size), numel=math.prod(shape), ulps=ulps(a, b, dtype),
        shape=shape, lows=tuple(int(axis.min()) for axis in axes),
        highs=tuple(int(axis.max()) for axis in axes),
    )  # fmt: skip


def shown(bits: int, dtype: str) -> str:
    """A stored number for people: as `repr` has it."""
    if dtype == "bool":
        return repr(bool(bits)) if bits < 2 else f"a bool of {bits}"
    if dtype == "float8_e8m0fnu":
        return "nan" if bits == 0xFF else repr(math.ldexp(1.0, bits - 127))
    if dtype not in FORMATS:
        size = ITEM_BYTES[dtype]
        return repr(int.from_bytes(bits.to_bytes(size, "little"), "little", signed=dtype[0] == "i"))
    number = value(bits, dtype)
    if dtype == "float32" and math.isfinite(number):
        return repr(float(str(np.float32(number))))
    return repr(number)


def value(bits: int, dtype: str) -> float:
    """The number that a pattern of one of `FORMATS` stands for."""
    form = FORMATS[dtype]
    width, top = form.exponent + form.mantissa, (1 << form.exponent) - 1
    sign = -1.0 if bits >> width else 1.0
    exponent, mantissa = (bits >> form.mantissa) & top, bits & ((1 << form.mantissa) - 1)
    if form.special == "ieee" and exponent == top:
        return math.nan if mantissa else sign * math.inf
    all_ones = (1 << width) - 1
    if (form.special == "fn" and bits & all_ones == all_ones) or (
        form.special == "fnuz" and bits == 1 << width
    ):
        return math.nan
    bias = (1 << (form.exponent - 1)) - (form.special != "fnuz")
    mantissa += (1 << form.mantissa) if exponent else 0
    return sign * math.ldexp(mantissa, max(exponent, 1) - bias - form.mantissa)


def ulps(a: int, b: int, dtype: str) -> int | None:
    """Steps between two patterns on the grid of their dtype; None for NaN, or other signs."""
    if dtype not in FORMATS:
        return None if dtype in ("bool", "float8_e8m0fnu") else abs(a - b)
    signs = {each >> (FORMATS[dtype].exponent + FORMATS[dtype].mantissa) for each in (a, b)}
    is_nan = math.isnan(value(a, dtype)) or math.isnan(value(b, dtype))
    return None if len(signs) > 1 or is_nan else abs(a - b)


# --- questions --------------------------------------------------------------------------------


def kept_name(found: Location) -> str:
    """What to keep, as `KeepSpec.names` has it; "" where nothing can be kept.

    Moments of a tensor are told by its name alone: both are kept.
    """
    if found.quantity.startswith("taps."):
        is_numbered = found.tensor.endswith("]") or found.microbatch is None
        name = found.tensor if is_numbered else f"{found.tensor}[{found.microbatch}]"
        return "" if found.microbatch is None else name
    if found.quantity not in DIGEST_GROUPS:
        return ""
    star = "*" if found.quantity == "optim" and found.tensor != "step_count" else ""
    return f"{found.quantity}:{found.tensor}{star}"


def with_element(found: Location, question: CaseSpec, folder: RunFolder) -> Location:
    """The place with its first differing element, or with the reason why there is none."""
    ours, theirs = (
        read_contents(folder.run_folder(spec.key), spec)
        for spec in (question.reference, question.candidate)
    )
    named = dict.fromkeys((*ours.names, *theirs.names)) or {kept_name(found): None}
    answers = [compare(ours, theirs, name) for name in named]
    best = next((each for each in answers if each.element is not None), answers[0])
    found = replace(found, unknown=(*found.unknown, *best.notes))
    if best.element is None:
        return found.saying(unknown=f"element: {best.message}")
    return found.saying(best.message, element=best.element)


# --- whole tensors, of the pieces that ranks have kept ----------------------------------------


@dataclass(frozen=True)
class Holding:
    """One rank's box of a whole tensor."""

    rank: int
    place: Place
    loaded: Loaded

    def has(self, index: tuple[int, ...]) -> bool:
        """Whether an element of the whole tensor is in it."""
        boxes = zip(index, self.place.offsets, self.place.sizes, strict=True)
        return all(first <= at < first + size for at, first, size in boxes)

    def local(self, index: tuple[int, ...]) -> int:
        """Flat place of an element of the whole tensor in what the rank holds."""
        place, shape = self.place, self.loaded.about.shape
        moved = zip(index, place.offsets, place.local_offsets, strict=True)
        own = tuple(at - first + mine for at, first, mine in moved)
        return int(np.ravel_multi_index(own, shape)) if shape else 0

    @property
    def bits(self) -> Bits:
        """The stored bits of the box."""
        whole = _bits(self.loaded).reshape(self.loaded.about.shape)
        return whole[_box(self.place.local_offsets, self.place.sizes)].astype(np.uint64)


@dataclass
class Whole:
    """A tensor of the whole model.

    Attributes:
        name: `grads:layers.0.attn.attention.wq.weight`.
        dtype: as stored.
        bits: of every element, by the lowest rank that has it.
        covered: whether any rank has an element.
        holdings: every rank's box.
        disagreeing: by rank that has other bits than a lower one has, the first such place.
    """

    name: str
    dtype: str
    bits: Bits
    covered: npt.NDArray[np.bool_]
    holdings: list[Holding] = field(default_factory=list)
    disagreeing: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_missing(self) -> int:
        """Elements that no rank has."""
        return int(self.covered.size - self.covered.sum())

    @property
    def values(self) -> Floats:
        """As numbers."""
        if self.dtype == "bfloat16":
            wide = (self.bits << np.uint64(16)).astype(np.uint32)
            return wide.view(np.float32).astype(np.float64)
        size = ITEM_BYTES[self.dtype]
        return self.bits.astype(f"<u{size}").view(f"<f{size}").astype(np.float64)

    def ranks_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that have an element."""
        return tuple(dict.fromkeys(held.rank for held in self.holdings if held.has(index)))

    def add(self, held: Holding) -> None:
        """Put a rank's box in its place."""
        box = _box(held.place.offsets, held.place.sizes)
        mine, seen = held.bits, self.covered[box]
        other = seen & (self.bits[box] != mine)
        if other.any():
            at = np.argwhere(other)[0] if other.ndim else ()
            index = tuple(int(a) + b for a, b in zip(at, held.place.offsets, strict=True))
            self.disagreeing.setdefault(held.rank, index)
        self.bits[box] = np.where(seen, self.bits[box], mine)
        self.covered[box] = True
        self.holdings.append(held)


def whole_tensors(contents: Contents) -> Mapping[str, Whole]:
    """Every tensor of the model that some rank has kept a piece of, of floating-point numbers."""
    found: dict[str, Whole] = {}
    pieces = [(rank, loaded) for rank, each in enumerate(contents.ranks) for loaded in each]
    for rank, loaded in pieces:
        about = loaded.about
        for place in about.places if about.dtype in NUMBERS else ():
            # A row of taps has its kind in its name.
            name = f"{about.name.partition(':')[0]}:{place.name}"
            name = place.name if ":" in place.name else name
            if min(place.sizes, default=1):
                empty = np.zeros(place.shape, np.uint64), np.zeros(place.shape, np.bool_)
                whole = found.setdefault(name, Whole(name, about.dtype, *empty))
                whole.add(Holding(rank, place, loaded))
    return found


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
