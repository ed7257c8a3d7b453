"""What happened, and whose fault: one row a situation."""

import errno
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from harness.engine import outcome as outcomes
from harness.engine.evidence import Place
from harness.engine.outcome import Answer, FirstFailure, RankEvidence, classify, ending_of
from harness.records import CollectiveFault, Ending, Entered, RankExit, RunOutcome, What
from tests.planted.stub_ranks import start_record, step_record
from tests.support import records

GLOO_LOST = "[/pytorch/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:13327"
NCCL_LOST = "NCCL error: remote process exited or there was a network error"
GLOO_WAITED = "Timed out waiting 5000ms for recv operation to complete"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
NO_SPACE = "[Errno 28] No space left on device"
SPEC = records.run_spec(4, config={"graph": []}, timeout_s=5.0)


def rank(
    number: int, code: int | None = 0, *, ours: bool = False, steps: int = 3,
    what: What | None = None, tail: str = "", end: bool = False, **error: Any,
) -> RankEvidence:  # fmt: skip
    """Evidence of one rank; `what` gives it an error record."""
    failure = records.error(number, step=steps, what=what or "", **({"message": ""} | error))
    of_rank = records.rank_records(
        number, start=start_record(SPEC, number),
        steps=tuple(step_record(step, number) for step in range(steps)),
        error=None if what is None else failure,
        end=records.end(number, steps=steps) if end else None,
    )  # fmt: skip
    exit_state = RankExit(rank=number, code=code, killed_by_harness=ours)
    return RankEvidence(exit=exit_state, records=of_rank, stderr_tail=tail)


def good(number: int) -> RankEvidence:
    return rank(number, end=True)


def lost(number: int, message: str = GLOO_LOST, what: What = "crashed") -> RankEvidence:
    return rank(number, 1, what=what, message=message)


def ended(number: int, tail: str = "", steps: int = 3) -> RankEvidence:
    """A rank that the harness had to kill."""
    return rank(number, -9, ours=True, steps=steps, tail=tail)


def held(number: int) -> RankEvidence:
    """A rank that somebody had stopped."""
    rank = ended(number)
    return replace(rank, exit=replace(rank.exit, is_stopped=True))


def own(number: int, what: What, code: int = 1, **error: Any) -> RankEvidence:
    return rank(number, code, what=what, **error)


def died(number: int, code: int | None, tail: str = "") -> RankEvidence:
    return rank(number, code, tail=tail)


def failed(ranks: list[RankEvidence], order: Sequence[int]) -> list[RankEvidence]:
    """The ranks, with when those in `order` failed."""
    at = {rank: float(time) for time, rank in enumerate(order)}
    return [replace(r, exit=replace(r.exit, failed_at=at.get(r.rank))) for r in ranks]


def stack(*frames: tuple[str, int, str], more: str = "") -> str:
    """What faulthandler prints, after other output."""
    lines = [f'  File "{path}", line {line} in {name}' for path, line, name in frames]
    text = "\n".join(["noise", "Current thread 0x00007f (most recent call first):", *lines])
    return f"{text}\n{more}"


WAITING = stack(
    ("/site/torch/distributed/distributed_c10d.py", 44, "all_gather"), ("/a/train.py", 9, "step")
)
WAITING_IN_A_LAYER = stack(
    ("/site/torch/_ops.py", 875, "__call__"), ("/a/fsdp_core/parallel/mesh.py", 101, "f")
)
IN_MAIN = ("/a/harness/worker/main.py", 236, "_train")
AGREEING = stack(("/a/harness/worker/main.py", 455, "_agree"), IN_MAIN)
SLEEPING = stack(("/a/plant.py", 114, "_hang"), ("/a/train.py", 7, "step"))
OTHER_THREAD = (
    'Thread 0x1 (most recent call first):\n  File "/x/torch/distributed/y.py", line 1 in f'
)


