"""Runs that died, hung or stopped themselves: what their last words are made into."""

import dataclasses
from typing import Any

import pytest

from harness.bisect.locate import between, how_it_ended
from harness.checks.evidence import failed
from harness.records import (
    CollectiveFault,
    Ending,
    Entered,
    ErrorRecord,
    Passed,
    RaceEvidence,
    RunResult,
    StreamUse,
    Verdict,
    What,
)
from tests.unit.harness.bisect.small_model import calls_from, edited, floats, run_of

NORM = "layers.0.attn.norm.weight"
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


def ended(
    what: What, message: str = "boom", *, rank: int = 1, ending: Ending | None = None, **fields: Any
) -> RunResult:
    """A graphed run that a rank ended in step 2, with these fields of its error record."""
    run = run_of(graph=("attn",))
    error = ErrorRecord(
        rank=rank, step=2, what=what, type="Error", message=message, traceback="", **fields
    )
    ranks = tuple(
        dataclasses.replace(
            each, steps=each.steps[:2], end=None, error=error if each.rank == rank else None
        )
        for each in run.ranks
    )
    outcome = dataclasses.replace(
        run.outcome, what=what, message=message, culprit_rank=rank, ending=ending
    )
    return dataclasses.replace(run, ranks=ranks, outcome=outcome)


def silent(run: RunResult) -> RunResult:
    """The same, where no rank left a record of its end."""
    ranks = tuple(dataclasses.replace(each, error=None) for each in run.ranks)
    return dataclasses.replace(run, ranks=ranks)


