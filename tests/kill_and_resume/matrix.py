"""One matrix that is killed again and again, and what must hold of it in the end.

start -> kill somebody at a random moment -> ... -> start with --resume -> ... -> finished
  -> start with --resume -> kill it as it records and reports -> ... -> start with --resume

no finished run is repeated   outcome.json of a run that ended well is the file that it was, and
                              the run's rank 0 never started again after it
nothing is lost               the reports, times and places aside, are byte for byte those of a
                              matrix that nobody disturbed; the history has every case as passed
nothing is left behind        what a process had started ends with it; no half-written file stays
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from harness.engine.outcome import num_memory_kills
from harness.history import History
from reports import build
from tests.kill_and_resume.ranks import STARTS_FILE
from tests.support.same_report import normalised

ROOT = Path(__file__).parents[2]
SCENARIO = {
    "name": "killed",
    "why": "A matrix that is killed and taken up again.",
    "base": {"steps": 10, "microbatches": 1},
    "axes": {
        "seed": [1, 2, 3, 4],
        "parallel": [{"dp": 1}, {"dp": 2}],
        "graph": ["eager", ["attn"], ["full_iteration"]],
    },
    "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
    "checks": {"loss": {}, "state": {}, "peak_memory": {"max_ratio": 2.0}},
    "launch": {"device": "cpu", "timeout_s": 120, "slots": 4},
}
REAL_AXES = {
    "parallel": [{"dp": 1}, {"dp": 2}, {"tp": 2}],
    "graph": ["eager", ["attn"], ["full_iteration"]],
}
REPORTS = ("report.json",)
VICTIMS = ("harness", "forkserver", "leader", "rank")
END_TIMEOUT_S = 300.0
SOON_S = 0.3
"""Some kills come this soon: as a harness starts, or two in a row."""
HISTORY = "history.sqlite"


@dataclass
class Killed:
    """What came of one matrix.

    Attributes:
        kills: how many of each kind were killed.
        harnesses: how many were started.
        problems: what does not hold, in words.
    """

    kills: Counter[str] = field(default_factory=Counter)
    harnesses: int = 0
    problems: list[str] = field(default_factory=list)


class Matrix:
    """A run folder under `folder`, and the harness that works on it."""

    def __init__(self, folder: Path, *, real: bool) -> None:
        folder.mkdir(parents=True)
        self.run, self.real = folder / "run", real
        axes = {"axes": REAL_AXES} if real else {}
        (folder / "killed.yaml").write_text(json.dumps(SCENARIO | axes))
        self.log = folder / "harness.log"
        self._finished: dict[Path, tuple[int, int, int]] = {}

    def start(self, *, reported: bool = False) -> "subprocess.Popen[bytes]":
        """A harness: on a new folder, or to go on with the one there is."""
        begun = (self.run / "manifest.json").exists()
        where = ["--resume", "run"] if begun else ["killed.yaml", "--out", "run"]
        if begun and num_memory_kills() is None:
            where += ["--again-killed"]  # the kernel does not say that it was not it
        module = "harness" if self.real else "tests.kill_and_resume.stubbed"
        more = {"PYTHONPATH": str(ROOT)} | ({"KILLED_WITH_REPORTS": "1"} if reported else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", module, "run", *where],
                cwd=self.run.parent, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | more, start_new_session=True,
            )  # fmt: skip

    def to_the_end(self, *, reported: bool = False) -> str:
        """Run it until it is done; what went wrong, "" if nothing did."""
        code = self.start(reported=reported).wait(END_TIMEOUT_S)
        if code == 0:
            return ""
        return f"exit code {code}: {self.log.read_text(errors='replace')[-2000:]}"

    def reports(self, *, made: bool = False) -> dict[str, str]:
        """All reports without times and places: new ones, or those that are there."""
        if not made:
            build(self.run)
        return {name: normalised(self.run / "report" / name, self.run) for name in REPORTS}

    def note_finished(self) -> list[str]:
        """Take note of runs that have ended well; which of those noted before are not as before."""
        now: dict[Path, tuple[int, int, int]] = {}
        for path in self.run.glob("runs/*/outcome.json"):
            if ".attempt" in path.parent.name or json.loads(path.read_bytes())["what"]:
                continue
            facts = path.stat()
            starts = self._starts()[path.parent.name] if not self.real else 0
            now[path] = (facts.st_ino, facts.st_mtime_ns, starts)
        changed = [str(p) for p, facts in self._finished.items() if now.get(p) != facts]
        self._finished |= now
        return [f"a finished run was made again: {path}" for path in changed]

    def what_is_left(self) -> list[str]:
        """Half-written files, and cases that the history does not have as passed in the end."""
        half = [str(path) for path in self.run.rglob(".*.tmp") if "runs" not in path.parts]
        with History.open(self.run.parent / HISTORY) as history:
            (entry,) = history.entries()
            last = {case.case_id: case.outcome for case in entry.cases}
        wrong = [case for case, outcome in last.items() if outcome != "passed"]
        if len(last) != entry.num_cases:
            wrong.append(f"{entry.num_cases - len(last)} cases are missing")
        return [
            *(f"left behind: {path}" for path in half),
            *(f"in the history: {case}" for case in wrong),
        ]

    def _starts(self) -> Counter[str]:
        with suppress(FileNotFoundError):
            return Counter((self.run / STARTS_FILE).read_text().split())
        return Counter()


def victims(harness: "subprocess.Popen[bytes]", kind: str) -> list[psutil.Process]:
    """Processes of a kind that there are now."""
    with suppress(psutil.Error):
        level = [psutil.Process(harness.pid)]
        for _ in range(VICTIMS.index(kind)):
            level = [child for parent in level for child in _children(parent)]
        return level
    return []


def wait_for_victim(
    harness: "subprocess.Popen[bytes]", kind: str, rng: random.Random, longest_s: float
) -> psutil.Process | None:
    """One of a kind at a random moment; None if the harness ends before."""
    with suppress(subprocess.TimeoutExpired):
        harness.wait(rng.uniform(0.0, longest_s if kind == "harness" else longest_s / 4))
    while harness.poll() is None:
        if found := victims(harness, kind):
            return rng.choice(found)
        time.sleep(0.002)
    return None


def _children(parent: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return list(parent.children())
    return []


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them end by themselves within seconds, as the death of a parent asks."""
    return not psutil.wait_procs(processes, timeout=30)[1]


