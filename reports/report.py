"""What every format of the report says: one `Report`, made once, already cleaned for showing.

The order of cases is failures first; within an outcome, the plan's. A case that was planned and has
no verdict gets one that says so: a report must not be green because something is missing from it.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checks import confirmation
from harness.records import CaseSpec, CheckResult, Difference, Json, Outcome, Verdict
from harness.runner.estimates import MIB, Cost
from harness.runner.retries import Attempt
from reports.compared import LossCurve, StateMap
from reports.history import NOTHING, Past
from reports.text import one_line

OUTCOME_ORDER: tuple[Outcome, ...] = ("failed", "error", "incomparable", "passed", "skipped")
SYMBOLS: dict[Outcome, str] = {
    "passed": "✓", "failed": "✗", "error": "!", "incomparable": "≠", "skipped": "–",
}  # fmt: skip
GREEN: tuple[Outcome, ...] = ("passed", "skipped")
MAX_CAUSE_CHARS = 160
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Output(Json):
    """The end of what one rank of a run printed."""

    role: str
    rank: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Addresses(Json):
    """What a run's graphs hold on to, and which tensors moved under it.

    Counts are of the rank that has most: ranks run the same program. `by_owner`, `by_place` and
    `unnamed` are storages that graphs use and do not own, by who names them.
    """

    captured: int  # graphs
    by_owner: int
    by_place: int
    unnamed: int
    moved: dict[str, int]  # long-lived tensors that moved, by step; empty if it was not counted
    names: tuple[str, ...]  # of some that moved

    @property
    def words(self) -> str:
        """One sentence."""
        parts = [
            f"{self.captured} graphs rely on {self.by_owner} named tensors, {self.by_place} "
            f"storages known by place and {self.unnamed} unnamed"
        ] * bool(self.captured)
        counts = self.moved.values()
        if not any(counts):
            return "; ".join(
                [*parts, "no pointer moved" if counts else "moved pointers were not counted"]
            )
        last = max(int(step) for step, count in self.moved.items() if count)
        most = f"at most {max(counts)} in a step, last in step {last}"
        parts.append(f"{sum(counts)} pointers moved, {most}")
        parts += [f"the first of them {', '.join(self.names)}"] if self.names else []
        return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class CaseReport:
    """One case, ready to be shown. Mappings are by role: reference, control, candidate."""

    spec: CaseSpec
    verdict: Verdict
    message: str
    command: str  # runs the case again
    bisect: str  # finds the cause of a failure, "" where there is none to find
    curve: LossCurve | None
    state: StateMap | None  # what differs by step and rank, of a case that did not pass
    peaks: dict[str, dict[int, int]]  # peak memory in bytes, by rank
    addresses: dict[str, Addresses]
    environments: dict[str, str]  # letters of the environments of the ranks
    environment_note: str
    output: Output | None
    cost: Cost
    attempts: dict[str, tuple[Attempt, ...]] = field(default_factory=dict)  # but the one judged

    @property
    def outcome(self) -> Outcome:
        """The verdict's outcome."""
        return self.verdict.outcome

    @property
    def checks(self) -> tuple[CheckResult, ...]:
        """Results of the checks, worst first."""
        return tuple(sorted(self.verdict.checks, key=lambda c: OUTCOME_ORDER.index(c.outcome)))

    @property
    def attempt_words(self) -> str:
        """'passed on attempt 2 (candidate: port_in_use)'; "" if none was failed or killed."""
        failed = {role: [a.cause for a in own if a.cause] for role, own in self.attempts.items()}
        told = [
            f"{role}: {cause}" if number == 1 else f"{role}: {number} x {cause}"
            for role, found in failed.items()
            for cause, number in Counter(found).items()
        ]
        most = max(map(len, failed.values()), default=0)
        return f"{self.outcome} on attempt {most + 1} ({', '.join(told)})" if most else ""

    @property
    def confirmation(self) -> str:
        """Whether the difference came again, on one line; "" if nobody asked."""
        found = self.verdict.confirmation
        return "" if found is None else one_line(confirmation.words(found))

    @property
    def where(self) -> str:
        """Place of the first difference, on one line; "" if there is none."""
        place = self.verdict.difference
        return "" if place is None else one_line(place_words(place), 300)

    @property
    def cause(self) -> str:
        """What cases that fail for one reason share: fields of the verdict, or its message.

        Numbers inside names are taken for one another: `layers.3.attn` and `layers.7.attn` that
        both differ are one cause until somebody has looked.
        """
        place, ended = self.verdict.difference, self.verdict.ending
        if ended is None:
            if place is None:
                return one_line(self.message, MAX_CAUSE_CHARS)
            text = f"{place.quantity} of {place.tensor}" if place.tensor else place.quantity
        elif ended.exception or ended.signal or ended.collective:
            who = ended.exception or ended.signal
            if ended.collective is not None:
                who = f"{who} in {ended.collective.expected}".removeprefix(" in ")
            phase = f"in {ended.phase}" if ended.phase else ""
            at = f"at {ended.raised_at}" if ended.raised_at else ""
            text = " ".join(filter(None, (who, phase, ended.module, at)))
        else:
            return one_line(self.message, MAX_CAUSE_CHARS)
        return one_line(_NUMBER.sub("N", text), MAX_CAUSE_CHARS)


