"""How often the check `throughput` says what, of programs whose speed is known.

    python -m benchmarks.throughput_verdicts [CASES] [PAIRS]

A case is PAIRS pairs of runs of 15 timed steps; the tolerance is 5 %. Rows are kinds of noise,
columns programs: `equal`, slower by half the tolerance, by 49 in 1,000 and by 51 in 1,000, by one
and a half of it, by twice, and one of which every third step takes twice as long (33 % slower in
the mean, not in the median). A cell has passed / failed / no verdict, in percent. Then the wrong
answers: passes of what is slower than the tolerance, failures of what is not. Some minutes for
1,000 cases.
"""

import random
import sys
from collections.abc import Callable

from harness.checks.speed import judge

TOLERANCE, STEPS, SEED = 0.05, 15, 1
Steps = list[float]
Machine = Callable[[int], Steps]
"""Seconds of the steps of the run that is made as the n-th."""
Noise = Callable[[random.Random], Machine]


def moody(mood: float, step: float = 0.01) -> Noise:
    """Every run has a mood, every step one of its own; both lognormal."""

    def make(draw: random.Random) -> Machine:
        def run(_: int) -> Steps:
            level = draw.lognormvariate(0, mood)
            return [level * draw.lognormvariate(0, step) for _ in range(STEPS)]

        return run

    return make


def changed(base: Noise, change: Callable[[random.Random, int, Steps], Steps]) -> Noise:
    """The noise `base`, and something on top of each run."""

    def make(draw: random.Random) -> Machine:
        under = base(draw)
        return lambda number: change(draw, number, under(number))

    return make


def slower_runs(draw: random.Random, _: int, steps: Steps) -> Steps:
    """One run in ten takes half as long again."""
    return [1.5 * s for s in steps] if draw.random() < 0.1 else steps


def slower_steps(draw: random.Random, _: int, steps: Steps) -> Steps:
    """One step in twenty takes three times as long."""
    return [3 * s if draw.random() < 0.05 else s for s in steps]


def drifting(_: random.Random, number: int, steps: Steps) -> Steps:
    """Each run is 2 % slower than the one before."""
    return [s * 1.02**number for s in steps]


def throttled(_: random.Random, number: int, steps: Steps) -> Steps:
    """Steps get slower by 20 % within each run."""
    return [s * (1 + 0.2 * place / len(steps)) for place, s in enumerate(steps)]


def two_levels(draw: random.Random, _: int, steps: Steps) -> Steps:
    """Runs have one of two speeds, 8 % apart."""
    return [1.08 * s for s in steps] if draw.random() < 0.5 else steps


NOISES: dict[str, Noise] = {
    "quiet, 1 %": moody(0.01), "as the tolerance, 5 %": moody(0.05), "larger, 30 %": moody(0.3),
    "1 run of 10 disturbed": changed(moody(0.01), slower_runs),
    "1 step of 20 disturbed": changed(moody(0.01), slower_steps),
    "drift, 2 % a run": changed(moody(0.01), drifting),
    "throttled in each run": changed(moody(0.01), throttled),
    "two levels, 8 % apart": changed(moody(0.01), two_levels),
}  # fmt: skip
RATIOS = {"equal": 1.0, "half": 1.025, "4.9 %": 1.049, "5.1 %": 1.051, "1.5x": 1.075, "2x": 1.1}


def program(name: str, steps: Steps) -> Steps:
    """What the candidate makes of the machine's steps."""
    if name == "every third":
        return [2 * s if place % 3 == 2 else s for place, s in enumerate(steps)]
    if name == "long warm-up":
        return [3 * s if place < 3 else s for place, s in enumerate(steps)]
    return [RATIOS[name] * s for s in steps]


PROGRAMS = (*RATIOS, "every third", "long warm-up")
SLOWER = ("5.1 %", "1.5x", "2x", "every third")


def rates(noise: Noise, name: str, cases: int, pairs: int, seed: int = SEED) -> dict[str, float]:
    """Shares of outcomes."""
    found = dict.fromkeys(("passed", "failed", "incomparable"), 0.0)
    for case in range(cases):
        machine = noise(random.Random(f"{seed} {name} {case}"))
        legs: list[list[Steps]] = [[], []]
        for pair in range(pairs):
            for turn, leg in enumerate(((0, 1), (1, 0))[pair % 2]):
                steps = machine(2 * pair + turn)
                legs[leg].append(program(name, steps) if leg else steps)
        found[judge(legs[0], legs[1], TOLERANCE).outcome] += 1 / cases
    return found


def main(cases: int = 1000, pairs: int = 6) -> None:
    """Print the table."""
    print(f"{cases} cases of {pairs} pairs each; passed / failed / no verdict, in %\n")
    print("| noise | " + " | ".join(PROGRAMS) + " |\n|" + " --- |" * (len(PROGRAMS) + 1))
    wrong = {"passed": (0.0, ""), "failed": (0.0, "")}
    for label, noise in NOISES.items():
        cells = []
        for name in PROGRAMS:
            found = rates(noise, name, cases, pairs)
            cells.append(" / ".join(f"{100 * share:.3g}" for share in found.values()))
            kind = "passed" if name in SLOWER else "failed"
            wrong[kind] = max(wrong[kind], (found[kind], f"{label}, {name}"))
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)
    print(f"\nmost passes of what is slower: {wrong['passed'][0]:.2%} ({wrong['passed'][1]})")
    print(f"most failures of what is not: {wrong['failed'][0]:.2%} ({wrong['failed'][1]})")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
