"""Tensor and sequence parallel over ranks: what one process computes, within derived bounds."""

import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tests.dist import tensor_parallel_programs as programs
from tests.dist.parity_bounds import Bounded, bounded
from tests.dist.rank_pool import RankPool

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Found:
    """Worst error of each result in units of its bound, and where replicas disagree in a bit."""

    units: dict[str, float]
    disputed: set[str]

    @property
    def wrong(self) -> set[str]:
        """What is out of its bound."""
        return {name for name, units in self.units.items() if units > 1}


def compare(ranks: list[programs.Parts], expected: dict[str, Bounded]) -> Found:
    """What the ranks computed against what one process computes."""
    found, disputed = programs.join(ranks)
    assert found.keys() == expected.keys()
    return Found({name: expected[name].units(found[name]) for name in found}, disputed)


def chain(
    ranks: RankPool, tp: int, dtype: torch.dtype, sequence_parallel: bool, plant: str = ""
) -> Found:
    """Run the chain of every layer."""
    expected = bounded(
        programs.plain_chain,
        programs.chain_weights(dtype) | {"tokens": programs.tokens_of()},
        programs.chain_cotangent(dtype),
        {"": programs.chain_roundings(tp)},
        dtype,
    )
    args = (programs.run_chain, dtype, sequence_parallel, plant)
    return compare(ranks.run(*args, world_size=tp), expected)


def layer(
    ranks: RankPool,
    kind: str,
    tp: int,
    dtype: torch.dtype,
    sequence_parallel: bool,
    plant: str = "",
) -> Found:
    """Run one layer."""
    inputs, cotangent = programs.layer_inputs(kind, dtype)
    expected = bounded(
        programs.plain_layer, inputs, cotangent, programs.layer_roundings(kind, tp), dtype
    )
    args = (programs.run_layer, kind, dtype, sequence_parallel, plant)
    return compare(ranks.run(*args, world_size=tp), expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    ("tp", "dtype"),
    [*itertools.product((1, 2, 4), DTYPES[:2]), (8, torch.float64), (2, torch.bfloat16)],
)
def test_chain_equals_one_process(
    warm_ranks: RankPool, tp: int, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """Logits and every gradient are those of one process; replicated ones agree on every bit."""
    found = chain(warm_ranks, tp, dtype, sequence_parallel)
    assert (found.wrong, found.disputed) == (set(), set()), found.units


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_equals_one_process(
    warm_ranks: RankPool, dtype: torch.dtype, tp: int, kind: str, sequence_parallel: bool
) -> None:
    """Output and gradients of a layer are within the bound of one matrix product each."""
    found = layer(warm_ranks, kind, tp, dtype, sequence_parallel)
    assert (found.wrong, found.disputed) == (set(), set()), found.units


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_column_outputs_have_the_bits_of_one_process(
    warm_ranks: RankPool, dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """A column layer's outputs are torch's product with the rows that a rank has, every bit."""
    args = (programs.run_layer, "column", dtype, sequence_parallel)
    found, _ = programs.join(warm_ranks.run(*args, world_size=4))
    inputs, _ = programs.layer_inputs("column", dtype)
    parts = [F.linear(inputs["x"], rows) for rows in inputs["weight"].chunk(4)]
    assert programs.same_bits(found["output"], torch.cat(parts, dim=-1))


BEFORE_DOWN = {"embedding.weight", "scale", "gate.weight", "up.weight"}
ALL = BEFORE_DOWN | {"output", "down.weight", "head.weight"}
CHAIN_FAULTS = [
    ("no sum on the way out", False, ALL),
    ("no sum on the way out", True, ALL),
    ("no sum of the input's gradient", False, BEFORE_DOWN | {"down.weight"}),
    ("no sum of the input's gradient", True, BEFORE_DOWN | {"down.weight"}),
    ("mean for sum", False, ALL),
    ("mean for sum", True, ALL),
    ("replicated not summed", True, {"scale"}),
    ("gathered in another order", True, {"embedding.weight", "head.weight", "output"}),
]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("fault", "sequence_parallel", "wrong"), CHAIN_FAULTS)
def test_faults_of_the_chain_exceed_the_bound(
    warm_ranks: RankPool, fault: str, sequence_parallel: bool, wrong: set[str], dtype: torch.dtype
) -> None:
    """What a planted fault makes wrong is wrong by ten times the bound and more; nothing else."""
    found = chain(warm_ranks, 2, dtype, sequence_parallel, fault)
    assert found.wrong == wrong, found.units
    assert min(found.units[name] for name in wrong) >= 10, found.units


LAYER_FAULTS = [
    ("no sum on the way out", "row", {"output", "weight", "x"}),
    ("no sum of the input's gradient", "column", {"x"}),
    ("mean for sum", "row", {"output", "weight", "x"}),
    ("gathered in another order", "column", {"output", "weight", "x"}),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("fault", "kind", "wrong"), LAYER_FAULTS)
@pytest.mark.parametrize("tp", [2, 4])
def test_faults_of_a_layer_exceed_the_bound(
    warm_ranks: RankPool, tp: int, fault: str, kind: str, wrong: set[str], dtype: torch.dtype
) -> None:
    """In bfloat16 too a fault in one layer is ten bounds away and more."""
    found = layer(warm_ranks, kind, tp, dtype, True, fault)
    assert found.wrong == wrong, found.units
    assert min(found.units[name] for name in wrong) >= 10, found.units
