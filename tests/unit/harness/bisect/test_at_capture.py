"""What captures leave behind is theirs, in the step that captures and in no other."""

import dataclasses

import pytest

from harness.bisect.found import Location
from harness.bisect.locate import between
from harness.records import RunResult
from tests.unit.harness.bisect.small_model import (
    OTHER,
    WEIGHTS,
    Edit,
    both,
    calls_from,
    digests,
    edited,
    floats,
    other_calls,
    run_of,
)

BIAS = WEIGHTS[-1]
DRAWN = digests(rng=("cpu",))
LOSSES = floats(microbatch_losses=(OTHER, OTHER))


def _without_gradient(run: RunResult) -> RunResult:
    """The run whose last weight is moved by no gradient, as experts' biases are."""
    ranks = []
    for rank in run.ranks:
        assert rank.start is not None
        tensors = rank.start.tensors | {"grads": WEIGHTS[:-1]}
        ranks.append(
            dataclasses.replace(rank, start=dataclasses.replace(rank.start, tensors=tensors))
        )
    return dataclasses.replace(run, ranks=tuple(ranks))


def _place(edit: Edit, *, taps: bool = False, captured_in: int = 2) -> Location:
    """Where a run with that edit of step 2 on both ranks left its reference."""
    candidate = run_of(graph=("attn",), taps=taps)
    config = candidate.spec.config | {"graph_warmup_steps": captured_in}
    spec = dataclasses.replace(candidate.spec, config=config)
    outcome = dataclasses.replace(candidate.outcome, key=spec.key)
    candidate = dataclasses.replace(candidate, spec=spec, outcome=outcome)
    candidate = edited(candidate, {0: edit, 1: edit})
    return between(_without_gradient(run_of(taps=taps)), _without_gradient(candidate))


@pytest.mark.parametrize(
    ("edit", "taps"),
    [
        (both(LOSSES, DRAWN), False),
        (both(LOSSES, DRAWN, calls_from("layers.0.attn:output")), True),
        (DRAWN, True),
    ],
    ids=["losses", "a module that draws", "the state alone"],
)
def test_numbers_that_a_capture_drew_are_of_the_capture(edit: Edit, taps: bool) -> None:
    """The random state differs after the step that captures, and what was drawn does in it."""
    found = _place(edit, taps=taps)
    assert (found.step, found.phase) == (2, "capture")
    assert "not given back" in " ".join(found.evidence)
    assert _place(edit, taps=taps, captured_in=1).phase in ("forward", "input")


def test_numbers_that_were_right_when_the_step_began_are_not_of_the_capture() -> None:
    """A module that draws was right in the first microbatch: what replays do came after it."""
    edit = both(LOSSES, DRAWN, other_calls([("layers.0:output", 0)]))
    assert _place(edit, taps=True).phase == "capture"
    edit = both(LOSSES, DRAWN, other_calls([("layers.0:output", 0), ("layers.0.attn:output", 1)]))
    found = _place(edit, taps=True)
    assert (found.phase, found.module, found.microbatch) == ("forward", "layers.0", 0)


def test_a_module_that_multiplies_by_weights_draws_nothing() -> None:
    """What it computed otherwise is no matter of random numbers, whatever became of those."""
    edit = both(LOSSES, DRAWN, calls_from("layers.0.attn.attention.wq:output"))
    assert _place(edit, taps=True).phase == "forward"


def test_what_no_gradient_moves_is_of_the_capture() -> None:
    """A bias that follows counts of tokens differs, and nothing else does."""
    found = _place(digests(weights=(BIAS,)))
    assert (found.step, found.phase, found.tensor) == (2, "capture", BIAS)
    assert _place(digests(weights=(BIAS,)), captured_in=1).phase == "optimizer"


def test_what_gradients_move_is_of_the_optimizer() -> None:
    """Beside the bias a weight differs, or a moment: the update did something else."""
    assert _place(digests(weights=(BIAS, WEIGHTS[1]))).phase == "optimizer"
    assert _place(digests(weights=(BIAS,), optim=("step_count",))).phase == "optimizer"


def test_a_captured_step_that_was_not_run_once_is_of_the_capture() -> None:
    """Losses differ, and the optimizer's count of steps does."""
    edit = both(LOSSES, digests(grads=WEIGHTS, weights=WEIGHTS, optim=("step_count",)))
    assert _place(edit).phase == "capture"
    assert _place(edit, captured_in=1).phase == "forward"
    assert _place(both(LOSSES, digests(grads=WEIGHTS))).phase == "forward"
