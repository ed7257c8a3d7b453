"""Where gradients went wrong, in programs that clip them."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from harness.bisect.locate import between
from harness.records import ABSENT, DIGEST_HEX_CHARS, NEVER_RAN, RunResult, StepRecord
from tests.support.run_records import edit
from tests.unit.harness.bisect.small_model import (
    WEIGHTS,
    both,
    digests,
    edited,
    floats,
    foreign,
    run_of,
    tapped,
)

NORM = "layers.0.attn.norm.weight"


def clipping(wrong: Sequence[Collection[str]]) -> RunResult:
    """A program's run that clips, with wrong gradients on each rank before, and all wrong after."""
    names = {name: f"{name}:unclipped[0]" for name in WEIGHTS}
    rows = {row: f"{at:032x}{at:08x}" for at, row in enumerate(names.values())}
    run = foreign(tapped(run_of(), 1, rows))
    for step in run.ranks[0].steps:  # whose weights both ranks hold, as in DDP
        run = edit(run, 1, step.step, digests={"weights": step.digests["weights"]})
    for rank, held in enumerate(wrong):
        other = {names[name]: f"{rank + 1:032x}{'f' * 7}0" for name in held}
        taps = "".join((rows | other).values())
        run = edited(run, {rank: both(digests(grads=WEIGHTS), floats(taps=taps))})
    return run


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (((NORM,), (NORM,)), ("reduce", NORM)),
        (((NORM, "head.weight"), ()), ("reduce", "head.weight")),
        (((), ()), ("optimizer", WEIGHTS[0])),
    ],
)
def test_before_clipping_the_gradient_that_is_wrong_is_alone(wrong: Any, expected: Any) -> None:
    """What ranks have of a tensor whose weights are one was not reduced; or clipping did it."""
    plain = clipping([])
    found = between(plain, clipping(wrong))
    assert (found.step, found.quantity) == (2, "grads")
    assert (found.phase, found.tensor) == expected
    same = clipping([])
    for rank in (0, 1):
        taps = plain.ranks[0].steps[2].taps.replace(f"{2:032x}", "e" * DIGEST_HEX_CHARS)
        same = edited(same, {rank: both(digests(grads=WEIGHTS), floats(taps=taps))})
    found = between(plain, same)
    assert (found.phase, found.tensor, found.rank_is_hidden) == ("backward", WEIGHTS[2], True)


def test_a_gradient_that_one_run_alone_clips_is_the_wrong_one() -> None:
    """As of a parameter that was frozen: all others differ by the norm only."""
    plain, frozen = clipping([]), clipping([(), ()])
    for rank in (0, 1):
        rows = plain.ranks[rank].steps[2].taps
        held = f"{2:032x}{2:08x}"
        assert held in rows
        taps = rows.replace(held, "0" * DIGEST_HEX_CHARS + NEVER_RAN)
        frozen = edited(frozen, {rank: floats(taps=taps)})
    found = between(plain, frozen)
    assert (found.phase, found.tensor) == ("backward", WEIGHTS[2])
    assert any("in one run alone" in told for told in found.evidence)


def test_a_norm_of_one_run_alone_is_a_clipping() -> None:
    """Without calls that were looked into it is known by the norm."""
    edit = both(digests(grads=WEIGHTS), floats(grad_norm=None))
    found = between(foreign(run_of(taps=False)), foreign(edited(run_of(taps=False), {0: edit})))
    assert (found.phase, found.quantity) == ("optimizer", "grads")


@pytest.mark.parametrize("reversed_", [False, True])
def test_a_step_that_one_run_left_out_is_named(reversed_: bool) -> None:
    """Not gradients that it has none of, nor a reduction: GradScaler skipped it on one rank."""
    why = "GradScaler found a gradient that is not finite"
    none = {"grads": ABSENT * len(WEIGHTS)}

    def left_out(record: StepRecord) -> StepRecord:
        return dataclasses.replace(record, skipped=why, digests={**record.digests, **none})

    plain = foreign(run_of())
    runs = plain, edited(plain, {1: left_out})
    found = between(*(runs[::-1] if reversed_ else runs))
    assert (found.step, found.phase, found.ranks) == (2, "optimizer", (1,))
    assert (found.quantity, found.tensor) == ("skipped", "")
    whose = "reference" if reversed_ else "candidate"
    told = f"the {whose} alone left its optimizer step out on rank 1: {why}"
    assert told in found.evidence
