"""Random states: whose seeds count, and a program whose run is to round at random."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from harness.recorder import record
from harness.recorder.hooks import Rounding
from harness.recorder.rounding import RandomRounding
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


# --- rounding at random ------------------------------------------------------------------------


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
