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

from harness.bisect.elements import FORMATS, compare, shown, ulps, value
from harness.store.contents import ITEM_BYTES, Contents, KeptTensor, Loaded, Place

NAME = "grads:layers.0.w"


def kept(
    data: bytes, shape: tuple[int, ...], places: tuple[Place, ...] = (), **options: Any
) -> Loaded:
    """One tensor of a rank."""
    values: dict[str, Any] = {
        "name": NAME, "part": 0, "dtype": "float32", "as_digested": True,
    }  # fmt: skip
    about = KeptTensor(shape=shape, places=places, **(values | options))
    return Loaded(about=about, data=data)


def contents(*ranks: tuple[Loaded, ...], problems: tuple[str, ...] = (), step: int = 3) -> Contents:
    """What a run has kept."""
    return Contents(step=step, ranks=ranks, problems=problems)


def floats(*numbers: float) -> bytes:
    """Their bytes as float32."""
    return struct.pack(f"<{len(numbers)}f", *numbers)


def columns(first: int) -> tuple[Place, ...]:
    """Two columns of a tensor [2, 4]."""
    return (
        Place(
            name="layers.0.w", shape=(2, 4), offsets=(0, first), local_offsets=(0, 0), sizes=(2, 2)
        ),
    )


def test_the_first_is_that_of_the_whole_tensor_and_not_of_the_lowest_rank() -> None:
    """Rank 0 differs in row 1 and rank 1 in row 0: the whole tensor has rank 1's first."""
    reference = contents(
        (kept(floats(0, 1, 4, 5), (2, 2), columns(0)),),
        (kept(floats(2, 3, 6, 7), (2, 2), columns(2)),),
    )
    candidate = contents(
        (kept(floats(0, 1, -4, 5), (2, 2), columns(0)),),
        (kept(floats(2, 3.5, 6, 8), (2, 2), columns(2)),),
    )
    found = compare(reference, candidate, NAME)
    assert (found.tensor, found.rank, found.ranks) == ("layers.0.w", 1, (0, 1))
    assert found.element is not None
    assert dataclasses.asdict(found.element) == {
        "index": (0, 3), "local": 1, "dtype": "float32",
        "reference_bits": "40400000", "candidate_bits": "40600000",
        "reference": "3.0", "candidate": "3.5", "num_different": 2, "numel": 4,
        "ulps": 0x200000, "shape": (2, 2), "lows": (0, 1), "highs": (1, 1),
    }  # fmt: skip
    assert found.message == "layers.0.w[0, 3] on rank 1: 3.0 (40400000) became 3.5 (40600000)"


def test_one_parameter_of_two_whole_tensors_is_told_apart() -> None:
    """Of gate and up side by side in one parameter, the stretch that holds the element is named."""
    places = tuple(
        Place(name=name, shape=(4, 2), offsets=(2, 0), local_offsets=(at, 0), sizes=(2, 2))
        for name, at in (("gate", 0), ("up", 2))
    )
    numbers = list(range(8))
    reference = contents((kept(floats(*numbers), (4, 2), places),))
    numbers[6] = 9
    found = compare(reference, contents((kept(floats(*numbers), (4, 2), places),)), NAME)
    assert found.tensor == "up"
    assert found.element is not None
    assert (found.element.index, found.element.local) == ((3, 0), 6)


@given(st.data())
def test_any_sharding_has_the_element_of_the_whole(data: st.DataObject) -> None:
    """However rows and columns are cut over ranks, the first is the one that the whole has."""
    rows, cols = 4, 6
    places = data.draw(st.lists(st.integers(0, rows * cols - 1), min_size=1, unique=True))
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(0, rows)))})
    halves = data.draw(st.sampled_from([1, 2, 3]))
    before = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)
    after = before.copy()
    after.flat[places] = -1.0
    legs: list[list[tuple[Loaded, ...]]] = [[], []]
    for low, high in itertools.pairwise(cuts):
        for half in range(halves):
            width = cols // halves
            place = Place(
                name="w", shape=(rows, cols), offsets=(low, half * width), local_offsets=(0, 0),
                sizes=(high - low, width),
            )  # fmt: skip
            for leg, whole in zip(legs, (before, after), strict=True):
                part = whole[low:high, half * width : (half + 1) * width]
                leg.append((kept(part.tobytes(), part.shape, (place,)),))
    found = compare(contents(*legs[0]), contents(*legs[1]), NAME)
    assert found.element is not None
    assert found.element.index == divmod(min(places), cols)
    assert found.element.reference == repr(float(min(places)))


