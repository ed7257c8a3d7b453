"""Jobs that do not start, and jobs that do not leave: how long they are waited for."""

from harness.engine.slurm import Leftovers, Queued
from harness.engine.slurm_calls import JobState


class Clock:
    """Seconds as a test sets them."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_job_may_be_in_the_queue_for_so_long() -> None:
    """Counted from when it was first seen there, anew after it has run; its reason is told."""
    clock = Clock()
    queued = Queued(10.0, clock)
    waits = JobState(7, "PENDING", "Resources")
    assert queued.why_never("a", waits) == ""
    clock.now_s = 10.0
    assert queued.why_never("a", waits) == ""
    assert queued.why_never("b", JobState(8, "PENDING", "Priority")) == ""
    assert queued.why_never("a", JobState(7, "RUNNING", "None")) == ""
    clock.now_s = 20.0
    assert queued.why_never("a", waits) == "", "requeued"
    clock.now_s = 20.5
    told = "Slurm did not start job 8 in 10 s (launch.slurm.pending_s): PartitionDown"
    assert queued.why_never("b", JobState(8, "PENDING", "PartitionDown")) == told


def test_a_reason_that_does_not_pass_is_not_waited_for() -> None:
    """Held after failed launches: said at once."""
    told = Queued(10.0).why_never("a", JobState(7, "PENDING", "launch failed requeued held"))
    assert told == "Slurm will not start job 7 by itself: launch failed requeued held"


def test_a_job_that_outstays_its_run_is_told_once() -> None:
    """One that is leaving, over or unknown is forgotten; one that stays has its time."""
    clock = Clock()
    left = Leftovers(5.0, clock)
    states = {
        "stays": JobState(1, "RUNNING", "None"), "leaves": JobState(2, "COMPLETING", "None"),
        "over": JobState(3, "CANCELLED", "None"),
    }  # fmt: skip
    for name in (*states, "unknown"):
        left.add(name)
    clock.now_s = 5.0
    assert left.update(states) == []
    assert left
    states |= dict.fromkeys(("leaves", "over", "unknown"), JobState(9, "RUNNING", "None"))
    clock.now_s = 5.5
    assert left.update(states) == [1]
    assert left.update(states) == []
    assert not left
