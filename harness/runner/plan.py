"""What will run, in which order, on how many slots, for how long; and what cannot run here.

    cases -> unique runs, those that share a reference together -> `arrange` -> `Queue`
    cases -> groups that share runs -> the costliest first, each into the shard that has the least

A slot holds one rank: a GPU, or on the CPU one of a stated number. The widest runs come first, of
these the longest; whenever slots are free, the first run of the order that fits starts: at most
twice as long as the best order (R. L. Graham, SIAM J. Appl. Math. 17(2), 1969).

Each run is made in the shard that has all cases that need it. A group costs the seconds of its runs
times their ranks; costliest first is within 4/3 of the best cut (Graham, too). Every machine cuts
alike (`SHARDS_BY`). `shards.json` has every case and its shard, so a lost shard is noticed.

How long runs take orders the work, and decides nothing:

    equal work on this kind of machine   the median of its newest times
    similar runs: preset, ranks, device  start-up, and a step's time for its own steps
    nothing known                        `estimate_s`, a model of its size, from the constants below

Only runs that ended well count, unless the work never did. The model's arithmetic is 6 x parameters
that a token meets x tokens of a step, spread over the cores on the CPU and over the ranks on CUDA.
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
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness.checks.complete import shares_gpus
from harness.checks.memory import peak_bytes
from harness.checks.speed import matrix_weights, typical_step_s
from harness.engine.machine import Machine, num_cores
from harness.errors import HarnessError, NothingSelected, UsageError, shown
from harness.faults.catalogue import CATALOGUE
from harness.history.ledger import History, machine_kind, work_of
from harness.provenance import package_version
from harness.records import CaseSpec, Device, Json, RunResult, RunSpec, dumps, each_of
from harness.repeats import SLOWDOWN, in_turn, runs_of, unique_runs, untimed_runs
from harness.store.merge import Shard, Whole

Seconds = Callable[[RunSpec], float]
"""What a run is expected to take."""
MIB = 1 << 20
CORES = 8
"""Of the machine that shards are cut for: the same whoever cuts."""
NEWEST = 5
"""As many times of equal work, or folders, are looked at."""
MAX_RUNS = 5_000
"""Of the history that are looked at, the newest: a plan must not wait for all."""
_START_S = {"cpu": (1.0, 0.05), "cuda": (6.0, 0.5)}
"""Seconds of a run's start-up, and more for each rank."""
_STEP_S = {"cpu": 0.05, "cuda": 0.02}
"""Host time of a step."""
_FLOPS = {"cpu": 5e9, "cuda": 1e14}
_FOREIGN_START_S = 8.0
"""Of a program in a fresh interpreter, most of it the import of torch."""
_SERVER_START_S = 4.0
"""From the run folder to the first run: the server imports torch."""
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
        return tuple(case for case in self.cases if case.skip_reason)


class Job(NamedTuple):
    """A run to be started, and the seconds that it is expected to take."""

    spec: RunSpec
    seconds: float


@dataclass(frozen=True)
class Estimates:
    """Expected seconds of runs, and of what comes before the first one."""

    seconds: Seconds
    start_s: float = 0.0


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
        cases = _with_reasons(cases, slots, memory_bytes)
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


def _with_reasons(
    cases: Iterable[CaseSpec], slots: int, memory_bytes: int | None
) -> Iterator[CaseSpec]:
    known: dict[int, str] = {}  # by identity: cases share specifications, and keys take longer
    for case in cases:
        specs = () if case.skip_reason else (case.reference, case.control, case.candidate)
        for spec in specs:
            if id(spec) not in known:
                known[id(spec)] = next(_lacks(spec, slots, memory_bytes), "")
        reason = next(filter(None, (known[id(spec)] for spec in specs)), "")
        yield dataclasses.replace(case, skip_reason=reason) if reason else case


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


# ---- how long runs take


