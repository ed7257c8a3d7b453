"""Pipeline schedules as explicit lists: who computes what in which order, and what crosses when.

    stage      a piece of the model, 0 .. pp * chunks - 1; chunk c of rank r is stage c * pp + r
    action     forward or backward of one microbatch through one chunk
    transfer   an activation to the next stage, or its gradient back
    program    what a rank does: its actions, and between them exchanges of transfers

    1F1B, pp 4, 6 microbatches: forwards 0 to 5, backwards a to f, which take twice as long

        rank 0   0 1 2 3 . . . . . . a a 4 b b 5 c c . d d . e e . f f
        rank 1   . 0 1 2 . . . . a a 3 b b 4 c c 5 d d . e e . f f
        rank 2   . . 0 1 . . a a 2 b b 3 c c 4 d d 5 e e . f f
        rank 3   . . . 0 a a 1 b b 2 c c 3 d d 4 e e 5 f f

Schedules are those of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM" (2021), section 2.2.

No program can deadlock: a program is one rank's part of a total order of all actions and transfers,
that of a simulated run. The first transfer of that order that is not done has nothing before it on
either side, so it is done next. This holds where each send and receive blocks, and where transfers
between two actions are one batch; a runner that waits later waits for less.

Standard library only: the checks of a run without torch use it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FORWARD_COST, _BACKWARD_COST = 1, 2  # units of time in the simulated run that orders transfers


@dataclass(frozen=True, slots=True)
class Action:
    """Forward or backward of `microbatch` through the `chunk`-th piece of a rank."""

    is_forward: bool
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{'forward' if self.is_forward else 'backward'} of microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """What stage `source` made of `microbatch` for stage `target`, a neighbour."""

    source: int
    target: int
    microbatch: int

    def __str__(self) -> str:
        what = "activation" if self.target > self.source else "gradient"
        return f"{what} of microbatch {self.microbatch} from stage {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers of one rank that stand between two of its actions, in the common order."""

    transfers: tuple[Transfer, ...]


Step = Action | Exchange


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank of a pipeline, in order; with backwards if `is_training`."""

    pp: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    is_training: bool = True

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    def rank_of(self, stage: int) -> int:
        return stage % self.pp

    def stage_of(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + rank


def make_schedule(pp: int, chunks: int, microbatches: int, *, is_training: bool = True) -> Schedule:
    """1F1B for one chunk a rank, interleaved 1F1B for more; forwards only where nothing trains.
    1F1B (PipeDream-flush) warms rank r up with pp - 1 - r forwards; interleaved, groups of pp
    microbatches go through the chunks, and the warm-up is 2 * (pp - 1 - r) + (chunks - 1) * pp
    (`ValueError`: no microbatches, or training with a number that is no multiple of pp).
    """
    # (chunk, microbatch): pp microbatches through the first chunk, through the second, and so on.
    group = pp if chunks > 1 else 1
    if microbatches < 1 or (is_training and microbatches % group):
        raise ValueError(f"Expected microbatches >= 1, a multiple of {group}, got {microbatches}.")
    order = [
        (chunk, first + i)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for i in range(min(group, microbatches - first))
    ]
    forwards = [Action(True, chunk, i) for chunk, i in order]
    if not is_training:
        return Schedule(pp, chunks, microbatches, (tuple(forwards),) * pp, is_training=False)
    backwards = [Action(False, chunks - 1 - chunk, i) for chunk, i in order]
    actions = []
    for rank in range(pp):
        later = pp - 1 - rank
        warm_up = min(later if chunks == 1 else 2 * later + (chunks - 1) * pp, len(order))
        steady = zip(forwards[warm_up:], backwards, strict=False)
        cool_down = backwards[len(order) - warm_up :]
        actions.append((*forwards[:warm_up], *itertools.chain.from_iterable(steady), *cool_down))
    return Schedule(pp, chunks, microbatches, tuple(actions))


def slots_needed(schedule: Schedule) -> int:
    """Microbatch slots a chunk needs, used in turn, so that none is taken before its backward."""
    needed = 1
    for actions in schedule.actions if schedule.is_training else ():
        oldest = [0] * schedule.chunks
        for action in actions:
            if action.is_forward:
                needed = max(needed, action.microbatch - oldest[action.chunk] + 1)
            else:
                oldest[action.chunk] = action.microbatch + 1
    return needed


def split_layers(num_layers: int, pp: int, chunks: int = 1) -> tuple[tuple[range, ...], ...]:
    """Numbers of the layers of every (rank, chunk), in the order of the model, as even as can be.
    What does not divide goes to the later stages, which keep fewer microbatches, but to the last
    one, which has the head, only at the end: 10 layers over pp 4 are 2 | 3 | 3 | 2.
    """
    stages = pp * chunks
    base, left = divmod(num_layers, stages)
    sizes = [base + (stages - 1 - left <= stage < stages - 1) for stage in range(stages)]
    ends = list(itertools.accumulate(sizes))
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(tuple(ranges[rank::pp]) for rank in range(pp))


def programs(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Every rank's actions with the exchanges between them. A transfer stands at the end of the
    action that makes its tensor: on the sender's side before its next action, on the receiver's
    between the actions that begin before and after that.
    """
    times = timeline(schedule)
    transfers = sorted(
        (times[rank][place][1], transfer)
        for rank, actions in enumerate(schedule.actions)
        for place, action in enumerate(actions)
        if (transfer := _result(schedule, rank, action)) is not None
    )
    ours: list[list[tuple[int, Transfer]]] = [[] for _ in range(schedule.pp)]
    for end, transfer in transfers:
        for stage in (transfer.source, transfer.target):
            ours[schedule.rank_of(stage)].append((end, transfer))
    return tuple(
        _merge(actions, [start for start, _ in times[rank]], ours[rank])
        for rank, actions in enumerate(schedule.actions)
    )


