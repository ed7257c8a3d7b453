"""The table of what sees which fault, and the file that keeps it."""

import re
from pathlib import Path

from tests.graph_faults.catalogue import FAULTS, GraphFault
from tests.graph_faults.compare import (
    NOT_SEEN,
    PLAIN_ASPECTS,
    STRESS,
    Legs,
    cells,
    false_alarms,
    said,
)

DOCUMENT = Path(__file__).with_name("measured.txt")
BEGIN = {"cpu": "<!-- table -->", "cuda": "<!-- table on GPUs -->"}
END = "<!-- end of the table -->"
HEADERS = ("fault", "what is wrong", "in", "loss, 5 decimals", "loss bits", "last weights",
           "digests", "ledger", *STRESS)  # fmt: skip
FIRST_CELL = 3
Row = dict[str, str]


def row_of(fault: GraphFault, legs: Legs) -> Row:
    """The fault's cells by column; those of `plain` by aspect."""
    row = {"fault": fault.name, "what is wrong": fault.what, "in": f"`{fault.program}`"}
    for column in legs.planted:
        if column == "plain":
            names = HEADERS[FIRST_CELL : FIRST_CELL + len(PLAIN_ASPECTS)]
            row |= dict(zip(names, cells(legs, column).split(" | "), strict=True))
        else:
            row[column] = cells(legs, column)
    return row


def render(results: list[tuple[GraphFault, Legs]]) -> str:
    """The table, the messages, and how often the clean programs were wronged."""
    rows = [row_of(fault, legs) for fault, legs in results]
    headers = [name for name in HEADERS if any(name in row for row in rows)]
    lines = ["| " + " | ".join(headers) + " |", "|" + " --- |" * len(headers)]
    lines += ["| " + " | ".join(row[name] for name in headers) + " |" for row in rows]
    lines += ["", "What is said:", "", "| fault | by | first words |", "| --- | --- | --- |"]
    for fault, legs in results:
        lines += [f"| {fault.name} | {by} | {text} |" for by, text in said(legs)]
    clean = sum(len(legs.clean) for _, legs in results)
    wrong = [f"{fault.name} {c}" for fault, legs in results for c in false_alarms(legs)]
    alarms = ", ".join(wrong) or "none"
    missed = [row["fault"] for row in rows if row.get(HEADERS[FIRST_CELL]) == NOT_SEEN]
    harmless = [
        row["fault"]
        for row in rows
        if all(set(row.get(name, NOT_SEEN)) <= set("· /") for name in HEADERS[FIRST_CELL:])
    ]
    lines += [
        "",
        f"Faults: {len(rows)}. The loss at five decimals misses {len(missed)}: "
        f"{', '.join(missed) or 'none'}. Harmless here, nothing to see: "
        f"{', '.join(harmless) or 'none'}.",
        *[f"{fault.name} {legs.lost}." for fault, legs in results if legs.lost],
        "",
        f"Clean runs of the same programs: {clean}. False alarms: {alarms}.",
    ]
    return "\n".join(lines)


def document_rows(device: str = "cpu") -> dict[str, Row]:
    """The rows of the table of a kind of device in the document, by fault."""
    inside = re.search(f"{BEGIN[device]}(.*?){END}", DOCUMENT.read_text(), re.DOTALL)
    assert inside is not None
    lines = inside[1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("| fault |"))
    headers = _cells(lines[start])
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        row = dict(zip(headers, _cells(line), strict=True))
        found[row["fault"]] = row
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line[1:-1].split(" | ")]


def is_expected(row: Row, device: str) -> bool:
    """Whether the document says of the fault what the row says."""
    documented = document_rows(device).get(row["fault"], {})
    return row == {name: documented.get(name) for name in row}


def write(table: str, device: str) -> None:
    """Put the table of a kind of device, `cpu` or `cuda`, into the document."""
    text = DOCUMENT.read_text()
    start = text.index(BEGIN[device]) + len(BEGIN[device])
    stop = text.index(END, start)
    DOCUMENT.write_text(f"{text[:start]}\n\n{table}\n\n{text[stop:]}")


def names() -> list[str]:
    """Of all faults."""
    return [fault.name for fault in FAULTS]
