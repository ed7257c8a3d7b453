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
Clusters Using Megatron-LM" (2021), section 2.2. The first rank begins with a warm-up of forwards,
each later one with fewer; then forward and backward alternate; then come the backwards left over.

Why no program can deadlock: `programs` puts all actions and transfers of all ranks into one total
order, that of a simulated run, and a program is the part of one rank. The first transfer of that
order that is not done has nothing before it on either side that is not done, so it is done next.
This holds where each send and receive blocks, and where transfers between two actions are one
batch that blocks as a whole; a runner that waits later than that waits for less.

Standard library only, so that a laptop can check a layout of thousands of ranks.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

FORWARD_COST, BACKWARD_COST = 1, 2
"""Units of time in the simulated run that orders transfers."""


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

    @property
    def is_activation(self) -> bool:
        """An activation on its way forward, else a gradient on its way back."""
        return self.target > self.source

    def __str__(self) -> str:
        what = "activation" if self.is_activation else "gradient"
        return f"{what} of microbatch {self.microbatch} from stage {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Transfers of one rank that stand between two of its actions, in the common order."""

    transfers: tuple[Transfer, ...]


Step = Action | Exchange


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order.

    Attributes:
        pp: ranks of the pipeline.
        chunks: pieces of the model that each rank has.
        microbatches: how many go through.
        actions: of each rank.
        is_training: with backwards.
    """

    pp: int
    chunks: int
    microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    is_training: bool = True

    @property
    def num_stages(self) -> int:
        """Pieces of the model."""
        return self.pp * self.chunks

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        return stage % self.pp

    def stage_of(self, rank: int, chunk: int) -> int:
        """The stage that is the `chunk`-th of a rank."""
        return chunk * self.pp + rank


def make_schedule(pp: int, chunks: int, microbatches: int, *, is_training: bool = True) -> Schedule:
    """1F1B for one chunk a rank, interleaved 1F1B for more; forwards only where nothing trains.

    Raises:
        ValueError: a number below 1; training with chunks > 1 and microbatches no multiple of pp.
    """
    if not is_training:
        return forward_only(pp, chunks, microbatches)
    if chunks == 1:
        return one_f_one_b(pp, microbatches)
    return interleaved_1f1b(pp, chunks, microbatches)


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """1F1B, also called PipeDream-flush: rank r warms up with pp - 1 - r forwards.

    Raises:
        ValueError: a number below 1.
    """
    _check_counts(pp, 1, microbatches)
    actions = []
    for rank in range(pp):
        warm_up = min(pp - 1 - rank, microbatches)
        forwards = [Action(True, 0, i) for i in range(microbatches)]
        backwards = [Action(False, 0, i) for i in range(microbatches)]
        actions.append(_alternate(forwards, backwards, warm_up))
    return Schedule(pp, 1, microbatches, tuple(actions))


def interleaved_1f1b(pp: int, chunks: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B: groups of pp microbatches go through a rank's chunks one after another.

    Rank r warms up with 2 * (pp - 1 - r) + (chunks - 1) * pp forwards.

    Raises:
        ValueError: a number below 1, chunks below 2, or microbatches no multiple of pp.
    """
    _check_counts(pp, chunks, microbatches)
    if chunks < 2:
        raise ValueError(f"Expected at least 2 chunks to interleave, got {chunks}.")
    if microbatches % pp:
        raise ValueError(
            f"Expected a multiple of pp={pp} microbatches, as interleaved chunks ({chunks} a rank) "
            f"take them in groups of pp, got {microbatches}."
        )
    order = _grouped(pp, chunks, microbatches)
    actions = []
    for rank in range(pp):
        forwards = [Action(True, chunk, i) for chunk, i in order]
        backwards = [Action(False, chunks - 1 - chunk, i) for chunk, i in order]
        warm_up = min(_interleaved_warm_up(pp, chunks, rank), len(order))
        actions.append(_alternate(forwards, backwards, warm_up))
    return Schedule(pp, chunks, microbatches, tuple(actions))


