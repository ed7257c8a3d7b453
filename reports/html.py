"""One page that opens offline, on a telephone too: no script, no address outside itself."""

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from harness.records import CheckResult
from reports.figures import (
    MAX_MATRIX_COLUMNS,
    MAX_MATRIX_ROWS,
    OUTCOME_COLOURS,
    loss_figure,
    matrix_figure,
    memory_figure,
)
from reports.summary import SYMBOLS, CaseReport, Report
from reports.text import clean, one_line

TEMPLATE = "report.html.j2"
MAX_DRAWN_CASES = 60
"""Cases with pictures; the rest, and it is the passing end, is told in words."""


def render(report: Report) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["clean"] = lambda value: clean(str(value))
    environment.filters["one_line"] = lambda value: one_line(str(value))
    environment.filters["figures"] = show_figures
    drawn = {
        case.spec.id: _pictures(case) for case in report.cases[:MAX_DRAWN_CASES]
    }  # failures come first, so they are drawn first
    return environment.get_template(TEMPLATE).render(
        report=report,
        symbols=SYMBOLS,
        colours=OUTCOME_COLOURS,
        drawn=drawn,
        matrix_picture=matrix_figure(report.matrix) if report.cases else "",
        matrix_words=_matrix_words(report),
        num_columns=min(len(report.matrix.columns), MAX_MATRIX_COLUMNS),
        hidden_rows=max(0, len(report.matrix.rows) - MAX_MATRIX_ROWS),
        hidden_columns=max(0, len(report.matrix.columns) - MAX_MATRIX_COLUMNS),
        environment_keys=sorted({key for values in report.environments.values() for key in values}),
    )


def show_figures(result: CheckResult) -> str:
    """A check's figures as text, whole numbers without a point."""
    return ", ".join(
        f"{one_line(name, 60)} {value:.0f}"
        if math.isfinite(value) and value == int(value)
        else f"{one_line(name, 60)} {value:.4g}"
        for name, value in sorted(result.figures.items())
    )


def _pictures(case: CaseReport) -> dict[str, str]:
    pictures = {"loss": "", "memory": ""}
    if case.curve is not None:
        pictures["loss"] = loss_figure(case.curve)
    if any(leg.worst for leg in case.memory):
        pictures["memory"] = memory_figure(case.memory, _max_ratio(case))
    return pictures


def _max_ratio(case: CaseReport) -> float | None:
    value: Any = case.spec.checks.get("peak_memory", {}).get("max_ratio")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) and value > 0 else None


def _matrix_words(report: Report) -> str:
    cells = [
        f"{row}, {column}: {', '.join(case.outcome for case in cases)}"
        for (row, column), cases in list(report.matrix.cells.items())[:MAX_MATRIX_ROWS]
    ]
    return f"Verdict matrix, columns by {report.matrix.axis}. " + "; ".join(cells)
