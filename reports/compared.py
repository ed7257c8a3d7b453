"""What two runs of a case recorded, compared for showing: losses and state, by step and rank."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.checks.bits import quantities
from harness.checks.evidence import (
    count,
    groups_of,
    state_table,
    step_table,
    when,
    with_same_groups,
)
from harness.checks.taps import in_program_order, shared_steps
from harness.records import (
    DIGEST_HEX_CHARS,
    FloatBits,
    InitialRecord,
    RunResult,
    StepRecord,
    ulp_distance,
)
from harness.store.streams import aligned

LOSS = "losses and norm"
"""The group of a step's losses and gradient norm."""
MOST_TAPS = 12
"""Those that are told one by one."""
MISSING = -1
"""In place of a count: one run recorded it and the other did not, or not the same tensors."""
Place = tuple[int, int]  # step and rank
Losses = Mapping[Place, FloatBits]
_Texts = Mapping[Place, Mapping[str, str]]  # by group, see `_texts`


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of two runs; the sequences are empty if every loss has the same bits."""

    rank: int  # whose loss is drawn
    words: str  # the difference in one sentence
    steps: tuple[int, ...] = ()  # that both runs recorded on that rank
    reference: tuple[float, ...] = ()  # NaN where not finite
    candidate: tuple[float, ...] = ()
    delta_steps: tuple[int, ...] = ()  # that both runs recorded on some rank
    delta_ulps: tuple[float, ...] = ()  # largest distance over the ranks; NaN where it is none
    differing: tuple[int, ...] = ()  # steps in which some rank's bits differ


def losses(run: RunResult) -> Losses:
    """The recorded losses of a run; of a step that is there twice, the first counts."""
    # A rank of a pipeline may have none.
    return {key: r.loss for key, r in step_table(run).items() if r.loss is not None}


def loss_curve(reference: Losses, candidate: Losses, rank: int) -> LossCurve | None:
    """Curves of two runs by their `losses`, or None if they share no step.

    Drawn is the loss of `rank`, or of the lowest shared one if it has none.
    """
    both = sorted(reference.keys() & candidate.keys())
    if not both:
        return None
    ulps = {place: _ulps(reference[place], candidate[place]) for place in both}
    bad = [place for place in both if reference[place].bits != candidate[place].bits]
    words = _words(ulps, bad, max(len(reference), len(candidate)) - len(both))
    ranks = {own for _, own in both}
    drawn = rank if rank in ranks else min(ranks)
    if not bad:
        return LossCurve(rank=drawn, words=words)
    largest: dict[int, float] = {}
    for (step, _), gap in ulps.items():
        largest[step] = gap if math.isnan(gap) else max(largest.get(step, 0.0), gap)
    own = [place for place in both if place[1] == drawn]
    return LossCurve(
        rank=drawn, words=words, steps=tuple(step for step, _ in own),
        reference=tuple(_number(reference[place].value) for place in own),
        candidate=tuple(_number(candidate[place].value) for place in own),
        delta_steps=tuple(largest), delta_ulps=tuple(largest.values()),
        differing=tuple(sorted({step for step, _ in bad})),
    )  # fmt: skip


def _ulps(left: FloatBits, right: FloatBits) -> float:
    return _number(0 if left.bits == right.bits else ulp_distance(left, right))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _words(ulps: Mapping[Place, float], bad: Sequence[Place], lost: int) -> str:
    note = f" Losses without a counterpart in the other run: {lost}." if lost else ""
    steps, ranks = map(set, zip(*ulps, strict=True))
    where = f"{count(len(steps), 'shared step')} on {count(len(ranks), 'rank')}"
    if not bad:
        return f"Δloss is zero: the same bits in {where}.{note}"
    step, rank = bad[0]
    text = f"Δloss differs first at step {step} on rank {rank}"
    text += f", in {len(bad)} of {len(ulps)} losses ({where})"
    numbers = [place for place in bad if not math.isnan(ulps[place])]
    if numbers:
        step, rank = worst = max(numbers, key=lambda place: ulps[place])
        at = f"at most {ulps[worst]:.0f} ulp (step {step}, rank {rank})"
        text += f"; {at if ulps[worst] else 'by the sign of a zero'}"
    if odd := len(bad) - len(numbers):
        text += f"; {odd} {'is' if odd == 1 else 'are'} NaN or infinite in one run"
    return f"{text}.{note}"


# --- state ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupMap:
    """One tensor group by (step, rank)."""

    group: str  # `LOSS`, a group of digests, or a tap as `layers.1.attn:output`
    noun: str  # value, tensor or call
    num_tensors: int  # the most of any rank
    counts: dict[Place, int]  # tensors that differ, or `MISSING`; without what no run recorded

    @property
    def differing(self) -> list[Place]:
        """Where something differs, in order."""
        return sorted(place for place, count in self.counts.items() if count > 0)

    @property
    def missing(self) -> int:
        """How many pairs only one run recorded."""
        return sum(count == MISSING for count in self.counts.values())

    @property
    def words(self) -> str:
        """Where it differs, in one sentence."""
        found, noun = self.differing, self.noun
        note = f"; {count(self.missing, 'pair')} recorded by one run only" * bool(self.missing)
        if not found:
            return f"{self.group}: no difference{note}"
        step, rank = found[0]
        return (
            f"{self.group}: differs first {when(step)} on rank {rank}, in {len(found):,} of "
            f"{count(len(self.counts), '(step, rank) pair')}, at most "
            f"{max(self.counts.values()):,} of {count(self.num_tensors, noun)}{note}"
        )


@dataclass(frozen=True, kw_only=True)
class StateMap:
    """What two runs recorded, group by group."""

    role: str  # of the run that is compared with the reference: candidate, or control
    steps: tuple[int, ...]  # that one of them recorded, `BEFORE` among them
    ranks: tuple[int, ...]
    groups: tuple[GroupMap, ...]  # with a difference, or with a pair that one run lacks
    equal: tuple[str, ...]  # names of the others, and how many taps
    num_more: int = 0  # taps that differ later than the first `MOST_TAPS`


def state_map(reference: RunResult, other: RunResult, role: str) -> StateMap | None:
    """How many tensors or calls of each group and tapped module differ, by step and rank.

    None if the runs have other ranks, or recorded nothing.
    """
    if reference.spec.world_size != other.spec.world_size:
        return None
    runs = with_same_groups(*aligned(reference, other))
    ours, theirs = (
        {key: _texts(record) for key, record in state_table(run).items()} for run in runs
    )
    places = sorted(ours.keys() | theirs.keys())
    names = {name for texts in (ours, theirs) for held in texts.values() for name in held}
    state = [_group(name, places, ours, theirs)
             for name in dict.fromkeys((LOSS, *groups_of(names))) if name in names]  # fmt: skip
    if not state:
        return None
    calls, num_taps = _calls(*runs)
    equal = [found.group for found in state if not any(found.counts.values())]
    if num_equal := num_taps - len(calls):
        equal.append(count(num_equal, "tap"))
    return StateMap(
        role=role, steps=tuple(sorted({step for step, _ in places})),
        ranks=tuple(sorted({rank for _, rank in places})),
        groups=(*(found for found in state if any(found.counts.values())), *calls[:MOST_TAPS]),
        num_more=max(0, len(calls) - MOST_TAPS),
        equal=tuple(equal),
    )  # fmt: skip


def _texts(record: StepRecord | InitialRecord) -> dict[str, str]:
    """By group: digests one after the other, or bits of losses and norm in as many characters."""
    if not isinstance(record, StepRecord):
        return record.digests
    bits = (value.bits.ljust(DIGEST_HEX_CHARS) for _, value in quantities(record))
    return {LOSS: "".join(bits), **record.digests}


def _group(name: str, places: Sequence[Place], ours: _Texts, theirs: _Texts) -> GroupMap:
    counts, longest, size = dict[Place, int](), 0, DIGEST_HEX_CHARS
    for place in places:
        left, right = (texts.get(place, {}).get(name) for texts in (ours, theirs))
        if left is None and right is None:
            continue
        longest = max(longest, len(left or ""), len(right or ""))
        if left is None or right is None or len(left) != len(right):
            counts[place] = MISSING
        else:
            parts = range(0, len(left) if left != right else 0, size)
            counts[place] = sum(left[at : at + size] != right[at : at + size] for at in parts)
    noun = "value" if name == LOSS else "tensor"
    return GroupMap(group=name, noun=noun, num_tensors=longest // size, counts=counts)


def _calls(reference: RunResult, other: RunResult) -> tuple[list[GroupMap], int]:
    """Maps of the taps that differ, as `harness.checks.taps` compares them, and how many taps ran.

    In the order of the program, by the step in which their calls differ first.
    """
    counts: dict[str, dict[Place, int]] = {}
    sizes, found = Counter[str](), dict[str, None]()
    for step in shared_steps(reference, other):
        for key, rows in step.items():
            sizes |= Counter(row.tap for row in rows)
            for row in rows:
                of_tap = counts.setdefault(row.tap, {})
                of_tap[key] = of_tap.get(key, 0) + row.differs
        ordered = in_program_order([row for rows in step.values() for row in rows])
        found |= dict.fromkeys(row.tap for row in ordered if row.differs)
    maps = [GroupMap(group=tap, noun="call", num_tensors=sizes[tap], counts=counts[tap])
            for tap in found]  # fmt: skip
    return maps, len(counts)
