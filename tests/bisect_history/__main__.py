"""How many runs a bisection takes, over real repositories, real `git bisect` and real runs.

    python -m tests.bisect_history [--commits 64] [--histories 8] [--flaky 2] [--seed 1]

Prints, in Markdown, a line a history: where the fault is, which three commits do not build, what
was named, and runs beside log2 of the commits. A fault of every run is searched once as such, and
once without knowing, at 99 %; a flaky one fires in 30 % of runs. Ends with 1 if an answer is wrong.
"""

import argparse
import math
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from harness.bisector.chance import bounds
from harness.bisector.commit_runs import command_run
from harness.bisector.commits import CommitRange, CommitSearch, find_first_bad
from harness.bisector.identity import Identity
from harness.bisector.questions import Journal
from tests.bisect_history.history import SOMETIMES, WRONG, git, make_history, programs

BUILD = (sys.executable, "-m", "compileall", "-q", "program")
COMMAND = (sys.executable, "-m", "program")
COLUMNS = ("fault", "first bad", "do not build", "named", "right", "runs", "log2", "seconds")


def right(found: CommitSearch, guilty: str) -> bool:
    """Whether the fault's commit is named, alone or among suspects that cannot be told apart."""
    if found.first_bad is not None:
        return found.first_bad.hash == guilty
    skipped = {commit.hash for commit in found.skipped}
    hidden = {commit.hash for commit in found.suspects[1:]} <= skipped
    return hidden and guilty in {commit.hash for commit in found.suspects}


def search(root: Path, *, once: bool) -> CommitSearch:
    """The first bad commit of all."""
    commits = f"{git(root, 'rev-list', '--max-parents=0', 'main')}..main"
    identity = Identity(code=commits, environment={}, case="")
    with Journal(root.with_name("questions.jsonl"), identity) as journal:
        run = command_run(COMMAND, root.with_name("logs"), build=BUILD)
        return find_first_bad(CommitRange(root, commits), run, journal, once=once)


def row(kind: str, number: int, seed: int, *, once: bool) -> tuple[list[str], bool]:
    """One history, searched: its cells, and whether the answer is right."""
    drawn = random.Random(f"{kind}/{number}/{seed}")
    first_bad = drawn.randint(1, number)
    # Neither end: without them there is nothing to search between.
    broken = sorted(drawn.sample(range(1, number), min(3, number - 1)))
    wrong = SOMETIMES.format(rate=0.3) if kind == "30 % of runs" else WRONG
    folder = Path(tempfile.mkdtemp(prefix="history-"))
    try:
        hashes = make_history(folder / "repository", programs(number, first_bad, broken, wrong))
        began_s = time.monotonic()
        found = search(folder / "repository", once=once)
        seconds = time.monotonic() - began_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    named = " ".join(str(hashes.index(commit.hash)) for commit in reversed(found.suspects))
    good = right(found, hashes[first_bad])
    cells = [
        kind, str(first_bad), " ".join(map(str, broken)), named, "yes" if good else "NO",
        str(found.num_runs), f"{math.log2(number):.1f}", f"{seconds:.1f}",
    ]  # fmt: skip
    return cells, good


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bisect_history", description=__doc__)
    parser.add_argument("--commits", type=int, default=64, help="after the good one")
    parser.add_argument("--histories", type=int, default=8, help="with a fault of every run")
    parser.add_argument("--flaky", type=int, default=2, help="with a fault of 30 %% of runs")
    parser.add_argument("--seed", type=int, default=1, help="of the first history")
    options = parser.parse_args()
    kinds = [("every run, known", True, options.histories)]
    kinds += [("every run, not known", False, options.histories)]
    kinds += [("30 % of runs", False, options.flaky)]
    sys.stdout.write(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n")
    answers = []
    for kind, once, histories in kinds:
        for seed in range(options.seed, options.seed + histories):
            cells, good = row(kind, options.commits, seed, once=once)
            answers.append(good)
            sys.stdout.write(f"| {' | '.join(cells)} |\n")
            sys.stdout.flush()
    wrong = bounds(answers.count(False), len(answers))
    sys.stdout.write(f"\nWrong answers: {wrong}, at 99 % confidence.\n")
    return 0 if all(answers) else 1


if __name__ == "__main__":
    sys.exit(main())
