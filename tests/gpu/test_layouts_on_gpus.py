"""The decoder on every layout of 4 GPUs: one process's tensors within rounding, faults found."""

import importlib.util

import pytest

from tests.dist.parity_check import LAYOUTS_OF_4
from tests.dist.rank_pool import RankPool
from tests.gpu import layouts_on_gpus as programs

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
needs_te = pytest.mark.skipif(not HAS_TE, reason="needs transformer_engine")


@pytest.fixture(scope="module")
def _bounds(gpu_ranks: RankPool) -> None:
    del gpu_ranks  # first, so that processes that measure have torch imported
    programs.measure(["torch", "te"] if HAS_TE else ["torch"], list(LAYOUTS_OF_4))


@pytest.mark.gpu(4)
@pytest.mark.usefixtures("_bounds")
@pytest.mark.parametrize("name", LAYOUTS_OF_4)
@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_te)])
def test_gpus_have_the_tensors_of_one_process(backend: str, name: str, gpu_ranks: RankPool) -> None:
    """Every activation, loss and gradient is within its bound: bf16 and fp32; with te, fp8."""
    rows = programs.run_layout(backend, name, gpu_ranks)
    assert rows
    assert programs.wrong(rows) == []


@pytest.mark.gpu(4)
@pytest.mark.parametrize(("fault", "model", "name", "first"), programs.FAULTS)
def test_fault_is_found_by_name_on_gpus(
    fault: str, model: str, name: str, first: str, gpu_ranks: RankPool
) -> None:
    """A planted fault exceeds the float32 bound tenfold, first in the tensor it makes wrong."""
    row = programs.run_fault(fault, model, name, "fp32", gpu_ranks)
    assert first in row.first_wrong
    assert row.units > 10
