"""What the history says: of one case over its runs, and of two run folders side by side.

    trends   answers in order of time, since when a case fails, lasting changes -> flaky cases
    compare  the environment first, then what is worse, case by case

Bits and values of two runs are compared only if they did equal work in equal environments; such
runs form a *series*, named by a letter. A lasting change is looked for in the latest series.

In `compare`, worse is: a verdict further from `passed`, a case that is gone or came without
passing, bits that changed, a step time or peak that rose by more than `MIN_RATIOS`, than the noise
times what Student's t of so many pairs exceeds once in all cases of `1 / FALSE_ALARMS` comparisons,
and than `OF_WIDEST` times the widest pair, as tails are heavy. The *noise* is the distance between
reference and control, one run made twice, as a root of the mean square over all such pairs.
`python -m benchmarks.change_points` measures how often noise is taken for a change.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal

from harness.checks.bits import quantile
from harness.history.ledger import CaseEntry, FolderEntry, History, RunEntry
from harness.provenance import changes, different, flat, told
from harness.records import ExitCode, Json, Outcome, What

SAYS_NOTHING: tuple[What, ...] = ("interrupted", "not_run", "shared_gpu")
"""How a case ends of which the machine was the reason."""
METRIC_NAMES = {"step_s": "step time", "peak_bytes": "peak memory", "startup_s": "start-up"}
MIN_HISTORY, MIN_VALUES = 12, 3
"""Values needed before a lasting change is looked for, and on either side of it."""
Z_LIMIT = 5.5  # deviations of two medians from which they differ
MOST_MIXED = 1 / 3  # of the values of one side may be nearer to the median of the other
FLOOR = 0.0005  # least noise, as a part of the value: equal values have none to measure
USUAL = 0.8  # of the distances of neighbours: the others may be steps and outliers
SIGMA_OF_USUAL, SIGMA_OF_MEDIAN = 1.7902, 1.2533
"""Of normal values: their deviation over the mean of the least `USUAL` of their distances from 0,
and the deviation of their median over that of their mean."""


@dataclass(frozen=True, kw_only=True)
class Answer(CaseEntry):
    """One answer for the case, with what its candidate run measured; "" for what is unknown."""

    folder: str  # id of the run folder
    created: str
    environment: str  # names what the verdict may depend on
    series: str  # letter of the runs whose values may be compared with this one's
    step_s: float | None = None
    peak_bytes: float | None = None
    startup_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Shift(Json):
    """A lasting change of one metric: its median was `before`, and is `after` since `first`."""

    metric: str
    series: str
    before: float
    after: float
    noise: float  # standard deviation of one value as a part of `before`
    last_before: Answer
    first: Answer

    @property
    def ratio(self) -> float:
        """The change as a part of the level before it: 0.03 is 3 % more."""
        return (self.after - self.before) / self.before if self.before else math.inf


@dataclass(frozen=True, kw_only=True)
class CaseTrend(Json):
    """Everything the history knows of one case."""

    scenario: str
    case_id: str
    answers: tuple[Answer, ...]  # oldest first
    first_bad: Answer | None  # where it began to fail, if it fails now
    last_good: Answer | None  # the last pass before that, or the last pass at all
    shifts: tuple[Shift, ...]  # of step time, memory and start-up
    series: dict[str, str]  # what a series differs in from the one before it, by letter

    @property
    def num_runs(self) -> int:
        return len({answer.folder for answer in self.answers})


@dataclass(frozen=True, kw_only=True)
class Flaky(Json):
    """A case whose verdict changed by itself, or that the machine failed before it had one."""

    scenario: str
    case_id: str
    repeats: int  # answers of a commit and environment that had one
    changes: int  # repeats with another verdict than the answer before them
    verdicts: tuple[str, ...]
    last: Answer  # that changed, or that took more than one attempt
    retried: dict[str, int] = field(default_factory=dict)  # attempts by failure of the machine


def trends(
    history: History, scenario: str | None = None, *, days: int | None = None, until: str = "",
) -> tuple[CaseTrend, ...]:  # fmt: skip
    """The trend of each case of a scenario, or of all.

    Of the last `days` on which something ran (None: all), and of folders made `until` then.
    """
    seen, dates = list[_Folder](), set[str]()
    for folder in history.entries(scenario=scenario, newest_first=True):
        if until and folder.created > until:
            continue
        dates.add(folder.created[:10])
        if days is not None and len(dates) > days:
            break
        asked = {case.candidate for case in folder.cases}
        runs = {run.key: run for run in folder.runs if not run.what and run.key in asked}
        seen.append((replace(folder, cases=(), runs=()), folder.cases, runs))
    # A shard that was merged is in the merged run folder, too: it counts once.
    merged = {(part, folder.scenario) for folder, _, _ in seen for part in folder.merged}
    found: dict[tuple[str, str], list[_Answered]] = {}
    for folder, cases, runs in reversed(seen):
        if (folder.id, folder.scenario) in merged:
            continue
        last = {case.case_id: case.attempt for case in cases}
        for case in sorted(cases, key=lambda case: case.attempt):
            # Runs of a folder are those of its last answer.
            run = runs.get(case.candidate) if case.attempt == last[case.case_id] else None
            found.setdefault((folder.scenario, case.case_id), []).append((folder, case, run))
    return tuple(_trend(*name, found[name]) for name in sorted(found))


_Folder = tuple[FolderEntry, tuple[CaseEntry, ...], dict[str, RunEntry]]  # candidates that ended


def letter_of(number: int) -> str:
    """A, B, ..., Z, then by number."""
    return chr(ord("A") + number) if number < 26 else f"S{number + 1}"


_Answered = tuple[FolderEntry, CaseEntry, RunEntry | None]  # the candidate's, if it ended well


def _trend(scenario: str, case_id: str, found: list[_Answered]) -> CaseTrend:
    letters: dict[tuple[object, ...], str] = {}
    differences: dict[str, str] = {}
    before: dict[str, Any] = {}
    answers = []
    for folder, case, run in found:
        series = ""
        if run is not None and folder.environment and run.fingerprint:
            key = (folder.environment_id, run.fingerprint, folder.slots, run.work)
            if key not in letters:
                letters[key] = letter_of(len(letters))
                ranks = folder.fingerprints.get(run.fingerprint, {}).get("ranks", ())
                facts = {**flat("", folder.environment), **flat("ranks", ranks),
                         "slots": folder.slots, "settings of the run": run.work}  # fmt: skip
                differences[letters[key]] = changes(before, facts, len(facts)) if before else ""
                before = facts
            series = letters[key]
        measured = {name: getattr(run, name, None) for name in METRIC_NAMES}
        own = {"commit": case.commit or folder.commit, "environment": folder.environment_id}
        own |= {"folder": folder.id, "created": folder.created, "series": series}
        answers.append(Answer(**(vars(case) | own | measured)))
    first_bad, last_good = _turning_point(answers)
    return CaseTrend(
        scenario=scenario, case_id=case_id, answers=tuple(answers), first_bad=first_bad,
        last_good=last_good, shifts=tuple(_shifts(answers)), series=differences,
    )  # fmt: skip


def _turning_point(answers: Iterable[Answer]) -> tuple[Answer | None, Answer | None]:
    """First failure after the last pass, and that pass, in order of time.

    What was skipped, had no verdict or was ended by the machine is passed over. Of a case that
    fails now only answers in its environment are looked at, if a pass is among them: a pass on
    another machine is no repair. Runs count, not commits: one that was run twice can be both.
    """
    ended = [a for a in answers if a.what not in SAYS_NOTHING and a.outcome in ("passed", "failed")]
    if ended and ended[-1].outcome == "failed" and ended[-1].environment:
        own = [answer for answer in ended if answer.environment == ended[-1].environment]
        ended = own if any(answer.outcome == "passed" for answer in own) else ended
    good = max((n for n, answer in enumerate(ended) if answer.outcome == "passed"), default=-1)
    return next(iter(ended[good + 1 :]), None), ended[good] if good >= 0 else None


def _shifts(answers: Sequence[Answer]) -> Iterator[Shift]:
    latest = next((answer.series for answer in reversed(answers) if answer.series), None)
    for metric in METRIC_NAMES:
        own = [a for a in answers if a.series == latest and getattr(a, metric) is not None]
        values = [float(getattr(answer, metric)) for answer in own]
        ends = [0, *find_changes(values), len(values)]
        for start, at, end in zip(ends, ends[1:], ends[2:], strict=False):
            before = median(values[start:at])
            yield Shift(
                metric=metric, series=own[at].series, before=before, after=median(values[at:end]),
                noise=deviation(values[start:end]) / before if before else math.inf,
                last_before=own[at - 1], first=own[at],
            )  # fmt: skip


def find_changes(values: Sequence[float]) -> list[int]:
    """Where values left a level, oldest first: no change hides one before it or after it."""
    if (at := find_change(values)) is None:
        return []
    return [*find_changes(values[:at]), at, *(at + later for later in find_changes(values[at:]))]


def find_change(values: Sequence[float]) -> int | None:
    """Where the latest values, oldest first, left the level of those before; None if they did not.

    The border that leaves the least sum of distances from the medians of both sides; it counts if
    the medians are `Z_LIMIT` of their deviations apart, and most values on their own side nearer.
    """
    if len(values) < MIN_HISTORY:
        return None

    def cost(at: int) -> float:
        parts = (values[:at], values[at:])
        return sum(abs(v - middle) for part in parts for middle in [median(part)] for v in part)

    at = min(range(MIN_VALUES, len(values) - MIN_VALUES + 1), key=cost)
    before, after = median(values[:at]), median(values[at:])
    far = SIGMA_OF_MEDIAN * deviation(values) * math.sqrt(1 / at + 1 / (len(values) - at))
    # Of values that have one of two levels by chance a median may be either.
    nearer = [abs(v - after) < abs(v - before) for v in values]
    mixed = max(fmean(nearer[:at]), 1 - fmean(nearer[at:]))
    belongs = nearer[at] and mixed <= MOST_MIXED
    return at if belongs and abs(after - before) >= Z_LIMIT * far else None


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of one value from the next, blind to steps and to a few outliers."""
    gaps = sorted(abs(right - left) for left, right in pairwise(values))
    # Their median would be 0 where most values equal the one before.
    usual = gaps[: math.ceil(USUAL * len(gaps))]
    measured = SIGMA_OF_USUAL * fmean(usual) / math.sqrt(2) if usual else 0.0
    return max(measured, FLOOR * abs(median(values)), math.ulp(0.0))


