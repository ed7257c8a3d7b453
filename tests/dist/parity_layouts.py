"""The matrix of parity: which layouts, models and precisions are compared with one process."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_core.config import ConfigError, ParallelConfig, TrainConfig
from tests.dist.parity_check import VARIANTS, packs_of, problem_of
from tests.dist.parity_programs import Layout, Problem

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
