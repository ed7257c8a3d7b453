"""Chunks of sequences over context ranks: index arithmetic against lists written out."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_core.device import Device
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.parallel.context import Block, ContextPlan, Rows, dense_plan, packed_plan, split

CPU = torch.device("cpu")
SIZES = st.sampled_from((1, 2, 3, 4, 8))
QUICK = settings(deadline=None, max_examples=50)


def chunk_rows(start: int, padded: int, size: int, chunk: int) -> list[int]:
    """Rows of one chunk of a sequence of `padded` tokens from `start`, counted out."""
    length = padded // (2 * size)
    return [start + chunk * length + i for i in range(length)]


@st.composite
def packs(draw: st.DrawFn) -> tuple[int, list[int], list[int], int]:
    """A size, valid and padded lengths of sequences (empty ones too), and tokens behind them."""
    size = draw(SIZES)
    chunks = draw(st.lists(st.integers(0, 3), max_size=5))
    padded = [2 * size * chunk for chunk in chunks]
    valid = [draw(st.integers(0, length)) for length in padded]
    behind = 2 * size * draw(st.integers(0 if sum(chunks) else 1, 2))
    return size, valid, padded, behind


def plans(size: int, valid: list[int], padded: list[int], behind: int) -> list[ContextPlan]:
    offsets = torch.tensor([0, *itertools.accumulate(padded)], dtype=torch.int32)
    lengths = torch.tensor(valid, dtype=torch.int32)
    total = sum(padded) + behind
    return [packed_plan(lengths, offsets, total, size, rank) for rank in range(size)]


def sequences(valid: list[int], padded: list[int], behind: int) -> list[tuple[int, int, int]]:
    """(start, padded length, valid length) of each sequence, and of what lies behind them."""
    starts = [0, *itertools.accumulate(padded)]
    return list(zip(starts, [*padded, behind], [*valid, 0], strict=True))


def chunks_of(size: int, rank: int) -> tuple[int, int]:
    """The early and the late chunk that a rank has: as many chunks of keys seen on every rank."""
    return rank, 2 * size - 1 - rank


@QUICK
@given(SIZES, st.integers(1, 4), st.integers(0, 2))
def test_a_rank_has_a_chunk_from_either_end(size: int, chunk: int, dim: int) -> None:
    """Over the ranks each chunk once, along any dim; a size of 1 has it whole."""
    shape = [3, 2, 4]
    shape[dim] = 2 * size * chunk
    whole = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    chunks = whole.chunk(2 * size, dim)
    for rank in range(size):
        due = torch.cat([chunks[number] for number in chunks_of(size, rank)], dim)
        assert torch.equal(split(whole, dim, size, rank), due)


@QUICK
@given(packs())
def test_rows_of_packed_parts(pack: tuple[int, list[int], list[int], int]) -> None:
    """A rank has the early chunk and then the late one of each sequence, one after another."""
    size, valid, padded, behind = pack
    for rank, plan in enumerate(plans(*pack)):
        rows = [
            row
            for start, length, _ in sequences(valid, padded, behind)
            for chunk in chunks_of(size, rank)
            for row in chunk_rows(start, length, size, chunk)
        ]
        assert plan.rows.tolist() == rows


@QUICK
@given(packs())
def test_positions_restart_and_padding_is_not_valid(
    pack: tuple[int, list[int], list[int], int],
) -> None:
    """Positions count from 0 in each sequence; a token is valid below the sequence's length."""
    size, valid, padded, behind = pack
    whole = [
        (i, True) if i < real else (0, False)
        for _, length, real in sequences(valid, padded, behind)
        for i in range(length)
    ]
    for plan in plans(*pack):
        assert plan.valid is not None
        got = list(zip(plan.positions.tolist(), plan.valid.tolist(), strict=True))
        assert got == [whole[row] for row in plan.rows.tolist()]
    assert size == len(plans(*pack))


def check_rows(rows: Rows, chosen: list[int], num: int) -> None:
    """`take` gives the chosen rows in order, `spread` puts them back among zeros."""
    whole = torch.arange(1.0, num + 1).view(1, num, 1)
    assert rows.take(whole).flatten().tolist() == [row + 1.0 for row in chosen]
    back = torch.zeros(num)
    back[chosen] = torch.tensor(chosen) + 1.0
    assert torch.equal(rows.spread(rows.take(whole)).flatten(), back)
    assert rows.spread(rows.take(whole), -1.0).min() == (-1.0 if len(chosen) < num else 1.0)


