"""Compare a step on a layout with the same step in one process, tensor by tensor."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch

from fsdp_core.config import (
    ConfigError,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    model_from_preset,
)
from tests.dist import parity_rounding
from tests.dist.parity_programs import (
    Batch,
    Found,
    Key,
    Layout,
    Outcome,
    Problem,
    Routes,
    join,
    keys_in_order,
    one_thread,
    run_case,
    run_whole,
)
from tests.dist.parity_rounding import Allowed
from tests.dist.rank_pool import RankPool

LONGEST = 256
"""Longest document of packed batches."""

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen_tiny": ("dense_tiny", {"qk_norm": True, "head_dim": 24, "layers": 4}),
    # Widths that are multiples of 16, which products of eight-bit numbers ask for.
    "mla_moe_even": (
        "mla_moe_tiny",
        {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16},
    ),
}
"""Models that no preset has: the preset that they are made of, and what differs."""


@dataclass(frozen=True)
class Comparison:
    """Errors in units of their bounds, in the order in which tensors are computed."""

    units: dict[Key, float]

    @property
    def worst(self) -> tuple[float, str]:
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


_BOUNDS: dict[tuple[Problem, str], dict[Key, Allowed]] = {}


def bounds(problem: Problem, arithmetic: str) -> dict[Key, Allowed]:
    """By how much each tensor may be off in an arithmetic."""
    if (problem, arithmetic) not in _BOUNDS:
        _BOUNDS[problem, arithmetic] = _measure(problem, arithmetic)
    return _BOUNDS[problem, arithmetic]


def _measure(problem: Problem, arithmetic: str) -> dict[Key, Allowed]:
    exact, routes = reference(problem)
    if arithmetic == "fp64":
        scale = parity_rounding.FLOAT64_SCALE
        return {key: bound.scaled(scale) for key, bound in bounds(problem, "fp32").items()}
    with one_thread():
        return parity_rounding.bounds(problem, arithmetic, exact, routes)


def prepare(wanted: Iterable[tuple[Problem, str]]) -> None:
    """Measure the bounds of many comparisons at once, on as many processes as there are cores."""
    measured = ((problem, "fp32" if kind == "fp64" else kind) for problem, kind in wanted)
    missing = [each for each in dict.fromkeys(measured) if each not in _BOUNDS]
    workers = min(len(missing), os.cpu_count() or 1, 32)
    if workers < 2:
        return
    context = get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        _BOUNDS.update(zip(missing, pool.map(_measure, *zip(*missing, strict=True)), strict=True))


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
    _, routes = reference(problem)
    outcomes = pool.run(run_case, problem, layout, routes, world_size=layout.parallel.world_size)
    return judge(problem, layout, outcomes)


def judge(problem: Problem, layout: Layout, outcomes: list[Outcome]) -> Comparison:
    """Compare what all ranks saw of a step with one process.

    Raises:
        ValueError: copies of a token's activations differ between ranks, or tensors lack.
    """
    exact, _ = reference(problem)
    allowed = bounds(problem, layout.arithmetic)
    parallel = layout.parallel
    got = join(outcomes, problem.batch, parallel.dp_outer * parallel.dp * parallel.cp)
    if got.keys() != exact.keys():
        raise ValueError(f"Expected the same tensors, got others: {got.keys() ^ exact.keys()}.")
    return Comparison({
        key: allowed[key].units(got[key], exact[key])
        for key in keys_in_order(exact, problem.model)
    })  # fmt: skip


# ---- the matrix: which layouts, models and precisions are compared

MODELS = ("dense_tiny", "moe_tiny", "mla_moe_tiny", *VARIANTS)
EIGHTH_INIT_STD = 0.02
"""Of weights that are multiplied in eight bits: larger ones multiply their rounding errors too."""

Degrees = dict[str, Any]
"""Of `ParallelConfig`, and `packed` of `packs_of`."""

SP: Degrees = {"sequence_parallel": True}
LAYOUTS: dict[str, Degrees] = {
    "DP8": {"dp": 8},
    "HSDP 2x4": {"dp": 4, "dp_outer": 2},
    "DP4xTP2": {"dp": 4, "tp": 2},
    "DP4xTP2 SP": {"dp": 4, "tp": 2} | SP,
    "DP2xEP2xETP2": {"dp": 8, "ep": 2, "etp": 2},
    "DP2xEP2xETP2 of TP2": {"dp": 4, "tp": 2, "ep": 2, "etp": 2},
    "DP2xEP2xETP2 of TP2 SP": {"dp": 4, "tp": 2, "ep": 2, "etp": 2} | SP,
    "DP2xCP2xTP2": {"dp": 2, "cp": 2, "tp": 2},
    "DP2xCP2xTP2 ETP2": {"dp": 2, "cp": 2, "tp": 2, "etp": 2},
    "DP2xCP2xTP2 SP": {"dp": 2, "cp": 2, "tp": 2} | SP,
    "CP4": {"cp": 4},
    "CP4 packed": {"cp": 4, "packed": True},
    "EP4": {"dp": 4, "ep": 4},
    "EP4 CP2 packed": {"dp": 2, "cp": 2, "ep": 4, "packed": True},
    "EP8": {"dp": 8, "ep": 8},
    "TP2xPP2": {"tp": 2, "pp": 2},
    "TP2xPP2 SP": {"tp": 2, "pp": 2} | SP,
    "DP2xPP2xTP2": {"dp": 2, "pp": 2, "tp": 2},
    "DP2xPP2xTP2 SP": {"dp": 2, "pp": 2, "tp": 2} | SP,
    "EP2xPP2xTP2 SP": {"dp": 2, "pp": 2, "tp": 2, "ep": 2} | SP,
    "CP2xPP2xTP2 packed SP": {"cp": 2, "pp": 2, "tp": 2, "packed": True} | SP,
    "DP2xPP2 interleaved": {"dp": 2, "pp": 2, "pp_chunks": 2},
    "dynamic CP 1/2/4/8": {"dp": 8, "dynamic_cp": (1, 2, 4, 8)},
    "dynamic CP 1/2/4 TP2 SP": {"dp": 4, "tp": 2, "dynamic_cp": (1, 2, 4)} | SP,
    "dynamic CP 1/2/4/8 EP8": {"dp": 8, "dynamic_cp": (1, 2, 4, 8), "ep": 8},
}
LAYOUTS_OF_4: dict[str, Degrees] = {
    "DP2xTP2": {"dp": 2, "tp": 2},
    "DP2xTP2 SP": {"dp": 2, "tp": 2} | SP,
    "EP2xETP2 of DP4": {"dp": 4, "ep": 2, "etp": 2},
    "EP2xETP2 of DP2xTP2": {"dp": 2, "tp": 2, "ep": 2, "etp": 2},
    "EP2xETP2 of DP2xTP2 SP": {"dp": 2, "tp": 2, "ep": 2, "etp": 2} | SP,
    "CP2xTP2": {"cp": 2, "tp": 2},
    "CP2xTP2 SP": {"cp": 2, "tp": 2} | SP,
    "CP2xTP2 ETP2": {"cp": 2, "tp": 2, "etp": 2},
    "CP4": LAYOUTS["CP4"],
    "CP4 packed": LAYOUTS["CP4 packed"],
    "EP4": LAYOUTS["EP4"],
    "EP4 CP2 packed": LAYOUTS["EP4 CP2 packed"],
    "TP2xPP2": LAYOUTS["TP2xPP2"],
    "TP2xPP2 SP": LAYOUTS["TP2xPP2 SP"],
    "dynamic CP 1/2/4": {"dp": 4, "dynamic_cp": (1, 2, 4)},
    "dynamic CP 1/2/4 EP4": {"dp": 4, "dynamic_cp": (1, 2, 4), "ep": 4},
}
BY_RANKS = {8: LAYOUTS, 4: LAYOUTS_OF_4}
ALL = LAYOUTS | LAYOUTS_OF_4


@dataclass(frozen=True)
class Cell:
    """One comparison: a model on a layout."""

    model: str
    name: str
    layout: Layout
    problem: Problem


def layout_of(
    name: str, dtype: str, *, backend: str = "torch", device: str = "cpu", fault: str = ""
) -> tuple[Layout, tuple[int, ...]]:
    """A layout of the matrix, and which ranks share its packs."""
    degrees = dict(ALL[name])
    packed = degrees.pop("packed", False)
    parallel = ParallelConfig(**degrees)
    layout = Layout(parallel, dtype, fault=fault, backend=backend, device=device)
    return layout, packs_of(parallel, packed=packed)


def cell_of(model: str, name: str, dtype: str, **options: Any) -> Cell:
    """A cell of the matrix; `options` are those of `layout_of`."""
    layout, sizes = layout_of(name, dtype, **options)
    problem = problem_of(model, sizes)
    if dtype == "fp8":
        problem = dataclasses.replace(problem, init_std=EIGHTH_INIT_STD)
    return Cell(model, name, layout, problem)


def refusal(cell: Cell) -> ConfigError | None:
    """Why a model has no such layout."""
    problem = cell.problem
    try:
        TrainConfig(
            model=problem.model, parallel=cell.layout.parallel, microbatches=problem.batch.number
        )
    except ConfigError as error:
        return error
    return None


def cells(
    models: Iterable[str], names: Iterable[str], dtypes: Iterable[str], **options: Any
) -> Iterator[list[Cell]]:
    """For each layout, the cells of models that have it, in every precision."""
    for name in names:
        every = [cell_of(model, name, dtype, **options) for model in models for dtype in dtypes]
        if legal := [cell for cell in every if refusal(cell) is None]:
            yield legal
