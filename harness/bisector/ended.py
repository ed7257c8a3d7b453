"""Where a run failed that did not just compute otherwise: it died, hung, or said why it stopped.

    stale_address      the tensor that moved; a graph still held its place      state
    race               the memory, and its two uses that nothing orders         by its streams
    hang               the collective that somebody never entered, or mistook   by the collective
    crashed, oom, ...  the step, and whether a graph was being made             capture, outside
    not_replayed       graphs that were not made or not used                    capture
    lost records       the first that is missing or damaged                     outside

All of it is read from fields of the outcome and of error records; what older files lack is unknown.
"""

from dataclasses import replace

from harness.bisector.flow import module_of
from harness.bisector.found import Location, Near
from harness.checks.complete import find_flaw
from harness.checks.evidence import rank_table
from harness.errors import cut, one_line
from harness.faults.fault import Phase
from harness.infrastructure import has_lost_its_groups
from harness.records import (
    CollectiveFault,
    Ending,
    ErrorRecord,
    Passed,
    RaceEvidence,
    RunResult,
    StreamUse,
    What,
)

NAMES_ITS_TENSOR: tuple[What, ...] = ("stale_address", "race", "capture_refused", "stale_guards")
"""What a run ends with that names its own cause: a difference in the same step only follows."""
AT_CAPTURE: tuple[What, ...] = ("capture_refused", "not_replayed", "not_compiled", "stale_guards")
LOST: tuple[What, ...] = (
    "missing_step", "missing_rank", "corrupt_record", "record_after_end", "empty_run",
)  # fmt: skip
MAX_CHARS = 300
_PHASES: dict[Passed, Phase] = {
    "": "outside", "forward": "forward", "backward": "backward", "reduce": "reduce",
    "optimizer": "optimizer", "capture": "capture", "replay": "capture",
}  # fmt: skip
"""What fails in the replay of a whole step is what was captured."""


def how_it_ended(run: RunResult) -> Location | None:
    """Where a run went wrong, by what ended it; None if it is whole."""
    flaw = find_flaw(run)
    if flaw is None:
        return None
    rank, error = _speaker(run, flaw.rank)
    found = Location(
        step=_step(run, flaw.step, rank, error), rank=rank,
        ranks=flaw.ranks or (() if rank is None else (rank,)),
        phase=_phase(run, flaw.what, error), quantity=flaw.what, evidence=(_shown(flaw.message),),
    )  # fmt: skip
    if flaw.module:
        return replace(found, module=flaw.module)
    if flaw.what == "stale_address":
        return _stale(found, next(iter(error.tensors), "") if error is not None else "")
    if error is not None and flaw.what == "race" and error.race is not None:
        return _race(found, error.race)
    fault = _ending(run).collective
    if flaw.what in ("hang", "crashed") and fault is not None:
        return _waiting(found, fault)
    return _named(found, run, error)


def _ending(run: RunResult) -> Ending:
    return run.outcome.ending or Ending()


def _named(found: Location, run: RunResult, error: ErrorRecord | None) -> Location:
    """With the module that was at work, and the tensor that the error names."""
    if error is None:
        return replace(found, module=_ending(run).module)
    if has_lost_its_groups(error):
        told = "its process groups are gone, which no step takes away: something outside of steps"
        return replace(found, evidence=(*found.evidence, told))
    if found.phase == "outside":
        return found
    tensor = next(iter(error.tensors), "")
    raised = (f"it was raised in {error.module}",) if error.module else ()
    return replace(
        found, module=error.module or module_of(tensor), tensor=tensor,
        evidence=(*found.evidence, *raised),
    )  # fmt: skip


def _speaker(run: RunResult, culprit: int | None) -> tuple[int | None, ErrorRecord | None]:
    """The rank that failed first, and what it said."""
    records = rank_table(run)
    if culprit is not None and culprit in records:
        return culprit, records[culprit].error
    for rank, each in records.items():
        if each.error is not None and each.error.blames in (None, rank):
            return rank, each.error
    return culprit, None


