"""Where a series of nightly values changed for good: robust, at a stated rate of false alarms.

    values -> outliers replaced -> segments of least squares -> each border must pass a t-test

1. *Outliers*: a value further than `LIMIT` deviations from the median of the seven nights around it
   is replaced by that median (Hampel's filter: Davies and Gather, The identification of multiple
   outliers, JASA 1993). The deviation comes from differences of neighbours, which a step does not
   inflate. For the noise that the test goes by, it is only pulled in: what is replaced must not
   make the rest look steadier than it is.
2. *Segments*: the exact minimum of squared error plus `PENALTY` deviations squared a border, by
   dynamic programming (Jackson et al., An algorithm for optimal partitioning of data on an
   interval, IEEE Signal Processing Letters 2005). The penalty is low: it only proposes.
3. *Test*: Student's t of the two segments at each border, as in Hunter (Fleming et al., Hunter:
   Using change point detection to hunt for performance regressions, ICPE 2023), turned into
   normal deviations by Wallace's approximation (Annals of Mathematical Statistics 1959). The
   weakest border below `Z_LIMIT` is dropped and the rest are tested again. Noise whose neighbours
   resemble each other has its variance raised by (1 + r) / (1 - r), r being their correlation.

Rates in percent of series of 60 nights, as `python -m benchmarks.change_points 250` measures them:

    noise                     false alarm, looked at once   looked at every night
    normal                                  under 0.4                 under 0.4
    Laplace                                       0.4                       0.8
    1 of 20 nights odd                      under 0.4                       0.4
    correlated by 0.3                             2.0                       5.6
    drifting by 1.2 deviations                    3.2                       4.0
    one of two hosts a night                under 0.4                       0.8
    a host for nights                              53                        72

Two hosts that differ by three deviations, of which one does the work for nights on end, are lasting
changes as far as a series can tell: what tells them apart belongs into the environment. Nights that
are missing are not in the series and change nothing; another environment is another series, of
which nothing is told for `MIN_HISTORY` nights.

A step of three deviations is found, in percent of series:

    nights before   by the fifth   by the tenth   Student's t by the fifth   over the reference
               15             45             92                         42                  100
               30             81             98                         76                  100
               55             89            100                         92                  100

Student's t at the same level, told where to look, is the best that any test of one normal series
can do: what is missed is missed for want of nights, and a laxer level would raise an alarm a night
in a matrix of a thousand cases. More is had from the night itself: the step time over the
reference's (`trend`) is free of the machine's mood. The last column is for moods that are nine
tenths of the noise's deviation; where the legs share none, it finds less than the series itself.

A segment has at least `MIN_NIGHTS` nights, so that a change is told on its third night at the
earliest and one or two odd nights never are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from harness.records import Json

MIN_NIGHTS = 3
MIN_HISTORY = 12
"""Values needed before anything is told."""
Z_LIMIT = 4.5
PENALTY = 12.0
LIMIT = 3.5
WINDOW = 3
"""Nights on either side whose median a value is held against."""
NIGHTS_AT_AN_END = 5
"""The same at the ends of a series: two odd nights are outvoted, three are a new level."""
FLOOR = 0.0005
"""Noise below this part of the value is taken for this: equal values have none to measure."""
_SIGMA_OF_MAD = 1.4826


@dataclass(frozen=True, kw_only=True)
class Change(Json):
    """A lasting change: from `at` on, values are `after` instead of `before`.

    Attributes:
        at: place in the series of the first value of the new level.
        before: level of the segment before it, in the unit of the values.
        after: level of the segment that starts at it.
        noise: standard deviation around the levels, as a part of `before`.
        z: how many deviations apart the levels are.
    """

    at: int
    before: float
    after: float
    noise: float
    z: float

    @property
    def ratio(self) -> float:
        """The change as a part of the level before it: 0.03 is 3 % more."""
        return (self.after - self.before) / self.before if self.before else math.inf


def find_changes(values: Sequence[float]) -> tuple[Change, ...]:
    """The lasting changes in a series of one value a night, in order.

    Args:
        values: finite, oldest first, all of equal work on equal machines.
    """
    if len(values) < MIN_HISTORY:
        return ()
    sigma = deviation(values)
    cleaned, pulled_in = _cleaned(values, sigma)
    borders = _segments(cleaned, sigma)
    while True:
        spread = _spread(pulled_in, borders)
        scores = {at: _score(cleaned, borders, at, spread) for at in borders[1:-1]}
        weakest = min(scores, key=lambda at: scores[at], default=None)
        if weakest is None or scores[weakest] >= Z_LIMIT:
            break
        borders.remove(weakest)
    found = []
    for before, at, after in zip(borders, borders[1:], borders[2:], strict=False):
        level = median(values[before:at])
        found.append(
            Change(
                at=at, before=level, after=median(values[at:after]),
                noise=spread / abs(level) if level else math.inf, z=scores[at],
            )
        )  # fmt: skip
    return tuple(found)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of one night from the next, blind to steps and to a few outliers."""
    gaps = [abs(right - left) for left, right in pairwise(values)]
    measured = _SIGMA_OF_MAD * median(gaps) / math.sqrt(2) if gaps else 0.0
    return max(measured, _floor(values))


