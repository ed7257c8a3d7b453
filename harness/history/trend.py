"""One case across nights: answers in order, and values where they may be compared.

Values of two nights are compared only if the runs did equal work in equal environments on as many
slots: such nights form a *series*, named by a letter. A run whose environment is unknown is in no
series. `changes` are looked for within each series, of the candidate's own values and of its step
time over that of its reference in the same night: what the machine does to both cancels out there,
and what a commit does to both shows in the first.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from harness.history.changes import Change, deviation, find_changes
from harness.history.entries import CaseEntry, FolderEntry, RunEntry
from harness.history.ledger import History
from harness.provenance import different, flat, told
from harness.records import Json, Outcome, What

SAYS_NOTHING: tuple[What, ...] = ("interrupted", "not_run", "shared_gpu")
"""How a case ends of which the machine was the reason."""
METRICS: dict[str, Callable[[RunEntry], float | None]] = {
    "step_s": lambda run: run.step_s,
    "peak_bytes": lambda run: run.peak_bytes,
    "startup_s": lambda run: run.startup_s,
}
SHIFTING = (*METRICS, "step_ratio")
"""What is looked at for lasting changes."""
MIN_TO_VARY = 5
"""Nights from which it is said how much a value varies."""


@dataclass(frozen=True, kw_only=True)
class Night(Json):
    """One answer for the case, with what its candidate run measured.

    Attributes:
        folder: id of the run folder.
        series: letter of the nights whose values may be compared with this one's; "" if none may.
        attempt: 0 for the folder's first answer for the case.
        environment: names what the verdict may depend on, "" if unknown.
        step_ratio: step time over that of the reference and its control, their geometric mean.
        retried: attempts that the machine failed before the answer, as 'leg: failure'.
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


@dataclass(frozen=True, kw_only=True)
class Shift(Json):
    """A lasting change of one metric, and the nights around it."""

    metric: str
    series: str
    change: Change
    first: Night
    last_before: Night


@dataclass(frozen=True, kw_only=True)
class CaseTrend(Json):
    """Everything the history knows of one case.

    Attributes:
        nights: answers, oldest first.
        first_bad: where it began to fail, if it fails now.
        last_good: the last pass before that, or the last pass at all.
        shifts: lasting changes of step time, alone and over the reference's, memory and start-up.
        noise: deviation of each metric in the last series, as a part of its level.
        series: what a series differs in from the one before it, by letter.
    """

    scenario: str
    case_id: str
    nights: tuple[Night, ...]
    first_bad: Night | None
    last_good: Night | None
    shifts: tuple[Shift, ...]
    noise: dict[str, float]
    series: dict[str, str]

    @property
    def num_nights(self) -> int:
        """Run folders that answered for the case."""
        return len({night.folder for night in self.nights})


def trends(
    history: History,
    scenario: str,
    case_id: str | None = None,
    *,
    days: int | None = None,
    until: str = "",
) -> tuple[CaseTrend, ...]:
    """The trend of each case of a scenario, or of one of them, by id.

    Args:
        history: where to look.
        scenario: its name.
        case_id: one case; None for all.
        days: look only at the last so many days on which something ran.
        until: and at no folder that was made after this time; "" for all.
    """
    folders = _folders(history, scenario, days, until)
    chosen = [scenario] if case_id is None else [scenario, case_id]
    of_case = "" if case_id is None else " AND cases.case_id = ?"
    if days is not None and folders:
        # Rows are held against their digests one by one: years of them take minutes.
        chosen.append(min(folder.created for folder in folders.values()))
        of_case += " AND folders.created >= ?"
    joined = "cases JOIN folders ON cases.folder = folders.id"
    cases = history.owned_rows(
        CaseEntry,
        f"SELECT cases.* FROM {joined} WHERE folders.scenario = ?{of_case} "
        f"ORDER BY folders.created, folders.id, cases.attempt",
        chosen,
    )
    answers: dict[str, list[tuple[FolderEntry, CaseEntry]]] = {}
    for owner, entry in cases:
        if owner in folders:
            answers.setdefault(entry.case_id, []).append((folders[owner], entry))
    runs = history.owned_rows(
        RunEntry,
        f"SELECT DISTINCT runs.* FROM {joined} JOIN runs ON runs.folder = cases.folder "
        f'AND runs."key" IN (cases.candidate, cases.reference, cases.control) '
        f"WHERE folders.scenario = ?{of_case} "
        f"ORDER BY runs.attempt",
        chosen,
    )
    measured = {(owner, run.key): run for owner, run in runs if not run.what}
    return tuple(_trend(scenario, name, answers[name], measured) for name in sorted(answers))


def _folders(
    history: History, scenario: str, days: int | None, until: str
) -> dict[str, FolderEntry]:
    found = history.rows(
        FolderEntry, "SELECT * FROM folders WHERE scenario = ? ORDER BY created, id", [scenario]
    )
    folders = {folder.id: folder for folder in found if not until or folder.created <= until}
    if days is None:
        return folders
    kept = set(sorted({folder.created[:10] for folder in folders.values()})[-days:])
    return {name: folder for name, folder in folders.items() if folder.created[:10] in kept}


@dataclass(frozen=True)
class _Answer:
    """One answer, its candidate's run if it was measured, and the letter of its series."""

    folder: FolderEntry
    case: CaseEntry
    run: RunEntry | None
    letter: str