def forward_only(pp: int, chunks: int, microbatches: int) -> Schedule:
    """Every microbatch once through every stage, nothing kept for a backward; any number of them.

    Raises:
        ValueError: a number below 1.
    """
    _check_counts(pp, chunks, microbatches)
    order = _grouped(pp if chunks > 1 else 1, chunks, microbatches)
    actions = tuple(Action(True, chunk, i) for chunk, i in order)
    return Schedule(pp, chunks, microbatches, (actions,) * pp, is_training=False)


def _check_counts(pp: int, chunks: int, microbatches: int) -> None:
    named = {"pp": pp, "chunks": chunks, "microbatches": microbatches}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {name} >= 1, got {value!r}.")


def _grouped(size: int, chunks: int, microbatches: int) -> list[tuple[int, int]]:
    """(chunk, microbatch): `size` microbatches through the first chunk, the second, and so on.

    The last group has what is left.
    """
    return [
        (chunk, first + i)
        for first in range(0, microbatches, size)
        for chunk in range(chunks)
        for i in range(min(size, microbatches - first))
    ]


def _interleaved_warm_up(pp: int, chunks: int, rank: int) -> int:
    return 2 * (pp - 1 - rank) + (chunks - 1) * pp


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then forward and backward in turn, then the backwards left over."""
    steady = zip(forwards[warm_up:], backwards, strict=False)
    cool_down = backwards[len(forwards) - warm_up :]
    return (*forwards[:warm_up], *itertools.chain.from_iterable(steady), *cool_down)


# ---- what the theory says


def peak_live(pp: int, chunks: int, microbatches: int, rank: int) -> int:
    """Forward passes through a chunk that a rank keeps at most for their backward.

    1F1B: min(microbatches, pp - rank) (Narayanan et al., 2021, section 2.2.1). Interleaved: the
    warm-up and one more, which is pp * chunks + pp - 1 on the first rank, 1 + (pp - 1) / (pp *
    chunks) times what it has without (Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models", 2022, section 4.2.3).
    """
    warm_up = pp - 1 - rank if chunks == 1 else _interleaved_warm_up(pp, chunks, rank)
    return min(microbatches * chunks, warm_up + 1)


def bubble_fraction(pp: int, chunks: int, microbatches: int) -> Fraction:
    """Idle time of a rank over its time of work, all stages equal and transfers free.

    (pp - 1) / (chunks * microbatches): Narayanan et al., 2021, sections 2.2.1 and 2.2.2.
    """
    return Fraction(pp - 1, chunks * microbatches)


def slots_needed(schedule: Schedule, rank: int) -> int:
    """Microbatch slots a chunk of `rank` needs so that no slot is taken before its backward.

    Slots are used in turn, microbatch i in slot i % slots: what keeps a pass between forward and
    backward (a graph's memory) then holds no other one's.
    """
    oldest, needed = [0] * schedule.chunks, 1
    for action in schedule.actions[rank]:
        if not action.is_forward:
            oldest[action.chunk] = action.microbatch + 1
        elif schedule.is_training:
            needed = max(needed, action.microbatch - oldest[action.chunk] + 1)
    return needed


# ---- a simulated run


def timeline(
    schedule: Schedule, forward_cost: int = FORWARD_COST, backward_cost: int = BACKWARD_COST
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Start and end of every rank's actions, each as early as may be; transfers take no time.

    Raises:
        ValueError: the actions wait for each other in a circle, or for one that nobody does.
    """
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
                end = start + (forward_cost if action.is_forward else backward_cost)
                own.append((start, end))
                ends[action.is_forward, stage, action.microbatch] = end
                is_moving = True
    for rank, actions in enumerate(schedule.actions):
        if len(times[rank]) < len(actions):
            stuck = actions[len(times[rank])]
            raise ValueError(f"Expected an order that ends, got {stuck} stuck on rank {rank}.")
    return tuple(map(tuple, times))


def _needs(schedule: Schedule, stage: int, action: Action) -> list[tuple[bool, int, int]]:
    """What must have ended before an action: (is_forward, stage, microbatch)."""
    if action.is_forward:
        return [(True, stage - 1, action.microbatch)] if stage else []
    own = (True, stage, action.microbatch)
    is_last = stage == schedule.num_stages - 1
    return [own] if is_last else [own, (False, stage + 1, action.microbatch)]


def programs(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Every rank's actions with the exchanges between them.

    A transfer stands at the end of the action that makes its tensor: on the sender's side before
    its next action, on the receiver's side between the actions that begin before and after that.
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


def _result(schedule: Schedule, rank: int, action: Action) -> Transfer | None:
    """What an action makes for another rank."""
    stage = schedule.stage_of(rank, action.chunk)
    target = stage + 1 if action.is_forward else stage - 1
    if schedule.pp == 1 or not 0 <= target < schedule.num_stages:
        return None
    return Transfer(stage, target, action.microbatch)


def _merge(
    actions: Sequence[Action], starts: Sequence[int], transfers: Sequence[tuple[int, Transfer]]
) -> tuple[Step, ...]:
    """Actions by their starts and transfers by their times, transfers first where these equal."""
    steps: list[Step] = []
    done = 0
    for action, start in zip(actions, starts, strict=True):
        until = done
        while until < len(transfers) and transfers[until][0] <= start:
            until += 1
        if until > done:
            steps.append(Exchange(tuple(t for _, t in transfers[done:until])))
        steps.append(action)
        done = until
    if done < len(transfers):
        steps.append(Exchange(tuple(t for _, t in transfers[done:])))
    return tuple(steps)


def split_layers(
    num_layers: int,
    pp: int,
    chunks: int = 1,
    *,
    counts_embedding: bool = False,
    counts_head: bool = False,
    sizes: Sequence[int] | None = None,
) -> tuple[tuple[range, ...], ...]:
    """Numbers of the layers of every (rank, chunk), in the order of the model.

    Layers are dealt as evenly as can be. What does not divide goes to the later stages, which keep
    fewer microbatches, but to the last one only at the end: it has the head.

    Args:
        counts_embedding, counts_head: the embedding (the head) weighs as much as a layer, so its
            stage gets one layer less, none if need be.
        sizes: number of layers of every stage, in place of the even deal; the first and the last
            may have none, as they have the embedding and the head.

    Raises:
        ValueError: a number below 1, a stage that would hold nothing, or sizes that do not fit.
    """
    for name, value in {"num_layers": num_layers, "pp": pp, "chunks": chunks}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"Expected {name} >= 1, got {value!r}.")
    stages = pp * chunks
    if sizes is None:
        sizes = _even_sizes(num_layers, stages, int(counts_embedding), int(counts_head))
    elif len(sizes) != stages or sum(sizes) != num_layers:
        raise ValueError(
            f"Expected sizes of {stages} stages that sum to {num_layers} layers, got {sizes}."
        )
    elif min(sizes) < 0 or 0 in sizes[1:-1]:
        raise ValueError(f"Expected at least one layer in every inner stage, got sizes {sizes}.")
    ends = list(itertools.accumulate(sizes))
    ranges = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return tuple(tuple(ranges[rank::pp]) for rank in range(pp))


def _even_sizes(num_layers: int, stages: int, embedding: int, head: int) -> list[int]:
    pieces = num_layers + embedding + head
    if pieces < stages:
        raise ValueError(
            f"Expected at least one layer (or counted embedding or head) for each of {stages} "
            f"stages, got {pieces}; lower pp or chunks."
        )
    base, left = divmod(pieces, stages)
    order = list(range(stages - 1, -1, -1))
    if not head:
        order = [*order[1:], order[0]]
    sizes = [base] * stages
    for stage in order[:left]:
        sizes[stage] += 1
    sizes[0] -= embedding
    sizes[-1] -= head
    return sizes
