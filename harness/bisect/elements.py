"""Contents that runs have kept: the first element that differs, and whole tensors of their pieces.

    bytes of both legs, rank by rank  ->  flat places that differ
      -> their places in the whole tensor (`contents.Place`)  ->  the first of all ranks

Bits are compared as integers: -0.0 is not 0.0, and NaNs with other payloads differ.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from harness.bisect.found import Element, Location
from harness.records import DIGEST_GROUPS, CaseSpec, KeepSpec, RunSpec
from harness.store import RunFolder
from harness.store.contents import ITEM_BYTES, Contents, KeptTensor, Loaded, Place, read_contents

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Format:
    """A format of floating-point numbers with a sign bit: exponent and mantissa, bits of each.

    `special` says which patterns are no finite numbers: "ieee" ones of the highest exponent, "fn"
    all ones alone (a NaN), "fnuz" the pattern of minus zero alone (a NaN).
    """

    exponent: int
    mantissa: int
    special: str = "ieee"
    bias: int | None = None


FORMATS = {
    "float64": Format(11, 52), "float32": Format(8, 23), "bfloat16": Format(8, 7),
    "float16": Format(5, 10), "float8_e5m2": Format(5, 2), "float8_e4m3fn": Format(4, 3, "fn"),
    "float8_e4m3fnuz": Format(4, 3, "fnuz", 8), "float8_e5m2fnuz": Format(5, 2, "fnuz", 16),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What comparing one tensor of two legs has shown.

    Attributes:
        tensor: name of the whole tensor that holds the first differing element, as the model
            without any sharding has it; the name asked for where nothing differs.
        rank: that holds it, the lowest of those that do.
        ranks: all ranks whose part differs anywhere.
        element: the first that differs; None where `message` says why there is none.
        message: one sentence.
        notes: what makes the answer doubtful, a sentence each.
    """

    tensor: str
    rank: int | None
    ranks: tuple[int, ...]
    element: Element | None
    message: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Pair:
    """One rank's part of the tensor, in both legs."""

    rank: int
    about: KeptTensor
    reference: bytes
    candidate: bytes

    @property
    def different(self) -> Indices:
        """Flat places that differ, rising."""
        kind = np.dtype(f"<u{ITEM_BYTES[self.about.dtype]}")
        a, b = np.frombuffer(self.reference, kind), np.frombuffer(self.candidate, kind)
        return np.flatnonzero(a != b)


def compare(reference: Contents, candidate: Contents, name: str) -> Compared:
    """The first differing element of a tensor, in the order of the whole tensor, over all ranks.

    Of what lies nowhere in the model, as a row of taps, ranks are looked at in their order and
    `index` is that in the rank's own tensor.

    Args:
        reference, candidate: kept at the same step of runs on the same layout.
        name: of a tensor in both.
    """
    notes = tuple(
        f"{leg}: {problem}"
        for leg, contents in (("reference", reference), ("candidate", candidate))
        for problem in contents.problems
    )
    if reference.step != candidate.step:
        message = f"kept at other steps: {reference.step} and {candidate.step}"
        return Compared(tensor=name, rank=None, ranks=(), element=None, message=message)
    pairs, refusals = _pairs(reference, candidate, name)
    notes += tuple(_doubts(reference, candidate, name))
    different = [(pair, found) for pair in pairs if (found := pair.different).size]
    ranks = tuple(dict.fromkeys(pair.rank for pair, _ in different))
    if not different:
        message = "; ".join(refusals) or (
            f"{name} has the same bits in both legs on every rank: the difference did not come back"
            if pairs
            else f"no rank has kept {name} in both legs"
        )
        return Compared(
            tensor=name, rank=None, ranks=(), element=None, message=message, notes=notes
        )
    order, pair, local, whole, index = min(
        (_first(pair, found) for pair, found in different),
        key=lambda each: (each[0], each[1].rank),
    )
    del order
    element = _element(pair, local, index, _of(different, pair))
    shown = ", ".join(map(str, element.index))
    message = (
        f"{whole}[{shown}] on rank {pair.rank}: {element.reference} ({element.reference_bits}) "
        f"became {element.candidate} ({element.candidate_bits})"
    )
    return Compared(
        tensor=whole, rank=pair.rank, ranks=ranks, element=element, message=message,
        notes=notes + tuple(refusals),
    )  # fmt: skip


