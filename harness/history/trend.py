"""One case over its runs: answers in order of time, since when it fails, and lasting changes.

    history -> trends: a `CaseTrend` a case: answers, first bad, last good, shifts -> flaky cases

Values of two runs are compared only if they did equal work in equal environments on as many slots:
such runs form a *series*, named by a letter. A run whose environment is unknown is in no series.
A lasting change is looked for in the latest series.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from harness.history.entries import CaseEntry, FolderEntry, RunEntry
from harness.history.ledger import History
from harness.provenance import changes, flat
from harness.records import Json, Outcome, What

SAYS_NOTHING: tuple[What, ...] = ("interrupted", "not_run", "shared_gpu")
"""How a case ends of which the machine was the reason."""
METRIC_NAMES = {"step_s": "step time", "peak_bytes": "peak memory", "startup_s": "start-up"}
MIN_HISTORY, MIN_VALUES = 12, 3
"""Values needed before a lasting change is looked for, and on either side of it."""
Z_LIMIT = 5.5
"""Deviations of two medians from which they differ; measured by `benchmarks.change_points`."""
SIGMA_OF_MAD, SIGMA_OF_MEDIAN = 1.4826, 1.2533
"""Of normal values: their deviation over the median of their distances from their median, and
the deviation of their median over that of their mean."""
FLOOR = 0.0005
"""Noise below this part of the value is taken for this: equal values have none to measure."""


@dataclass(frozen=True, kw_only=True)
class Answer(Json):
    """One answer for the case, with what its candidate run measured; "" for what is unknown."""

    folder: str  # id of the run folder
    created: str
    commit: str
    attempt: int
    outcome: Outcome
    what: What
    message: str
    environment: str  # names what the verdict may depend on
    series: str  # letter of the runs whose values may be compared with this one's
    step_s: float | None = None
    peak_bytes: float | None = None
    startup_s: float | None = None
    retried: tuple[str, ...] = ()  # as in `CaseEntry`

    @property
    def verdict(self) -> str:
        """'failed diverged'."""
        return f"{self.outcome} {self.what}".strip()


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
        """Run folders that answered for the case."""
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
    history: History, scenario: str, case_id: str | None = None, *, days: int | None = None,
    until: str = "",
) -> tuple[CaseTrend, ...]:  # fmt: skip
    """The trend of each case of a scenario, or of one of them, by id.

    Of the last `days` on which something ran alone, and of folders made `until` then; None and ""
    for all.
    """
    days_of = (
        "SELECT DISTINCT substr(created, 1, 10) FROM folders WHERE scenario = ? AND created <= ? "
        "ORDER BY 1 DESC LIMIT ?"
    )
    until = until or "~"
    kept = history.query(days_of, [scenario, until, -1 if days is None else days])
    since = kept[-1][0] if kept else ""
    of_scenario = "WHERE scenario = ? AND created BETWEEN ? AND ? ORDER BY created, id"
    chosen = "folder = ?1 AND (?2 IS NULL OR case_id = ?2)"
    of_run = f'WHERE folder = ?1 AND "key" IN (SELECT candidate FROM cases WHERE {chosen})'
    found: dict[str, list[_Answered]] = {}
    for owner, folder in history.rows(FolderEntry, of_scenario, [scenario, since, until]):
        asked = [owner, case_id]
        cases = [c for _, c in history.rows(CaseEntry, f"WHERE {chosen} ORDER BY attempt", asked)]
        runs = history.rows(RunEntry, f"{of_run} ORDER BY attempt", asked)
        measured = {run.key: run for _, run in runs if not run.what}
        last = {case.case_id: case.attempt for case in cases}
        for case in cases:
            # Runs of a folder are those of its last answer.
            run = measured.get(case.candidate) if case.attempt == last[case.case_id] else None
            found.setdefault(case.case_id, []).append((folder, case, run))
    return tuple(_trend(scenario, name, found[name]) for name in sorted(found))


_Answered = tuple[FolderEntry, CaseEntry, RunEntry | None]
"""Of a case in a run folder; the candidate's run, if it ended well."""


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
                number = len(letters)
                letters[key] = chr(ord("A") + number) if number < 26 else f"S{number + 1}"
                ranks = folder.fingerprints.get(run.fingerprint, {}).get("ranks", ())
                facts = {**flat("", folder.environment), **flat("ranks", ranks),
                         "slots": folder.slots, "settings of the run": run.work}  # fmt: skip
                differences[letters[key]] = changes(before, facts, len(facts)) if before else ""
                before = facts
            series = letters[key]
        answers.append(Answer(
            folder=folder.id, created=folder.created, commit=case.commit or folder.commit,
            attempt=case.attempt, outcome=case.outcome, what=case.what, message=case.message,
            environment=folder.environment_id, retried=case.retried, series=series,
            **{name: getattr(run, name, None) for name in METRIC_NAMES},
        ))  # fmt: skip
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
        if (at := find_change(values)) is not None:
            before = median(values[:at])
            yield Shift(
                metric=metric, series=own[at].series, before=before, after=median(values[at:]),
                noise=deviation(values) / before if before else math.inf,
                last_before=own[at - 1], first=own[at],
            )  # fmt: skip


def find_change(values: Sequence[float]) -> int | None:
    """Where the latest values left the level of those before them; None if they did not.

    The border that leaves the least sum of distances from the medians of both sides; it counts if
    the medians are `Z_LIMIT` of their deviations apart. `values` are finite, oldest first, all of
    equal work on equal machines.
    """
    if len(values) < MIN_HISTORY:
        return None

    at = min(
        range(MIN_VALUES, len(values) - MIN_VALUES + 1),
        key=lambda at: _spread(values[:at]) + _spread(values[at:]),
    )
    before, after = median(values[:at]), median(values[at:])
    far = SIGMA_OF_MEDIAN * deviation(values) * math.sqrt(1 / at + 1 / (len(values) - at))
    belongs = abs(values[at] - after) < abs(values[at] - before)
    return at if belongs and abs(after - before) >= Z_LIMIT * far else None


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return sum(abs(value - middle) for value in values)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of one value from the next, blind to steps and to a few outliers."""
    gaps = [abs(right - left) for left, right in pairwise(values)]
    measured = SIGMA_OF_MAD * median(gaps) / math.sqrt(2) if gaps else 0.0
    return max(measured, FLOOR * abs(median(values)), math.ulp(0.0))


def flaky_cases(found: Iterable[CaseTrend]) -> tuple[Flaky, ...]:
    """The cases that changed by themselves, most changes first, then most failed attempts."""
    flaky = [entry for trend in found if (entry := _flaky(trend)) is not None]
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
