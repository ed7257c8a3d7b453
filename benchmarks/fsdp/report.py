"""Results as a table for people and as JSON for machines."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.fsdp.engines import ENGINES
from benchmarks.fsdp.launch import Result
from benchmarks.room import MEANINGLESS

LOSS_TOLERANCE = 2e-3
"""Relative. The order of bf16 sums differs between engines and, in some kernels, between runs."""
MOVE_TOLERANCE = 0.5
"""Of how far the peer's first update moves the loss, mean over ranks. Small models move less than
the tolerance above, which alone would let one pass that does not train. bf16 sums of eight ranks in
another order change a twentieth of the move there."""
LOSS_NOISE = 1e-5
"""Of the loss: a smaller difference between moves is rounding in the loss itself."""
MAX_ERROR_CHARS = 400


@dataclass(frozen=True)
class Row:
    """One engine on one workload over all rounds.

    Attributes:
        step_ms: 10th, 50th and 90th percentile of all timed steps.
        speed: how many times the peer's speed; None without a peer in the run.
        reserved_ratio: reserved memory over the peer's.
        notes: what must be known beside the figures.
        is_right: no error, and losses that agree with the peer's.
    """

    workload: str
    engine: str
    step_ms: tuple[float, float, float] | None
    speed: float | None
    allocated_gib: float | None
    reserved_gib: float | None
    reserved_ratio: float | None
    losses: tuple[float, float, float] | None
    """Of rank 0."""
    notes: list[str]
    is_right: bool


def rows(results: Sequence[Result]) -> list[Row]:
    """One row for each engine and workload, in the order of the catalogue."""
    workloads = list(dict.fromkeys(result.workload for result in results))
    names = [name for name in ENGINES if any(r.engine == name for r in results)]
    found = []
    for workload in workloads:
        of = {name: _of(results, workload, name) for name in names}
        found += [_row(workload, name, of) for name in names if of[name]]
    return found


def _of(results: Sequence[Result], workload: str, engine: str) -> list[Result]:
    return [r for r in results if (r.workload, r.engine) == (workload, engine)]


def _row(workload: str, name: str, of: dict[str, list[Result]]) -> Row:
    engine = ENGINES[name]
    mine = [r for r in of[name] if r.error is None]
    peer = [r for r in of.get(engine.peer, []) if r.error is None]
    times = [ms for r in mine for ms in r.times_ms]
    peer_times = [ms for r in peer for ms in r.times_ms]
    reserved, peer_reserved = _reserved(mine), _reserved(peer)
    notes, agrees = _loss_notes(mine, peer, trains=engine.trains)
    if mine and of.get(engine.peer) and not peer:
        notes, agrees = [f"losses compared with nothing: {engine.peer} has no figures"], False
    notes += _compile_notes(mine, compiled=engine.compiled)
    notes += [f"round {r.number + 1}: {r.error[:MAX_ERROR_CHARS]}" for r in of[name] if r.error]
    both_timed = bool(times and peer_times)
    return Row(
        workload=workload,
        engine=name,
        step_ms=percentiles(times) if times else None,
        speed=statistics.median(peer_times) / statistics.median(times) if both_timed else None,
        allocated_gib=max((r.allocated_gib for r in mine if r.allocated_gib), default=None),
        reserved_gib=reserved,
        reserved_ratio=reserved / peer_reserved if reserved and peer_reserved else None,
        losses=mine[-1].losses[0] if mine else None,
        notes=notes,
        is_right=agrees and len(mine) == len(of[name]),
    )


def _reserved(results: Sequence[Result]) -> float | None:
    return max((r.reserved_gib for r in results if r.reserved_gib), default=None)


def percentiles(times_ms: Sequence[float]) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile."""
    if len(times_ms) == 1:
        return times_ms[0], times_ms[0], times_ms[0]
    deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
    return deciles[0], statistics.median(times_ms), deciles[8]