WAITED = "time was up after 5 s"
ROWS: dict[str, tuple[list[RankEvidence], list[int], What, int | None]] = {
    "all well": ([good(0), good(1)], [], "", None),
    "own error": ([good(0), own(1, "oom")], [1], "oom", 1),
    "own error, exit 0": ([good(0), own(1, "nonfinite", 0)], [], "nonfinite", 1),
    "own error, then SIGABRT": ([own(0, "illegal_access", -6)], [0], "illegal_access", 0),
    "own error without a what": ([own(0, "")], [0], "crashed", 0),
    "first own error wins": ([own(0, "oom"), own(1, "nonfinite")], [1, 0], "nonfinite", 1),
    "SIGKILL from outside": ([good(0), died(1, -9)], [1], "killed", 1),
    "SIGTERM from outside": ([died(0, -15)], [0], "killed", 0),
    "SIGSEGV": ([died(0, -11)], [0], "crashed", 0),
    "SIGBUS": ([died(0, -7)], [0], "crashed", 0),
    "SIGABRT with CUDA text": ([died(0, -6, ILLEGAL)], [0], "illegal_access", 0),
    "exit 1 with CUDA text": ([died(0, 1, ILLEGAL)], [0], "illegal_access", 0),
    "exit 1 with OOM text": ([died(0, 1, "CUDA out of memory.")], [0], "oom", 0),
    "exit 13": ([died(0, 13)], [0], "crashed", 0),
    "silent death, victims seen first": ([lost(0), lost(1), died(2, -9)], [0, 1, 2], "killed", 2),
    "silent death, NCCL victims": ([died(0, -11), lost(1, NCCL_LOST)], [0, 1], "crashed", 0),
    "silent death, victims that waited": (
        [died(0, -9), lost(1, GLOO_WAITED, "hang")], [0, 1], "killed", 0),
    "gave up in odd words, later silent death": (
        [lost(0, "odd words", "hang"), died(1, -9)], [0, 1], "killed", 1),
    "full disk after a silent death": ([died(0, -9), died(1, 74)], [0, 1], "killed", 0),
    "full disk, victims": ([lost(0), died(1, 74)], [0, 1], "interrupted", 1),
    "silent death, later odd error": ([died(0, -9), lost(1, "odd words")], [0, 1], "killed", 0),
    "odd error, later silent death": ([died(0, -6), lost(1, "odd words")], [1, 0], "crashed", 1),
    "silent death, other rank's own oom": ([died(0, -6), own(1, "oom")], [0, 1], "oom", 1),
    "error and victims": ([lost(0), own(1, "stale_address")], [0, 1], "stale_address", 1),
    "blames another that failed later": (
        [own(0, "capture_refused", blames=1), own(1, "oom")], [0, 1], "oom", 1),
    "blames a silent death": ([own(0, "oom", blames=1), died(1, -9)], [0, 1], "killed", 1),
    "blames itself": ([own(0, "oom", blames=0), lost(1)], [1, 0], "oom", 0),
    "only victims": ([lost(0), lost(1)], [1, 0], "crashed", 1),
    "one left early": ([lost(0), rank(1)], [0], "crashed", 1),
    "one left early, a victim that stays": (
        [rank(0, -9, ours=True, what="crashed", message=GLOO_LOST), rank(1)], [0], "crashed", 1),
    "time up: one left early, the other waits": ([ended(0), rank(1)], [], "hang", 1),
    "one finished well, victims": ([lost(0), good(1)], [0], "crashed", 0),
    "one hangs, others gave up": ([lost(0, GLOO_WAITED, "hang"), ended(1)], [0], "hang", 1),
    "one fails, others killed": ([died(0, 13), ended(1)], [0], "crashed", 0),
    "one left early, others killed": ([rank(0), ended(1)], [], "missing_step", 0),
    "killed for nothing": ([good(0), ended(1)], [], "interrupted", None),
    "never started": (
        [died(0, None, "fork: Resource temporarily unavailable"), ended(1)], [0], "not_run", 0),
    "full disk": ([died(0, 74)], [0], "interrupted", 0),
    "the same code after the end record": ([rank(0, 74, end=True)], [0], "crashed", 0),
    "another disk full, recorded": ([own(0, "crashed", message=NO_SPACE)], [0], "crashed", 0),
    "another disk full, printed": ([died(0, -11, f"OSError: {NO_SPACE}")], [0], "crashed", 0),
    "time up: all hang": ([ended(0), ended(1)], [], "hang", None),
    "time up: one is stopped": ([ended(0), held(1)], [], "hang", 1),
    "time up: one behind hangs": ([ended(0), ended(1, steps=1)], [], "hang", 1),
    "time up: one hangs, others done": ([good(0), ended(1)], [], "hang", 1),
    "time up: all end when asked for stacks": (
        [rank(0, end=True, tail=WAITING), rank(1, end=True, tail=SLEEPING)], [], "hang", 1),
    "time up: but one had failed": ([died(0, -11), ended(1)], [0], "crashed", 0),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_what_happened_and_whose_fault(row: str) -> None:
    """Each situation has one answer and one culprit, in whatever order ranks are listed."""
    ranks, order, what, culprit = ROWS[row]
    ranks, waited = failed(ranks, order), WAITED if row.startswith("time up") else ""
    got = classify(ranks, waited=waited)
    assert (got.what, got.culprit) == (what, culprit), got.message
    assert classify(ranks[::-1], waited=waited) == got
    assert bool(got.message) == bool(what)
    assert "\n" not in got.message


@pytest.mark.parametrize(
    ("tails", "culprit"),
    [
        ((WAITING, SLEEPING, WAITING), 1),
        ((WAITING, WAITING_IN_A_LAYER, SLEEPING), 2),
        ((AGREEING, stack(("/a/plant.py", 114, "_hang"), IN_MAIN), AGREEING), 1),
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
def test_stacks_single_out_the_rank_that_the_others_wait_for(tails: Any, culprit: Any) -> None:
    """All but one wait in a collective: that one is the culprit; with any doubt there is none."""
    ranks = [ended(number, tail) for number, tail in enumerate(tails)]
    assert classify(ranks, waited=WAITED).culprit == culprit


def test_a_rank_that_waits_for_its_own_processes_is_told() -> None:
    spawned = stack(("/a/selectors.py", 415, "select"), ("/a/multiprocessing/spawn.py", 1, "join"))
    answers = [classify([ended(0, tail)], waited=WAITED) for tail in (spawned, WAITING)]
    assert [outcomes.STARTED in answer.message for answer in answers] == [True, False]


def at(
    evidence: RankEvidence, operator: str = "_allgather_base_", label: str = "root", *,
    number: int = 142, inside: bool = True,
) -> RankEvidence:  # fmt: skip
    """The same rank, by its place in the collectives of all three."""
    place = Place(
        step=20, operator=f"c10d::{operator}", label=label, group=(0, 1, 2), is_inside=inside,
        entered={"0,1,2": number},
    )  # fmt: skip
    return replace(evidence, place=place)


def absent(evidence: RankEvidence) -> RankEvidence:
    return at(evidence, number=141, inside=False)


GATHER, REDUCE = (Entered(operator=name, label="root") for name in ("allgather_base", "allreduce"))
NEVER = "rank {} never entered allgather_base of root in step 20 (collective 142 of ranks 0,1,2); "
MISMATCH = "Received data size doesn't match expected size. Is there a collective mismatch?"
IN_VAIN: dict[str, tuple[list[RankEvidence], What, Entered | None, int | None, str]] = {
    "stalled, one lacks": (
        [at(ended(0, WAITING)), absent(ended(1, SLEEPING))], "hang", None, 1,
        NEVER.format(1) + "no rank recorded anything for 2 s; still running: rank 0 "
        "after step 2 in allgather_base of root, rank 1 after step 2 in _hang (plant.py:114)"),
    "stalled, another call": ([at(ended(0)), at(ended(1)), at(ended(2), "allreduce_")], "hang",
                             REDUCE, 2, "rank 2 entered allreduce of root where ranks 0, 1 "),
    "one ended well, and should not have": (
        [absent(good(0)), at(ended(1)), at(ended(2))], "hang", None, 0, NEVER.format(0)),
    "one left early": (
        [absent(rank(0)), at(ended(1)), at(ended(2))], "hang", None, 0, NEVER.format(0)),
    "one gave up waiting": (
        [at(lost(0, GLOO_WAITED, "hang"), inside=False), absent(ended(1, steps=9))], "hang", None,
        1, NEVER.format(1)),
    "gloo aborts whom the wrong gather met": (
        [at(died(0, -6, MISMATCH)), at(lost(1)), at(lost(2), label="layers.0")], "crashed",
        replace(GATHER, label="layers.0"), 2, "rank 2 entered allgather_base of layers.0 where "),
}  # fmt: skip


@pytest.mark.parametrize("row", IN_VAIN)
def test_who_was_waited_for_in_vain(row: str) -> None:
    """Places name the rank and the collective, in fields and at the head of the message."""
    ranks, what, entered, culprit, told = IN_VAIN[row]
    waited = "no rank recorded anything for 2 s" if row.startswith("stalled") else ""
    answer = classify(failed(ranks, (0, 1, 2)), waited=waited)
    assert (answer.what, answer.culprit) == (what, culprit), answer.message
    assert answer.message.startswith(told)
    ending = ending_of(answer, ranks)
    assert ending is not None
    assert ending.collective == CollectiveFault(
        ranks=(culprit or 0,), entered=entered, expected=GATHER, group=(0, 1, 2), number=142,
        step=20, others=tuple(each for each in (0, 1, 2) if each != culprit),
    )  # fmt: skip


def test_who_was_not_waited_for() -> None:
    """In a run that came to its end nobody waits; an abort of another cause is its rank's own."""
    ranks = [absent(good(0)), at(good(1)), at(good(2))]
    assert classify(ranks) == Answer("", "", None)
    other = [at(died(0, -6, "assertion failed")), at(lost(1)), at(lost(2), label="layers.0")]
    got = classify(failed(other, (0, 1, 2)))
    assert (got.what, got.culprit, got.fault) == ("crashed", 0, None)


def test_a_process_that_stays_after_its_end_record_is_a_hang() -> None:
    """Nothing passes that its user has to kill."""
    stayed = rank(0, -9, ours=True, end=True)
    answer = classify([stayed, good(1)])
    assert (answer.what, "every rank has recorded its end" in answer.message) == ("hang", True)
    answer = classify([stayed, ended(1)], waited=WAITED)
    assert answer.what == "hang"


RAISED = own(
    1, "crashed", type="TensorError", raised_at="unit.py:9 close", phase="backward",
    module="layers.0", tensors=("layers.0.mlp.w1", "head"),
)  # fmt: skip
REFUSED = RankExit(rank=1, code=None)
IN_A_MODULE = Place(
    step=0, operator="", label="", group=(), is_inside=False, module="layers.0.attn"
)


@pytest.mark.parametrize(
    ("culprit", "ending"),
    [
        (replace(died(1, -9), place=IN_A_MODULE),
         Ending(signal="SIGKILL", module="layers.0.attn")),
        (RAISED, Ending(exception="TensorError", raised_at="unit.py:9 close", phase="backward",
                        module="layers.0", tensor="layers.0.mlp.w1")),
        *((replace(died(1, None), exit=replace(REFUSED, errno=number)), Ending(machine=machine))
          for number, machine in ((errno.EAGAIN, "no_process"), (errno.ENOMEM, "no_process"),
                                  (errno.EPERM, ""))),
    ],
)  # fmt: skip
def test_an_ending_is_in_fields(culprit: RankEvidence, ending: Ending) -> None:
    """What the rank at fault noted, or the error number of its fork; nobody reads a message."""
    answer = classify([good(0), culprit])
    assert ending_of(answer, [good(0), culprit]) == ending
    assert (f" in module {culprit.module}" in answer.message) == bool(culprit.module)


# --- who sent a SIGKILL, who failed first -------------------------------------------------------


def killed(code: int = -9, what: What = "killed", culprit: int | None = 1) -> RunOutcome:
    ranks = (RankExit(rank=0, code=1), RankExit(rank=1, code=code))
    return records.outcome(what=what, message="it died", culprit_rank=culprit, ranks=ranks)


def test_who_sent_a_sigkill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's count of those whom it killed for want of memory, where it can be read."""
    counters = tmp_path / "vmstat"
    counters.write_text("nr_free_pages 1\noom_kill_more 9\noom_kill 7\n")
    monkeypatch.setattr(outcomes, "_COUNTERS", counters)
    assert [outcomes.memory_kills_since(before) for before in (7, 5, None)] == [0, 2, None]
    for text in ("nr_free_pages 1\n", "oom_kill many\n", "oom_kill \n"):
        counters.write_text(text)
        assert outcomes.num_memory_kills() is outcomes.memory_kills_since(7) is None
    counters.unlink()
    assert outcomes.num_memory_kills() is None
    for outcome in (killed(), killed(culprit=None)):  # of a rank, or of the leader
        told = outcomes.with_sender(outcome, 0)
        assert told == replace(
            outcome, message=f"it died; {outcomes.NOT_THE_KERNEL}", from_outside=True
        )
    told = outcomes.with_sender(killed(), 1)
    assert (told.from_outside, outcomes.with_sender(killed(), None)) == (False, killed())
    assert told.message == "it died; the kernel killed 1 for want of memory meanwhile"
    for other in (killed(what="crashed"), killed(code=-15)):
        assert outcomes.with_sender(other, 0) == other


def test_the_first_to_say_that_it_failed_is_found() -> None:
    """Whoever asks in time; a later failure does not take its place, and words are cut."""
    store, at_once = dist.HashStore(), timedelta(milliseconds=1)
    assert outcomes.find(store, at_once) is outcomes.find(None, at_once) is None
    outcomes.claim(store, FirstFailure(3, "x" * 100_000))
    outcomes.claim(store, FirstFailure(1, "Connection closed"))
    assert outcomes.find(store, at_once) == FirstFailure(3, "x" * 500)
    for no_store in (object(), None):  # a leader whose ranks need no torch has a socket there
        outcomes.claim(no_store, FirstFailure(0, "x"))
