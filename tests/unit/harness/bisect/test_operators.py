"""Whose operators a place asks for, and why there may be none to see."""

import dataclasses
from typing import Any

import pytest

from harness.bisect.found import Location
from harness.bisect.operators import (
    first_operator,
    keeping,
    operators_for,
    why_unseen,
    with_operator,
    with_values,
)
from harness.records import OPERATORS, EventRecord, OperatorCall, OperatorSpec
from tests.support import records
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
            "differs was changed after them, by a hook, clipping or the loop",
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
    value. Values of a look in which another one is the first are not told."""

    def run(factor: float, first: str = "a") -> Any:
        scaled, last = (first, "c") if factor == 1 else ("b", "d")
        made = (
            ("neg", "", "x", first),
            ("mul", f"{factor}", first, scaled),
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


def test_a_spec_is_part_of_the_key() -> None:
    """A run that writes operators is another run."""
    spec = records.run_spec(1)
    other = dataclasses.replace(spec, operators=OperatorSpec(step=1, module="head"))
    assert spec.key != other.key
    assert type(other).from_json(other.to_json()).key == other.key