def _of(different: Iterable[tuple[_Pair, Indices]], pair: _Pair) -> Indices:
    return next(found for each, found in different if each is pair)


def _pairs(reference: Contents, candidate: Contents, name: str) -> tuple[list[_Pair], list[str]]:
    """Parts that both legs have, and a sentence for each that cannot be compared."""
    held = [
        {(rank, each.about.part): each for rank, each in leg.held(name)}
        for leg in (reference, candidate)
    ]
    pairs, refusals = list[_Pair](), list[str]()
    for key in sorted(held[0].keys() | held[1].keys()):
        a, b = held[0].get(key), held[1].get(key)
        if a is None or b is None:
            leg = "candidate" if b is None else "reference"
            refusals.append(f"rank {key[0]} has no {_called(name, key[1])} in the {leg}")
        elif (a.about.shape, a.about.dtype) != (b.about.shape, b.about.dtype):
            refusals.append(
                f"{_called(name, key[1])} on rank {key[0]} is {_shown(a)} in the reference and "
                f"{_shown(b)} in the candidate"
            )
        else:
            pairs.append(_Pair(key[0], a.about, a.data, b.data))
    return pairs, refusals


def _called(name: str, part: int) -> str:
    return f"tensor {part} of {name}" if part else name


def _shown(loaded: Loaded) -> str:
    return f"{loaded.about.dtype} {list(loaded.about.shape)}"


def _doubts(reference: Contents, candidate: Contents, name: str) -> Iterator[str]:
    for leg, contents in (("reference", reference), ("candidate", candidate)):
        bad = [str(rank) for rank, each in contents.held(name) if not each.about.as_digested]
        if bad:
            yield (
                f"the copy of {name} in the {leg} does not give the digest of its step on rank "
                f"{', '.join(dict.fromkeys(bad))}: it was written between the two, or is of one of "
                "several calls"
            )


# --- where ------------------------------------------------------------------------------------

_First = tuple[tuple[int, ...], _Pair, int, str, tuple[int, ...]]
"""Order; pair; flat place in the rank's tensor; name of the whole tensor; index in it."""


def _first(pair: _Pair, different: Indices) -> _First:
    """The first in the whole tensor of the elements that differ on one rank."""
    about = pair.about
    found = [
        ((number, flat), pair, local, place.name, _unravelled(flat, place.shape))
        for number, place in enumerate(about.places)
        for flat, local in _inside(different, about.shape, place)
    ]
    if found:
        return min(found, key=lambda each: each[0])
    # The rank's own: ranks in their order, then parts.
    local = int(different[0])
    order = (pair.rank, about.part, local)
    return order, pair, local, about.name, _unravelled(local, about.shape)


def _inside(different: Indices, shape: tuple[int, ...], place: Place) -> Iterator[tuple[int, int]]:
    """The first element of a box that differs: its flat place in the whole and in the rank's."""
    at = np.unravel_index(different, shape) if shape else ()
    inside = np.ones(different.shape, bool)
    whole = np.zeros(different.shape, np.int64)
    for axis, first, size, offset, length in zip(
        at, place.local_offsets, place.sizes, place.offsets, place.shape, strict=True
    ):
        inside &= (axis >= first) & (axis < first + size)
        whole = whole * length + (axis - first + offset)
    if inside.any():
        chosen = int(np.flatnonzero(inside)[np.argmin(whole[inside])])
        yield int(whole[chosen]), int(different[chosen])


