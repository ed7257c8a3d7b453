"""Run folders damaged at random, and every command that reads one.

    good folder -> copy -> one to three strokes -> show, report, check, merge, compare,
                   history --add, rerun, run --resume, report

No command ends in a traceback, with exit code 3 or never; none prints or stores a pass of a case
whose evidence (records and outcomes of its runs) is not as it was made. What is as it was made may
pass: a verdict that was lost is given again.
"""

import contextlib
import json
import random
import re
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from unittest import mock
from xml.etree import ElementTree as ET

import reports
from harness.records import ExitCode
from harness.store import LEGS
from reports import html
from tests.damaged_folders import good, strokes
from tests.damaged_folders.corpus import copy
from tests.damaged_folders.evidence import evidence
from tests.damaged_folders.kinds import CASE
from tests.unit.harness.fake_engine import FakeEngine

LIMIT_S = 60
DRAWN_EVERY = 10
CASES = (CASE, "dp2-full_iteration")
RETURNS = frozenset(ExitCode) - {ExitCode.INTERNAL, ExitCode.INTERRUPTED}
CHECKED = ("manifest.json", "cases.json", "scenario.yaml", "case.json", "verdict.json", "spec.json")


class HungError(Exception):
    """A command did not return."""


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Nothing waits for ever: not for a pipe, and not for the end of a device."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Bases:
    """Good folders by kind, each with the evidence of its cases."""

    def __init__(self, root: Path) -> None:
        """Make them."""
        self.root = root
        self.runs = {kind: good.make(root / kind, kind) for kind in good.GOOD}
        other = root / "other"
        other.mkdir()
        text = good.SCENARIO.replace("base: {steps: 4}", "base: {steps: 4, seed: 77}")
        (other / "s.yaml").write_text(text)
        out = str(other / "run")
        good.harness("run", str(other / "s.yaml"), "--out", out, engine=FakeEngine())
        self.keys = {case: self._keys_of(case) for case in CASES}
        self.evidence = {
            kind: {key: evidence(run / "runs" / key) for keys in self.keys.values() for key in keys}
            for kind, run in self.runs.items()
        }

    def _keys_of(self, case: str) -> list[str]:
        verdict = (self.runs["passed"] / "cases" / case / "verdict.json").read_bytes()
        return [json.loads(verdict)["runs"][leg] for leg in LEGS]

    def may_pass(self, kind: str, folder: Path, case: str) -> bool:
        """Whether a case passed at first, and all its evidence is as it was."""
        if kind != "passed" and case == CASE:
            return False
        known = self.evidence[kind]
        return all(
            found == known[key]
            for number, key in enumerate(self.keys[case])
            for found in [evidence(_place(folder, case, key, number))]
        )


def _place(folder: Path, case: str, key: str, number: int) -> Path:
    run = folder / "runs" / key
    return run if run.is_dir() else folder / "cases" / case / LEGS[number]


