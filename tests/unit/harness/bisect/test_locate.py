"""Runs that died, hung or stopped themselves: what their last words are made into."""

import dataclasses
from typing import Any, cast

import pytest

from harness.bisect.experiments import Asker, OutOfBudget
from harness.bisect.locate import between, locate, locate_case
from harness.checks.evidence import failed
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    UNFINISHED,
    CollectiveFault,
    Ending,
    Entered,
    ErrorRecord,
    EventRecord,
    RaceEvidence,
    RunResult,
    StreamUse,
    Verdict,
    What,
)
from tests.unit.harness.bisect.small_model import (
    CALLS,
    ROWS,
    Edit,
    calls_from,
    case_of,
    edited,
    fields_of,
    floats,
    of_rank,
    place_of,
    run_of,
)

LAYER, NORM = "layers.0.attn", "layers.0.attn.norm.weight"
MEMORY = "memory made by aten::new_empty at gradients.py:230 for the grad buffer of unit layers.1"


def use(operator: str, stream: str, *, writes: bool = True) -> StreamUse:
    return StreamUse(operator=operator, writes=writes, stream=stream, place="x.py:1")


RACE = RaceEvidence(
    tensor="root main_weight", unit="root", is_gradient=False,
    later=use("aten::copy_", "gather", writes=False), earlier=use("aten::_fused_adamw_", "main"),
)  # fmt: skip
RACE_GRAD = RaceEvidence(
    tensor=MEMORY, unit="layers.1", is_gradient=True,
    later=use("reuse", "main"), earlier=use("c10d::_reduce_scatter_base_", "reduce"),
)  # fmt: skip
GATHER = Entered(operator="allgather_base", label="layers.1")
NEVER = CollectiveFault(
    ranks=(1,), entered=None, others=(0,), expected=GATHER, group=(0, 1), number=50, step=2
)
ENTERED = dataclasses.replace(
    NEVER, entered=Entered(operator="allreduce"),
    expected=Entered(operator="reduce_scatter_base", label="layers.0"),
)  # fmt: skip
CAPTURING = dataclasses.replace(
    NEVER, entered=Entered(operator="all_reduce"),
    expected=Entered(operator="allgather_base", in_capture=True),
)  # fmt: skip


def ended(what: What, message: str = "boom", *, captured_in: int = 0, **fields: Any) -> RunResult:
    """A graphed run that rank 1 ended in step 2, with these fields of its error record."""
    run = run_of(graph=("attn",), captured_in=captured_in)
    error = ErrorRecord(
        rank=1, step=2, what=what, type="Error", message=message, traceback="", **fields
    )
    for rank in range(2):
        steps = run.ranks[rank].steps[:2]
        run = of_rank(run, rank, steps=steps, end=None, error=error if rank else None)
    outcome = dataclasses.replace(run.outcome, what=what, message=message, culprit_rank=1)
    return dataclasses.replace(run, outcome=outcome)


def silent(what: What, **ending: Any) -> RunResult:
    """A run that ended so, of which no rank left a record of its end."""
    run = of_rank(ended(what), 1, error=None)
    outcome = dataclasses.replace(run.outcome, ending=Ending(**ending))
    return dataclasses.replace(run, outcome=outcome)


LOST_GROUPS = "Could not resolve the process group registered under the name 0"
ODD = "stale_address: layers.9.mlp.w1: captured at 0x1; embedding is odd; race: head: a reads"


