"""From the records of a case to where its fault entered, without running anything.

    legs ran in other environments   what of them differs, on which rank
    verdict blames the reference     reference against its own control
    runs part, then one ends         where they part, in the step that did not end, too
    a run says itself what it is     what it says (stale_address, race, a refused capture)
    runs do not part                 how the failing one ended, or which limit it broke

A difference comes before an end of the run in the same step or later, unless that names its cause.
How a run ended is read from fields of the outcome and of error records:

    stale_address      the tensor that moved; a graph still held its place      state
    race               the memory, and its two uses that nothing orders         by its streams
    hang               the collective that somebody never entered, or mistook   by the collective
    crashed, oom, ...  the step, and whether a graph was being made             capture, outside
    not_replayed       graphs that were not made or not used                    capture
    lost records       the first that is missing or damaged                     outside
"""

from collections.abc import Iterator
from dataclasses import replace

from harness.bisect.aligned import Legs, module_of
from harness.bisect.divergence import where_they_part
from harness.bisect.found import Location, Near
from harness.checks.complete import find_flaw
from harness.checks.evidence import (
    different_leaves,
    quantity_of,
    rank_table,
    shared_pairs,
    show_ranks,
    stated_leaves,
    step_table,
)
from harness.errors import cut, one_line
from harness.faults.fault import Phase
from harness.infrastructure import has_lost_its_groups
from harness.provenance import fingerprint
from harness.records import (
    DIGEST_HEX_CHARS,
    NEVER_RAN,
    TAP_HEX_CHARS,
    UNFINISHED,
    CollectiveFault,
    Ending,
    ErrorRecord,
    Passed,
    RaceEvidence,
    RankRecords,
    RunResult,
    StreamUse,
    Verdict,
    What,
)
from harness.store import CaseRuns

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


def parted_before_the_end(
    reference: RunResult, candidate: RunResult, ended: Location
) -> Location | None:
    """Where the step that did not end left its reference; None if it did not, or nobody looked.

    Nothing is said of the step that captures: warm-ups and captures run the same calls.
    """
    config, step = candidate.spec.config, ended.step
    if step is None or (config.get("graph") and step <= config.get("graph_warmup_steps", 0)):
        return None
    whole = step_table(reference)
    ranks = []
    for rank, records in rank_table(candidate).items():
        rows, ours = _unfinished_rows(records, step), whole.get((step, rank))
        if ours is not None and records.start is not None and rows:
            taps = "".join(_known(rows, ours.taps, records.start.taps))
            if len(taps) == len(ours.taps):
                records = replace(records, steps=(*records.steps, replace(ours, taps=taps)))
        ranks.append(records)
    parted = where_they_part(Legs(reference, replace(candidate, ranks=tuple(ranks))))
    return parted if parted is not None and parted.step == step else None


def _unfinished_rows(records: RankRecords, step: int) -> list[str]:
    for event in records.events:
        if event.name == UNFINISHED and event.step == step:
            text = event.detail.get("taps")
            if isinstance(text, str):
                return [text[i : i + TAP_HEX_CHARS] for i in range(0, len(text), TAP_HEX_CHARS)]
    return []


def _known(rows: list[str], reference: str, names: tuple[str, ...]) -> Iterator[str]:
    """Each row that ran; in the place of one that did not, that of the reference.

    So is the last of each tap, into which calls that have no row of their own are folded: it may
    lack some.
    """
    taps = [name.rpartition("[")[0] for name in names]
    for number, row in enumerate(rows):
        ran = row[DIGEST_HEX_CHARS:] != NEVER_RAN
        is_last = number + 1 >= len(taps) or taps[number + 1] != taps[number]
        theirs = reference[number * TAP_HEX_CHARS : (number + 1) * TAP_HEX_CHARS]
        yield row if ran and not is_last else theirs


_WORST = ("rank", "growth_rank", "leak_rank")
"""Figures of checks that are the number of the worst rank."""
MOST_FACTS = 5
NOTHING = Location(unknown=("everything: the records of both legs are whole and equal",))


def locate(runs: CaseRuns, verdict: Verdict | None = None) -> Location:
    """Where the fault of a case entered, as far as its records tell.

    Args:
        runs: the case with the records of its three runs.
        verdict: its answer; without it, no limit of memory or time is known to be broken.
    """
    if find_flaw(runs.reference) is not None:
        return _of_leg("reference", runs.reference)
    for leg, run in (("control", runs.control), ("candidate", runs.candidate)):
        if (other := _in_other_environment(runs.reference, run, leg)) is not None:
            return other
    parted = where_they_part(Legs(runs.reference, runs.control))
    if parted is not None or find_flaw(runs.control) is not None:
        told = "the reference differs from its own second run: the candidate is not to blame"
        if parted is None:
            return _of_leg("control", runs.control)
        return replace(parted, evidence=(told, *parted.evidence))
    return between(runs.reference, runs.candidate, verdict)


