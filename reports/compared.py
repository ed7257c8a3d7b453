"""What two runs of a case recorded, compared for showing: losses by step, state by step and rank.

loss_curve  losses of two runs and their distance in units in the last place
state_map   for each tensor group and (step, rank): how many tensors differ, or are not recorded
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from harness.records import (
    COPIES,
    DIGEST_HEX_CHARS,
    GROUP_ORDER,
    FloatBits,
    InitialRecord,
    RankRecords,
    RunResult,
    StepRecord,
    ulp_distance,
)
from harness.store.streams import aligned

LOSS = "loss"
"""The group of a step's losses and gradient norm."""
BEFORE = -1
"""In place of a step's number: the state before step 0."""
MISSING = -1
"""In place of a count: one run recorded it and the other did not, or not the same tensors."""


# --- losses -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Losses of two runs; the sequences are empty if every loss has the same bits.

    Attributes:
        rank: whose loss is drawn.
        steps: steps that both runs recorded on that rank.
        reference: loss of the reference; NaN where not finite.
        candidate: loss of the candidate.
        delta_steps: every step that both runs recorded on some rank.
        delta_ulps: largest distance over the ranks; NaN where it is no number.
        differing: steps in which some rank's bits differ, whatever the distance.
        words: the difference in one sentence.
    """

    rank: int
    words: str
    steps: tuple[int, ...] = ()
    reference: tuple[float, ...] = ()
    candidate: tuple[float, ...] = ()
    delta_steps: tuple[int, ...] = ()
    delta_ulps: tuple[float, ...] = ()
    differing: tuple[int, ...] = ()


def losses(run: RunResult) -> pd.DataFrame:
    """A row for each recorded loss: rank, step, bits, value (NaN where not finite)."""
    rows = {
        (records.rank, record.step): (record.loss.bits, _number(record.loss))
        for records in run.ranks
        for record in reversed(records.steps)  # of a step that is there twice, the first counts
        if record.loss is not None  # a rank of a pipeline may have none
    }
    table = pd.DataFrame(
        [(*key, *row) for key, row in rows.items()], columns=["rank", "step", "bits", "value"]
    )
    return table.sort_values(["rank", "step"], ignore_index=True)


def loss_curve(reference: pd.DataFrame, candidate: pd.DataFrame, rank: int) -> LossCurve | None:
    """Curves of two runs, or None if they share no step.

    Args:
        reference: `losses` of the reference.
        candidate: `losses` of the candidate.
        rank: whose loss to draw; the lowest shared rank if it has none.
    """
    both = reference.merge(candidate, on=["rank", "step"], suffixes=("_r", "_c"))
    if both.empty:
        return None
    bad = both[both["bits_r"] != both["bits_c"]]
    lost = max(len(reference), len(candidate)) - len(both)
    drawn = rank if (both["rank"] == rank).any() else int(both["rank"].min())
    if bad.empty:
        return LossCurve(rank=drawn, words=_words(both, bad, lost))
    both = both.assign(ulps=0.0)
    both.loc[bad.index, "ulps"] = [
        _ulps(a, b) for a, b in zip(bad["bits_r"], bad["bits_c"], strict=True)
    ]
    own = both[both["rank"] == drawn]
    by_step = both.groupby("step")["ulps"].agg(lambda ulps: ulps.max(skipna=False))
    return LossCurve(
        rank=drawn,
        words=_words(both, both.loc[bad.index], lost),
        steps=tuple(map(int, own["step"])),
        reference=tuple(own["value_r"]),
        candidate=tuple(own["value_c"]),
        delta_steps=tuple(int(str(step)) for step in by_step.index),
        delta_ulps=tuple(by_step),
        differing=tuple(sorted({int(step) for step in bad["step"]})),
    )


def _number(value: FloatBits) -> float:
    return float("nan") if value.value is None else value.value


def _ulps(left: str, right: str) -> float:
    distance = ulp_distance(FloatBits.from_hex(left), FloatBits.from_hex(right))
    return float("nan") if distance is None else float(distance)


def counted(number: int, noun: str) -> str:
    """'1 step', '2 steps'."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _words(both: pd.DataFrame, bad: pd.DataFrame, lost: int) -> str:
    num_ranks, num_steps = both["rank"].nunique(), both["step"].nunique()
    have = "loss has" if lost == 1 else "losses have"
    note = f" {lost} recorded {have} no counterpart in the other run." if lost else ""
    where = f"{counted(num_steps, 'shared step')} on {counted(num_ranks, 'rank')}"
    if bad.empty:
        return f"Δloss is zero: the same bits in {where}.{note}"
    first = bad.sort_values(["step", "rank"]).iloc[0]
    text = f"Δloss differs first at step {first['step']} on rank {first['rank']}"
    text += f", in {len(bad)} of {len(both)} losses ({where})"
    numbers = bad[bad["ulps"].notna()]
    if len(numbers):
        worst = numbers.sort_values("ulps", ascending=False, kind="stable").iloc[0]
        text += (
            f"; at most {worst['ulps']:.0f} ulp (step {worst['step']}, rank {worst['rank']})"
            if worst["ulps"]
            else "; by the sign of a zero"
        )
    if odd := len(bad) - len(numbers):
        text += f"; {odd} {'is' if odd == 1 else 'are'} NaN or infinite in one run"
    return f"{text}.{note}"


