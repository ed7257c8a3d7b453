"""Gradients that are wrong are found within a tolerance where losses are not; right ones pass."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from harness.checks.gradients import measured
from harness.recorder.state import plain, sketch
from harness.records import RunResult
from harness.repeats import NUM_SAMPLES, samples_of
from tests.support.run_records import CANDIDATE, LAB, REFERENCE, ask, configured, edit, place

Gradients = Mapping[str, torch.Tensor]
Change = Callable[[dict[str, torch.Tensor]], object]
CLOSE = {"rtol": 1e-3}


def drawn(seed: int = 0) -> dict[str, torch.Tensor]:
    """A matrix, two vectors, one complex, a scalar, and a bias whose gradient is only rounding."""
    torch.manual_seed(seed)
    return {
        "a.weight": torch.randn(64, 80), "b.weight": torch.randn(50), "scale": torch.randn(()),
        "k.bias": 1e-6 * torch.randn(8), "phase": torch.randn(9, dtype=torch.complex64),
    }  # fmt: skip


def rounded(gradients: Gradients, share: float, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {n: g + share * torch.randn_like(g) * g.abs().mean() for n, g in gradients.items()}


def holding(run: RunResult, gradients: Gradients, step: int = 0, rank: int = 1) -> RunResult:
    held = (each for name, g in gradients.items() for each in plain(name, g))
    numbers = {name: tuple(sketch(g).tolist()) for name, g in held}
    return edit(run, rank, step, sketches=numbers)


def asked(reference: Gradients, candidate: Gradients, expect: Any = CLOSE) -> Any:
    runs = holding(REFERENCE, reference), holding(CANDIDATE, candidate)
    return ask("loss", *runs, LAB.case(expect=expect))


def test_a_pass_says_that_no_gradient_was_compared() -> None:
    """As of runs that skip all steps, or that `wrap` recorded."""
    assert "no gradient" in ask("loss", REFERENCE, CANDIDATE, LAB.case(expect=CLOSE)).message


def turned(g: dict[str, torch.Tensor]) -> None:
    """Another direction of the same length: a norm does not see it."""
    g["a.weight"] = g["a.weight"].flip(0, 1)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (turned, "a.weight"),
        (lambda g: g["a.weight"].mul_(2), "a.weight"),
        (lambda g: g["b.weight"].neg_(), "b.weight"),
        (lambda g: g["b.weight"].zero_(), "b.weight"),
        (lambda g: g["phase"].imag.neg_(), "phase"),
        (lambda g: g.pop("b.weight"), "b.weight"),
        (lambda g: g["b.weight"].fill_(float("nan")), "b.weight"),
        (lambda g: g["a.weight"][:32].zero_(), "a.weight"),
    ],
)
def test_a_wrong_gradient_is_named(change: Change, name: str) -> None:
    """Losses and norms are those of the reference; step, rank and parameter are named."""
    wrong = rounded(drawn(), 1e-3)
    change(wrong)
    answer = asked(drawn(), wrong)
    assert answer.outcome == "failed"
    assert place(answer)[:3] == (0, 1, "grads")
    assert answer.difference.tensor == name


@pytest.mark.parametrize(
    "change",
    [
        lambda g: None,
        lambda g: g["k.bias"].mul_(-3),
        lambda g: g.pop("k.bias"),
        lambda g: g["a.weight"].mul_(1.1),
        # The runs name, or cut, a parameter otherwise.
        lambda g: g.update({"c.weight": g.pop("b.weight")}),
        lambda g: g.update({"b.weight": g["b.weight"][:25]}),
    ],
)
def test_what_rounding_and_names_explain_passes(change: Change) -> None:
    """A hundredth of a gradient in rounding, as bfloat16 has, is within the default."""
    right = rounded(drawn(), 1e-2)
    change(right)
    assert asked(drawn(), right).outcome == "passed"


@pytest.mark.parametrize(("stated", "outcome"), [(0.02, "failed"), (0.4, "passed")])
def test_the_stated_fraction_decides(stated: float, outcome: str) -> None:
    """Of a gradient that is 15 % too long."""
    wrong = drawn() | {"a.weight": drawn()["a.weight"] * 1.15}
    assert asked(drawn(), wrong, CLOSE | {"gradients": stated}).outcome == outcome


def test_a_loss_that_is_beyond_before_is_named_first() -> None:
    """In one step the loss is computed before the gradients; of two steps the first is named."""
    wrong = holding(CANDIDATE, drawn() | {"b.weight": torch.zeros(50)})
    for step, quantity in ((0, "loss"), (2, "grads")):
        loss = CANDIDATE.ranks[0].steps[step].loss
        assert loss is not None
        moved = edit(wrong, 0, step, loss=type(loss).from_bits(0x7F000000))
        answer = ask("loss", holding(REFERENCE, drawn()), moved, LAB.case(expect=CLOSE))
        assert place(answer)[2] == quantity


def test_by_bits_sketches_say_nothing() -> None:
    """Digests do."""
    assert asked(drawn(), drawn(3), "bitwise").outcome == "passed"


@pytest.mark.parametrize("of_losses", [1, 0])
@pytest.mark.parametrize(("share", "outcome"), [(1e-6, "passed"), (1e-2, "failed")])
def test_within_rounding_samples_are_the_measure(
    share: float, outcome: str, of_losses: int
) -> None:
    """Samples are a millionth away; a direction that is a hundredth off in a later step fails, of
    losses, too, that no sample rounds, as of those that are 0 by design."""
    case = LAB.case(expect="rounding")
    runs = [configured(run) for run in (REFERENCE, CANDIDATE)]
    near = [rounded(drawn(), 1e-6, seed) for seed in range(10, 10 + NUM_SAMPLES)]
    for step in (0, 2):
        runs[0] = holding(runs[0], drawn(), step)
        runs[1] = holding(runs[1], rounded(drawn(), share if step else 1e-6), step)
    samples = []
    for number, (spec, gradients) in enumerate(zip(samples_of(case), near, strict=True)):
        run = LAB.run(spec)
        loss = run.ranks[0].steps[1].loss
        assert loss is not None
        for step in (0, 2):
            run = holding(run, gradients, step)
        ulps = of_losses * (1 - 2 * (number % 2))
        run = edit(run, 0, 1, loss=type(loss).from_bits(int(loss.bits, 16) + ulps))
        samples.append(run)
    answer = ask("loss", *runs, case, samples=samples)
    assert answer.outcome == outcome
    assert outcome == "passed" or place(answer)[:3] == (2, 1, "grads")


def test_gradients_of_a_skipped_step_may_be_infinite() -> None:
    """Both runs left the step out: nothing was trained with them."""
    endless = drawn() | {"b.weight": torch.full((50,), float("inf"))}
    runs = [edit(holding(run, endless), 1, 0, skipped="scaler") for run in (REFERENCE, CANDIDATE)]
    assert ask("loss", *runs, LAB.case(expect=CLOSE)).outcome == "passed"


def test_a_sample_that_is_no_number_widens_no_bound() -> None:
    """The others still are the measure."""
    near = [holding(REFERENCE, rounded(drawn(), 1e-6, seed)) for seed in range(5)]
    broken = holding(REFERENCE, drawn() | {"b.weight": torch.full((50,), float("nan"))})
    allowed = measured(holding(REFERENCE, drawn()), [*near, broken], 1.0)
    assert 0 < allowed((0, 1, "b.weight"), 1.0, 1.0) < 1e-3
