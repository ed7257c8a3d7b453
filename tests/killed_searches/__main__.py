"""`python -m tests.killed_searches`: kill -9 in every stage of `harness bisect`, and go on.

    a whole search -> the same one killed after every few questions, and gone on with -> compared

the same answer          findings without times and places, question by question
nothing asked twice      no run whose outcome is there is made again, no commit whose answer is
nothing left behind      processes, worktrees, branches, temporary folders, half-written files

Ranks have no torch and commits a harness that answers at once, so all of it takes minutes; prints a
line a stage. Ends with 1 if something does not hold.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.bisect_history.history import git, harnesses, make_history
from tests.kill_and_resume.ranks import STARTS_FILE

ROOT = Path(__file__).parents[2]
SCENARIO = """\
name: killed
why: A search that is killed in each of its stages.
base: {steps: 6, microbatches: 1, parallel: {dp: 2}, graph: [attn]}
axes:
  fsdp:
    - {pool: double}
    - {pool: traced, reduce_dtype: bf16, reshard_after_forward: false}
compare: {axis: fsdp, reference: {pool: double}, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 120}
"""
STAGES = ("itself", "place", "causes", "least", "commits")
VARYING = ("seconds", "command", "folder", "questions")
"""What a kill may change: repeats that were to be made side by side are then asked one by one."""
WAIT_S = 300.0
BEGINS = "A sitting begins.\n"


class Searched:
    """One search, in a repository of its own, that is started again and again."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.repository = folder, folder / "repository"
        self.commits = make_history(
            self.repository, harnesses(number, number - 5, broken=(3, number - 4))
        )
        (self.repository / "killed.yaml").write_text(SCENARIO)
        self.search = self.repository / "search"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.log = folder / "log"
        self.asked = folder / "asked"

    def start(self) -> "subprocess.Popen[bytes]":
        """A harness that begins the search, or goes on with it."""
        commits = f"{self.commits[0]}..{self.commits[-1]}"
        with self.log.open("ab") as log:
            log.write(BEGINS.encode())
            return subprocess.Popen(
                [sys.executable, "-m", "tests.killed_searches.stubbed", "bisect", "killed.yaml",
                 "-k", "traced", "--out", "search", "--repro", "repro", "--commits", commits],
                cwd=self.repository, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=os.environ | {
                    "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "TMPDIR": str(self.temporary),
                    "ASKED_OF_HISTORY": str(self.asked), "PYTHONUNBUFFERED": "1",
                    "COLUMNS": "1000",
                },
                start_new_session=True,
            )  # fmt: skip

    def questions(self) -> list[str]:
        """All that the last sitting has told of, in order."""
        with suppress(FileNotFoundError):
            text = self.log.read_text()
            return re.findall(r"^ *\d+\. (.*)$", text.rpartition(BEGINS)[2], re.MULTILINE)
        return []

    def answers(self) -> int:
        """How many runs and replies the folder holds."""
        return len(self.finished()) + len(list(self.search.glob("replies/*.json")))

    def finished(self) -> dict[Path, tuple[int, int]]:
        """Outcomes of runs, by file and time: what is made again has others."""
        found = {}
        for path in self.search.glob("runs/*/outcome.json"):
            facts = path.stat()
            found[path] = (facts.st_ino, facts.st_mtime_ns)
        return found

    def of_commits(self) -> Counter[str]:
        """How often each commit's harness was asked, by hash and attempt."""
        with suppress(FileNotFoundError):
            words = self.asked.read_text().split()
            pairs = itertools.pairwise(words)
            return Counter(Path(after).name[:12] for word, after in pairs if word == "--out")
        return Counter()

    def starts(self) -> Counter[str]:
        """How often each run was started."""
        with suppress(FileNotFoundError):
            return Counter((self.search / STARTS_FILE).read_text().split())
        return Counter()

    def findings(self) -> Any:
        """What was found, without what differs from search to search."""
        return _plain(json.loads((self.search / "bisect.json").read_text()))

    def left_behind(self) -> list[str]:
        """What should not be there."""
        trees = git(self.repository, "worktree", "list").splitlines()[1:]
        refs = git(self.repository, "for-each-ref", "--format=%(refname)").splitlines()
        # Runs and tries of commits that were set aside are kept as they were.
        half = [str(p) for p in self.search.glob("**/.*.tmp") if not _is_kept(p)]
        temporary = [str(path) for path in self.temporary.glob("bisect-commits-*")]
        return [*trees, *(ref for ref in refs if ref != "refs/heads/main"), *half, *temporary]


