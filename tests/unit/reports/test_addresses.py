"""What the report says of addresses: counts of the worst rank, whatever a file holds."""

from typing import Any

import pytest

from harness.records import (
    EventRecord,
    FloatBits,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StepRecord,
)
from reports.reading import addresses
from reports.report import Addresses


def rank(number: int, moved: list[int | None], detail: dict[str, Any] | None) -> RankRecords:
    """A rank's records, with as much as is looked at."""
    bits = FloatBits.from_bits(0)
    steps = tuple(
        StepRecord(
            step=step, rank=number, loss=bits, microbatch_losses=(bits,), grad_norm=bits,
            digests={}, nonfinite={}, step_s=0.0, live_bytes=0, peak_bytes=0,
            pointer_changes=count,
        )
        for step, count in enumerate(moved)
    )  # fmt: skip
    events = () if detail is None else (
        EventRecord(name="planted", rank=number, step=0, detail={"captured": 99}),
        EventRecord(name="graphs", rank=number, step=1, detail=detail),
    )  # fmt: skip
    return RankRecords(
        rank=number, start=None, steps=steps, events=events, error=None, end=None, problems=()
    )


def of_run(*ranks: RankRecords) -> Addresses:
    """What is said of a run of these ranks."""
    spec = RunSpec(config={}, device="cpu", world_size=len(ranks), timeout_s=1)
    outcome = RunOutcome(
        key=spec.key, what="", message="", culprit_rank=None, ranks=(), started_unix_s=0, wall_s=0
    )
    return addresses(RunResult(spec=spec, outcome=outcome, ranks=ranks))


def test_the_worst_rank_is_shown() -> None:
    """Counts and moved pointers are those of the rank that has most, step by step."""
    detail = {"captured": 4, "ledger_names": 78, "ledger_places": ["a", "b"], "ledger_unnamed": 1}
    found = of_run(
        rank(0, [0, 5, 0], detail | {"moved": ["lr (step 1)"]}),
        rank(1, [2, 3, 0], detail | {"ledger_names": 80, "moved": ["lr (step 1)", "x (step 0)"]}),
    )
    assert found.words == (
        "4 graphs rely on 80 named tensors, 2 storages known by place and 1 unnamed; "
        "7 pointers moved, at most 5 in a step, last in step 1; "
        "the first of them lr (step 1), x (step 0)"
    )


@pytest.mark.parametrize(
    ("moved", "words"),
    [
        ([0, 0], "no pointer moved"),
        ([None, None], "moved pointers were not counted"),
        ([], "moved pointers were not counted"),
    ],
)
def test_an_eager_run_says_what_moved(moved: list[int | None], words: str) -> None:
    """Without graphs there is nothing to say of them; what was not counted is not zero."""
    assert of_run(rank(0, moved, None)).words == words


def test_a_file_may_say_anything() -> None:
    """Details of other types, or huge step numbers, are no error of the report."""
    detail = {"captured": "many", "ledger_names": True, "ledger_places": 3, "moved": [1, None]}
    found = of_run(rank(0, [1], detail))
    assert (found.captured, found.by_owner, found.by_place) == (0, 0, 0)
    assert (
        found.words == "1 pointers moved, at most 1 in a step, last in step 0; "
        "the first of them 1, None"
    )
