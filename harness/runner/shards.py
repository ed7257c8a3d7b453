"""A matrix cut into shards for machines that know nothing of each other: `--shard 2/4`.

    cases -> groups that share runs, a reference mostly
      -> the costliest first, each into the shard that has the least so far

The cost of a run is its expected seconds times its ranks. A group stays whole: each run is made
once, in the shard that has all cases that are compared with it, so shards can be put together
without mixing the runs of two machines in one case. Costliest first is within 4/3 of the best cut
(R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Applied Mathematics 17(2), 1969).
Equal cases and equal costs give equal shards on every machine: what the machine at hand has, cores
and GPUs, is not asked. Every case is in exactly one shard.

The folder of a shard holds `shards.json`: every case of the whole matrix and the shard that it is
in. So whoever puts shards together knows what is missing, whichever shard was lost.
"""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import NothingSelected, UsageError, shown
from harness.records import CaseSpec, Json
from harness.repeats import runs_of, unique_runs
from harness.runner.schedule import Seconds
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
    cases: Sequence[CaseSpec], number: int, seconds: Seconds
) -> tuple[tuple[CaseSpec, ...], ...]:
    """The cases of each shard, in their order; some are empty if there are too few.

    Args:
        cases: all that there are, whether they can run here or not.
        number: of shards.
        seconds: what a run is expected to take.
    """
    found: list[list[int]] = [[] for _ in range(number)]
    loads = [0.0] * number
    weighed = [(-_weigh(group, cases, seconds), group) for group in _groups(cases)]
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


def _weigh(group: Sequence[int], cases: Sequence[CaseSpec], seconds: Seconds) -> float:
    runs = {spec.key: spec for place in group for spec in runs_of(cases[place])}
    return math.fsum(max(0.0, seconds(spec)) * spec.world_size for spec in runs.values())


def parts(shards: Sequence[Sequence[CaseSpec]], seconds: Seconds) -> tuple[Part, ...]:
    """What each shard would do; those without a case are left out."""
    found = []
    for place, cases in enumerate(shards):
        if cases:
            runs = unique_runs(cases)
            slot_s = math.fsum(seconds(spec) * spec.world_size for spec in runs.values())
            shard = Shard(index=place + 1, number=len(shards))
            found.append(
                Part(shard=str(shard), cases=len(cases), runs=len(runs), expected_slot_s=slot_s)
            )
    return tuple(found)


def fingerprint(shards: Sequence[Sequence[CaseSpec]]) -> str:
    """Names a cut: shards that are to be merged must be of one."""
    ids = [[case.id for case in shard] for shard in shards]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def take_shard(
    cases: Sequence[CaseSpec], text: str, seconds: Seconds
) -> tuple[tuple[CaseSpec, ...], Whole]:
    """The cases of the shard `text`, which is I/N, and the whole that it is of.

    Raises:
        UsageError: no shard.
        NothingSelected: the shard holds no case.
    """
    shard = parse_shard(text)
    shards = cut(cases, shard.number, seconds)
    chosen = shards[shard.index - 1]
    if not chosen:
        filled = sum(map(bool, shards))
        raise NothingSelected(
            f"shard {shard} holds no case: those that share a reference stay together, so "
            f"{len(cases)} cases fill {filled} of {shard.number} shards (harness list --shards "
            f"{shard.number} --json names those)"
        )
    ids = tuple(tuple(case.id for case in held) for held in shards)
    return chosen, Whole(shard=shard, cut=fingerprint(shards), cases=tuple(cases), shards=ids)
