"""Two run folders side by side: the environment first, then what is worse, case by case.

Bits and values are compared where the runs did equal work in equal environments; elsewhere the
case is `incomparable`, and only its verdicts are compared. Of each time and peak the *noise* is
said: the distance between reference and control, which are one run made twice, as a root of the
mean square over all such pairs; or if that is more, the spread of steps within the runs.

Worse is: a verdict further from `passed`, a case that is gone or came without passing, bits that
changed, a step time or peak that rose by more than its threshold. The threshold is `MIN_RATIOS`; or
if that is more, the noise times what Student's t of so many pairs exceeds once in all cases of
`1 / FALSE_ALARMS` comparisons, and no less than `OF_WIDEST` times the widest pair.

Of 100 comparisons of equal runs, in which every case has a reference of its own, so many raise a
false alarm (`python -m benchmarks.change_points` measures them, too):

    noise of a run       1 case   10 cases   100 cases
    normal                  1.0        0.9         0.3
    Laplace                 1.4        3.3         1.3
    1 of 20 runs odd        1.8        9.2         3.5
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.history.entries import CaseEntry, FolderEntry, RunEntry
from harness.history.student import quantile
from harness.history.trend import METRICS, facts_of
from harness.provenance import different, flat, told
from harness.records import ExitCode, Json, Outcome

MIN_RATIOS = {"step_s": 0.03, "peak_bytes": 0.005}
FALSE_ALARMS = 0.01
OF_WIDEST = 1.5
"""Part of the widest distance of two equal runs that a change must exceed: tails are heavy."""
_SIGMA_OF_MAD = 1.4826
_OF_A_MEDIAN = 1.2533
"""Standard deviation of a median of normal values over that of their mean."""

Change = Literal["same", "better", "worse", "noisy"]
Presence = Literal["both", "added", "removed"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentChange(Json):
    """One fact in which the two runs' environments differ."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Delta(Json):
    """One value of the candidate before and after.

    Attributes:
        ratio: change as a part of the value before.
        noise: standard deviation of that ratio.
        threshold: from which it counts.
        change: `noisy` if it does not count and the threshold is past 25 %.
    """

    metric: str
    before: float
    after: float
    ratio: float
    noise: float
    threshold: float
    change: Change


@dataclass(frozen=True, kw_only=True)
class CaseChange(Json):
    """One case before and after. Verdicts are "" where there is none.

    Attributes:
        worse: why it is worse, in words; empty if it is not.
        bits: legs of which the loss or the state changed, as 'candidate: loss bits'.
        incomparable: why bits and values are not compared; "" if they are.
    """

    case_id: str
    presence: Presence
    before: str
    after: str
    worse: tuple[str, ...] = ()
    bits: tuple[str, ...] = ()
    deltas: tuple[Delta, ...] = ()
    incomparable: str = ""

    @property
    def differs(self) -> bool:
        """Whether there is anything to tell."""
        moved = any(delta.change in ("worse", "better") for delta in self.deltas)
        return bool(self.before != self.after or self.worse or self.incomparable or moved)


@dataclass(frozen=True, kw_only=True)
class Comparison(Json):
    """The whole. `noise` is the deviation of a ratio of two runs, by metric, from pairs of runs."""

    before: FolderEntry
    after: FolderEntry
    environment: tuple[EnvironmentChange, ...]
    cases: tuple[CaseChange, ...]
    noise: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> ExitCode:
        """1 if anything is worse, else 6 if anything could not be compared or is open, else 0."""
        if any(case.worse for case in self.cases):
            return ExitCode.FAILED
        shared = [case for case in self.cases if case.presence == "both"]
        if not shared or any(case.incomparable for case in shared) or open_cases(self.after):
            return ExitCode.NO_VERDICT
        return ExitCode.PASSED


def open_cases(folder: FolderEntry) -> int:
    """How many cases were planned and have no answer."""
    return max(0, folder.num_cases - len({case.case_id for case in folder.cases}))


