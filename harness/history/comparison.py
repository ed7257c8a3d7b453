"""Two run folders compared: the environment first, then what is worse, case by case.

Bits and values are compared where the runs did equal work in equal environments; elsewhere the
case is `incomparable`, and only its verdicts are compared. The *noise* of times and peaks is the
distance between reference and control, which are one run made twice, as a root of the mean square
over all such pairs; where no run was made twice, times and peaks are not compared.

Worse is: a verdict further from `passed`, a case that is gone or came without passing, bits that
changed, a step time or peak that rose by more than `MIN_RATIOS`, than the noise times what
Student's t of so many pairs exceeds once in all cases of `1 / FALSE_ALARMS` comparisons, and than
`OF_WIDEST` times the widest pair, as tails are heavy. `python -m benchmarks.change_points` measures
how often equal runs raise an alarm.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from harness.checks.within import quantile
from harness.history.entries import FolderEntry, RunEntry
from harness.history.trend import METRIC_NAMES
from harness.provenance import different, flat, told
from harness.records import ExitCode, Json, Outcome

MIN_RATIOS = {"step_s": 0.03, "peak_bytes": 0.005}
FALSE_ALARMS, OF_WIDEST = 0.01, 1.5
NOISY = 0.25
"""A threshold past this says nothing."""
Change = Literal["same", "better", "worse", "noisy"]
State = Literal["worse", "incomparable", "added", "changed", "noisy", "alike"]
_BADNESS: dict[Outcome, int] = {
    "passed": 0, "skipped": 1, "incomparable": 2, "error": 2, "failed": 3,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Delta(Json):
    """One value of the candidate before and after."""

    metric: str
    before: float
    after: float
    ratio: float  # the change as a part of the value before
    noise: float  # standard deviation of it
    threshold: float  # from where it counts
    change: Change


@dataclass(frozen=True, kw_only=True)
class CaseChange(Json):
    """One case before and after. Verdicts are "" where there is none."""

    case_id: str
    before: str
    after: str
    worse: tuple[str, ...] = ()  # why, in words
    bits: tuple[str, ...] = ()  # what changed, as 'candidate: loss bits'
    deltas: tuple[Delta, ...] = ()
    incomparable: str = ""  # why bits and values are not compared

    @property
    def state(self) -> State:
        """The first of `State` that fits."""
        if self.worse or self.incomparable or not self.before:
            return "worse" if self.worse else "incomparable" if self.incomparable else "added"
        found = {delta.change for delta in self.deltas}
        if self.before != self.after or "better" in found:
            return "changed"
        return "noisy" if "noisy" in found else "alike"


@dataclass(frozen=True, kw_only=True)
class Comparison(Json):
    """The whole."""

    before: FolderEntry
    after: FolderEntry
    environment: dict[str, tuple[str, str]]  # before and after, where they differ
    cases: tuple[CaseChange, ...]
    noise: dict[str, float] = field(default_factory=dict)  # of ratios of two runs, by metric

    @property
    def exit_code(self) -> ExitCode:
        """1 if anything is worse, else 6 if anything could not be compared or is open, else 0."""
        if any(case.worse for case in self.cases):
            return ExitCode.FAILED
        shared = [case for case in self.cases if case.before and case.after]
        unknown = any(case.incomparable for case in shared) or open_cases(self.after)
        return ExitCode.NO_VERDICT if unknown or not shared else ExitCode.PASSED


class Noise(NamedTuple):
    """How far the ratio of two equal runs may be off: a change counts from `least` on, and from
    `factor` times the `deviation` of its logarithm; that is None if no run was made twice."""

    deviation: float | None
    factor: float
    least: float


def noise_of(pairs: Sequence[float], level: float) -> Noise:
    """What pairs of equal runs show, by the distances of the logarithms of their values.

    `level` is the probability at which one equal case may be taken for a changed one.
    """
    squares = math.fsum(distance * distance for distance in pairs)
    deviation = math.sqrt(squares / len(pairs)) if pairs else None
    factor = quantile(2 * level, max(1, len(pairs)))
    return Noise(deviation, factor, OF_WIDEST * max(pairs, default=0.0))


def open_cases(folder: FolderEntry) -> int:
    """How many cases were planned and have no answer."""
    return max(0, folder.num_cases - len({case.case_id for case in folder.cases}))


def compare(before: FolderEntry, after: FolderEntry) -> Comparison:
    """Compare what two run folders hold; `before` is the one to go by."""
    left, right = _Side(before), _Side(after)
    names = [*left.cases, *(name for name in right.cases if name not in left.cases)]
    level = FALSE_ALARMS / max(1, len(names))
    noise = {name: noise_of([*left.pairs(name), *right.pairs(name)], level) for name in MIN_RATIOS}
    ours, theirs = (
        {"commit": each.commit or "unknown", **flat("", each.environment), "slots": each.slots}
        for each in (before, after)
    )
    changed = {name: (told(ours, name), told(theirs, name)) for name in different(ours, theirs)}
    cases = tuple(_case(name, left, right, noise) for name in names)
    said = {name: of.deviation for name, of in noise.items() if of.deviation is not None}
    return Comparison(before=before, after=after, environment=changed, cases=cases, noise=said)


class _Side:
    """One run folder, by name: the last answer for each case, the last attempt of each run."""

    def __init__(self, folder: FolderEntry) -> None:
        self.folder = folder
        self.cases = {case.case_id: case for case in folder.cases}
        self.runs = {run.key: run for run in folder.runs}

    def run(self, case_id: str, role: str) -> RunEntry | None:
        return self.runs.get(getattr(self.cases[case_id], role))

    def pairs(self, metric: str) -> list[float]:
        """Distances of the logarithms of runs that were made twice, each pair of runs once."""
        logs: dict[str, float] = {}
        for name, case in self.cases.items():
            pair = (self.run(name, "reference"), self.run(name, "control"))
            first, second = (getattr(r, metric) if r and not r.what else None for r in pair)
            if first and second:
                logs[case.reference] = abs(math.log(second / first))
        return list(logs.values())


Runs = dict[str, tuple[RunEntry | None, RunEntry | None]]
"""Of one case by role, before and after."""


def _case(name: str, left: _Side, right: _Side, noise: Mapping[str, Noise]) -> CaseChange:
    ours, theirs = left.cases.get(name), right.cases.get(name)
    before, after = (entry.verdict if entry else "" for entry in (ours, theirs))
    if ours is None or theirs is None:
        why = "it is gone" if theirs is None else f"it is new and {after}"
        worse = () if after in ("passed", "skipped unsupported") else (why,)
        return CaseChange(case_id=name, before=before, after=after, worse=worse)
    runs = {role: (left.run(name, role), right.run(name, role))
            for role in ("reference", "candidate")}  # fmt: skip
    is_worse = _BADNESS[theirs.outcome] > _BADNESS[ours.outcome]
    words = [f"{before} became {after}"] if is_worse else []
    if "skipped" in (ours.outcome, theirs.outcome):
        why = "" if ours.outcome == theirs.outcome else "it was skipped in one of the two"
    else:
        why = _incomparable(left.folder, right.folder, runs)
    bits = () if why else tuple(_bits(runs))
    deltas = () if why else tuple(_deltas(left.folder, right.folder, runs, noise))
    words += [f"{changed} changed" for changed in bits]
    rose = [delta for delta in deltas if delta.change == "worse"]
    words += [f"{METRIC_NAMES[delta.metric]} rose by {delta.ratio:.1%}" for delta in rose]
    return CaseChange(
        case_id=name, before=before, after=after, worse=tuple(words), bits=bits, deltas=deltas,
        incomparable=why,
    )  # fmt: skip


def _incomparable(left: FolderEntry, right: FolderEntry, runs: Runs) -> str:
    """Why two answers' bits and values are not compared; "" if they are."""
    if not left.environment or not right.environment:
        return "the environment was not recorded"
    if left.environment_id != right.environment_id:
        return "the environments differ"
    for role, (mine, other) in runs.items():
        why = ""
        if mine is None or other is None:
            why = f"there is no run of the {role}"
        elif not mine.fingerprint or not other.fingerprint:
            why = f"not every rank of the {role} recorded its environment"
        elif mine.fingerprint != other.fingerprint:
            why = f"the environments of the {role}'s ranks differ"
        elif mine.work != other.work:
            why = f"the settings of the {role} differ"
        elif not mine.what and not other.what and not (mine.loss_bits and other.loss_bits):
            why = f"the bits of the {role} were not recorded"
        if why:
            return why
    return ""


def _bits(runs: Runs) -> Iterator[str]:
    for role, (mine, other) in runs.items():
        for name in ("loss", "state"):
            found = {getattr(run, f"{name}_bits", "") for run in (mine, other)}
            if len(found) == 2 and "" not in found:
                yield f"{role}: {name} bits"
                break


def _deltas(
    left: FolderEntry, right: FolderEntry, runs: Runs, noise: Mapping[str, Noise]
) -> Iterator[Delta]:
    mine, other = runs["candidate"]
    for metric, of in noise.items():
        before, after = getattr(mine, metric, None), getattr(other, metric, None)
        if not mine or not other or before is None or after is None or before <= 0:
            continue
        if metric == "step_s" and left.slots != right.slots:
            continue  # ranks that had more room ran faster
        if of.deviation is None:
            continue  # no run was made twice
        ratio = after / before - 1
        threshold = max(MIN_RATIOS[metric], of.factor * of.deviation, of.least)
        change: Change = "noisy" if threshold > NOISY else "same"
        if abs(ratio) > threshold:
            change = "worse" if ratio > 0 else "better"
        yield Delta(
            metric=metric, before=float(before), after=float(after), ratio=ratio,
            noise=of.deviation, threshold=threshold, change=change,
        )  # fmt: skip
