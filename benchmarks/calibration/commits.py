"""How many runs `harness bisect --commits` takes, over real repositories and real `git bisect`.

    python -m benchmarks.calibration.commits [--histories 8] [--flaky 2] [--commits 64]

Prints, in Markdown, a line a history: where the fault is, which three commits do not build, what
was named, and runs of commits beside log2 of their number. All goes through the command line,
from a case that has failed; commits have a harness that answers at once. A fault of every run is
searched as such (`--every-run`) and without knowing; a flaky one fires in 30 % of runs. Ends with
1 if an answer is wrong, or if a worktree or a branch is left.
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
from harness.campaign.campaign import bounds
from tests.support.git_history import SOMETIMES, WRONG, git, harnesses, make_history

ROOT = Path(__file__).parents[2]
PLANTED = """\
name: found_wrong
why: A weight that was right some commits ago.
base: {steps: 4, microbatches: 1, graph: [attn]}
axes: {plant: [none, {fault: ulp, step: 1}]}
compare: {axis: plant, reference: none, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 300}
"""
COLUMNS = ("fault", "first bad", "do not build", "named", "right", "runs", "log2", "seconds")
UNTIL = ("--until", "environment")


def right(found: dict[str, Any], guilty: str) -> bool:
    """Whether the fault's commit is named, alone or among suspects that cannot be told apart."""
    if found["first"] is not None:
        return bool(found["first"]["hash"] == guilty)
    skipped = {commit["hash"] for commit in found["skipped"]}
    suspects = [commit["hash"] for commit in found["suspects"]]
    return set(suspects[1:]) <= skipped and guilty in suspects


def harness(words: Sequence[str], cwd: Path) -> tuple[int, str]:
    """Exit code and stdout of the command line."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=cwd, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(f"harness {' '.join(words)}: {done.returncode}: {done.stderr}")
    return done.returncode, done.stdout


def row(*cells: object) -> None:
    """A line of the table."""
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")
    sys.stdout.flush()


def search(kind: str, place: Path, seed: int, number: int, wrong: str, words: list[str]) -> bool:
    """Make a history, search it, and print what came of it; whether it was right.

    Args:
        kind: of the row.
        place: an empty folder.
        seed: of the first bad commit and the three that do not build; no end is one of these.
        number: of commits after the good one.
        wrong: what a bad commit does.
        words: what is bisected, and how.
    """
    drawn = random.Random(f"{kind}/{number}/{seed}")
    first_bad = drawn.randint(1, number)
    broken = sorted(drawn.sample(range(1, number), min(3, number - 1)))
    repository, began_s = place / "repository", time.monotonic()
    hashes = make_history(repository, harnesses(number, first_bad, broken, wrong))
    places = ["--out", str(place / "search"), "--repro", str(place / "repro")]
    commits = ["--commits", f"{hashes[0]}..main", "--json", "--no-element"]
    found = json.loads(harness(["bisect", *words, *commits, *places], repository)[1])["commits"]
    left = git(repository, "worktree", "list").splitlines()[1:]
    refs = git(repository, "for-each-ref", "--format=%(refname)").split()
    good = right(found, hashes[first_bad]) and not left and refs == ["refs/heads/main"]
    named = [hashes.index(commit["hash"]) for commit in reversed(found["suspects"])]
    row(kind, first_bad, " ".join(map(str, broken)), " ".join(map(str, named)),
        "yes" if good else "NO", found["num_runs"], f"{math.log2(number):.1f}",
        f"{time.monotonic() - began_s:.0f}")  # fmt: skip
    shutil.rmtree(place)
    return good


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration.commits")
    parser.add_argument("--commits", type=int, default=64, help="after the good one")
    parser.add_argument("--histories", type=int, default=8, help="with a fault of every run")
    parser.add_argument("--flaky", type=int, default=2, help="with a fault of 30 %% of runs")
    parser.add_argument("--seed", type=int, default=1, help="of the first history")
    asked = parser.parse_args()
    row(*COLUMNS)
    row(*["---"] * len(COLUMNS))
    answers = []
    with tempfile.TemporaryDirectory(prefix="histories-") as folder:
        root = Path(folder)
        (root / "planted.yaml").write_text(PLANTED)
        if harness(["run", "planted.yaml", "--out", "run", "--no-history"], root)[0] != 1:
            raise SystemExit("expected a case that fails, got one that passes")
        case = str(next(iter((root / "run" / "cases").iterdir())))
        for kind, wrong, how, histories in (
            ("every run, known", WRONG, ["--every-run"], asked.histories),
            ("every run, not known", WRONG, [], asked.histories),
            ("30 % of runs", SOMETIMES.format(rate=0.3), [], asked.flaky),
        ):
            answers += [
                search(kind, root / f"{kind} {seed}", seed, asked.commits, wrong,
                       [case, *UNTIL, *how])
                for seed in range(asked.seed, asked.seed + histories)
            ]  # fmt: skip
    wrong_share = bounds(answers.count(False), len(answers), CONFIDENCE)
    sys.stdout.write(f"\nWrong answers: {wrong_share}, at 99 % confidence.\n")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