def _unravelled(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


# --- what -------------------------------------------------------------------------------------


def _element(pair: _Pair, local: int, index: tuple[int, ...], different: Indices) -> Element:
    dtype, shape = pair.about.dtype, pair.about.shape
    axes = np.unravel_index(different, shape) if shape else ()
    size = ITEM_BYTES[dtype]
    a, b = (
        int.from_bytes(data[local * size : (local + 1) * size], "little")
        for data in (pair.reference, pair.candidate)
    )
    return Element(
        index=index, local=local, dtype=dtype,
        reference_bits=f"{a:0{2 * size}x}", candidate_bits=f"{b:0{2 * size}x}",
        reference=shown(a, dtype), candidate=shown(b, dtype),
        num_different=int(different.size), numel=math.prod(shape), ulps=ulps(a, b, dtype),
        shape=shape, lows=tuple(int(axis.min()) for axis in axes),
        highs=tuple(int(axis.max()) for axis in axes),
    )  # fmt: skip


def shown(bits: int, dtype: str) -> str:
    """A stored number for people: as `repr` has it."""
    size = ITEM_BYTES[dtype]
    if dtype == "bool":
        return repr(bool(bits)) if bits < 2 else f"a bool of {bits}"
    if dtype == "float8_e8m0fnu":
        return "nan" if bits == 0xFF else repr(math.ldexp(1.0, bits - 127))
    if dtype not in FORMATS:
        return repr(int.from_bytes(bits.to_bytes(size, "little"), "little", signed=dtype[0] == "i"))
    number = value(bits, dtype)
    if dtype == "float32" and math.isfinite(number):
        return repr(float(str(np.float32(number))))
    return repr(number)


def value(bits: int, dtype: str) -> float:
    """The number that a pattern of one of `FORMATS` stands for."""
    if dtype in ("float64", "float32"):
        code = "<d" if dtype == "float64" else "<f"
        return float(struct.unpack(code, bits.to_bytes(ITEM_BYTES[dtype], "little"))[0])
    form = FORMATS[dtype]
    sign = -1.0 if bits >> (form.exponent + form.mantissa) else 1.0
    exponent = (bits >> form.mantissa) & ((1 << form.exponent) - 1)
    mantissa = bits & ((1 << form.mantissa) - 1)
    top = (1 << form.exponent) - 1
    if form.special == "ieee" and exponent == top:
        return math.nan if mantissa else sign * math.inf
    if _is_nan(bits, form):
        return math.nan
    bias = (1 << (form.exponent - 1)) - 1 if form.bias is None else form.bias
    if exponent:
        mantissa += 1 << form.mantissa
    return sign * math.ldexp(mantissa, max(exponent, 1) - bias - form.mantissa)


def _is_nan(bits: int, form: Format) -> bool:
    width = form.exponent + form.mantissa
    if form.special == "fn":
        return bits & ((1 << width) - 1) == (1 << width) - 1
    if form.special == "fnuz":
        return bits == 1 << width
    return False


def ulps(a: int, b: int, dtype: str) -> int | None:
    """Steps between two patterns on the grid of their dtype; None for NaN, or other signs."""
    if dtype not in FORMATS:
        return None if dtype in ("bool", "float8_e8m0fnu") else abs(a - b)
    form = FORMATS[dtype]
    width = form.exponent + form.mantissa
    if a >> width != b >> width or math.isnan(value(a, dtype)) or math.isnan(value(b, dtype)):
        return None
    return abs(a - b)


def kept_name(found: Location) -> str:
    """What to keep, as `KeepSpec.names` has it; "" where nothing can be kept.

    Moments of a tensor are told by its name alone: both are kept.
    """
    if found.quantity.startswith("taps."):
        if found.microbatch is None or found.tensor.endswith("]"):
            return found.tensor if found.microbatch is not None else ""
        return f"{found.tensor}[{found.microbatch}]"
    if found.quantity not in DIGEST_GROUPS:
        return ""
    star = "*" if found.quantity == "optim" and found.tensor != "step_count" else ""
    return f"{found.quantity}:{found.tensor}{star}"


def contents_case(found: Location, case: CaseSpec, specs: Sequence[RunSpec]) -> CaseSpec:
    """The question for the contents of the tensor that a place names.

    Args:
        found: names a tensor and a step.
        case: in question.
        specs: both legs, as they were when the tensor was found to differ.
    """
    assert found.step is not None
    keep = KeepSpec(step=found.step, names=(kept_name(found),))
    reference, candidate = (replace(spec, keep=keep) for spec in specs)
    return replace(
        case, id=f"keep-{candidate.key}", labels={"question": "contents"}, reference=reference,
        control=reference, candidate=candidate, repeats=0, skip_reason="",
    )  # fmt: skip


def with_element(found: Location, question: CaseSpec, folder: RunFolder) -> Location:
    """The place with its first differing element, or with the reason why there is none."""
    ours, theirs = (
        read_contents(folder.run_folder(spec.key), spec)
        for spec in (question.reference, question.candidate)
    )
    named = dict.fromkeys((*ours.names, *theirs.names)) or {kept_name(found): None}
    answers = [compare(ours, theirs, name) for name in named]
    compared = next((each for each in answers if each.element is not None), answers[0])
    unknown = (*found.unknown, *compared.notes)
    if compared.element is None:
        return replace(found, unknown=(*unknown, f"element: {compared.message}"))
    return replace(
        found, element=compared.element, unknown=unknown,
        evidence=(*found.evidence, compared.message),
    )  # fmt: skip


# --- whole tensors, of the pieces that ranks have kept ----------------------------------------

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]
NUMBERS = ("float64", "float32", "bfloat16", "float16")
"""Types whose elements become numbers; other tensors are left out."""


