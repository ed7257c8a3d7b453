"""The matrix as text for people: Markdown, and one HTML page without anything beside it."""

import html
from collections.abc import Iterable, Sequence

from harness.detection.alone import PLAIN, STRESSED
from harness.detection.matrix import CONFIDENCE, Matrix
from harness.detection.rows import Row
from harness.errors import one_line
from harness.faults.catalogue import CATALOGUE

COLUMNS = (*PLAIN, STRESSED)
HEADERS = (
    "fault", "class", "source", "seen by", "stressors", "step", "place", *COLUMNS, "runs",
    "seconds",
)  # fmt: skip
LEGEND = (
    "step: planted in, and how many steps later it was seen. place: how well the bisector found "
    "phase, module, tensor, step and rank. The columns after it are what that check alone would "
    "have seen, and from which step on; `ends`: the run ended by itself; `no, stopped`: nothing, "
    "up to where a check of ours stopped the run."
)


def cells_of(row: Row) -> tuple[str, ...]:
    """A row's cells, as `HEADERS`."""
    alone = [str(row.alone[name]) if name in row.alone else "" for name in COLUMNS]
    return (
        row.fault, row.kind, row.source, seen_by(row), "+".join(row.under), steps_of(row),
        row.localised, *alone, str(row.runs), f"{row.seconds:.1f}",
    )  # fmt: skip


def seen_by(row: Row) -> str:
    """`state: diverged`; in capitals what should not be."""
    if row.status != "detected":
        return row.status.upper()
    is_said = row.check in ("", "records", row.what)
    return row.what if is_said else f"{row.check}: {row.what}"


def steps_of(row: Row) -> str:
    """`3`, `3 +1`: planted, and so many steps later seen."""
    if row.planted_step is None:
        return ""
    late = row.later
    return f"{row.planted_step}" + (f" +{late}" if late else "") + (" ?" if late is None else "")


def summary_lines(matrix: Matrix) -> list[str]:
    """The rates with their bounds, what was missed and what was wronged."""
    lines = [f"{name}: {rate}" for name, rate in matrix.rates().items()]
    lines[0] += f"; exact bounds at {CONFIDENCE:.0%} of each rate in brackets"
    lines += [f"not detected: {row.fault}: {one_line(row.reason)}" for row in matrix.missed]
    lines += [
        f"{alarm.outcome} without a fault: {alarm.case}: {alarm.what}: {one_line(alarm.message)}"
        for alarm in matrix.alarms
    ]
    lines += [
        f"place {row.localised}: {row.fault}: expected {due_place(row)}; got {told_place(row)}"
        for row in _misplaced(matrix)
    ]
    left = [row for row in matrix.rows if row not in matrix.ran]
    lines += [f"not run: {row.fault}: {one_line(row.reason)}" for row in left]
    if matrix.skipped:
        lines.append(f"clean cells that cannot be run here: {matrix.skipped}")
    return lines


def told_place(row: Row) -> str:
    """What the bisector said, in a line."""
    found = row.location
    if found is None:
        return ""
    told = {
        "step": found.step, "phase": found.phase, "module": found.module, "tensor": found.tensor,
        "quantity": found.quantity, "rank": found.rank,
    }  # fmt: skip
    said = ", ".join(f"{key} {value}" for key, value in told.items() if value not in (None, ""))
    return said or "; ".join(found.unknown)


def due_place(row: Row) -> str:
    """Where it is, in a line."""
    fault = CATALOGUE.get(row.fault)
    pointer = None if fault is None else fault.points_at
    if pointer is None:
        return ""
    step = None if row.planted_step is None else row.planted_step + pointer.later
    told = {
        "step": step, "phase": pointer.phase, "module": pointer.module,
        "tensor": pointer.tensor, "rank": row.planted_rank,
    }  # fmt: skip
    return ", ".join(f"{key} {value}" for key, value in told.items() if value not in (None, ""))


def markdown(matrix: Matrix) -> str:
    """The page of a run folder."""
    lines = [f"# Detection matrix ({matrix.device})", "", *_points(summary_lines(matrix)), ""]
    lines += [LEGEND, "", *table(HEADERS, (cells_of(row) for row in matrix.ran))]
    return "\n".join(lines) + "\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    shown = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return lines + ["| " + " | ".join(row) + " |" for row in shown]


def page(matrix: Matrix) -> str:
    """The same as HTML; green for what is seen, exact or right."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in HEADERS)
    body = "".join(_html_row(row) for row in matrix.ran)
    points = "".join(f"<li>{html.escape(line)}</li>" for line in summary_lines(matrix))
    title = f"Detection matrix ({html.escape(matrix.device)})"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style><h1>{title}</h1><ul>{points}</ul>"
        f"<p>{html.escape(LEGEND.replace('`', ''))}</p><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></html>\n"
    )


_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:1.5em}table{border-collapse:collapse}"
    "th,td{border:1px solid #ccc;padding:2px 6px;text-align:left}td{white-space:nowrap}"
    "thead th{position:sticky;top:0;background:#fff;vertical-align:bottom}"
    ".yes{background:#d9f2d9}.half{background:#fff2cc}.no{background:#f8d7da}"
)


def _html_row(row: Row) -> str:
    states = [""] * len(HEADERS)
    states[HEADERS.index("seen by")] = "yes" if row.status == "detected" else "no"
    states[HEADERS.index("place")] = {"exactly": "yes", "near": "half", "no": "no", "": ""}[
        row.localised
    ]
    for name, sight in row.alone.items():
        states[HEADERS.index(name)] = "yes" if sight.seen else "no"
    titles = {HEADERS.index("seen by"): row.message, HEADERS.index("place"): told_place(row)}
    cells = zip(cells_of(row), states, strict=True)
    return "<tr>" + "".join(
        f'<td class="{state}" title="{html.escape(titles.get(at, ""))}">{html.escape(text)}</td>'
        for at, (text, state) in enumerate(cells)
    ) + "</tr>"  # fmt: skip


def _misplaced(matrix: Matrix) -> list[Row]:
    return [row for row in matrix.ran if row.localised in ("near", "no")]


def _points(lines: Iterable[str]) -> list[str]:
    return [f"- {line}" for line in lines]
