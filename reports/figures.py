"""Pictures of a report as SVG elements, in colours of the reader's scheme (`style.css`).

Nothing is told by colour alone: lines differ in width and dash, every rectangle of a map has a
title, and a sentence says what a picture shows.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from harness.checks.evidence import BEFORE
from harness.checks.evidence import count as counted
from reports.compared import MISSING, GroupMap, LossCurve, StateMap

MAX_COLUMNS, MAX_ROWS = 120, 64
"""Of a state map; steps and ranks past them share a column or a row."""
LARGE, SMALL = 22, 9
"""Pixels of a rectangle: large ones hold their number."""
LABEL_PX, AXIS_PX = 44, 18
CURVE_PX, MARGIN_PX, UPPER_PX, LOWER_PX = (640, 330), 76, (20, 190), (238, 62)
"""Of the losses: size, room for numbers, top and height of both panels."""
LARGE_ULPS = 100  # distances past it are drawn by their logarithms


def loss_figure(curve: LossCurve) -> str:
    """Loss of both runs above, largest distance over the ranks below, as an SVG element."""
    (width, height), (_, low) = CURVE_PX, LOWER_PX
    shown = [*curve.steps, *curve.delta_steps]
    first, last = min(shown), max(shown)
    room = (width - MARGIN_PX - 10) / max(last - first, 1)
    xs, at = ([MARGIN_PX + room * (step - first) for step in steps]
              for steps in (curve.steps, curve.delta_steps))  # fmt: skip
    is_log = any(each > LARGE_ULPS for each in curve.delta_ulps)
    ulps = [math.log10(1 + each) for each in curve.delta_ulps] if is_log else curve.delta_ulps
    losses, rules = _panel(*UPPER_PX, [curve.reference, curve.candidate])
    (distances, _), more = _panel(*LOWER_PX, [ulps, [0.0]], is_log=is_log)
    odd = [x for x, each in zip(at, ulps, strict=True) if math.isnan(each)]
    crosses = "".join(f"M{x - 4:.1f} {LOWER_PX[0] + low - 4}l8 8m0 -8l-8 8" for x in odd)
    lines = {"left": (xs, losses[0]), "right": (xs, losses[1]), "delta": (at, distances)}
    texts = {
        (MARGIN_PX, UPPER_PX[0] - 6): f"loss, rank {curve.rank}: reference ―, candidate - -"
        + f"; differs first at step {curve.differing[0]}" * bool(curve.differing),
        (MARGIN_PX, LOWER_PX[0] - 6): "|Δloss| of the worst rank, ulp"
        + "; ×: NaN or infinite" * bool(odd),
        (MARGIN_PX, height - 4): f"step {first}", (width - 60, height - 4): f"step {last}",
    }  # fmt: skip
    return (
        f'<svg class="curve" role="img" aria-label="Loss of reference and candidate by step. '
        f'{escape(curve.words)}" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        + "".join([rules, more, *(_path(name, *points) for name, points in lines.items())])
        + f'<path class="right" d="{crosses}"/>'
        + "".join(f'<text x="{x}" y="{y}">{escape(text)}</text>' for (x, y), text in texts.items())
        + "</svg>"
    )


def _panel(
    top: int, height: int, series: Sequence[Sequence[float]], *, is_log: bool = False
) -> tuple[list[list[float]], str]:
    """Where values are, NaN for NaN, and lines at the lowest, the middle and the highest."""
    known = [v for each in series for v in each if not math.isnan(v)] or [0.0]
    low, high = min(known), max(known)
    room, rules = high - low or 1.0, ""
    for value in dict.fromkeys((low, (low + high) / 2, high)):
        y, number = top + height * (high - value) / room, 10**value - 1 if is_log else value
        rules += f'<path class="rule" d="M{MARGIN_PX} {y:.1f}H{CURVE_PX[0]}"/>'
        rules += f'<text class="r" x="{MARGIN_PX - 5}" y="{y + 4:.1f}">{number:.8g}</text>'
    return [[top + height * (high - v) / room for v in each] for each in series], rules


def _path(name: str, xs: Iterable[float], ys: Iterable[float]) -> str:
    """A line through points, begun anew after one that is no number."""
    drawn, pen = "", "M"
    for x, y in zip(xs, ys, strict=True):
        if not math.isnan(y):
            drawn += f"{pen}{x:.1f} {y:.1f}{'h0' if pen == 'M' else ''}"
        pen = "M" if math.isnan(y) else "L"
    return f'<path class="{name}" d="{drawn}"/>'


def state_figure(shown: StateMap, group: GroupMap) -> str:
    """One tensor group as an SVG element: a column a step, a row a rank; the worst of several."""
    columns, rows = _blocks(shown.steps, MAX_COLUMNS), _blocks(shown.ranks, MAX_ROWS)
    size = LARGE if len(columns) <= 40 and len(rows) <= 16 else SMALL
    parts = list(_labels(columns, rows, size))
    for y, ranks in enumerate(rows):
        places = [(x, _worst(group, steps, ranks)) for x, steps in enumerate(columns)]
        for count, same in groupby(places, key=lambda place: place[1]):
            if count is not None:
                own = [x for x, _ in same]
                steps = [step for x in own for step in columns[x]]
                left, top = LABEL_PX + own[0] * size, AXIS_PX + y * size
                parts.append(_rectangle(group, count, (left, top, len(own), size), steps, ranks))
    width, height = LABEL_PX + len(columns) * size + 1, AXIS_PX + len(rows) * size + 1
    return (
        f'<svg class="map" role="img" aria-label="{escape(group.words)}" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )


def _blocks(values: Sequence[int], most: int) -> list[Sequence[int]]:
    size = -(-len(values) // most) or 1
    return [values[at : at + size] for at in range(0, len(values), size)]


def _worst(group: GroupMap, steps: Sequence[int], ranks: Sequence[int]) -> int | None:
    """The largest count; `MISSING` where nothing differs and something is missing."""
    found = [group.counts.get((step, rank)) for step in steps for rank in ranks]
    counts = [count for count in found if count is not None]
    return max(counts) or min(counts) if counts else None


def _rectangle(
    group: GroupMap, count: int, place: tuple[int, int, int, int], steps: Sequence[int],
    ranks: Sequence[int],
) -> str:  # fmt: skip
    left, top, width, size = place
    of, noun = group.num_tensors, group.noun
    said = f"{count} of {counted(of, noun)} differ"
    # 0 for none, 1 to 4 by the share of tensors.
    level = str(1 + sum(count > of * share for share in (0.1, 0.34, 0.67)) if count else 0)
    if count == MISSING:
        said, level = "recorded by one run only", "m"
    box = (
        f'<rect class="l{level}" x="{left}" y="{top}" width="{width * size - 1}" height="{size - 1}'
        f'"><title>{_span("step", steps)}, {_span("rank", ranks)}: {said}</title></rect>'
    )
    if size < LARGE or not count:
        return box
    word = "?" if count == MISSING else f"{count}" if count < 1000 else f"{count // 1000}k"
    return box + "".join(
        f'<text class="n n{level}" x="{left + at * size + size // 2}" y="{top + 15}">{word}</text>'
        for at in range(width)
    )


def _span(noun: str, values: Sequence[int]) -> str:
    first, last = ("init" if v == BEFORE else str(v) for v in (values[0], values[-1]))
    return f"{noun} {first}" if len(values) == 1 else f"{noun}s {first} to {last}"


def _labels(
    columns: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], size: int
) -> Iterator[str]:
    for x in range(0, len(columns), max(1, -(-30 // size))):
        label = "init" if columns[x][0] == BEFORE else str(columns[x][0])
        middle = LABEL_PX + x * size + size // 2
        yield f'<text x="{middle}" y="{AXIS_PX - 5}">{label}</text>'
    for y in range(0, len(rows), 1 if size == LARGE else 4):
        label = f"{'rank ' if size == LARGE or not y else ''}{rows[y][0]}"
        middle = AXIS_PX + y * size + size // 2 + 4
        yield f'<text class="r" x="{LABEL_PX - 4}" y="{middle}">{label}</text>'
