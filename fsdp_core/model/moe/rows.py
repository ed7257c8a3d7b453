"""Rows of tokens to their places and back, with gradients, in one order whatever the device.

Scattering with atomic additions sums in any order on a GPU. Here every sum runs over a token's
choices in their order, by gathering from where each choice's row is: the assignment is known both
ways (`places.Places`), so neither direction scatters. M tokens, K choices, H hidden.
"""

from typing import Any

import torch


def take_rows(
    x_MH: torch.Tensor, slot_of_place: torch.Tensor, place_of_slot: torch.Tensor
) -> torch.Tensor:
    """Each place's row of its slot's token, zero at empty places: [M, H] -> [places, H].

    `slot_of_place` may be a front part of the assignment: slots whose place is past its end are
    left out. The gradient sums a token's choices in their order, in float32 or wider.
    """
    result: torch.Tensor = _TakeRows.apply(x_MH, slot_of_place, place_of_slot)
    return result


def weighted_sum(
    rows: torch.Tensor,
    weights_MK: torch.Tensor,
    slot_of_place: torch.Tensor,
    place_of_slot: torch.Tensor,
) -> torch.Tensor:
    """Sum over each token's choices of weight times row, in the weights' dtype: -> [M, H].

    Choices without a place add nothing. Terms are added in the order of the choices.
    """
    result: torch.Tensor = _WeightedSum.apply(rows, weights_MK, slot_of_place, place_of_slot)
    return result


def reorder_rows(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """rows[order], whose gradient is gathered with `inverse`, the inverse permutation."""
    result: torch.Tensor = _Reorder.apply(rows, order, inverse)
    return result


def _pick(rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """rows[place], zero where the place is past the end."""
    num_rows = rows.shape[0]
    if num_rows == 0:
        return rows.new_zeros((place.shape[0], *rows.shape[1:]))
    picked = rows.index_select(0, place.clamp(max=num_rows - 1))
    return picked.masked_fill_((place >= num_rows)[:, None], 0)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MH: torch.Tensor, slot_of_place: torch.Tensor, place_of_slot: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(place_of_slot)
        return _pick(x_MH, slot_of_place // place_of_slot.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (place_of_slot,) = ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = None
        for place in place_of_slot.unbind(1):
            term = _pick(grad, place).to(wide)
            total = term if total is None else total.add_(term)
        assert total is not None
        return total.to(grad.dtype), None, None


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights_MK: torch.Tensor,
        slot_of_place: torch.Tensor,
        place_of_slot: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights_MK, slot_of_place, place_of_slot)
        total = None
        for weight, place in zip(weights_MK.unbind(1), place_of_slot.unbind(1), strict=True):
            term = _pick(rows, place).to(weight.dtype).mul_(weight[:, None])
            total = term if total is None else total.add_(term)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights_MK, slot_of_place, place_of_slot = ctx.saved_tensors
        num_choices = place_of_slot.shape[1]
        weight_of_place = _pick(weights_MK.reshape(-1, 1), slot_of_place)
        grad_rows = _pick(grad, slot_of_place // num_choices).mul_(weight_of_place)
        grad_weights = torch.stack(
            [
                (_pick(rows, place).to(grad.dtype).mul_(grad)).sum(-1)
                for place in place_of_slot.unbind(1)
            ],
            dim=1,
        )
        return grad_rows.to(rows.dtype), grad_weights.to(weights_MK.dtype), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None
