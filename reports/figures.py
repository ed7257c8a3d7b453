"""Pictures of a report: SVG as data URIs, the same bytes for the same input.

Colours are variables that follow the reader's light or dark scheme, even inside an `<img>`. Nothing
is told by colour alone: outcomes carry a symbol and a word, series differ in marker and dash. Text
is never parsed as mathematics, so a label cannot break a picture.
"""

import base64
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from harness.records import Outcome
from reports.loss_curve import LossCurve
from reports.report import LegMemory

MIB = 1 << 20
MAX_MARKED_POINTS = 80

# Stand-ins that Matplotlib copies into the file, and what they become there: (light, dark).
INK, FAINT, LEFT, RIGHT = "#010203", "#010204", "#010205", "#010206"
_SCHEME = {
    INK: ("--ink", "#1b1f24", "#e6e8eb"),
    FAINT: ("--faint", "#c4c9cf", "#4a5058"),
    LEFT: ("--left", "#0072b2", "#56b4e9"),
    RIGHT: ("--right", "#b34700", "#f0a35e"),
}
# Okabe and Ito's colours, told apart by colour-blind readers; all carry black text.
OUTCOME_COLOURS: dict[Outcome, str] = {
    "passed": "#2bb58b", "failed": "#e8743b", "error": "#d793b8", "incomparable": "#eab308",
    "skipped": "#a9afb6",
}  # fmt: skip
_RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,
    "axes.unicode_minus": False,
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's settings for every picture of a report."""
    with mpl.rc_context(_RC), warnings.catch_warnings():
        # A glyph that the measuring font lacks is drawn by the reader's font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def loss_figure(curve: LossCurve) -> str:
    """Loss of both legs above, largest distance over the ranks below."""
    with style():
        figure = Figure(figsize=(6.4, 4.0))
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
        return data_uri(figure)


def _delta(axes: Axes, curve: LossCurve) -> None:
    axes.set_ylabel("|Δloss|, ulp")
    finite = [ulps for ulps in curve.delta_ulps if not math.isnan(ulps)]
    highest = max(finite, default=0.0)
    marked = len(curve.delta_steps) <= MAX_MARKED_POINTS
    axes.plot(
        curve.delta_steps, curve.delta_ulps, color=INK, lw=1.2,
        marker="." if marked else "", ms=5,
    )  # fmt: skip
    if highest > 100:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(-0.2, highest * 3)
        powers = math.floor(math.log10(highest))
        axes.set_yticks([0, *(10.0**p for p in range(0, powers + 1, max(1, powers // 3)))])
        axes.yaxis.set_major_formatter(FuncFormatter(_plain))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(-0.05 * max(highest, 1), max(highest, 1) * 1.15)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    if not curve.differing:
        axes.text(
            0.5, 0.6, "zero at every step that both recorded", transform=axes.transAxes, ha="center"
        )
        return
    first = curve.differing[0]
    axes.axvline(first, color=RIGHT, lw=1, ls=":")
    axes.set_title(f"differs first at step {first}", fontsize=9, loc="right")
    odd = [s for s, u in zip(curve.delta_steps, curve.delta_ulps, strict=True) if math.isnan(u)]
    if odd:
        axes.plot(odd, [0] * len(odd), color=RIGHT, marker="x", ls="", label="NaN or infinite")
        axes.legend(loc="center right")


def _plain(value: float, _place: object) -> str:
    # Matplotlib's own labels of a logarithmic axis are mathematics, which is switched off here.
    return f"{value:.0f}" if value < 1e6 else f"{value:.0e}"


def memory_figure(legs: tuple[LegMemory, ...], max_ratio: float | None) -> str:
    """A bar for each leg's highest rank, a mark for every rank, a line for the limit."""
    with style():
        figure = Figure(figsize=(6.4, 1.6))
        figure.subplots_adjust(left=0.14, right=0.97, top=0.93, bottom=0.32)
        axes = figure.subplots()
        highest = max((leg.worst for leg in legs), default=0) / MIB
        for y, leg in enumerate(legs):
            colour = RIGHT if leg.leg == "candidate" else LEFT
            hatch = "//" if leg.leg == "candidate" else ""
            axes.barh(y, leg.worst / MIB, height=0.6, color=colour, alpha=0.45, hatch=hatch, lw=0)
            axes.plot(
                [peak / MIB for peak in leg.peaks.values()], [y] * len(leg.peaks),
                ls="", marker="|", ms=9, color=INK,
            )  # fmt: skip
            text = f"{leg.worst / MIB:.2f} MiB" if leg.worst else "not recorded"
            axes.annotate(
                text, (leg.worst / MIB, y), (6, 0), textcoords="offset points", va="center"
            )
        limit = (legs[0].worst / MIB) * max_ratio if legs and max_ratio else 0.0
        if 0 < limit <= 3 * highest:
            axes.axvline(limit, color=INK, lw=1, ls="--")
            axes.text(limit, -0.5, f"limit {max_ratio:g}x ", va="bottom", ha="right", fontsize=8)
        axes.set_xlim(0, max(highest * 1.3, limit if limit <= 3 * highest else 0, 0.001))
        axes.set_ylim(len(legs) - 0.5, -0.6)
        axes.set_yticks(range(len(legs)))
        axes.set_yticklabels([leg.leg for leg in legs])
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("peak memory, MiB (bar: highest rank, ticks: every rank)")
        return data_uri(figure)


def data_uri(figure: Figure) -> str:
    """The figure as SVG in a data URI, in colours that follow the reader's scheme."""
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    # Neither the XML declaration nor the DTD, which names an address, is wanted in a data URI.
    svg = svg[svg.index("<svg") :]
    light, dark = [], []
    for stand_in, (name, day, night) in _SCHEME.items():
        svg = svg.replace(stand_in, f"var({name})")
        light.append(f"{name}:{day}")
        dark.append(f"{name}:{night}")
    scheme = (
        f"<style>:root{{{';'.join(light)}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{';'.join(dark)}}}}}</style>"
    )
    head = svg.index(">") + 1
    svg = svg[:head] + scheme + svg[head:]
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
