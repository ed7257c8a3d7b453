"""One matrix that is killed again and again, and what must hold of it in the end.

start -> kill somebody at a random moment -> ... -> start with --resume -> ... -> finished
  -> start with --resume -> kill it as it records and reports -> ... -> start with --resume

no finished run is repeated   outcome.json of a run that ended well is the file that it was, and
                              the run's rank 0 never started again after it
nothing is lost               the report, times and places aside, is byte for byte that of a matrix
                              that nobody disturbed; the history has every case as passed
nothing is left behind        what a process had started ends with it; no half-written file stays
"""

import json
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.engine.outcome import num_memory_kills
from harness.history.ledger import History
from reports import build
from tests.chaos import harness
from tests.chaos.ranks import STARTS_FILE
from tests.support.same_report import normalised

REAL_AXES = ("--axis", "parallel=[{dp: 1}, {dp: 2}, {tp: 2}]")
VICTIMS = ("harness", "forkserver", "leader", "rank")
END_TIMEOUT_S = 300.0
SOON_S = 0.3
"""Some kills come this soon: as a harness starts, or two in a row."""
PER_MATRIX, ENDING = 40, 6
"""Kills of one matrix at most; further ones of harnesses that have nothing left to run."""


@dataclass
class Killed:
    """What came of one matrix: how many of each kind were killed, what does not hold."""

    kills: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Matrix:
    """A run folder under `folder`, and the harness that works on it."""

    def __init__(self, folder: Path, *, real: bool = False, seeds: int = 4) -> None:
        folder.mkdir(parents=True)
        self.run, self.real, self.log = folder / "run", real, folder / "harness.log"
        harness.scenario(folder, seeds=[1] if real else list(range(seeds)))
        self._finished: dict[Path, tuple[int, int, int]] = {}

    def start(self, *, reported: bool = False) -> Any:
        """A harness: on a new folder, or to go on with the one there is."""
        begun = (self.run / "manifest.json").exists()
        axes = REAL_AXES if self.real else ("--axis", "parallel=[{dp: 1}, {dp: 2}]")
        where = ["--resume", "run"] if begun else ["chaos.yaml", "--out", "run", *axes]
        if begun and num_memory_kills() is None:
            where += ["--again-killed"]  # the kernel does not say that it was not it
        with self.log.open("ab") as log:
            return harness.start(
                "run", *where, cwd=self.run.parent, real=self.real, stdout=log, stderr=log,
                env={} if reported else {"WITHOUT_REPORTS": "1"}, start_new_session=True,
            )  # fmt: skip

    def to_the_end(self, *, reported: bool = False) -> str:
        """Run it until it is done; what went wrong, "" if nothing did."""
        if (code := self.start(reported=reported).wait(END_TIMEOUT_S)) == 0:
            return ""
        return f"exit code {code}: {self.log.read_text(errors='replace')[-2000:]}"

    def report(self, *, made: bool = False) -> str:
        """The report without times and places: a new one, or the one that is there."""
        if not made:
            build(self.run)
        return normalised(self.run / "report" / "report.json", self.run)

    def repeated(self) -> list[str]:
        """Take note of runs that have ended well; which of those noted before are not as before."""
        now: dict[Path, tuple[int, int, int]] = {}
        with suppress(FileNotFoundError):
            starts = Counter((self.run / STARTS_FILE).read_text().split())
        for path in self.run.glob("runs/*/outcome.json"):
            if ".attempt" in path.parent.name or json.loads(path.read_bytes())["what"]:
                continue
            facts = path.stat()
            begun = 0 if self.real else starts[path.parent.name]
            now[path] = (facts.st_ino, facts.st_mtime_ns, begun)
        changed = [str(p) for p, facts in self._finished.items() if now.get(p) != facts]
        self._finished |= now
        return [f"a finished run was made again: {path}" for path in changed]

    def left(self) -> Iterator[str]:
        """Half-written files, and cases that the history does not have as passed in the end."""
        for path in self.run.rglob(".*.tmp"):
            if "runs" not in path.parts:
                yield f"left behind: {path}"
        history = History.open(self.run.parent / "history")
        (entry,) = history.entries()
        last = {case.case_id: case.outcome for case in entry.cases}
        yield from (f"in the history: {case}" for case in last if last[case] != "passed")
        if len(last) != entry.num_cases:
            yield f"in the history {entry.num_cases - len(last)} cases are missing"

    def is_done(self) -> bool:
        """Whether every case has passed: nothing is left to be killed."""
        with suppress(FileNotFoundError):
            cases = json.loads((self.run / "cases.json").read_bytes())["cases"]
            places = [self.run / "cases" / case["id"] / "verdict.json" for case in cases]
            return all(json.loads(place.read_bytes())["outcome"] == "passed" for place in places)
        return False


