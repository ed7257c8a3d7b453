"""How long runs are expected to take: what a history says, else what their size says."""

import json
from pathlib import Path

from harness.errors import HarnessError
from harness.history import CostModel, History, cost_model, machine_kind
from harness.machine import Machine, num_cores
from harness.plan import estimate_s
from harness.records import RunSpec, dumps
from harness.schedule import Seconds

CORES = 8
"""Of the machine that shards are cut for: the same for every shard, whoever cuts."""


def expected_here(database: Path | None, machine: str) -> Seconds:
    """For the order of runs on this kind of machine.

    A history that is missing or damaged says nothing: the runs are made all the same, and whoever
    records them will tell.
    """
    model: CostModel | None = None
    if database is not None and database.exists():
        try:
            with History.open(database) as history:
                model = cost_model(history, machine)
        except HarnessError:
            model = None
    return _seconds(model, num_cores())


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
        busiest = history.connection.execute(
            "SELECT folders.machine FROM runs JOIN folders ON runs.folder = folders.id "
            "GROUP BY 1 ORDER BY COUNT(*) DESC, 1 LIMIT 1"
        ).fetchone()
        return _seconds(cost_model(history, "" if busiest is None else str(busiest[0])), CORES)


def kind_of(here: Machine) -> str:
    """The kind of a machine, as the history words it."""
    return machine_kind(json.loads(dumps(here)))


def _seconds(model: CostModel | None, cores: int) -> Seconds:
    def seconds(spec: RunSpec) -> float:
        known = None if model is None else model.expected_seconds(spec)
        return estimate_s(spec, cores) if known is None else known

    return seconds
