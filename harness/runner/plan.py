"""What will run, in which order, on how many slots, for how long; and what cannot run here.

    cases -> unique runs, those that share a reference together -> `arrange` -> `Queue`
    cases -> groups that share runs -> the costliest first, each into the shard that has the least

A slot holds one rank: a GPU, or on the CPU one of a stated number. The widest runs come first, of
these the longest; whenever slots are free, the first run of the order that fits starts: at most
twice as long as the best order (R. L. Graham, SIAM J. Appl. Math. 17(2), 1969).

Each run is made in the shard that has all cases that need it. A group costs the seconds of its runs
times their ranks; costliest first is within 4/3 of the best cut (Graham, too). Every machine cuts
alike (`SHARDS_BY`). `shards.json` has every case and its shard, so a lost shard is noticed.
"""

import dataclasses
import hashlib
import heapq
import itertools
import json
import math
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import NothingSelected, UsageError, shown
from harness.faults.catalogue import CATALOGUE
from harness.provenance import package_version
from harness.records import CaseSpec, Json, RunSpec, each_of
from harness.repeats import in_turn, runs_of, unique_runs, untimed_runs
from harness.runner.estimates import SHARDS_BY, Estimates, Seconds, by_size, num_parameters
from harness.store.merge import Shard, Whole

