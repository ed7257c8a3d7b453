"""The first differing element: where it lies in the whole tensor, and both bit patterns."""

import dataclasses
import itertools
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.bisect.operators import FORMS, compare, shown, ulps, value, values_of
from harness.store.contents import ITEM_BYTES, Contents, Loaded, Place
from tests.support.records import kept_tensor

NAME = "grads:layers.0.w"
Shape = tuple[int, ...]


def kept(data: bytes, shape: Shape, *places: Place, **options: Any) -> Loaded:
    """One tensor of a rank."""
    return Loaded(about=kept_tensor(NAME, shape, places=places, **options), data=data)


def contents(*ranks: tuple[Loaded, ...], problems: tuple[str, ...] = (), step: int = 3) -> Contents:
    """What a run has kept."""
    return Contents(step=step, ranks=ranks, problems=problems)


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def box(shape: Shape, at: Shape, sizes: Shape, name: str = "w", local: Shape = (0, 0)) -> Place:
    return Place(name=name, shape=shape, offsets=at, local_offsets=local, sizes=sizes)


def test_the_first_is_that_of_the_whole_tensor_and_not_of_the_lowest_rank() -> None:
    """Rank 0 differs in row 1 and rank 1 in row 0: the whole tensor has rank 1's first."""

    def halves(*parts: bytes) -> Contents:
        boxes = (box((2, 4), (0, first), (2, 2)) for first in (0, 2))
        return contents(*((kept(data, (2, 2), b),) for data, b in zip(parts, boxes, strict=True)))

    reference = halves(floats(0, 1, 4, 5), floats(2, 3, 6, 7))
    found = compare(reference, halves(floats(0, 1, -4, 5), floats(2, 3.5, 6, 8)), NAME)
    assert found.element is not None
    assert dataclasses.asdict(found.element) == {
        "index": (0, 3), "local": 1, "dtype": "float32",
        "reference_bits": "40400000", "candidate_bits": "40600000",
        "reference": "3.0", "candidate": "3.5", "num_different": 2, "numel": 4,
        "ulps": 0x200000, "shape": (2, 2), "lows": (0, 1), "highs": (1, 1),
    }  # fmt: skip
    assert found.message == "w[0, 3] on rank 1: 3.0 (40400000) became 3.5 (40600000)"


def test_what_an_operator_took_and_gave_is_that_of_one_rank() -> None:
    """Equal, other in one element, of another shape, in one run alone; a NaN is no number."""

    def run(*tensors: tuple[str, bytes, Shape]) -> Contents:
        held = tuple(
            Loaded(about=kept_tensor(f"operator:{name}", shape), data=data)
            for name, data, shape in tensors
        )
        return contents((), held)

    took, gave = ("input 0", floats(1, 3), (2,)), ("output 0", floats(1, math.nan), (2,))
    ours = run(took, ("input 1", floats(5), (1,)), gave)
    theirs = run(took, ("input 1", floats(6), ()), ("output 0", floats(2, math.nan), (2,)),
                 ("output 1", floats(0), (1,)))  # fmt: skip
    same, shaped, other, more = values_of(ours, theirs, 1, ("weight",))
    assert (same.name, same.of, same.is_equal, str(same.candidate)) == (
        "input 0", "weight", True, "float32[2] from 1 to 3, mean 2",
    )  # fmt: skip
    assert [each.is_equal for each in (shaped, other, more)] == [False] * 3
    assert (shaped.element, more.element, more.reference) == (None, None, None)
    assert other.element is not None
    assert (other.element.reference_bits, other.element.num_different) == ("3f800000", 1)
    assert other.candidate is not None
    assert (other.candidate.mean, other.candidate.num_infinite) == (2.0, 1)