def place_words(place: Difference) -> str:
    """'step 3, rank 0, weights of layers.1.norm'."""
    when = f"step {place.step}" if place.step >= 0 else "before step 0"
    of = f" of {place.tensor}" if place.tensor else ""
    return f"{when}, rank {place.rank}, {place.quantity}{of}"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Cases that seem to have failed for one reason; `words` is what they share."""

    outcome: Outcome
    what: str
    words: str
    cases: tuple[CaseReport, ...]


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Cases by axes: a column for each compared value, a row for the values of the other axes."""

    axis: str  # the compared one
    row_axes: tuple[str, ...]  # of the others that vary; () if cases have other axes each
    columns: tuple[str, ...]  # values of `axis`
    rows: tuple[str, ...]  # in the plan's order
    cases: dict[tuple[str, str], tuple[CaseReport, ...]]  # by row and column


@dataclass(frozen=True, kw_only=True)
class Report:
    """The whole run folder; "" for what is unknown."""

    folder: Path
    scenario: str
    why: str
    created: str  # ISO 8601
    commit: str  # of the code under test
    machine: str  # '8 cores, 4 x NVIDIA H200'
    wall_s: float  # seconds with runs under way, however many at a time
    command_line: str
    exit_code: int
    counts: dict[Outcome, int]
    cases: tuple[CaseReport, ...]
    matrix: Matrix
    environments: dict[str, Mapping[str, Any]]  # every distinct fingerprint by its letter
    attempts: dict[str, int]  # of runs that needed another, its number by key
    history_note: str  # why the run is not in the history
    notes: tuple[str, ...]  # what selections left out
    past: Past = NOTHING  # what the history says of the cases

    @property
    def headline(self) -> str:
        """Counts in words, worst first, or that there was nothing."""
        counted = [f"{n} {outcome}" for outcome, n in self.counts.items() if n]
        return ", ".join(counted) if counted else "nothing ran"

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What did not pass, by cause: those of failures first, then by how many cases have it."""
        found: dict[tuple[Outcome, str, str], list[CaseReport]] = {}
        for case in self.cases:
            if case.outcome not in GREEN:
                key = (case.outcome, case.verdict.what, case.cause)
                found.setdefault(key, []).append(case)
        causes = [
            Cause(outcome=outcome, what=what, words=words, cases=tuple(cases))
            for (outcome, what, words), cases in found.items()
        ]
        return tuple(sorted(causes, key=lambda c: (OUTCOME_ORDER.index(c.outcome), -len(c.cases))))

    @property
    def caution(self) -> str:
        """Why times are not those of the programs alone; "" if nothing is known."""
        if any(case.cost.shares_gpus for case in self.cases):
            return "Ranks shared GPUs: step times mean nothing."
        if any(case.cost.concurrent for case in self.cases):
            return "Several runs were under way at a time: step times are those of a busy machine."
        return ""


# --- the table of costs -----------------------------------------------------------------------

COST_HEAD = (
    "case", "losses", "digests", "peak, MiB", "peak ratio", "step, ms", "speed", "A/A speed",
)  # fmt: skip
COST_WORDS = (
    "Reference → candidate, of the runs that were compared: the peak of the worst rank, and the "
    "median over the later half of the steps of the slowest rank's time, digests included. Speed "
    "is the reference's time over the candidate's; A/A speed the reference's over the control's, 1 "
    "but for noise."
)


def cost_rows(report: Report) -> list[tuple[str, ...]]:
    """A row for each case whose candidate was measured, as text, in the report's order."""
    rows = []
    for case in report.cases:
        found, both = case.cost, ("reference", "candidate")
        if not found.peak_bytes.get("candidate"):
            continue
        peaks = [found.peak_bytes.get(role, 0) / MIB for role in both]
        steps = [found.step_s.get(role) for role in both]
        rows.append((
            case.spec.id, _compared(case, "loss", "pairs"), _compared(case, "state", "digests"),
            _pair(*(f"{peak:.1f}" if peak else "" for peak in peaks)), _ratio(found.memory),
            _pair(*("" if step is None else f"{step * 1e3:.4g}" for step in steps)),
            _ratio(found.speed), _ratio(found.control_speed),
        ))  # fmt: skip
    return rows


def _compared(case: CaseReport, check: str, what: str) -> str:
    """'25,600 equal', '3 of 48 pairs differ', or what the check said; "" if it was not asked."""
    result = next((r for r in case.verdict.checks if r.check == check), None)
    if result is None:
        return ""
    number, differing = result.figures.get(what), result.figures.get("differing_pairs")
    if result.outcome == "passed" and number is not None and differing == 0:
        return f"{number:,.0f} equal"
    if not differing:
        return result.what or result.outcome
    pairs = result.figures.get("pairs")
    return f"{differing:,.0f}{f' of {pairs:,.0f}' if pairs else ''} pairs differ"


def _pair(reference: str, candidate: str) -> str:
    return f"{reference or '?'} → {candidate or '?'}" if reference or candidate else ""


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
