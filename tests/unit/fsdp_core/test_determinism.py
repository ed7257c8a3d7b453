"""Determinism: one call decides every draw and every kernel choice."""

import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fsdp_core.device import make_deterministic, prepare_environment, seed_all

pytestmark = pytest.mark.usefixtures("determinism_as_before")


@pytest.fixture(autouse=True)
def generators_as_before() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws() -> tuple[float, float, list[float]]:
    return random.random(), float(np.random.rand()), torch.rand(4).tolist()


@pytest.mark.parametrize("seed", [0, 1234, 2**32, 2**64 - 1])
def test_same_seed_same_draws(seed: int) -> None:
    """Python, NumPy and torch repeat their draws after the same seed, and differ after another."""
    seed_all(seed)
    first = draws()
    seed_all(seed)
    assert draws() == first
    seed_all(seed ^ 1)
    other = draws()
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_deterministic_kernels_without_filling() -> None:
    """Deterministic algorithms are on, TF32 off, and new memory is not filled."""
    make_deterministic(7)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.benchmark
    expected = torch.rand(3)
    make_deterministic(7)
    assert torch.equal(torch.rand(3), expected)


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Library settings get our defaults only where the user said nothing."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    prepare_environment()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
