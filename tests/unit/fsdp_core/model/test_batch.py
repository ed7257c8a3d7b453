"""Packed sequences: where tokens and padding lie, what is refused, what stays the same."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.model.batch import Capacity, Document, pack, padding_multiple
from fsdp_core.parallel.mesh import Axis

QUICK = settings(deadline=None, max_examples=60)


def document(length: int, first: int = 1) -> Document:
    """Tokens `first`, `first` + 1, ..., each to be followed by the next."""
    return Document(torch.arange(length) + first, torch.arange(length) + first + 1)


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[Document], Capacity]:
    """Documents, and a capacity that just holds them or has some room."""
    multiple = draw(st.sampled_from((1, 2, 4, 6, 16)))
    lengths = draw(st.lists(st.integers(1, 20), max_size=5))
    needed = sum(-(-length // multiple) for length in lengths)
    spare = draw(st.integers(0 if lengths else 1, 3))
    capacity = Capacity(
        tokens=multiple * (needed + spare),
        slots=max(len(lengths) + 1, 2) + draw(st.integers(0, 2)),
        multiple=multiple,
    )
    return [document(n, 10 * i + 1) for i, n in enumerate(lengths)], capacity


def test_offsets_of_a_pack() -> None:
    """Valid and padded offsets of two sequences, of the tail, and of a slot that nothing is in."""
    batch = pack([document(5), document(3)], Capacity(tokens=20, slots=5, multiple=4))
    assert batch.offsets.tolist() == [0, 5, 8, 8, 8, 8]
    assert batch.padded_offsets.tolist() == [0, 8, 12, 20, 20, 20]
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, *[0] * 9]
    assert batch.targets.tolist() == [2, 3, 4, 5, 6, 0, 0, 0, 2, 3, 4, *[0] * 9]
    assert batch.loss_mask.tolist() == [1.0] * 5 + [0.0] * 3 + [1.0] * 3 + [0.0] * 9


@QUICK
@given(contents())
def test_every_token_is_there_once(case: tuple[list[Document], Capacity]) -> None:
    """Each document lies whole where its slot begins; all else is padding, and counts nothing."""
    documents, capacity = case
    batch = pack(documents, capacity)
    starts = batch.padded_offsets.tolist()
    left = torch.ones(capacity.tokens, dtype=torch.bool)
    for number, content in enumerate(documents):
        place = slice(starts[number], starts[number] + len(content.tokens))
        assert torch.equal(batch.tokens[place], content.tokens)
        assert torch.equal(batch.targets[place], content.targets)
        assert bool((batch.loss_mask[place] == 1).all())
        left[place] = False
    for tensor in (batch.tokens, batch.targets, batch.loss_mask):
        assert not tensor[left].any()


@QUICK
@given(contents())
def test_offsets_are_in_step(case: tuple[list[Document], Capacity]) -> None:
    """Slots are cut evenly and span the capacity; no slot has more tokens than room."""
    documents, capacity = case
    batch = pack(documents, capacity)
    lengths = (batch.offsets[1:] - batch.offsets[:-1]).tolist()
    room = (batch.padded_offsets[1:] - batch.padded_offsets[:-1]).tolist()
    assert len(lengths) == len(room) == capacity.slots
    assert batch.offsets[0] == batch.padded_offsets[0] == 0
    assert sum(room) == capacity.tokens
    assert all(
        0 <= n <= r and r % capacity.multiple == 0 for n, r in zip(lengths, room, strict=True)
    )
    assert lengths[: len(documents)] == [len(d.tokens) for d in documents]
    tail = capacity.tokens - sum(capacity.padded(len(d.tokens)) for d in documents)
    assert not any(lengths[len(documents) :])
    assert room[len(documents)] == tail


@QUICK
@given(contents(), st.sampled_from((1, 2, 4)))
def test_parts_of_all_ranks_are_the_batch(case: tuple[list[Document], Capacity], size: int) -> None:
    """Rows of all ranks' plans are all rows, each once, and parts hold what lies there."""
    documents, capacity = case
    if capacity.multiple % (2 * size):
        return
    batch = pack(documents, capacity)
    plans = [batch.plan(size, rank) for rank in range(size)]
    rows = torch.cat([plan.rows for plan in plans])
    assert torch.equal(rows.sort().values, torch.arange(capacity.tokens))
    for name in ("tokens", "targets", "loss_mask"):
        parts = torch.cat([getattr(batch, name)[plan.rows] for plan in plans])
        assert torch.equal(parts, getattr(batch, name)[rows])
    assert all(bool(plan.valid[batch.loss_mask[plan.rows] > 0].all())
               for plan in plans if plan.valid is not None)  # fmt: skip


def test_predictions_that_do_not_count() -> None:
    """A document's own mask is kept."""
    counted = torch.tensor([True, False, True])
    content = Document(torch.arange(3), torch.arange(3), counted)
    batch = pack([content], Capacity(tokens=4, slots=2, multiple=4))
    assert batch.loss_mask.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("cp", "tp", "sequence_parallel", "multiple"),
    [(1, 1, False, 2), (4, 1, False, 8), (4, 2, False, 8), (4, 2, True, 16), (1, 4, True, 8)],
)
def test_padding_multiple(cp: int, tp: int, sequence_parallel: bool, multiple: int) -> None:
    """2 * cp, times tp where the sequence is cut over tp too."""
    axis = Axis("tp", tp, 0, cast("Any", None), sequence_parallel)
    assert padding_multiple(cp, axis) == multiple


def test_a_slot_is_kept_for_the_tail() -> None:
    """As many sequences as slots are refused, one fewer fits, even if there is no tail."""
    capacity = Capacity(tokens=12, slots=3, multiple=4)
    assert pack([document(4), document(8)], capacity).padded_offsets.tolist() == [0, 4, 12, 12]
    with pytest.raises(AssertionError, match=r"\[4, 4, 4\] in .*slots=3"):
        pack([document(4)] * 3, capacity)
    with pytest.raises(AssertionError, match=r"\[5, 6\] in "):  # fits but for its padding
        pack([document(5), document(6)], Capacity(tokens=12, slots=4, multiple=4))


@pytest.mark.parametrize(("size", "multiple"), [(4, 4), (2, 2), (2, 6), (8, 8)])
def test_packs_are_cut_as_they_were_padded(size: int, multiple: int) -> None:
    """A pack for fewer context ranks is refused: its sequences would begin inside of a chunk."""
    batch = pack([document(3)], Capacity(tokens=48, slots=3, multiple=multiple))
    with pytest.raises(AssertionError, match=f"padded to {multiple}, cp {size}"):
        batch.plan(size, 0)


def test_sequences_without_positions_are_refused() -> None:
    """A sequence of as many tokens as there are positions fits, one more does not."""
    capacity = Capacity(tokens=48, slots=4, multiple=4, longest=9)
    pack([document(9), document(1)], capacity)
    with pytest.raises(AssertionError, match=r"\[1, 10\]"):
        pack([document(1), document(10)], capacity)
