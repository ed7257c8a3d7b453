"""The matrix as text for people: lines, Markdown, an HTML page by itself, and docs/FAULTS.md."""

import html
from collections.abc import Iterable, Sequence
from typing import get_args

from harness.campaign.campaign import CONFIDENCE, Matrix, Row
from harness.campaign.cases import settings_of, variants
from harness.campaign.scoring import PLAIN, STRESSED
from harness.errors import one_line
from harness.faults.catalogue import BASE, CATALOGUE
from harness.faults.fault import Fault, Kind

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
HEAD = """# Planted faults

Every fault below can be planted by name: in a scenario, `plant: {fault: ulp, step: 3, rank: last}`,
or with `harness faults run ulp`. `harness faults show ulp` prints all of its entry and a scenario
to copy. Classes, places and words are those of `harness/faults`; `F` and a number is a known
failure mode of sharded training under graphs.

    harness faults list -k 'streams or F31'
    harness faults run                                   all that this machine can run, minutes
    harness faults run --elsewhere 7                     each in a setup drawn with the seed 7
    harness faults table RUN... --write docs/FAULTS.md   makes this page, of runs or their shards
"""
MEASURED = "## Measured"
CATALOGUE_HEADERS = ("fault", "class", "source", "what it is", "shows in", "caught as", "points at")

# ---- a row


def fields_of(row: Row) -> tuple[str, ...]:
    """A row's fields, as `HEADERS`."""
    alone = [str(row.alone[name]) if name in row.alone else "" for name in COLUMNS]
    return (
        row.fault, row.kind, row.source, seen_by(row), "+".join(row.under), steps_of(row),
        row.localised, *alone, str(row.runs), f"{row.seconds:.1f}",
    )  # fmt: skip


def seen_by(row: Row) -> str:
    """`state: diverged`; in capitals what should not be."""
    if row.status != "detected":
        return row.status.upper()
    return row.what if row.check in ("", "records", row.what) else f"{row.check}: {row.what}"


def steps_of(row: Row) -> str:
    """`3`, `3 +1`: planted, and so many steps later seen."""
    if row.planted_step is None:
        return ""
    late = row.later
    return f"{row.planted_step}" + (f" +{late}" if late else "") + (" ?" if late is None else "")


def found_place(row: Row) -> str:
    """What the bisector said, in a line."""
    found = row.location
    if found is None:
        return ""
    place = _line(
        step=found.step, phase=found.phase, module=found.module, tensor=found.tensor,
        quantity=found.quantity, rank=found.rank,
    )  # fmt: skip
    return place or "; ".join(found.unknown)


def due_place(row: Row) -> str:
    """Where it is, in a line."""
    fault = CATALOGUE.get(row.fault)
    if fault is None:
        return ""
    pointer = fault.points_at
    step = None if row.planted_step is None else row.planted_step + pointer.later
    return _line(
        step=step, phase=pointer.phase, module=pointer.module, tensor=pointer.tensor,
        rank=row.planted_rank,
    )  # fmt: skip


def _line(**parts: object) -> str:
    return ", ".join(f"{key} {value}" for key, value in parts.items() if value not in (None, ""))


# ---- a matrix


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
        f"place {row.localised}: {row.fault}: expected {due_place(row)}; got {found_place(row)}"
        for row in matrix.ran
        if row.localised in ("near", "no")
    ]
    left = [row for row in matrix.rows if row not in matrix.ran]
    lines += [f"not run: {row.fault}: {one_line(row.reason)}" for row in left]
    if matrix.skipped:
        lines.append(f"clean cases that cannot be run here: {matrix.skipped}")
    return lines


def markdown(matrix: Matrix) -> str:
    """The page of a run folder."""
    return "\n".join([f"# Detection matrix ({matrix.device})", "", *_measured(matrix)]) + "\n"


def _measured(matrix: Matrix) -> list[str]:
    points = [f"- {line}" for line in summary_lines(matrix)]
    return [*points, "", LEGEND, "", *table(HEADERS, map(fields_of, matrix.ran))]


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    shown = ([text.replace("|", "\\|") for text in row] for row in rows)
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
    states = {name: "yes" if sight.seen else "no" for name, sight in row.alone.items()}
    states["seen by"] = "yes" if row.status == "detected" else "no"
    states["place"] = {"exactly": "yes", "near": "half", "no": "no", "": ""}[row.localised]
    titles = {"seen by": row.message, "place": found_place(row)}
    fields = zip(HEADERS, fields_of(row), strict=True)
    return "<tr>" + "".join(
        f'<td class="{states.get(name, "")}" title="{html.escape(titles.get(name, ""))}">'
        f"{html.escape(text)}</td>"
        for name, text in fields
    ) + "</tr>"  # fmt: skip


# ---- docs/FAULTS.md: the catalogue as it is, and what the last matrices measured


def document(matrices: Sequence[Matrix]) -> str:
    """The whole page; without a matrix, the catalogue alone."""
    kinds = [fault.kind for fault in CATALOGUE.values()]
    count = ", ".join(f"{kinds.count(kind)} of {kind}" for kind in get_args(Kind))
    lines = [HEAD, f"{len(CATALOGUE)} faults: {count}.", ""]
    lines += table(CATALOGUE_HEADERS, map(entry_of, CATALOGUE.values()))
    for matrix in matrices:
        lines += ["", f"{MEASURED} ({matrix.device})", "", *_measured(matrix)]
    return "\n".join(lines) + "\n"


def measured_in(text: str) -> str:
    """The part of a page that says what was measured."""
    start = text.find(f"\n{MEASURED}")
    return "" if start < 0 else text[start:]


def entry_of(fault: Fault) -> tuple[str, ...]:
    """A fault's fields, as `CATALOGUE_HEADERS`."""
    devices = "" if "cpu" in fault.devices else f" ({', '.join(fault.devices)})"
    pointer = fault.points_at
    place = ": ".join(filter(None, (pointer.phase, pointer.tensor or pointer.module)))
    return (
        fault.name, fault.kind, fault.source, fault.description, _shows_in(fault) + devices,
        ", ".join(fault.expects), place,
    )  # fmt: skip


def _shows_in(fault: Fault) -> str:
    """Layout, scopes, stressors and whatever else its setup says over `BASE`."""
    settings, setup = settings_of(fault, variants(fault)[-1], taps=False), fault.setup
    other = [
        f"{key} {_short(value)}"
        for key, value in settings.items()
        if key != "parallel" and (key not in BASE or BASE[key] != value)
    ]
    stress = [f"under {'+'.join(setup.stress)}"] if setup.stress else []
    graph = "+".join(setup.graph) or "eager"
    return ", ".join([_short(settings["parallel"]), graph, *other, *stress])


def _short(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {inner}" for key, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
