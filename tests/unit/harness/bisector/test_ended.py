"""Runs that died, hung or stopped themselves: what their last words are made into."""

import dataclasses

import pytest

from harness.bisector.ended import how_it_ended
from harness.bisector.locate import between
from harness.checks.answer import failed
from harness.records import ErrorRecord, RunResult, Verdict, What
from tests.unit.harness.bisector.small_model import calls_from, edited, floats, run_of

STALE = "stale_address: layers.0.attn.norm.weight: captured at 0x561a, now at 0x561b (and root)"
STALE_BUFFER = "stale_address: layers.0 full gradient: captured at 0x561a, now at 0x561b"
RACE = (
    "race: root main_weight: aten::copy_ reads on stream gather at param_group.py:287, "
    "aten::_fused_adamw_ writes on stream main at optim.py:49, unordered (and 2 more)"
)
MEMORY = "memory made by aten::new_empty at gradients.py:230 for the grad buffer of unit layers.1"
RACE_GRAD = (
    f"race: {MEMORY}: reuse writes on stream main at streams.py:66, "
    "c10d::_reduce_scatter_base_ writes on stream reduce at collectives.py:32, unordered"
)
NEVER = (
    "rank 1 never entered allgather_base of layers.1 in step 2 (collective 50 of ranks 0,1); time "
    "was up after 30 s; still running: rank 0 after step 1"
)
ENTERED = (
    "rank 1 entered allreduce where rank 0 entered reduce_scatter_base of layers.0 in step 2 "
    "(collective 9 of ranks 0,1); time was up"
)
CAPTURING = (
    "rank 1 entered all_reduce where rank 0 entered allgather_base in a capture in step 2 "
    "(collective 47 of ranks 0,1); time was up"
)
IN_CAPTURE = '  File "/x/fsdp_core/graph/capture.py", line 9, in capture\n'


def ended(
    what: What, message: str, *, rank: int = 1, traceback: str = "", module: str = ""
) -> RunResult:
    """A graphed run that a rank ended in step 2."""
    run = run_of(graph=("attn",))
    error = ErrorRecord(
        rank=rank, step=2, what=what, type="Error", message=message, traceback=traceback,
        module=module,
    )  # fmt: skip
    ranks = tuple(
        dataclasses.replace(
            each, steps=each.steps[:2], end=None, error=error if each.rank == rank else None
        )
        for each in run.ranks
    )
    told = message.removeprefix(f"{what}: ")
    outcome = dataclasses.replace(run.outcome, what=what, message=told, culprit_rank=rank)
    return dataclasses.replace(run, ranks=ranks, outcome=outcome)


@pytest.mark.parametrize(
    ("what", "message", "expected"),
    [
        ("stale_address", STALE, ("state", "layers.0.attn.norm", "layers.0.attn.norm.weight")),
        ("stale_address", STALE_BUFFER, ("state", "layers.0", "layers.0 full gradient")),
        ("race", RACE, ("forward", "embedding", "root main_weight")),
        ("race", RACE_GRAD, ("reduce", "layers.1", MEMORY)),
        ("oom", "out of memory", ("outside", "", "")),
        ("capture_refused", "layers.0.attn reads a value on the host",
         ("capture", "layers.0.attn", "")),
    ],
)  # fmt: skip
def test_an_error_that_names_its_tensor_is_a_place(
    what: What, message: str, expected: tuple[str, str, str]
) -> None:
    """Step and rank are the error's, module and tensor those that it names."""
    found = between(run_of(), ended(what, message))
    assert (found.phase, found.module, found.tensor) == expected
    assert (found.step, found.rank, found.ranks) == (2, 1, (1,))


def test_a_failure_while_a_graph_is_made_is_of_the_capture() -> None:
    """The traceback says what was under way."""
    found = between(run_of(), ended("crashed", "planted", traceback=IN_CAPTURE))
    assert found.phase == "capture"


@pytest.mark.parametrize(
    ("message", "near", "ranks", "collective"),
    [
        (NEVER, "before", (1,), "allgather_base of layers.1"),
        (ENTERED, "in", (1,), "allreduce"),
    ],
)
def test_a_hang_names_the_collective_and_who_is_missing(
    message: str, near: str, ranks: tuple[int, ...], collective: str
) -> None:
    """Who waits in vain is not at fault."""
    run = ended("hang", message, rank=0)
    silent = tuple(dataclasses.replace(each, error=None) for each in run.ranks)
    found = between(run_of(), dataclasses.replace(run, ranks=silent))
    assert (found.near, found.ranks, found.collective, found.step) == (near, ranks, collective, 2)


