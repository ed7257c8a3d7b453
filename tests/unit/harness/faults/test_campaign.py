"""What counts as detected, which of a fault's cases the row is of, and how well it was found."""

import dataclasses
from typing import Any

import pytest

from harness.bisect.found import Location
from harness.campaign.campaign import Judged, Matrix, Row, document, fields_of, merged, row_of
from harness.campaign.cases import BARE, BROKEN, WHOLE, fault_case, variants
from harness.campaign.scoring import localised
from harness.faults.catalogue import CATALOGUE
from harness.faults.fault import Pointer
from harness.records import (
    Difference,
    EventRecord,
    Outcome,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
    What,
)
from harness.store import LEGS, CaseRuns

FAULT = CATALOGUE["early_release"]
Said = tuple[Outcome, What]
PASSED: Said = ("passed", "")
SEEN: Said = ("failed", "nonfinite")


def verdict(case_id: str, outcome: Outcome, what: What = "") -> Verdict:
    at = Difference(step=4, rank=1, quantity="weights") if outcome == "failed" else None
    return Verdict(
        case_id=case_id, outcome=outcome, what=what, message="why", checks=(), runs={}, wall_s=1.0,
        difference=at,
    )  # fmt: skip


def held(said: dict[str, Said], *, acted: bool = True, fault: str = FAULT.name) -> list[Judged]:
    """The cases of a fault, with made-up verdicts by variant; others pass."""
    entry = CATALOGUE[fault]
    found = []
    for variant in variants(entry):
        case = fault_case(entry, variant, "cpu")
        runs = {leg: _run(getattr(case, leg), acted=acted and leg == "candidate") for leg in LEGS}
        judged = verdict(case.id, *said.get(variant.name, PASSED))
        found.append(Judged(case, judged, CaseRuns(case=case, **runs)))
    return found


def _run(spec: RunSpec, *, acted: bool) -> RunResult:
    outcome = RunOutcome(
        key=spec.key, what="", message="", culprit_rank=None, ranks=(), started_unix_s=0.0,
        wall_s=2.0,
    )  # fmt: skip
    events = (EventRecord(name="planted", rank=0, step=3),) if acted else ()
    rank = RankRecords(
        rank=0, start=None, steps=(), events=events, error=None, end=None, problems=()
    )
    return RunResult(spec=spec, outcome=outcome, ranks=(rank,))


@pytest.mark.parametrize(
    ("said", "under", "searched"),
    [
        ({"poison": SEEN, "scramble": SEEN, WHOLE: SEEN}, ("poison",), "early_release"),
        ({BARE: SEEN}, (), "early_release.bare"),
    ],
)
def test_the_row_is_of_the_barest_case_that_sees_it(
    said: dict[str, Said], under: tuple[str, ...], searched: str
) -> None:
    """No stressor before one, one before several; the search starts from the whole setup."""
    asked = []

    def search(runs: CaseRuns, verdict: Verdict) -> Location:
        asked.append(verdict.case_id)
        return Location(step=3, phase="forward", rank=1, tensor="embedding:output", module="x")

    row = row_of(FAULT, held(said), search)
    assert (row.status, row.under, asked) == ("detected", under, [searched])
    assert (row.planted_step, row.planted_rank, row.detected_step) == (3, 1, 4)
    assert "3 +1" in fields_of(row)
    # Four candidates, and a reference and a control that they share.
    assert (row.runs, row.seconds, row.localised) == (6, 12.0, "near")


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (PASSED, "missed"),
        (("failed", "crashed"), "misjudged"),
        (("failed", "oom"), "misjudged"),
        (("error", "nonfinite"), "misjudged"),
        (("incomparable", "nondeterministic_reference"), "misjudged"),
    ],
)
def test_only_what_the_entry_expects_is_a_detection(said: Said, status: str) -> None:
    """A failure in other words, or no verdict, is none."""
    row = row_of(FAULT, held(dict.fromkeys((BARE, "poison", "scramble", WHOLE), said)))
    assert (row.status, bool(row.reason), row.counts) == (status, True, True)


def test_a_run_that_ended_before_anything_was_planted_proves_nothing() -> None:
    """A crash that is expected counts only where a rank says that it planted it."""
    said: dict[str, Said] = {WHOLE: ("failed", "crashed")}
    for acted, status in ((True, "detected"), (False, "misjudged")):
        assert row_of(CATALOGUE["raise"], held(said, acted=acted, fault="raise")).status == status


def test_what_cannot_be_planted_is_not_counted_but_a_broken_entry_is() -> None:
    """Another device is a reason, an illegal setup is the catalogue's fault."""
    row = row_of(CATALOGUE["raise"], held({WHOLE: ("skipped", "unsupported")}, fault="raise"))
    assert (row.status, row.reason, row.counts) == ("not run", "why", False)
    assert dataclasses.replace(row, reason=f"{BROKEN}parallel.tp").counts


# ---- the matrix


def matrix(device: str, *rows: Row, clean: str = "", **more: Any) -> Matrix:
    more = dict[str, Any](skipped=0, alarms=()) | more
    return Matrix(device=device, rows=rows, clean=tuple(clean), **more)


