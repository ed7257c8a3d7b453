"""What a capture leaves behind, told by the step in which graphs are captured.

    first difference in that step                                   left behind
    the first that draws, and the random state after the step       numbers that were drawn
    nothing but tensors that no gradient moves (experts' biases)    what forward passes count
    losses, and how many steps the optimizer has taken              a step too many, or none

Warm-ups and captures are further forward and backward passes of that step, of which nothing may
stay. Calls tell of a step that was not run once, too: see `part_of_calls`.
"""

from collections.abc import Sequence
from dataclasses import replace

from harness.bisector.found import Location
from harness.bisector.legs import INPUT, OUTPUT, STEP_COUNT, Legs, Row
from harness.checks.evidence import show_ranks


def with_capture(found: Location, legs: Legs) -> Location:
    """The place where two runs part; of the capture, if that is what the step did otherwise."""
    config, step = legs.candidate.spec.config, found.step
    if step is None or not config.get("graph") or step != config.get("graph_warmup_steps"):
        return found
    told = _repeated(found, legs, step) or _drawn(found, legs, step) or _counted(found, legs, step)
    return replace(found, phase="capture", evidence=(*found.evidence, told)) if told else found


def _repeated(found: Location, legs: Legs, step: int) -> str:
    counts = [tensor for tensor in legs.tensors(step, "optim") if tensor.name == STEP_COUNT]
    # Whoever counted otherwise in the optimizer alone left the losses of that step as they were.
    if found.phase not in ("forward", "input") or not any(count.differs for count in counts):
        return ""
    return (
        "graphs are captured in this step, after which the optimizer has taken another number of "
        "steps: the captured step was not run, or more than once"
    )


def _drawn(found: Location, legs: Legs, step: int) -> str:
    weights = {name for start in legs.starts.values() for name in start.tensors.get("weights", ())}
    computes = found.module and any(name.rpartition(".")[0] == found.module for name in weights)
    drawn = [tensor for tensor in legs.tensors(step, "rng") if tensor.differs]
    if found.phase not in ("forward", "input") or computes or not drawn:
        return ""
    if _began_right(legs.rows(step)):
        return ""
    ranks = show_ranks({tensor.rank for tensor in drawn})
    return (
        f"graphs are captured in this step, after which the random state {drawn[0].name} differs "
        f"on {ranks}: what captures drew was not given back"
    )


def _began_right(rows: Sequence[Row]) -> bool:
    """Whether a module that draws had drawn as it should before the first thing that differs.

    What a capture leaves behind is there when the step's passes begin. A module draws if it was
    given the same and returned something else, in this step.
    """
    first = next((place for place, row in enumerate(rows) if row.differs), 0)
    given = {(r.rank, r.module, r.number) for r in rows if r.kind == INPUT and not r.differs}
    draw = {
        row.module
        for row in rows
        if row.kind == OUTPUT and row.differs and (row.rank, row.module, row.number) in given
    }
    return any(row.module in draw and row.kind == OUTPUT for row in rows[:first])


def _counted(found: Location, legs: Legs, step: int) -> str:
    moved = {name for start in legs.starts.values() for name in start.tensors.get("grads", ())}
    wrong = {tensor.name for tensor in legs.tensors(step, "weights") if tensor.differs}
    if found.phase != "optimizer" or not wrong or wrong & moved:
        return ""
    if any(tensor.differs for tensor in legs.tensors(step, "optim")):
        return ""
    return (
        f"graphs are captured in this step, and no gradient moves {found.tensor}: it follows what "
        "forward passes count, and those of warm-ups and captures stayed counted"
    )
