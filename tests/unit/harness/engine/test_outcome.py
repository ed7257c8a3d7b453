"""What happened, and whose fault: one row a situation."""

import errno
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from harness.engine import outcome as outcomes
from harness.engine.collective_log import Fault, Place
from harness.engine.outcome import (
    NOT_THE_KERNEL,
    Answer,
    FirstFailure,
    RankEvidence,
    claim,
    classify,
    ending_of,
    find,
    memory_kills_since,
    num_memory_kills,
    with_sender,
)
from harness.records import (
    SCHEMA_VERSION,
    CollectiveFault,
    Ending,
    EndRecord,
    Entered,
    ErrorRecord,
    FloatBits,
    RankExit,
    RankRecords,
    RunOutcome,
    StartRecord,
    StepRecord,
    What,
)

GLOO_LOST = "[/pytorch/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:13327"
NCCL_LOST = "NCCL error: remote process exited or there was a network error"
GLOO_WAITED = "Timed out waiting 5000ms for recv operation to complete"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def rank(
    number: int, code: int | None = 0, *, ours: bool = False, steps: int = 3,
    what: What | None = None, message: str = "", tail: str = "", end: bool = False,
    blames: int | None = None,
) -> RankEvidence:  # fmt: skip
    """Evidence of one rank; `what` gives it an error record."""
    one = FloatBits(bits="3f800000", value=1.0)
    start = StartRecord(
        schema=SCHEMA_VERSION, rank=number, world_size=4, pid=1, device="cpu", tensors={},
        environment={},
    )  # fmt: skip
    step = StepRecord(
        step=0, rank=number, loss=one, microbatch_losses=(), grad_norm=one, digests={},
        nonfinite={}, step_s=0.0, live_bytes=1, peak_bytes=1,
    )  # fmt: skip
    error = ErrorRecord(
        rank=number, step=steps, what=what or "", type="E", message=message, traceback="",
        blames=blames,
    )  # fmt: skip
    last = EndRecord(rank=number, steps=steps, peak_bytes=1, startup_s=0.0, wall_s=0.0)
    records = RankRecords(
        rank=number, start=start, steps=tuple(replace(step, step=i) for i in range(steps)),
        events=(), error=None if what is None else error, end=last if end else None, problems=(),
    )  # fmt: skip
    exit_state = RankExit(rank=number, code=code, killed_by_harness=ours)
    return RankEvidence(exit=exit_state, records=records, stderr_tail=tail)


def good(number: int) -> RankEvidence:
    return rank(number, end=True)


def lost(number: int, message: str = GLOO_LOST, what: What = "crashed") -> RankEvidence:
    return rank(number, 1, what=what, message=message)


def ended(number: int, steps: int = 3) -> RankEvidence:
    """A rank that the harness had to kill."""
    return rank(number, -9, ours=True, steps=steps)