MAX_SHARDS = 1000
_SHARD = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
GIB = 1 << 30
LEAST_BYTES = 2
"""Of a weight or an element of a hidden state: a bound that no run is below, not an estimate."""
_PACKAGES_OF_GPUS = (
    ("backend", "te", "transformer-engine"),
    ("capture_by", "te", "transformer-engine"),
    ("capture_by", "torch", "torch"),
    ("engine", "megatron_fsdp", "megatron-fsdp"),
)
"""A setting's key and value, and the package that it needs, on GPUs only."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Json):
    """A run to make once. `serves` holds the ids of the cases that read it."""

    key: str
    spec: RunSpec
    serves: tuple[str, ...]
    estimate_s: float


@dataclass(frozen=True, kw_only=True)
class Plan(Json):
    """Runs in execution order, and every case, those that cannot run here with their reason.

    `estimate_s` is the wall time of the schedule, of it `start_s` before the first run.
    """

    slots: int
    jobs: int | None
    runs: tuple[PlannedRun, ...]
    cases: tuple[CaseSpec, ...]
    estimate_s: float
    start_s: float = 0.0

    @property
    def skipped(self) -> tuple[CaseSpec, ...]:
        """The cases that cannot run on this machine."""
        return tuple(case for case in self.cases if case.skip_reason)


class Job(NamedTuple):
    """A run to be started, and the seconds that it is expected to take."""

    spec: RunSpec
    seconds: float


def make_plan(
    cases: Iterable[CaseSpec], *, slots: int, jobs: int | None = None,
    expected: Estimates | None = None, memory_bytes: int | None = None,
    finished: Callable[[str], bool] | None = None,
    repeats: Mapping[str, Sequence[RunSpec]] | None = None,
) -> Plan:  # fmt: skip
    """Plan the runs of `cases`, or of a run folder what is left of them.

    Args:
        slots, jobs: ranks and runs that may run at a time; jobs None: as many as fit on the slots.
        expected: what runs are expected to take; None for what their size says.
        memory_bytes: of all devices that runs may use together; None if it is not known.
        finished: of a run folder, whether the run of a key need not be repeated. Its skip reasons
            are kept: a case that was planned on a larger machine may have its verdict already.
        repeats: by case, runs that are left of a confirmation which was cut short.
    """
    if finished is None:
        cases = (_with_reason(case, slots, memory_bytes) for case in cases)
    cases, expected, again = tuple(cases), expected or Estimates(by_size()), repeats or {}
    seconds = expected.seconds

    def left(key: str) -> bool:
        return finished is None or not finished(key)

    serves: dict[str, dict[str, None]] = {}
    needed = ((case.id, runs_of(case)) for case in cases if not case.skip_reason)
    for case_id, specs in (*needed, *again.items()):
        for spec in specs:
            serves.setdefault(spec.key, {})[case_id] = None
    first = {spec.key: Job(spec, seconds(spec)) for specs in again.values() for spec in specs}
    order = (*first.values(), *arrange(cases, seconds, left=left))
    alone = [Job(spec, seconds(spec)) for spec in in_turn(cases) if left(spec.key)]
    runs = tuple(
        PlannedRun(key=spec.key, spec=spec, serves=tuple(serves[spec.key]), estimate_s=time_s)
        for spec, time_s in (*order, *alone)
    )
    start_s = expected.start_s if runs else 0.0
    length_s = makespan_s(order, slots=slots, jobs=jobs) + sum(job.seconds for job in alone)
    return Plan(
        slots=slots, jobs=jobs, runs=runs, cases=cases, start_s=start_s,
        estimate_s=start_s + length_s,
    )  # fmt: skip


# ---- order


def arrange(
    cases: Iterable[CaseSpec], seconds: Seconds, *, left: Callable[[str], bool] = lambda key: True
) -> tuple[Job, ...]:
    """The runs of `cases` but timed repeats, in the order in which they are to start, each once.

    Runs that are compared with one reference stay together: one verdict does not wait for all.
    """
    groups: dict[str, list[Job]] = {}
    seen: set[str] = set()
    for case in cases:
        for spec in () if case.skip_reason else untimed_runs(case):
            if spec.key not in seen and left(spec.key):
                job = Job(spec, max(0.0, seconds(spec)))
                groups.setdefault(case.reference.key, []).append(job)
            seen.add(spec.key)

    def size(group: Sequence[Job]) -> tuple[int, float]:
        return max(job.spec.world_size for job in group), max(job.seconds for job in group)

    return tuple(itertools.chain(*sorted(groups.values(), key=size, reverse=True)))


class Queue:
    """Runs that wait for slots, in their order."""

    def __init__(self, order: Iterable[Job]) -> None:
        self._first: deque[RunSpec] = deque()
        self._by_width: dict[int, deque[tuple[int, RunSpec]]] = {}
        for place, job in enumerate(order):
            waiting = self._by_width.setdefault(job.spec.world_size, deque())
            waiting.append((place, job.spec))

    def push(self, spec: RunSpec) -> None:
        """Queue a run that a case waits for already, before all that were ordered."""
        self._first.append(spec)

    def next(self, can_start: Callable[[RunSpec], bool]) -> RunSpec | None:
        """Take the run to start now, None if none may.

        `can_start` says whether there is room now, for every run of a width or for none.
        """
        if self._first and can_start(self._first[0]):
            return self._first.popleft()
        waiting = filter(None, self._by_width.values())
        for held in sorted(waiting, key=lambda held: held[0][0]):
            if can_start(held[0][1]):
                return held.popleft()[1]
        return None


def makespan_s(order: Sequence[Job], *, slots: int, jobs: int | None = None) -> float:
    """When the last run of `order` ends if each takes what is expected, by the rules of `Queue`."""
    now_s, free = 0.0, slots
    queue, seconds = Queue(order), {job.spec.key: job.seconds for job in order}
    running: list[tuple[float, int]] = []

    def can_start(spec: RunSpec) -> bool:
        fits = spec.world_size <= free and (jobs is None or len(running) < jobs)
        return fits or not running

    while True:
        while (spec := queue.next(can_start)) is not None:
            width = min(spec.world_size, slots)
            free -= width
            heapq.heappush(running, (now_s + seconds[spec.key], width))
        if not running:
            return now_s
        now_s, width = heapq.heappop(running)
        free += width


# ---- what cannot run here


def _with_reason(case: CaseSpec, slots: int, memory_bytes: int | None) -> CaseSpec:
    specs = () if case.skip_reason else (case.reference, case.control, case.candidate)
    reason = next((why for spec in specs for why in _lacks(spec, slots, memory_bytes)), "")
    return dataclasses.replace(case, skip_reason=reason) if reason else case


def _lacks(spec: RunSpec, slots: int, memory_bytes: int | None) -> Iterator[str]:
    config, here = spec.config, f"this run is on {spec.device}"
    if spec.world_size > slots:
        if spec.device == "cuda":
            yield f"needs GPUs for {spec.world_size} ranks, this machine has them for {slots}"
        yield f"needs {spec.world_size} rank slots, {slots} are stated (--slots)"
    for fault in each_of(spec.plant):
        if spec.device not in (devices := CATALOGUE[fault.fault].devices):
            yield f"the fault {fault.fault} needs {' or '.join(devices)}, {here}"
    if "races" in config.get("stress", ()) and spec.device != "cpu":
        yield f"the stressor races needs cpu, {here}"
    for key, value, package in _PACKAGES_OF_GPUS:
        if config.get(key) == value and spec.device != "cuda":
            yield f"{key} {value} needs a GPU, {here}"
        if config.get(key) == value and not package_version(package):
            yield f"{key} {value} needs {package}, which is not installed"
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")  # of kernels of GPUs, too
    backend = config.get("compile_backend") if config.get("compile") else ""
    if backend == "inductor" and not any(map(shutil.which, compilers)):
        yield "compile_backend inductor needs a C++ compiler, none is found (aot_eager needs none)"
    path = config.get("data", {}).get("path") if spec.is_builtin else None
    if path is not None and not Path(path).exists():
        yield f"data.path {path} is not on this machine"
    if spec.is_builtin and memory_bytes is not None:
        yield from _too_large(config, memory_bytes)


def _too_large(config: Mapping[str, Any], memory_bytes: int) -> Iterator[str]:
    """What of a run cannot be held by the memory of this machine, however it is sharded."""
    model = config["model"]
    least = {
        "one copy of the weights": num_parameters(model),
        "a microbatch between two layers":
            config["micro_batch_size"] * model["seq"] * model["hidden"],
    }  # fmt: skip
    for what, elements in least.items():
        if (need := LEAST_BYTES * elements) > memory_bytes:
            gib, have = f"{need / GIB:,.0f} GiB", f"{memory_bytes / GIB:,.0f} GiB"
            yield f"{what} needs {gib} of memory, this machine has {have}"


# ---- shards, for machines that know nothing of each other: `--shard 2/4`


def parse_shard(text: str) -> Shard:
    """The shard that `I/N` means (`UsageError`: not that, or I is not from 1 to N)."""
    match = _SHARD.fullmatch(text)
    index, number = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= number <= MAX_SHARDS:
        why = f"expected I/N with 1 <= I <= N <= {MAX_SHARDS}, as 2/4"
        raise UsageError(f"--shard: {why}, got {shown(text)}")
    return Shard(index=index, number=number)


def cut(
    cases: Sequence[CaseSpec], number: int, seconds: Seconds = SHARDS_BY
) -> tuple[tuple[CaseSpec, ...], ...]:
    """The cases of each of `number` shards, in their order; some are empty if there are few."""
    found: list[list[int]] = [[] for _ in range(number)]
    loads = [0.0] * number
    groups = _groups(cases)
    weighed = [(-_slot_s([cases[place] for place in group], seconds), group) for group in groups]
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


def _slot_s(cases: Iterable[CaseSpec], seconds: Seconds) -> float:
    runs = {spec.key: spec for case in cases for spec in runs_of(case)}
    return math.fsum(max(0.0, seconds(spec)) * spec.world_size for spec in runs.values())


def parts(cases: Sequence[CaseSpec], number: int) -> list[dict[str, Any]]:
    """What each of `number` shards would do, in seconds times ranks; none that has no case."""
    return [
        {"shard": f"{index}/{number}", "cases": len(held), "runs": len(unique_runs(held)),
         "expected_slot_s": _slot_s(held, SHARDS_BY)}
        for index, held in enumerate(cut(cases, number), 1)
        if held
    ]  # fmt: skip


def take_shard(cases: Sequence[CaseSpec], text: str) -> tuple[tuple[CaseSpec, ...], Whole]:
    """The cases of the shard `text`, which is I/N (`NothingSelected`: none), and its whole."""
    shard = parse_shard(text)
    shards = cut(cases, shard.number)
    chosen = shards[shard.index - 1]
    if not chosen:
        raise NothingSelected(
            f"shard {shard} holds no case: {len(cases)} cases, of which those that share a "
            f"reference stay together, fill {sum(map(bool, shards))} of {shard.number} shards"
        )
    ids = tuple(tuple(case.id for case in held) for held in shards)
    fingerprint = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
    return chosen, Whole(shard=shard, cut=fingerprint, cases=tuple(cases), shards=ids)