def _is_kept(path: Path) -> bool:
    return ".attempt" in str(path) or path.parent.suffix == ".case"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in (*VARYING, "sha256")}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def stage_of(words: str, commits: list[str]) -> str:
    """In which stage a question is asked."""
    if words.startswith("does the case itself fail?"):
        return "itself"
    if words.startswith(("which call", "which output", "which element", "does the case always")):
        return "place"
    if any(commit[:10] in words for commit in commits):
        return "commits"
    is_least = words.startswith("does it still fail") or "fail alone?" in words
    return "least" if is_least else "causes"


def kill_at(searched: Searched, target: int, drawn: random.Random) -> tuple[str, list[str]]:
    """Start, wait until so many answers are there, kill soon after: its stage, and problems.

    The stage is "" if the search came to its end before.
    """
    before, asked, made = searched.finished(), searched.of_commits(), searched.starts()
    num_commits = len(list(searched.search.glob("replies/commit-*.json")))
    process = searched.start()
    began_s = time.monotonic()
    while process.poll() is None and searched.answers() < target:
        if time.monotonic() - began_s > WAIT_S:
            process.kill()
            return "", [f"no {target} answers within {WAIT_S:g} s"]
        time.sleep(0.005)
    with suppress(subprocess.TimeoutExpired):
        process.wait(drawn.uniform(0.0, 0.3))
    if process.poll() is not None:
        told = [] if process.returncode == 1 else [f"exit code {process.returncode}"]
        return "", told
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    problems = [f"left behind: {p}" for p in psutil.wait_procs(below, timeout=30)[1]]
    words = searched.questions()
    now = searched.finished()
    problems += [f"made again: {path}" for path, facts in before.items() if now.get(path) != facts]
    problems += [
        f"started again: {path.parent.name}"
        for path in before
        if searched.starts()[path.parent.name] != made[path.parent.name]
    ]
    if num_commits > 1 and asked:
        # All but the last one asked before that kill were answered.
        answered = list(asked)[:-1]
        again = searched.of_commits()
        problems += [f"asked again: {name}" for name in answered if again[name] != asked[name]]
    # The question under way is the one after the last that was told of.
    return stage_of(words[-1], searched.commits) if words else "itself", problems


def torment(searched: Searched, every: int, drawn: random.Random) -> tuple[Counter[str], list[str]]:
    """Kill it after every few questions until it is done: kills by stage, and problems."""
    kills, problems = Counter[str](), list[str]()
    while True:
        stage, told = kill_at(searched, searched.answers() + every, drawn)
        problems += told
        if not stage:
            return kills, problems
        kills[stage] += 1


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.killed_searches", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--every", type=int, default=2, help="answers between two kills")
    parser.add_argument("--commits", type=int, default=16, help="of the history")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="killed-searches-"))
    began_s = time.monotonic()
    whole = Searched(root / "whole", options.commits)
    if (code := whole.start().wait(WAIT_S)) != 1:
        sys.stdout.write(f"the whole search: exit code {code}: {whole.log.read_text()}\n")
        return 1
    asked = Counter(stage_of(words, whole.commits) for words in whole.questions())
    killed = Searched(root / "killed", options.commits)
    kills, problems = torment(killed, options.every, random.Random(options.seed))
    expected, found = whole.findings(), killed.findings()
    problems += [f"{key}: {found[key]} in place of {expected[key]}"
                 for key in expected if found.get(key) != expected[key]]  # fmt: skip
    problems += [f"left: {what}" for what in (*whole.left_behind(), *killed.left_behind())]
    sys.stdout.write("| stage | questions | kills |\n| --- | --- | --- |\n")
    for stage in STAGES:
        sys.stdout.write(f"| {stage} | {asked[stage]} | {kills[stage]} |\n")
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"\n{kills.total()} kills, {len(problems)} problems, {took_s:.0f} s\n")
    for problem in problems:
        sys.stdout.write(f"  {problem}\n")
    if problems:
        sys.stdout.write(f"kept: {root}\n")
        return 1
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