def flaky_cases(found: Iterable[CaseTrend]) -> tuple[Flaky, ...]:
    """The cases that changed by themselves, most changes first, then most failed attempts."""
    flaky = filter(None, map(_flaky, found))
    return tuple(sorted(flaky, key=lambda e: (-e.changes, -sum(e.retried.values()), e.case_id)))


def _flaky(trend: CaseTrend) -> Flaky | None:
    before: dict[tuple[str, str], Answer] = {}
    repeats, changed = 0, list[Answer]()
    ran = [answer for answer in trend.answers if answer.outcome != "skipped"]
    for answer in ran:
        # What is not known is not known to be equal.
        if not answer.commit or not answer.environment or answer.what in SAYS_NOTHING:
            continue
        earlier = before.get((answer.commit, answer.environment))
        before[answer.commit, answer.environment] = answer
        # A run that died early recorded no fingerprint: that is no reason to let it off.
        if earlier is not None and len({earlier.series, answer.series} - {""}) < 2:
            repeats += 1
            changed += [answer] if earlier.verdict != answer.verdict else []
    again = [answer for answer in trend.answers if answer.retried]
    if not changed and not again:
        return None
    failures = Counter(entry.partition(": ")[2] for answer in again for entry in answer.retried)
    return Flaky(
        scenario=trend.scenario, case_id=trend.case_id, repeats=repeats, changes=len(changed),
        last=[*again, *changed][-1], retried=dict(sorted(failures.items())),
        verdicts=tuple(dict.fromkeys(answer.verdict for answer in ran)),
    )  # fmt: skip