def victim(process: Any, kind: str, rng: random.Random, longest_s: float) -> psutil.Process | None:
    """A process of a kind at a random moment; None if the harness ends before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(rng.uniform(0.0, longest_s if kind == "harness" else longest_s / 4))
    while process.poll() is None:
        with suppress(psutil.Error):
            level = [psutil.Process(process.pid)]
            for _ in range(VICTIMS.index(kind)):
                level = [child for parent in level for child in parent.children()]
            if level:
                return rng.choice(level)
        time.sleep(0.002)
    return None


def kill(target: psutil.Process, kind: str, found: Killed) -> None:
    """SIGKILL a process; whatever it had started ends within seconds."""
    with suppress(psutil.Error):
        below = target.children(recursive=True)
        target.send_signal(signal.SIGKILL)
        found.kills[kind] += 1
        if psutil.wait_procs(below, timeout=30)[1]:
            found.problems.append(f"processes were left behind by a killed {kind}")


def torment(
    matrix: Matrix, kills: int, rng: random.Random, *, longest_s: float, expected: str
) -> Killed:
    """Kill somebody `kills` times, let it end, and see what holds.

    Args:
        matrix: a fresh one.
        kills: how often.
        rng: decides when and whom.
        longest_s: a kill comes within this time of the one before, or of the harness' start.
        expected: report of a matrix that nobody disturbed.
    """
    found, process, started = Killed(), None, 0
    while found.kills.total() < kills:
        if process is None or process.poll() is not None:
            process, started = matrix.start(), started + 1
        kind = rng.choice(VICTIMS)
        within_s = min(SOON_S, longest_s) if rng.random() < 0.2 else longest_s
        target = victim(process, kind, rng, within_s)
        if target is not None:
            kill(target, kind, found)
            if kind == "harness":
                process.wait()
        found.problems += matrix.repeated()
        if target is None:
            if process.returncode in (3, 4) or started > 4 * kills + 20:
                found.problems.append(f"the harness ended with exit code {process.returncode}")
                break
            if matrix.is_done():
                break
    if process is not None and process.poll() is None:
        process.wait(END_TIMEOUT_S)
    return _compared(matrix, found, expected)


def torment_the_end(matrix: Matrix, kills: int, rng: random.Random, expected: str) -> Killed:
    """Kill harnesses that have no run left to make, as they judge again, record and report."""
    found, began_s = Killed(), time.monotonic()
    if why := matrix.to_the_end(reported=True):
        found.problems.append(why)
    took_s = time.monotonic() - began_s
    for _ in range(kills):
        found.problems += matrix.repeated()
        process = matrix.start(reported=True)
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.0, took_s))
        if process.poll() is None:
            kill(psutil.Process(process.pid), "ending", found)
        process.wait()
    return _compared(matrix, found, expected, reported=True)


def _compared(matrix: Matrix, found: Killed, expected: str, *, reported: bool = False) -> Killed:
    """Let it end, and compare its report: that which it made itself, or a new one."""
    found.problems += matrix.repeated()
    if why := matrix.to_the_end(reported=reported):
        found.problems.append(why)
        return found
    found.problems += [*matrix.repeated(), *matrix.left()]
    if matrix.report(made=reported or matrix.real) != expected:
        found.problems.append("the report is not that of an undisturbed matrix")
    return found


def kill_runs(root: Path, seed: int, kills: int, real: int = 0) -> Iterator[str]:
    """Kill as often as asked, over as many matrices as it takes; what does not hold.

    Args:
        root: an empty folder.
        seed: decides when and whom.
        kills: how often.
        real: so many more over the real trainer.
    """
    for is_real, wanted in ((False, kills), (True, real)):
        whole, done, number = Matrix(root / f"whole-{is_real}", real=is_real), 0, 0
        if wanted and (why := whole.to_the_end(reported=True)):
            yield why
            return
        expected = whole.report() if wanted else ""
        while done < wanted:
            rng = random.Random(f"{seed}/{is_real}/{number}")
            matrix = Matrix(root / f"{number:03}-{is_real}", real=is_real)
            longest_s, most = 16.0 if is_real else 2.0, min(wanted - done, PER_MATRIX)
            found = torment(matrix, most, rng, longest_s=longest_s, expected=expected)
            left = min(ENDING, wanted - done - found.kills.total())
            if not found.problems and left > 0:
                ends = torment_the_end(matrix, left, rng, expected)
                found = Killed(found.kills + ends.kills, ends.problems)
            number, done = number + 1, done + found.kills.total()
            print(f"  matrix {number}: {dict(found.kills)}; {done}/{wanted}", flush=True)  # noqa: T201
            yield from (f"{matrix.run}: {why}" for why in found.problems)
            if not found.problems:
                shutil.rmtree(matrix.run.parent)
