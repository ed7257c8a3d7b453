"""What will run, in which order, on how many slots, for how long; and what cannot run here.

    cases -> unique runs, those that share a reference together -> `arrange` -> `Queue`

A slot holds one rank: a GPU, or on the CPU one of a stated number. The widest runs come first, of
these the longest; whenever slots are free, the first run of the order that fits starts: list
scheduling, at most twice as long as the best order (R. L. Graham, SIAM J. Appl. Math. 17(2), 1969;
M. R. Garey and R. L. Graham, SIAM J. Comput. 4(2), 1975, for runs that need several slots).
Expected seconds (`harness.runner.estimates`) order the work; no verdict depends on them.
"""

import dataclasses
import gc
import heapq
import itertools
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fsdp_core.config import TrainConfig, built, not_built
from harness.faults.catalogue import CATALOGUE
from harness.provenance import package_version
from harness.records import CaseSpec, Json, RunSpec, each_of
from harness.repeats import in_turn, runs_of, untimed_runs
from harness.runner.estimates import Estimates, Seconds, by_size, num_parameters

GIB = 1 << 30
LEAST_BYTES = 2
"""Of a weight or an element of a hidden state: a bound that no run is below, not an estimate."""
_PACKAGES_OF_GPUS = (
    ("backend", "te", "transformer-engine"),
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

    Attributes:
        estimate_s: wall time of the schedule, start-up included.
        start_s: of it, before the first run.
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


def make_plan(
    cases: Iterable[CaseSpec],
    *,
    slots: int,
    jobs: int | None = None,
    expected: Estimates | None = None,
    memory_bytes: int | None = None,
    finished: Callable[[str], bool] | None = None,
    repeats: Mapping[str, Sequence[RunSpec]] | None = None,
) -> Plan:
    """Plan the runs of `cases`, or of a run folder what is left of them.

    Args:
        cases: what to run.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time; None: as many as fit on the slots.
        expected: what runs are expected to take; None for what their size says.
        memory_bytes: of all devices that runs may use together; None if it is not known.
        finished: of a run folder, whether the run of a key need not be repeated. Its skip reasons
            are kept: a case that was planned on a larger machine may have its verdict already, and
            the engine refuses runs that do not fit here.
        repeats: by case, runs that are left of a confirmation which was cut short.
    """
    if finished is None:
        cases = (_with_reason(case, slots, memory_bytes) for case in cases)

    def left(key: str) -> bool:
        return finished is None or not finished(key)

    cases, expected = tuple(cases), expected or Estimates(by_size())
    seconds, again = expected.seconds, repeats or {}
    gc.disable()  # it would walk tens of thousands of objects, none in a cycle, again and again
    try:
        serves: dict[str, dict[str, None]] = {}
        needed = ((c.id, runs_of(c)) for c in cases if not c.skip_reason)
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
    finally:
        gc.enable()
    start_s = expected.start_s if runs else 0.0
    length_s = makespan_s(order, slots=slots, jobs=jobs) + sum(job.seconds for job in alone)
    return Plan(
        slots=slots, jobs=jobs, runs=runs, cases=cases, estimate_s=start_s + length_s,
        start_s=start_s,
    )  # fmt: skip


# ---- order


class Job(NamedTuple):
    """A run to be started."""

    spec: RunSpec
    seconds: float


def arrange(
    cases: Iterable[CaseSpec], seconds: Seconds, *, left: Callable[[str], bool] = lambda key: True
) -> tuple[Job, ...]:
    """The runs of `cases` in the order in which they are to start, each once, but timed repeats.

    Runs that are compared with one reference stay together: one verdict does not wait for all.

    Args:
        cases: what is to be answered; those that are skipped need no run.
        seconds: what a run is expected to take.
        left: whether the run of a key is still to be made.
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


def makespan_s(
    order: Sequence[Job], *, slots: int, jobs: int | None = None, under_way: Sequence[Job] = ()
) -> float:
    """When the last run ends if each takes what is expected, by the rules of `Queue`.

    Args:
        order: as `arrange` gives it.
        slots: ranks that may run at a time.
        jobs: runs that may run at a time; None for no limit.
        under_way: runs that hold slots already, and the seconds that each has left.
    """
    now_s, free = 0.0, slots
    queue, seconds = Queue(order), {job.spec.key: job.seconds for job in order}
    running: list[tuple[float, int]] = []

    def can_start(spec: RunSpec) -> bool:
        fits = spec.world_size <= free and (jobs is None or len(running) < jobs)
        return fits or not running

    for job in under_way:
        free -= job.spec.world_size
        heapq.heappush(running, (job.seconds, job.spec.world_size))
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
    if case.skip_reason:
        return case
    specs = (case.reference, case.control, case.candidate)
    reason = next((why for spec in specs if (why := _cannot_run(spec, slots, memory_bytes))), "")
    return dataclasses.replace(case, skip_reason=reason) if reason else case


def _cannot_run(spec: RunSpec, slots: int, memory_bytes: int | None) -> str:
    """Why this machine cannot make the run, or ""."""
    if spec.world_size > slots:
        if spec.device == "cuda":
            return f"needs GPUs for {spec.world_size} ranks, this machine has them for {slots}"
        return f"needs {spec.world_size} rank slots, {slots} are stated (--slots)"
    if why := _lacks_device(spec) or _lacks_package(spec) or _lacks_compiler(spec):
        return why
    return _lacks_for_builtin(spec, memory_bytes) if spec.is_builtin else ""


def _lacks_device(spec: RunSpec) -> str:
    for fault in each_of(spec.plant):
        devices = CATALOGUE[fault.fault].devices
        if spec.device not in devices:
            legal = " or ".join(devices)
            return f"the fault {fault.fault} needs {legal}, this run is on {spec.device}"
    if "races" in spec.config.get("stress", ()) and spec.device != "cpu":
        return f"the stressor races needs cpu, this run is on {spec.device}"
    return ""


def _lacks_package(spec: RunSpec) -> str:
    for key, value, package in _PACKAGES_OF_GPUS:
        if spec.config.get(key) != value:
            continue
        if spec.device != "cuda":
            return f"{key} {value} needs a GPU, this run is on {spec.device}"
        if not package_version(package):
            return f"{key} {value} needs {package}, which is not installed"
    return ""


def _lacks_compiler(spec: RunSpec) -> str:
    if not spec.config.get("compile") or spec.config.get("compile_backend") != "inductor":
        return ""
    # Kernels of GPUs are started by compiled C, too.
    if any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return ""
    return "compile_backend inductor needs a C++ compiler, none is installed (aot_eager needs none)"


def _lacks_for_builtin(spec: RunSpec, memory_bytes: int | None) -> str:
    config, model = spec.config, spec.config["model"]
    if memory_bytes is not None:  # no memory of this machine can hold the run, however sharded
        hidden = config["micro_batch_size"] * model["seq"] * model["hidden"]
        for what, elements in (
            ("one copy of the weights", num_parameters(model)),
            ("a microbatch between two layers", hidden),
        ):
            if (need := LEAST_BYTES * elements) > memory_bytes:
                gib, have = f"{need / GIB:,.0f} GiB", f"{memory_bytes / GIB:,.0f} GiB"
                return f"{what} needs {gib} of memory, this machine has {have}"
    path = config.get("data", {}).get("path")
    if path is not None and not Path(path).exists():
        return f"data.path {path} is not on this machine"
    # Rebuilding ten thousand configurations takes seconds: only where there is a rule to ask.
    error = not_built(TrainConfig.from_dict(config)) if built.NOT_BUILT else None
    return str(error) if error else ""