# --- in words ---------------------------------------------------------------------------------


def shift_text(shift: Shift) -> str:
    """A lasting change in one sentence."""
    before, after = value(shift.metric, shift.before), value(shift.metric, shift.after)
    return (
        f"{METRIC_NAMES[shift.metric]} {shift.ratio:+.1%} since {when(shift.first)} (series "
        f"{shift.series}): {before} became {after}, noise {shift.noise:.2%}, between "
        f"{short(shift.last_before.commit)} and {short(shift.first.commit)}"
    )


def turning_point(trend: CaseTrend) -> tuple[str, Outcome]:
    """Since when it fails and after which commit, or that it does not; the outcome of that."""
    bad, good = trend.first_bad, trend.last_good
    after = f"{when(good)} at {short(good.commit)}" if good else ""
    if bad is None:
        if trend.answers[-1].outcome == "passed":
            return "it does not fail now", "passed"
        why = f"no verdict since it passed, {after}" if good else "no verdict in these runs"
        return why, "skipped"
    since = f"first bad run {when(bad)} at {short(bad.commit)}"
    if good is None:
        return f"{since}, or earlier: no pass in these runs", "failed"
    same = good.commit and good.commit == bad.commit
    hint = ": the same commit, so see --flaky and what the machine did" if same else ""
    return f"{since}, last good {after}{hint}", "failed"


