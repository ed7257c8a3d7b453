"""From the records of a case to where its fault entered, without running anything.

    legs ran in other environments   what of them differs, on which rank
    verdict blames the reference     reference against its own control
    runs part, then one ends         where they part, in the step that did not end, too
    a run says itself what it is     what it says (stale_address, race, a refused capture)
    runs do not part                 how the failing one ended, or which limit it broke

A difference comes before an end of the run in the same step or later, unless that names its cause.
"""

from dataclasses import replace

from harness.bisector.divergence import where_they_part
from harness.bisector.ended import NAMES_ITS_TENSOR, how_it_ended
from harness.bisector.found import Location
from harness.bisector.legs import Legs
from harness.bisector.unfinished import parted_before_the_end
from harness.checks.complete import find_flaw
from harness.checks.environment import different_leaves, quantity_of, stated_leaves
from harness.checks.evidence import rank_table, shared_pairs, show_ranks, step_table
from harness.provenance import fingerprint
from harness.records import RunResult, Verdict
from harness.store import CaseRuns

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
