"""One case over its runs: answers in order of time, since when it fails, and lasting changes.

    history -> trends: a `CaseTrend` a case: answers, first bad, last good, shifts -> flaky cases

Values of two runs are compared only if they did equal work in equal environments on as many slots:
such runs form a *series*, named by a letter. A run whose environment is unknown is in no series.
A lasting change is looked for in the latest series.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
"""Fields of a run, and their names."""
MIN_HISTORY = 12
"""Values needed before a lasting change is looked for."""
MIN_VALUES = 3
"""Values on either side of a change."""
Z_LIMIT = 5.5
"""Deviations of two medians from which they differ; measured by `benchmarks.change_points`."""
SIGMA_OF_MAD = 1.4826
"""Standard deviation of normal values over the median of their distances from their median."""
SIGMA_OF_MEDIAN = 1.2533
"""Standard deviation of a median of normal values over that of their mean."""
FLOOR = 0.0005
"""Noise below this part of the value is taken for this: equal values have none to measure."""


@dataclass(frozen=True, kw_only=True)
class Answer(Json):
    """One answer for the case, with what its candidate run measured.

    Attributes:
        folder: id of the run folder.
        series: letter of the runs whose values may be compared with this one's; "" if none may.
        attempt: 0 for the folder's first answer for the case.
        environment: names what the verdict may depend on, "" if unknown.
        retried: attempts that the machine failed before the answer, as 'role: failure'.
    """

    folder: str
    created: str
    commit: str
    attempt: int
    outcome: Outcome
    what: What
    message: str
    environment: str
    series: str
    step_s: float | None = None
    peak_bytes: float | None = None
    startup_s: float | None = None
    retried: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """'failed diverged'."""
        return f"{self.outcome} {self.what}".strip()


@dataclass(frozen=True, kw_only=True)
class Shift(Json):
    """A lasting change of one metric: its median was `before`, and is `after` since `first`.

    `noise` is the standard deviation of one value as a part of `before`.
    """

    metric: str
    series: str
    before: float
    after: float
    noise: float
    last_before: Answer
    first: Answer

    @property
    def ratio(self) -> float:
        """The change as a part of the level before it: 0.03 is 3 % more."""
        return (self.after - self.before) / self.before if self.before else math.inf


@dataclass(frozen=True, kw_only=True)
class CaseTrend(Json):
    """Everything the history knows of one case.

    Attributes:
        answers: oldest first.
        first_bad: where it began to fail, if it fails now.
        last_good: the last pass before that, or the last pass at all.
        shifts: lasting changes of step time, memory and start-up.
        series: what a series differs in from the one before it, by letter.
    """

    scenario: str
    case_id: str
    answers: tuple[Answer, ...]
    first_bad: Answer | None
    last_good: Answer | None
    shifts: tuple[Shift, ...]
    series: dict[str, str]

    @property
    def num_runs(self) -> int:
        """Run folders that answered for the case."""
        return len({answer.folder for answer in self.answers})


def trends(
    history: History, scenario: str, case_id: str | None = None, *, days: int | None = None,
    until: str = "",
) -> tuple[CaseTrend, ...]:  # fmt: skip
    """The trend of each case of a scenario, or of one of them, by id.

    Args:
        history: where to look.
        scenario: its name.
        case_id: one case; None for all.
        days: look only at the last so many days on which something ran.
        until: and at no folder that was made after this time; "" for all.
    """
    found = history.rows(FolderEntry, "WHERE scenario = ? ORDER BY created, id", [scenario])
    folders = {owner: folder for owner, folder in found if not until or folder.created <= until}
    if days is not None:
        kept = set(sorted({folder.created[:10] for folder in folders.values()})[-days:])
        folders = {owner: each for owner, each in folders.items() if each.created[:10] in kept}
    # Rows are held against their digests one by one: those of years take minutes.
    since = min((folder.created for folder in folders.values()), default="")
    chosen = [scenario, since, case_id]
    joined = (
        "JOIN folders ON cases.folder = folders.id {} WHERE folders.scenario = ?1 "
        "AND folders.created >= ?2 AND (?3 IS NULL OR cases.case_id = ?3)"
    )
    answers: dict[str, list[tuple[FolderEntry, CaseEntry]]] = {}
    in_order = "ORDER BY folders.created, folders.id, cases.attempt"
    for owner, entry in history.rows(CaseEntry, f"{joined.format('')} {in_order}", chosen):
        if owner in folders:
            answers.setdefault(entry.case_id, []).append((folders[owner], entry))
    run = 'JOIN runs ON runs.folder = cases.folder AND runs."key" = candidate'
    candidates = f"SELECT runs.rowid FROM cases {joined.format(run)}"
    runs = history.rows(RunEntry, f"WHERE rowid IN ({candidates}) ORDER BY attempt", chosen)
    measured = {(owner, run.key): run for owner, run in runs if not run.what}
    return tuple(_trend(scenario, name, answers[name], measured) for name in sorted(answers))


def _trend(
    scenario: str, case_id: str, entries: list[tuple[FolderEntry, CaseEntry]],
    measured: Mapping[tuple[str, str], RunEntry],
) -> CaseTrend:  # fmt: skip
    last_of = {folder.id: case.attempt for folder, case in entries}
    # Runs of a folder are those of its last answer.
    runs = [
        measured.get((folder.id, case.candidate)) if last_of[folder.id] == case.attempt else None
        for folder, case in entries
    ]
    letters, differences = _series([folder for folder, _ in entries], runs)
    answers = tuple(
        Answer(
            folder=folder.id, created=folder.created, commit=case.commit or folder.commit,
            attempt=case.attempt, outcome=case.outcome, what=case.what, message=case.message,
            environment=folder.environment_id, retried=case.retried, series=letter,
            **{name: getattr(run, name) if run else None for name in METRIC_NAMES},
        )
        for (folder, case), run, letter in zip(entries, runs, letters, strict=True)
    )  # fmt: skip
    first_bad, last_good = _turning_point(answers)
    return CaseTrend(
        scenario=scenario, case_id=case_id, answers=answers, first_bad=first_bad,
        last_good=last_good, shifts=tuple(_shifts(answers)), series=differences,
    )  # fmt: skip


def _series(
    folders: Sequence[FolderEntry], runs: Sequence[RunEntry | None]
) -> tuple[list[str], dict[str, str]]:
    """Letters of what makes values comparable, and what each differs in from the one before."""
    letters: list[str] = []
    known: dict[str, str] = {}
    differences: dict[str, str] = {}
    before: dict[str, Any] = {}
    for folder, run in zip(folders, runs, strict=True):
        if run is None or not folder.environment or not run.fingerprint:
            letters.append("")
            continue
        key = f"{folder.environment_id} {run.fingerprint} {folder.slots} {run.work}"
        if key not in known:
            known[key] = chr(ord("A") + len(known)) if len(known) < 26 else f"S{len(known) + 1}"
            facts = facts_of(folder, run)
            differences[known[key]] = changes(before, facts, len(facts)) if before else ""
            before = facts
        letters.append(known[key])
    return letters, differences


def facts_of(folder: FolderEntry, run: RunEntry) -> dict[str, Any]:
    """Everything that two runs must agree in before their values are compared, by dotted name."""
    return {
        **flat("", folder.environment),
        **flat("ranks", folder.fingerprints.get(run.fingerprint, {}).get("ranks", ())),
        "slots": folder.slots,
        "settings of the run": run.work,
    }


def _turning_point(answers: Iterable[Answer]) -> tuple[Answer | None, Answer | None]:
    """First failure after the last pass, and that pass, in order of time.

    Only passes and failures count: what was skipped, had no verdict or was ended by the machine is
    passed over. A case fails if the last answer that counts is a failure, and then only answers in
    that answer's environment are looked at, if a pass is among them: a pass on another machine is
    no repair. A commit that was run twice can be the last good and the first bad one. A case that
    has failed ever since it is known has no last pass.
    """
    counted = [
        answer
        for answer in answers
        if answer.outcome == "passed"
        or (answer.outcome == "failed" and answer.what not in SAYS_NOTHING)
    ]
    if counted and counted[-1].outcome == "failed" and counted[-1].environment:
        own = [answer for answer in counted if answer.environment == counted[-1].environment]
        if any(answer.outcome == "passed" for answer in own):
            counted = own
    first_bad: Answer | None = None
    last_good: Answer | None = None
    for answer in counted:
        if answer.outcome == "passed":
            first_bad, last_good = None, answer
        else:
            first_bad = first_bad or answer
    return first_bad, last_good


def _shifts(answers: Sequence[Answer]) -> Iterable[Shift]:
    latest = next((answer.series for answer in reversed(answers) if answer.series), "")
    for metric in METRIC_NAMES:
        own = [a for a in answers if a.series == latest and getattr(a, metric) is not None]
        values = [float(getattr(answer, metric)) for answer in own]
        at = find_change(values) if latest else None
        if at is not None:
            before = median(values[:at])
            yield Shift(
                metric=metric, series=latest, before=before, after=median(values[at:]),
                noise=deviation(values) / before if before else math.inf,
                last_before=own[at - 1], first=own[at],
            )  # fmt: skip


def find_change(values: Sequence[float]) -> int | None:
    """Where the latest values left the level of those before them; None if they did not.

    The border that leaves the least sum of distances from the medians of both sides; it counts if
    the medians are `Z_LIMIT` of their deviations apart. `python -m benchmarks.change_points`
    measures how often noise is taken for a change and how soon a step is found.

    Args:
        values: finite, oldest first, all of equal work on equal machines.
    """
    if len(values) < MIN_HISTORY:
        return None

    def cost(at: int) -> float:
        return _spread(values[:at]) + _spread(values[at:])

    at = min(range(MIN_VALUES, len(values) - MIN_VALUES + 1), key=cost)
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


@dataclass(frozen=True, kw_only=True)
class Flaky(Json):
    """A case whose verdict changed by itself, or that the machine failed before it had one.

    Attributes:
        repeats: answers whose case, commit and environment are those of an earlier answer.
        changes: repeats with another verdict than the answer before them.
        verdicts: those that were seen, in order.
        last: the last answer that changed, or that took more than one attempt.
        retried: attempts that the machine failed, by failure: they change no verdict.
    """

    scenario: str
    case_id: str
    repeats: int
    changes: int
    verdicts: tuple[str, ...]
    last: Answer
    retried: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Share of the repeats that changed; 0 without a repeat."""
        return self.changes / self.repeats if self.repeats else 0.0


def flaky_cases(found: Iterable[CaseTrend]) -> tuple[Flaky, ...]:
    """The cases that changed by themselves, most changes first, then most failed attempts."""
    flaky = [entry for trend in found if (entry := _flaky(trend)) is not None]
    return tuple(
        sorted(flaky, key=lambda e: (-e.changes, -sum(e.retried.values()), e.scenario, e.case_id))
    )


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
