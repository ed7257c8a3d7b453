"""The table of parity: every layout of the matrix, every model, every precision.

    python -m tests.dist.parity_table [--dtype fp64 fp32 bf16] [--model ...] [--layout ...]

prints the worst error of any activation, loss or gradient in units of its bound, and what of; exit
code 1 if any is past it.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from fsdp_core.config import ConfigError, ParallelConfig, TrainConfig
from tests.dist.parity_check import VARIANTS, compare, packs_of, problem_of
from tests.dist.parity_programs import DTYPES, Layout
from tests.dist.rank_pool import RankError, RankPool

MODELS = ("dense_tiny", "moe_tiny", "mla_moe_tiny", *VARIANTS)
SP: dict[str, Any] = {"sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
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
    "CP4 gather": {"cp": 4, "way": "gather"},
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


def layout_of(name: str, dtype: str) -> tuple[Layout, tuple[int, ...]]:
    """A layout of the matrix, and which ranks share its packs."""
    degrees = dict(LAYOUTS[name])
    packed, way = degrees.pop("packed", False), degrees.pop("way", "ring")
    parallel = ParallelConfig(**degrees)
    return Layout(parallel, dtype, way), packs_of(parallel, packed=packed)


def refusal(preset: str, name: str) -> ConfigError | None:
    """Why a model has no such layout."""
    layout, sizes = layout_of(name, "fp64")
    problem = problem_of(preset, sizes)
    try:
        TrainConfig(
            model=problem.model, parallel=layout.parallel, microbatches=problem.batch.number
        )
    except ConfigError as error:
        return error
    return None


def cells(models: list[str], names: list[str]) -> Iterator[tuple[str, str]]:
    """Models and layouts that go together."""
    yield from ((m, n) for m in models for n in names if refusal(m, n) is None)


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    chosen = parser.parse_args(arguments)
    failed = False
    pool = RankPool(8, timeout_s=300.0)
    try:
        sys.stdout.write(f"{'model':13s} {'layout':25s} {'dtype':5s} {'units':>9s}  worst tensor\n")
        for model, name in cells(chosen.model, chosen.layout):
            for dtype in chosen.dtype:
                layout, sizes = layout_of(name, dtype)
                try:
                    units, what = compare(problem_of(model, sizes), layout, pool).worst
                except (RankError, ValueError) as error:
                    units, what = float("inf"), str(error).strip().splitlines()[-1]
                failed |= units > 1
                sys.stdout.write(f"{model:13s} {name:25s} {dtype:5s} {units:9.2e}  {what}\n")
                sys.stdout.flush()
                pool.stop()  # a rank keeps threads of the process groups that it has left
    finally:
        pool.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