def _loss_notes(
    mine: Sequence[Result], peer: Sequence[Result], *, trains: bool
) -> tuple[list[str], bool]:
    """What to say of the losses, and whether they agree with the peer's."""
    if not mine or not peer or mine[0].engine == peer[0].engine:
        return [], True
    notes, agrees = [], True
    # Later ones wander: attention's backward, at its fastest, adds up in no fixed order.
    for when, which in enumerate(("first", "second") if trains else ("first",)):
        if others := _ranks_that_differ(mine, peer, when):
            ranks = ", ".join(map(str, others))
            notes.append(f"{which.upper()} LOSS DIFFERS from {peer[0].engine}'s on ranks {ranks}")
            agrees = False
    if trains and agrees and not all(_moves_alike(m, p) for m in mine for p in peer):
        notes.append(f"LOSS DOES NOT MOVE as {peer[0].engine}'s")
        agrees = False
    if trains and not all(math.isfinite(last) for m in mine for *_, last in m.losses):
        notes.append("LAST LOSS IS NOT FINITE")
        agrees = False
    if trains and {r.last_loss_bits for r in mine} == {r.last_loss_bits for r in peer}:
        notes.append(f"last loss has {peer[0].engine}'s bits")
    return notes, agrees


def _ranks_that_differ(mine: Sequence[Result], peer: Sequence[Result], when: int) -> list[int]:
    """Ranks whose loss number `when` is not the peer's in every pair of rounds."""
    return sorted({
        rank
        for m in mine
        for p in peer
        for rank, (one, other) in enumerate(zip(m.losses, p.losses, strict=True))
        if not _is_close(one[when], other[when])
    })  # fmt: skip


def _moves_alike(mine: Result, peer: Result) -> bool:
    """Whether the first update changes the loss as the peer's does."""
    moved, peer_moved = (
        statistics.fmean(second - first for first, second, _ in result.losses)
        for result in (mine, peer)
    )
    noise = LOSS_NOISE * statistics.fmean(abs(first) for first, *_ in peer.losses)
    return abs(moved - peer_moved) <= max(MOVE_TOLERANCE * abs(peer_moved), noise)


def _is_close(one: float, other: float) -> bool:
    """False for NaN on either side."""
    return abs(one - other) <= LOSS_TOLERANCE * max(abs(one), abs(other))


def _compile_notes(mine: Sequence[Result], *, compiled: bool) -> list[str]:
    if not compiled or not mine:
        return []
    last = mine[-1]
    notes = [f"{last.graphs} graphs, {last.graph_breaks} breaks"]
    if late := max(r.late_graphs for r in mine):
        notes.append(f"{late} GRAPHS COMPILED IN TIMED STEPS")
    return notes


_MEMORY_AND_LOSS = "allocated, reserved, ratio of reserved, first, second and last loss"


def table(found: Sequence[Row], *, shares_gpus: bool = False) -> list[str]:
    """Lines for people: memory in GiB, times in ms, ratios to the peer.

    Args:
        found: the rows.
        shares_gpus: several ranks share a GPU: times are said to mean nothing, and have no ratio.
    """
    head = f"step ms [p10, p90], speed, {_MEMORY_AND_LOSS}"
    if shares_gpus:
        head = f"{MEANINGLESS}; step ms [p10, p90], {_MEMORY_AND_LOSS}"
    lines: list[str] = []
    width = max((len(row.engine) for row in found), default=0)
    workload = ""
    for row in found:
        if row.workload != workload:
            workload = row.workload
            lines += ["", f"{workload}: {head}"]
        cells = _cells(row, has_speed=not shares_gpus)
        lines.append(f"  {row.engine:{width}} {cells}  {'; '.join(row.notes)}".rstrip())
    return lines


def _cells(row: Row, *, has_speed: bool) -> str:
    if row.step_ms is None:
        return "no figures"
    low, middle, high = row.step_ms
    first, second, last = row.losses or (float("nan"),) * 3
    speed = f"{_number(row.speed)} x  " if has_speed else ""
    return (
        f"{middle:9.2f} [{low:.2f}, {high:.2f}]  {speed}"
        f"{_number(row.allocated_gib)}  {_number(row.reserved_gib)}  "
        f"{_number(row.reserved_ratio)}  {first:.5f} {second:.5f} {last:.5f}"
    )


def _number(value: float | None) -> str:
    return "     -" if value is None else f"{value:6.2f}"