def test_bits_decide_and_not_numbers() -> None:
    """Minus zero is not zero, and NaNs of other payloads differ; the same NaN does not."""
    nan, other = struct.pack("<I", 0x7FC00000), struct.pack("<I", 0x7FC00001)
    reference = contents((kept(nan + floats(0.0) + nan, (3,)),))
    candidate = contents((kept(nan + floats(-0.0) + other, (3,)),))
    found = compare(reference, candidate, NAME)
    assert found.element is not None
    assert found.element.index == (1,)
    assert (found.element.reference_bits, found.element.candidate_bits) == ("00000000", "80000000")
    assert (found.element.ulps, found.element.num_different) == (None, 2)


def test_equal_contents_are_said_and_never_nothing() -> None:
    """Where the copies agree, the difference did not come back: one sentence says so."""
    same = contents((kept(floats(1, 2), (2,)),))
    found = compare(same, same, NAME)
    assert found.element is None
    assert "same bits in both legs on every rank: the difference did not come back" in found.message


def test_what_cannot_be_compared_is_said() -> None:
    """Another shape, a rank without the tensor, another step, no tensor: each is a sentence."""
    one = contents((kept(floats(1, 2), (2,)),))
    longer = contents((kept(floats(1, 2, 3), (3,)),))
    none = contents(())
    assert compare(one, longer, NAME).message == (
        f"{NAME} on rank 0 is float32 [2] in the reference and float32 [3] in the candidate"
    )
    assert compare(one, none, NAME).message == f"rank 0 has no {NAME} in the candidate"
    assert compare(none, none, NAME).message == f"no rank has kept {NAME} in both legs"
    later = contents((kept(floats(1, 2), (2,)),), step=4)
    assert compare(one, later, NAME).message == "kept at other steps: 3 and 4"


def test_doubts_come_with_the_answer() -> None:
    """A damaged file of a leg, and a copy that does not give its digest, are in the notes."""
    reference = contents((kept(floats(1, 2), (2,), as_digested=False),))
    candidate = contents((kept(floats(1, 3), (2,)),), (), problems=("rank1.contents: damaged",))
    notes = compare(reference, candidate, NAME).notes
    assert notes[0] == "candidate: rank1.contents: damaged"
    assert notes[1].startswith(f"the copy of {NAME} in the reference does not give the digest")
    assert len(notes) == 2


@pytest.mark.parametrize("dtype", [name for name in FORMATS if ITEM_BYTES[name] <= 2])
def test_numbers_of_narrow_types_are_those_of_torch(dtype: str) -> None:
    """Every pattern of eight and sixteen bits is shown as the number that torch reads in it."""
    size = ITEM_BYTES[dtype]
    patterns = np.arange(1 << (8 * size), dtype=f"<u{size}")
    tensor = torch.from_numpy(patterns.view(f"<i{size}" if size > 1 else "u1").copy())
    numbers = tensor.view(getattr(torch, dtype)).to(torch.float64).tolist()
    for pattern, number in zip(patterns.tolist(), numbers, strict=True):
        mine = value(pattern, dtype)
        assert (mine == number and math.copysign(1, mine) == math.copysign(1, number)) or (
            math.isnan(mine) and math.isnan(number)
        ), (hex(pattern), mine, number)


def test_other_types_are_shown_as_what_they_are() -> None:
    """Integers with their sign, bools, powers of two, and float32 in its shortest form."""
    assert shown(0xFFFFFFFE, "int32") == "-2"
    assert shown(0xFFFFFFFE, "uint32") == "4294967294"
    assert shown(1, "bool") == "True"
    assert shown(128, "float8_e8m0fnu") == "2.0"
    assert shown(0x3DCCCCCD, "float32") == "0.1"
    assert shown(0x7F800000, "float32") == "inf"


def test_steps_on_the_grid() -> None:
    """Neighbours are one step apart, also past the largest number; signs and NaN have none."""
    assert ulps(0x3F800000, 0x3F800001, "float32") == 1
    assert ulps(0x7F7FFFFF, 0x7F800000, "float32") == 1
    assert ulps(0x00000000, 0x80000000, "float32") is None
    assert ulps(0x7FC0, 0x3F80, "bfloat16") is None
    assert ulps(5, 3, "int64") == 2
    assert ulps(0, 1, "bool") is None
