"""The decoder on every layout of 4 GPUs: one process's tensors within rounding, faults found."""

import importlib.util

import pytest

from tests.dist.parity_check import LAYOUTS_OF_4, Cell, cell_of, cells, prepare
from tests.dist.parity_table import DEFAULTS, Row, run_cells
from tests.dist.rank_pool import RankPool

DEVICE = "cuda"

FAULTS = [
    ("experts divided by edp", "moe_tiny", "EP2xETP2 of DP2xTP2 SP", "layers.1.mlp.moe.experts"),
    ("plain chunks", "dense_tiny", "CP4", "layers.0.attn forward"),
    ("swapped etp", "mla_moe_tiny", "EP2xETP2 of DP4", "layers.1.mlp.moe.experts"),
    ("aux loss twice", "mla_moe_tiny", "EP4", "layers.1.mlp.moe.router.weight"),
]
"""Fault, model, layout, and what the first wrong tensor is called. See `parity_faults`."""


def matrix(backend: str, names: list[str], device: str = DEVICE) -> list[list[Cell]]:
    """Cells of a backend by layout, in the precisions and for the models of the table."""
    defaults = DEFAULTS[DEVICE, backend]
    return list(cells(defaults["model"], names, defaults["dtype"], backend=backend, device=device))


def measure(backends: list[str], names: list[str]) -> None:
    """Measure all bounds on as many cores as there are, once."""
    groups = [group for backend in backends for group in matrix(backend, names)]
    prepare([(cell.problem, cell.layout.arithmetic) for group in groups for cell in group])


def run_layout(backend: str, name: str, pool: RankPool, device: str = DEVICE) -> list[Row]:
    """All models and precisions on one layout, on fresh ranks."""
    return [row for group in matrix(backend, [name], device) for row in run_cells(group, pool)]


def wrong(rows: list[Row]) -> list[str]:
    """What is past its bound: model, precision, units and the first wrong tensor."""
    return [
        f"{row.model} {row.dtype}: {row.units:.3g} units, first {row.first_wrong}"
        for row in rows
        if row.is_wrong
    ]


def run_fault(
    fault: str, model: str, name: str, dtype: str, pool: RankPool, device: str = DEVICE
) -> Row:
    """A cell with a planted fault, torch backend."""
    return run_cells([cell_of(model, name, dtype, device=device, fault=fault)], pool)[0]


HAS_TE = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not HAS_TE, reason="needs transformer_engine")


@pytest.fixture(scope="module")
def _bounds(gpu_ranks: RankPool) -> None:
    del gpu_ranks  # first, so that processes that measure have torch imported
    measure(["torch", "te"] if HAS_TE else ["torch"], list(LAYOUTS_OF_4))


@pytest.mark.gpu(4)
@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize("name", LAYOUTS_OF_4)
@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_te)])
def test_gpus_have_the_tensors_of_one_process(backend: str, name: str, gpu_ranks: RankPool) -> None:
    """Every activation, loss and gradient is within its bound: bf16 and fp32; with te, fp8."""
    rows = run_layout(backend, name, gpu_ranks)
    assert rows
    assert wrong(rows) == []


@pytest.mark.gpu(4)
@pytest.mark.parametrize(("fault", "model", "name", "first"), FAULTS)
def test_fault_is_found_by_name_on_gpus(
    fault: str, model: str, name: str, first: str, gpu_ranks: RankPool
) -> None:
    """A planted fault exceeds the float32 bound tenfold, first in the tensor it makes wrong."""
    row = run_fault(fault, model, name, "fp32", gpu_ranks)
    assert first in row.first_wrong
    assert row.units > 10