def _trend(
    scenario: str,
    case_id: str,
    answers: list[tuple[FolderEntry, CaseEntry]],
    measured: Mapping[tuple[str, str], RunEntry],
) -> CaseTrend:
    letters = Series()
    last_of = {folder.id: place for place, (folder, _) in enumerate(answers)}
    found = []
    for place, (folder, case) in enumerate(answers):
        # Runs of a folder are those of its last answer.
        run = measured.get((folder.id, case.candidate)) if last_of[folder.id] == place else None
        letter = letters.letter(folder, run) if run is not None else ""
        found.append(_Answer(folder, case, run, letter))
    ratios = _step_ratios(found, measured)
    nights = [_night(answer, ratio) for answer, ratio in zip(found, ratios, strict=True)]
    first_bad, last_good = _turning_point(nights)
    shifts, noise = _shifts(nights)
    return CaseTrend(
        scenario=scenario, case_id=case_id, nights=tuple(nights), first_bad=first_bad,
        last_good=last_good, shifts=shifts, noise=noise, series=letters.told,
    )  # fmt: skip


def _night(answer: _Answer, step_ratio: float | None) -> Night:
    folder, case, run = answer.folder, answer.case, answer.run
    values = {name: of(run) if run is not None else None for name, of in METRICS.items()}
    return Night(
        folder=folder.id, created=folder.created, attempt=case.attempt,
        commit=case.commit or folder.commit,
        outcome=case.outcome, what=case.what, message=case.message, retried=case.retried,
        environment=folder.environment_id, series=answer.letter, step_ratio=step_ratio, **values,
    )  # fmt: skip


def _step_ratios(
    answers: list[_Answer], measured: Mapping[tuple[str, str], RunEntry]
) -> list[float | None]:
    """Of each answer, where its reference did what the latest one of its series does."""
    latest: dict[str, str] = {}
    ratios: list[float | None] = []
    for answer in reversed(answers):
        keys = (answer.case.reference, answer.case.control)
        legs = [measured.get((answer.folder.id, key)) for key in keys]
        beside = {leg.work: leg.step_s for leg in legs if leg is not None and leg.step_s}
        times = [leg.step_s for leg in legs if leg is not None and leg.step_s]
        mine = answer.run.step_s if answer.run is not None and answer.letter else None
        is_like = len(beside) == 1 and latest.setdefault(answer.letter, *beside) in beside
        ratios.append(mine / geometric_mean(times) if mine and is_like else None)
    return ratios[::-1]


def _turning_point(nights: Iterable[Night]) -> tuple[Night | None, Night | None]:
    """First failure after the last pass, and that pass, in order of time.

    Only passes and failures count: what was skipped, had no verdict or was ended by the machine is
    passed over. A case fails if the last answer that counts is a failure, and then only answers in
    that answer's environment are looked at, if a pass is among them: a pass on another machine is
    no repair. A commit that was run twice can be the last good and the first bad one. Of a case
    that failed ever since it is known, there is no last good night.
    """
    counted = [
        night
        for night in nights
        if night.outcome == "passed"
        or (night.outcome == "failed" and night.what not in SAYS_NOTHING)
    ]
    if counted and counted[-1].outcome == "failed" and counted[-1].environment:
        own = [night for night in counted if night.environment == counted[-1].environment]
        if any(night.outcome == "passed" for night in own):
            counted = own
    first_bad: Night | None = None
    last_good: Night | None = None
    for night in counted:
        if night.outcome == "passed":
            first_bad, last_good = None, night
        elif first_bad is None:
            first_bad = night
    return first_bad, last_good


def _shifts(nights: list[Night]) -> tuple[tuple[Shift, ...], dict[str, float]]:
    found: list[Shift] = []
    noise: dict[str, float] = {}
    for metric in SHIFTING:
        for series in dict.fromkeys(night.series for night in nights if night.series):
            own = [n for n in nights if n.series == series and getattr(n, metric) is not None]
            values = [float(getattr(night, metric)) for night in own]
            changes = find_changes(values)
            found += [
                Shift(metric=metric, series=series, change=change, first=own[change.at],
                      last_before=own[change.at - 1])
                for change in changes
            ]  # fmt: skip
            if len(values) >= MIN_TO_VARY and len(set(values)) > 1 and values[-1]:
                noise[metric] = deviation(values) / abs(values[-1])
    return tuple(found), noise


class Series:
    """Letters for what makes values comparable, and what each differs in from the one before."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._before: dict[str, Any] = {}
        self.told: dict[str, str] = {}

    def letter(self, folder: FolderEntry, run: RunEntry) -> str:
        """The letter of a run's series; "" if its environment is unknown."""
        if not folder.environment or not run.fingerprint:
            return ""
        key = f"{folder.environment_id} {run.fingerprint} {folder.slots} {run.work}"
        if key not in self._known:
            self._known[key] = _word(len(self._known))
            facts = facts_of(folder, run)
            self.told[self._known[key]] = told_difference(self._before, facts)
            self._before = facts
        return self._known[key]


def _word(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"S{place + 1}"


def facts_of(folder: FolderEntry, run: RunEntry) -> dict[str, Any]:
    """Everything that two runs must agree in before their values are compared, by dotted name."""
    fingerprint = folder.fingerprints.get(run.fingerprint, {})
    return {
        **flat("", folder.environment),
        **flat("ranks", fingerprint.get("ranks", ())),
        "slots": folder.slots,
        "settings of the run": run.work,
    }


def told_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    """What changed, as 'versions.torch: 2.12 became 2.13'; "" if there was nothing before."""
    if not left:
        return ""
    return "; ".join(
        f"{n}: {told(left, n)} became {told(right, n)}" for n in different(left, right)
    )
