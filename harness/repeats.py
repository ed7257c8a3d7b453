"""Runs that are made for their times alone: repeats of a case's legs, one at a time, in turn.

A case with `repeats` n has 2 n more runs, n of the reference and n of the candidate, whose
`replica` numbers go on after the control's. They start when every other run of the matrix has
ended, and each has the machine to itself. Cases that share a reference share its repeats, and take
turns with it:

    round 0   reference   candidate A   candidate B
    round 1   candidate B   candidate A   reference
    round 2   reference   candidate A   candidate B

so that pairs are near in time, and a drift of the machine favours nobody. On Slurm a run has the
machine to itself if its nodes are not shared (`launch.slurm.options: [--exclusive]`).
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from harness.records import CaseSpec, RunResult, RunSpec
from harness.samples import samples_of

FIRST_REPEAT = 2
"""Replica number of the first repeat, past a run and its control."""
CONFIRMING = -1
"""Replica number of the runs that confirm a difference: it is no timed run's, however many."""


def is_timed(spec: RunSpec) -> bool:
    """Whether a run is made for its times, and so alone."""
    return spec.replica >= FIRST_REPEAT


def timed_pairs(case: CaseSpec) -> tuple[tuple[RunSpec, RunSpec], ...]:
    """Repeats of the case's reference and candidate, round by round."""

    def repeat(spec: RunSpec, number: int) -> RunSpec:
        return dataclasses.replace(spec, replica=FIRST_REPEAT + number)

    rounds = range(case.repeats)
    return tuple((repeat(case.reference, n), repeat(case.candidate, n)) for n in rounds)


def confirming_runs(case: CaseSpec) -> dict[str, RunSpec]:
    """The repeats, by side, that are made if the case fails; no part of the plan until then."""
    if not case.confirm or case.skip_reason:
        return {}
    sides = {"reference": case.reference, "candidate": case.candidate}
    return {side: dataclasses.replace(spec, replica=CONFIRMING) for side, spec in sides.items()}


def runs_of(case: CaseSpec) -> tuple[RunSpec, ...]:
    """Every run that the case needs."""
    repeats = (spec for pair in timed_pairs(case) for spec in pair)
    return (*untimed_runs(case), *repeats)


def untimed_runs(case: CaseSpec) -> tuple[RunSpec, ...]:
    """Those that need no machine to themselves: the three legs, and samples of rounding."""
    return (case.reference, case.control, case.candidate, *samples_of(case))


def past_legs(
    case: CaseSpec, runs: Sequence[RunResult]
) -> tuple[Sequence[RunResult], Sequence[RunResult]]:
    """Samples of rounding and timed repeats among what belongs to `runs_of`."""
    end = 3 + len(samples_of(case))
    return runs[3:end], runs[end:]


def in_turn(cases: Iterable[CaseSpec]) -> tuple[RunSpec, ...]:
    """The timed runs of cases, each once, in the order in which they are to be made."""
    groups: dict[str, list[CaseSpec]] = {}
    for case in cases:
        if case.repeats and not case.skip_reason:
            groups.setdefault(case.reference.key, []).append(case)
    order: dict[str, RunSpec] = {}
    for group in groups.values():
        pairs = [timed_pairs(case) for case in group]
        for number in range(max(map(len, pairs))):
            now = [pair[number] for pair in pairs if number < len(pair)]
            turn = [now[0][0], *(candidate for _, candidate in now)]
            for spec in reversed(turn) if number % 2 else turn:
                order.setdefault(spec.key, spec)
    return tuple(order.values())


class Turns:
    """Timed runs that wait for the machine."""

    def __init__(self, cases: Sequence[CaseSpec], waiting: Iterable[str]) -> None:
        """Line up the timed runs of `cases` whose keys are among `waiting`."""
        wanted = set(waiting)
        self._left = deque(spec for spec in in_turn(cases) if spec.key in wanted)

    def __len__(self) -> int:
        return len(self._left)

    def put_back(self, spec: RunSpec) -> None:
        """Line a run up once more, before all others."""
        self._left.appendleft(spec)

    def next(self, num_under_way: int) -> RunSpec | None:
        """Take the run to start now; None while others are under way, or none is left."""
        return self._left.popleft() if self._left and not num_under_way else None


def unique_runs(cases: Iterable[CaseSpec]) -> dict[str, RunSpec]:
    """The runs that `cases` need, by key, in the order in which they are first needed."""
    runs: dict[str, RunSpec] = {}
    for case in cases:
        if not case.skip_reason:
            for spec in runs_of(case):
                runs.setdefault(spec.key, spec)
    return runs