def when(answer: Answer | None) -> str:
    """'2031-02-03 04:05' in UTC; "" for no answer."""
    return "" if answer is None else answer.created[:16].replace("T", " ") or "unknown"


def short(commit: str) -> str:
    """'3f1c0a9d', with '+5d0e' for uncommitted changes; '+5d0e' alone for code in no repository."""
    base, _, changes = commit.partition("+")
    return f"{base[:8]}{'+' if changes else ''}{changes[:4]}" or "unknown"


def value(metric: str, number: float | None) -> str:
    """'12.30 ms', '1.50 s' or '40.0 MiB'; "" if it was not measured."""
    if number is None:
        return ""
    if metric == "peak_bytes":
        return f"{number / (1 << 20):.1f} MiB"
    return f"{number:.2f} s" if number >= 1 else f"{number * 1e3:.2f} ms"


# --- two run folders --------------------------------------------------------------------------

MIN_RATIOS = {"step_s": 0.03, "peak_bytes": 0.005}
FALSE_ALARMS, OF_WIDEST = 0.01, 1.5
NOISY = 0.25  # a threshold past this says nothing
Noise = dict[str, tuple[float, float]]
"""What `noise_of` says, by metric."""
Change = Literal["same", "better", "worse", "noisy"]
State = Literal["worse", "incomparable", "added", "changed", "noisy", "alike"]
_BAD: dict[Outcome, int] = {"passed": 0, "skipped": 1, "incomparable": 2, "error": 2, "failed": 3}


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


def noise_of(pairs: Sequence[float], level: float) -> tuple[float, float]:
    """What equal runs show by the distances of the logarithms of their values, one at least.

    Their deviation, and from where a change counts; `level` is the probability at which one equal
    case may be taken for a changed one.
    """
    deviation = math.sqrt(math.fsum(distance * distance for distance in pairs) / len(pairs))
    return deviation, max(quantile(2 * level, len(pairs)) * deviation, OF_WIDEST * max(pairs))


def open_cases(folder: FolderEntry) -> int:
    """How many cases were planned and have no answer."""
    return max(0, folder.num_cases - len({case.case_id for case in folder.cases}))


def compare(before: FolderEntry, after: FolderEntry) -> Comparison:
    """Compare what two run folders hold; `before` is the one to go by."""
    left, right = _Side(before), _Side(after)
    names = list(dict.fromkeys([*left.cases, *right.cases]))
    noise: Noise = {}
    for metric in MIN_RATIOS:
        if pairs := [*left.pairs(metric), *right.pairs(metric)]:
            noise[metric] = noise_of(pairs, FALSE_ALARMS / len(names))
    ours, theirs = (
        {"commit": each.commit or "unknown", **flat("", each.environment), "slots": each.slots}
        for each in (before, after)
    )
    return Comparison(
        before=before, after=after, cases=tuple(_case(name, left, right, noise) for name in names),
        environment={n: (told(ours, n), told(theirs, n)) for n in different(ours, theirs)},
        noise={name: deviation for name, (deviation, _) in noise.items()},
    )  # fmt: skip


