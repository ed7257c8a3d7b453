"""How far two layouts may be apart: a bound out of runs that round at random.

Layouts add in other orders, so their bits differ. The bound is probabilistic and measured on the
program itself: `NUM_SAMPLES` runs X_i that round at random (`fsdp_core.rounding`), with no axis but
that of the data, take the same steps. Roundings are independent with mean zero (N. J. Higham and
T. Mary, SIAM J. Sci. Comput. 41, 2019); to first order the error of a tensor is a sum over all of
them, and E |e|^2 <= s^2, where random rounding has 2/3 of that at most on average, so

    s^2 = 3/2 * max_i |X_i - mean X|^2 * n / (n - 1)

and errors of two runs, which are independent, have 2 s^2. Changing one rounding changes |e| by at
most 2 h_i |c_i| (McDiarmid, 1989): |e| > (1 + k) sqrt(2) s has a probability of at most
exp(-k^2 / 2), 1.5e-8 a tensor for k = 6. The largest of the samples stands for their mean, as few
samples of few independent errors may all be small.

Rows of `LEAST_ROW` elements and more are looked at alone, too: a fault of one row is small in a
tensor of many. What random rounding leaves as it is (sums of collectives, AdamW's kernel) may round
a few times: `FLOOR_ROUNDINGS` unit roundoffs of the tensor a step. Weights may also lie apart by
twice the learning rate where a gradient is nearly zero, as AdamW goes by its sign: `MOST_FLIPS`
elements a step beyond what samples show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.bisector.whole import Floats

CONFIDENCE = 6.0
LEAST_ROW = 16
FLOOR_ROUNDINGS = 8
MOST_FLIPS = 8
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff, half the gap between 1 and the next number."""


class Units(NamedTuple):
    """Distances over their bounds: between both legs, and of each to the mean of the samples."""

    both: float
    reference: float
    candidate: float


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far one tensor of both legs is apart.

    Attributes:
        name: with its group; "loss" alone.
        units: of the whole tensor, or of its worst row; above 1 is wrong.
        row: the worst of those that are wrong; None where only the whole tensor is, or nothing.
        why: what is wrong whatever rounding does; "" else.
    """

    name: str
    units: Units
    row: int | None = None
    why: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.units.both <= 1


def norms(rows: Floats) -> Floats:
    """Of each row."""
    found: Floats = np.sqrt(np.square(rows).sum(-1))
    return found


def bound_of(values: Sequence[Floats], floor: Floats, legs: float) -> Floats:
    """The bound of each row, for a distance whose error is `legs` times that of one run."""
    samples = np.stack(values[2:])
    count = len(samples)
    power = np.square(samples - samples.mean(0)).sum(-1).max(0) * count / (count - 1)
    found: Floats = (1 + CONFIDENCE) * legs * np.sqrt(1.5 * power) + floor
    return found


def distances(values: Sequence[Floats], floor: Floats) -> Floats:
    """Of both legs, in units of the bound of each row; infinite for a NaN."""
    return _in_units(norms(values[0] - values[1]), bound_of(values, floor, math.sqrt(2)))


def _in_units(distance: Floats, bound: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        units: Floats = np.where(distance == 0, 0.0, distance / bound)
    return np.where(np.isnan(units), np.inf, units)


def units_of(values: Sequence[Floats], floor: Floats) -> Units:
    """Of the worst row; values are of the reference, the candidate and samples."""
    if values[0].ndim == 1:
        values = [value[None] for value in values]
    mean = np.mean(np.stack(values[2:]), 0)
    alone = bound_of(values, floor, math.sqrt(1 + 1 / len(values[2:])))
    return Units(
        float(distances(values, floor).max()),
        float(_in_units(norms(values[0] - mean), alone).max()),
        float(_in_units(norms(values[1] - mean), alone).max()),
    )