def torment(
    matrix: Matrix, kills: int, rng: random.Random, *, longest_s: float, expected: dict[str, str]
) -> Killed:
    """Kill somebody `kills` times, let it end, and see what holds.

    Args:
        matrix: a fresh one.
        kills: how often.
        rng: decides when and whom.
        longest_s: a kill comes within this time of the one before, or of the harness' start.
        expected: reports of a matrix that nobody disturbed.
    """
    found = Killed()
    harness: subprocess.Popen[bytes] | None = None
    while sum(found.kills.values()) < kills:
        if harness is None or harness.poll() is not None:
            harness = matrix.start()
            found.harnesses += 1
        kind = rng.choice(VICTIMS)
        within_s = min(SOON_S, longest_s) if rng.random() < 0.2 else longest_s
        target = wait_for_victim(harness, kind, rng, within_s)
        if target is None:
            found.problems += matrix.note_finished()
            if harness.returncode in (3, 4) or found.harnesses > 4 * kills + 20:
                found.problems.append(f"the harness ended with exit code {harness.returncode}")
                break
            if _is_done(matrix):
                break
            continue
        if kill(target, kind, found):
            found.problems.append(f"processes were left behind by a killed {kind}")
        if kind == "harness":
            harness.wait()
        found.problems += matrix.note_finished()
    if harness is not None and harness.poll() is None:
        harness.wait(END_TIMEOUT_S)
    found.problems += matrix.note_finished()
    return _compared(matrix, found, expected)


def kill(target: psutil.Process, kind: str, found: Killed) -> bool:
    """SIGKILL a process; whether anything that it had started is there after seconds."""
    with suppress(psutil.Error):
        below = target.children(recursive=True)
        target.send_signal(signal.SIGKILL)
        found.kills[kind] += 1
        return not gone(below)
    return False


def torment_the_end(
    matrix: Matrix, kills: int, rng: random.Random, *, expected: dict[str, str]
) -> Killed:
    """Kill harnesses that have no run left to make, as they judge again, record and report.

    Args:
        matrix: one whose runs are finished, each of which has passed.
        kills: how often.
        rng: decides when.
        expected: reports of a matrix that nobody disturbed.
    """
    found = Killed()
    began = time.monotonic()
    if why := matrix.to_the_end(reported=True):
        found.problems.append(why)
    took_s = time.monotonic() - began
    found.problems += matrix.note_finished()
    for _ in range(kills):
        harness = matrix.start(reported=True)
        found.harnesses += 1
        with suppress(subprocess.TimeoutExpired):
            harness.wait(rng.uniform(0.0, took_s))
        if harness.poll() is None and kill(psutil.Process(harness.pid), "ending", found):
            found.problems.append("processes were left behind by an ending harness")
        harness.wait()
        found.problems += matrix.note_finished()
    return _compared(matrix, found, expected, reported=True)


def _compared(
    matrix: Matrix, found: Killed, expected: dict[str, str], *, reported: bool = False
) -> Killed:
    """Let it end, and compare its reports: those that it made itself, or new ones."""
    if why := matrix.to_the_end(reported=reported):
        return Killed(found.kills, found.harnesses, [*found.problems, why])
    found.problems += [*matrix.note_finished(), *matrix.what_is_left()]
    for name, text in matrix.reports(made=reported or matrix.real).items():
        if text != expected[name]:
            found.problems.append(f"{name} is not that of an undisturbed matrix")
    return found


def _is_done(matrix: Matrix) -> bool:
    """Whether every run of the matrix has ended well: nothing is left to be killed."""
    try:
        cases = json.loads((matrix.run / "cases.json").read_bytes())["cases"]
        places = [matrix.run / "cases" / case["id"] / "verdict.json" for case in cases]
        return all(json.loads(place.read_bytes())["outcome"] == "passed" for place in places)
    except FileNotFoundError:
        return False
