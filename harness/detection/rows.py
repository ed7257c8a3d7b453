"""A row of the detection matrix: what became of one planted fault.

    detected    a check of a case of it failed, in one of the words that its entry expects
    misjudged   something failed, or gave no verdict, in other words: entry or harness is wrong
    missed      every case of it passed
    not run     it cannot be planted here, and why

The barest case that detects it is the one that is told: no stressor before one, one before several.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.bisector.found import Location
from harness.codec import Json
from harness.detection.alone import STRESSED, Sight, seen_plain, seen_stressed
from harness.faults.cases import BARE, BROKEN, CELL, RACES, VARIANT_LABEL
from harness.faults.fault import Fault
from harness.faults.scoring import Localised, is_named, localised
from harness.records import CaseSpec, Outcome, RunResult, Verdict, What

Status = Literal["detected", "misjudged", "missed", "not run"]
PLANTED = "planted"
"""The event in which a rank says that it planted something."""
BY_NAME: Mapping[What, str] = {"stale_address": "ledger", "stale_guards": "guards", "race": "races"}
"""What says it, where no check compares anything."""

OF_ANYTHING: tuple[What, ...] = ("crashed", "hang")
"""What a run may end with before anything was planted in it."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A case with its verdict and the runs that it was judged by; no runs if it was skipped."""

    case: CaseSpec
    verdict: Verdict
    reference: RunResult | None = None
    control: RunResult | None = None
    candidate: RunResult | None = None

    @property
    def variant(self) -> str:
        """Name of the variant."""
        return self.case.labels.get(VARIANT_LABEL, CELL)


@dataclass(frozen=True, kw_only=True)
class Answer(Json):
    """What one variant of a fault's cell said.

    Attributes:
        stress: stressors of the candidate.
        check: that decided; "" if it passed.
        step: of the first difference, or in which the run ended.
        acted: whether a rank says that it planted the fault.
    """

    variant: str
    case: str
    stress: tuple[str, ...]
    outcome: Outcome
    what: What
    check: str
    message: str
    step: int | None
    acted: bool


@dataclass(frozen=True, kw_only=True)
class Row(Json):
    """What became of one fault.

    Attributes:
        reason: why it was not run, or not detected; "" for a detected one.
        case: id of the case that is told.
        under: its stressors.
        check, what, message: of its verdict.
        planted_step, planted_rank: None where the fault has none.
        detected_step: in which its verdict sees it.
        localised: how well the bisector found it; "" if nobody asked.
        is_named: whether phase, module and tensor are right, whatever the step and the rank.
        location: what it said.
        runs, seconds: of all its cases, shared references included, and of the search.
        alone: what each cheap check would have seen, by column.
        answers: of all its cases.
    """

    fault: str
    kind: str
    source: str
    status: Status
    reason: str = ""
    case: str = ""
    under: tuple[str, ...] = ()
    check: str = ""
    what: What = ""
    message: str = ""
    planted_step: int | None = None
    planted_rank: int | None = None
    detected_step: int | None = None
    localised: Localised = ""
    is_named: bool = False
    location: Location | None = None
    runs: int = 0
    seconds: float = 0.0
    alone: dict[str, Sight] = field(default_factory=dict)
    answers: tuple[Answer, ...] = ()

    @property
    def later(self) -> int | None:
        """Steps from the plant to its detection; None if either is not known."""
        if self.planted_step is None or self.detected_step is None:
            return None
        return self.detected_step - self.planted_step


def row_of(fault: Fault, held: Sequence[Judged]) -> Row:
    """The row of a fault from its cases, the barest first; not localised yet."""
    blank = Row(fault=fault.name, kind=fault.kind, source=fault.source, status="not run")
    cell = next(each for each in held if each.variant == CELL)
    if cell.verdict.outcome == "skipped":
        return dataclasses.replace(blank, reason=cell.verdict.message)
    answers = tuple(_answer(each) for each in held)
    step, rank = planted_at(fault, cell)
    told = next((a for a in answers if _is_detected(fault, a)), None)
    status: Status = "detected"
    reason = ""
    if told is None:
        told = next((a for a in answers if a.outcome != "passed"), answers[-1])
        status, reason = _undetected(fault, told)
        if (
            status == "missed"
            and cell.case.candidate.device != "cpu"
            and RACES in fault.cell.stress
        ):
            # Its own stressor cannot be had here, so this says nothing of what that sees.
            status, reason = "not run", f"the stressor {RACES} needs cpu, and no other sees it here"
    runs = _runs(held)
    return dataclasses.replace(
        blank, status=status, reason=reason, case=told.case, under=told.stress,
        check=told.check, what=told.what, message=told.message, planted_step=step,
        planted_rank=rank, detected_step=told.step, runs=len(runs),
        seconds=sum(run.outcome.wall_s for run in runs.values()), alone=_alone(held),
        answers=answers,
    )  # fmt: skip


