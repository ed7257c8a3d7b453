"""How long runs are expected to take: what a history says, else what their size says.

    equal work on this kind of machine           median of its times
    similar runs: preset, ranks, device          start-up, and a step's time for its own steps
    nothing known                                `plan.estimate_s`

Only runs that ended well count, unless the work never did: then it is expected to end as it always
has, a hang after its time limit for instance.
"""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

from harness.errors import HarnessError
from harness.history import History, machine_kind
from harness.history.entries import work_of
from harness.machine import Machine, num_cores
from harness.records import RunSpec, dumps
from harness.repeats import SLOWDOWN
from harness.runner.plan import estimate_s
from harness.runner.schedule import Seconds

CORES = 8
"""Of the machine that shards are cut for: the same for every shard, whoever cuts."""

MAX_RUNS = 200_000
"""The newest attempts that are looked at."""


def expected_here(database: Path | None, machine: str) -> Seconds:
    """For the order of runs on this kind of machine.

    A history that is missing or damaged says nothing: the runs are made all the same, and whoever
    records them says so.
    """
    cores = num_cores()
    try:
        if database is not None and database.exists():
            with History.open(database) as history:
                return expected(history, machine, cores)
    except HarnessError:
        pass
    return lambda spec: estimate_s(spec, cores)


def expected_anywhere(database: Path | None) -> Seconds:
    """For a cut into shards: the same whichever machine asks, if the history is the same.

    Raises:
        HarnessError: the history cannot be read. Another cut than the other shards' would be worse
            than none.
    """
    if database is None:
        # Of the CPU, even if this machine has GPUs: another shard's may have none.
        return lambda spec: estimate_s(spec, CORES, "cpu")
    with History.open(database) as history:
        # The kind of machine that most runs were made on.
        busiest = history.query(
            "SELECT folders.machine FROM runs JOIN folders ON runs.folder = folders.id "
            "GROUP BY 1 ORDER BY COUNT(*) DESC, 1 LIMIT 1"
        )
        return expected(history, str(busiest[0][0]) if busiest else "", CORES)


def kind_of(here: Machine) -> str:
    """The kind of a machine, as the history words it."""
    return machine_kind(json.loads(dumps(here)))


def expected(history: History, machine: str, cores: int) -> Seconds:
    """What the history knows of the time of runs on a kind of machine; read once, asked often.

    Rows are not held against their digests: these are estimates, and a wrong one costs a minute.
    """
    ended, failed, starts, steps = (defaultdict[object, list[float]](list) for _ in range(4))
    for work, what, wall_s, preset, world_size, device, num_steps, step_s in history.query(
        "SELECT work, what, wall_s, preset, world_size, runs.device, steps, step_s "
        "FROM runs JOIN folders ON runs.folder = folders.id "
        "WHERE folders.machine = ? AND wall_s > 0 AND typeof(wall_s) = 'real' "
        f"AND what NOT IN ('interrupted', 'not_run') ORDER BY created DESC LIMIT {MAX_RUNS}",
        [machine],
    ):
        (failed if what else ended)[work].append(wall_s)
        if not what and preset and isinstance(step_s, float):
            similar = (preset, world_size, device)
            starts[similar].append(max(0.0, wall_s - num_steps * step_s))
            steps[similar].append(step_s)
    by_work, start, step = (
        {name: median(values) for name, values in found.items()}
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

    return seconds
