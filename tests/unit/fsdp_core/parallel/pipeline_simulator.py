"""Runs the programs of all ranks of a pipeline in one place, and says what is wrong with them.

Ranks meet as blocking messages do: a transfer is done when both sides are at it. `batched` tells
what a rank blocks on: each transfer in program order, or an exchange as a whole, whose transfers
may be done in any order but for those between the same two ranks in the same direction, which are
matched in order, as NCCL and gloo match messages without tags.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_core.parallel.pipeline_schedule import Action, Exchange, Schedule, Step, Transfer


class Stuck(AssertionError):
    """No rank can go on; the message says where each one is."""


class Wrong(AssertionError):
    """A rank does what it must not: uses what it does not have, meets another's message."""


@dataclass
class Rank:
    """Where a rank is, what tensors it has, and what it keeps for backward."""

    steps: list[Action | list[Transfer]]
    place: int = 0
    pending: list[Transfer] = field(default_factory=list)
    holds: set[Transfer] = field(default_factory=set)
    live: set[tuple[int, int]] = field(default_factory=set)
    done: list[Action] = field(default_factory=list)
    peak: int = 0

    @property
    def step(self) -> Action | list[Transfer] | None:
        """What the rank is at."""
        return self.steps[self.place] if self.place < len(self.steps) else None

    def advance(self) -> None:
        """Go to the next step."""
        self.place += 1
        step = self.step
        self.pending = list(step) if isinstance(step, list) else []


def simulate(
    schedule: Schedule, programs: Sequence[Sequence[Step]], *, batched: bool
) -> list[Rank]:
    """Run all programs to their ends.

    Raises:
        Stuck: they wait for each other.
        Wrong: see there.
    """
    ranks = [Rank(_steps(program, batched=batched)) for program in programs]
    for rank in ranks:
        rank.place = -1
        rank.advance()
    while any(rank.step is not None for rank in ranks):
        moved = [_compute(schedule, number, rank) for number, rank in enumerate(ranks)]
        moved += [_meet(schedule, ranks, number) for number in range(len(ranks))]
        if not any(moved):
            raise Stuck({number: rank.step for number, rank in enumerate(ranks)})
    for number, rank in enumerate(ranks):
        if rank.holds or rank.live:
            raise Wrong(f"rank {number} ends with {rank.holds} unused and {rank.live} live")
    return ranks


def _steps(program: Sequence[Step], *, batched: bool) -> list[Action | list[Transfer]]:
    steps: list[Action | list[Transfer]] = []
    for step in program:
        if isinstance(step, Action):
            steps.append(step)
        else:
            parts = [step.transfers] if batched else [(t,) for t in step.transfers]
            steps.extend(map(list, parts))
    return steps


def _compute(schedule: Schedule, number: int, rank: Rank) -> bool:
    moved = False
    while isinstance(rank.step, Action):
        action = rank.step
        stage, i = schedule.stage_of(number, action.chunk), action.microbatch
        last = schedule.num_stages - 1
        towards = 1 if action.is_forward else -1
        if 0 <= stage - towards <= last:
            _use(number, rank, Transfer(stage - towards, stage, i))
        if action.is_forward and schedule.is_training:
            rank.live.add((action.chunk, i))
            rank.peak = max(rank.peak, len(rank.live))
        elif not action.is_forward:
            if (action.chunk, i) not in rank.live:
                raise Wrong(f"rank {number}: {action} before its forward")
            rank.live.remove((action.chunk, i))
        if 0 <= stage + towards <= last:
            rank.holds.add(Transfer(stage, stage + towards, i))
        rank.done.append(action)
        rank.advance()
        moved = True
    return moved


def _use(number: int, rank: Rank, transfer: Transfer) -> None:
    if transfer not in rank.holds:
        raise Wrong(f"rank {number} needs the {transfer} and does not have it")
    rank.holds.remove(transfer)


def _meet(schedule: Schedule, ranks: list[Rank], number: int) -> bool:
    """Let rank `number` send what its partners are ready to receive."""
    sender, moved = ranks[number], False
    for transfer in list(sender.pending):
        if schedule.rank_of(transfer.source) != number:
            continue
        target = schedule.rank_of(transfer.target)
        ours = [t for t in sender.pending if _is_way(schedule, t, number, target)]
        theirs = [t for t in ranks[target].pending if _is_way(schedule, t, number, target)]
        if not theirs or ours[0] != transfer:
            continue
        if theirs[0] != transfer:
            raise Wrong(f"rank {target} takes the {transfer} for the {theirs[0]}")
        _use(number, sender, transfer)
        ranks[target].holds.add(transfer)
        for side in (sender, ranks[target]):
            side.pending.remove(transfer)
            if not side.pending:
                side.advance()
        moved = True
    return moved


def _is_way(schedule: Schedule, transfer: Transfer, source: int, target: int) -> bool:
    ends = schedule.rank_of(transfer.source), schedule.rank_of(transfer.target)
    return ends == (source, target)


def exchange(*transfers: Transfer) -> Exchange:
    """An exchange, for programs written by hand."""
    return Exchange(transfers)


def peak_live(pp: int, chunks: int, microbatches: int, rank: int) -> int:
    """Forward passes through a chunk that a rank keeps at most for their backward: the theory.

    1F1B: min(microbatches, pp - rank) (Narayanan et al., 2021, section 2.2.1). Interleaved: the
    warm-up and one more, which is pp * chunks + pp - 1 on the first rank (Korthikanti et al.,
    "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.3).
    """
    later = pp - 1 - rank
    warm_up = later if chunks == 1 else 2 * later + (chunks - 1) * pp
    return min(microbatches * chunks, warm_up + 1)
