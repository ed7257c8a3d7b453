"""Random states, and operators that round at random: what they return, leave and change."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from harness.recorder import record
from harness.recorder.rounding import RandomRounding, Rounding, unit_roundoff
from tests.unit.harness.recorder.recorded import (
    all_digests,
    changed,
    error_of,
    losses,
    model_of,
    pair,
    plain,
    recorded,
    train,
)

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


GENERATORS: dict[str, tuple[Any, ...]] = {
    "python": (random, "random", "seed", "getstate", "setstate"),
    "numpy": (np.random, "rand", "seed", "get_state", "set_state"),
}


def call(name: str, place: int, *args: Any) -> Any:
    """A function of a generator by its place: draw 1, seed 2, get 3, put 4; as it is hooked now."""
    owner, *names = GENERATORS[name]
    return getattr(owner, names[place - 1])(*args)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_counts_once_the_program_seeds_it(name: str, tmp_path: Path) -> None:
    """What a program leaves to the clock makes no two runs differ; its own seeds do, at once."""

    def left(number: int) -> None:
        for _ in range(number):
            call(name, 1)
        plain()

    def seeded(number: int) -> None:
        call(name, 2, number)
        plain()

    first, second = pair(left, tmp_path / "left", 1, 2)
    assert changed(first, second, -1) == set()
    first, second = pair(seeded, tmp_path / "seeded", 1, 2)
    assert changed(first, second, -1) == changed(first, second, 1) == {f"rng:{name}"}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_state_that_is_put_back_is_no_seed(name: str, tmp_path: Path) -> None:
    """As torch.compile does where it compiles; one from elsewhere, a checkpoint's, is one."""
    held = call(name, 3)

    def program(from_elsewhere: bool) -> None:
        before = call(name, 3)
        model = model_of()
        call(name, 1)
        call(name, 4, held if from_elsewhere else before)
        train(model, SGD(model.parameters(), 0.1))

    found = []
    for number, elsewhere in enumerate((False, False, True)):
        call(name, 1)  # a fork has its parent's numbers
        (run,) = pair(program, tmp_path / str(number), elsewhere)
        found.append(all_digests(run))
    assert found[0] == found[1] != found[2]


def test_enforced_determinism_seeds_every_generator(tmp_path: Path) -> None:
    """Two processes with other generators begin with the same weights and random states."""

    def program() -> None:
        random.random()
        np.random.rand()
        plain()

    runs = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        runs.append(recorded(program, tmp_path / f"{seed}", seed=seed, determinism="enforce"))
    assert all_digests(runs[0]) == all_digests(runs[1])
    (event,) = [each for each in runs[0].events if each.name == "environment"]
    assert event.detail["deterministic"] is True


def rounds() -> bool:
    return any(isinstance(mode, RandomRounding) for mode in _get_current_dispatch_mode_stack())


def train_rounded(*, seed: int = 1, lines: bool = False, steps: int = 3) -> None:
    """A model of one layer; before its first forward pass nothing rounds at random."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = record(model, optimizer)
    assert not rounds()
    for _ in range(steps):
        with recorder.step() if lines else contextlib.nullcontext():
            loss = model(torch.full((8, 64), 1 / 3)).square().mean()
            assert rounds() == bool(seed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("lines", [False, True], ids=["hooks", "lines"])
def test_a_run_rounds_at_random_from_its_first_forward_pass(tmp_path: Path, *, lines: bool) -> None:
    """Same state before step 0; other losses with each seed, near the usual ones; then it ends."""
    usual, one, again, two = (
        recorded(lambda: train_rounded(seed=seed, lines=lines), tmp_path / str(i), rounding=seed)  # noqa: B023
        for i, seed in enumerate((0, 1, 1, 2))
    )
    for records in (usual, one, two):
        assert records.error is None
        assert records.end is not None
        assert records.initial == usual.initial
    first, same, other, theirs = (list(map(losses, it.steps)) for it in (one, again, two, usual))
    assert first == same
    assert first not in (theirs, other)
    assert first == [pytest.approx(each, rel=1e-4) for each in theirs]


def of_no_module() -> None:
    """Weights of no module have no pass through one: the first backward pass begins."""
    weight = nn.Parameter(torch.ones(8) / 3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        (weight / 3).square().sum().backward()
        assert rounds()
        optimizer.step()


def in_another_mode() -> None:
    with FlopCounterMode(display=False):
        train_rounded(steps=1)


def compiled(*, before: bool) -> None:
    """The mode keeps the compiler out; code that was compiled earlier would not round."""
    model = nn.Linear(64, 64)
    part = torch.compile(model, backend="eager")
    if before:
        with torch.no_grad():
            part(torch.ones(8, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        part(torch.full((8, 64), 1 / 3)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("program", [of_no_module, lambda: compiled(before=False)])
def test_what_rounds_all_the_time_is_a_sample(program: Callable[[], None], tmp_path: Path) -> None:
    assert recorded(program, tmp_path, rounding=1).error is None


@pytest.mark.parametrize(
    ("program", "says"),
    [(in_another_mode, "dispatch mode"), (lambda: compiled(before=True), "torch.compile")],
)
def test_what_rounds_for_a_part_of_the_time_is_none(
    program: Callable[[], None], says: str, tmp_path: Path
) -> None:
    """It would state too narrow a bound."""
    error = error_of(program, tmp_path, code=0, rounding=1)
    assert error.what == "unsupported"
    assert says in error.message


def test_each_rank_rounds_by_itself() -> None:
    """With one seed they would err alike, and sums over ranks would have too little spread."""
    found = []
    for rank in (0, 1, 1):
        mode = Rounding(1, rank)
        mode.begins(lambda: None)
        found.append((torch.full((64,), 1 / 3) * 1.1).tolist())
        mode.end()
    assert found[0] != found[1] == found[2]