@dataclass(frozen=True)
class Holding:
    """One rank's box of a whole tensor."""

    rank: int
    place: Place
    loaded: Loaded

    def has(self, index: tuple[int, ...]) -> bool:
        """Whether an element of the whole tensor is in it."""
        return all(
            first <= at < first + size
            for at, first, size in zip(index, self.place.offsets, self.place.sizes, strict=True)
        )

    def local(self, index: tuple[int, ...]) -> int:
        """Flat place of an element of the whole tensor in what the rank holds."""
        flat = 0
        for at, first, mine, size in zip(
            index, self.place.offsets, self.place.local_offsets, self.loaded.about.shape,
            strict=True,
        ):  # fmt: skip
            flat = flat * size + at - first + mine
        return flat

    @property
    def bits(self) -> Bits:
        """The stored bits of the box."""
        about = self.loaded.about
        whole = np.frombuffer(self.loaded.data, f"<u{ITEM_BYTES[about.dtype]}")
        return whole.reshape(about.shape)[_box(self.place.local_offsets, self.place.sizes)].astype(
            np.uint64
        )


@dataclass
class Whole:
    """A tensor of the whole model.

    Attributes:
        name: `grads:layers.0.attn.attention.wq.weight`.
        dtype: as stored.
        bits: of every element, by the lowest rank that has it.
        holdings: every rank's box.
        disagreeing: ranks that have other bits than a lower one has at the same place.
        num_missing: elements that no rank has.
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
        return numbers(self.bits, self.dtype)

    def ranks_of(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that have an element."""
        return tuple(dict.fromkeys(held.rank for held in self.holdings if held.has(index)))

    def holding_of(self, index: tuple[int, ...]) -> Holding:
        """The lowest rank's box that has an element."""
        return next(held for held in self.holdings if held.has(index))

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
    for name, held in _holdings(contents):
        shape, dtype = held.place.shape, held.loaded.about.dtype
        if name not in found:
            found[name] = Whole(
                name, dtype, np.zeros(shape, np.uint64), np.zeros(shape, np.bool_)
            )  # fmt: skip
        found[name].add(held)
    return MappingProxyType(found)


def _holdings(contents: Contents) -> Iterator[tuple[str, Holding]]:
    for rank, tensors in enumerate(contents.ranks):
        for loaded in tensors:
            group = loaded.about.name.partition(":")[0]
            for place in loaded.about.places:
                if loaded.about.dtype in NUMBERS and min(place.sizes, default=1):
                    # A row of taps has its kind in its name.
                    name = place.name if ":" in place.name else f"{group}:{place.name}"
                    yield name, Holding(rank, place, loaded)


def numbers(bits: Bits, dtype: str) -> Floats:
    """What stored bits of one of `NUMBERS` stand for."""
    if dtype == "bfloat16":
        shifted = (bits << np.uint64(16)).astype(np.uint32)
        return shifted.view(np.float32).astype(np.float64)
    size = ITEM_BYTES[dtype]
    raw = bits.astype(f"<u{size}")
    return raw.view(f"<f{size}").astype(np.float64)


def _box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
