"""The curve tells a difference that a rounded plot would hide."""

import struct
from typing import Any

import pandas as pd

from reports.loss_curve import LossCurve, loss_curve

COLUMNS = ["run", "rank", "step", "loss_bits", "loss", "grad_norm"]


def frame(**runs: dict[tuple[int, int], int]) -> pd.DataFrame:
    """Losses by run, then by (rank, step), as bit patterns."""
    rows: list[Any] = []
    for run, losses in runs.items():
        for (rank, step), pattern in losses.items():
            value = struct.unpack(">f", pattern.to_bytes(4, "big"))[0]
            rows.append((run, rank, step, f"{pattern:08x}", value, 0.0))
    return pd.DataFrame(rows, columns=COLUMNS)


def curve_of(table: pd.DataFrame, reference: str, candidate: str, rank: int) -> LossCurve | None:
    """The curve of two runs of one table."""
    left, right = (table[table["run"] == run] for run in (reference, candidate))
    return loss_curve(left, right, rank)


def losses(**changed: int) -> dict[tuple[int, int], int]:
    """Two ranks, three steps of 1.0; `r1s2=...` replaces one."""
    plain = {(rank, step): 0x3F800000 for rank in (0, 1) for step in (0, 1, 2)}
    for name, pattern in changed.items():
        plain[int(name[1]), int(name[3])] = pattern
    return plain


def test_equal_bits_are_said_in_words() -> None:
    """A flat zero is stated, with how much it covers."""
    curve = curve_of(frame(a=losses(), b=losses()), "a", "b", 0)
    assert curve is not None
    assert curve.words == "Δloss is zero: the same bits in 3 shared steps on 2 ranks."
    assert curve.delta_ulps == (0.0, 0.0, 0.0)


def test_one_ulp_on_another_rank_is_drawn() -> None:
    """The distance is over all ranks, whichever rank's loss is drawn."""
    curve = curve_of(frame(a=losses(), b=losses(r1s2=0x3F800003)), "a", "b", 0)
    assert curve is not None
    assert curve.rank == 0
    assert curve.delta_ulps == (0.0, 0.0, 3.0)
    assert curve.differing == (2,)
    assert "first at step 2 on rank 1" in curve.words
    assert "at most 3 ulp (step 2, rank 1)" in curve.words


def test_signed_zero_and_nan_differ_without_a_distance() -> None:
    """-0.0 for 0.0 and one NaN for another are differences although no distance shows them."""
    curve = curve_of(frame(a=losses(r0s1=0), b=losses(r0s1=0x80000000)), "a", "b", 0)
    assert curve is not None
    assert curve.differing == (1,)
    assert "by the sign of a zero" in curve.words
    nans = frame(a=losses(r0s1=0x7FC00000), b=losses(r0s1=0x7FC00001))
    curve = curve_of(nans, "a", "b", 0)
    assert curve is not None
    assert curve.differing == (1,)
    assert "1 are NaN or infinite" in curve.words


def test_lost_losses_are_counted() -> None:
    """Losses without a counterpart are said, never taken for equal; a lost rank is replaced."""
    short = {key: value for key, value in losses().items() if key != (1, 2)}
    curve = curve_of(frame(a=losses(), b=short), "a", "b", 7)
    assert curve is not None
    assert curve.rank == 0
    assert "1 recorded losses have no counterpart" in curve.words
    assert curve_of(frame(a=losses()), "a", "b", 0) is None
