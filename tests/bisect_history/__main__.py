"""How many runs `harness bisect --commits` takes, over real repositories and real `git bisect`.

    python -m tests.bisect_history [--histories 8] [--flaky 2] [--trainer 0] [--commits 64]

Prints, in Markdown, a line a history: where the fault is, which three commits do not build, what
was named, and runs of commits beside log2 of their number. All goes through the command line, from
a case that has failed.

    histories   commits whose harness answers at once: a fault of every run, searched as such
                (`--every-run`) and without knowing; a flaky one fires in 30 % of runs
    trainer     commits of this trainer and harness, with a bug in replays: each question is the
                three runs of a case. Known, not known, and found out by the search for causes
                before it

Ends with 1 if an answer is wrong, or if a worktree or a branch is left.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.bisect.experiments import CONFIDENCE
from harness.campaign.scoring import bounds
from tests.bisect_history.history import SOMETIMES, WRONG, Files, git, harnesses, make_history
from tests.bisect_history.trainer import SCENARIO, trainers

ROOT = Path(__file__).parents[2]
PLANTED = SCENARIO.replace("axes: {", "axes: {plant: [none, {fault: ulp, step: 1}], ").replace(
    "axis: graph, reference: eager", "axis: plant, reference: none"
)
COLUMNS = ("fault", "first bad", "do not build", "named", "right", "runs", "log2", "seconds")
KNOWN, UNKNOWN = ("--every-run", "--until", "environment"), ("--until", "environment")


def right(found: dict[str, Any], guilty: str) -> bool:
    """Whether the fault's commit is named, alone or among suspects that cannot be told apart."""
    if found["first_bad"] is not None:
        return bool(found["first_bad"]["hash"] == guilty)
    skipped = {commit["hash"] for commit in found["skipped"]}
    hidden = {commit["hash"] for commit in found["suspects"][1:]} <= skipped
    return hidden and guilty in {commit["hash"] for commit in found["suspects"]}


def harness(words: Sequence[str], code: Path, cwd: Path) -> tuple[int, str]:
    """Exit code and stdout of the command line of some code."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=cwd, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"harness {' '.join(words)}: {done.returncode}: {done.stderr}")
    return done.returncode, done.stdout


def left_over(repository: Path) -> list[str]:
    """What git has beside the user's own checkout and branch."""
    trees = git(repository, "worktree", "list").splitlines()[1:]
    refs = git(repository, "for-each-ref", "--format=%(refname)").splitlines()
    return [*trees, *(ref for ref in refs if ref != "refs/heads/main")]


class Table:
    """Rows of histories, printed as they are known."""

    def __init__(self, number: int) -> None:
        self.answers: list[bool] = []
        self._number = number
        sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n")

    def search(
        self, kind: str, place: Path, commits: Sequence[Files], drawn: "Drawn",
        words: Sequence[str], *, ours: bool,
    ) -> None:  # fmt: skip
        """Make a history, search it, and print what came of it.

        Args:
            kind: of the row.
            place: an empty folder.
            commits: of the history.
            drawn: where its fault is.
            words: what is bisected, and how.
            ours: our code searches, not that of the history's newest commit.
        """
        repository = place / "repository"
        hashes = make_history(repository, commits)
        began_s = time.monotonic()
        _, out = harness(
            ["bisect", *words, "--commits", f"{hashes[0]}..main", "--json", "--no-element",
             "--out", str(place / "search"), "--repro", str(place / "repro")],
            ROOT if ours else repository, repository,
        )  # fmt: skip
        seconds = time.monotonic() - began_s
        found = json.loads(out)["commits"]
        named = [hashes.index(commit["hash"]) for commit in reversed(found["suspects"])]
        good = right(found, hashes[drawn.first_bad]) and not left_over(repository)
        cells = [
            kind, drawn.first_bad, " ".join(map(str, drawn.broken)), " ".join(map(str, named)),
            "yes" if good else "NO", found["num_runs"], f"{math.log2(self._number):.1f}",
            f"{seconds:.0f}",
        ]  # fmt: skip
        self.answers.append(good)
        sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
        sys.stdout.flush()


class Drawn:
    """A history's first bad commit, and the three that do not build: neither end is one of them."""

    def __init__(self, kind: str, number: int, seed: int) -> None:
        drawn = random.Random(f"{kind}/{number}/{seed}")
        self.first_bad = drawn.randint(1, number)
        self.broken = sorted(drawn.sample(range(1, number), min(3, number - 1)))


def failed_case(root: Path) -> Path:
    """The folder of a case that has diverged."""
    (root / "planted.yaml").write_text(PLANTED)
    code, _ = harness(
        ["run", "planted.yaml", "-k", "attn", "--out", "run", "--no-history"], ROOT, root
    )
    if code != 1:
        raise SystemExit("expected a case that fails, got one that passes")
    return next(iter((root / "run" / "cases").iterdir()))


def fill(table: Table, root: Path, options: argparse.Namespace) -> None:
    """Every row."""
    number = options.commits
    stubs = [
        ("every run, known", WRONG, KNOWN, options.histories),
        ("every run, not known", WRONG, UNKNOWN, options.histories),
        ("30 % of runs", SOMETIMES.format(rate=0.3), UNKNOWN, options.flaky),
    ]
    case = str(failed_case(root)) if any(histories for *_, histories in stubs) else ""
    for kind, wrong, how, histories in stubs:
        for seed in range(options.seed, options.seed + histories):
            drawn, place = Drawn(kind, number, seed), root / f"{kind} {seed}"
            commits = harnesses(number, drawn.first_bad, drawn.broken, wrong)
            table.search(kind, place, commits, drawn, [case, *how], ours=True)
            shutil.rmtree(place)
    (root / "wrong.yaml").write_text(SCENARIO)
    kinds = {"known": KNOWN, "not known": UNKNOWN, "found out": ("--until", "causes")}
    for seed in range(options.seed, options.seed + options.trainer):
        for kind, how in kinds.items():
            drawn = Drawn("trainer", number, seed)
            place = root / f"trainer {kind} {seed}"
            commits = trainers(number, drawn.first_bad, drawn.broken)
            table.search(
                f"the trainer, {kind}", place, commits, drawn,
                [str(root / "wrong.yaml"), "-k", "attn", *how], ours=False,
            )  # fmt: skip
            shutil.rmtree(place)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bisect_history", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--commits", type=int, default=64, help="after the good one")
    parser.add_argument("--histories", type=int, default=8, help="with a fault of every run")
    parser.add_argument("--flaky", type=int, default=2, help="with a fault of 30 %% of runs")
    parser.add_argument("--trainer", type=int, default=0, help="of the real trainer")
    parser.add_argument("--seed", type=int, default=1, help="of the first history")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="histories-"))
    table = Table(options.commits)
    try:
        fill(table, root, options)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    wrong = bounds(table.answers.count(False), len(table.answers), CONFIDENCE)
    sys.stdout.write(f"\nWrong answers: {wrong}, at 99 % confidence.\n")
    return 0 if all(table.answers) else 1


if __name__ == "__main__":
    sys.exit(main())
