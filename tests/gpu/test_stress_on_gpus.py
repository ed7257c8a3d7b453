"""Stressors on GPUs: right programs keep their bits, and late streams show what does not wait."""

from dataclasses import replace

import pytest

from tests.dist.rank_pool import RankPool
from tests.dist.stress_programs import Stressed, train_each, train_misordered_each
from tests.dist.train_layout_programs import STEPS, Run

FULL, ATTN = ("full_iteration",), ("attn",)
LATE = ("jitter", "poison", "scramble")
SHARDED = Run({"dp": 2}, dtype="bf16", fsdp={"pool": "double"})


@pytest.mark.gpu(2)
@pytest.mark.parametrize("graph", [(), ATTN, FULL], ids=["eager", "attn", "full_iteration"])
@pytest.mark.parametrize("pool", ["double", "traced", "dynamic"])
def test_a_right_program_keeps_its_bits_on_gpus(
    graph: tuple[str, ...], pool: str, gpu_ranks: RankPool
) -> None:
    """Spins become part of the graphs, and change nothing; nor do poison and moving memory."""
    if pool == "dynamic" and graph == ATTN:
        graph = ()  # illegal: eagerly again
    run = replace(SHARDED, graph=graph, fsdp={"pool": pool})
    runs = [Stressed(run), *(Stressed(run, (name,)) for name in LATE), Stressed(run, LATE, 1)]
    for plain, *stressed in gpu_ranks.run(train_each, runs, world_size=2):
        assert stressed == [plain] * 4


@pytest.mark.gpu(2)
@pytest.mark.parametrize("fault", ["compute_ignores_gather", "early_release"])
def test_what_does_not_wait_is_wrong_under_stress(fault: str, gpu_ranks: RankPool) -> None:
    """A gather that is late, into memory that is NaN, is read before it is there."""
    runs = [Stressed(SHARDED), Stressed(SHARDED, ("jitter", "poison"))]
    for right, wrong in gpu_ranks.run(train_misordered_each, runs, fault, [STEPS, 0], world_size=2):
        assert right[0] == wrong[0] == ""
        assert wrong != right