def by_size(cores: int | None = None, device: Device | None = None) -> Seconds:
    """What the model says, for this machine's cores if none are named."""
    number = num_cores() if cores is None else cores
    return lambda spec: estimate_s(spec, number, device)


SHARDS_BY: Seconds = by_size(CORES, "cpu")
"""For a cut into shards: every machine must cut alike, whatever it has measured."""


def expected_here(database: Path | None, here: Machine) -> Estimates:
    """For a plan on this machine; a history that is missing or damaged says nothing."""
    with suppress(HarnessError):
        if database is not None and database.exists():
            here_kind = machine_kind(json.loads(dumps(here)))
            return expected(History.open(database), here_kind, num_cores())
    return Estimates(by_size(), _SERVER_START_S)


def expected(history: History, machine: str, cores: int) -> Estimates:
    """What the history knows of the time of runs on a kind of machine; read once, asked often."""
    ended, failed, starts, steps = (defaultdict[object, list[float]](list) for _ in range(4))
    before_s, num_runs = list[float](), 0  # from the making of a run folder to its first run
    for folder in history.entries(newest_first=True):
        if (num_runs := num_runs + len(folder.runs)) > MAX_RUNS:
            break
        runs = [run for run in folder.runs if run.wall_s > 0 and folder.machine == machine]
        for run in sorted(runs, key=lambda run: run.started_unix_s, reverse=True):
            if run.what in ("interrupted", "not_run"):
                continue
            (failed if run.what else ended)[run.work].append(run.wall_s)
            if not run.what and run.preset and run.step_s is not None:
                similar = (run.preset, run.world_size, run.device)
                starts[similar].append(max(0.0, run.wall_s - run.steps * run.step_s))
                steps[similar].append(run.step_s)
        first_s = min((run.started_unix_s for run in runs if run.started_unix_s > 0), default=None)
        with suppress(ValueError):
            if first_s is not None and len(before_s) < NEWEST:
                made_s = datetime.fromisoformat(folder.created).timestamp()
                before_s.append(max(0.0, first_s - made_s))
    by_work, start, step = (
        {name: median(values[:NEWEST]) for name, values in found.items()}
        for found in ({**failed, **ended}, starts, steps)
    )

    def seconds(spec: RunSpec) -> float:
        if (known := by_work.get(work_of(spec))) is not None:
            return known
        model = spec.config.get("model")
        preset = str(model.get("preset", "")) if isinstance(model, dict) else ""
        similar = (preset, spec.world_size, spec.device)
        if similar not in start:
            return estimate_s(spec, cores)
        slowdown = SLOWDOWN if spec.rounding else 1.0
        return start[similar] + int(spec.config.get("steps", 0)) * step[similar] * slowdown

    return Estimates(seconds, median(before_s) if before_s else _SERVER_START_S)


def estimate_s(spec: RunSpec, cores: int, device: Device | None = None) -> float:
    """Seconds that a run may take by the model; `device` is where, None for where it says."""
    config, world, device = spec.config, spec.world_size, device or spec.device
    fixed, each = _START_S[device]
    slowdown = SLOWDOWN if spec.rounding else 1.0
    if not spec.is_builtin:
        # Nothing is known of its size; the history knows after its first run.
        return float(_FOREIGN_START_S + each * world + slowdown * config["steps"] * _STEP_S[device])
    # Ranks of one replica work on the same tokens.
    model, replicas = config["model"], config["parallel"]["dp_outer"] * config["parallel"]["dp"]
    tokens = config["microbatches"] * config["micro_batch_size"] * replicas * model["seq"]
    crowd, workers = (max(1.0, world / cores), cores) if device == "cpu" else (1.0, world)
    step = _STEP_S[device] * crowd + 6.0 * matrix_weights(model) * tokens / (
        _FLOPS[device] * workers
    )
    steps_s, soak = slowdown * config["steps"] * step, spec.soak
    if soak is not None and soak.is_open:
        # A step replays once at least: more often, and the soak is over sooner.
        steps_s = max(steps_s, soak.amount * (step if soak.by == "replays" else 1.0))
    return float(fixed + each * world + steps_s)


