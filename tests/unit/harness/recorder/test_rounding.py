"""Operators that round at random: what they return, what they leave, what they change in place."""

import pytest
import torch
from torch import Tensor, nn

from harness.recorder.rounding import RandomRounding, unit_roundoff

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def third(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """4096 times 1 and 3, whose quotient no binary number is."""
    return torch.ones(4096, dtype=dtype), torch.full((4096,), 3.0, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_is_one_of_its_neighbours_and_right_on_average(dtype: torch.dtype) -> None:
    """1/3 is rounded up and down; the mean of n is within 5 deviations, h/2 over sqrt n each."""
    one, three = third(dtype)
    with RandomRounding(1):
        found = one / three
    values = found.double().unique()
    gap = unit_roundoff(dtype) / 2  # between numbers from 1/4 to 1/2
    assert values.numel() == 2
    assert float(values[1] - values[0]) == gap
    assert abs(float(found.double().mean()) - 1 / 3) <= 5 * gap / 2 / 64


@pytest.mark.parametrize(
    ("foreach", "fused"), [(False, False), (True, False), (False, True)],
    ids=["for_loop", "foreach", "fused"],
)  # fmt: skip
def test_an_optimizer_rounds_its_weights(*, foreach: bool, fused: bool) -> None:
    """However it loops: both neighbours occur, each seed has its own, and steps are counted."""

    def trained(seed: int | None) -> tuple[Tensor, float]:
        weights = nn.Parameter(torch.ones(4096))
        optimizer = torch.optim.AdamW([weights], lr=1 / 3, foreach=foreach, fused=fused)
        with RandomRounding(seed) if seed is not None else torch.enable_grad():
            for _ in range(2):
                weights.grad = torch.ones(4096)
                optimizer.step()
        return weights.detach(), float(optimizer.state[weights]["step"])

    (usual, _), (one, steps), (other, _) = trained(None), trained(1), trained(2)
    assert steps == 2
    assert usual.unique().numel() == 1
    assert 2 <= one.unique().numel() <= 64
    assert not torch.equal(one, other)
    assert float((one - usual).abs().max()) <= 16 * unit_roundoff(torch.float32)


def test_random_numbers_are_drawn_once() -> None:
    """Dropout and fresh numbers inside leave the generator where it is without."""

    def draw() -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.ones(64)
        masked = nn.functional.dropout(x, 0.5)
        return [masked, torch.empty(8).normal_(), torch.rand_like(x), torch.get_rng_state()]

    usual = draw()
    with RandomRounding(1):
        found = draw()
    assert all(map(torch.equal, found, usual))


def test_a_wide_tensor_is_changed_once() -> None:
    """A float64 sum of float32 numbers is not widened, and not added to twice."""
    total = torch.zeros(3, dtype=torch.float64)
    with RandomRounding(1):
        total.add_(torch.ones(3))
    assert total.tolist() == [1, 1, 1]


def test_what_has_no_float64_form_is_moved_by_half_a_gap() -> None:
    """An operator of another library runs as it is, its result a neighbour's distance off."""
    library = torch.library.Library("deltazero_rounding", "DEF")
    library.define("twice(Tensor x) -> Tensor")

    def twice(x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return 2 * x

    library.impl("twice", twice, "CPU")
    x = torch.full((4096,), 1.5)
    with RandomRounding(1):
        found = torch.ops.deltazero_rounding.twice(x)
    assert found.unique().numel() >= 2
    assert float((found - 3).abs().max()) <= 4 * unit_roundoff(torch.float32)


@pytest.mark.parametrize("bias", [False, True], ids=["mm", "addmm"])
def test_a_product_has_the_errors_of_its_accumulation(*, bias: bool) -> None:
    """With a bias or without: terms that cancel to 0 leave sqrt(n) u |a||b| of float32."""
    ones, length = torch.ones(64, 4096), 4096
    ones[:, ::2] = -1
    layer = nn.Linear(length, 64, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(1.0 if parameter.dim() == 2 else 0.0)
        with RandomRounding(1):
            found = layer(ones)
    assert float(found.abs().median()) == length**1.5 * unit_roundoff(torch.float32)