@pytest.mark.parametrize(
    ("run", "phase", "module", "tensor"),
    [
        (ended("stale_address", ODD, tensors=(NORM, "root")), "state", f"{LAYER}.norm", NORM),
        (ended("stale_address", tensors=("layers.0 full gradient",)), "state", "layers.0",
         "layers.0 full gradient"),
        (ended("stale_address", ODD), "state", "", ""),
        (ended("race", race=RACE), "forward", "embedding", "root main_weight"),
        (ended("race", race=RACE_GRAD), "reduce", "layers.1", MEMORY),
        (ended("race", ODD), "outside", "", ""),
        (ended("oom"), "outside", "", ""),
        (ended("capture_refused", phase="capture", module=LAYER), "capture", LAYER, ""),
        # A module is the one that raised, never one that words name.
        (ended("crashed", ODD, phase="capture", module="layers.1.mlp"), "capture", "layers.1.mlp",
         ""),
        (ended("crashed", ODD, phase="capture"), "capture", "", ""),
        (ended("crashed", phase="backward", tensors=(NORM, "head.weight")), "backward",
         f"{LAYER}.norm", NORM),
        # Whatever it wanted to exchange: no step takes groups away.
        (ended("crashed", LOST_GROUPS, phase="forward", module="layers.0"), "outside", "", ""),
        # It left no word but the module that it was in.
        (silent("killed", signal="SIGKILL", module=LAYER), "capture", LAYER, ""),
        (silent("hang", phase="backward", module="encoder"), "backward", "encoder", ""),
        (silent("hang"), "outside", "", ""),
        *((ended("crashed", phase=name), name, "", "")
          for name in ("forward", "backward", "optimizer", "reduce", "capture")),
        (ended("crashed", phase="replay"), "capture", "", ""),
        (ended("crashed", phase="backward", captured_in=2), "capture", "", ""),
    ],
)  # fmt: skip
def test_what_an_end_says_is_a_place(run: RunResult, phase: str, module: str, tensor: str) -> None:
    """Step and rank are the error's, module and tensor those of its fields; words say nothing."""
    found = between(run_of(), run)
    assert (found.phase, found.module, found.tensor) == (phase, module, tensor)
    assert (found.step, found.rank, found.ranks) == (2, 1, (1,))


@pytest.mark.parametrize(
    ("fault", "near", "phase", "collective"),
    [
        (NEVER, "before", "outside", "allgather_base of layers.1"),
        (ENTERED, "in", "reduce", "allreduce"),
        (CAPTURING, "in", "capture", "all_reduce"),
    ],
)
def test_a_hang_names_the_collective_and_who_is_missing(
    fault: CollectiveFault, near: str, phase: str, collective: str
) -> None:
    """Who waits in vain is not at fault; one rank captures where another does not."""
    found = between(run_of(), silent("hang", collective=fault))
    assert (found.near, found.phase, found.collective) == (near, phase, collective)
    assert (found.ranks, found.step) == ((1,), 2)


def test_a_difference_before_the_end_comes_first() -> None:
    """What was computed otherwise in step 1 may be why the rank died in step 2."""
    found = between(run_of(), edited(ended("crashed"), {1: calls_from("norm:output")}, step=1))
    assert (found.step, found.module) == (1, "norm")
    assert "boom" in found.evidence[-1]
    stale = edited(ended("stale_address", tensors=(NORM,)), {1: calls_from("norm:output")}, step=1)
    assert between(run_of(), stale).step == 1


def test_memory_that_grows_is_led_to_the_step_from_which_it_does() -> None:
    """All bits are equal: what each step leaves behind tells, on the rank that the check names."""
    candidate = run_of(graph=("attn",))
    for step in (2, 3):
        candidate = edited(candidate, {1: floats(live_bytes=1 + 64 * step)}, step=step)
    bad = failed("peak_memory", "memory_regression", "it grew", growth_rank=1.0)
    verdict = Verdict(
        case_id="x", outcome="failed", what="memory_regression", message="", checks=(bad,),
        runs={}, wall_s=0.0,
    )  # fmt: skip
    found = between(run_of(), candidate, verdict)
    assert (found.phase, found.step, found.rank) == ("outside", 2, 1)


