"""The loss of two legs, step by step, and their difference in units in the last place."""

from dataclasses import dataclass

import pandas as pd

from harness.records import FloatBits, ulp_distance


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """What the loss figure shows.

    Attributes:
        rank: whose loss is drawn.
        steps: steps that both legs recorded on that rank.
        reference: loss of the reference; NaN where not finite.
        candidate: loss of the candidate.
        delta_steps: every step that both legs recorded on some rank.
        delta_ulps: largest distance over the ranks; NaN where it is no number.
        differing: steps in which some rank's bits differ, whatever the distance.
        words: the difference in one sentence.
    """

    rank: int
    steps: tuple[int, ...]
    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    delta_steps: tuple[int, ...]
    delta_ulps: tuple[float, ...]
    differing: tuple[int, ...]
    words: str


def loss_curve(reference: pd.DataFrame, candidate: pd.DataFrame, rank: int) -> LossCurve | None:
    """Curves of two runs, or None if they share no step.

    Args:
        reference: rows of the step frame, of the reference.
        candidate: rows of the candidate.
        rank: whose loss to draw; the lowest shared rank if it has none.
    """
    index = ["rank", "step"]
    # A rank of a pipeline may have no loss.
    left, right = (
        run[run["loss_bits"] != ""].drop_duplicates(index) for run in (reference, candidate)
    )
    both = left.merge(right, on=index, suffixes=("_r", "_c")).sort_values(index)
    if both.empty:
        return None
    both["differs"] = both["loss_bits_r"] != both["loss_bits_c"]
    both["ulps"] = [
        _ulps(a, b) if a != b else 0.0
        for a, b in zip(both["loss_bits_r"], both["loss_bits_c"], strict=True)
    ]
    drawn = rank if (both["rank"] == rank).any() else int(both["rank"].min())
    own = both[both["rank"] == drawn]
    by_step = both.groupby("step")["ulps"].max()
    return LossCurve(
        rank=drawn,
        steps=tuple(int(step) for step in own["step"]),
        reference=tuple(own["loss_r"]),
        candidate=tuple(own["loss_c"]),
        delta_steps=tuple(int(str(step)) for step in by_step.index),
        delta_ulps=tuple(by_step),
        differing=tuple(sorted({int(step) for step in both[both["differs"]]["step"]})),
        words=_words(both, len(left), len(right)),
    )


def _ulps(left: str, right: str) -> float:
    a, b = (FloatBits.from_hex(bits) for bits in (left, right))
    distance = ulp_distance(a, b)
    return float("nan") if distance is None else float(distance)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _words(both: pd.DataFrame, num_reference: int, num_candidate: int) -> str:
    num_ranks, num_steps = both["rank"].nunique(), both["step"].nunique()
    lost = max(num_reference, num_candidate) - len(both)
    note = f" {lost} recorded losses have no counterpart in the other leg." if lost else ""
    where = f"{_count(num_steps, 'shared step')} on {_count(num_ranks, 'rank')}"
    bad = both[both["differs"]]
    if bad.empty:
        return f"Δloss is zero: the same bits in {where}.{note}"
    first = bad.sort_values(["step", "rank"]).iloc[0]
    text = f"Δloss differs first at step {first['step']} on rank {first['rank']}"
    text += f", in {len(bad)} of {len(both)} losses ({where})"
    numbers = bad["ulps"].dropna()
    if len(numbers):
        worst = bad.sort_values("ulps", ascending=False, kind="stable").iloc[0]
        text += (
            f"; at most {worst['ulps']:.0f} ulp (step {worst['step']}, rank {worst['rank']})"
            if worst["ulps"]
            else "; by the sign of a zero"
        )
    if len(numbers) < len(bad):
        text += f"; {len(bad) - len(numbers)} are NaN or infinite on one side"
    return f"{text}.{note}"