def _step(
    run: RunResult, known: int | None, rank: int | None, error: ErrorRecord | None
) -> int | None:
    """The step that it was in: as it said, else the first whose record is not where it belongs."""
    if known is not None:
        return known
    if error is not None:
        return error.step if error.step >= 0 else None
    records = rank_table(run).get(rank) if rank is not None else None
    if records is None or records.start is None:
        return None
    places: dict[int, list[int]] = {}
    for place, record in enumerate(records.steps):
        places.setdefault(record.step, []).append(place)
    # A record that does not decode leaves a hole, one may stand twice, or after that of the next
    # step; a rank that died leaves off.
    first = next(step for step in range(len(places) + 1) if places.get(step) != [step])
    steps = run.spec.config.get("steps")
    return first if isinstance(steps, int) and first < steps else None


def _phase(run: RunResult, what: What, error: ErrorRecord | None) -> Phase:
    if what in AT_CAPTURE:
        return "capture"
    if what in LOST:
        return "outside"
    if error is None:
        # It left no word; what it noted, or those that waited for it, say what all were doing.
        ending = _ending(run)
        if ending.phase:
            return _PHASES[ending.phase]
        others = [each.error for each in run.ranks if each.error is not None]
        at_capture = any(_in_graphs(other) for other in others)
        return "capture" if at_capture or ending.module else "outside"
    if has_lost_its_groups(error):
        return "outside"
    phase, config = _PHASES[error.phase], run.spec.config
    if phase != "outside" and config.get("graph"):
        # No step failed before it, and what captures leave behind is new in it.
        phase = "capture" if error.step == config.get("graph_warmup_steps") else phase
    return phase


def _in_graphs(error: ErrorRecord) -> bool:
    return _PHASES[error.phase] == "capture"


def _stale(found: Location, name: str) -> Location:
    if not name:
        return replace(found, phase="state")
    told = f"a graph was captured over {name}, which has moved or gone since"
    return replace(
        found, phase="state", tensor=name, module=module_of(name),
        evidence=(*found.evidence, told),
    )  # fmt: skip


def _race(found: Location, race: RaceEvidence) -> Location:
    streams = {race.later.stream, race.earlier.stream}
    phase: Phase = "reduce" if "reduce" in streams or race.is_gradient else "forward"
    module = module_of(race.tensor) if race.unit in ("", "root") else race.unit
    if race.unit == "root" and not module and phase == "forward":
        module = "embedding"  # the first of the root's modules
    near: Near = "after" if streams & {"gather", "reduce"} else ""
    collective = ""
    if near:
        collective = "reduce-scatter of gradients" if phase == "reduce" else "all-gather of weights"
    told = (
        f"later: {_use(race.later)}", f"earlier: {_use(race.earlier)}",
        "no wait says which of the two comes first",
    )  # fmt: skip
    return replace(
        found, phase=phase, tensor=race.tensor, module=module, near=near, collective=collective,
        evidence=(f"the memory of {race.tensor} is used twice", *told),
    )  # fmt: skip


def _use(use: StreamUse) -> str:
    verb = "writes" if use.writes else "reads"
    return f"{use.operator} {verb} on stream {use.stream} at {use.place}"


def _waiting(found: Location, fault: CollectiveFault) -> Location:
    """The collective that ranks wait in for each other, as the engine found it out."""
    near: Near = "before" if fault.entered is None else "in"
    mine = fault.expected if fault.entered is None else fault.entered
    phase: Phase | None = found.phase
    told = "the others wait in it; the ranks that are missing wait in no collective at all"
    if fault.entered is not None:
        told = f"ranks {', '.join(map(str, fault.others))} are in {fault.expected}"
        phase = "reduce" if "reduce" in fault.expected.operator else "forward"
    if fault.expected.in_capture or mine.in_capture:
        phase = "capture"
        told += "; some capture graphs there, others do not, or are further"
    return replace(
        found, rank=fault.ranks[0], ranks=fault.ranks, near=near, phase=phase,
        module=mine.label if mine.label.startswith("layers.") else "",
        step=found.step if fault.step is None else fault.step,
        collective=mine.operator + (f" of {mine.label}" if mine.label else ""),
        evidence=(*found.evidence, told),
    )  # fmt: skip


def _shown(message: str) -> str:
    return cut(one_line(message), MAX_CHARS)
