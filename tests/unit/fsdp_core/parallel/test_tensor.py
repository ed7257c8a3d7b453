"""Tensor-parallel layers on one rank: torch's bits, and how they are put together."""

import copy
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.param_sharding import Cut, named_cuts
from fsdp_core.parallel.tensor_parallel import (
    ColumnLinear,
    RowLinear,
    enter,
    leave,
    reduce_replicated,
    reduce_replicated_of,
)

NO_GROUP = cast("dist.ProcessGroup", None)
ONE, FOUR = Axis("tp", 1, 0, NO_GROUP), Axis("tp", 4, 2, NO_GROUP)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
def test_one_rank_has_torchs_bits(
    kind: type[ColumnLinear | RowLinear], dtype: torch.dtype, sequence_parallel: bool
) -> None:
    """On an axis of one rank a layer is `nn.Linear`: output and gradients, every bit."""
    torch.manual_seed(0)
    due = nn.Linear(12, 20, bias=False, dtype=dtype)
    layer = kind(12, 20, ONE, sequence_parallel=sequence_parallel).to(dtype)
    layer.load_state_dict(due.state_dict())
    x = torch.randn(2, 6, 12, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [due(inputs[0]), layer(inputs[1])]
    for out in outputs:
        out.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(*[cast("torch.Tensor", t.grad) for t in inputs])
    assert torch.equal(*[cast("torch.Tensor", m.weight.grad) for m in (due, layer)])


def test_layers_hold_their_part() -> None:
    """A column layer has rows of the weight, a row layer columns, and each knows which."""
    column = ColumnLinear(12, 20, FOUR, sequence_parallel=True)
    row = RowLinear(12, 20, FOUR, sequence_parallel=False)
    assert column.weight.shape == (5, 12)
    assert row.weight.shape == (20, 3)
    assert named_cuts(column) == {"weight": (Cut("tp", 0, 4, 2),)}
    assert named_cuts(row) == {"weight": (Cut("tp", 1, 4, 2),)}
    assert repr(column) == "ColumnLinear(weight=[5, 12], tp=4, sequence_parallel=True)"


def test_a_forgotten_layer_shows() -> None:
    """Weights that nobody initialised are NaN, so that no loss comes of them."""
    for kind in (ColumnLinear, RowLinear):
        assert kind(4, 4, ONE, sequence_parallel=False).weight.isnan().all()


def test_features_that_have_no_equal_parts_are_refused() -> None:
    """What is cut is a multiple of the ranks; what is not cut may be anything."""
    with pytest.raises(ValueError, match="Expected out_features to be a multiple of the 4 ranks"):
        ColumnLinear(4, 6, FOUR, sequence_parallel=False)
    with pytest.raises(ValueError, match="Expected in_features to be a multiple of the 4 ranks"):
        RowLinear(6, 4, FOUR, sequence_parallel=False)
    ColumnLinear(5, 8, FOUR, sequence_parallel=False)
    RowLinear(8, 5, FOUR, sequence_parallel=False)


def test_one_rank_gets_the_parameters_themselves() -> None:
    """On an axis of one rank nothing stands in for a parameter, nor for an activation."""
    weight = nn.Parameter(torch.ones(2))
    assert reduce_replicated(weight, ONE) is weight
    x = torch.ones(2, 4, 3)
    for cut in (False, True):
        assert enter(x, ONE, sequence_parallel=cut) is x
        assert leave(x, ONE, sequence_parallel=cut) is x


class Foreign(nn.LayerNorm):
    """Somebody's norm, which notes what its forward saw."""

    seen: Any = None
    fails = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Note the weight."""
        self.seen = self.weight
        if self.fails:
            raise ArithmeticError
        return super().forward(input)


def test_a_foreign_module_runs_with_stand_ins() -> None:
    """Inside of its forward a module sees stand-ins; around it, and in its copies, parameters."""
    norm = Foreign(4)
    reduce_replicated_of(norm, "weight", FOUR)
    copied = copy.deepcopy(norm)
    for module in (norm, copied):
        weight, bias = module.weight, module.bias
        module(torch.ones(2, 4))
        assert module.seen is not weight
        assert module.seen.grad_fn is not None
        assert module.seen.data_ptr() == weight.data_ptr()
        assert (module.weight, module.bias) == (weight, bias)
        assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]
        assert isinstance(module, Foreign)
        module.fails = True
        with pytest.raises(ArithmeticError):
            module(torch.ones(2, 4))
        assert module.weight is weight
    assert copied.weight is not norm.weight