def test_rates_count_what_ran() -> None:
    """Faults of other devices are in no rate; alarms are held against clean cases."""
    rows = (
        Row(fault="ulp", status="detected", localised="exactly"),
        Row(fault="nan", status="detected", localised="near"),
        Row(fault="leak", status="missed"),
        Row(fault="illegal_access", status="not run", reason="needs cuda"),
    )
    alarm = verdict("clean.x", "failed", "diverged")
    rates = matrix("cpu", *rows, clean="abcde", alarms=(alarm,)).rates()
    counted = [(rate.successes, rate.trials) for rate in rates.values()]
    assert counted == [(2, 3), (1, 2), (2, 2), (1, 5)]
    assert all(0 <= rate.low <= rate.successes / rate.trials <= rate.high
               for rate in rates.values())  # fmt: skip


def test_matrices_of_parts_are_one_and_count_nothing_twice() -> None:
    """Later rows stand, clean cases that two folders ran count once, devices stay apart."""
    row = Row(fault="ulp", status="missed")
    seen, other = dataclasses.replace(row, status="detected"), Row(fault="leak", status="missed")
    parts = [
        matrix("cpu", row, clean="ab", skipped=1, wall_s=1.0),
        matrix("cuda", row, clean="a"),
        matrix("cpu", other, seen, clean="bc", wall_s=2.0),
    ]
    cpu, cuda = merged(parts)
    assert [(r.fault, r.status) for r in cpu.rows] == [("ulp", "detected"), ("leak", "missed")]
    assert (cpu.clean, cpu.skipped, cpu.wall_s) == (("a", "b", "c"), 1, 3.0)
    assert cuda == parts[1]


def test_a_page_keeps_the_devices_that_no_matrix_is_of() -> None:
    """Without any, the catalogue is written anew and all figures stay."""
    cpu, cuda = (matrix(device, Row(fault="ulp", status="detected")) for device in ("cpu", "cuda"))
    page = document([cpu, cuda])
    assert document([], page) == page
    missed = matrix("cpu", Row(fault="ulp", status="missed"))
    assert document([missed], page) == document([missed, cuda])
    assert document([cuda], document([cpu])) == page


# ---- places

POINTER = Pointer(phase="backward", module="layers.1.attn*", tensor="layers.1.attn.*.weight")
OUTSIDE = Pointer(phase="outside")
TRUE = Location(
    step=3, phase="backward", module="layers.1.attn.attention", quantity="grads",
    tensor="layers.1.attn.attention.wq.weight", rank=1, ranks=(1,),
)  # fmt: skip
FAR = {"module": "layers.0.mlp", "tensor": "layers.0.mlp:output"}


@pytest.mark.parametrize(
    ("pointer", "changes", "how"),
    [
        (POINTER, {}, "exactly"),
        (dataclasses.replace(POINTER, later=1), {"step": 4}, "exactly"),
        (dataclasses.replace(POINTER, later=1), {"step": 5}, "near"),
        (dataclasses.replace(POINTER, later=1), {"step": 3}, "no"),
        (POINTER, {"phase": "forward"}, "near"),
        (POINTER, {"step": 4}, "near"),
        (POINTER, {"step": None}, "near"),
        (POINTER, {"rank": 0}, "near"),
        (POINTER, {"rank": None}, "near"),
        (POINTER, {"tensor": ""}, "near"),
        (POINTER, {"tensor": "layers.1.attn.attention.wq.weight.exp_avg"}, "near"),
        (POINTER, {"module": "layers.1.mlp", "tensor": "layers.1.mlp.w1.weight"}, "near"),
        (POINTER, FAR, "no"),
        (POINTER, {"step": 2}, "no"),
        (POINTER, {"step": 5}, "no"),
        (POINTER, {"module": "", "tensor": ""}, "no"),
        (POINTER, dataclasses.asdict(Location()), "no"),
        (OUTSIDE, dataclasses.asdict(Location()), "no"),
        # A pointer asks only for what it names.
        (OUTSIDE, {"phase": "outside"}, "exactly"),
        (OUTSIDE, {"phase": "outside", "step": 4}, "near"),
        (OUTSIDE, {"phase": "forward"}, "near"),
        (OUTSIDE, {"phase": "forward", "rank": 0}, "no"),
    ],
)
def test_an_answer_is_exact_near_or_wrong(
    pointer: Pointer, changes: dict[str, Any], how: str
) -> None:
    """Exact in all that the pointer names; near in one part of the model, or on the rank."""
    found = dataclasses.replace(TRUE, **changes)
    assert localised(found, pointer, step=3, rank=1) == how


def test_a_plant_of_no_step_or_every_rank_has_none_to_find() -> None:
    """Where the plant has no step and no rank, no answer is wrong about them."""
    for step, rank in ((7, 0), (None, None)):
        found = dataclasses.replace(TRUE, step=step, rank=rank)
        assert localised(found, POINTER, step=None, rank=None) == "exactly"
    assert localised(TRUE, OUTSIDE, step=3, rank=None) == "no"


@pytest.mark.parametrize(
    ("pattern", "tensor"),
    [
        ("embedding:output", "embedding:output[1]"),
        ("grads:embedding.weight", "embedding.weight"),
        ("embedding.weight", "grads:embedding.weight"),
        ("embedding:output[[]1]", "embedding:output[1]"),
    ],
)
def test_a_tensor_has_several_spellings(pattern: str, tensor: str) -> None:
    """With and without its quantity, a call with and without its number."""
    found = dataclasses.replace(TRUE, tensor=tensor)
    pointer = Pointer(phase="backward", tensor=pattern)
    assert localised(found, pointer, step=3, rank=1) == "exactly"