class Trial:
    """One damaged folder, and what is wrong with how it is taken."""

    def __init__(self, bases: Bases, seed: int, number: int) -> None:
        """Damage a copy of a good folder."""
        self.bases = bases
        self.rng = random.Random(f"{seed}/{number}")
        self.kind = self.rng.choice(("passed", "passed", "passed", *good.GOOD))
        self.name = f"seed {seed} number {number} ({self.kind})"
        self.root = Path(tempfile.mkdtemp(prefix="trial-", dir=bases.root))
        # What lies beside it is where strokes look for files of another run.
        (self.root / "other").symlink_to(bases.root / "other")
        self.folder = copy(bases.runs[self.kind], self.root / "run")
        self.strokes: list[str] = []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            name = self.rng.choice(sorted(strokes.STROKES))
            # A stroke before it may have left nothing that this one could be done to.
            with contextlib.suppress(IndexError, FileNotFoundError, NotADirectoryError):
                path = strokes.STROKES[name](self.folder, self.rng)
                self.strokes.append(f"{name} {path.relative_to(self.folder)}")
        self.damaged = self._is_damaged()
        self.wrong: list[str] = []
        # Pictures take nine tenths of a report's time.
        self.num_drawn = int(number % DRAWN_EVERY == 0)

    def _is_damaged(self) -> bool:
        """Whether any file that has a checksum, or a place in the plan, says something else."""
        original = self.bases.runs[self.kind]
        for path in strokes.files(original):
            found = self.folder / path.relative_to(original)
            if path.name in CHECKED and _content(found) != _content(path):
                return True
        return not all(self._as_made(case) for case in CASES)

    def _as_made(self, case: str) -> bool:
        known = self.bases.evidence[self.kind]
        keys = self.bases.keys[case]
        return all(
            evidence(_place(self.folder, case, k, n)) == known[k] for n, k in enumerate(keys)
        )

    def run(self) -> list[str]:
        """Try every command; what went wrong, in words."""
        try:
            for step in (self._read, self._reported, self._put_together, self._made_again):
                step()
        except HungError:
            self.wrong.append("hangs")
        finally:
            shutil.rmtree(self.root, ignore_errors=True)
        return [f"{self.name}: {'; '.join(self.strokes)}: {why}" for why in self.wrong]

    def _call(
        self, *args: str, engine: FakeEngine | None = None, reported: bool = True
    ) -> tuple[int, str]:
        try:
            with limited(LIMIT_S), mock.patch.object(html, "MAX_DRAWN_CASES", self.num_drawn):
                code, out, err = good.harness(
                    *args, engine=engine, build=build if reported else None
                )
        except HungError:
            self.wrong.append(f"{args[0]} does not return")
            raise
        if code not in RETURNS or "Traceback" in out + err:
            self.wrong.append(f"{' '.join(args)}: exit code {code}: {(out + err).strip()[-400:]}")
        if code and not err.strip() and not out.strip():
            self.wrong.append(f"{args[0]}: exit code {code} and not a word")
        return code, out

    def _expect(self, case: str, outcome: object, where: str) -> None:
        if outcome == "passed" and not self.bases.may_pass(self.kind, self.folder, case):
            self.wrong.append(f"{where}: {case} is passed")

    def _read(self) -> None:
        for case in CASES:
            code, out = self._call("show", case, str(self.folder), "--json")
            if code == ExitCode.PASSED:
                self._expect(case, (json.loads(out)["verdict"] or {}).get("outcome"), "show")
        self._call("show", CASE, str(self.folder))
        self._call("show", str(self.folder / "cases" / CASE))
        code, out = self._call("check", str(self.folder), "--json")
        if out.startswith("{"):
            for verdict in json.loads(out)["verdicts"]:
                self._expect(verdict["case_id"], verdict["outcome"], "check")
        sealed = any(stroke.startswith("sealed") for stroke in self.strokes)
        if code == ExitCode.PASSED and self.damaged and not sealed:
            self.wrong.append("check finds nothing")

    def _reported(self) -> None:
        code, _ = self._call("report", str(self.folder))
        self._expect_reports(self.folder, code, "report")

    def _expect_reports(self, folder: Path, code: int, where: str) -> None:
        if code not in (ExitCode.PASSED, ExitCode.NO_VERDICT):
            return
        place = folder / reports.REPORT_FOLDER
        if not (place / "junit.xml").is_file():
            return
        for element in ET.parse(place / "junit.xml").iter("testcase"):
            bad = any(element.find(tag) is not None for tag in ("failure", "error", "skipped"))
            name = element.get("name", "")
            self._expect(name, "failed" if bad else "passed", f"{where}: junit.xml")
        num_good = sum(self.bases.may_pass(self.kind, self.folder, case) for case in CASES)
        plain = json.loads((place / "report.json").read_text())
        if plain["counts"]["passed"] > num_good:
            self.wrong.append(f"{where}: report.json counts {plain['counts']}")
        for name in ("report.md", "index.html"):
            counted = re.search(r"(\d+) passed", (place / name).read_text())
            if counted and int(counted[1]) > num_good:
                self.wrong.append(f"{where}: {name} says {counted[0]}")

    def _put_together(self) -> None:
        database = self.root / "history.sqlite"
        self._call("history", "--add", str(self.folder), "--history", str(database))
        if database.exists():
            with contextlib.closing(sqlite3.connect(database)) as connection:
                for case, attempt, outcome in connection.execute(
                    "SELECT case_id, MAX(attempt), outcome FROM cases GROUP BY case_id"
                ):
                    self._expect(case, outcome, f"history, attempt {attempt}")
        self._call("history", "--history", str(database))
        whole = str(self.bases.runs["passed"])
        self._call("compare", whole, str(self.folder))
        self._call("compare", str(self.folder), whole)
        code, _ = self._call("merge", str(self.folder), "--out", str(self.root / "merged"))
        self._expect_reports(self.root / "merged", code, "merge")
        if code == ExitCode.PASSED and not all(
            self.bases.may_pass(self.kind, self.folder, case) for case in CASES
        ):
            self.wrong.append("merge: passed")

    def _made_again(self) -> None:
        again = str(self.root / "again")
        # What was reported before is of before.
        shutil.rmtree(self.folder / reports.REPORT_FOLDER, ignore_errors=True)
        args = ("rerun", CASE, str(self.folder), "--out", again, "--no-history")
        self._call(*args, engine=FakeEngine(), reported=False)
        made = good.engine_of(self.kind) if self.rng.random() < 0.5 else None
        code, out = self._call("run", "--resume", str(self.folder), "--json", engine=made)
        if out.startswith("{"):
            for verdict in json.loads(out)["verdicts"]:
                self._expect(verdict["case_id"], verdict["outcome"], "run --resume")
        for case in CASES:
            path = self.folder / "cases" / case / "verdict.json"
            if code not in (ExitCode.USAGE, ExitCode.NO_VERDICT) and path.is_file():
                self._expect(case, json.loads(path.read_bytes()).get("outcome"), "resumed, stored")
        if code != ExitCode.USAGE:
            self._expect_reports(self.folder, ExitCode.PASSED, "resumed")


def build(folder: Path, *_: object) -> dict[str, Path]:
    """Real reports, without a history."""
    return reports.build(folder)


def _content(path: Path) -> object:
    try:
        if path.is_symlink() or path.stat().st_size > 1 << 20:
            return None
        data = path.read_bytes() if path.is_file() else None
        return json.loads(data) if data is not None and path.suffix == ".json" else data
    except (OSError, ValueError, RecursionError):
        return None


def fuzz(root: Path, *, seed: int, first: int = 0, count: int = 0, seconds: float = 0.0) -> int:
    """Try `count` folders, or as many as fit in `seconds`; how many were taken wrongly."""
    bases = Bases(root)
    began, number, num_wrong = time.monotonic(), first, 0
    while number - first < count or time.monotonic() - began < seconds:
        wrong = Trial(bases, seed, number).run()
        num_wrong += bool(wrong)
        for why in wrong:
            print(why, flush=True)  # noqa: T201 - a command
        number += 1
    took = time.monotonic() - began
    print(  # noqa: T201
        f"{number - first} folders damaged at random (seed {seed}), {num_wrong} taken wrongly, "
        f"{took:.0f} s"
    )
    return num_wrong
