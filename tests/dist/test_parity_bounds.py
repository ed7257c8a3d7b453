"""The bounds themselves: they hold, are nearly reached, and let nothing that is no number pass."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.dist.parity_bounds import (
    WIDE,
    Bounded,
    bounded,
    cross_entropy,
    exact_and_magnitudes,
    gamma,
    product,
    unit_roundoff,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "bits"), list(zip(DTYPES, (53, 24, 8), strict=True)))
def test_the_unit_roundoff_is_the_largest_relative_rounding(dtype: torch.dtype, bits: int) -> None:
    """Half a gap above 1 rounds to 1 (to even), a little more does not."""
    u = unit_roundoff(dtype)
    assert u == 2.0**-bits
    one = torch.ones((), dtype=dtype)
    assert one + torch.full((), u, dtype=dtype) == 1
    assert one + torch.full((), u * 1.5, dtype=dtype) > 1
    assert gamma(10, dtype) == 10 * u / (1 - 10 * u)
    with pytest.raises(ValueError, match="Expected n u below 1"):
        gamma(2**bits, dtype)


def quadratic(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.linear(named["x"], named["a"]) * F.linear(named["x"], named["b"])


def test_magnitudes_are_sums_of_the_terms() -> None:
    """The second pass gives the sum of each term's absolute value, of output and gradients."""
    torch.manual_seed(0)
    named = {"x": torch.randn(5), "a": torch.randn(1, 5), "b": torch.randn(1, 5)}
    cotangent = torch.randn(1)
    exact, magnitudes = exact_and_magnitudes(quadratic, named, cotangent)
    x, a, b = (named[n].double() for n in ("x", "a", "b"))
    terms = torch.outer(x * a[0], x * b[0])
    assert torch.allclose(exact["output"], terms.sum())
    assert torch.allclose(magnitudes["output"], terms.abs().sum())
    grad_terms = cotangent.double() * torch.outer(x, x * b[0])
    assert torch.allclose(exact["a"][0], grad_terms.sum(1))
    assert torch.allclose(magnitudes["a"][0], grad_terms.abs().sum(1))
    assert magnitudes.keys() == {"output", "x", "a", "b"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_stay_in_their_bound_and_faults_do_not(dtype: torch.dtype) -> None:
    """A product over 4 ranks is in; one rank's part missing, or a mean, is ten bounds out."""
    torch.manual_seed(0)
    named = {"x": torch.rand(6, 64) - 0.2, "weight": torch.rand(10, 64) - 0.2}
    named = {name: t.to(dtype) for name, t in named.items()}
    cotangent = (torch.rand(6, 10) - 0.2).to(dtype)
    counts = {"output": product(16, 4), "x": product(10), "weight": product(6)}
    expected = bounded(lambda n: F.linear(n["x"], n["weight"]), named, cotangent, counts, dtype)[
        "output"
    ]
    shards = zip(*(t.chunk(4, 1) for t in named.values()), strict=True)
    parts = torch.stack([F.linear(x, weight) for x, weight in shards])
    right = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert expected.units(right) <= 1
    assert expected.units(parts[:3].sum(0)) >= 10
    assert expected.units(right / 4) >= 10


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_stays_in_its_bound(dtype: torch.dtype, ranks: int) -> None:
    """Torch's loss and gradient are in, and come within a factor of the bound: it is tight.

    Of float64 there is no wider format: on some processors torch's loss has the very bits.
    """
    torch.manual_seed(0)
    logits = (torch.randn(400, 16) * 3 + 50).to(dtype)
    targets = torch.randint(0, 16, (400,))
    loss, grad = cross_entropy(logits, targets, ranks, dtype)
    wide = logits.to(WIDE[dtype]).requires_grad_()
    theirs = F.cross_entropy(wide, targets, reduction="none")
    (their_grad,) = torch.autograd.grad(theirs.sum(), wide)
    assert (0.01 if WIDE[dtype] != dtype else -1) < loss.units(theirs) <= 1
    assert 0.05 < grad.units(their_grad.to(dtype)) <= 1
    assert loss.units(theirs * (1 + 300 * unit_roundoff(WIDE[dtype]))) > 1


def test_what_is_no_number_is_no_match() -> None:
    """NaN and infinities are right only where they are due; no bound, no error."""
    nan, inf = math.nan, math.inf
    exact, bound = torch.tensor([1.0, inf, -inf, nan, 2.0]), torch.tensor([0.5, 1, 1, 1, 0.0])
    expected = Bounded(exact.double(), bound.double())
    assert expected.units(exact) == 0
    assert expected.units(exact + torch.tensor([0.25, 0, 0, 0, 0])) == pytest.approx(0.5)
    for index, value in [(0, nan), (0, inf), (1, 5.0), (1, -inf), (2, inf), (3, 0.0), (4, 2.0001)]:
        wrong = exact.clone()
        wrong[index] = value
        assert expected.units(wrong) == inf, (index, value)
    with pytest.raises(ValueError, match=r"Expected \(5,\), got \(1, 5\)"):
        expected.units(exact[None])
    assert Bounded(torch.zeros(0), torch.zeros(0)).units(torch.zeros(0)) == 0


def test_underflow_is_allowed_for() -> None:
    """A result below the normal numbers may be flushed to zero, where any rounding may be."""
    tiny = torch.finfo(torch.float32).tiny
    exact = torch.tensor([tiny / 3], dtype=torch.float64)
    assert Bounded(exact, exact * 1e-7).units(torch.zeros(1)) <= 1
    assert Bounded(exact, exact * 0).units(torch.zeros(1)) == math.inf
