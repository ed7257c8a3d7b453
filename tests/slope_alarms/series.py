"""Series of live bytes, one a step, as trainings make them; most do not leak.

A kind is a function of the number of steps and a generator. `LEAKS` are added to every kind.
"""

import math
import random
from collections.abc import Callable

KIB, MIB = 1 << 10, 1 << 20
Series = list[float]
Kind = Callable[[int, random.Random], Series]


def flat(steps: int, drawn: random.Random) -> Series:
    """The same after every step, as of a training whose shapes do not change."""
    return [float(drawn.randrange(1 << 36))] * steps


def noise(swing: int) -> Kind:
    """Another number of tokens each step: independent of the step before."""

    def make(steps: int, drawn: random.Random) -> Series:
        return [drawn.uniform(0, swing) for _ in range(steps)]

    return make


def slow_noise(steps: int, drawn: random.Random) -> Series:
    """Shapes that change slowly: each step remembers 95 % of the one before, 16 MiB in spread."""
    value, made = 0.0, []
    for _ in range(steps):
        value = 0.95 * value + drawn.gauss(0, 1) * math.sqrt(1 - 0.95**2)
        made.append(1 << 34 if value > 60 else (1 << 30) + 16 * MIB * value)
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


def jump(steps: int, drawn: random.Random) -> Series:
    """One allocation that stays, anywhere in the run, under noise of 1 MiB."""
    at = drawn.randrange(steps)
    return [256 * MIB * (n >= at) + drawn.uniform(0, MIB) for n in range(steps)]


def stairs(steps: int, drawn: random.Random) -> Series:
    """Two to six allocations that stay: captures of new shapes, each with a pool of its own."""
    places = [drawn.randrange(steps) for _ in range(drawn.randint(2, 6))]
    return [64 * MIB * sum(n >= at for at in places) + drawn.uniform(0, MIB) for n in range(steps)]


def warm_up(steps: int, drawn: random.Random) -> Series:
    """Caches that fill, with a time constant of up to a quarter of the run, under some noise."""
    constant = steps * drawn.uniform(0.01, 0.25)
    return [
        512 * MIB * (1 - math.exp(-n / constant)) + drawn.uniform(0, 64 * KIB) for n in range(steps)
    ]


def slow_warm_up(steps: int, drawn: random.Random) -> Series:
    """The same with a time constant of a half to all of the run: it has not settled at the end."""
    constant = steps * drawn.uniform(0.5, 1)
    return [512 * MIB * (1 - math.exp(-n / constant)) for n in range(steps)]


KINDS: dict[str, Kind] = {
    "flat": flat,
    "noise of 1 MiB": noise(MIB),
    "noise of 16 MiB": noise(16 * MIB),
    "slow noise, 16 MiB": slow_noise,
    "garbage collected now and then": collected,
    "sawtooth, up to half of the run": saw,
    "one jump": jump,
    "two to six jumps": stairs,
    "warm-up, up to a quarter": warm_up,
    "warm-up that has not ended": slow_warm_up,
}
LEAKS = {
    "none": 0, "1 KiB a step": KIB, "64 KiB a step": 64 * KIB, "64 KiB every 20th": -64 * KIB
}  # fmt: skip
"""Bytes a step; below 0: so many in every 20th step."""


def leaked(bytes_per_step: int, step: int) -> float:
    """What has leaked after a step."""
    return float(bytes_per_step * step if bytes_per_step >= 0 else -bytes_per_step * (step // 20))
