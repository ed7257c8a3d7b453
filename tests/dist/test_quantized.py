"""Weights in fp8: quantised by shards with one scale over all ranks, gathered as bytes."""

from typing import Any

import pytest
import torch

from tests.dist import quantized_programs as programs
from tests.dist.rank_pool import RankPool

PARAMS = "optim_grads_params"


@pytest.mark.parametrize(
    ("strategy", "pool", "shape"),
    [
        ("no_shard", "dynamic", (2,)),
        ("optim", "dynamic", (2,)),
        ("optim_grads", "double", (4,)),
        (PARAMS, "dynamic", (2,)),
        (PARAMS, "dynamic", (4,)),
        (PARAMS, "traced", (2,)),
        (("no_shard", PARAMS), "dynamic", (2, 2)),
        (("optim", PARAMS), "dynamic", (2, 2)),
    ],
    ids=str,
)
def test_sharded_is_whole(
    warm_ranks: RankPool, strategy: Any, pool: str, shape: tuple[int, ...]
) -> None:
    """Training equals training whole weights by hand, bit for bit; at rest no whole byte is held.

    Main weights start from what the weights were made from, not from what their bytes stand for.
    """
    world_size = int(torch.tensor(shape).prod())
    for rank in warm_ranks.run(programs.compare, strategy, pool, shape, world_size=world_size):
        assert rank["losses"], rank
        assert rank["mains"] == [True] * 6
        assert rank["trains"] == 6
        assert (rank["bytes"], rank["main"]) == (torch.uint8, torch.float32)
        sharded = PARAMS in strategy
        assert rank["derived"] is not sharded, "what is derived from bytes goes with them"
        if sharded and pool == "dynamic":
            assert rank["at rest"] == 0
        assert (rank["kept"], rank["mark"], rank["private"]) == (False, "kept", [])
        assert rank["told"] is sharded


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("MXFP8Tensor", "ValueError: Expected 0.weight in a format of this GPU, got MXFP8, which "
         "needs compute capability 10.0, this one has 9.0"),
        ("NVFP4Tensor", "NotImplementedError: Expected 0.weight in one of"),
    ],
)  # fmt: skip
def test_other_formats_are_refused(warm_ranks: RankPool, kind: str, words: str) -> None:
    """By name, with the reason."""
    (said,) = warm_ranks.run(programs.refuse, kind, world_size=1)
    assert said.startswith(words)
