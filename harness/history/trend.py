"""One case over its runs: answers in order of time, since when it fails, and lasting changes.

    history -> trends: a `CaseTrend` a case: answers, first bad, last good, shifts -> flaky cases

Values of two runs are compared only if they did equal work in equal environments on as many slots:
such runs form a *series*, named by a letter. A run whose environment is unknown is in no series.
Lasting changes are looked for within each series, in the candidate's own values and in its step
time over that of its reference in the same folder: what the machine does to both cancels out there,
and what a commit does to both shows in the first.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import NormalDist, fmean, geometric_mean, median
from typing import Any

from harness.history.entries import CaseEntry, FolderEntry, RunEntry
from harness.history.ledger import History
from harness.provenance import changes, flat
from harness.records import Json, Outcome, What

SAYS_NOTHING: tuple[What, ...] = ("interrupted", "not_run", "shared_gpu")
"""How a case ends of which the machine was the reason."""
METRICS = ("step_s", "peak_bytes", "startup_s")
"""Fields of a run."""
METRIC_NAMES = {
    "step_s": "step time", "peak_bytes": "peak memory", "startup_s": "start-up",
    "step_ratio": "step time over the reference's",
}  # fmt: skip
MIN_TO_VARY = 5
"""Values from which it is said how much they vary."""
CONFIDENCE = 0.95
"""Of the interval of a flaky case's rate."""

MIN_VALUES = 3
"""Of a level: a change is told on its third value at the earliest, and two odd ones never are."""
MIN_HISTORY = 12
"""Values needed before anything is told."""
Z_LIMIT = 4.5
PENALTY = 12.0
"""Of a border, in squared deviations: low, for it only proposes."""
LIMIT = 3.5
"""Deviations from which a value is an outlier."""
WINDOW = 3
"""Values on either side whose median a value is held against."""
WINDOW_AT_AN_END = 5
"""The same at the ends of a series: two odd values are outvoted, three are a new level."""
FLOOR = 0.0005
"""Noise below this part of the value is taken for this: equal values have none to measure."""
SIGMA_OF_MAD = 1.4826
"""Standard deviation of normal values over the median of their distances from their median."""


@dataclass(frozen=True, kw_only=True)
class Answer(Json):
    """One answer for the case, with what its candidate run measured.

    Attributes:
        folder: id of the run folder.
        series: letter of the runs whose values may be compared with this one's; "" if none may.
        attempt: 0 for the folder's first answer for the case.
        environment: names what the verdict may depend on, "" if unknown.
        step_ratio: step time over that of the reference and its control, their geometric mean.
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
    step_ratio: float | None = None
    retried: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """'failed diverged'."""
        return f"{self.outcome} {self.what}".strip()


@dataclass(frozen=True, kw_only=True)
class Change(Json):
    """A lasting change in a series: from place `at` on, values are `after` instead of `before`.

    `noise` is the standard deviation around the levels as a part of `before`, `z` how many
    deviations the levels are apart.
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


@dataclass(frozen=True, kw_only=True)
class Shift(Json):
    """A lasting change of one metric, and the answers around it."""

    metric: str
    series: str
    change: Change
    first: Answer
    last_before: Answer


