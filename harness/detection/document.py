"""docs/FAULTS.md: the catalogue as it is, and what the last matrices measured."""

from collections.abc import Iterable, Sequence
from typing import get_args

from harness.detection.matrix import Matrix
from harness.faults.cases import settings_of, variants
from harness.faults.catalogue import BASE, CATALOGUE
from harness.faults.fault import Fault, Kind
from harness.faults.pages import HEADERS, LEGEND, cells_of, summary_lines, table

HEAD = """# Planted faults

Every fault below can be planted by name: in a scenario, `plant: {fault: ulp, step: 3, rank: last}`,
or with `harness faults run ulp`. `harness faults show ulp` prints all of its entry and a scenario
to copy. Classes, places and words are those of `harness/faults`; `F` and a number is a known
failure mode of sharded training under graphs.

    harness faults list -k 'streams or F31'
    harness faults run                                   all that this machine can run, minutes
    harness faults run --elsewhere 7                     each in a cell drawn with the seed 7
    harness faults table RUN... --write docs/FAULTS.md   makes this page, of runs or their shards
"""
MEASURED = "## Measured"
CATALOGUE_HEADERS = ("fault", "class", "source", "what it is", "bites in", "caught as", "points at")


def document(matrices: Sequence[Matrix]) -> str:
    """The whole page; without a matrix, the catalogue alone."""
    lines = [HEAD, *catalogue_section()]
    for matrix in matrices:
        lines += ["", f"{MEASURED} ({matrix.device})", ""]
        lines += [f"- {line}" for line in summary_lines(matrix)]
        lines += ["", LEGEND, "", *table(HEADERS, (cells_of(row) for row in matrix.ran))]
    return "\n".join(lines) + "\n"


def measured_in(text: str) -> str:
    """The part of a page that tells what was measured."""
    start = text.find(f"\n{MEASURED}")
    return "" if start < 0 else text[start:]


def catalogue_section() -> list[str]:
    """Lines of the catalogue: a count, then a table."""
    count = ", ".join(
        f"{sum(fault.kind == kind for fault in CATALOGUE.values())} of {kind}"
        for kind in get_args(Kind)
    )
    headers, rows = catalogue_table(CATALOGUE.values())
    return [f"{len(CATALOGUE)} faults: {count}.", "", *table(headers, rows)]


def catalogue_table(faults: Iterable[Fault]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers, and a row for each fault."""
    return CATALOGUE_HEADERS, [_row(fault) for fault in faults]


def _row(fault: Fault) -> tuple[str, ...]:
    devices = "" if "cpu" in fault.devices else f" ({', '.join(fault.devices)})"
    return (
        fault.name, fault.kind, fault.source, fault.description, bites_in(fault) + devices,
        ", ".join(fault.expects), _pointer(fault),
    )  # fmt: skip


def bites_in(fault: Fault) -> str:
    """Layout, scopes, stressors and whatever else its cell says over `BASE`."""
    settings = settings_of(fault, variants(fault)[-1], taps=False)
    layout = " ".join(f"{axis} {degree}" for axis, degree in settings["parallel"].items())
    other = [
        f"{key} {_short(value)}"
        for key, value in settings.items()
        if key != "parallel" and (key not in BASE or BASE[key] != value)
    ]
    stress = [f"under {'+'.join(fault.cell.stress)}"] if fault.cell.stress else []
    return ", ".join([layout, "+".join(fault.cell.graph) or "eager", *other, *stress])


def _short(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key} {inner}" for key, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _pointer(fault: Fault) -> str:
    if fault.points_at is None:
        return ""
    pointer = fault.points_at
    return ": ".join(filter(None, (pointer.phase, pointer.tensor or pointer.module)))
