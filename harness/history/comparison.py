"""Two run folders compared: the environment first, then what is worse, case by case.

Bits and values are compared where the runs did equal work in equal environments; elsewhere the
case is `incomparable`, and only its verdicts are compared. The *noise* of times and peaks is the
distance between reference and control, which are one run made twice, as a root of the mean square
over all such pairs; or if that is more, the spread of steps within the runs.

Worse is: a verdict further from `passed`, a case that is gone or came without passing, bits that
changed, a step time or peak that rose by more than its threshold. The threshold is `MIN_RATIOS`; or
if that is more, the noise times what Student's t of so many pairs exceeds once in all cases of
`1 / FALSE_ALARMS` comparisons, and no less than `OF_WIDEST` times the widest pair. Of 100
comparisons of equal runs with normal noise 1 raises a false alarm (`python -m
benchmarks.change_points`); of 10 cases of which one run in twenty is six times as far out, 9.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.checks.within import quantile
from harness.history.entries import FolderEntry, RunEntry
from harness.history.trend import METRIC_NAMES, SIGMA_OF_MAD, SIGMA_OF_MEDIAN, facts_of
from harness.provenance import changes, different, flat, told
from harness.records import ExitCode, Json, Outcome

MIN_RATIOS = {"step_s": 0.03, "peak_bytes": 0.005}
FALSE_ALARMS = 0.01
OF_WIDEST = 1.5
"""Part of the widest distance of two equal runs that a change must exceed: tails are heavy."""
NOISY = 0.25
"""A threshold past this says nothing."""
Change = Literal["same", "better", "worse", "noisy"]
State = Literal["worse", "incomparable", "added", "changed", "noisy", "alike"]
_COMPARED = ("reference", "candidate")
_BADNESS: dict[Outcome, int] = {
    "passed": 0, "skipped": 1, "incomparable": 2, "error": 2, "failed": 3,
}  # fmt: skip


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
        change: `noisy` if it does not count and the threshold is past `NOISY`.
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
        bits: runs of which the loss or the state changed, as 'candidate: loss bits'.
        incomparable: why bits and values are not compared; "" if they are.
    """

    case_id: str
    before: str
    after: str
    worse: tuple[str, ...] = ()
    bits: tuple[str, ...] = ()
    deltas: tuple[Delta, ...] = ()
    incomparable: str = ""

    @property
    def state(self) -> State:
        """The first of `State` that fits."""
        if self.worse:
            return "worse"
        if self.incomparable:
            return "incomparable"
        if not self.before:
            return "added"
        changes = {delta.change for delta in self.deltas}
        if self.before != self.after or "better" in changes:
            return "changed"
        return "noisy" if "noisy" in changes else "alike"


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
        shared = [case for case in self.cases if case.before and case.after]
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
    noise = {name: noise_of([*left.pairs(name), *right.pairs(name)], level) for name in MIN_RATIOS}
    return Comparison(
        before=before,
        after=after,
        environment=tuple(_environment(left, right)),
        cases=tuple(_case(name, left, right, noise) for name in names),
        noise={name: of.deviation for name, of in noise.items() if of.deviation is not None},
    )


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
            values = [getattr(run, metric) if run and not run.what else None for run in pair]
            if values[0] and values[1]:
                logs[case.reference] = abs(math.log(values[1] / values[0]))
        return list(logs.values())


def _environment(left: _Side, right: _Side) -> Iterator[EnvironmentChange]:
    """What differs in packages, driver, variables and hardware."""
    ours, theirs = (
        {"commit": side.folder.commit or "unknown", **flat("", side.folder.environment),
         "slots": side.folder.slots}
        for side in (left, right)
    )  # fmt: skip
    for name in different(ours, theirs):
        yield EnvironmentChange(name=name, before=told(ours, name), after=told(theirs, name))