ROWS: dict[str, tuple[list[RankEvidence], list[int], bool, What, int | None]] = {
    "all well": ([good(0), good(1)], [], False, "", None),
    "own error": ([good(0), rank(1, 1, what="oom", message="out of")], [1], False, "oom", 1),
    "own error, exit 0": ([good(0), rank(1, 0, what="nonfinite")], [], False, "nonfinite", 1),
    "own error, then SIGABRT": ([rank(0, -6, what="illegal_access")], [0], False,
                                "illegal_access", 0),
    "own error without a what": ([rank(0, 1, what="", message="x")], [0], False, "crashed", 0),
    "first own error wins": ([rank(0, 1, what="oom"), rank(1, 1, what="nonfinite")], [1, 0],
                             False, "nonfinite", 1),
    "SIGKILL from outside": ([good(0), rank(1, -9)], [1], False, "killed", 1),
    "SIGTERM from outside": ([rank(0, -15)], [0], False, "killed", 0),
    "SIGSEGV": ([rank(0, -11)], [0], False, "crashed", 0),
    "SIGBUS": ([rank(0, -7)], [0], False, "crashed", 0),
    "SIGABRT with CUDA text": ([rank(0, -6, tail=ILLEGAL)], [0], False, "illegal_access", 0),
    "exit 1 with CUDA text": ([rank(0, 1, tail=ILLEGAL)], [0], False, "illegal_access", 0),
    "exit 1 with OOM text": ([rank(0, 1, tail="CUDA out of memory.")], [0], False, "oom", 0),
    "exit 13": ([rank(0, 13)], [0], False, "crashed", 0),
    "silent death, victims seen first": ([lost(0), lost(1), rank(2, -9)], [0, 1, 2], False,
                                         "killed", 2),
    "silent death, NCCL victims": ([rank(0, -11), lost(1, NCCL_LOST)], [0, 1], False,
                                   "crashed", 0),
    "silent death, victims that waited": ([rank(0, -9), lost(1, GLOO_WAITED, "hang")], [0, 1],
                                          False, "killed", 0),
    "gave up in odd words, later silent death": (
        [lost(0, "odd words", "hang"), rank(1, -9)], [0, 1], False, "killed", 1,
    ),
    "full disk after a silent death": ([rank(0, -9), rank(1, 74)], [0, 1], False, "killed", 0),
    "full disk, victims": ([lost(0), rank(1, 74)], [0, 1], False, "interrupted", 1),
    "silent death, later odd error": ([rank(0, -9), lost(1, "odd words")], [0, 1], False,
                                      "killed", 0),
    "odd error, later silent death": ([rank(0, -6), lost(1, "odd words")], [1, 0], False,
                                      "crashed", 1),
    "silent death, other rank's own oom": ([rank(0, -6), rank(1, 1, what="oom")], [0, 1], False,
                                           "oom", 1),
    "error and victims": ([lost(0), rank(1, 1, what="stale_address", message="w")], [0, 1],
                          False, "stale_address", 1),
    "blames another that failed later": (
        [rank(0, 1, what="capture_refused", blames=1), rank(1, 1, what="oom")], [0, 1], False,
        "oom", 1,
    ),
    "blames a silent death": ([rank(0, 1, what="oom", blames=1), rank(1, -9)], [0, 1], False,
                              "killed", 1),
    "blames itself": ([rank(0, 1, what="oom", blames=0), lost(1)], [1, 0], False, "oom", 0),
    "only victims": ([lost(0), lost(1)], [1, 0], False, "crashed", 1),
    "one left early": ([lost(0), rank(1, 0)], [0], False, "crashed", 1),
    "one finished well, victims": ([lost(0), good(1)], [0], False, "crashed", 0),
    "all hang": ([ended(0), ended(1)], [], True, "hang", None),
    "one behind hangs": ([ended(0), ended(1, steps=1)], [], True, "hang", 1),
    "one hangs, others done": ([good(0), ended(1)], [], True, "hang", 1),
    "one hangs, others gave up": ([lost(0, GLOO_WAITED, "hang"), ended(1)], [0], False,
                                  "hang", 1),
    "one fails, others killed": ([rank(0, 13), ended(1)], [0], False, "crashed", 0),
    "time up, but one had failed": ([rank(0, -11), ended(1)], [0], True, "crashed", 0),
    "never started": ([rank(0, None, tail="fork: Resource temporarily unavailable"),
                       ended(1)], [0], False, "not_run", 0),
    "full disk": ([rank(0, 74)], [0], False, "interrupted", 0),
    "the same code after the end record": ([rank(0, 74, end=True)], [0], False, "crashed", 0),
    "another disk full, recorded": (
        [rank(0, 1, what="crashed", message="[Errno 28] No space left on device")], [0], False,
        "crashed", 0,
    ),
    "another disk full, printed": (
        [rank(0, -11, tail="OSError: [Errno 28] No space left on device")], [0], False,
        "crashed", 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_happened_and_whose_fault(row: str) -> None:
    """Each situation has one answer and one culprit, in whatever order ranks are listed."""
    ranks, order, timed_out, what, culprit = ROWS[row]
    got = classify(ranks, timed_out=timed_out, timeout_s=5.0, failed_order=order)
    assert (got.what, got.culprit) == (what, culprit), got.message
    assert classify(ranks[::-1], timed_out=timed_out, timeout_s=5.0, failed_order=order) == got
    assert bool(got.message) == bool(what)
    assert "\n" not in got.message


def stack(*frames: tuple[str, int, str], more: str = "") -> str:
    """What faulthandler prints, after other output."""
    lines = [f'  File "{path}", line {line} in {name}' for path, line, name in frames]
    text = "\n".join(["noise", "Current thread 0x00007f (most recent call first):", *lines])
    return f"{text}\n{more}"


WAITING = stack(
    ("/site/torch/distributed/distributed_c10d.py", 44, "all_gather"), ("/a/train.py", 9, "step")
)
WAITING_IN_A_LAYER = stack(
    ("/site/torch/_ops.py", 875, "__call__"), ("/a/fsdp_core/parallel/collectives.py", 101, "f")
)
SLEEPING = stack(("/a/plant.py", 114, "_hang"), ("/a/train.py", 7, "step"))
OTHER_THREAD = (
    'Thread 0x1 (most recent call first):\n  File "/x/torch/distributed/y.py", line 1 in f'
)


def stuck(number: int, tail: str) -> RankEvidence:
    return rank(number, -9, ours=True, tail=tail)


@pytest.mark.parametrize(
    ("tails", "culprit"),
    [
        ((WAITING, SLEEPING, WAITING), 1),
        ((WAITING, WAITING_IN_A_LAYER, SLEEPING), 2),
        ((WAITING, stack(("/a/plant.py", 1, "_hang"), more="\n" + OTHER_THREAD)), 1),
        ((WAITING, stack(("/a/plant.py", 1, "_hang"), more=OTHER_THREAD)), 1),
        ((WAITING, WAITING), None),
        ((SLEEPING, SLEEPING), None),
        ((WAITING, SLEEPING, SLEEPING), None),
        ((WAITING, SLEEPING, ""), None),
        ((SLEEPING, "no stack"), None),
        ((stack(), WAITING), None),
    ],
)
def test_stacks_single_out_the_rank_that_the_others_wait_for(
    tails: tuple[str, ...], culprit: int | None
) -> None:
    """All but one wait in a collective: that one is the culprit; with any doubt there is none."""
    ranks = [stuck(number, tail) for number, tail in enumerate(tails)]
    assert classify(ranks, timed_out=True, timeout_s=5.0)[2] == culprit


def test_a_hang_says_where_each_rank_was() -> None:
    """The innermost frame of every stack is in the message, without its folder."""
    message = classify([stuck(0, WAITING), stuck(1, SLEEPING)], timed_out=True, timeout_s=5.0)[1]
    assert message == (
        "the others waited for rank 1, after step 2 in _hang (plant.py:114); "
        "time was up after 5 s; still running: rank 0 after step 2 in all_gather "
        "(distributed_c10d.py:44), rank 1 after step 2 in _hang (plant.py:114)"
    )


def test_a_crash_tells_who_followed() -> None:
    """The message names the culprit's end first, then who failed with it and who was killed."""
    ranks = [lost(0), rank(1, -11), ended(2)]
    message = classify(ranks, timed_out=False, timeout_s=5.0, failed_order=[1, 0])[1]
    assert message == (
        "rank 1 died by SIGSEGV after step 2; then rank 0 failed too; rank 2 ended by the harness"
    )


def at(
    evidence: RankEvidence,
    operator: str = "_allgather_base_",
    label: str = "root",
    *,
    number: int = 142,
    inside: bool = True,
) -> RankEvidence:
    """The same rank, by its place in the collectives of all three."""
    place = Place(
        step=20, operator=f"c10d::{operator}", label=label, group=(0, 1, 2), is_inside=inside,
        entered={"0,1,2": number},
    )  # fmt: skip
    return replace(evidence, place=place)


def test_a_stall_names_the_rank_that_a_collective_lacks() -> None:
    """Places say who never entered what; the time that nothing was recorded is said, too."""
    ranks = [at(stuck(0, WAITING)), at(stuck(1, SLEEPING), number=141, inside=False)]
    answer = classify(ranks, timed_out=False, timeout_s=5.0, stalled_s=2.0)
    assert (answer.what, answer.culprit) == ("hang", 1)
    ending = ending_of(answer, ranks)
    assert ending is not None
    assert ending.collective == CollectiveFault(
        ranks=(1,), entered=None, others=(0, 2), group=(0, 1, 2), number=142, step=20,
        expected=Entered(operator="allgather_base", label="root"),
    )  # fmt: skip
    assert answer.message.startswith(
        "rank 1 never entered allgather_base of root in step 20 (collective 142 of ranks 0,1,2); "
        "no rank recorded anything for 2 s; still running: rank 0 "
    )


def test_a_wrong_collective_is_named_in_a_hang() -> None:
    """All wait, one of them in another collective: it is to blame, and both are told."""
    ranks = [at(ended(0)), at(ended(1)), at(ended(2), "allreduce_")]
    answer = classify(ranks, timed_out=True, timeout_s=9.0)
    assert (answer.what, answer.culprit) == ("hang", 2)
    ending = ending_of(answer, ranks)
    assert ending is not None
    assert ending.collective == CollectiveFault(
        ranks=(2,), entered=Entered(operator="allreduce", label="root"), others=(0, 1),
        expected=Entered(operator="allgather_base", label="root"), group=(0, 1, 2), number=142,
        step=20,
    )  # fmt: skip


@pytest.mark.parametrize("end", [False, True])
def test_a_rank_that_others_wait_for_is_named_though_it_ended_well(end: bool) -> None:
    """Exit code 0 is no alibi while another waits in a collective that it never entered."""
    ranks = [at(rank(0, 0, end=end), number=141, inside=False), at(ended(1)), at(ended(2))]
    answer = classify(ranks, timed_out=True, timeout_s=10)
    assert (answer.what, answer.culprit) == ("hang", 0)
    assert ("before its end record" in answer.message) != end


def test_ranks_that_all_ended_well_left_nobody_behind() -> None:
    """A collective that nobody waited for, in a run that came to its end, is no hang."""
    ranks = [at(good(0), number=141, inside=False), at(good(1)), at(good(2))]
    assert classify(ranks, timed_out=False, timeout_s=10) == Answer("", "", None)


def test_a_process_that_stays_after_its_end_record_is_a_hang() -> None:
    """Nothing passes that its user has to kill."""
    stayed = rank(0, -9, ours=True, end=True)
    answer = classify([stayed, good(1)], timed_out=False, timeout_s=10)
    assert (answer.what, "every rank has recorded its end" in answer.message) == ("hang", True)
    answer = classify([stayed, ended(1)], timed_out=False, timeout_s=10, stalled_s=5)
    assert answer.what == "hang"


def test_who_gave_up_waiting_says_for_whom() -> None:
    """Its place is where it gave up: rank 1, still running, never entered that collective."""
    gave_up = at(lost(0, GLOO_WAITED, "hang"), inside=False)
    ranks = [gave_up, at(ended(1, steps=9), number=141, inside=False)]
    answer = classify(ranks, timed_out=False, timeout_s=10, failed_order=(0,))
    assert (answer.what, answer.culprit) == ("hang", 1)
    assert answer.message.startswith("rank 1 never entered allgather_base of root")


def test_whom_gloo_aborts_is_not_who_was_wrong() -> None:
    """Rank 2 left a gather out; gloo aborts rank 0, which only got what was not meant for it."""
    told = "Received data size doesn't match expected size. Is there a collective mismatch?"
    ranks = [
        at(rank(0, -6, tail=told)),
        at(lost(1)),
        at(lost(2), label="layers.0"),
    ]
    answer = classify(ranks, timed_out=False, timeout_s=9.0, failed_order=(0, 1, 2))
    what, message, culprit, fault = answer
    assert isinstance(fault, Fault)
    assert (what, culprit) == ("crashed", 2)
    assert message.startswith("rank 2 entered allgather_base of layers.0 where ranks 0, 1 entered")
    assert "rank 0 died by SIGABRT" in message
    other = [replace(ranks[0], stderr_tail="assertion failed"), *ranks[1:]]
    left = classify(other, timed_out=False, timeout_s=9.0, failed_order=(0, 1, 2))
    assert left.culprit == 0, "it died of something else"


def test_a_killed_rank_is_told_with_the_module_that_it_was_in() -> None:
    """Where it noted one."""
    dead = replace(rank(1, -9), module="layers.0.attn")
    answer = classify([good(0), dead], timed_out=False, timeout_s=1.0)
    assert ending_of(answer, [good(0), dead]) == Ending(signal="SIGKILL", module="layers.0.attn")
    assert answer.message.startswith(
        "rank 1 died by SIGKILL after step 2 in module layers.0.attn, not"
    )


def test_an_exception_ends_a_run_with_what_its_rank_noted() -> None:
    """Its type, place, phase, module and tensor are fields; nobody reads them off the message."""
    raised = rank(1, 1, what="crashed", message="boom")
    assert raised.records.error is not None
    noted = replace(
        raised.records.error, type="TensorError", raised_at="unit.py:9 close", phase="backward",
        module="layers.0", tensors=("layers.0.mlp.w1", "head"),
    )  # fmt: skip
    raised = replace(raised, records=replace(raised.records, error=noted))
    answer = classify([good(0), raised], timed_out=False, timeout_s=1.0)
    assert ending_of(answer, [good(0), raised]) == Ending(
        exception="TensorError", raised_at="unit.py:9 close", phase="backward",
        module="layers.0", tensor="layers.0.mlp.w1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "machine"),
    [(errno.EAGAIN, "no_process"), (errno.ENOMEM, "no_process"), (errno.EPERM, "")],
)
def test_a_rank_that_could_not_be_forked_is_told_by_the_error_number(
    number: int, machine: str
) -> None:
    """The kernel has no process or no memory left: of the machine. Any other refusal is not."""
    refused = rank(0, None)
    refused = replace(refused, exit=replace(refused.exit, errno=number))
    answer = classify([refused], timed_out=False, timeout_s=1.0)
    assert ending_of(answer, [refused]) == Ending(machine=machine)


# --- who sent a SIGKILL, who failed first -------------------------------------------------------


def killed(code: int = -9, what: What = "killed", culprit: int | None = 1) -> RunOutcome:
    return RunOutcome(
        key="k", what=what, message="it died", culprit_rank=culprit, started_unix_s=0.0, wall_s=1.0,
        ranks=(RankExit(rank=0, code=1), RankExit(rank=1, code=code)),
    )  # fmt: skip


def test_who_sent_a_sigkill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's count of those whom it killed for want of memory, where it can be read."""
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 1\noom_kill_more 9\noom_kill 7\n")
    monkeypatch.setattr(outcomes, "_COUNTERS", counters)
    assert [memory_kills_since(before) for before in (7, 5, None)] == [0, 2, None]
    for text in ("nr_free_pages 1\n", "oom_kill many\n", "oom_kill \n"):
        counters.write_text(text)
        assert num_memory_kills() is memory_kills_since(7) is None
    counters.unlink()
    assert num_memory_kills() is None
    for outcome in (killed(), killed(culprit=None)):  # of a rank, or of the leader
        told = with_sender(outcome, 0)
        assert told == replace(outcome, message=f"it died; {NOT_THE_KERNEL}", from_outside=True)
    told = with_sender(killed(), 1)
    assert (told.from_outside, with_sender(killed(), None)) == (False, killed())
    assert told.message == "it died; the kernel killed 1 for want of memory meanwhile"
    for other in (killed(what="crashed"), killed(code=-15)):
        assert with_sender(other, 0) == other


def test_the_first_to_say_that_it_failed_is_found() -> None:
    """Whoever asks in time; a later failure does not take its place, and words are cut."""
    store, at_once = dist.HashStore(), timedelta(milliseconds=1)
    assert find(store, at_once) is None
    assert find(None, at_once) is None
    claim(store, FirstFailure(3, "x" * 100_000))
    claim(store, FirstFailure(1, "Connection closed"))
    assert find(store, at_once) == FirstFailure(3, "x" * 500)
    for no_store in (object(), None):  # a leader whose ranks need no torch has a socket there
        claim(no_store, FirstFailure(0, "x"))
