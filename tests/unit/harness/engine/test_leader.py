"""The leader's clock and bookkeeping, without processes."""

import signal
from pathlib import Path

import pytest

from harness.engine.evidence import tail_of
from harness.engine.ranks import Job, Limits, Phase, Watch, exit_status, rank_environment
from harness.records import RunSpec

LIMITS = Limits(grace_s=3.0, stacks_s=1.0)


def watch(num_ranks: int = 2, timeout_s: float = 10.0) -> Watch:
    return Watch(ranks=range(num_ranks), timeout_s=timeout_s, limits=LIMITS, started_s=100.0)


def test_nothing_is_done_before_the_time_is_up() -> None:
    """A run within its time is left alone."""
    w = watch()
    assert w.advance(109.9) is None
    assert w.phase is Phase.RUNNING


def test_time_up_asks_for_stacks_then_kills() -> None:
    """At the timeout every rank is asked for its stacks, and after the wait it is killed."""
    w = watch()
    assert w.advance(110.0) == signal.SIGUSR1
    assert w.timed_out
    assert w.advance(110.9) is None
    assert w.advance(111.0) == signal.SIGKILL
    w.ended(0, -signal.SIGKILL, 111.1)
    w.ended(1, -signal.SIGKILL, 111.1)
    assert not w.running
    assert all(exit_state.killed_by_harness for exit_state in w.exits.values())
    assert w.failed_order == []


def test_a_survivor_of_sigkill_is_killed_again() -> None:
    """A process that is stuck in the kernel gets another SIGKILL, not a busy loop."""
    w = watch()
    w.advance(110.0)
    w.advance(111.0)
    assert w.advance(111.5) is None
    assert w.advance(112.0) == signal.SIGKILL


def test_a_failure_starts_the_grace_of_the_others() -> None:
    """The first failure gives the others `grace_s`; a second failure does not extend it."""
    w = watch(num_ranks=3)
    w.ended(0, 13, 101.0)
    assert w.phase is Phase.GRACE
    w.ended(1, 1, 103.0)
    assert w.advance(103.9) is None
    assert w.advance(104.0) == signal.SIGUSR1
    assert not w.timed_out
    assert w.failed_order == [0, 1]
    assert w.running == [2]


def test_a_late_failure_does_not_reopen_the_grace() -> None:
    """A rank that fails while stacks are awaited does not put the killing of the others off."""
    w = watch()
    w.advance(110.0)
    w.ended(0, 1, 110.5)
    assert w.phase is Phase.STACKS
    assert w.advance(111.0) == signal.SIGKILL


def test_the_grace_does_not_outlast_the_timeout() -> None:
    """A failure just before the timeout does not give the others more time than the run has."""
    w = watch()
    w.ended(0, 1, 109.0)
    assert w.deadline_s == 110.0


def test_a_good_end_starts_no_grace() -> None:
    """A rank that is done early does not hurry the others."""
    w = watch()
    w.ended(0, 0, 101.0)
    assert w.phase is Phase.RUNNING
    assert w.deadline_s == 110.0


def test_a_foreign_kill_during_the_wait_for_stacks_is_foreign() -> None:
    """SIGKILL before the harness sent one is somebody else's."""
    w = watch()
    w.advance(110.0)
    w.ended(0, -signal.SIGKILL, 110.5)
    assert not w.exits[0].killed_by_harness
    assert w.failed_order == [0]


def test_a_rank_that_dies_of_the_request_for_stacks_was_ended_by_us() -> None:
    """A program that put SIGUSR1 back to its default is not blamed for dying of ours."""
    w = watch()
    w.advance(110.0)
    w.ended(0, -signal.SIGUSR1, 110.5)
    assert w.exits[0].killed_by_harness


@pytest.mark.parametrize(
    ("code", "status"), [(0, 0), (1, 1), (13, 13), (255, 255), (256, 1), (-1, 255), (None, 1)]
)
def test_only_zero_exits_with_zero(code: object, status: int) -> None:
    """No exit code but 0 may look like 0 to the leader."""
    assert exit_status(code) == status


def test_environment_of_a_rank() -> None:
    """A rank finds its place, its store and its GPUs; a run without GPUs sees none."""
    spec = RunSpec(config={}, device="cuda", world_size=2, timeout_s=1.0)
    job = Job(spec=spec, folder=Path(), devices=("2", "3"))
    got = rank_environment(job, 1, 4242)
    assert got["RANK"] == got["LOCAL_RANK"] == "1"
    assert got["WORLD_SIZE"] == "2"
    assert (got["MASTER_ADDR"], got["MASTER_PORT"]) == ("127.0.0.1", "4242")
    assert got["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert rank_environment(Job(spec=spec, folder=Path()), 0, 1)["CUDA_VISIBLE_DEVICES"] == ""


def test_tail_of_a_file(tmp_path: Path) -> None:
    """The tail is the last bytes; a file that is not there is empty."""
    (tmp_path / "x").write_bytes(b"abc\xffdef")
    assert tail_of(tmp_path / "x", 3) == "def"
    assert tail_of(tmp_path / "x", 100) == "abc\ufffddef"
    assert tail_of(tmp_path / "none") == ""


def test_a_run_that_records_nothing_has_stalled() -> None:
    """Silence for `stall_s` ends a run before its time; a record starts the wait anew."""
    w = Watch(ranks=range(2), timeout_s=100.0, limits=LIMITS, started_s=100.0, stall_s=10.0)
    assert w.advance(109.9) is None
    assert not w.may_stall(109.9)
    assert w.may_stall(110.0)
    w.progressed(110.0)
    assert w.advance(119.9) is None
    assert w.may_stall(120.0)
    assert w.advance(120.0) == signal.SIGUSR1
    assert w.stalled
    assert not w.timed_out


def test_progress_buys_no_time() -> None:
    """Neither beyond the timeout nor after a failure."""
    w = Watch(ranks=range(2), timeout_s=15.0, limits=LIMITS, started_s=100.0, stall_s=10.0)
    w.progressed(110.0)
    assert w.advance(115.0) == signal.SIGUSR1
    assert w.timed_out
    assert not w.stalled
    failing = Watch(ranks=range(2), timeout_s=90.0, limits=LIMITS, started_s=100.0, stall_s=10.0)
    failing.ended(0, 13, 101.0)
    failing.progressed(103.0)
    assert not failing.may_stall(120.0)
    assert failing.advance(104.0) == signal.SIGUSR1
    assert not failing.stalled
