"""kill -9 in every stage of `harness bisect`, and go on.

    a whole search -> the same one killed after every few answers, and gone on with -> compared

the same answer          findings without times and places, question by question
nothing asked twice      no run whose outcome is there is made again, no commit whose answer is
nothing left behind      processes, worktrees, branches, temporary folders, half-written files

Ranks have no torch and commits a harness that answers at once.
"""

import itertools
import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.chaos import harness
from tests.chaos.ranks import POOL_SEED, STARTS_FILE
from tests.support.git_history import git, harnesses, make_history

SCENARIO = f"""\
name: killed
why: A search that is killed in each of its stages.
base: {{steps: 6, microbatches: 1, parallel: {{dp: 2}}, graph: [attn], seed: {POOL_SEED}}}
axes:
  fsdp:
    - {{pool: double}}
    - {{pool: traced, reduce_dtype: bf16, reshard_after_forward: false}}
compare: {{axis: fsdp, reference: {{pool: double}}, expect: bitwise}}
checks: {{loss: {{}}, state: {{}}}}
launch: {{device: cpu, timeout_s: 120}}
"""
VARYING = ("seconds", "command", "folder", "questions", "sha256")
"""What a kill may change: repeats that were to be made side by side are then asked one by one."""
WAIT_S = 300.0
NUM_COMMITS, EVERY = 16, 1
"""Commits of the history; answers between two kills."""


class Searched:
    """One search, in a repository of its own, that is started again and again."""

    def __init__(self, folder: Path) -> None:
        self.repository, self.temporary = folder / "repository", folder / "temporary"
        self.search, self.log = self.repository / "search", folder / "log"
        self.asked = folder / "asked"
        self.commits = make_history(
            self.repository, harnesses(NUM_COMMITS, NUM_COMMITS - 5, broken=(3, NUM_COMMITS - 4))
        )
        (self.repository / "killed.yaml").write_text(SCENARIO)
        self.temporary.mkdir()

    def start(self) -> Any:
        """A harness that begins the search, or goes on with it."""
        commits = f"{self.commits[0]}..{self.commits[-1]}"
        with self.log.open("ab") as log:
            return harness.start(
                "bisect", "killed.yaml", "-k", "traced", "--out", "search", "--repro", "repro",
                "--commits", commits, cwd=self.repository, stdout=log, stderr=log,
                start_new_session=True,
                env={"PYTHONSAFEPATH": "1", "TMPDIR": str(self.temporary),
                     "ASKED_OF_HISTORY": str(self.asked)},
            )  # fmt: skip

    def finished(self) -> dict[Path, tuple[int, int]]:
        """Outcomes of runs, by file and time: what is made again has others."""
        paths = self.search.glob("runs/*/outcome.json")
        facts = {path: path.stat() for path in paths}
        return {path: (fact.st_ino, fact.st_mtime_ns) for path, fact in facts.items()}

    def replies(self) -> int:
        """How many commits and repeats have answered."""
        return len(list(self.search.glob("replies/*.json")))

    def asked_of_commits(self) -> Counter[str]:
        """How often each commit's harness was asked, by hash and attempt."""
        with suppress(FileNotFoundError):
            pairs = itertools.pairwise(self.asked.read_text().split())
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

    def stage(self) -> str:
        """How far a search that was stopped had come."""
        found = dict[str, Any]()
        with suppress(FileNotFoundError):
            found = json.loads((self.search / "bisect.json").read_text())
        for part in ("commits", "least_case", "causes", "place"):
            if found.get(part):
                return f"after {part}"
        return "commits" if list(self.search.glob("replies/commit-*.json")) else "begun"

    def left(self) -> list[str]:
        """What should not be there."""
        trees = git(self.repository, "worktree", "list").splitlines()[1:]
        refs = git(self.repository, "for-each-ref", "--format=%(refname)").splitlines()
        # Runs and tries of commits that were set aside are kept as they were.
        half = [str(p) for p in self.search.glob("**/.*.tmp")
                if ".attempt" not in str(p) and p.parent.suffix != ".case"]  # fmt: skip
        temporary = [str(path) for path in self.temporary.glob("bisect-commits-*")]
        return [*trees, *(ref for ref in refs if ref != "refs/heads/main"), *half, *temporary]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key not in VARYING}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def kill_at(searched: Searched, target: int, drawn: random.Random) -> tuple[str, list[str]]:
    """Start, wait until so many answers are there, kill soon after: its stage, and problems.

    The stage is "" if the search came to its end before.
    """
    before, asked, made = searched.finished(), searched.asked_of_commits(), searched.starts()
    num_commits = len(list(searched.search.glob("replies/commit-*.json")))
    process, began_s = searched.start(), time.monotonic()
    while process.poll() is None and len(searched.finished()) + searched.replies() < target:
        if time.monotonic() - began_s > WAIT_S:
            process.kill()
            return "", [f"no {target} answers within {WAIT_S:g} s"]
        time.sleep(0.005)
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, drawn.uniform(-0.3, 0.3)))  # every other one at once
    if process.poll() is not None:
        return "", [] if process.returncode == 1 else [f"exit code {process.returncode}"]
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    problems = [f"left behind: {p}" for p in psutil.wait_procs(below, timeout=30)[1]]
    now, starts = searched.finished(), searched.starts()
    for path, facts in before.items():
        if now.get(path) != facts or starts[path.parent.name] != made[path.parent.name]:
            problems.append(f"made again: {path}")
    if num_commits > 1 and asked:
        # All but the last one asked before that kill were answered.
        again = searched.asked_of_commits()
        problems += [f"asked again: {n}" for n in list(asked)[:-1] if again[n] != asked[n]]
    return searched.stage(), problems


def kill_searches(root: Path, seed: int) -> Iterator[str]:
    """Kill a search after every few answers until it is done; what does not hold."""
    whole, killed = Searched(root / "whole"), Searched(root / "killed")
    if (code := whole.start().wait(WAIT_S)) != 1:
        yield f"the whole search: exit code {code}: {whole.log.read_text()}"
        return
    drawn, kills, stage = random.Random(seed), Counter[str](), "begun"
    while stage:
        answers = len(killed.finished()) + killed.replies()
        stage, problems = kill_at(killed, answers + EVERY, drawn)
        kills.update([stage] if stage else [])
        yield from problems
    expected, found = whole.findings(), killed.findings()
    yield from (f"{key}: {found.get(key)} in place of {expected[key]}"
                for key in expected if found.get(key) != expected[key])  # fmt: skip
    yield from (f"left: {what}" for what in (*whole.left(), *killed.left()))
    print(f"  {kills.total()} kills: {dict(kills)}", flush=True)  # noqa: T201
    # One that is only ever killed in its first stage proves little.
    if kills.total() < 8 or len(kills) < 3:
        yield f"only {kills.total()} kills in {len(kills)} stages"
