"""Was a run soaked for as long as was asked, and how many steps is that on every rank?

A run that ends by replays or by duration says itself how many steps it took. So that is believed
only if all ranks say the same in their end record, no fewer than the configuration's, and in the
event in which each states what it was asked for: less than that is an incomplete run. A stressor
that never had its turn proves nothing: no failure of the program, and no pass.
"""

from harness.checks.answer import error
from harness.checks.evidence import rank_table
from harness.records import CheckResult, EventRecord, RankRecords, RunResult, What
from harness.soaking import taking_turns

EVENT = "soaked"
TURN_EVENT = "turn"
Shortfall = tuple[What, str, int]
"""What is missing, one sentence, the rank."""


def steps_due(run: RunResult) -> int | None:
    """Steps that every rank must have recorded; None if the specification says no number.

    Of a run that is open at its end, the most that any rank's end record says.
    """
    steps = run.spec.config.get("steps")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        return None
    if run.spec.soak is None or not run.spec.soak.is_open:
        return steps
    return max([steps, *(rank.end.steps for rank in run.ranks if rank.end is not None)])


def shortfall(run: RunResult) -> Shortfall | None:
    """In what a soak fell short of what was asked, on the first rank that did; None if in nothing.

    The ranks' records are known to be whole but for this.
    """
    soak = run.spec.soak
    if soak is None:
        return None
    for rank, records in rank_table(run).items():
        said = [event for event in records.events if event.name == EVENT]
        if len(said) != 1 or records.end is None:
            what = f"{len(said)} records of what it soaked"
            return "corrupt_record", f"rank {rank} has {what}, expected 1", rank
        facts = (("steps", records.end.steps), ("replays", records.end.replays))
        for name, expected in facts:
            if said[0].detail.get(name) != expected:
                got = said[0].detail.get(name)
                message = f"rank {rank} says it soaked {got} {name}, its end record {expected}"
                return "corrupt_record", message, rank
        if (short := _short(run, records, said[0])) is not None:
            return short
    return None


def missed_turns(run: RunResult) -> CheckResult | None:
    """An error that names stressors which were to take turns and had none on some rank."""
    soak, stress = run.spec.soak, run.spec.config.get("stress")
    if soak is None or not soak.turn_steps or not isinstance(stress, list | tuple):
        return None
    due = taking_turns([str(name) for name in stress])
    for rank, records in rank_table(run).items():
        told = [event.detail.get("stress") for event in records.events if event.name == TURN_EVENT]
        had = {name for names in told if isinstance(names, list | tuple) for name in names}
        if missed := [name for name in due if name not in had]:
            return error(
                "turns",
                "not_run",
                f"{', '.join(missed)} never had a turn on rank {rank} in {len(records.steps)} "
                f"steps: expected {len(due)} turns at least, of {soak.turn_steps} steps each; make "
                f"soak.period shorter or steps more",
            )
    return None


def _short(run: RunResult, records: RankRecords, said: EventRecord) -> Shortfall | None:
    soak, end, rank = run.spec.soak, records.end, records.rank
    assert soak is not None
    assert end is not None
    if soak.by == "replays" and end.replays < soak.amount:
        made = f"rank {rank} made {end.replays} replays"
        return "not_replayed", f"{made}, the soak asks for {soak.amount:.0f}", rank
    if soak.by == "steps" and end.steps < soak.amount:
        return "missing_step", f"rank {rank} took {end.steps} steps of {soak.asked}", rank
    trained_s = said.detail.get("trained_s")
    if isinstance(trained_s, bool) or not isinstance(trained_s, int | float):
        message = f"rank {rank} says it trained for {trained_s!r} s"
        return "corrupt_record", message, rank
    # Rank 0 keeps the time: others may have begun a little later.
    if soak.by == "duration" and rank == 0 and trained_s < soak.amount:
        message = f"rank 0 trained for {trained_s:.1f} s, the soak asks for {soak.amount:g} s"
        return "missing_step", message, rank
    return None
