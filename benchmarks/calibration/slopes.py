"""How often the test of memory raises a false alarm, and how often it misses a leak; minutes.

    python -m benchmarks.calibration.slopes [--series 1000] [--steps 64 300 2000]

Prints, in Markdown, the share of series in which `slope_of` says that memory grows: of every kind
of live bytes as trainings leave them, without a leak (each is a false alarm) and with one. Ends
with 1 if a steady leak is missed or a flat series grows.
"""

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence

from harness.checks.memory import slope_of

KIB, MIB = 1 << 10, 1 << 20
Series = list[float]
Kind = Callable[[int, random.Random], Series]
"""From the number of steps and a generator to live bytes, one a step."""


def flat(steps: int, drawn: random.Random) -> Series:
    """The same after every step, as of a training whose shapes do not change."""
    return [float(drawn.randrange(1 << 36))] * steps


def noise(swing: int) -> Kind:
    """Another number of tokens each step: independent of the step before."""
    return lambda steps, drawn: [drawn.uniform(0, swing) for _ in range(steps)]


def slow_noise(steps: int, drawn: random.Random) -> Series:
    """Shapes that change slowly: each step remembers 95 % of the one before, 16 MiB in spread."""
    value, made = 0.0, []
    for _ in range(steps):
        value = 0.95 * value + drawn.gauss(0, 1) * math.sqrt(1 - 0.95**2)
        made.append((1 << 30) + 16 * MIB * value)
    return made


def collected(steps: int, drawn: random.Random) -> Series:
    """Garbage of 1 MiB a step that a collector frees at uneven times, 4 times a run at least."""
    made, held, left = [], 0, 0
    period = drawn.randint(2, min(50, steps // 8))
    for _ in range(steps):
        if left == 0:
            held, left = 0, drawn.randint(period, 2 * period)
        held, left = held + MIB, left - 1
        made.append(float(held))
    return made


def saw(steps: int, drawn: random.Random) -> Series:
    """Memory that is kept for up to half of the run, then given back; any period and phase."""
    length, phase = steps * drawn.uniform(0.01, 0.5), drawn.random()
    return [512 * MIB * ((n / length + phase) % 1) for n in range(steps)]


def jumps(most: int, size: int) -> Kind:
    """Allocations that stay, as captures of new shapes have pools, under some noise."""

    def make(steps: int, drawn: random.Random) -> Series:
        places = [drawn.randrange(steps) for _ in range(drawn.randint(min(2, most), most))]
        return [size * sum(n >= at for at in places) + drawn.uniform(0, MIB) for n in range(steps)]

    return make


def warm_up(least: float, most: float) -> Kind:
    """Caches that fill, with a time constant of such shares of the run, under some noise."""

    def make(steps: int, drawn: random.Random) -> Series:
        constant = steps * drawn.uniform(least, most)
        return [
            512 * MIB * (1 - math.exp(-n / constant)) + drawn.uniform(0, 64 * KIB)
            for n in range(steps)
        ]

    return make


KINDS: dict[str, Kind] = {
    "flat": flat, "noise of 1 MiB": noise(MIB), "noise of 16 MiB": noise(16 * MIB),
    "slow noise, 16 MiB": slow_noise, "garbage collected now and then": collected,
    "sawtooth, up to half of the run": saw, "one jump": jumps(1, 256 * MIB),
    "two to six jumps": jumps(6, 64 * MIB), "warm-up, up to a quarter": warm_up(0.01, 0.25),
    "warm-up that has not ended": warm_up(0.5, 1.0),
}  # fmt: skip
LEAKS: dict[str, Callable[[int], float]] = {
    "none": lambda step: 0.0, "1 KiB a step": lambda step: KIB * step,
    "64 KiB a step": lambda step: 64 * KIB * step,
    "64 KiB every 20th": lambda step: 64 * KIB * (step // 20),
}  # fmt: skip


def share(kind: str, leak: str, steps: int, number: int) -> float:
    """The share of `number` series that grow, by the test."""
    growing = 0
    for place in range(number):
        # Text seeds Python's generator alike everywhere; the same series with and without a leak.
        series = KINDS[kind](steps, random.Random(f"{kind}/{steps}/{place}"))
        growing += slope_of([value + LEAKS[leak](n) for n, value in enumerate(series)]).grows()
    return growing / number


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibration.slopes")
    parser.add_argument("--series", type=int, default=1000, help="of each kind and length")
    parser.add_argument("--steps", type=int, nargs="*", default=[64, 300, 2000], help="lengths")
    asked = parser.parse_args()
    columns = [(leak, steps) for leak in LEAKS for steps in asked.steps]
    row(["series of live bytes", *(f"{leak}, {n} steps" for leak, n in columns)])
    row(["---"] * (1 + len(columns)))
    flat_shares: dict[str, set[float]] = {leak: set() for leak in LEAKS}
    for kind in KINDS:
        shares = [share(kind, leak, steps, asked.series) for leak, steps in columns]
        row([kind, *(f"{100 * each:.4g} %" for each in shares)])
        for (leak, _), each in zip(columns, shares, strict=True):
            flat_shares[leak] |= {each} if kind == "flat" else set()
    return int(flat_shares["none"] != {0.0} or flat_shares["64 KiB a step"] != {1.0})


def row(cells: Sequence[str]) -> None:
    """A line of the table."""
    sys.stdout.write(f"| {' | '.join(cells)} |\n")


if __name__ == "__main__":
    sys.exit(main())
