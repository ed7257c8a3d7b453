"""Pictures of a report, the same bytes for the same input, in colours of the reader's scheme.

Nothing is told by colour alone: series differ in marker and dash, every rectangle of a map has a
title, and a sentence says what a picture shows. Labels are never parsed as mathematics.
"""

import base64
import io
import math
import warnings
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

from harness.checks.evidence import BEFORE
from harness.checks.evidence import count as counted
from reports.compared import MISSING, GroupMap, LossCurve, StateMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_MARKED_POINTS = 80
MAX_COLUMNS, MAX_ROWS = 120, 64
"""Of a state map; steps and ranks past them share a column or a row."""
LARGE, SMALL = 22, 9
"""Pixels of a rectangle: large ones hold their number."""
LABEL_PX, AXIS_PX = 44, 18

# Stand-ins that Matplotlib copies into the file, and what they become there: (light, dark).
INK, FAINT, LEFT, RIGHT = "#010203", "#010204", "#010205", "#010206"
_SCHEME = {
    INK: ("--ink", "#1b1f24", "#e6e8eb"),
    FAINT: ("--faint", "#c4c9cf", "#4a5058"),
    LEFT: ("--left", "#0072b2", "#56b4e9"),
    RIGHT: ("--right", "#b34700", "#f0a35e"),
}
_RC: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False,
    "axes.unicode_minus": False, "font.size": 10, "text.color": INK, "axes.labelcolor": INK,
    "axes.edgecolor": FAINT, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT,
    "grid.linewidth": 0.5, "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip


def loss_figure(curve: LossCurve) -> str:
    """Loss of both runs above, largest distance over the ranks below, as SVG in a data URI."""
    # Only reports with a loss that differs wait for it.
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context(_RC), warnings.catch_warnings():
        # A glyph that the measuring font lacks is drawn by the reader's font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=(6.4, 4.0))
        FigureCanvasSVG(figure)
        figure.subplots_adjust(left=0.13, right=0.98, top=0.98, bottom=0.12, hspace=0.2)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        marked = len(curve.steps) <= MAX_MARKED_POINTS
        upper.plot(
            curve.steps, curve.reference, color=LEFT, lw=2.5, alpha=0.75,
            marker="o" if marked else "", ms=6, mfc="none", label="reference",
        )  # fmt: skip
        upper.plot(
            curve.steps, curve.candidate, color=RIGHT, lw=1.2, ls="--",
            marker="x" if marked else "", ms=5, label="candidate",
        )  # fmt: skip
        upper.set_ylabel(f"loss, rank {curve.rank}")
        upper.legend(loc="best")
        _delta(lower, curve)
        lower.set_xlabel("step")
        lower.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    # Neither the XML declaration nor the DTD, which names an address, is wanted in a data URI.
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, (name, _, _) in _SCHEME.items():
        svg = svg.replace(stand_in, f"var({name})")
    light, dark = (";".join(f"{s[0]}:{s[at]}" for s in _SCHEME.values()) for at in (1, 2))
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    head = svg.index(">") + 1
    data = base64.b64encode((svg[:head] + style + svg[head:]).encode()).decode()
    return f"data:image/svg+xml;base64,{data}"


def _delta(axes: "Axes", curve: LossCurve) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_ylabel("|Δloss|, ulp")
    highest = max((ulps for ulps in curve.delta_ulps if not math.isnan(ulps)), default=0.0)
    marker = "." if len(curve.delta_steps) <= MAX_MARKED_POINTS else ""
    axes.plot(curve.delta_steps, curve.delta_ulps, color=INK, lw=1.2, marker=marker, ms=5)
    if highest > 100:
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0e}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-0.3 if highest > 100 else -0.05 * max(highest, 1), max(highest, 1) * 1.15)
    if curve.differing:
        first = curve.differing[0]
        axes.axvline(first, color=RIGHT, lw=1, ls=":")
        axes.set_title(f"differs first at step {first}", fontsize=9, loc="right")
    odd = [s for s, u in zip(curve.delta_steps, curve.delta_ulps, strict=True) if math.isnan(u)]
    if odd:
        axes.plot(odd, [0] * len(odd), color=RIGHT, marker="x", ls="", label="NaN or infinite")
        axes.legend(loc="center right")


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
