"""A matrix cut into shards for machines that know nothing of each other: `--shard 2/4`.

    cases -> groups that share runs, a reference mostly
      -> the costliest first, each into the shard that has the least so far

The cost of a run is its expected seconds times its ranks. A group stays whole: each run is made
once, in the shard that has all cases that are compared with it. Costliest first is within 4/3 of
the best cut (R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Applied Mathematics
17(2), 1969). Equal cases give equal shards on every machine: runs are estimated by their size
(`SHARDS_BY`), as measured times would differ from shard to shard. `shards.json` in the folder of a
shard holds every case of the matrix and its shard, so a lost shard is noticed.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.errors import NothingSelected, UsageError, shown
from harness.records import CaseSpec, Json, RunSpec
from harness.repeats import runs_of, unique_runs
from harness.runner.estimates import SHARDS_BY, Seconds
from harness.store.merge import Shard, Whole

MAX_SHARDS = 1000
_SHARD = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class Part(Json):
    """What a shard would do.

    Attributes:
        shard: as `--shard` takes it.
        cases: how many.
        runs: how many, those of references and controls included.
        expected_slot_s: seconds times ranks.
    """

    shard: str
    cases: int
    runs: int
    expected_slot_s: float


def parse_shard(text: str) -> Shard:
    """The shard that `I/N` means.

    Raises:
        UsageError: not that, or I is not from 1 to N.
    """
    match = _SHARD.fullmatch(text)
    if match is None:
        raise UsageError(f"--shard: expected I/N, as 2/4, got {shown(text)}")
    index, number = int(match[1]), int(match[2])
    if not 1 <= number <= MAX_SHARDS:
        raise UsageError(f"--shard {text}: expected from 1 to {MAX_SHARDS} shards, got {number}")
    if not 1 <= index <= number:
        raise UsageError(
            f"--shard {text}: expected a shard from 1 to {number} (the first is 1), got {index}"
        )
    return Shard(index=index, number=number)


def cut(
    cases: Sequence[CaseSpec], number: int, seconds: Seconds = SHARDS_BY
) -> tuple[tuple[CaseSpec, ...], ...]:
    """The cases of each of `number` shards, in their order; some are empty if there are few."""
    found: list[list[int]] = [[] for _ in range(number)]
    loads = [0.0] * number
    weighed = []
    for group in _groups(cases):
        runs = {spec.key: spec for place in group for spec in runs_of(cases[place])}
        weighed.append((-_slot_s(runs.values(), seconds), group))
    for weight, group in sorted(weighed):
        # Of equal loads the one with fewer cases, so that what costs nothing is spread, too.
        lightest = min(range(number), key=lambda n: (loads[n], len(found[n]), n))
        loads[lightest] -= weight
        found[lightest] += group
    return tuple(tuple(cases[place] for place in sorted(places)) for places in found)


def _groups(cases: Sequence[CaseSpec]) -> list[list[int]]:
    """Places of cases that share runs, in their order."""
    owner = list(range(len(cases)))

    def find(place: int) -> int:
        while owner[place] != place:
            owner[place] = owner[owner[place]]
            place = owner[place]
        return place

    first: dict[str, int] = {}
    for place, case in enumerate(cases):
        for spec in runs_of(case):
            one, other = sorted((find(first.setdefault(spec.key, place)), find(place)))
            owner[other] = one
    groups: dict[int, list[int]] = {}
    for place in range(len(cases)):
        groups.setdefault(find(place), []).append(place)
    return list(groups.values())


def _slot_s(runs: Iterable[RunSpec], seconds: Seconds) -> float:
    return math.fsum(max(0.0, seconds(spec)) * spec.world_size for spec in runs)


def parts(cases: Sequence[CaseSpec], number: int) -> tuple[Part, ...]:
    """What each of `number` shards would do; those without a case are left out."""
    return tuple(
        Part(
            shard=f"{index}/{number}", cases=len(held), runs=len(unique_runs(held)),
            expected_slot_s=_slot_s(unique_runs(held).values(), SHARDS_BY),
        )
        for index, held in enumerate(cut(cases, number), 1)
        if held
    )  # fmt: skip


def take_shard(cases: Sequence[CaseSpec], text: str) -> tuple[tuple[CaseSpec, ...], Whole]:
    """The cases of the shard `text`, which is I/N, and the whole that it is of.

    Raises:
        UsageError: no shard.
        NothingSelected: the shard holds no case.
    """
    shard = parse_shard(text)
    shards = cut(cases, shard.number)
    chosen = shards[shard.index - 1]
    if not chosen:
        raise NothingSelected(
            f"shard {shard} holds no case: those that share a reference stay together, so "
            f"{len(cases)} cases fill {sum(map(bool, shards))} of {shard.number} shards "
            f"(harness list --shards {shard.number} --json names those)"
        )
    ids = tuple(tuple(case.id for case in held) for held in shards)
    fingerprint = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    return chosen, Whole(shard=shard, cut=fingerprint, cases=tuple(cases), shards=ids)
