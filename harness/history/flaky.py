"""The flaky ledger: cases whose verdict changed though neither code nor environment did, and cases
that the machine failed before they had one.

A *repeat* is an answer whose case, commit and environment are those of an earlier answer; the rate
is the share of repeats with another verdict than the answer before them. It is a rate of all
repeats, not of those cases that happened to change, so it does not overstate. Attempts that the
machine failed change no verdict and are counted apart: a case that passes on its second attempt
every night is not a case that passes.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import NormalDist

from harness.history.trend import SAYS_NOTHING, CaseTrend, Night
from harness.records import Json

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Flaky(Json):
    """A case whose verdict changed by itself.

    Attributes:
        repeats: answers that had an equal predecessor.
        changes: repeats with another verdict.
        low: lower end of the interval of `changes / repeats`, at 95 %.
        high: its upper end.
        verdicts: those that were seen, in order.
        last: the last answer that changed, or that took more than one attempt.
        retried: attempts that the machine failed, by failure.
    """

    scenario: str
    case_id: str
    repeats: int
    changes: int
    low: float
    high: float
    verdicts: tuple[str, ...]
    last: Night
    retried: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Share of the repeats that changed; 0 without a repeat."""
        return self.changes / self.repeats if self.repeats else 0.0


def flaky_cases(trends: Iterable[CaseTrend]) -> tuple[Flaky, ...]:
    """The cases that changed by themselves, worst first: by the lower end of the interval,
    then by attempts that the machine failed."""
    found = [entry for trend in trends if (entry := _judged(trend)) is not None]
    return tuple(sorted(found, key=_rank))


def _rank(entry: Flaky) -> tuple[float, int, str, str]:
    return -entry.low, -sum(entry.retried.values()), entry.scenario, entry.case_id


def _judged(trend: CaseTrend) -> Flaky | None:
    before: dict[tuple[str, str], Night] = {}
    repeats, changed = 0, list[Night]()
    for night in trend.nights:
        # What is not known is not known to be equal; what did not run has no verdict.
        if not night.commit or not night.environment or night.outcome == "skipped":
            continue
        if night.what in SAYS_NOTHING:
            continue
        place = (night.commit, night.environment)
        if (earlier := before.get(place)) is not None and _may_compare(earlier, night):
            repeats += 1
            if _verdict(earlier) != _verdict(night):
                changed.append(night)
        before[place] = night
    again = [night for night in trend.nights if night.retried]
    if not changed and not again:
        return None
    low, high = wilson(len(changed), repeats) if repeats else (0.0, 1.0)
    failures = Counter(entry.partition(": ")[2] for night in again for entry in night.retried)
    return Flaky(
        scenario=trend.scenario, case_id=trend.case_id, repeats=repeats, changes=len(changed),
        low=low, high=high, last=[*again, *changed][-1],
        retried=dict(sorted(failures.items())),
        verdicts=tuple(dict.fromkeys(
            _verdict(night) for night in trend.nights if night.outcome != "skipped"
        )),
    )  # fmt: skip


def _may_compare(earlier: Night, night: Night) -> bool:
    # A run that died early recorded no fingerprint: that is no reason to let it off.
    return not earlier.series or not night.series or earlier.series == night.series


def _verdict(night: Night) -> str:
    return f"{night.outcome} {night.what}".strip()


def wilson(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Journal of the American Statistical Ass. 1927).

    Raises:
        ValueError: fewer than one trial, or successes that do not fit.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"Expected 0 <= successes <= trials >= 1, got {successes} of {trials}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, extra = successes / trials, z * z / trials
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / trials + extra / (4 * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)
