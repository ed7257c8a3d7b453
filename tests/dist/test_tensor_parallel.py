"""Tensor and sequence parallel over ranks: what one process computes, within derived bounds."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from fsdp_core.parallel.param_sharding import Cut, take
from fsdp_core.parallel.tensor_parallel import ColumnLinear
from tests.dist import tensor_parallel_programs as programs
from tests.dist.parity_bounds import bounded
from tests.dist.rank_pool import RankPool
from tests.dist.tensor_parallel_programs import (
    BATCH,
    FFN,
    HIDDEN,
    TIME,
    Parts,
    draw,
    join,
    load,
    same_bits,
    whole_axis,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("tp", "dtype"),
    [
        *itertools.product((1, 2, 4), DTYPES[:2]),
        (8, torch.float64),
        (2, torch.bfloat16),
        (4, torch.bfloat16),
    ],
)
def test_chain_equals_one_process(
    warm_ranks: RankPool, tp: int, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """Logits and every gradient are those of one process; replicated ones agree on every bit."""
    expected = bounded(
        programs.plain_chain,
        programs.chain_weights(dtype) | {"tokens": programs.tokens_of()},
        programs.chain_cotangent(dtype),
        {"": programs.chain_roundings(tp)},
        dtype,
    )
    args = (programs.run_chain, dtype, sequence_parallel)
    found, disputed = join(warm_ranks.run(*args, world_size=tp))
    assert found.keys() == expected.keys()
    units = {name: expected[name].units(found[name]) for name in found}
    assert max(units.values()) <= 1, units
    assert disputed == set()


def run_column(dtype: torch.dtype, sequence_parallel: bool) -> Parts:
    """The outputs of a column layer."""
    axis = whole_axis()
    columns, sequence = (Cut("tp", dim, axis.size, axis.rank) for dim in (2, 1))
    layer = ColumnLinear(HIDDEN, FFN, axis, sequence_parallel=sequence_parallel).to(dtype)
    load(layer, {"weight": draw("weight", FFN, HIDDEN, dtype=dtype)})
    x = draw("x", BATCH, TIME, HIDDEN, dtype=dtype)
    output = layer(take(x, (sequence,)) if sequence_parallel else x)
    return {"output": (output.detach(), (columns,))}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_outputs_have_the_bits_of_one_process(
    warm_ranks: RankPool, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """A column layer's outputs are torch's product with the rows that a rank has, every bit."""
    found, _ = join(warm_ranks.run(run_column, dtype, sequence_parallel, world_size=4))
    x, weight = (
        draw("x", BATCH, TIME, HIDDEN, dtype=dtype),
        draw("weight", FFN, HIDDEN, dtype=dtype),
    )
    parts = [F.linear(x, rows) for rows in weight.chunk(4)]
    assert same_bits(found["output"], torch.cat(parts, dim=-1))