def test_a_reference_that_failed_is_to_blame_itself() -> None:
    """A lost record of its own is no fault of the program: it has a step and a rank, no module."""
    whole = case_of(run_of(graph=("attn",)))
    lost = of_rank(whole.reference, 0, steps=whole.reference.ranks[0].steps[:3])
    expected = {"phase": "outside", "step": 3, "rank": 0, "quantity": "missing_step", "module": ""}
    for runs in (
        dataclasses.replace(whole, reference=lost), dataclasses.replace(whole, control=lost),
    ):  # fmt: skip
        found = locate(runs)
        assert fields_of(found, expected) == expected
        assert "the candidate is not to blame" in found.evidence[0]
    unlike = edited(whole.control, {1: calls_from("norm:output")})
    found = locate(dataclasses.replace(whole, control=unlike))
    assert (found.module, found.step) == ("norm", 2)
    assert "the candidate is not to blame" in found.evidence[0]


# --- steps that did not end


def stopped(edit: Edit, what: What, *, reached: int, captured_in: int = 1) -> RunResult:
    """The run with that edit of rank 1 if it fails in step 2, after so many calls of it."""
    whole = edited(run_of(graph=("attn",), captured_in=captured_in), {1: edit})
    run = ended(what, captured_in=captured_in, phase="backward")
    for rank, records in enumerate(whole.ranks):
        taps = records.steps[2].taps
        rows = [taps[i : i + TAP_HEX_CHARS] for i in range(0, len(taps), TAP_HEX_CHARS)]
        text = "".join(
            row if place_of(*name) < reached else "0" * DIGEST_HEX_CHARS + NEVER_RAN
            for name, row in zip(ROWS, rows, strict=True)
        )
        event = EventRecord(name=UNFINISHED, rank=rank, step=2, detail={"taps": text})
        run = of_rank(run, rank, events=(event,))
    return run


OUTPUT = f"{LAYER}:output"


@pytest.mark.parametrize(
    ("edit", "what", "reached", "captured_in", "expected"),
    [
        # The forward pass was wrong, and the backward pass stopped.
        (calls_from(OUTPUT), "crashed", len(CALLS), 1, ("forward", LAYER)),
        (lambda record: record, "crashed", len(CALLS), 1, ("backward", "")),
        # Calls that were not reached are no difference.
        (calls_from(OUTPUT), "crashed", place_of(OUTPUT, 0), 1, ("backward", "")),
        # The last row of a tap has all calls that have none of their own: some may be lacking.
        (calls_from("embedding:input", 1), "crashed", 2 * len(CALLS), 1, ("backward", "")),
        # An end that names its cause outranks its step.
        (calls_from(OUTPUT), "stale_address", len(CALLS), 1, ("state", "")),
        # Calls of the step that captures were also those of warm-ups and captures.
        (calls_from(OUTPUT), "crashed", len(CALLS), 2, ("capture", "")),
    ],
)
def test_what_went_wrong_before_the_end_in_its_step(
    edit: Edit, what: What, reached: int, captured_in: int, expected: tuple[str, str]
) -> None:
    """As far as the step came."""
    found = between(run_of(), stopped(edit, what, reached=reached, captured_in=captured_in))
    assert (found.phase, found.module) == expected
    assert (found.step, found.rank) == (2, 1)


class _Broke:
    """An asker without a budget."""

    def ask(self, *question: Any, **options: Any) -> Any:
        raise OutOfBudget("the budget of 0 runs is spent")


def test_no_run_is_spent_on_elements_of_a_step_that_did_not_end() -> None:
    """Contents are written after a step; where it ended, they are asked for."""
    asker = cast("Asker", _Broke())
    wrong = edited(run_of(graph=("attn",)), {1: calls_from(OUTPUT)})
    assert any("budget" in each for each in locate_case(case_of(wrong), asker).unknown)
    cut = stopped(calls_from(OUTPUT), "crashed", reached=len(CALLS))
    found = locate_case(case_of(cut), asker)
    assert found.tensor == OUTPUT
    assert found.unknown == ("element: step 2 did not end, so no contents were kept",)
