"""What counts as detected, and which of a fault's cases the row is of."""

import dataclasses

import pytest

from harness.bisect.found import Location
from harness.campaign.campaign import (
    Alarm,
    Judged,
    Matrix,
    Row,
    fields_of,
    located,
    merged,
    places_of,
    row_of,
    to_locate,
)
from harness.campaign.cases import BARE, BROKEN, WHOLE, fault_case, variants
from harness.faults.catalogue import CATALOGUE
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
CLEAN = tuple(map(str, range(50)))
PASSED: Said = ("passed", "")
SEEN: Said = ("failed", "nonfinite")


def held(said: dict[str, Said], *, acted: bool = True, fault: str = FAULT.name) -> list[Judged]:
    """The cases of a fault, with made-up verdicts by variant; others pass."""
    entry = CATALOGUE[fault]
    found = []
    for variant in variants(entry):
        case = fault_case(entry, variant, "cpu")
        outcome, what = said.get(variant.name, PASSED)
        at = Difference(step=4, rank=1, quantity="weights") if outcome == "failed" else None
        verdict = Verdict(
            case_id=case.id, outcome=outcome, what=what, message="why", checks=(), runs={},
            wall_s=1.0, difference=at,
        )  # fmt: skip
        runs = {leg: _run(getattr(case, leg), acted=acted and leg == "candidate") for leg in LEGS}
        found.append(Judged(case=case, verdict=verdict, runs=CaseRuns(case=case, **runs)))
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


def test_the_row_is_of_the_barest_case_that_sees_it() -> None:
    """No stressor before one, one before several; the search starts from the whole setup."""
    row = row_of(FAULT, held({"poison": SEEN, "scramble": SEEN, WHOLE: SEEN}))
    assert (row.status, row.under, row.case) == ("detected", ("poison",), "early_release.poison")
    assert to_locate(row, FAULT) == "early_release"
    assert (row.planted_step, row.planted_rank, row.detected_step) == (3, 1, 4)
    assert "3 +1" in fields_of(row)
    bare = row_of(FAULT, held({BARE: SEEN}))
    assert (bare.under, to_locate(bare, FAULT)) == ((), "early_release.bare")
    assert len(row.answers) == 4
    # Four candidates, and a reference and a control that they share.
    assert (row.runs, row.seconds) == (6, 12.0)


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
    assert row.status == status
    assert row.reason
    assert row.counts


def test_a_run_that_ended_before_anything_was_planted_proves_nothing() -> None:
    """A crash that is expected counts only where a rank says that it planted it."""
    said: dict[str, Said] = {WHOLE: ("failed", "crashed")}
    for acted, status in ((True, "detected"), (False, "misjudged")):
        assert row_of(CATALOGUE["raise"], held(said, acted=acted, fault="raise")).status == status


def test_what_cannot_be_planted_is_not_counted_but_a_broken_entry_is() -> None:
    """Another device is a reason, an illegal setup is the catalogue's fault."""
    (only,) = held({WHOLE: ("skipped", "unsupported")}, fault="raise")
    row = row_of(CATALOGUE["raise"], [only])
    assert (row.status, row.reason) == ("not run", "why")
    assert not row.counts
    assert dataclasses.replace(row, reason=f"{BROKEN}parallel.tp").counts


def test_a_place_is_held_against_the_entry() -> None:
    """The row says how well, and fills a step that no check knew."""
    row = row_of(FAULT, held({WHOLE: SEEN}))
    found = Location(step=3, phase=FAULT.points_at.phase, rank=1, module="embedding",
                     tensor="embedding:output")  # fmt: skip
    assert located(row, FAULT, found, num_layers=2).localised == "exactly"
    late = located(row, FAULT, dataclasses.replace(found, step=4), num_layers=2)
    assert (late.localised, late.is_named) == ("near", True)
    unknown = dataclasses.replace(row, detected_step=None)
    assert located(unknown, FAULT, found, num_layers=2).detected_step == 3


def test_the_place_that_is_due_is_where_it_can_show_first() -> None:
    """A fault that shows a step after it is planted is due in that step."""
    pointers = {name: entry.points_at for name, entry in CATALOGUE.items() if "step" in entry.takes}
    name, pointer = next((n, p) for n, p in pointers.items() if p.later)
    row = row_of(CATALOGUE[name], held({WHOLE: SEEN}, fault=name))
    due = CATALOGUE[name].setup.step + pointer.later
    assert places_of(row).startswith(f"expected step {due}, ")


def test_rates_count_what_ran() -> None:
    """Faults of other devices are in no rate; alarms are held against clean cases."""
    rows = (
        Row(fault="a", kind="data", source="", status="detected", localised="exactly"),
        Row(fault="b", kind="data", source="", status="detected", localised="near", is_named=True),
        Row(fault="c", kind="data", source="", status="missed"),
        Row(fault="d", kind="data", source="", status="not run", reason="needs cuda"),
    )
    alarm = Alarm(case="clean.x", outcome="failed", what="diverged", message="")
    rates = Matrix(device="cpu", rows=rows, clean=CLEAN, skipped=1, alarms=(alarm,)).rates()
    counted = [(rate.successes, rate.trials) for rate in rates.values()]
    assert counted == [(2, 3), (1, 2), (1, 2), (2, 2), (1, 50)]
    assert all(
        0 <= rate.low <= rate.successes / rate.trials <= rate.high for rate in rates.values()
    )


def test_matrices_of_shards_are_one_and_count_nothing_twice() -> None:
    """Later rows stand, clean cases that two folders ran count once, devices stay apart."""
    row = Row(fault="ulp", kind="numerics", source="", status="missed")
    seen = dataclasses.replace(row, status="detected")
    other = dataclasses.replace(row, fault="leak")
    parts = [
        Matrix(device="cpu", rows=(row,), clean=("a", "b"), skipped=1, alarms=(), wall_s=1.0),
        Matrix(device="cuda", rows=(row,), clean=("a",), skipped=0, alarms=()),
        Matrix(
            device="cpu", rows=(other, seen), clean=("b", "c"), skipped=0, alarms=(), wall_s=2.0
        ),
    ]
    cpu, cuda = merged(parts)
    assert {r.fault: r.status for r in cpu.rows} == {"ulp": "detected", "leak": "missed"}
    assert (cpu.clean, cpu.skipped, cpu.wall_s) == (("a", "b", "c"), 1, 3.0)
    assert cuda == parts[1]
    assert merged([]) == ()
