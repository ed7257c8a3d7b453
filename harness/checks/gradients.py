"""Gradients of a user's program within a tolerance, by their sketches (`harness.recorder.state`).

Losses say little of a wrong gradient: Adam takes steps of one length whatever it is given. So the
gradient of each parameter is compared as a vector, by rank:

    rtol, atol    in the first step that is not skipped, where both runs have the same weights:
                  |candidate - reference| <= `gradients` |reference| + 1 % of all on the rank
    rounding      in every step: as far as the samples are from the reference, the farthest so far
                  of a parameter, times the point of Student's distribution that bounds losses

Distances are estimated, by half too large in fewer than 1 of 10,000. A gradient that one run alone
lacks is a vector of zeros. What the runs cut or name otherwise is counted and not compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from harness.checks.evidence import failed, step_table
from harness.records import CheckResult, Difference, RunResult

SLACK = 1.5  # of an estimated distance
FLOOR = 0.01  # of the length of all gradients of a rank
FLOOR_ROUNDINGS = 8 * 2.0**-24
Sketch = Sequence[float]  # elements, length, projections
Place = tuple[int, int, str]  # step, rank, parameter
Allowed = Callable[[Place, float, float], float]
"""The largest distance at a place, from the length of that gradient and of all of the rank."""


def sketches(run: RunResult) -> dict[Place, Sketch]:
    """Sketches of gradients, but of steps that were skipped, where they may be infinite."""
    return {
        (step, rank, name): numbers
        for (step, rank), record in step_table(run).items()
        if not record.skipped
        for name, numbers in record.sketches.items()
    }


def distance(left: Sketch, right: Sketch) -> float:
    """The estimated length of the difference; infinite if it is no number."""
    squares = [(b - a) ** 2 for a, b in zip(left[2:], right[2:], strict=True)]
    found = math.sqrt(math.fsum(squares) / len(squares))
    return found if math.isfinite(found) else math.inf


def fraction(gradients: float) -> Allowed:
    """The bound of `rtol` and `atol`."""
    return lambda _, length, total: SLACK * (gradients * length + FLOOR * total)


def measured(reference: RunResult, samples: Sequence[RunResult], factor: float) -> Allowed:
    """The bound of `rounding`, from runs that round at random."""
    ours, tables = sketches(reference), [sketches(run) for run in samples]
    largest: dict[tuple[int, str], float] = {}
    bounds: dict[Place, float] = {}
    for place in sorted(ours):
        near = [distance(ours[place], table[place]) for table in tables if place in table]
        squares = [each**2 for each in near if math.isfinite(each)]  # NaN is no measure
        spread = math.sqrt(math.fsum(squares) / max(len(squares), 1))
        largest[place[1:]] = max(largest.get(place[1:], 0.0), spread)
        bounds[place] = factor * largest[place[1:]]
    return lambda place, length, _: bounds.get(place, 0.0) + FLOOR_ROUNDINGS * length


def with_gradients(
    losses: CheckResult, reference: RunResult, candidate: RunResult, allowed: Allowed
) -> CheckResult:
    """What losses answered, or the first gradient that is beyond the tolerance before they were.

    In one step a loss is computed before the gradients.
    """
    ours, theirs = sketches(reference), sketches(candidate)
    gaps, left_out = _gaps(ours, theirs, allowed)
    if not gaps:
        return replace(losses, message=f"{losses.message}; no gradient was compared")
    place, (units, gap) = next(
        (each for each in gaps.items() if not each[1][0] <= 1),
        max(gaps.items(), key=lambda each: each[1][0]),
    )
    step, rank, name = place
    length = ours[place][1] if place in ours else 0.0
    where = f"{name} at step {step} on rank {rank}: {gap:.3g} from the reference's, of length "
    where += f"{length:.3g}, {units:.3g} times its bound"
    if units <= 1:
        message = f"{losses.message}; of {len(gaps)} gradients the farthest is {where}"
        message += f"; {left_out} are cut or named otherwise" if left_out else ""
        return replace(losses, message=message)
    before = losses.difference.step if losses.difference is not None else step
    if losses.outcome != "passed" and before <= step:
        return losses
    here = [each for at, (each, _) in gaps.items() if at[0] == step]
    beyond = sum(not each <= 1 for each in here)
    difference = Difference(
        step=step, rank=rank, quantity="grads", tensor=name, reference=f"length {length:.6g}",
        candidate=f"{gap:.6g} away",
    )  # fmt: skip
    message = f"the gradient of {where}; in that step {beyond} of {len(here)} gradients are beyond"
    return failed("loss", "diverged", message, difference)


def _gaps(
    ours: Mapping[Place, Sketch], theirs: Mapping[Place, Sketch], allowed: Allowed
) -> tuple[dict[Place, tuple[float, float]], int]:
    """Distances in units of their bounds and as they are, in order; how many were left out."""
    totals: dict[tuple[int, int], float] = {}
    for place, numbers in ours.items():
        totals[place[:2]] = math.hypot(totals.get(place[:2], 0.0), numbers[1])
    names = [{name for *_, name in table} for table in (ours, theirs)]
    renamed = bool(names[0] - names[1]) and bool(names[1] - names[0])
    gaps, left_out = dict[Place, tuple[float, float]](), 0
    for place in sorted(ours.keys() | theirs.keys()):
        lone = place not in ours or place not in theirs
        held = ours.get(place) or theirs[place]
        left, right = (
            table.get(place, [held[0], *[0.0] * (len(held) - 1)]) for table in (ours, theirs)
        )
        if place[:2] not in totals or (lone and renamed) or left[0] != right[0]:
            left_out += 1
            continue
        gap, most = distance(left, right), allowed(place, left[1], totals[place[:2]])
        gaps[place] = (gap / most if most else (math.inf if gap else 0.0), gap)
    return gaps, left_out
