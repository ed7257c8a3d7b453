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
import json
import math
import zlib
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from harness.checks.evidence import BEFORE
from harness.records import CheckResult, Outcome
from harness.terminal import duration
from reports import safety
from reports.figures import loss_figure, state_figure
from reports.history import LETTERS
from reports.reading import (
    COST_HEAD,
    COST_WORDS,
    GREEN,
    OUTCOME_ORDER,
    SYMBOLS,
    CaseReport,
    Report,
    cost_rows,
)
from reports.text import DIGEST, clean, one_line, short

FOLDER = Path(__file__).parent / "templates"
# Okabe and Ito's colours, told apart by colour-blind readers; all carry black text.
OUTCOME_COLOURS: dict[Outcome, str] = {
    "passed": "#2bb58b", "failed": "#e8743b", "error": "#d793b8", "incomparable": "#eab308",
    "skipped": "#a9afb6",
}  # fmt: skip
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
        "figures": show_figures,
        "step": lambda step: "before step 0" if step == BEFORE else str(step),
    }
    bodies = _Bodies(environment.get_template("case.html.j2"), report)
    for case in report.cases:  # failures come first, so they have what room there is
        bodies.add(case)
    script = (FOLDER / "filter.js").read_text() + (FOLDER / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    causes, rows = report.causes, _rows(report, bodies)
    return environment.get_template("report.html.j2").render(
        report=report, symbols=SYMBOLS, colours=OUTCOME_COLOURS, facts=_facts(report),
        style=Markup((FOLDER / "style.css").read_text()), script=Markup(script),
        script_digest=Markup(f"sha256-{digest}"),
        rows=[row for row in rows if row["outcome"] not in GREEN],
        green=[row for row in rows if row["outcome"] in GREEN],
        num_inline=len(bodies.inline), packed=bodies.packed(),
        index=_index(report), past_data=_past(report),
        environment_keys=sorted({key for values in report.environments.values() for key in values}),
        longest=sorted(report.cases, key=lambda case: -case.verdict.wall_s)[:MAX_LONGEST],
        cost_head=COST_HEAD, cost_rows=cost_rows(report), cost_words=COST_WORDS,
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
    commit = report.commit[:12]
    wall = duration(report.wall_s) if math.isfinite(report.wall_s) and report.wall_s > 0 else ""
    found = {
        "Date": (created, report.created), "Commit": (commit, report.commit),
        "Machine": (report.machine, ""), "Wall time": (wall, "with runs under way"),
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


def _rows(report: Report, bodies: _Bodies) -> list[dict[str, Any]]:
    num_failing = sum(case.outcome not in GREEN for case in report.cases)
    rows = []
    for case in report.cases:
        green = case.outcome in GREEN
        words = short(one_line(case.where or case.message, MAX_WORDS))
        rows.append({
            "id": case.spec.id, "outcome": case.outcome, "what": case.verdict.what,
            "words": "" if case.outcome == "passed" else words, "again": case.attempt_words,
            "open": not green and num_failing <= MAX_OPEN,
            "body": bodies.inline.get(case.spec.id, ""),
        })  # fmt: skip
    return rows


def _grid(report: Report) -> dict[str, Any]:
    """The matrix: rows with a failure, those without, and how many did not fit."""
    matrix = report.matrix
    columns = matrix.columns[:MAX_MATRIX_COLUMNS]
    found = []
    for row in matrix.rows:
        places = [_place(matrix.cases.get((row, column), ())) for column in columns]
        worst = min((place["rank"] for place in places if place), default=len(OUTCOME_ORDER))
        found.append((worst, row, places))
    shown = sorted(found, key=lambda each: each[0])[:MAX_MATRIX_ROWS]
    first_green = min(map(OUTCOME_ORDER.index, GREEN))
    return {
        "columns": columns,
        "bad_rows": [(row, places) for worst, row, places in shown if worst < first_green],
        "good_rows": [(row, places) for worst, row, places in shown if worst >= first_green],
        "hidden_rows": len(matrix.rows) - len(shown),
        "hidden_columns": len(matrix.columns) - len(columns),
    }


def _place(cases: tuple[CaseReport, ...]) -> dict[str, Any] | None:
    """The worst case of one place of the matrix, and how many there are."""
    if not cases:
        return None
    worst = min(cases, key=lambda case: OUTCOME_ORDER.index(case.outcome))
    rank = OUTCOME_ORDER.index(worst.outcome)
    return {"outcome": worst.outcome, "rank": rank, "id": worst.spec.id, "several": len(cases)}


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
