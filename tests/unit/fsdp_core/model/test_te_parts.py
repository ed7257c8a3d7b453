"""What needs no TransformerEngine of its parts: token order, padded groups, joined gradients."""

from typing import Any, cast

import pytest
import torch

from fsdp_core.config import model_from_preset
from fsdp_core.model.decoder import make_layers
from fsdp_core.model.te import layers as experts
from fsdp_core.model.te.attention import by_rank, by_sequence
from fsdp_core.model.te.fp8 import amax_group
from fsdp_core.parallel.mesh import Axis
from tests.dist.parity_programs import single_axes
from tests.dist.te_stand_in import StandIn

TP = Axis("tp", 2, 0, cast("Any", None))


def test_order_under_sequence_parallel() -> None:
    """Ranks outermost and back: rank r's stretch of every sequence is in its place."""
    whole = torch.arange(3 * 4).view(3, 4)[..., None]
    ranks = torch.cat([whole[:, :2], whole[:, 2:]])
    assert torch.equal(by_sequence(ranks, TP, sequence_parallel=True), whole)
    assert torch.equal(by_rank(whole, TP, sequence_parallel=True), ranks)
    assert by_sequence(ranks, TP, sequence_parallel=False) is ranks


@pytest.mark.parametrize(
    ("counts", "multiple", "padded"),
    [
        ((3, 0, 5), 4, (4, 0, 8)),
        ((4, 8), 4, (4, 8)),
        ((0, 0), 16, (16, 0)),
        ((0, 0), 1, (1, 0)),
        ((2, 1), 1, (2, 1)),
    ],
)
def test_groups_are_padded_and_cut(
    counts: tuple[int, ...], multiple: int, padded: tuple[int, ...]
) -> None:
    """Rows stay with their group, the rest is zero, and gradients come back to the rows."""
    rows = torch.randn(sum(counts), 3, requires_grad=True)
    filled, sizes = experts.pad_groups(rows, counts, multiple)
    assert sizes == padded
    assert filled.shape == (sum(padded), 3)
    for mine, theirs in zip(rows.split(counts), filled.split(sizes), strict=True):
        assert torch.equal(theirs[: len(mine)], mine)
        assert not theirs[len(mine) :].any()
    back = experts.unpad_groups(filled, counts, sizes)
    assert torch.equal(back, rows)
    slope = torch.randn_like(rows)
    back.backward(slope)
    assert torch.equal(cast("Any", rows.grad), slope)


def test_gradients_of_one_allocation_are_not_copied() -> None:
    """Gradients that a kernel wrote one after another become the weight's as they lie."""
    packed = torch.randn(3, 2, 4)
    weight = torch.randn(3, 2, 4, requires_grad=True)
    views = experts.matrices(weight)
    places = [matrix.data_ptr() for matrix in weight.detach()]
    assert [view.data_ptr() for view in views] == places
    assert experts.joined(packed.unbind(0)).data_ptr() == packed.data_ptr()
    torch.autograd.backward(views, list(packed.unbind(0)))
    assert torch.equal(cast("Any", weight.grad), packed)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.ones(2, 3), torch.zeros(2, 3)],
        [*reversed(torch.randn(2, 2, 3).unbind(0))],
        [*torch.randn(4, 2, 3)[::2].unbind(0)],
        [*torch.randn(2, 3, 2).transpose(1, 2).unbind(0)],
        [(whole := torch.randn(2, 2, 3))[0], whole[0]],
    ],
)
def test_other_gradients_are_joined_by_a_copy(parts: list[torch.Tensor]) -> None:
    """Memory in another order, with gaps, or shared, is stacked."""
    assert torch.equal(experts.joined(parts), torch.stack(parts))


def test_a_matrix_that_is_not_used_has_a_zero_gradient() -> None:
    """An expert without rows on any rank trains as one whose gradient is zero."""
    weight = torch.randn(3, 2, 4, requires_grad=True)
    experts.matrices(weight)[1].sum().backward()
    assert cast("Any", weight.grad).sum((1, 2)).tolist() == [0.0, 8.0, 0.0]


def test_operators_take_the_weights_of_now() -> None:
    """A fuser that was made without gradients, in evaluation, still trains; as the layers do."""
    config = model_from_preset("moe_tiny", {})
    grads = []
    for fused in (True, False):
        backend = StandIn(fused_experts=fused)
        made = backend.experts(config, single_axes())
        torch.manual_seed(2)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        rows = torch.randn(config.experts, 3, config.hidden)
        with torch.no_grad():
            made(rows, None)
        made(rows, None).square().sum().backward()
        grads.append([parameter.grad for parameter in made.parameters()])
    for one, other in zip(*grads, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_fp8_needs_te() -> None:
    """A backend that computes otherwise than it was told is refused."""
    with pytest.raises(ValueError, match="Expected backend te for fp8"):
        make_layers("torch", fp8="current")


def test_fused_experts_in_blocks_are_refused() -> None:
    """TransformerEngine has no kernel for them, which it would say in the first step only."""
    with pytest.raises(ValueError, match="Expected fused_experts False for fp8 block, got True"):
        make_layers("te", fp8="block", fused_experts=True)


def test_torch_fuses_experts_if_told() -> None:
    """Off by default: bits of runs before it stay."""
    assert make_layers("torch").fused_experts is False
    assert make_layers("torch", fused_experts=True).fused_experts is True


def test_alone_there_is_nobody_to_reduce_amaxes_with() -> None:
    """Without tp and cp scales are a rank's own."""
    assert amax_group(single_axes()) is None
