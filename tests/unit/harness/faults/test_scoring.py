"""How well an answer says where a fault is, and what each cheap check would have seen of it."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from harness.bisect.found import Location
from harness.campaign.scoring import PLAIN, Sight, localised, seen_plain, seen_stressed
from harness.faults.fault import Pointer
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

POINTER = Pointer(phase="backward", module="layers.1.attn*", tensor="layers.1.attn.*.weight")
TRUE = Location(
    step=3, phase="backward", module="layers.1.attn.attention", quantity="grads",
    tensor="layers.1.attn.attention.wq.weight", rank=1, ranks=(1,),
)  # fmt: skip


def judge(pointer: Pointer = POINTER, planted_on: int | None = 1, **changes: Any) -> str:
    found = dataclasses.replace(TRUE, **changes)
    return localised(found, pointer, step=3, rank=planted_on, num_layers=2)


def test_what_matches_in_all_is_exact() -> None:
    """Phase, module, tensor, step and rank are those of the plant."""
    assert judge() == "exactly"


def test_a_fault_that_can_show_only_later_is_due_later() -> None:
    """The step of the plant plus `later` is exact, the plant's own too early for any answer."""
    late = dataclasses.replace(POINTER, later=1)
    assert judge(late, step=4) == "exactly"
    assert judge(late, step=5) == "near"
    assert judge(late, step=3) == "no"


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "forward"},
        {"step": 4},
        {"step": None},
        {"rank": 0},
        {"rank": None},
        {"tensor": ""},
        {"tensor": "layers.1.attn.attention.wq.weight.exp_avg"},
        {"module": "layers.1.mlp", "tensor": "layers.1.mlp.w1.weight"},
        {"module": "layers.0.mlp", "tensor": "layers.0.mlp:output"},
        {"module": "norm", "tensor": "norm.weight"},
    ],
)
def test_one_thing_off_in_or_beside_the_part_is_near(change: dict[str, Any]) -> None:
    """Another phase, rank, tensor, a step later or unknown, the part before or after."""
    assert judge(**change) == "near"


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2},
        {"step": 5},
        {"module": "embedding", "tensor": "embedding.weight"},
        {"module": "head", "tensor": "head.weight"},
        {"module": "", "tensor": ""},
        {"module": "something.else", "tensor": ""},
    ],
)
def test_what_is_elsewhere_early_late_or_unsaid_is_no(change: dict[str, Any]) -> None:
    """Two parts away, before the plant, two steps after it, or no place at all."""
    assert judge(**change) == "no"


def test_an_empty_answer_is_no() -> None:
    """Nothing said is nothing found, whatever the entry asks for."""
    for pointer in (POINTER, Pointer(phase="outside"), Pointer(phase="reduce", tensor="*")):
        for rank in (None, 1):
            assert localised(Location(), pointer, step=3, rank=rank, num_layers=2) == "no"


def test_a_pointer_asks_only_for_what_it_names() -> None:
    """One without module and tensor is met by its phase; near is the rank, or the phase late."""
    outside = Pointer(phase="outside")
    assert judge(outside, phase="outside") == "exactly"
    assert judge(outside, phase="outside", step=4) == "near"
    assert judge(outside, phase="forward") == "near"  # the rank is right
    assert judge(outside, phase="forward", rank=0) == "no"
    assert judge(outside, planted_on=None, phase="forward") == "no"


def test_a_plant_of_no_step_or_every_rank_has_none_to_find() -> None:
    """Where the plant has no step and no rank, no answer is wrong about them."""
    for step, rank in ((7, 0), (None, None)):
        found = dataclasses.replace(TRUE, step=step, rank=rank)
        assert localised(found, POINTER, step=None, rank=None, num_layers=2) == "exactly"


@pytest.mark.parametrize(
    ("pattern", "tensor"),
    [
        ("embedding:output", "embedding:output[1]"),
        ("grads:embedding.weight", "embedding.weight"),
        ("embedding.weight", "grads:embedding.weight"),
        ("embedding:output[[]1]", "embedding:output[1]"),
    ],
)
def test_a_tensor_has_several_spellings(pattern: str, tensor: str) -> None:
    """With and without its quantity, a call with and without its number."""
    pointer = Pointer(phase="backward", tensor=pattern)
    assert judge(pointer, tensor=tensor) == "exactly"


# ---- cheaper checks

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
