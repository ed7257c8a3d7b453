"""One page that opens offline, on a telephone too: one script, its own, and no address outside.

    a row a case, failures first       always; works without the script
    details of the first cases         as they are; works without the script
    details of all others              packed, and put in place when a case is opened

The page's policy names the digest of its script, so no other script can run, whatever a log holds.
A nightly of 1,000 cases stays under 3 MB: text is packed, pictures and open details have a budget,
and what did not fit is said.
"""

import base64
import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from harness.records import CheckResult
from reports import beside_table
from reports.causes import Cause, causes
from reports.figures import OUTCOME_COLOURS, loss_figure, memory_figure
from reports.history import LETTERS, NOTHING, CaseNights, Nights
from reports.normalise import steady
from reports.report import OUTCOME_ORDER, SYMBOLS, CaseReport, Report
from reports.text import clean, one_line
from reports.trends import trend_figure

FOLDER = Path(__file__).parent / "templates"
MAX_DRAWN_CASES = 40
"""Cases with pictures; the rest, and it is the passing end, is told in words."""
MAX_TREND_PICTURES = 8
PICTURE_BYTES = 900_000
INLINE_BYTES = 500_000
"""Details that are not packed: read without the script, printed, found by a search in the page."""
PACKED_BYTES = 800_000
"""Once the packed details are as large as this, those of further cases are short."""
MAX_OPEN = 10
MAX_CAUSES, MAX_FLAKY, MAX_LONGEST = 30, 30, 5
MAX_MATRIX_ROWS, MAX_MATRIX_COLUMNS = 1000, 24
MAX_WORDS = 160


