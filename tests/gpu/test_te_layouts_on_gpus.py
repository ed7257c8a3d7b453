"""TransformerEngine's parts of the decoder on GPUs, each named where it is wrong."""

import importlib.util
from typing import Any

import pytest

from fsdp_core.config import ParallelConfig
from tests.dist.parity_check import packs_of, problem_of, reference
from tests.dist.rank_pool import RankPool
from tests.gpu import te_layouts_on_gpus as programs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)

ALIKE = 8.0
"""Errors of kernels that round a few times as often as torch's; what is wrong errs as hundreds."""


@pytest.mark.gpu(1)
@pytest.mark.parametrize("part", programs.PARTS)
def test_parts_err_as_torchs(part: str, gpu_ranks: RankPool) -> None:
    """Outputs and gradients of each part, by global names; none of them draws random numbers."""
    (found,) = gpu_ranks.run(programs.compare_part, part, world_size=1)
    assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("packed", [False, True])
def test_attention_over_ranks_errs_as_ours(packed: bool, gpu_ranks: RankPool) -> None:
    """Context parallel over four ranks in our order of chunks, documents packed and padded."""
    for found in gpu_ranks.run(programs.compare_core, packed, world_size=4):
        assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.gpu(4)
@pytest.mark.parametrize("mode", ["fused", "called"])
def test_sharded_experts_err_as_whole_ones(mode: str, gpu_ranks: RankPool) -> None:
    """Layers of experts as FSDP units, by one operator over both or called one by one."""
    for found in gpu_ranks.run(programs.compare_sharded, mode, world_size=4):
        assert isinstance(found, dict), found
        assert {name: error for name, error in found.items() if not error < ALIKE} == {}


@pytest.mark.gpu(4)
def test_bypassed_hooks_show(gpu_ranks: RankPool) -> None:
    """Operators that take weights without the hooks never give the right result silently."""
    for found in gpu_ranks.run(programs.compare_sharded, "bypass", world_size=4):
        assert isinstance(found, str) or not max(found.values()) < ALIKE


@pytest.mark.gpu(4)
@pytest.mark.parametrize(
    ("fp8", "preset", "degrees"),
    [
        ("delayed", "dense_tiny", {"tp": 2, "dp": 2, "sequence_parallel": True}),
        ("delayed", "dense_tiny", {"tp": 2, "cp": 2}),
        ("current", "moe_tiny", {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True}),
        ("block", "moe_tiny", {"dp": 4, "ep": 4}),
    ],
)
def test_fp8_gradients_are_near(
    fp8: str, preset: str, degrees: dict[str, Any], gpu_ranks: RankPool
) -> None:
    """Each gradient as in bf16 up to what three bits of mantissa leave, and not the very same."""
    parallel = ParallelConfig(**degrees)
    problem = problem_of(preset, packs_of(parallel))
    _, routes = reference(problem)
    for found in gpu_ranks.run(
        programs.compare_fp8, fp8, problem, parallel, routes or None, world_size=4
    ):
        # Rounding to e5m2 and e4m3 errs by up to 1/8 and 1/16 of a number, more where gradients
        # cancel; a missing or doubled sum by half or the whole of a tensor.
        assert found["all"] < 0.3, found
        assert found["worst"][1] < 0.7, found["worst"]
        assert found["same"] == [], "computed in bf16"
        assert found["differing"] == 0, "scales of the ranks that hold one tensor"
