"""From a cause to the scenario that fails alone: its legs -> least case -> repro -> file."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from harness.bisector.asking import Asker
from harness.bisector.causes import FoundCause, FoundCauses
from harness.bisector.differences import LegChanges
from harness.bisector.failure import Judged, failure_of
from harness.bisector.foreign import script_text, seen_to_fail
from harness.bisector.least import find_least
from harness.bisector.questions import FAILS, OutOfBudget
from harness.bisector.repro import FOLDER, find_repro, repro_name, write_repro, write_script
from harness.checks.evidence import count
from harness.codec import Json
from harness.program.spec import capabilities_of
from harness.records import CaseSpec, Verdict


@dataclass(frozen=True, kw_only=True)
class Alone(Json):
    """A scenario that fails alone.

    Attributes:
        path: of the file; "" if there is none.
        ranks, layers, steps, microbatches: that it takes.
        made: what was made smaller, in words.
        passed: layouts of fewer ranks that do not fail, the smallest first.
        message: of its verdict.
        script: of a program that is not the built-in one: a script that needs nothing of ours.
        script_flaw: why the script was not seen to fail; "" if it was.
        notes: why there is none, a sentence each.
    """

    path: str = ""
    ranks: int = 0
    layers: int = 0
    steps: int = 0
    microbatches: int = 0
    made: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    message: str = ""
    script: str = ""
    script_flaw: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For people: `harness run X.yaml (1 rank, 1 layer, 3 steps, 1 microbatch)`, or why not."""
        script = ""
        if self.script:
            script = f"; python {self.script} ({self.script_flaw or 'seen to fail without Δ0'})"
        if not self.path:
            return ("; ".join(self.notes) or "none") + script
        sizes = {
            "rank": self.ranks, "layer": self.layers, "step": self.steps,
            "microbatch": self.microbatches,
        }  # fmt: skip
        told = ", ".join(count(number, noun) for noun, number in sizes.items() if number)
        fewer = f"; fewer ranks pass: {', '.join(self.passed)}" if self.passed else ""
        return f"harness run {self.path} ({told}){fewer}{script}"


def leave_alone(
    case: CaseSpec,
    verdict: Verdict,
    causes: FoundCauses | None,
    asker: Asker,
    *,
    folder: Path = FOLDER,
    place: str = "",
) -> Alone:
    """Write the least scenario that fails as the case does.

    Args:
        case: that failed.
        verdict: its answer.
        causes: of its failure; the first is kept. None for all differences of the legs.
        asker: makes the runs.
        folder: where the scenario goes.
        place: where the fault entered, in words, for the scenario's `why`.

    Raises:
        OutOfBudget: nothing was written; what was asked is kept.
    """
    names = LegChanges(case.reference, case.candidate).names
    cause = next(iter(causes.causes), None) if causes is not None else None
    judged = judged_of_cause(case, verdict, causes, cause, asker)
    if judged is None:
        return Alone(notes=("the cause alone did not fail again",))
    least = find_least(judged, case.reference, judged.case.candidate)
    if least.stopped:
        raise OutOfBudget(least.stopped)
    story = _story(case, judged, cause, names, place)
    repro = find_repro(
        case, judged, least.reference, least.candidate, story=story, folder=folder
    )  # fmt: skip
    found = Alone(made=least.made, message=least.message, notes=repro.why_not)
    config = least.candidate.config
    if repro.text:
        found = Alone(
            path=str(write_repro(repro, folder)), ranks=least.candidate.world_size,
            layers=config.get("model", {}).get("layers", 0), steps=config["steps"],
            microbatches=config.get("microbatches", 0),
            made=least.made, passed=least.passed, message=least.message,
        )  # fmt: skip
    if capabilities_of(config).layouts:
        return found
    text = script_text(least.reference, least.candidate, story=story)
    script = write_script(text, repro_name(case), folder)
    flaw = seen_to_fail(script, judged.failure, least.candidate, asker)
    return dataclasses.replace(found, script=str(script), script_flaw=flaw)


def judged_of_cause(
    case: CaseSpec,
    verdict: Verdict,
    causes: FoundCauses | None,
    cause: FoundCause | None,
    asker: Asker,
) -> Judged | None:
    """Who answers for the cause by itself; None if it does not fail again."""
    if cause is None or causes is None:
        return Judged(case, failure_of(verdict), asker, verdict)
    legs = LegChanges(case.reference, case.candidate)
    alone = dataclasses.replace(case, candidate=legs.run_with(cause.changes))
    judged = Judged(alone, cause.failure, asker)
    judged.patience = causes.patience
    words = f"does it fail with {' + '.join(cause.changes) or 'none of the changes'}?"
    return judged if judged.answer(alone.candidate, words=words) == FAILS else None


def _story(
    case: CaseSpec,
    judged: Judged,
    cause: FoundCause | None,
    names: tuple[str, ...],
    place: str,
) -> str:
    changes = cause.changes if cause is not None else names
    together = " together" if len(changes) > 1 else ""
    where = f" {place[:1].upper()}{place[1:]}." if place else ""
    return (
        f"Least case of {case.id} of {case.scenario}: {judged.failure} with "
        f"{' and '.join(changes) or 'no change'}{together}.{where}"
    )