def render(report: Report, nights: Nights = NOTHING) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = lambda value: clean(str(value))
    environment.filters["one_line"] = lambda value: one_line(str(value))
    environment.filters["figures"] = show_figures
    bodies = _Bodies(environment.get_template("case.html.j2"), report.folder, nights)
    for case in report.cases:  # failures come first, so they have what room there is
        bodies.add(case)
    script = (FOLDER / "filter.js").read_text() + (FOLDER / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    found = causes(report)
    return environment.get_template("report.html.j2").render(
        report=report,
        symbols=SYMBOLS,
        colours=OUTCOME_COLOURS,
        style=Markup((FOLDER / "style.css").read_text()),
        script=Markup(script),
        script_digest=Markup(f"sha256-{digest}"),
        rows=_rows(report, bodies),
        num_inline=len(bodies.inline),
        packed=bodies.packed(),
        index=_for_script(_index(report, found)),
        nights_data=_for_script(_nights(report, nights)),
        environment_keys=sorted({key for values in report.environments.values() for key in values}),
        seconds=sum(case.verdict.wall_s for case in report.cases),
        longest=sorted(report.cases, key=lambda case: -case.verdict.wall_s)[:MAX_LONGEST],
        beside_head=beside_table.HEAD,
        beside_rows=beside_table.rows(report),
        beside_caution=beside_table.caution(report),
        nights_note=nights.note,
        flaky=nights.flaky,
        max_flaky=MAX_FLAKY,
        causes=found,
        max_causes=MAX_CAUSES,
        hidden_causes_cases=sum(len(cause.cases) for cause in found[MAX_CAUSES:]),
        **_grid(report),
    )


def show_figures(result: CheckResult) -> str:
    """A check's figures as text, whole numbers without a point."""
    return ", ".join(
        f"{one_line(name, 60)} {value:.0f}"
        if math.isfinite(value) and value == int(value)
        else f"{one_line(name, 60)} {value:.4g}"
        for name, value in sorted(result.figures.items())
    )


class _Bodies:
    """Details of cases, as far as the page has room for them.

    What room they take is measured without what varies from run to run and from history to history:
    the same cases must be packed, drawn and shortened in every report of the same results.
    """

    def __init__(self, template: Template, folder: Path, nights: Nights) -> None:
        self._template = template
        self._folder = folder
        self._nights = nights
        self._packer, self._ruler = zlib.compressobj(9), zlib.compressobj(1)
        self._chunks: list[bytes] = []
        self._picture_room = PICTURE_BYTES
        self._inline_room = INLINE_BYTES
        self._num_trends = 0
        self._num_drawn = 0
        self._size = 0
        self.inline: dict[str, Markup] = {}

    def add(self, case: CaseReport) -> None:
        """Make the details of the next case."""
        text = self._text(case)
        if self._inline_room > 0:
            # What varies between equal results must not decide how much of them is shown.
            self._inline_room -= len(steady(text, self._folder).encode())
            self.inline[case.spec.id] = Markup(text)
            return
        entry = ("," if self._chunks else "{") + json.dumps(case.spec.id) + ":" + json.dumps(text)
        self._chunks.append(self._packer.compress(entry.encode()))
        # Flushed by the case, so that the size is known before the next one is made.
        measured = self._ruler.compress(steady(text, self._folder).encode())
        self._size += len(measured + self._ruler.flush(zlib.Z_SYNC_FLUSH))

    def packed(self) -> str:
        """What was packed, for the script; "" if nothing was."""
        if not self._chunks:
            return ""
        data = b"".join(self._chunks) + self._packer.compress(b"}") + self._packer.flush()
        return base64.b64encode(data).decode()

    def _text(self, case: CaseReport) -> str:
        nights = self._nights.cases.get(case.spec.id)
        short = self._size * 4 / 3 > PACKED_BYTES
        return self._template.render(
            case=case,
            symbols=SYMBOLS,
            nights=nights,
            short=short,
            trend_picture="" if short else self._trend(case, nights),
            pictures=_NO_PICTURES if short else self._pictures(case),
        )

    def _pictures(self, case: CaseReport) -> dict[str, str]:
        if self._num_drawn >= MAX_DRAWN_CASES or self._picture_room <= 0:
            return _NO_PICTURES
        self._num_drawn += 1
        pictures = dict(_NO_PICTURES)
        if case.curve is not None:
            pictures["loss"] = loss_figure(case.curve)
        if any(leg.worst for leg in case.memory):
            pictures["memory"] = memory_figure(case.memory, _max_ratio(case))
        self._picture_room -= sum(map(len, pictures.values()))
        return pictures

    def _trend(self, case: CaseReport, nights: CaseNights | None) -> str:
        worth_it = nights is not None and len(nights.trend.answers) > 1 and bool(nights.words)
        if nights is None or not worth_it or self._num_trends >= MAX_TREND_PICTURES:
            return ""
        self._num_trends += 1
        return trend_figure(nights.trend)


_NO_PICTURES = {"loss": "", "memory": ""}


def _max_ratio(case: CaseReport) -> float | None:
    value: Any = case.spec.checks.get("peak_memory", {}).get("max_ratio")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value > 0 else None


def _rows(report: Report, bodies: _Bodies) -> list[dict[str, Any]]:
    num_failing = sum(case.outcome not in ("passed", "skipped") for case in report.cases)
    return [
        {
            "id": case.spec.id,
            "outcome": case.outcome,
            "what": case.verdict.what,
            "words": _words(case),
            "again": case.attempt_words,
            "open": case.outcome not in ("passed", "skipped") and num_failing <= MAX_OPEN,
            "body": bodies.inline.get(case.spec.id, ""),
        }
        for case in report.cases
    ]


def _words(case: CaseReport) -> str:
    if case.outcome == "passed":
        return ""
    return one_line(case.where or case.message, MAX_WORDS)


def _grid(report: Report) -> dict[str, Any]:
    """The matrix, a cell a list of cases: the worst of them, and how many."""
    matrix = report.matrix
    rows, columns = matrix.rows[:MAX_MATRIX_ROWS], matrix.columns[:MAX_MATRIX_COLUMNS]
    return {
        "columns": columns,
        "grid": [
            (row, [_cell(list(matrix.cells.get((row, column), ()))) for column in columns])
            for row in rows
        ],
        "hidden_rows": len(matrix.rows) - len(rows),
        "hidden_columns": len(matrix.columns) - len(columns),
    }


def _cell(cases: list[CaseReport]) -> dict[str, Any] | None:
    if not cases:
        return None
    worst = min(cases, key=lambda case: OUTCOME_ORDER.index(case.outcome))
    return {"outcome": worst.outcome, "id": worst.spec.id, "several": len(cases)}


def _index(report: Report, found: tuple[Cause, ...]) -> dict[str, Any]:
    """What `filter.js` says of its index."""
    cause_of = {case.spec.id: place for place, cause in enumerate(found) for case in cause.cases}
    axes: dict[str, dict[str, int]] = {}
    for case in report.cases:
        for name, value in case.spec.labels.items():
            places = axes.setdefault(name, {})
            places.setdefault(value, len(places))
    return {
        "outcomes": list(OUTCOME_ORDER),
        "axes": [[one_line(name), [one_line(v) for v in values]] for name, values in axes.items()],
        "cases": [
            [
                case.spec.id,
                OUTCOME_ORDER.index(case.outcome),
                cause_of.get(case.spec.id, -1),
                [
                    values[case.spec.labels[name]] if name in case.spec.labels else -1
                    for name, values in axes.items()
                ],
            ]
            for case in report.cases
        ],
    }


def _nights(report: Report, nights: Nights) -> dict[str, Any]:
    own = {place: nights.cases.get(case.spec.id) for place, case in enumerate(report.cases)}
    return {
        "letters": {letter: outcome for outcome, letter in LETTERS.items()},
        "symbols": {letter: SYMBOLS[outcome] for outcome, letter in LETTERS.items()},
        "marks": [SYMBOLS[outcome] for outcome in OUTCOME_ORDER],
        "cases": {
            str(place): [known.letters, known.step_us, known.peak_kib]
            for place, known in own.items()
            if known is not None
        },
    }


def _for_script(value: object) -> Markup:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
