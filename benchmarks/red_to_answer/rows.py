"""What a cell took: kept as lines of JSON, told as a table."""

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.campaign.campaign import Localised

CELL_CHARS = 46
STAGES = ("place", "causes", "answer")
_ROW = "{:46} {:32} {:>6} {:>13} {:>13} {:>13} {:>11} {:>8} {:>6}  {}\n"
_HEADS = (
    "cell", "fault", "case", "place", "causes", "answer", "runs", "place is", "cause", "verdict",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reached:
    """When a stage of the search was over."""

    seconds: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one cell took.

    Attributes:
        verdict: outcome and what of the cell; "passed" if the fault does not bite there, "skipped"
            if the machine cannot run it.
        case_s: `harness run` of the cell.
        place, causes, answer: from typing `harness bisect` on; None if that was never known.
        localised: how well the place was.
        is_cause_named: whether one of the causes holds the fault.
        found: where, and why, in the words of the search.
        note: why there is no answer; "" if there is one.
    """

    cell: str
    fault: str
    verdict: str
    case_s: float
    place: Reached | None = None
    causes: Reached | None = None
    answer: Reached | None = None
    localised: Localised = ""
    is_cause_named: bool = False
    found: str = ""
    note: str = ""


def read_rows(path: Path) -> list[Row]:
    """The rows that a file holds; a last line that was cut short counts for nothing."""
    rows = []
    for line in (
        path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else ()
    ):
        if line.endswith("\n"):
            plain = json.loads(line)
            reached = {name: plain[name] and Reached(**plain[name]) for name in STAGES}
            rows.append(Row(**plain | reached))
    return rows


def append(path: Path, row: Row) -> None:
    """Add a row to a file, after what was whole in it."""
    held = path.read_bytes() if path.is_file() else b""
    with path.open("ab") as file:
        file.truncate(held.rfind(b"\n") + 1)
        file.write(json.dumps(asdict(row)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def heads() -> str:
    """The head of the table."""
    return _ROW.format(*_HEADS)


def told(row: Row) -> str:
    """A row for people."""

    def at(stage: Reached | None) -> str:
        return "" if stage is None else f"{stage.seconds:.0f} ({stage.seconds / row.case_s:.1f}x)"

    runs = "/".join(str(s.runs) for s in (row.place, row.causes, row.answer) if s is not None)
    cause = "yes" if row.is_cause_named else "NO" if row.answer is not None else ""
    cell = row.cell if len(row.cell) <= CELL_CHARS else row.cell[: CELL_CHARS - 3] + "..."
    return _ROW.format(
        cell, row.fault, f"{row.case_s:.0f}", at(row.place), at(row.causes), at(row.answer), runs,
        row.localised, cause, row.note or row.verdict,
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> str:
    """Medians over the rows that have an answer, and how many are right."""
    done = [row for row in rows if row.answer is not None]
    if not done:
        return f"0 of {len(rows)} cells have an answer\n"
    medians = []
    for name in STAGES:
        reached = [(getattr(row, name), row.case_s) for row in done if getattr(row, name)]
        if reached:
            seconds = statistics.median(stage.seconds for stage, _ in reached)
            ratio = statistics.median(stage.seconds / case_s for stage, case_s in reached)
            runs = statistics.median(stage.runs for stage, _ in reached)
            medians.append(f"{name} {seconds:.0f} s, {ratio:.1f}x, {runs:.0f} runs")
    exactly = sum(row.localised == "exactly" for row in done)
    named = sum(row.is_cause_named for row in done)
    return (
        f"{len(done)} of {len(rows)} cells have an answer, {exactly} places exactly, "
        f"{named} causes named; medians: {'; '.join(medians)}\n"
    )