def _case(name: str, left: _Side, right: _Side, noise: Mapping[str, "Noise"]) -> CaseChange:
    ours, theirs = left.cases.get(name), right.cases.get(name)
    before, after = (entry.verdict if entry else "" for entry in (ours, theirs))
    if ours is None or theirs is None:
        worse = "it is gone" if theirs is None else f"it is new and {after}"
        accepted = after in ("passed", "skipped unsupported")
        return CaseChange(
            case_id=name, before=before, after=after, worse=() if accepted else (worse,)
        )  # fmt: skip
    is_worse = _BADNESS[theirs.outcome] > _BADNESS[ours.outcome]
    words = [f"{before} became {after}"] if is_worse else []
    why = _incomparable(name, left, right)
    bits = () if why else _bits(name, left, right)
    deltas = () if why else _deltas(name, left, right, noise)
    words += [f"{changed} changed" for changed in bits]
    words += [
        f"{METRIC_NAMES[delta.metric]} rose by {delta.ratio:.1%}"
        for delta in deltas
        if delta.change == "worse"
    ]
    return CaseChange(
        case_id=name, before=before, after=after, worse=tuple(words), bits=bits, deltas=deltas,
        incomparable=why,
    )  # fmt: skip


def _incomparable(name: str, left: _Side, right: _Side) -> str:
    """Why two answers' bits and values are not compared; "" if they are, or have none."""
    outcomes = (left.cases[name].outcome, right.cases[name].outcome)
    if "skipped" in outcomes:
        return "" if outcomes[0] == outcomes[1] else "it was skipped in one of the two"
    if not left.folder.environment or not right.folder.environment:
        return "the environment was not recorded"
    if left.folder.environment_id != right.folder.environment_id:
        return "the environments differ"
    found = (_unlike(role, name, left, right) for role in _COMPARED)
    return next((why for why in found if why), "")


def _unlike(role: str, name: str, left: _Side, right: _Side) -> str:
    mine, other = left.run(name, role), right.run(name, role)
    if mine is None or other is None:
        return f"there is no run of the {role}"
    if not mine.fingerprint or not other.fingerprint:
        return f"not every rank of the {role} recorded its environment"
    if (mine.work, mine.fingerprint) != (other.work, other.fingerprint):
        # Slots decide times alone.
        ours, theirs = (
            facts_of(side.folder, run) | {"slots": 0, "ranks": run.fingerprint}
            for side, run in ((left, mine), (right, other))
        )
        return f"{role}: {changes(ours, theirs)}"
    if not mine.what and not other.what and not (mine.loss_bits and other.loss_bits):
        return f"the bits of the {role} were not recorded"
    return ""


def _bits(name: str, left: _Side, right: _Side) -> tuple[str, ...]:
    changed = []
    for role in _COMPARED:
        mine, other = left.run(name, role), right.run(name, role)
        if mine is None or other is None or not (mine.loss_bits and other.loss_bits):
            continue
        if mine.loss_bits != other.loss_bits:
            changed.append(f"{role}: loss bits")
        elif mine.state_bits and other.state_bits and mine.state_bits != other.state_bits:
            changed.append(f"{role}: state bits")
    return tuple(changed)


def _deltas(
    name: str, left: _Side, right: _Side, noise: Mapping[str, "Noise"]
) -> tuple[Delta, ...]:
    mine, other = left.run(name, "candidate"), right.run(name, "candidate")
    found = []
    for metric, of in noise.items():
        before, after = getattr(mine, metric, None), getattr(other, metric, None)
        if not mine or not other or before is None or after is None or before <= 0:
            continue
        within = 0.0
        if metric == "step_s":
            if left.folder.slots != right.folder.slots:
                continue  # ranks that had more room ran faster
            within = math.hypot(_spread(mine), _spread(other))
        deviation = max(within, of.deviation or 0.0)
        ratio = after / before - 1
        threshold = max(MIN_RATIOS[metric], of.factor * deviation, of.least)
        change: Change = "noisy" if threshold > NOISY else "same"
        if abs(ratio) > threshold:
            change = "worse" if ratio > 0 else "better"
        found.append(Delta(
            metric=metric, before=float(before), after=float(after), ratio=ratio, noise=deviation,
            threshold=threshold, change=change,
        ))  # fmt: skip
    return tuple(found)


def _spread(run: RunEntry) -> float:
    """Deviation of a run's median step as a part of it, from how its steps vary."""
    if not run.step_s or run.step_spread_s is None or not run.timed_steps:
        return 0.0
    sigma = SIGMA_OF_MEDIAN * SIGMA_OF_MAD * run.step_spread_s / math.sqrt(run.timed_steps)
    return sigma / run.step_s


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
        factor=quantile(2 * level, max(1, len(pairs))),
        least=OF_WIDEST * max(pairs, default=0.0),
    )