def can_run(row: Row) -> bool:
    """Whether the fault counts: an entry whose cell is no scenario does, as one that is missed."""
    return row.status != "not run" or row.reason.startswith(BROKEN)


def located(row: Row, fault: Fault, found: Location, *, num_layers: int) -> Row:
    """The row with what the bisector said of it."""
    if fault.points_at is None:
        return dataclasses.replace(row, location=found)
    if row.detected_step is None:
        row = dataclasses.replace(row, detected_step=found.step)
    how = localised(
        found, fault.points_at, step=row.planted_step, rank=row.planted_rank,
        num_layers=num_layers,
    )  # fmt: skip
    named = is_named(found, fault.points_at)
    return dataclasses.replace(row, location=found, localised=how, is_named=named)


def to_locate(row: Row, fault: Fault) -> str:
    """The case that a search starts from: the whole cell where it fails, as that says most."""
    of_cell = [a for a in row.answers if a.variant == CELL and _is_detected(fault, a)]
    return of_cell[0].case if of_cell else row.case


def planted_at(fault: Fault, cell: Judged) -> tuple[int | None, int | None]:
    """Step and rank of a plant, None for what it does not have."""
    spec = cell.case
    plant = next((p for p in (leg.plant for leg in (spec.candidate, spec.reference, spec.control))
                  if p is not None), None)  # fmt: skip
    step = rank = None
    if plant is not None and "step" in fault.takes:
        step = plant.step
    if plant is not None and "rank" in fault.takes and not fault.everywhere:
        rank = plant.rank % spec.candidate.world_size
    return step, rank


def _is_detected(fault: Fault, answer: Answer) -> bool:
    if answer.what in OF_ANYTHING and "step" in fault.takes and not answer.acted:
        # It ended of something else: of a mistake in the plant, or a slow machine. What has no step
        # may act after the last record, where nothing can be said.
        return False
    return answer.outcome in ("failed", "incomparable") and answer.what in fault.expects


def _undetected(fault: Fault, told: Answer) -> tuple[Status, str]:
    if told.outcome == "passed":
        return "missed", "planted, and nothing said a word" if told.acted else "never planted"
    expected = " or ".join(fault.expects)
    acted = "" if told.acted else ", before it was planted"
    got = f"{told.outcome} {told.what}{acted}"
    return "misjudged", f"expected {expected}, got {got}: {told.message}"


def _answer(each: Judged) -> Answer:
    verdict = each.verdict
    legs = [run for run in (each.reference, each.control, each.candidate) if run is not None]
    return Answer(
        variant=each.variant,
        case=each.case.id,
        stress=tuple(each.case.candidate.config.get("stress", ())),
        outcome=verdict.outcome,
        what=verdict.what,
        check=_decided(verdict),
        message=verdict.message,
        step=_step(each),
        acted=any(e.name == PLANTED for run in legs for r in run.ranks for e in r.events),
    )


def _decided(verdict: Verdict) -> str:
    """The check that a verdict quotes."""
    if verdict.outcome == "passed":
        return ""
    if verdict.what in BY_NAME:
        return BY_NAME[verdict.what]
    return verdict.check.partition(":")[0]


def _step(each: Judged) -> int | None:
    if each.verdict.outcome == "passed":
        return None
    if each.verdict.difference is not None:
        return each.verdict.difference.step
    ranks = each.candidate.ranks if each.candidate is not None else ()
    ended = [r.error.step for r in ranks if r.error is not None]
    return min(ended, default=None)


def _runs(held: Iterable[Judged]) -> dict[str, RunResult]:
    legs = (run for each in held for run in (each.reference, each.control, each.candidate))
    return {run.outcome.key: run for run in legs if run is not None}


def _alone(held: Sequence[Judged]) -> dict[str, Sight]:
    """The columns, the plain ones from the barest case."""
    pairs = {
        each.variant: (each.reference, each.candidate)
        for each in held
        if each.reference is not None and each.candidate is not None
    }
    plain = pairs.get(BARE) or pairs.get(CELL)
    if plain is None:
        return {}
    whole = [(a, b) for a, b in pairs.values() if a is not None and b is not None]
    assert plain[0] is not None
    assert plain[1] is not None
    return seen_plain(*plain) | {STRESSED: seen_stressed(whole)}