@pytest.mark.parametrize(
    ("what", "fields", "expected"),
    [
        ("stale_address", {"tensors": (NORM, "root")}, ("state", "layers.0.attn.norm", NORM)),
        ("stale_address", {"tensors": ("layers.0 full gradient",)},
         ("state", "layers.0", "layers.0 full gradient")),
        ("race", {"race": RACE}, ("forward", "embedding", "root main_weight")),
        ("race", {"race": RACE_GRAD}, ("reduce", "layers.1", MEMORY)),
        ("oom", {}, ("outside", "", "")),
        ("capture_refused", {"phase": "capture", "module": "layers.0.attn"},
         ("capture", "layers.0.attn", "")),
        ("stale_address", {}, ("state", "", "")),
        ("race", {}, ("outside", "", "")),
    ],
)  # fmt: skip
def test_an_error_that_names_its_tensor_is_a_place(
    what: What, fields: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    """Step and rank are the error's, module and tensor those of its fields; words say nothing."""
    words = "stale_address: layers.9.mlp.w1: captured at 0x1; race: head: a reads on stream b at c"
    found = between(run_of(), ended(what, words, **fields))
    assert (found.phase, found.module, found.tensor) == expected
    assert (found.step, found.rank, found.ranks) == (2, 1, (1,))


@pytest.mark.parametrize(
    ("fault", "near", "ranks", "collective"),
    [
        (NEVER, "before", (1,), "allgather_base of layers.1"),
        (ENTERED, "in", (1,), "allreduce"),
    ],
)
def test_a_hang_names_the_collective_and_who_is_missing(
    fault: CollectiveFault, near: str, ranks: tuple[int, ...], collective: str
) -> None:
    """Who waits in vain is not at fault."""
    run = silent(ended("hang", rank=0, ending=Ending(collective=fault)))
    found = between(run_of(), run)
    assert (found.near, found.ranks, found.collective, found.step) == (near, ranks, collective, 2)


def test_ranks_that_meet_a_capture_in_the_wrong_collective_are_of_the_capture() -> None:
    """One rank captures where another does not: neither the model nor its reduction is at fault."""
    run = silent(ended("hang", rank=0, ending=Ending(collective=CAPTURING)))
    found = between(run_of(), run)
    assert (found.phase, found.near, found.rank, found.step) == ("capture", "in", 1, 2)


def test_a_module_is_the_one_that_raised_never_one_that_words_name() -> None:
    """A message may say anything."""
    raised = ended("crashed", "embedding is odd", phase="capture", module="layers.1.mlp")
    assert between(run_of(), raised).module == "layers.1.mlp"
    said = ended("crashed", "embedding is odd", phase="capture")
    assert between(run_of(), said).module == ""


def test_a_parameter_that_an_error_names_is_its_tensor() -> None:
    """And its module, where no module was at work."""
    found = between(run_of(), ended("crashed", phase="backward", tensors=(NORM, "head.weight")))
    assert (found.phase, found.tensor, found.module) == ("backward", NORM, "layers.0.attn.norm")


def test_a_rank_without_its_process_group_failed_outside_of_the_step() -> None:
    """Whatever it wanted to exchange: no step takes groups away."""
    words = "Could not resolve the process group registered under the name 0"
    found = between(run_of(), ended("crashed", words, phase="forward", module="layers.0"))
    assert (found.phase, found.module) == ("outside", "")


def test_a_rank_that_was_killed_in_a_capture_is_where_it_noted() -> None:
    """It left no word but the module that it was in, which is noted in captures alone."""
    ending = Ending(signal="SIGKILL", module="layers.0.attn")
    found = between(run_of(), silent(ended("killed", ending=ending)))
    assert (found.phase, found.module, found.rank) == ("capture", "layers.0.attn", 1)


def test_a_rank_of_a_program_that_hung_is_where_it_said() -> None:
    """Asked as it hung, it named phase and module, which need not be of a capture."""
    ending = Ending(phase="backward", module="encoder")
    found = between(run_of(), silent(ended("hang", ending=ending)))
    assert (found.phase, found.module) == ("backward", "encoder")


def test_a_run_folder_older_than_the_fields_has_an_unknown_place() -> None:
    """It still has a step and a rank, and is not misread."""
    words = "rank 1 never entered allgather_base of layers.1 in step 2 (collective 5 of ranks 0,1)"
    found = between(run_of(), silent(ended("hang", words)))
    assert (found.module, found.collective, found.phase, found.rank) == ("", "", "outside", 1)


def test_a_difference_before_the_end_comes_first() -> None:
    """What was computed otherwise in step 1 may be why the rank died in step 2."""
    died = ended("crashed", "boom")
    wrong = edited(died, {1: calls_from("norm:output")}, step=1)
    found = between(run_of(), wrong)
    assert (found.step, found.module) == (1, "norm")
    assert "boom" in found.evidence[-1]


def test_a_stale_address_outranks_the_difference_that_follows_from_it() -> None:
    """In the same step the ledger names the cause, the digests its effect."""
    wrong = edited(ended("stale_address", tensors=(NORM,)), {1: calls_from("norm:output")}, step=1)
    assert between(run_of(), wrong).step == 1
    found = between(run_of(), ended("stale_address", tensors=(NORM,)))
    assert found.tensor == NORM


@pytest.mark.parametrize(
    ("passed", "phase"),
    [("forward", "forward"), ("backward", "backward"), ("optimizer", "optimizer"),
     ("reduce", "reduce"), ("capture", "capture"), ("replay", "capture"), ("", "outside")],
)  # fmt: skip
def test_a_crash_is_of_the_phase_in_which_it_happened(passed: Passed, phase: str) -> None:
    """As the rank noted it; a replay of a whole step is what was captured."""
    assert between(run_of(), ended("crashed", phase=passed)).phase == phase


def test_memory_that_grows_is_led_to_the_step_from_which_it_does() -> None:
    """All bits are equal: what each step leaves behind tells, on the rank that the check names."""
    reference, candidate = run_of(), run_of(graph=("attn",))
    for step in (2, 3):
        edit = floats(live_bytes=1 + 64 * step)
        candidate = edited(candidate, {1: edit}, step=step)
    bad = failed("peak_memory", "memory_regression", "it grew", growth_rank=1.0)
    verdict = Verdict(
        case_id="x", outcome="failed", what="memory_regression", message="", checks=(bad,),
        runs={}, wall_s=0.0,
    )  # fmt: skip
    found = between(reference, candidate, verdict)
    assert (found.phase, found.step, found.rank) == ("outside", 2, 1)


def test_a_lost_record_is_no_fault_of_the_program() -> None:
    """A step without a record has a rank and a number, and no module."""
    run = run_of(graph=("attn",))
    ranks = (dataclasses.replace(run.ranks[0], steps=run.ranks[0].steps[:3]), run.ranks[1])
    found = how_it_ended(dataclasses.replace(run, ranks=ranks))
    assert found is not None
    assert (found.phase, found.step, found.rank, found.quantity) == (
        "outside",
        3,
        0,
        "missing_step",
    )