def _floor(values: Sequence[float]) -> float:
    return max(FLOOR * abs(median(values)), math.ulp(0.0)) if values else math.ulp(0.0)


def _cleaned(values: Sequence[float], sigma: float) -> tuple[list[float], list[float]]:
    """Values with outliers replaced, and the same with outliers only pulled in."""
    cleaned, pulled_in = [], []
    for place, value in enumerate(values):
        # At the ends of the series, the five nights that are nearest to the end.
        begin = max(0, min(place - WINDOW, len(values) - NIGHTS_AT_AN_END))
        end = max(place + WINDOW + 1, NIGHTS_AT_AN_END)
        middle = median(values[begin:end])
        far = LIMIT * sigma
        cleaned.append(value if abs(value - middle) <= far else middle)
        pulled_in.append(min(max(value, middle - far), middle + far))
    return cleaned, pulled_in


def _segments(values: Sequence[float], sigma: float) -> list[int]:
    """Borders of the cheapest segmentation, 0 and the length included."""
    base = values[0]  # sums of squares of small numbers keep their digits
    sums, squares = [0.0], [0.0]
    for value in values:
        sums.append(sums[-1] + (value - base))
        squares.append(squares[-1] + (value - base) ** 2)
    penalty = PENALTY * sigma * sigma
    best = [0.0] + [math.inf] * len(values)
    start = [0] * (len(values) + 1)
    for end in range(MIN_NIGHTS, len(values) + 1):
        for begin in (0, *range(MIN_NIGHTS, end - MIN_NIGHTS + 1)):
            total = sums[end] - sums[begin]
            error = squares[end] - squares[begin] - total * total / (end - begin)
            cost = best[begin] + error + (penalty if begin else 0.0)
            if cost < best[end]:
                best[end], start[end] = cost, begin
    borders = [len(values)]
    while borders[-1]:
        borders.append(start[borders[-1]])
    return borders[::-1]


def _spread(values: Sequence[float], borders: Sequence[int]) -> float:
    """Standard deviation around the levels of the segments, raised for resembling neighbours."""
    residuals: list[float] = []
    products = 0.0
    for begin, end in pairwise(borders):
        level = fmean(values[begin:end])
        own = [value - level for value in values[begin:end]]
        products += sum(left * right for left, right in pairwise(own))
        residuals += own
    total = sum(residual * residual for residual in residuals)
    free = max(1, len(values) - (len(borders) - 1))
    resemblance = products / total if total else 0.0
    # What so short a series shows by chance is not held against it.
    excess = min(max(0.0, resemblance - 1.0 / math.sqrt(len(values))), 0.8)
    spread = math.sqrt(total / free * (1 + excess) / (1 - excess))
    return max(spread, _floor(values))


def _score(values: Sequence[float], borders: Sequence[int], at: int, spread: float) -> float:
    place = borders.index(at)
    left, right = values[borders[place - 1] : at], values[at : borders[place + 1]]
    distance = abs(fmean(right) - fmean(left))
    t = distance / (spread * math.sqrt(1 / len(left) + 1 / len(right)))
    free = max(1, len(values) - (len(borders) - 1))
    return math.sqrt(free * math.log1p(t * t / free)) * (8 * free + 1) / (8 * free + 3)
