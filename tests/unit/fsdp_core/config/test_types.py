"""Values of any type at any key: taken, or refused at once by a `ConfigError` with that key."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_core.config import (
    ConfigError,
    DataConfig,
    FsdpConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)

VALUES: tuple[Any, ...] = (
    None, "x", "", -1, 0, 1.5, float("nan"), float("inf"), 2**31, 2**62, 2**70, True, (), ("a",),
    (1,), [1], {}, b"x", ["attn"], -1.0,
)  # fmt: skip
PARTS: dict[str, Any] = {
    "parallel": ParallelConfig, "fsdp": FsdpConfig, "optim": OptimConfig, "data": DataConfig,
}  # fmt: skip
MODELS = ("dense_tiny", "mla_moe_tiny")


def built(key: str, value: Any) -> Iterator[TrainConfig]:
    """Runs with that value at a dotted key."""
    part, _, name = key.partition(".")
    values: list[dict[str, Any]] = [{key: value}]
    if part == "model" and name:
        values = [{part: model_from_preset(preset, {name: value})} for preset in MODELS]
    elif name:
        values = [{part: PARTS[part](**{name: value})}]
    for each in values:
        yield TrainConfig(**each)


def keys() -> list[str]:
    """Every dotted key of a run."""
    found = [f.name for f in dataclasses.fields(TrainConfig) if f.name not in ("model", *PARTS)]
    for part, kind in {"model": type(TrainConfig().model), **PARTS}.items():
        found += [f"{part}.{f.name}" for f in dataclasses.fields(kind) if f.name != "preset"]
    return found


def refusal(key: str, value: Any) -> ConfigError | None:
    """What is said to that value, if anything."""
    try:
        list(built(key, value))
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("key", keys())
def test_values_of_all_types_are_taken_or_refused(key: str) -> None:
    """No other exception, and no search through the divisors of a number that none has."""
    said = [refusal(key, value) for value in VALUES]
    assert all(error is None or error.key for error in said)
    assert any(said)


@pytest.mark.parametrize("key", ["graph", "compile", "stress", "taps"])
def test_lists_are_no_tuples(key: str) -> None:
    """A list of scopes would be equal to no tuple of the same ones, wherever they are compared."""
    error = refusal(key, ["layer"])
    assert error is not None
    assert error.expected == "a tuple of names"
