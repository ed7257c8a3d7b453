"""Whose operators a place asks for, and why there may be none to see."""

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

from harness.bisect.found import Location
from harness.bisect.operators import (
    FORMS,
    compare,
    first_operator,
    keeping,
    operators_for,
    shown,
    ulps,
    value,
    values_of,
    why_unseen,
    with_operator,
    with_values,
)
from harness.records import OPERATORS, EventRecord, OperatorCall, OperatorSpec
from harness.store.contents import ITEM_BYTES, Contents, Loaded, Place
from tests.support import records
from tests.support.records import kept_tensor
from tests.unit.harness.bisect.made_up_asker import program_run
from tests.unit.harness.bisect.small_model import of_rank, run_of

OUTPUT = {"quantity": "taps.output", "tensor": "layers.0.attn:output", "module": "layers.0.attn"}
INPUT = {"quantity": "taps.input", "tensor": "norm:input[1]", "module": "norm"}
GRADIENT = {"quantity": "taps.gradient", "tensor": "norm:gradient[3]", "module": "head"}
GRADS = {"quantity": "grads", "tensor": "head.weight", "module": "head", "near": "before"}


@pytest.mark.parametrize(
    ("place", "phase", "builtin", "program"),
    [
        (OUTPUT, "forward", ("layers.0.attn", 1), ("layers.0.attn", 1)),
        (INPUT, "forward", ("(root)", 1), ("(root)", None)),
        (INPUT | {"module": "layers.0"}, "forward", ("layers.0", 1), ("layers.0", None)),
        (GRADIENT, "backward", ("head", 3), ("head", None)),
        (GRADS, "backward", ("head", None), ("head", None)),
        (OUTPUT | {"module": ""}, "backward", None, None),
        (OUTPUT | {"near": "in"}, "forward", None, None),
        (GRADS, "reduce", None, None),
        (INPUT, "input", None, None),
        ({"quantity": "weights", "tensor": "w", "module": "head"}, "optimizer", None, None),
        ({"quantity": "loss", "tensor": "loss"}, "forward", None, None),
    ],
)
def test_whose_operators_a_place_asks_for(
    place: dict[str, Any], phase: Any, builtin: Any, program: Any
) -> None:
    """A call of the module that is wrong, or of the one around it; none of what is no module's."""
    found = Location(step=2, phase=phase, microbatch=1, **place)
    other = dataclasses.replace(run_of(), spec=program_run())
    for run, expected in ((run_of(), builtin), (other, program)):
        spec = operators_for(found, run)
        assert (spec and (spec.module, spec.call)) == expected
        assert spec is None or (spec.step, spec.backward) == (2, phase == "backward")


@pytest.mark.parametrize(
    ("step", "settings", "is_seen"),
    [(2, {}, True), (2, {"graph": ("attn",), "captured_in": 3}, True),
     (3, {"graph": ("attn",), "captured_in": 3}, False)],
)  # fmt: skip
def test_a_replay_shows_no_operators(step: int, settings: dict[str, Any], is_seen: bool) -> None:
    """One line says so, and nothing is run; before the capture all runs eagerly."""
    spec = OperatorSpec(step=step, module="head")
    why = why_unseen(spec, (run_of(), run_of(**settings)))
    assert (why == "", "candidate replays graphs" in why) == (is_seen, not is_seen)


@pytest.mark.parametrize(
    ("ours", "theirs", "told"),
    [
        (
            {"quantity": "grads"},
            {},
            "was not cleared before them, or changed after them by a hook, clipping or the loop",
        ),
        ({}, None, "of the candidate they cannot be seen: it did not call head"),
        ({}, {"calls": [], "num_calls": 0}, "it did not call head"),
        ({}, {"why": "compiled"}, "of the candidate they cannot be seen: compiled"),
        ({}, {}, "operator: all 1 operator of the call of head are equal"),
        ({}, {"is_cut": True}, "are equal, as far as they were written down"),
        ({}, {"out": "1" * 32}, "the first that differs, aten.neg.default() at a.py:1, in the"),
    ],
)
def test_what_is_said_of_operators(ours: Any, theirs: Any, told: str) -> None:
    """The first wrong one as evidence; else why none is known."""

    def run(detail: Any) -> Any:
        if detail is None:
            return run_of()
        out = detail.pop("out", "0" * 32)
        call = {"operator": "aten.neg.default", "stack": ["a.py:1 f"], "outputs": [out]}
        plain = {"calls": [call], "num_calls": 1, **detail}
        event = EventRecord(name=OPERATORS, rank=0, step=2, detail=plain)
        return of_rank(run_of(), 0, events=(event,))

    spec, place = OperatorSpec(step=2, module="head"), Location(step=2, rank=0, **ours)
    found = with_operator(place, spec, (run({}), run(theirs)))
    assert told in (*found.evidence, *found.unknown)[-1]
    assert (found.operator is not None) == bool(found.evidence)


