"""What each cheap check would have seen alone, on made-up runs."""

import dataclasses
import hashlib
from collections.abc import Callable

import pytest

from harness.detection.alone import PLAIN, Sight, seen_plain, seen_stressed
from harness.records import (
    ErrorRecord,
    FloatBits,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StepRecord,
    What,
)

STEPS, RANKS = 4, 2
ONE = 0x3F800000
Edit = Callable[[StepRecord], StepRecord]


def run(edit: Edit = lambda record: record, *, what: What = "", ended: int = STEPS) -> RunResult:
    """A run of which `edit` changes records; one that ends with `what` in step `ended`."""
    spec = RunSpec(config={"graph": []}, device="cpu", world_size=RANKS, timeout_s=1)
    outcome = RunOutcome(
        key=spec.key, what=what, message="", culprit_rank=None, ranks=(), started_unix_s=0.0,
        wall_s=0.0,
    )  # fmt: skip
    error = ErrorRecord(rank=1, step=ended, what=what, type="", message="", traceback="")
    ranks = tuple(
        RankRecords(
            rank=rank, start=None, events=(), end=None, problems=(),
            error=error if what and rank == 1 else None,
            steps=tuple(edit(_step(rank, step)) for step in range(ended)),
        )
        for rank in range(RANKS)
    )  # fmt: skip
    return RunResult(spec=spec, outcome=outcome, ranks=ranks)


def _step(rank: int, step: int) -> StepRecord:
    groups = ("grads", "weights", "optim")
    return StepRecord(
        step=step, rank=rank, loss=FloatBits.from_bits(ONE), microbatch_losses=(),
        grad_norm=FloatBits.from_bits(ONE), nonfinite={}, step_s=0.0, live_bytes=0, peak_bytes=0,
        digests={g: hashlib.md5(f"{g}{rank}{step}".encode()).hexdigest() for g in groups},
    )  # fmt: skip


def loss(bits: int, *, at: tuple[int, int]) -> Edit:
    return lambda r: (
        dataclasses.replace(r, loss=FloatBits.from_bits(bits)) if (r.step, r.rank) == at else r
    )


def digest(group: str, *, at: tuple[int, int]) -> Edit:
    return lambda r: (
        dataclasses.replace(r, digests=r.digests | {group: "0" * 32})
        if (r.step, r.rank) == at
        else r
    )


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (run(), ["no", "no", "no", "no"]),
        (run(loss(ONE + 1000, at=(2, 0))), ["2", "2", "no", "no"]),
        (run(loss(ONE + 1, at=(2, 0))), ["no", "2", "no", "no"]),
        (run(loss(ONE + 1000, at=(2, 1))), ["no", "2", "no", "no"]),
        (run(loss(0x7FC00000, at=(1, 0))), ["1", "1", "no", "no"]),
        (run(digest("weights", at=(3, 1))), ["no", "no", "3", "3"]),
        (run(digest("weights", at=(2, 1))), ["no", "no", "no", "2"]),
        (run(digest("grads", at=(3, 1))), ["no", "no", "no", "3"]),
        (run(what="crashed", ended=2), ["ends", "ends", "ends", "ends"]),
        (run(what="race", ended=2), ["no, stopped"] * 4),
        (run(digest("grads", at=(1, 0)), what="crashed", ended=2), ["ends", "ends", "ends", "1"]),
    ],
)
def test_each_check_sees_what_it_looks_at(candidate: RunResult, expected: list[str]) -> None:
    """Five decimals on the lowest rank, bits on all, weights at the end, digests anywhere."""
    found = seen_plain(run(), candidate)
    assert [str(found[name]) for name in PLAIN] == expected


def test_a_run_that_our_checks_stopped_was_seen_by_none_of_these() -> None:
    """What ended of itself everybody sees; what a race detector ended nobody would have."""
    for what, seen in (("crashed", True), ("race", False), ("stale_address", False)):
        sights = seen_plain(run(), run(what=what, ended=1))  # type: ignore[arg-type]
        assert {sight.seen for sight in sights.values()} == {seen}
        assert {sight.step for sight in sights.values()} == {1}


def test_a_lost_record_is_not_seen() -> None:
    """Who compares what two logs share does not miss a line."""
    whole = run()
    cut = dataclasses.replace(whole.ranks[0], steps=whole.ranks[0].steps[:-1])
    short = dataclasses.replace(whole, ranks=(cut, whole.ranks[1]))
    assert not any(sight.seen for sight in seen_plain(whole, short).values())


def test_stressors_count_by_their_best_run() -> None:
    """The earliest difference of all runs; one that a check of ours stopped outranks nothing."""
    reference = run()
    none, late, early = run(), run(digest("grads", at=(3, 0))), run(digest("grads", at=(1, 0)))
    stopped = run(what="race", ended=1)
    pairs = [(reference, each) for each in (none, stopped, late, early)]
    assert seen_stressed(pairs) == Sight(how="step", step=1)
    assert seen_stressed(pairs[:2]) == Sight(how="watched", step=1)
    assert seen_stressed([]) == Sight(how="no")
