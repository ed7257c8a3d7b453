"""Memory and step time of a case's own runs, and when its times are not to be believed."""

from typing import Any

import pytest

from harness.records import (
    EndRecord,
    FloatBits,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
)
from harness.runner.estimates import Timeline, cost

ONE = FloatBits.from_bits(0x3F800000)


def run(
    *times_s: tuple[float, ...],
    peaks: tuple[int, ...] = (),
    begun: float = 0.0,
    wall_s: float = 1.0,
    what: Any = "",
    variables: dict[str, str] | None = None,
) -> RunResult:
    """A run with the given step times of each rank."""
    spec = RunSpec(config={"begun": begun, "times": times_s}, device="cpu",
                   world_size=len(times_s), timeout_s=9.0)  # fmt: skip
    ranks = tuple(
        RankRecords(
            rank=rank,
            start=StartRecord(
                schema=1, rank=rank, world_size=len(times_s), pid=1, device="cpu", tensors={},
                environment={"fingerprint": {"environment": variables or {}}},
            ),
            steps=tuple(
                StepRecord(
                    step=step, rank=rank, loss=ONE, microbatch_losses=(), grad_norm=ONE,
                    digests={}, nonfinite={}, step_s=step_s, live_bytes=1,
                    peak_bytes=peaks[rank] if peaks else 1,
                )
                for step, step_s in enumerate(own)
            ),
            events=(),
            error=None,
            end=EndRecord(
                rank=rank, steps=len(own), peak_bytes=peaks[rank] if peaks else 1, startup_s=0.1,
                wall_s=1.0, replays=0,
            ),
            problems=(),
        )
        for rank, own in enumerate(times_s)
    )  # fmt: skip
    outcome = RunOutcome(key=spec.key, what=what, message="", culprit_rank=None, ranks=(),
                         started_unix_s=begun, wall_s=wall_s)  # fmt: skip
    return RunResult(spec=spec, outcome=outcome, ranks=ranks)


def cost_of(**runs: RunResult) -> Any:
    """What `cost` says of these runs, which are all runs of the folder."""
    return cost(runs, Timeline(runs.values()))


def test_memory_is_of_the_worst_rank_of_each_run() -> None:
    """The ratio is between worst ranks, whichever they are."""
    found = cost_of(reference=run((1.0,), (1.0,), peaks=(100, 40)),
                 candidate=run((1.0,), (1.0,), peaks=(10, 150)))  # fmt: skip
    assert found.peak_bytes == {"reference": 100, "candidate": 150}
    assert found.memory == 1.5


def test_a_step_takes_what_its_slowest_rank_takes_once_graphs_are_captured() -> None:
    """The earlier half, in which graphs are captured, is left out; ranks wait for the slowest."""
    first = (9.0, 9.0, 9.0)
    found = cost_of(
        reference=run((*first, 4.0, 4.0, 4.0), (*first, 1.0, 6.0, 1.0)),
        control=run((*first, 5.0, 5.0, 5.0), (*first, 1.0, 1.0, 1.0), begun=1.0),
        candidate=run((*first, 2.0, 2.0, 2.0), (*first, 1.0, 1.0, 1.0), begun=2.0),
    )
    assert found.step_s == {"reference": 4.0, "control": 5.0, "candidate": 2.0}
    assert (found.speed, found.control_speed) == (2.0, 0.8)
    assert found.caution == ""
    assert "a step takes 2000 ms, the reference's 4000, the control's 5000" in found.words


@pytest.mark.parametrize("what", ["crashed", "hang"])
def test_what_did_not_finish_has_no_step_time(what: str) -> None:
    """A run that died says nothing of speed, however many steps it made."""
    found = cost_of(reference=run((1.0,) * 8), candidate=run((1.0,) * 8, what=what, begun=5.0))
    assert found.step_s["candidate"] is None
    assert found.speed is None


def test_a_step_without_a_time_is_not_left_out_of_the_median() -> None:
    """Of a run in which a step has no time, no time is told."""
    found = cost_of(reference=run((1.0,) * 7 + (0.0,)), candidate=run((1.0,) * 8, begun=5.0))
    assert found.speed is None


def test_runs_that_overlap_are_concurrent_and_those_that_follow_are_not() -> None:
    """A run that begins as another ends did not overlap it."""
    runs = [run((1.0,), begun=begun, wall_s=2.0) for begun in (0.0, 2.0, 3.0)]
    timeline = Timeline(runs)
    assert [timeline.concurrent(each) for each in runs] == [0, 1, 1]
    found = cost({"reference": runs[0], "candidate": runs[1]}, timeline)
    assert found.caution == "1 other run was under way meanwhile"


def test_ranks_that_share_gpus_make_times_meaningless() -> None:
    """It is the first thing to say, whoever else was there."""
    variables = {"NCCL_HOSTID": "shared-gpus-3"}
    found = cost_of(reference=run((1.0,) * 8), candidate=run((1.0,) * 8, variables=variables))
    assert found.caution == "ranks shared GPUs, so times mean nothing"
    assert found.caution in found.words
