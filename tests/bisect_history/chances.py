"""How often a search for a flaky fault answers wrong, and what it costs: no runs, only chance.

    python -m tests.bisect_history.chances [--searches 2000]

Prints, in Markdown, a line a rate: wrong answers of searches over 64 commits at 99 %, with exact
bounds, and the mean number of runs. Seconds.
"""

import argparse
import random
import sys

from harness.bisect.experiments import CONFIDENCE, Answer, NeverFails, learn
from harness.campaign.scoring import bounds

NUMBER = 64
RATES = (1.0, 0.9, 0.6, 0.3, 0.1)


class Commits:
    """Commits of which those from `first_bad` on fail at a rate; every run is remembered."""

    def __init__(self, rate: float, seed: int) -> None:
        self.first_bad = random.Random(seed).randint(1, NUMBER)
        self.num_runs = 0
        self._drawn = random.Random(f"{rate}/{seed}")
        self._rate = rate
        self._known: dict[int, list[Answer]] = {}

    def once(self, commit: int, attempt: int) -> Answer:
        """One run, or what it said."""
        known = self._known.setdefault(commit, [])
        while len(known) <= attempt:
            self.num_runs += 1
            bad = commit >= self.first_bad and self._drawn.random() < self._rate
            known.append("fails" if bad else "passes")
        return known[attempt]

    def answer(self, commit: int, passes: int) -> Answer:
        """Until it fails, or has passed so often."""
        runs = range(max(passes, len(self._known.get(commit, []))))
        return "fails" if any(self.once(commit, n) == "fails" for n in runs) else "passes"

    def search(self) -> int:
        """The first bad commit by halving, as `harness.bisect.commits` goes about it."""
        flaky = False
        while True:
            known = learn(lambda n: self.once(NUMBER, n), num_questions=9, flaky=flaky)
            good, bad = 0, NUMBER
            while bad - good > 1:
                middle = (good + bad) // 2
                if self.answer(middle, known.passes) == "fails":
                    bad = middle
                else:
                    good = middle
            if self.answer(good, known.confirmations) == "passes":
                return bad
            flaky = True


def row(rate: float, searches: int) -> str:
    """A line of the table."""
    wrong = runs = given_up = 0
    for seed in range(searches):
        commits = Commits(rate, seed)
        try:
            wrong += commits.search() != commits.first_bad
            runs += commits.num_runs
        except NeverFails:
            given_up += 1
    done = searches - given_up
    mean = f"{runs / done:.0f}" if done else "-"
    return f"| {100 * rate:g} % | {bounds(wrong, done, CONFIDENCE)} | {mean} | {given_up} |\n"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bisect_history.chances")
    parser.add_argument("--searches", type=int, default=2000, help="of each rate")
    options = parser.parse_args()
    sys.stdout.write("| fires in | wrong answers | mean runs | given up |\n|" + " --- |" * 4 + "\n")
    for rate in RATES:
        sys.stdout.write(row(rate, options.searches))
    return 0


if __name__ == "__main__":
    sys.exit(main())
