"""Whole tensors out of the pieces that ranks have kept, and which rank has which element."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from harness.store.contents import ITEM_BYTES, Contents, Loaded, Place

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
