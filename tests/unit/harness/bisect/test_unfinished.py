"""A step that a run did not end tells, as far as it came, whether it had gone wrong before."""

import dataclasses
from typing import Any, cast

from harness.bisect.experiments import Asker, OutOfBudget
from harness.bisect.found import Location
from harness.bisect.locate import between
from harness.bisect.probes import locate_case
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    UNFINISHED,
    CaseSpec,
    ErrorRecord,
    EventRecord,
    RunResult,
    What,
)
from harness.store import CaseRuns
from tests.unit.harness.bisect.small_model import (
    CALLS,
    ROWS,
    Edit,
    calls_from,
    edited,
    place_of,
    run_of,
)

STEP = 2
MICROBATCH_0 = len(CALLS)


def _stopped(run: RunResult, what: What, *, reached: int) -> RunResult:
    """The run as it is if rank 1 fails in step 2, after so many calls of it."""
    ranks = []
    for rank in run.ranks:
        taps = rank.steps[STEP].taps
        rows = [taps[i : i + TAP_HEX_CHARS] for i in range(0, len(taps), TAP_HEX_CHARS)]
        rows = [
            row if place_of(*name) < reached else "0" * DIGEST_HEX_CHARS + NEVER_RAN
            for name, row in zip(ROWS, rows, strict=True)
        ]
        event = EventRecord(
            name=UNFINISHED, rank=rank.rank, step=STEP, detail={"taps": "".join(rows)}
        )
        error = ErrorRecord(
            rank=rank.rank, step=STEP, what=what, type="Error", message="boom",
            traceback="", phase="backward", blames=None if rank.rank else 1,
        )  # fmt: skip
        steps = rank.steps[:STEP]
        ranks.append(dataclasses.replace(rank, steps=steps, end=None, error=error, events=(event,)))
    outcome = dataclasses.replace(
        run.outcome, key=run.spec.key, what=what, message="boom", culprit_rank=1
    )
    return dataclasses.replace(run, ranks=tuple(ranks), outcome=outcome)


def _place(
    edit: Edit, *, what: What = "crashed", reached: int = MICROBATCH_0, captured_in: int = 1
) -> Location:
    run = run_of(graph=("attn",))
    config = run.spec.config | {"graph_warmup_steps": captured_in}
    run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, config=config))
    return between(run_of(), _stopped(edited(run, {1: edit}), what, reached=reached))


def test_what_went_wrong_before_the_crash_in_its_step_is_the_place() -> None:
    """The forward pass was wrong, and the backward pass stopped."""
    found = _place(calls_from("layers.0.attn:output"))
    assert (found.step, found.phase, found.module, found.rank) == (2, "forward", "layers.0.attn", 1)
    assert "boom" in found.evidence[-1]


def test_a_step_that_was_right_as_far_as_it_came_is_where_it_stopped() -> None:
    """Calls that were not reached are no difference, nor is what would have come later."""
    assert _place(lambda record: record).phase == "backward"
    reached = place_of("layers.0.attn:output", 0)
    assert _place(calls_from("layers.0.attn:output"), reached=reached).phase == "backward"


def test_calls_that_were_folded_are_not_held_against_a_whole_step() -> None:
    """The last row of a tap has all calls that have none of their own: some may be lacking."""
    found = _place(calls_from("embedding:input", 1), reached=2 * len(CALLS))
    assert found.phase == "backward"


def test_an_end_that_names_its_cause_outranks_its_step() -> None:
    """What a graph read at a stale address is wrong, too: it only follows."""
    found = _place(calls_from("layers.0.attn:output"), what="stale_address")
    assert found.phase == "state"


def test_nothing_is_said_of_the_step_that_captures() -> None:
    """Its calls were also those of warm-ups and captures."""
    found = _place(calls_from("layers.0.attn:output"), captured_in=2)
    assert (found.phase, found.module) == ("capture", "")


class _Broke:
    """An asker without a budget."""

    def ask(self, *question: Any, **options: Any) -> Any:
        raise OutOfBudget("the budget of 0 runs is spent")


def _looked(candidate: RunResult) -> Location:
    reference = run_of()
    control = run_of(replica=1)
    case = CaseSpec(
        id="x", scenario="x", labels={}, reference=reference.spec, control=control.spec,
        candidate=candidate.spec, expect="bitwise", checks={},
    )  # fmt: skip
    runs = CaseRuns(case=case, reference=reference, control=control, candidate=candidate)
    return locate_case(runs, cast("Asker", _Broke()))


def test_no_run_is_spent_on_elements_of_a_step_that_did_not_end() -> None:
    """Contents are written after a step; where it ended, they are asked for."""
    wrong = edited(run_of(graph=("attn",)), {1: calls_from("layers.0.attn:output")})
    assert any("budget" in each for each in _looked(wrong).unknown)
    stopped = _looked(_stopped(wrong, "crashed", reached=MICROBATCH_0))
    assert stopped.tensor == "layers.0.attn:output"
    assert stopped.unknown == ("element: step 2 did not end, so no contents were kept",)