# --- state ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GroupMap:
    """One tensor group by (step, rank).

    Attributes:
        group: `LOSS`, or a group of digests.
        num_tensors: the most of any rank.
        counts: tensors that differ, or `MISSING`; a place that no run recorded is left out.
    """

    group: str
    num_tensors: int
    counts: dict[tuple[int, int], int]

    @property
    def differing(self) -> list[tuple[int, int]]:
        """(step, rank) pairs in which something differs, in order."""
        return sorted(place for place, count in self.counts.items() if count > 0)

    @property
    def missing(self) -> int:
        """How many pairs only one run recorded."""
        return sum(count == MISSING for count in self.counts.values())

    @property
    def words(self) -> str:
        """Where it differs, in one sentence."""
        found, noun = self.differing, "value" if self.group == LOSS else "tensor"
        absent = f"; {counted(self.missing, 'pair')} recorded by one run only"
        if not found:
            return f"{self.group}: no difference{absent if self.missing else ''}"
        step, rank = found[0]
        first = "before step 0" if step == BEFORE else f"at step {step}"
        most = max(self.counts.values())
        return (
            f"{self.group}: differs first {first} on rank {rank}, in {len(found):,} of "
            f"{counted(len(self.counts), '(step, rank) pair')}, at most {most:,} of "
            f"{counted(self.num_tensors, noun)}{absent if self.missing else ''}"
        )

    def by_rank(self) -> list[tuple[list[int], int, int, int, int]]:
        """Ranks that have the same: first differing step, steps that differ, most tensors, missing.

        Ranks without a difference and without a missing pair are left out.
        """
        rows: dict[tuple[int, int, int, int], list[int]] = {}
        for rank in sorted({rank for _, rank in self.counts}):
            own = {step: count for (step, r), count in self.counts.items() if r == rank}
            steps = [step for step, count in own.items() if count > 0]
            gone = sum(count == MISSING for count in own.values())
            if steps or gone:
                key = (min(steps, default=BEFORE - 1), len(steps), max(own.values()), gone)
                rows.setdefault(key, []).append(rank)
        return [(ranks, *key) for key, ranks in rows.items()]


@dataclass(frozen=True, kw_only=True)
class StateMap:
    """What two runs recorded, group by group.

    Attributes:
        role: of the run that is compared with the reference: candidate, or control.
        steps: every step that one of them recorded, `BEFORE` among them.
        ranks: every rank.
        groups: those with a difference, or with a pair that one run lacks.
        equal: names of the others.
    """

    role: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    groups: tuple[GroupMap, ...]
    equal: tuple[str, ...]


def state_map(reference: RunResult, other: RunResult, role: str) -> StateMap | None:
    """The map of two runs, or None if they have other ranks or recorded nothing."""
    if reference.spec.world_size != other.spec.world_size:
        return None
    reference, other = aligned(reference, other)
    ours, theirs = _records(reference), _records(other)
    places = sorted(ours.keys() | theirs.keys())
    names = dict.fromkeys(
        group for record in [*ours.values(), *theirs.values()] for group in _names(record)
    )
    if not _same_copies(reference, other):
        names.pop(COPIES, None)
    ordered = [name for name in (LOSS, *GROUP_ORDER) if name in names]
    groups = [_group(name, places, ours, theirs)
              for name in [*ordered, *(n for n in names if n not in ordered)]]  # fmt: skip
    if not groups:
        return None
    return StateMap(
        role=role,
        steps=tuple(sorted({step for step, _ in places})),
        ranks=tuple(sorted({rank for _, rank in places})),
        groups=tuple(found for found in groups if any(found.counts.values())),
        equal=tuple(found.group for found in groups if not any(found.counts.values())),
    )


_Record = StepRecord | InitialRecord


def _records(run: RunResult) -> dict[tuple[int, int], _Record]:
    found: dict[tuple[int, int], _Record] = {}
    for rank in run.ranks:
        for step, record in _of_rank(rank):
            found.setdefault((step, rank.rank), record)
    return found


def _of_rank(rank: RankRecords) -> Iterator[tuple[int, _Record]]:
    if rank.initial is not None:
        yield BEFORE, rank.initial
    yield from ((record.step, record) for record in rank.steps)


def _names(record: _Record) -> Iterator[str]:
    yield from record.digests
    if isinstance(record, StepRecord):
        yield LOSS


def _value(record: _Record | None, name: str) -> str | None:
    """A group's digests, or the bits of losses and gradient norm; None if it has none."""
    if name != LOSS or record is None:
        return None if record is None else record.digests.get(name)
    if not isinstance(record, StepRecord):
        return None
    scalars = (record.loss, record.grad_norm, *record.microbatch_losses)
    return "".join(("" if v is None else v.bits).ljust(DIGEST_HEX_CHARS) for v in scalars)


def _same_copies(*runs: RunResult) -> bool:
    """Whether their strategies keep the same compute copies of weights."""
    sharded = [run.spec.config.get("fsdp", {}) for run in runs]
    return len({(f.get("strategy"), f.get("outer_strategy")) for f in sharded}) == 1


def _group(
    name: str,
    places: Iterable[tuple[int, int]],
    ours: dict[tuple[int, int], _Record],
    theirs: dict[tuple[int, int], _Record],
) -> GroupMap:
    counts, longest = dict[tuple[int, int], int](), 0
    for place in places:
        left, right = (_value(records.get(place), name) for records in (ours, theirs))
        if left is not None or right is not None:
            longest = max(longest, len(left or ""), len(right or ""))
            counts[place] = _differing(left, right)
    return GroupMap(group=name, num_tensors=longest // DIGEST_HEX_CHARS, counts=counts)


def _differing(left: str | None, right: str | None) -> int:
    if left is None or right is None or len(left) != len(right):
        return MISSING
    if left == right:
        return 0
    size = DIGEST_HEX_CHARS
    return sum(left[at : at + size] != right[at : at + size] for at in range(0, len(left), size))
