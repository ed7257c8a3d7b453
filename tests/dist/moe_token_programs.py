"""Tokens that carry their numbers to experts and back, without any expert in between."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_core.model.moe.dispatcher import Combine, Delivery, Dispatch, Groups, MoeAxes, Preprocess
from tests.dist.moe_layouts import Layout, make_axes
from tests.dist.moe_reference import NUM_EXPERTS


@dataclass(frozen=True)
class Trip:
    """Where every token is to go: experts and weights, [N, K] of all tokens."""

    experts: torch.Tensor
    weights: torch.Tensor
    delivery: Delivery


@dataclass(frozen=True)
class Travelled:
    """What one rank saw.

    Attributes:
        arrived: numbers of the tokens at each of this rank's experts, in order.
        first_expert: number of its first expert.
        sums: [S, 2]: sum of weight times (token's number + 1), and of weight times (expert's
            number + 1), over the choices that came back.
        x_grad, weight_grad: of the sum of `sums[:, 0]`.
        rows_shape: shape of the rows at the experts.
        dropped: slots that this rank counted as dropped.
    """

    arrived: list[list[int]]
    first_expert: int
    sums: torch.Tensor
    x_grad: torch.Tensor
    weight_grad: torch.Tensor
    rows_shape: tuple[int, ...]
    dropped: int


def travel(layout: Layout, trips: list[Trip]) -> list[Travelled]:
    """Every trip on this rank."""
    axes = make_axes(layout)
    return [_travel(layout, axes, trip) for trip in trips]


def _travel(layout: Layout, axes: MoeAxes, trip: Trip) -> Travelled:
    mine = layout.tokens(dist.get_rank()).flatten()
    # Two columns: the number, and one for the expert to write to.
    x = torch.stack([mine + 1.0, torch.zeros(len(mine))], 1).double().requires_grad_()
    weights = trip.weights[mine].double().requires_grad_()
    preprocess = Preprocess(NUM_EXPERTS, trip.delivery, axes)
    plan = preprocess(trip.experts[mine], weights)
    rows, groups = Dispatch(trip.delivery, axes)(x, plan)
    num_local = axes.local_experts(NUM_EXPERTS)
    first = axes.ep.rank * num_local
    arrived = [part.tolist() for part in _by_expert(rows.detach(), groups)]
    # What the experts of one etp group give are parts of a sum.
    numbers = torch.zeros_like(rows)
    if groups is None:
        present = rows[..., 0] != 0
        numbers[..., 1] = present * torch.arange(first + 1, first + num_local + 1)[:, None]
    else:
        counts = torch.tensor(groups.counts)
        numbers[:, 1] = torch.arange(first + 1, first + num_local + 1).repeat_interleave(counts)
    sums = Combine(trip.delivery, axes)((rows + numbers) / axes.etp.size, weights, plan, groups)
    sums[:, 0].sum().backward()
    assert x.grad is not None
    assert weights.grad is not None
    return Travelled(
        [[int(number) - 1 for number in part if number] for part in arrived],
        first,
        sums.detach(),
        x.grad[:, 0],
        weights.grad,
        tuple(rows.shape),
        int(preprocess.dropped),
    )


def _by_expert(rows: torch.Tensor, groups: Groups | None) -> list[torch.Tensor]:
    if groups is None:
        return list(rows[..., 0].unbind(0))
    return list(rows[:, 0].split(list(groups.counts)))