@given(st.data())
def test_any_sharding_has_the_element_of_the_whole(data: st.DataObject) -> None:
    """However rows and columns are cut over ranks, the first is the one that the whole has."""
    rows, cols = 4, 6
    places = data.draw(st.lists(st.integers(0, rows * cols - 1), min_size=1, unique=True))
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows)))})
    width = cols // data.draw(st.sampled_from([1, 2, 3]))
    before = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)
    after = before.copy()
    after.flat[places] = -1.0
    sides: list[list[tuple[Loaded, ...]]] = [[], []]
    for (low, high), left in itertools.product(itertools.pairwise(cuts), range(0, cols, width)):
        place = box((rows, cols), (low, left), (high - low, width))
        for side, whole in zip(sides, (before, after), strict=True):
            part = whole[low:high, left : left + width]
            side.append((kept(part.tobytes(), part.shape, place),))
    found = compare(contents(*sides[0]), contents(*sides[1]), NAME)
    assert found.element is not None
    assert found.element.index == divmod(min(places), cols)
    assert found.element.reference == repr(float(min(places)))


ONE = contents((kept(floats(1, 2), (2,)),))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ONE, f"{NAME} has the same bits in both runs on every rank: the difference did not come "
         "back"),
        (contents((kept(floats(1, 2, 3), (3,)),)),
         f"{NAME} on rank 0 is float32 [2] in the reference and float32 [3] in the candidate"),
        (contents(()),
         f"{NAME} on rank 0 is float32 [2] in the reference and absent in the candidate"),
        (contents((kept(floats(1, 2), (2,)),), step=4), "kept at other steps: 3 and 4"),
    ],
)  # fmt: skip
def test_why_there_is_no_element_is_said(other: Contents, message: str) -> None:
    """Equal copies, another shape, a rank without the tensor, another step: each is a sentence."""
    found = compare(ONE, other, NAME)
    assert (found.element, found.message) == (None, message)


@pytest.mark.parametrize("dtype", [name for name in FORMS if ITEM_BYTES[name] <= 4])
def test_numbers_are_those_of_torch(dtype: str) -> None:
    """Every pattern of eight and sixteen bits, and many of 32, are what torch reads in them."""
    size = ITEM_BYTES[dtype]
    patterns = np.arange(0, 1 << (8 * size), 65521 if size == 4 else 1).astype(f"<u{size}")
    tensor = torch.from_numpy(patterns.view(f"<i{size}" if size > 1 else "u1").copy())
    numbers = tensor.view(getattr(torch, dtype)).to(torch.float64).tolist()
    for pattern, number in zip(patterns.tolist(), numbers, strict=True):
        mine = value(pattern, dtype)
        assert mine is not None
        same = mine == number and math.copysign(1, mine) == math.copysign(1, number)
        assert same or (math.isnan(mine) and math.isnan(number)), (hex(pattern), mine, number)


@pytest.mark.parametrize(
    ("bits", "dtype", "text"),
    [(0xFFFFFFFE, "int32", "-2"), (0xFFFFFFFE, "uint32", "4294967294"), (1, "bool", "True"),
     (0x3DCCCCCD, "float32", "0.1"), (0x7F800000, "float32", "inf"),
     (0x3FB999999999999A, "float64", "0.1"), (5, "float8_e5m2fnuz", "0x5")],
)  # fmt: skip
def test_a_number_is_shown_as_what_it_is(bits: int, dtype: str, text: str) -> None:
    """Integers with their sign, bools, powers of two, float32 in its shortest form, else bits."""
    assert shown(bits, dtype) == text


@pytest.mark.parametrize(
    ("a", "b", "dtype", "steps"),
    [(0x3F800000, 0x3F800001, "float32", 1), (0x7F7FFFFF, 0x7F800000, "float32", 1),
     (0, 0x80000000, "float32", None), (0x7FC0, 0x3F80, "bfloat16", None), (5, 3, "int64", None)],
)  # fmt: skip
def test_steps_on_the_grid(a: int, b: int, dtype: str, steps: int | None) -> None:
    """Neighbours are one step apart, also past the largest number; signs and NaN have none."""
    assert ulps(a, b, dtype) == steps