def timeline(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Start and end of every rank's actions, each as early as may be; transfers take no time."""
    ends: dict[tuple[bool, int, int], int] = {}
    times: list[list[tuple[int, int]]] = [[] for _ in range(schedule.pp)]
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, actions in enumerate(schedule.actions):
            own = times[rank]
            while len(own) < len(actions):
                action = actions[len(own)]
                stage = schedule.stage_of(rank, action.chunk)
                ready = [ends.get(need) for need in _needs(schedule, stage, action)]
                known = [end for end in ready if end is not None]
                if len(known) < len(ready):
                    break
                start = max([own[-1][1] if own else 0, *known])
                end = start + (_FORWARD_COST if action.is_forward else _BACKWARD_COST)
                own.append((start, end))
                ends[action.is_forward, stage, action.microbatch] = end
                is_moving = True
    assert [*map(len, times)] == [*map(len, schedule.actions)], "actions wait for each other"
    return tuple(map(tuple, times))


def _needs(schedule: Schedule, stage: int, action: Action) -> list[tuple[bool, int, int]]:
    """What must have ended before an action: (is_forward, stage, microbatch)."""
    if action.is_forward:
        return [(True, stage - 1, action.microbatch)] if stage else []
    own = (True, stage, action.microbatch)
    is_last = stage == schedule.num_stages - 1
    return [own] if is_last else [own, (False, stage + 1, action.microbatch)]


def _result(schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    stage = schedule.stage_of(rank, action.chunk)
    target = stage + 1 if action.is_forward else stage - 1
    if schedule.pp == 1 or not 0 <= target < schedule.num_stages:
        return None
    return Transfer(stage, target, action.microbatch)


def _merge(
    actions: Sequence[Action], starts: Sequence[int], transfers: Sequence[tuple[int, Transfer]]
) -> tuple[Step, ...]:
    """Actions by their starts and transfers by their times, transfers first where these equal."""
    timed: list[tuple[int, Action | Transfer]] = [*transfers, *zip(starts, actions, strict=True)]
    timed.sort(key=lambda each: (each[0], isinstance(each[1], Action)))  # stable: in their orders
    steps: list[Step] = []
    for are_actions, group in itertools.groupby(timed, lambda each: isinstance(each[1], Action)):
        found: list[Any] = [each for _, each in group]
        steps += found if are_actions else [Exchange(tuple(found))]
    return tuple(steps)