def test_ranks_that_meet_a_capture_in_the_wrong_collective_are_of_the_capture() -> None:
    """One rank captures where another does not: neither the model nor its reduction is at fault."""
    run = ended("hang", CAPTURING, rank=0)
    silent = tuple(dataclasses.replace(each, error=None) for each in run.ranks)
    found = between(run_of(), dataclasses.replace(run, ranks=silent))
    assert (found.phase, found.near, found.rank, found.step) == ("capture", "in", 1, 2)


def test_the_module_that_raised_outranks_those_that_words_name() -> None:
    """The record's module is where it was raised; words may name what it was raised about."""
    raised = ended("crashed", "embedding is odd", traceback=IN_CAPTURE, module="layers.1.mlp")
    assert between(run_of(), raised).module == "layers.1.mlp"
    told = ended("crashed", "embedding is odd", traceback=IN_CAPTURE)
    assert between(run_of(), told).module == "embedding"


def test_a_parameter_that_an_error_names_is_its_tensor() -> None:
    """As far as there is one of that name on any rank."""
    frames = '  File "/x/fsdp_core/fsdp/backward.py", line 1, in f\n'
    words = "a gradient of 'layers.0.attn.norm.weight' came before layers.9.attn.norm.weight"
    found = between(run_of(), ended("crashed", words, traceback=frames))
    assert (found.phase, found.tensor) == ("backward", "layers.0.attn.norm.weight")


def test_a_rank_without_its_process_group_failed_outside_of_the_step() -> None:
    """Whatever it wanted to exchange: no step takes groups away."""
    frames = '  File "/x/fsdp_core/parallel/collectives.py", line 1, in f\n'
    words = "Could not resolve the process group registered under the name 0"
    found = between(run_of(), ended("crashed", words, traceback=frames, module="layers.0"))
    assert (found.phase, found.module) == ("outside", "")


def test_a_rank_that_was_killed_in_a_capture_is_where_it_noted() -> None:
    """It left no word but the module that it was in, which is noted in captures alone."""
    killed = ended(
        "killed", "rank 1 died by SIGKILL after step 1 in module layers.0.attn, not by us"
    )
    silent = tuple(dataclasses.replace(each, error=None) for each in killed.ranks)
    found = between(run_of(), dataclasses.replace(killed, ranks=silent))
    assert (found.phase, found.module, found.rank) == ("capture", "layers.0.attn", 1)


def test_a_difference_before_the_end_comes_first() -> None:
    """What was computed otherwise in step 1 may be why the rank died in step 2."""
    died = ended("crashed", "boom")
    wrong = edited(died, {1: calls_from("norm:output")}, step=1)
    found = between(run_of(), wrong)
    assert (found.step, found.module) == (1, "norm")
    assert "boom" in found.evidence[-1]


def test_a_stale_address_outranks_the_difference_that_follows_from_it() -> None:
    """In the same step the ledger names the cause, the digests its effect."""
    wrong = edited(ended("stale_address", STALE), {1: calls_from("norm:output")}, step=1)
    assert between(run_of(), wrong).step == 1
    found = between(run_of(), ended("stale_address", STALE))
    assert found.tensor == "layers.0.attn.norm.weight"


@pytest.mark.parametrize(
    ("frame", "phase"),
    [
        ("/x/fsdp_core/model/gqa.py", "forward"), ("/x/fsdp_core/fsdp/backward.py", "backward"),
        ("/x/fsdp_core/optim.py", "optimizer"), ("/x/fsdp_core/fsdp/clip.py", "reduce"),
        ("/x/harness/worker/main.py", "outside"),
    ],
)  # fmt: skip
def test_a_crash_is_of_the_phase_in_which_it_happened(frame: str, phase: str) -> None:
    """The frames of its traceback say what the step was doing."""
    traceback = f'  File "{frame}", line 1, in f\n'
    assert between(run_of(), ended("crashed", "boom", traceback=traceback)).phase == phase


def test_memory_that_grows_is_led_to_the_step_from_which_it_does() -> None:
    """All bits are equal: what each step leaves behind tells, on the rank that the check names."""
    reference, candidate = run_of(), run_of(graph=("attn",))
    for step in (2, 3):
        edit = floats(live_bytes=1 + 64 * step)
        candidate = edited(candidate, {1: edit}, step=step)
    bad = failed("peak_memory", "memory_regression", "grew by 9 bytes on the worst rank (1), so")
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