class _Side:
    """One run folder, by name: the last answer for each case, the last attempt of each run."""

    def __init__(self, folder: FolderEntry) -> None:
        self.folder = folder
        self.cases = {case.case_id: case for case in folder.cases}
        self.runs = {run.key: run for run in folder.runs}

    def pairs(self, metric: str) -> Iterable[float]:
        """Distances of the logarithms of runs that were made twice, each pair of runs once."""
        logs: dict[str, float] = {}
        for case in self.cases.values():
            pair = (self.runs.get(case.reference), self.runs.get(case.control))
            first, second = (getattr(r, metric) if r and not r.what else None for r in pair)
            if first and second:
                logs[case.reference] = abs(math.log(second / first))
        return logs.values()


_Runs = dict[str, tuple[RunEntry | None, RunEntry | None]]  # of a case by role, before and after


def _case(name: str, left: _Side, right: _Side, noise: Noise) -> CaseChange:
    ours, theirs = left.cases.get(name), right.cases.get(name)
    before, after = (entry.verdict if entry else "" for entry in (ours, theirs))
    if ours is None or theirs is None:
        why = "it is gone" if theirs is None else f"it is new and {after}"
        worse = () if after in ("passed", "skipped unsupported") else (why,)
        return CaseChange(case_id=name, before=before, after=after, worse=worse)
    runs = {
        role: (left.runs.get(getattr(ours, role)), right.runs.get(getattr(theirs, role)))
        for role in ("reference", "candidate")
    }
    if "skipped" in (ours.outcome, theirs.outcome):
        why = "" if ours.outcome == theirs.outcome else "it was skipped in one of the two"
    else:
        why = _incomparable(left.folder, right.folder, runs)
    bits = () if why else tuple(_bits(runs))
    deltas = () if why else tuple(_deltas(left.folder, right.folder, runs, noise))
    words = [f"{before} became {after}"] * (_BAD[theirs.outcome] > _BAD[ours.outcome])
    words += [f"{changed} changed" for changed in bits]
    words += [f"{METRIC_NAMES[delta.metric]} rose by {delta.ratio:.1%}" for delta in deltas
              if delta.change == "worse"]  # fmt: skip
    return CaseChange(
        case_id=name, before=before, after=after, worse=tuple(words), bits=bits, deltas=deltas,
        incomparable=why,
    )  # fmt: skip


def _incomparable(left: FolderEntry, right: FolderEntry, runs: _Runs) -> str:
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


def _bits(runs: _Runs) -> Iterator[str]:
    for role, (mine, other) in runs.items():
        for name in ("loss", "state"):
            found = {getattr(run, f"{name}_bits", "") for run in (mine, other)}
            if len(found) == 2 and "" not in found:
                yield f"{role}: {name} bits"
                break


def _deltas(left: FolderEntry, right: FolderEntry, runs: _Runs, noise: Noise) -> Iterator[Delta]:
    mine, other = runs["candidate"]
    for metric, (deviation, least) in noise.items():
        before, after = getattr(mine, metric, None), getattr(other, metric, None)
        # Ranks that had more room ran faster.
        more_room = metric == "step_s" and left.slots != right.slots
        if before is None or after is None or before <= 0 or more_room:
            continue
        ratio, threshold = after / before - 1, max(MIN_RATIOS[metric], least)
        change: Change = "noisy" if threshold > NOISY else "same"
        if abs(ratio) > threshold:
            change = "worse" if ratio > 0 else "better"
        yield Delta(
            metric=metric, before=float(before), after=float(after), ratio=ratio, noise=deviation,
            threshold=threshold, change=change,
        )  # fmt: skip
