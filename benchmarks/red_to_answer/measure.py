"""Make a cell red, bisect it, and note when each stage of the search was over."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.red_to_answer.cells import SMOKE, Planted, exactly
from benchmarks.red_to_answer.rows import Reached, Row
from harness.bisect.render import UNKNOWN, Findings, first_wrong, read_findings
from harness.campaign.campaign import Localised, localised
from harness.faults.catalogue import CATALOGUE
from harness.records import CaseSpec, ExitCode
from harness.store import SEARCH_FILE
from harness.store.folder import find_answer

ROOT = Path(__file__).parents[2]
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and with what cells are run.

    Attributes:
        out: a folder a cell comes here.
        room: options of slots and GPUs.
    """

    out: Path
    room: Sequence[str]
    device: str

    def measure(self, cell: str, planted: Planted) -> Row:
        """Make the cell red and bisect it."""
        scenario, _, case = cell.partition(".")
        folder = self.out / cell
        began_s = time.monotonic()
        made = subprocess.run(
            self._command(
                "run", f"{SMOKE}::{scenario}", "-k", exactly(case),
                "--set", planted.as_setting(), "--device", self.device,
                "--no-history", "--out", str(folder / "run"),
            ),
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        case_s = round(time.monotonic() - began_s, 2)
        row = Row(cell=cell, fault=planted.fault, verdict="none", case_s=case_s)
        if made.returncode not in (ExitCode.PASSED, ExitCode.FAILED, ExitCode.NO_VERDICT):
            told = (made.stderr or made.stdout).strip().splitlines()[-1:] or [""]
            skipped = "skipped" if made.returncode == ExitCode.NOTHING_RAN else "none"
            note = f"not run: exit code {made.returncode}; {told[0]}"
            return replace(row, verdict=skipped, note=note)
        place, spec, verdict, _ = find_answer(str(folder / "run" / "cases" / case), None)
        if verdict is None or place is None:
            return replace(row, note="not run: no verdict")
        row = replace(row, verdict=f"{verdict.outcome} {verdict.what}".strip())
        if made.returncode == ExitCode.PASSED:
            return replace(row, note=f"not red: {verdict.message or 'the fault does not bite'}")
        row, findings = self._bisect(row, place, folder)
        return row if findings is None else _judged(row, planted, spec, findings)

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "harness", *arguments, *self.room]

    def _bisect(self, row: Row, case: Path, folder: Path) -> tuple[Row, Findings | None]:
        """The row with its times, and the findings if the search came to its end."""
        out = folder / "bisect"
        command = self._command(
            "bisect", str(case), "--out", str(out), "--repro", str(folder / "repro")
        )
        findings: Findings | None = None
        began_s, seen, has_ended = time.monotonic(), 0, False
        with (folder / "bisect.log").open("w", encoding="utf-8") as log:
            search = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            while not has_ended:
                time.sleep(LOOK_EVERY_S)
                has_ended = search.poll() is not None
                findings, seen = _look(out, seen, findings)
                if findings is not None:
                    now = Reached(
                        seconds=round(time.monotonic() - began_s, 2), runs=findings.num_runs
                    )
                    row = replace(
                        row,
                        place=row.place or (now if findings.place is not None else None),
                        causes=row.causes or (now if findings.causes is not None else None),
                        answer=now if has_ended else None,
                    )
        if findings is not None and search.returncode == ExitCode.FAILED:
            return row, findings
        note = f"no answer: exit code {search.returncode}, see {folder / 'bisect.log'}"
        return replace(row, answer=None, note=note), None


def _look(out: Path, seen: int, last: Findings | None) -> tuple[Findings | None, int]:
    """What the search has written so far, and when; what was seen last if it is the same."""
    try:
        written = (out / SEARCH_FILE).stat().st_mtime_ns
    except FileNotFoundError:
        return last, seen
    return (last, seen) if written == seen else (read_findings(out) or last, written)


def _judged(row: Row, planted: Planted, spec: CaseSpec, findings: Findings) -> Row:
    """Hold the answer against what was planted."""
    fault, place = CATALOGUE[planted.fault], findings.place
    how: Localised = ""
    if place is not None:
        rank = planted.rank % spec.candidate.world_size
        how = localised(
            place,
            fault.points_at,
            step=planted.step if "step" in fault.takes else None,
            rank=rank if "rank" in fault.takes and not fault.everywhere else None,
        )
    causes = findings.causes.causes if findings.causes is not None else ()
    changes = [change for cause in causes for change in cause.changes]
    found = [str(place or UNKNOWN), first_wrong(place), "; ".join(map(str, causes)) or "no cause"]
    return replace(
        row, localised=how, found=" | ".join(found),
        is_cause_named=any(f"plant: {planted.fault}" in change for change in changes),
    )  # fmt: skip