def compare(before: FolderEntry, after: FolderEntry) -> Comparison:
    """Compare what two run folders hold; `before` is the one to go by."""
    left, right = _Side(before), _Side(after)
    names = [*left.cases, *(name for name in right.cases if name not in left.cases)]
    level = FALSE_ALARMS / max(1, len(names))
    noise = {metric: noise_of(_pairs(metric, (left, right)), level) for metric in MIN_RATIOS}
    return Comparison(
        before=before,
        after=after,
        environment=tuple(_environment(left, right, names)),
        cases=tuple(_case(name, left, right, noise) for name in names),
        noise={name: of.deviation for name, of in noise.items() if of.deviation is not None},
    )


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Of one metric: how far the ratio of two equal runs may be off.

    Attributes:
        deviation: of its logarithm; None if no run was made twice.
        factor: of the deviation, from which a change counts.
        least: from which a change counts at the earliest.
    """

    deviation: float | None
    factor: float
    least: float


def noise_of(pairs: Sequence[float], level: float) -> Noise:
    """The noise that pairs of equal runs show.

    Args:
        pairs: distances of the logarithms of their values.
        level: probability at which one equal case may be taken for a changed one.
    """
    squares = math.fsum(distance * distance for distance in pairs)
    return Noise(
        deviation=math.sqrt(squares / len(pairs)) if pairs else None,
        factor=quantile(level, max(1, len(pairs))),
        least=OF_WIDEST * max(pairs, default=0.0),
    )


class _Side:
    """One run folder, by name: the last answer for each case, the last attempt of each run."""

    def __init__(self, folder: FolderEntry) -> None:
        self.folder = folder
        self.cases = {case.case_id: case for case in folder.cases}
        self.runs = {run.key: run for run in folder.runs}

    def run(self, case: CaseEntry, leg: str) -> RunEntry | None:
        return self.runs.get(getattr(case, leg))


def _environment(left: _Side, right: _Side, names: Iterable[str]) -> list[EnvironmentChange]:
    """What differs in packages, driver, variables and hardware, then in what ranks recorded."""
    ours, theirs = (
        {"commit": side.folder.commit or "unknown", **flat("", side.folder.environment),
         "slots": side.folder.slots}
        for side in (left, right)
    )  # fmt: skip
    found = {
        name: EnvironmentChange(name=name, before=told(ours, name), after=told(theirs, name))
        for name in different(ours, theirs)
    }
    for name in names:
        if name not in left.cases or name not in right.cases:
            continue
        pair = [side.run(side.cases[name], "candidate") for side in (left, right)]
        if pair[0] is None or pair[1] is None or pair[0].fingerprint == pair[1].fingerprint:
            continue
        mine, other = facts_of(left.folder, pair[0]), facts_of(right.folder, pair[1])
        for key in different(mine, other):
            if key.startswith("ranks.") and "" not in (pair[0].fingerprint, pair[1].fingerprint):
                found.setdefault(key, EnvironmentChange(
                    name=key, before=told(mine, key), after=told(other, key)
                ))  # fmt: skip
    return list(found.values())


def _case(name: str, left: _Side, right: _Side, noise: Mapping[str, Noise]) -> CaseChange:
    ours, theirs = left.cases.get(name), right.cases.get(name)
    before, after = _verdict(ours), _verdict(theirs)
    if ours is None or theirs is None:
        gone = theirs is None
        worse = "it is gone" if gone else "" if after == "passed" else f"it is new and {after}"
        return CaseChange(
            case_id=name, presence="removed" if gone else "added", before=before, after=after,
            worse=(worse,) if worse and after != "skipped unsupported" else (),
        )  # fmt: skip
    worse_words = [f"{before} became {after}"] if _is_worse(ours, theirs) else []
    why = _incomparable(left, right, ours, theirs)
    if why:
        return CaseChange(
            case_id=name, presence="both", before=before, after=after,
            worse=tuple(worse_words), incomparable=why,
        )  # fmt: skip
    bits = _bits(left, right, ours, theirs)
    worse_words += [f"{changed} changed" for changed in bits]
    pair = (left.run(ours, "candidate"), right.run(theirs, "candidate"))
    deltas = [
        delta
        for metric in MIN_RATIOS
        if pair[0] is not None
        and pair[1] is not None
        and (delta := _delta(metric, pair[0], pair[1], noise[metric])) is not None
        and (metric != "step_s" or left.folder.slots == right.folder.slots)
    ]
    worse_words += [
        f"{_NAMES[delta.metric]} rose by {delta.ratio:.1%}"
        for delta in deltas
        if delta.change == "worse"
    ]
    return CaseChange(
        case_id=name, presence="both", before=before, after=after, worse=tuple(worse_words),
        bits=bits, deltas=tuple(deltas),
    )  # fmt: skip


def _is_worse(before: CaseEntry, after: CaseEntry) -> bool:
    return _BADNESS[after.outcome] > _BADNESS[before.outcome]


_COMPARED_LEGS = ("reference", "candidate")
_BADNESS: dict[Outcome, int] = {
    "passed": 0, "skipped": 1, "incomparable": 2, "error": 2, "failed": 3,
}  # fmt: skip
_NAMES = {"step_s": "step time", "peak_bytes": "peak memory"}


def _verdict(case: CaseEntry | None) -> str:
    return "" if case is None else f"{case.outcome} {case.what}".strip()


def _incomparable(left: _Side, right: _Side, ours: CaseEntry, theirs: CaseEntry) -> str:
    """Why two answers' bits and values are not compared; "" if they are, or have none."""
    if "skipped" in (ours.outcome, theirs.outcome):
        return "" if ours.outcome == theirs.outcome else "it was skipped in one of the two"
    if not left.folder.environment or not right.folder.environment:
        return "the environment was not recorded"
    if left.folder.environment_id != right.folder.environment_id:
        return "the environments differ"
    pairs = {leg: (left.run(ours, leg), right.run(theirs, leg)) for leg in _COMPARED_LEGS}
    reasons = (_unlike(leg, *pair) for leg, pair in pairs.items())
    return next((why for why in reasons if why), "")


