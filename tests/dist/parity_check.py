"""Compare a step on a layout with the same step in one process, tensor by tensor."""

import functools
import math
from dataclasses import dataclass

import torch

from fsdp_core.config import ModelConfig, ParallelConfig, model_from_preset
from tests.dist import parity_rounding
from tests.dist.parity_batches import Batch
from tests.dist.parity_programs import (
    DTYPES,
    Layout,
    Problem,
    Routes,
    keys_in_order,
    one_thread,
    run_case,
    run_whole,
)
from tests.dist.parity_watch import Found, Key, join
from tests.dist.rank_pool import RankPool

LONGEST = 256
"""Longest document of packed batches."""

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen_tiny": ("dense_tiny", {"qk_norm": True, "head_dim": 24, "layers": 4}),
}
"""Models that no preset has: the preset that they are made of, and what differs."""


@dataclass(frozen=True)
class Comparison:
    """Errors in units of their bounds, in the order in which tensors are computed."""

    units: dict[Key, float]

    @property
    def worst(self) -> tuple[float, str]:
        """The largest, and what of."""
        key = max(self.units, key=lambda key: self.units[key])
        return self.units[key], name_of(key)

    @property
    def first_wrong(self) -> tuple[str, float] | None:
        """The first tensor past its bound and its error; None if all are within."""
        for key, units in self.units.items():
            if units > 1:
                return name_of(key), units
        return None


def name_of(key: Key) -> str:
    """In words."""
    if key[0] == "forward":
        return f"{key[2]} forward, microbatch {key[1]}"
    return "loss" if key[0] == "loss" else f"gradient of {key[1]}"


@functools.cache
def problem_of(
    preset: str, sizes: tuple[int, ...], overrides: tuple[tuple[str, object], ...] = ()
) -> Problem:
    """The problem of a preset: rows of one document, or packs that `sizes` ranks share."""
    base, changed = VARIANTS.get(preset, (preset, {}))
    named = changed | dict(overrides) | ({"seq": LONGEST} if sizes else {})
    config: ModelConfig = model_from_preset(base, named)
    batch = Batch(config.vocab_size, config.seq, len(sizes) or 2, 64 if sizes else 0, sizes)
    return Problem(config, batch)


@functools.cache
def reference(problem: Problem) -> tuple[Found, Routes]:
    """The step in one process in float64, and the experts that it chose."""
    with one_thread():
        return run_whole(problem, torch.float64, None)


@functools.cache
def bounds(problem: Problem, dtype: str) -> dict[Key, float]:
    """By how much each tensor may be off in a dtype."""
    exact, routes = reference(problem)
    if dtype == "fp64":
        scale = parity_rounding.FLOAT64_SCALE
        return {key: scale * bound for key, bound in bounds(problem, "fp32").items()}
    with one_thread():
        return parity_rounding.bounds(problem, DTYPES[dtype], exact, routes)


def packs_of(parallel: ParallelConfig, *, packed: bool = False) -> tuple[int, ...]:
    """How many ranks share a pack, by microbatch; () for rows of one document."""
    if parallel.dynamic_cp:
        return parallel.dynamic_cp
    return (parallel.cp, parallel.cp) if packed else ()


def compare(problem: Problem, layout: Layout, pool: RankPool) -> Comparison:
    """Run the layout on warm ranks.

    Raises:
        RankError: a rank failed, or a replicated tensor differs between ranks.
        ValueError: copies of a token's activations differ between ranks.
    """
    exact, routes = reference(problem)
    allowed = bounds(problem, layout.dtype)
    parallel = layout.parallel
    outcomes = pool.run(run_case, problem, layout, routes, world_size=parallel.world_size)
    got = join(outcomes, problem.batch, parallel.dp_outer * parallel.dp * parallel.cp)
    if got.keys() != exact.keys():
        raise ValueError(f"Expected the same tensors, got others: {got.keys() ^ exact.keys()}.")
    return Comparison({
        key: _units(float((got[key] - exact[key]).norm()), allowed[key])
        for key in keys_in_order(exact, problem.model)
    })  # fmt: skip


def _units(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    units = error / bound if bound else math.inf
    return math.inf if math.isnan(units) else units