@pytest.mark.parametrize(("bad", "told"), [((1,), (1, (1,), 0)), ((0, 1), (0, (0, 1), 0)),
                                           ((), (0, (0, 1), 2))])  # fmt: skip
def test_operators_tell_who_gave_what_is_wrong_to_a_sum(bad: Any, told: Any) -> None:
    """A summed gradient differs on all ranks; only those are to blame whose operators do."""

    def run(bad: tuple[int, ...]) -> Any:
        made = run_of()
        for rank in (0, 1):
            outputs = (f"{rank + 2 * (rank in bad)}",)
            call = OperatorCall(operator="aten.mm", stack=("a.py:1 f",), outputs=outputs)
            detail = {"calls": [call.to_json()], "num_calls": 1}
            event = EventRecord(name=OPERATORS, rank=rank, step=2, detail=detail)
            made = of_rank(made, rank, events=(event,))
        return made

    hidden = Location(step=2, rank=0, ranks=(0, 1), quantity="grads", rank_is_hidden=True)
    found = with_operator(hidden, OperatorSpec(step=2, module="head"), (run(()), run(bad)))
    assert (found.rank, found.ranks, len(found.not_known)) == told
    assert (found.operator is not None) == bool(bad)


def test_a_wrong_result_that_another_operator_has_given_is_found() -> None:
    """Operator by operator, as long as both run the same: a scale of ones gives what it was given.

    What differs in memory that nobody has written, and makes no other result, is not at fault.
    """

    def calls(scaled: str, memory: str = "m") -> list[OperatorCall]:
        made = (("copy_", (memory, "x"), ("x",)), ("norm", ("x",), ("n",)), ("mul", ("n", scaled), (
            "n" if scaled == "one" else "s",)))  # fmt: skip
        return [OperatorCall(operator=o, inputs=i, outputs=r, names=("", "scale")[: len(i)])
                for o, i, r in made]  # fmt: skip

    found = first_operator(calls("scale"), calls("one", "other"))
    assert found is not None
    assert (found.candidate and found.candidate.operator, found.outside) == ("mul", ("scale",))
    assert first_operator(calls("scale"), calls("scale", "other")) is None


def test_an_operator_is_held_against_the_one_in_its_place() -> None:
    """Where all before it did the same, whatever the reference's gave: a factor of 1 makes no new
    value. Values of a look in which another one is the first are not told. Only the same operator
    of the same tensors was given the same."""

    def run(factor: float, first: str = "a", name: str = "mul") -> Any:
        scaled, last = (first, "c") if factor == 1 else ("b", "d")
        made = (
            ("neg", "", "x", first),
            (name, f"{factor}", first, scaled),
            ("exp", "", scaled, last),
        )
        calls = [OperatorCall(operator=o, settings=s, inputs=(i,), outputs=(r,), number=n)
                 for n, (o, s, i, r) in enumerate(made)]  # fmt: skip
        detail = {"calls": [call.to_json() for call in calls], "num_calls": 1}
        event = EventRecord(name=OPERATORS, rank=0, step=2, detail=detail)
        return of_rank(run_of(), 0, events=(event,))

    spec = OperatorSpec(step=2, module="head")
    found = with_operator(Location(step=2, rank=0), spec, (run(1.0), run(2.0)))
    operator = found.operator
    assert operator is not None
    assert [call and call.number for call in (operator.reference, operator.candidate)] == [1, 1]
    runs = [run(1.0).spec, run(2.0).spec]
    asked = keeping(operator, spec, runs)
    assert [each.operators and each.operators.kept for each in asked] == [1, 1]
    none: Any = None
    again = with_values(found, spec, (run(1.0), run(2.0, first="e")), none)
    assert (again.operator, len(again.unknown)) == (operator, len(found.unknown) + 1)
    divided = with_operator(Location(step=2, rank=0), spec, (run(1.0), run(2.0, name="div")))
    assert divided.operator is not None
    others = (divided.operator, dataclasses.replace(operator, reference=None))
    assert ["given the same" in each.told for each in (operator, *others)] == [True, False, False]


def test_a_spec_is_part_of_the_key() -> None:
    """A run that writes operators is another run."""
    spec = records.run_spec(1)
    other = dataclasses.replace(spec, operators=OperatorSpec(step=1, module="head"))
    assert spec.key != other.key
    assert type(other).from_json(other.to_json()).key == other.key


# --- the first differing element: where it lies in the whole tensor, and both bit patterns --------


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
