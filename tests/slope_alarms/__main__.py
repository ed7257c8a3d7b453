"""How often the test of memory raises a false alarm, and how often it misses a leak.

    python -m tests.slope_alarms [--series 1000] [--steps 64,300,2000]

Prints, in Markdown, the share of series in which `slope_of` says that memory grows: of every kind
of `series.py`, without a leak (each is a false alarm) and with one (each is found). Minutes.
"""

import argparse
import random
import sys
from collections.abc import Sequence

from harness.checks.memory import slope_of
from tests.slope_alarms.series import KINDS, LEAKS, leaked


def share(kind: str, leak: int, steps: int, number: int) -> float:
    """The share of `number` series that grow, by the test."""
    growing = 0
    for place in range(number):
        # Text seeds Python's generator alike everywhere; the same series with and without a leak.
        series = KINDS[kind](steps, random.Random(f"{kind}/{steps}/{place}"))
        with_leak = [value + leaked(leak, n) for n, value in enumerate(series)]
        growing += slope_of(with_leak).grows()
    return growing / number


def table(lengths: Sequence[int], number: int) -> str:
    """Rows of kinds, columns of leaks and lengths."""
    columns = [(leak, steps) for leak in LEAKS for steps in lengths]
    lines = [
        "| series of live bytes | "
        + " | ".join(f"{leak}, {n} steps" for leak, n in columns)
        + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    for kind in KINDS:
        shares = [share(kind, LEAKS[leak], steps, number) for leak, steps in columns]
        lines.append(f"| {kind} | " + " | ".join(f"{100 * s:.4g} %" for s in shares) + " |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.slope_alarms", description=__doc__)
    parser.add_argument("--series", type=int, default=1000, help="of each kind and length")
    parser.add_argument("--steps", default="64,300,2000", help="lengths, separated by commas")
    options = parser.parse_args()
    lengths = [int(text) for text in options.steps.split(",")]
    sys.stdout.write(table(lengths, options.series) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
