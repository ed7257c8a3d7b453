"""How long runs take, and what they cost in memory and step time.

    equal work on this kind of machine   the median of its newest times
    similar runs: preset, ranks, device  start-up, and a step's time for its own steps
    nothing known                        `estimate_s`, a model of its size, from the constants below

Only runs that ended well count, unless the work never did. The model's arithmetic is 6 x parameters
that a token meets x tokens of a step, spread over the cores on the CPU and over the ranks on CUDA.
"""

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from harness.checks.memory import peak_bytes
from harness.checks.speed import matrix_weights, step_times
from harness.errors import HarnessError
from harness.history import History, machine_kind
from harness.history.ledger import work_of
from harness.infrastructure import shares_gpus
from harness.machine import Machine, num_cores
from harness.records import RunResult, RunSpec, dumps
from harness.repeats import SLOWDOWN

Device = Literal["cpu", "cuda"]
Seconds = Callable[[RunSpec], float]
"""What a run is expected to take."""
MIB = 1 << 20
CORES = 8
"""Of the machine that shards are cut for: the same whoever cuts."""
NEWEST = 5
"""As many times of equal work, or folders, are looked at."""
MAX_RUNS = 200_000
_START_S = {"cpu": (1.0, 0.05), "cuda": (6.0, 0.5)}
"""Seconds of a run's start-up, and more for each rank."""
_STEP_S = {"cpu": 0.05, "cuda": 0.02}
"""Host time of a step."""
_FLOPS = {"cpu": 5e9, "cuda": 1e14}
_FOREIGN_START_S = 8.0
"""Of a program in a fresh interpreter, most of it the import of torch."""
_SERVER_START_S = 4.0
"""From the run folder to the first run: the server imports torch."""


@dataclass(frozen=True)
class Estimates:
    """Expected seconds of runs, and of what comes before the first one."""

    seconds: Seconds
    start_s: float = 0.0


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
            with History.open(database) as history:
                return expected(history, machine_kind(json.loads(dumps(here))), num_cores())
    return Estimates(by_size(), _SERVER_START_S)


def expected(history: History, machine: str, cores: int) -> Estimates:
    """What the history knows of the time of runs on a kind of machine; read once, asked often."""
    ended, failed, starts, steps = (defaultdict[object, list[float]](list) for _ in range(4))
    for work, what, wall_s, preset, world_size, device, num_steps, step_s in history.query(
        "SELECT work, what, wall_s, preset, world_size, runs.device, steps, step_s "
        "FROM runs JOIN folders ON runs.folder = folders.id "
        "WHERE folders.machine = ? AND wall_s > 0 AND typeof(wall_s) = 'real' AND what NOT IN "
        f"('interrupted', 'not_run') ORDER BY created DESC, started_unix_s DESC LIMIT {MAX_RUNS}",
        [machine],
    ):
        (failed if what else ended)[work].append(wall_s)
        if not what and preset and isinstance(step_s, float):
            similar = (preset, world_size, device)
            starts[similar].append(max(0.0, wall_s - num_steps * step_s))
            steps[similar].append(step_s)
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

    before_s = []  # from the making of a run folder to its first run
    for created, first in history.query(
        "SELECT created, MIN(started_unix_s) FROM runs JOIN folders ON runs.folder = folders.id "
        "WHERE folders.machine = ? AND started_unix_s > 0 GROUP BY folders.id "
        f"ORDER BY created DESC LIMIT {NEWEST}", [machine],
    ):  # fmt: skip
        with suppress(TypeError, ValueError):
            before_s.append(max(0.0, float(first) - datetime.fromisoformat(created).timestamp()))
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

    def concurrent(self, run: RunResult) -> int:
        """How many other runs were under way at some time of this one."""
        begun, ended = _span(run)
        return max(0, bisect_left(self._begun, ended) - bisect_right(self._ended, begun) - 1)


def cost(runs: Mapping[str, RunResult], timeline: Timeline) -> Cost:
    """Measure the runs of a case, by role, over the timeline of all runs of its folder."""
    return Cost(
        peak_bytes={role: max(map(peak_bytes, run.ranks), default=0) for role, run in runs.items()},
        step_s={role: _step_s(run) for role, run in runs.items()},
        concurrent=max((timeline.concurrent(run) for run in runs.values()), default=0),
        shares_gpus=any(shares_gpus(run) for run in runs.values()),
    )


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _span(run: RunResult) -> tuple[float, float]:
    return run.outcome.started_unix_s, run.outcome.started_unix_s + run.outcome.wall_s


def _step_s(run: RunResult) -> float | None:
    times = step_times(run, max((len(rank.steps) for rank in run.ranks), default=0) // 2)
    return median(times) if times and not run.outcome.what else None
