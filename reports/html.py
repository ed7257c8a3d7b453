"""One page that opens offline, on a telephone too: one script, its own, and no address outside.

    a row a case, failures first       always; works without the script
    details of the first cases         as they are; works without the script
    details of all others              packed, and put in place when a case is opened

The page's policy names the digest of its script, so no other script can run, whatever a log holds.
A report of 1,000 cases stays under 3 MB: text is packed, pictures and open details have a budget,
and what did not fit is said.
"""

import base64
import hashlib
import io
import json
import math
import warnings
import zlib
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from harness.checks.evidence import BEFORE
from harness.checks.evidence import count as counted
from harness.records import CheckResult
from reports import safety
from reports.compared import MISSING, GroupMap, LossCurve, StateMap
from reports.reading import (
    COST_HEAD,
    GREEN,
    LETTERS,
    OUTCOME_ORDER,
    SYMBOLS,
    CaseReport,
    Report,
    cost_rows,
)
from reports.text import DIGEST, clean, one_line, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FOLDER = Path(__file__).parent / "templates"
MAX_DRAWN_CASES, MAX_GROUPS = 40, 10
"""Cases with pictures, and tensor groups of one with a map; the rest is told in words."""
PICTURE_BYTES, INLINE_BYTES, PACKED_BYTES = 900_000, 500_000, 5_000_000
"""Inline details are read without the script, printed, found by a search in the page. Once what
is to be packed, to a tenth or so, is so large, details of further cases are short."""
MAX_OPEN, MAX_CAUSES, MAX_FLAKY, MAX_LONGEST, MAX_WORDS = 10, 30, 30, 5, 160
MAX_MATRIX_ROWS, MAX_MATRIX_COLUMNS = 1000, 24


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "clean": lambda value: clean(str(value)),
        "one_line": lambda value: one_line(str(value)),
        "short": short_digests,
        "in_short": lambda case: short(one_line(case.where or case.message, MAX_WORDS)),
        "figures": show_figures,
        "step": lambda step: "before step 0" if step == BEFORE else str(step),
    }
    bodies = _Bodies(environment.get_template("case.html.j2"), report)
    for case in report.cases:  # failures come first, so they have what room there is
        bodies.add(case)
    script = (FOLDER / "filter.js").read_text() + (FOLDER / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    causes = report.causes
    return environment.get_template("report.html.j2").render(
        report=report, symbols=SYMBOLS, facts=_facts(report),
        style=Markup((FOLDER / "style.css").read_text()), script=Markup(script),
        script_digest=Markup(f"sha256-{digest}"),
        wrong=[case for case in report.cases if case.outcome not in GREEN], max_open=MAX_OPEN,
        green=[case for case in report.cases if case.outcome in GREEN],
        bodies=bodies.inline, packed=bodies.packed(),
        index=_index(report), past_data=_past(report),
        environment_keys=sorted({key for values in report.environments.values() for key in values}),
        longest=sorted(report.cases, key=lambda case: -case.verdict.wall_s)[:MAX_LONGEST],
        cost_head=COST_HEAD, cost_rows=cost_rows(report),
        safety=safety.tables([report]), safety_words=safety.WORDS,
        max_flaky=MAX_FLAKY, causes=causes, max_causes=MAX_CAUSES,
        hidden_causes_cases=sum(len(cause.cases) for cause in causes[MAX_CAUSES:]),
        **_grid(report),
    )  # fmt: skip


def short_digests(text: object) -> Markup:
    """Text for the page, each digest by 8 digits with the whole one in its title."""
    return Markup(DIGEST.sub(r'<abbr title="\g<0>">\1…\2</abbr>', str(escape(one_line(str(text))))))


def show_figures(result: CheckResult) -> str:
    """A check's figures as text, whole numbers without a point; -1 stands for none."""
    return ", ".join(
        f"{one_line(name.replace('_', ' '), 60)} "
        + (f"{value:,.0f}" if math.isfinite(value) and value == int(value) else f"{value:.4g}")
        for name, value in sorted(result.figures.items())
        if value != -1
    )


def _facts(report: Report) -> list[tuple[str, str, str]]:
    """The head line: name, value, whole value."""
    try:
        when = datetime.fromisoformat(report.created)
        created = f"{when:%Y-%m-%d %H:%M} {when:%Z}".strip()
    except ValueError:
        created = report.created
    found = {
        "Date": (created, report.created), "Commit": (report.commit[:12], report.commit),
        "Machine": (report.machine, ""), "Wall time": (report.wall, "with runs under way"),
        "Exit code": (str(report.exit_code), ""),
    }  # fmt: skip
    return [(name, value or "unknown", whole) for name, (value, whole) in found.items()]


class _Bodies:
    """Details of cases, as far as the page has room: as they are, then packed, then short."""

    def __init__(self, template: Template, report: Report) -> None:
        self._template, self._past, self._num_drawn = template, report.past.cases, 0
        self._picture_room, self._inline_room = PICTURE_BYTES, INLINE_BYTES
        self._packed_room = PACKED_BYTES
        self.inline: dict[str, Markup] = {}
        self._packed: dict[str, str] = {}

    def add(self, case: CaseReport) -> None:
        """Make the details of the next case."""
        full = self._packed_room <= 0
        loss, maps = ("", []) if full else self._pictures(case)
        limit: Any = case.spec.checks.get("peak_memory", {}).get("max_ratio")
        text = self._template.render(
            case=case, symbols=SYMBOLS, past=self._past.get(case.spec.id), full=full,
            loss_picture=loss, maps=maps, green=GREEN,
            max_ratio=limit if isinstance(limit, int | float) and math.isfinite(limit) else None,
        )  # fmt: skip
        if self._inline_room > 0:
            self._inline_room -= len(text.encode())
            self.inline[case.spec.id] = Markup(text)
        else:
            self._packed_room -= len(text.encode())
            self._packed[case.spec.id] = text

    def packed(self) -> str:
        """What was packed, for the script; "" if nothing was."""
        data = zlib.compress(json.dumps(self._packed).encode(), 9) if self._packed else b""
        return base64.b64encode(data).decode()

    def _pictures(self, case: CaseReport) -> tuple[str, list[Markup]]:
        """Of the loss, if it differs, and of each tensor group that does."""
        if self._num_drawn >= MAX_DRAWN_CASES or self._picture_room <= 0:
            return "", []
        curve, state = case.curve, case.state
        loss = loss_figure(curve) if curve is not None and curve.differing else ""
        groups = state.groups[:MAX_GROUPS] if state is not None else ()
        maps = [Markup(state_figure(state, group)) for group in groups if state is not None]
        self._num_drawn += bool(loss or maps)
        self._picture_room -= len(loss) + sum(map(len, maps))
        return loss, maps


def _grid(report: Report) -> dict[str, Any]:
    """The matrix: rows with a failure, those without, and how many did not fit; of each place the
    worst case, and how many there are."""
    matrix, rank = report.matrix, {o: at for at, o in enumerate(OUTCOME_ORDER)}
    columns = matrix.columns[:MAX_MATRIX_COLUMNS]
    found = []
    for row in matrix.rows:
        held = [matrix.cases.get((row, column), ()) for column in columns]
        worst = [min(cases, key=lambda c: rank[c.outcome], default=None) for cases in held]
        places = [case and {"outcome": case.outcome, "id": case.spec.id, "several": len(cases)}
                  for case, cases in zip(worst, held, strict=True)]  # fmt: skip
        found.append((min((rank[case.outcome] for case in worst if case), default=9), row, places))
    shown = sorted(found, key=lambda each: each[0])[:MAX_MATRIX_ROWS]
    first_green = min(rank[outcome] for outcome in GREEN)
    return {
        "columns": columns,
        "bad_rows": [(row, places) for worst, row, places in shown if worst < first_green],
        "good_rows": [(row, places) for worst, row, places in shown if worst >= first_green],
        "hidden_rows": len(matrix.rows) - len(shown),
        "hidden_columns": len(matrix.columns) - len(columns),
    }


def _index(report: Report) -> dict[str, Any]:
    """What `filter.js` says of its index."""
    cause_of = {case.spec.id: at for at, cause in enumerate(report.causes) for case in cause.cases}
    axes: dict[str, dict[str, int]] = {}
    for case in report.cases:
        for name, value in case.spec.labels.items():
            places = axes.setdefault(name, {})
            places.setdefault(value, len(places))
    cases = []
    for case in report.cases:
        labels = case.spec.labels
        values = [own[labels[name]] if name in labels else -1 for name, own in axes.items()]
        outcome, cause = OUTCOME_ORDER.index(case.outcome), cause_of.get(case.spec.id, -1)
        cases.append([case.spec.id, outcome, cause, values])
    named = [[one_line(name), [one_line(v) for v in values]] for name, values in axes.items()]
    return {"outcomes": list(OUTCOME_ORDER), "axes": named, "cases": cases}


def _past(report: Report) -> dict[str, Any]:
    known = {place: report.past.cases.get(case.spec.id) for place, case in enumerate(report.cases)}
    return {
        "letters": {letter: outcome for outcome, letter in LETTERS.items()},
        "symbols": {letter: SYMBOLS[outcome] for outcome, letter in LETTERS.items()},
        "marks": [SYMBOLS[outcome] for outcome in OUTCOME_ORDER],
        "cases": {
            str(place): [own.letters, own.step_us, own.peak_kib]
            for place, own in known.items()
            if own is not None and len(own.letters) > 1
        },
    }


# --- pictures, the same bytes for the same input, in colours of the reader's scheme ---------------

# Nothing is told by colour alone: series differ in marker and dash, every rectangle of a map has a
# title, and a sentence says what a picture shows. Labels are never parsed as mathematics.
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
