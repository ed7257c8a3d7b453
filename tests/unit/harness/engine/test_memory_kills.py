"""Who sent a SIGKILL: the kernel counts its own, and a run that somebody else killed says so."""

import signal
from pathlib import Path

import pytest

from harness.engine import outcome as memory_kills
from harness.engine.outcome import NOT_THE_KERNEL, num_memory_kills, with_sender
from harness.records import RankExit, RunOutcome, What


def killed(
    code: int = -signal.SIGKILL, what: What = "killed", culprit: int | None = 1
) -> RunOutcome:
    return RunOutcome(
        key="k", what=what, message="it died", culprit_rank=culprit, started_unix_s=0.0, wall_s=1.0,
        ranks=(RankExit(rank=0, code=1), RankExit(rank=1, code=code)),
    )  # fmt: skip


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the kernel counts: seven processes killed for want of memory."""
    path = tmp_path / "vmstat"
    path.write_text("nr_free_pages 1\noom_kill_more 9\noom_kill 7\n")
    monkeypatch.setattr(memory_kills, "_COUNTERS", path)
    return path


def test_a_kill_that_the_kernel_did_not_count_came_from_outside(counters: Path) -> None:
    """Of a rank or of the leader, which leaves no culprit; the message says what --resume does."""
    for outcome in (killed(), killed(culprit=None)):
        told = with_sender(outcome, num_memory_kills())
        assert told.from_outside
        assert told.message == f"it died; {NOT_THE_KERNEL}"


def test_a_kill_beside_one_that_the_kernel_counted_may_be_that_one(counters: Path) -> None:
    """Whoever was killed for memory, on this machine, leaves the sender in doubt."""
    told = with_sender(killed(), 6)
    assert not told.from_outside
    assert told.message == "it died; the kernel killed 1 for want of memory meanwhile"


def test_nothing_is_said_where_nothing_is_known(counters: Path) -> None:
    """Without a count before or after, and of other endings, the outcome stays as it is."""
    assert with_sender(killed(), None) == killed()
    for other in (killed(what="crashed"), killed(code=-signal.SIGTERM)):
        assert with_sender(other, 7) == other
    for text in ("nr_free_pages 1\n", "oom_kill many\n", "oom_kill \n"):
        counters.write_text(text)
        assert num_memory_kills() is None
        assert with_sender(killed(), 7) == killed()
    counters.unlink()
    assert with_sender(killed(), 7) == killed()