def num_parameters(model: Mapping[str, Any]) -> int:
    """Parameters of a plain `ModelConfig`, embedding and head included, no norms, no biases."""
    all_experts = {**model, "top_k": model["experts"]}
    return matrix_weights(all_experts) + int(model["vocab_size"] * model["hidden"])


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


# ---- what was measured


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Memory and step time by role (reference, control, candidate); 0 and None if not measured.

    One run each, digests included: a first look, which the check `throughput` does not use. Bytes
    are of the worst rank, seconds the median over the later half of the steps of the slowest rank;
    `concurrent` is the most other runs that were under way during a run of the case.
    """

    peak_bytes: Mapping[str, int]
    step_s: Mapping[str, float | None]
    concurrent: int
    shares_gpus: bool

    @property
    def memory(self) -> float | None:
        """The candidate's peak over the reference's."""
        return _ratio(self.peak_bytes.get("candidate"), self.peak_bytes.get("reference"))

    @property
    def speed(self) -> float | None:
        """Reference's step time over the candidate's: above 1, the candidate is faster."""
        return _ratio(self.step_s.get("reference"), self.step_s.get("candidate"))

    @property
    def control_speed(self) -> float | None:
        """The same of the control: 1 but for noise."""
        return _ratio(self.step_s.get("reference"), self.step_s.get("control"))

    @property
    def words(self) -> str:
        """Both on one line; "" if neither was measured."""
        parts = []
        if self.memory is not None:
            peak = self.peak_bytes["candidate"] / MIB
            parts.append(f"peak memory {peak:.1f} MiB, {self.memory:.2f} of the reference's")
        if self.speed is not None:
            ms = {role: f"{s * 1e3:.4g}" for role, s in self.step_s.items() if s}
            control = f", the control's {ms['control']}" if "control" in ms else ""
            took = f"a step takes {ms['candidate']} ms, the reference's {ms['reference']}{control}"
            parts += [took, self.caution]
        return "; ".join(filter(None, parts))

    @property
    def caution(self) -> str:
        """Why the times are not those of the program alone; "" if nothing is known."""
        if self.shares_gpus:
            return "ranks shared GPUs, so times mean nothing"
        return f"other runs under way meanwhile: {self.concurrent}" if self.concurrent else ""


class Timeline:
    """When the runs of a folder were under way."""

    def __init__(self, runs: Iterable[RunResult]) -> None:
        spans = [_span(run) for run in runs if run.outcome.wall_s > 0]
        self._begun = sorted(begun for begun, _ in spans)
        self._ended = sorted(ended for _, ended in spans)

    @property
    def wall_s(self) -> float:
        # Nothing is under way where as many have ended as have begun.
        gaps = zip(self._begun[1:], self._ended, strict=False)
        whole = self._ended[-1] - self._begun[0] if self._begun else 0.0
        return whole - sum(max(0.0, begun - ended) for begun, ended in gaps)

    def concurrent(self, run: RunResult) -> int:
        begun, ended = _span(run)
        return max(0, bisect_left(self._begun, ended) - bisect_right(self._ended, begun) - 1)


def cost(runs: Mapping[str, RunResult], timeline: Timeline) -> Cost:
    """Measure the runs of a case, by role, over the timeline of all runs of its folder."""
    return Cost(
        peak_bytes={role: max(map(peak_bytes, run.ranks), default=0) for role, run in runs.items()},
        step_s={role: typical_step_s(run) for role, run in runs.items()},
        concurrent=max((timeline.concurrent(run) for run in runs.values()), default=0),
        shares_gpus=any(shares_gpus(run) for run in runs.values()),
    )


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _span(run: RunResult) -> tuple[float, float]:
    return run.outcome.started_unix_s, run.outcome.started_unix_s + run.outcome.wall_s