def _unlike(leg: str, mine: RunEntry | None, other: RunEntry | None) -> str:
    if mine is None or other is None:
        return f"there is no run of the {leg}"
    if mine.work != other.work:
        return f"the settings of the {leg} differ"
    if not mine.fingerprint or not other.fingerprint:
        return f"not every rank of the {leg} recorded its environment"
    if mine.fingerprint != other.fingerprint:
        return f"ranks of the {leg} ran in different environments"
    if not mine.what and not other.what and not (mine.loss_bits and other.loss_bits):
        return f"the bits of the {leg} were not recorded"
    return ""


def _bits(left: _Side, right: _Side, ours: CaseEntry, theirs: CaseEntry) -> tuple[str, ...]:
    changed = []
    for leg in _COMPARED_LEGS:
        mine, other = left.run(ours, leg), right.run(theirs, leg)
        if mine is None or other is None or not (mine.loss_bits and other.loss_bits):
            continue
        if mine.loss_bits != other.loss_bits:
            changed.append(f"{leg}: loss bits")
        elif mine.state_bits and other.state_bits and mine.state_bits != other.state_bits:
            changed.append(f"{leg}: state bits")
    return tuple(changed)


def _delta(metric: str, left: RunEntry, right: RunEntry, of: Noise) -> Delta | None:
    before, after = METRICS[metric](left), METRICS[metric](right)
    if before is None or after is None or before <= 0:
        return None
    within = math.hypot(_noise_within(metric, left), _noise_within(metric, right))
    noise = max(within, of.deviation or 0.0)
    ratio = after / before - 1
    threshold = max(MIN_RATIOS[metric], of.factor * noise, of.least)
    change: Change = "same"
    if abs(ratio) > threshold:
        change = "worse" if ratio > 0 else "better"
    elif threshold > 0.25:
        change = "noisy"
    return Delta(
        metric=metric, before=float(before), after=float(after), ratio=ratio, noise=noise,
        threshold=threshold, change=change,
    )  # fmt: skip


def _noise_within(metric: str, run: RunEntry) -> float:
    """Deviation of a run's median step as a part of it, if steps vary by themselves."""
    if metric != "step_s" or not run.step_s or run.step_spread_s is None or not run.timed_steps:
        return 0.0
    sigma = _OF_A_MEDIAN * _SIGMA_OF_MAD * run.step_spread_s / math.sqrt(run.timed_steps)
    return sigma / run.step_s


def _pairs(metric: str, sides: Sequence[_Side]) -> list[float]:
    """Distances of the logarithms of runs that were made twice, each pair of runs once."""
    logs: dict[str, float] = {}
    for number, side in enumerate(sides):
        for case in side.cases.values():
            pair = (side.run(case, "reference"), side.run(case, "control"))
            values = [METRICS[metric](run) if run and not run.what else None for run in pair]
            if values[0] and values[1]:
                logs[f"{number} {case.reference}"] = abs(math.log(values[1] / values[0]))
    return list(logs.values())