@dataclass(frozen=True, kw_only=True)
class CaseTrend(Json):
    """Everything the history knows of one case.

    Attributes:
        answers: oldest first.
        first_bad: where it began to fail, if it fails now.
        last_good: the last pass before that, or the last pass at all.
        shifts: lasting changes of step time, alone and over the reference's, memory and start-up.
        noise: deviation of each metric in the last series, as a part of its level.
        series: what a series differs in from the one before it, by letter.
    """

    scenario: str
    case_id: str
    answers: tuple[Answer, ...]
    first_bad: Answer | None
    last_good: Answer | None
    shifts: tuple[Shift, ...]
    noise: dict[str, float]
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
    joined = "JOIN folders ON cases.folder = folders.id "
    wanted = "WHERE folders.scenario = ? AND folders.created >= ? AND cases.case_id = ?"
    chosen = [scenario, since, case_id]
    if case_id is None:
        wanted, chosen = wanted.removesuffix(" AND cases.case_id = ?"), chosen[:2]
    answers: dict[str, list[tuple[FolderEntry, CaseEntry]]] = {}
    in_order = f"{joined}{wanted} ORDER BY folders.created, folders.id, cases.attempt"
    for owner, entry in history.rows(CaseEntry, in_order, chosen):
        if owner in folders:
            answers.setdefault(entry.case_id, []).append((folders[owner], entry))
    of_case = (
        f"WHERE rowid IN (SELECT runs.rowid FROM cases {joined}JOIN runs ON "
        f'runs.folder = cases.folder AND runs."key" IN (candidate, reference, control) '
        f"{wanted}) ORDER BY attempt"
    )
    runs = history.rows(RunEntry, of_case, chosen)
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
    ratios = _step_ratios(entries, runs, letters, measured)
    answers = tuple(
        Answer(
            folder=folder.id, created=folder.created, commit=case.commit or folder.commit,
            attempt=case.attempt, outcome=case.outcome, what=case.what, message=case.message,
            environment=folder.environment_id, retried=case.retried, series=letter,
            step_ratio=ratio, **{name: getattr(run, name) if run else None for name in METRICS},
        )
        for (folder, case), run, letter, ratio in zip(entries, runs, letters, ratios, strict=True)
    )  # fmt: skip
    first_bad, last_good = _turning_point(answers)
    shifts, noise = _shifts(answers)
    return CaseTrend(
        scenario=scenario, case_id=case_id, answers=answers, first_bad=first_bad,
        last_good=last_good, shifts=shifts, noise=noise, series=differences,
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


def _step_ratios(
    entries: Sequence[tuple[FolderEntry, CaseEntry]], runs: Sequence[RunEntry | None],
    letters: Sequence[str], measured: Mapping[tuple[str, str], RunEntry],
) -> list[float | None]:  # fmt: skip
    """Of each answer, where its reference did what the latest one of its series does."""
    latest: dict[str, str] = {}
    ratios: list[float | None] = []
    for (folder, case), run, letter in reversed(list(zip(entries, runs, letters, strict=True))):
        pair = (measured.get((folder.id, key)) for key in (case.reference, case.control))
        timed = [(each.work, each.step_s) for each in pair if each is not None and each.step_s]
        works, times = {work for work, _ in timed}, [step_s for _, step_s in timed]
        mine = run.step_s if run is not None and letter else None
        is_like = len(works) == 1 and latest.setdefault(letter, *works) in works
        ratios.append(mine / geometric_mean(times) if mine and is_like else None)
    return ratios[::-1]


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


# --- lasting changes --------------------------------------------------------------------------


def _shifts(answers: Sequence[Answer]) -> tuple[tuple[Shift, ...], dict[str, float]]:
    found: list[Shift] = []
    noise: dict[str, float] = {}
    for metric in METRIC_NAMES:
        for series in dict.fromkeys(answer.series for answer in answers if answer.series):
            own = [a for a in answers if a.series == series and getattr(a, metric) is not None]
            values = [float(getattr(answer, metric)) for answer in own]
            found += [
                Shift(metric=metric, series=series, change=change, first=own[change.at],
                      last_before=own[change.at - 1])
                for change in find_changes(values)
            ]  # fmt: skip
            if len(values) >= MIN_TO_VARY and len(set(values)) > 1 and values[-1]:
                noise[metric] = deviation(values) / abs(values[-1])
    return tuple(found), noise


def find_changes(values: Sequence[float]) -> tuple[Change, ...]:
    """The lasting changes in a series of one value a run, in order.

    Outliers are replaced (Hampel's filter), segments of least squares proposed (optimal
    partitioning by dynamic programming), and the weakest border dropped until each passes Student's
    t, in normal deviations, at `Z_LIMIT`. `python -m benchmarks.change_points` measures how often
    noise is taken for a change (under 1 % of series of 60 normal values looked at every time, 6 %
    if neighbours are correlated by 0.3; two hosts that take turns for days are changes as far as a
    series can tell) and how soon a step of three deviations is found (after 30 values: 81 % by the
    fifth, 98 % by the tenth).

    Args:
        values: finite, oldest first, all of equal work on equal machines.
    """
    if len(values) < MIN_HISTORY:
        return ()
    sigma = deviation(values)
    replaced, limited = [], []
    for place, value in enumerate(values):
        # At the ends of the series, the values that are nearest to the end.
        begin = max(0, min(place - WINDOW, len(values) - WINDOW_AT_AN_END))
        middle = median(values[begin : max(place + WINDOW + 1, WINDOW_AT_AN_END)])
        far = LIMIT * sigma
        replaced.append(value if abs(value - middle) <= far else middle)
        # What is replaced must not make the rest look steadier than it is.
        limited.append(min(max(value, middle - far), middle + far))
    borders = _segments(replaced, sigma)
    while True:
        spread = _spread(limited, borders)
        free = max(1, len(values) - (len(borders) - 1))
        found = []
        for begin, at, end in zip(borders, borders[1:], borders[2:], strict=False):
            distance = abs(fmean(replaced[at:end]) - fmean(replaced[begin:at]))
            t = distance / (spread * math.sqrt(1 / (at - begin) + 1 / (end - at)))
            # Wallace's approximation of the normal deviation of Student's t.
            z = math.sqrt(free * math.log1p(t * t / free)) * (8 * free + 1) / (8 * free + 3)
            level = median(values[begin:at])
            noise = spread / abs(level) if level else math.inf
            after = median(values[at:end])
            found.append(Change(at=at, before=level, after=after, noise=noise, z=z))
        weakest = min(found, key=lambda change: change.z, default=None)
        if weakest is None or weakest.z >= Z_LIMIT:
            return tuple(found)
        borders.remove(weakest.at)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of one value from the next, blind to steps and to a few outliers."""
    gaps = [abs(right - left) for left, right in pairwise(values)]
    measured = SIGMA_OF_MAD * median(gaps) / math.sqrt(2) if gaps else 0.0
    return max(measured, _floor(values))


def _floor(values: Sequence[float]) -> float:
    return max(FLOOR * abs(median(values)), math.ulp(0.0)) if values else math.ulp(0.0)


def _segments(values: Sequence[float], sigma: float) -> list[int]:
    """Borders of the cheapest segmentation, 0 and the length included."""
    sums, squares = [0.0], [0.0]
    for value in values:
        far = value - values[0]  # sums of squares of small numbers keep their digits
        sums.append(sums[-1] + far)
        squares.append(squares[-1] + far * far)
    penalty = PENALTY * sigma * sigma
    best = [0.0] + [math.inf] * len(values)
    start = [0] * (len(values) + 1)
    for end in range(MIN_VALUES, len(values) + 1):
        for begin in (0, *range(MIN_VALUES, end - MIN_VALUES + 1)):
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
    return max(math.sqrt(total / free * (1 + excess) / (1 - excess)), _floor(values))


# --- flaky cases ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Flaky(Json):
    """A case whose verdict changed by itself, or that the machine failed before it had one.

    Attributes:
        repeats: answers whose case, commit and environment are those of an earlier answer.
        changes: repeats with another verdict than the answer before them.
        low: lower end of the interval of `changes / repeats`, at 95 %.
        high: its upper end.
        verdicts: those that were seen, in order.
        last: the last answer that changed, or that took more than one attempt.
        retried: attempts that the machine failed, by failure: they change no verdict.
    """

    scenario: str
    case_id: str
    repeats: int
    changes: int
    low: float
    high: float
    verdicts: tuple[str, ...]
    last: Answer
    retried: dict[str, int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Share of the repeats that changed; 0 without a repeat."""
        return self.changes / self.repeats if self.repeats else 0.0


def flaky_cases(found: Iterable[CaseTrend]) -> tuple[Flaky, ...]:
    """The cases that changed by themselves, worst first: by the lower end of the interval,
    then by attempts that the machine failed."""
    flaky = [entry for trend in found if (entry := _flaky(trend)) is not None]
    return tuple(
        sorted(flaky, key=lambda e: (-e.low, -sum(e.retried.values()), e.scenario, e.case_id))
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
    low, high = wilson(len(changed), repeats) if repeats else (0.0, 1.0)
    failures = Counter(entry.partition(": ")[2] for answer in again for entry in answer.retried)
    return Flaky(
        scenario=trend.scenario, case_id=trend.case_id, repeats=repeats, changes=len(changed),
        low=low, high=high, last=[*again, *changed][-1], retried=dict(sorted(failures.items())),
        verdicts=tuple(dict.fromkeys(answer.verdict for answer in ran)),
    )  # fmt: skip


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's score interval of a proportion at `CONFIDENCE`, of one trial or more."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, extra = successes / trials, z * z / trials
    middle = (share + extra / 2) / (1 + extra)
    half = z / (1 + extra) * math.sqrt(share * (1 - share) / trials + extra / (4 * trials))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)
