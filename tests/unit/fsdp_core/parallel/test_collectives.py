"""Collectives with gradients: an axis of one rank, and arguments that do not fit."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp_core.parallel import collectives
from fsdp_core.parallel.mesh import Axis

NO_GROUP = cast("dist.ProcessGroup", None)
ONE, TWO = Axis("tp", 1, 0, NO_GROUP), Axis("tp", 2, 1, NO_GROUP)
CALLS: dict[str, Callable[[torch.Tensor, Axis], Any]] = {
    "copy_to": collectives.copy_to,
    "reduce_from": collectives.reduce_from,
    "gather_from": lambda x, axis: collectives.gather_from(x, axis, 1),
    "scatter_to": lambda x, axis: collectives.scatter_to(x, axis, 1),
    "reduce_scatter_to": lambda x, axis: collectives.reduce_scatter_to(x, axis, 1),
    "all_to_all": collectives.all_to_all,
    "all_to_all of splits": lambda x, axis: collectives.all_to_all(x, axis, [2], [2]),
    "all_reduce": collectives.all_reduce,
    "all_gather": lambda x, axis: collectives.all_gather(x, axis, 1),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_rank_needs_no_communication(name: str) -> None:
    """On an axis of one rank the input comes back, and its group is never asked."""
    x = torch.ones(2, 3, requires_grad=True)
    assert CALLS[name](x, ONE) is x


@pytest.mark.parametrize("name", ["scatter_to", "reduce_scatter_to"])
def test_dims_that_cannot_be_cut_are_refused(name: str) -> None:
    """A dim that is no multiple of the ranks, before anything is sent."""
    with pytest.raises(ValueError, match=r"Expected dim 1 to be a multiple of the 2 ranks of axis"):
        CALLS[name](torch.ones(2, 3), TWO)


@pytest.mark.parametrize("name", ["gather_from", "scatter_to", "reduce_scatter_to"])
def test_dims_that_do_not_exist_are_refused(name: str) -> None:
    """A dim that the tensor does not have."""
    with pytest.raises(ValueError, match=r"Expected a dim of a tensor of shape \(4,\), got 1"):
        CALLS[name](torch.ones(4), TWO)


@pytest.mark.parametrize(
    ("outgoing", "incoming", "axis", "message"),
    [
        ([1, 2], None, TWO, "Expected input and output splits or neither"),
        (None, [1, 2], TWO, "Expected input and output splits or neither"),
        ([1, 2], [4, 4], TWO, "Expected input splits that sum to 4 rows"),
        ([4], [4, 0], TWO, "Expected a split for each of the 2 ranks"),
        ([2, 2], [4], TWO, "Expected a split for each of the 2 ranks"),
        ([4], [3], ONE, "Expected 4 rows to come from this rank"),
    ],
)
def test_splits_that_do_not_fit_are_refused(
    outgoing: list[int] | None, incoming: list[int] | None, axis: Axis, message: str
) -> None:
    """Rows that nobody sends would be waited for without end."""
    with pytest.raises(ValueError, match=message):
        collectives.all_to_all(torch.ones(4, 2), axis, outgoing, incoming)


def test_rows_that_have_no_equal_parts_are_refused() -> None:
    """Without splits the rows are a multiple of the ranks."""
    with pytest.raises(ValueError, match="Expected rows to be a multiple of the 2 ranks"):
        collectives.all_to_all(torch.ones(3, 2), TWO)