@QUICK
@given(packs())
def test_halves_of_packed_parts(pack: tuple[int, list[int], list[int], int]) -> None:
    """The early and the late half are the two chunks of every sequence, and spans say where."""
    size, valid, padded, behind = pack
    if size == 1:
        return
    lengths = [length for _, length, _ in sequences(valid, padded, behind)]
    for rank, plan in enumerate(plans(*pack)):
        assert plan.halves is not None
        num = (sum(padded) + behind) // size
        local = {row: place for place, row in enumerate(plan.rows.tolist())}
        for half, chunk in zip(plan.halves, chunks_of(size, rank), strict=True):
            rows = [
                local[row]
                for start, length, _ in sequences(valid, padded, behind)
                for row in chunk_rows(start, length, size, chunk)
            ]
            check_rows(half, rows, num)
        for spans, cut in ((plan.spans, size), (plan.half_spans, 2 * size)):
            assert spans.offsets is not None
            assert spans.offsets.dtype == torch.int32
            ends = itertools.accumulate(length // cut for length in lengths)
            assert spans.offsets.tolist() == [0, *ends]
            assert spans.max_len == (sum(padded) + behind) // cut


def seen(plan: ContextPlan, block: Block, keys: list[int]) -> set[tuple[int, int]]:
    """(query, key) pairs that a block of a dense plan covers, as places in the whole sequence."""
    query_index = range(len(plan.rows)) if block.queries is None else block.queries.index.tolist()
    key_index = range(len(keys)) if block.keys is None else block.keys.index.tolist()
    queries = [int(plan.rows[i]) for i in query_index]
    found = [keys[i] for i in key_index]
    behind = len(found) - len(queries)
    return {
        (q, k)
        for i, q in enumerate(queries)
        for j, k in enumerate(found)
        if not block.causal or j <= i + behind
    }


@QUICK
@given(SIZES, st.integers(1, 3))
def test_blocks_cover_the_causal_triangle_once(size: int, chunk: int) -> None:
    """Over the ring's steps each query sees each key up to its own."""
    length = 2 * size * chunk
    every = [dense_plan(length, size, rank, CPU) for rank in range(size)]
    for plan in every:
        ring = [
            seen(plan, plan.ring_block(source), every[source].rows.tolist())
            for source in range(size)
        ]
        triangle = {(q, k) for q in plan.rows.tolist() for k in range(q + 1)}
        assert sum(map(len, ring)) == len(triangle)
        assert set().union(*ring) == triangle


def test_blank_clears_whatever_is_in_padding() -> None:
    """NaN in rows of padding becomes zero, other rows keep their bits; dense tensors are as is."""
    plan = plans(1, [2], [4], 0)[0]
    x = torch.tensor([-0.0, 2.0, float("nan"), float("inf")]).view(1, 4, 1, 1)
    assert plan.blank(x).flatten().view(torch.int32).tolist() == [-(2**31), 2**30, 0, 0]
    assert dense_plan(4, 1, 0, CPU).blank(x) is x


@pytest.mark.parametrize("length", [6, 12])
def test_uneven_lengths_are_refused(length: int) -> None:
    """A sequence that cannot be cut into 2 * size chunks is refused, dense and packed."""
    offsets, lengths = torch.tensor([0, length]), torch.tensor([length])
    calls: list[Any] = [
        lambda: dense_plan(length, 4, 0, CPU),
        lambda: split(torch.zeros(length), 0, 4, 0),
        lambda: packed_plan(lengths, offsets, length, 4, 0),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match=f"{length} tokens"):
            call()


def tensors_of(plan: ContextPlan) -> list[torch.Tensor]:
    assert plan.valid is not None
    assert plan.halves is not None
    rows, spans = plan.halves, (plan.spans, plan.half_spans)
    found = [plan.rows, plan.positions, plan.valid, *(s.offsets for s in spans)]
    return [t for t in found if t is not None] + [t for r in rows for t in (r.index, r.inverse)]


def test_a_graph_follows_new_offsets() -> None:
    """Captured once, a plan's tensors are those of the offsets copied in before each replay."""
    lengths, offsets = torch.tensor([3, 0, 4]), torch.tensor([0, 4, 4, 8], dtype=torch.int32)
    graph = HostGraph(Device("cpu"))
    plan = graph.capture(lambda: packed_plan(lengths, offsets, 16, 2, 1))
    for new_lengths, new_offsets in (([4, 7, 1], [0, 4, 12, 16]), ([0, 0, 0], [0, 0, 0, 16])):
        lengths.copy_(torch.tensor(new_lengths))
        offsets.copy_(torch.tensor(new_offsets))
        graph.replay()
        fresh = packed_plan(lengths, offsets, 16, 2, 1)
        for ours, theirs in zip(tensors_of(plan), tensors_of(fresh), strict=True):
            assert torch.equal(ours, theirs)
