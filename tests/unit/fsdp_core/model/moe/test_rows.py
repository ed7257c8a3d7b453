"""Rows to places and back, and their gradients, against one-hot matrices."""

import torch
import torch.nn.functional as F

from fsdp_core.model.moe.permute import Places, assign_places, reorder_rows, take_rows, weighted_sum

TOKENS, CHOICES, BUCKETS, HIDDEN = 6, 2, 3, 4


def places(capacity: int | None) -> Places:
    """Some slots go nowhere; with a capacity some are dropped and some places are empty."""
    chosen = torch.tensor([[0, 1], [1, 3], [0, 1], [3, 3], [1, 0], [1, 2]])
    return assign_places(chosen, BUCKETS, capacity)


def matrix(found: Places) -> torch.Tensor:
    """One where the slot of a row's place belongs to a column's token, [places, tokens * K]."""
    slots = TOKENS * CHOICES
    return F.one_hot(found.slot_of_place, slots + 1)[:, :slots].double()


def numbers(*shape: int) -> torch.Tensor:
    """Random float64 that want a gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def front(found: Places, capacity: int | None) -> torch.Tensor:
    """Places that are in use: without a capacity those of slots that go somewhere."""
    if capacity is not None:
        return found.slot_of_place
    return found.slot_of_place[: int(found.counts.sum())]


def test_rows_are_taken_and_their_gradients_summed() -> None:
    """Each place has its token's row, an empty one zero; a token's gradient sums its places."""
    for capacity in (None, 1, 2, 5):
        found = places(capacity)
        slots = front(found, capacity)
        one_hot = matrix(found)[: len(slots)].view(-1, TOKENS, CHOICES).sum(-1)
        x, grad = numbers(TOKENS, HIDDEN), numbers(len(slots), HIDDEN).detach()
        rows = take_rows(x, slots, found.place_of_slot)
        assert torch.equal(rows, one_hot @ x)
        rows.backward(grad)
        torch.testing.assert_close(x.grad, one_hot.t() @ grad, rtol=1e-15, atol=1e-15)


def test_rows_are_weighed_and_summed() -> None:
    """A token's sum runs over its choices that have a place, with gradients of rows and weights."""
    for capacity in (None, 1, 2, 5):
        found = places(capacity)
        slots = front(found, capacity)
        rows, weights = numbers(len(slots), HIDDEN), numbers(TOKENS, CHOICES)
        one_hot = matrix(found)[: len(slots)].view(-1, TOKENS, CHOICES)

        def by_matrix(
            rows: torch.Tensor, weights: torch.Tensor, one_hot: torch.Tensor = one_hot
        ) -> torch.Tensor:
            return torch.einsum("ptk,ph,tk->th", one_hot, rows, weights)

        total = weighted_sum(rows, weights, slots, found.place_of_slot)
        torch.testing.assert_close(total, by_matrix(rows, weights), rtol=1e-15, atol=1e-15)
        grad = numbers(TOKENS, HIDDEN).detach()
        got = torch.autograd.grad(total, (rows, weights), grad)
        due = torch.autograd.grad(by_matrix(rows, weights), (rows, weights), grad)
        for one, other in zip(got, due, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


def test_no_rows_at_all() -> None:
    """Where nothing has a place the sum is zero and gradients are zero, not absent."""
    chosen = torch.full((TOKENS, CHOICES), BUCKETS)
    found = assign_places(chosen, BUCKETS)
    x, weights = numbers(TOKENS, HIDDEN), numbers(TOKENS, CHOICES)
    rows = take_rows(x, found.slot_of_place[:0], found.place_of_slot)
    total = weighted_sum(rows, weights, found.slot_of_place[:0], found.place_of_slot)
    total.sum().backward()
    assert rows.shape == (0, HIDDEN)
    assert not total.any()
    assert x.grad is not None
    assert weights.grad is not None
    assert not x.grad.any()
    assert not weights.grad.any()


def test_sums_are_wider_than_bfloat16() -> None:
    """Weights of float32 make a float32 sum of bfloat16 rows; gradients of tokens sum in float32.

    256 + 1 + 1 is 258 in float32 and 256 if bfloat16 is rounded to after each addition.
    """
    chosen = torch.tensor([[0, 1, 2]])
    found = assign_places(chosen, BUCKETS)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = weighted_sum(rows, torch.ones(1, 3), found.slot_of_place, found.place_of_slot)
    assert total.dtype == torch.float32
    assert total.item() == 258.0
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    take_rows(x, found.slot_of_place, found.place_of_slot).backward(rows)
    assert x.grad is not None
    assert x.grad.item() == 258.0


def test_a_permutation_and_its_gradient() -> None:
    """Reordering is undone by the inverse, also for gradients."""
    order = torch.tensor([2, 0, 3, 1])
    inverse = order.argsort()
    rows = numbers(4, HIDDEN)
    moved = reorder_rows(rows, order, inverse)
    assert torch.equal(moved, rows[order])
    grad = numbers(4, HIDDEN).detach()
    moved.backward(grad)
    assert rows.grad is not None
    assert torch.equal(rows.grad[order], grad)