def _in_other_environment(reference: RunResult, other: RunResult, leg: str) -> Location | None:
    """Bits of two environments prove nothing of the program, so this comes first."""
    ours, theirs = rank_table(reference), rank_table(other)
    sides = {
        rank: (fingerprint(records.start.environment), fingerprint(start.environment))
        for rank, records in ours.items()
        if records.start is not None and rank in theirs and (start := theirs[rank].start)
    }
    stated = stated_leaves(reference, other)
    leaves = {
        rank: found
        for rank, pair in sides.items()
        if (found := [each for each in different_leaves(*pair) if each[0] not in stated])
    }
    if not leaves:
        return None
    rank, facts = min(leaves.items())
    where = show_ranks(set(leaves))
    told = [f"the {leg} ran in another environment than the reference, on {where}"]
    told += [f"{name}: {before} became {after}" for name, before, after in facts[:MOST_FACTS]]
    parted = where_they_part(Legs(reference, other))
    if parted is None:
        told.append("every bit of the legs is equal nevertheless")
    else:
        at = f"step {parted.step}, {parted.phase}{f', {parted.module}' if parted.module else ''}"
        told.append(f"their records part in {at}: that may be the environment's doing")
    return Location(
        phase="outside", quantity=quantity_of(facts[0][0]), rank=rank, ranks=tuple(sorted(leaves)),
        evidence=tuple(told),
    )  # fmt: skip


def between(reference: RunResult, candidate: RunResult, verdict: Verdict | None = None) -> Location:
    """Where a candidate left its reference, or failed by itself."""
    parted = where_they_part(Legs(reference, candidate))
    ended = how_it_ended(candidate)
    if ended is None:
        return parted or _beyond_limits(reference, candidate, verdict)
    parted = parted or parted_before_the_end(reference, candidate, ended)
    if parted is None or _explains(ended, candidate, parted):
        return ended
    return replace(parted, evidence=(*parted.evidence, f"later: {ended.evidence[0]}"))


def failing_pair(runs: CaseRuns) -> tuple[RunResult, RunResult]:
    """The two runs to look into: reference and candidate, or reference and control."""
    if where_they_part(Legs(runs.reference, runs.control)) is not None:
        return runs.reference, runs.control
    return runs.reference, runs.candidate


def _explains(ended: Location, candidate: RunResult, parted: Location) -> bool:
    """Whether what a run ended with is the cause of a difference in its records, too."""
    names = candidate.outcome.what in NAMES_ITS_TENSOR
    return names and ended.step is not None and (parted.step or 0) >= ended.step


def _of_leg(leg: str, run: RunResult) -> Location:
    ended = how_it_ended(run)
    assert ended is not None
    told = f"the {leg} itself failed: the candidate is not to blame"
    return replace(ended, evidence=(told, *ended.evidence))


def _beyond_limits(reference: RunResult, candidate: RunResult, verdict: Verdict | None) -> Location:
    """Nothing differs; a limit of memory or time may be broken, or ranks have the same data."""
    bad = next((c for c in verdict.checks if c.outcome == "failed"), None) if verdict else None
    if bad is None:
        return NOTHING
    worst = next((int(bad.figures[name]) for name in _WORST if name in bad.figures), None)
    rank = worst if bad.difference is None else bad.difference.rank
    found = Location(
        step=None if bad.difference is None else bad.difference.step, phase="outside",
        quantity=bad.what, rank=rank, ranks=() if rank is None else (rank,),
        evidence=("every bit of the legs is equal", bad.message),
    )  # fmt: skip
    if bad.what == "same_data" and bad.difference is not None:
        return replace(found, phase="input", tensor=bad.difference.tensor)
    if bad.what != "memory_regression" or rank is None:
        return found
    step = _first_growth(reference, candidate, rank)
    told = f"from step {step} on, rank {rank} keeps more after a step than the reference does"
    return found if step is None else replace(found, step=step, evidence=(*found.evidence, told))


def _first_growth(reference: RunResult, candidate: RunResult, rank: int) -> int | None:
    """The first step that leaves more behind, over the reference, than the one before it did.

    The first steps make what a run keeps, and graphs what they keep.
    """
    ours, theirs = step_table(reference), step_table(candidate)
    steps = [step for step, at in shared_pairs(ours, theirs) if at == rank]
    over = {s: theirs[s, rank].live_bytes - ours[s, rank].live_bytes for s in steps}
    config = candidate.spec.config
    capture = config.get("graph_warmup_steps", 0) if config.get("graph") else 0
    return next(
        (s for s in steps if s > max(capture, 0) and over[s] > over.get(s - 1, over[s])), None
    )
