"""How long a run will take, from how long it took: medians, by kind of machine.

    the same run on this kind of machine         median of its times
    equal work (another replica, time limit)     the same
    similar runs: preset, ranks, device          start-up and a step's time apart, for its own steps
    nothing known                                None

Only runs that ended well count, unless the run never did: then it is expected to end as it always
has, a hang after its time limit for instance.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from harness.history.database import refusals
from harness.history.entries import work_of
from harness.history.ledger import History
from harness.records import CaseSpec, RunSpec
from harness.samples import SLOWDOWN

Similar = tuple[str, int, str]
"""Preset, ranks, device."""
MAX_RUNS = 200_000
"""The newest attempts that are looked at."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Expected seconds on one kind of machine. Made once, asked often.

    Attributes:
        machine: kind of machine, as `machine_kind` words it.
        by_key: of runs that were made, by key.
        by_work: of the work that was done.
        start: of similar runs, seconds that are not steps.
        step: of similar runs, seconds a step.
    """

    machine: str
    by_key: dict[str, float] = field(default_factory=dict)
    by_work: dict[str, float] = field(default_factory=dict)
    start: dict[Similar, float] = field(default_factory=dict)
    step: dict[Similar, float] = field(default_factory=dict)

    def expected_seconds(self, wanted: CaseSpec | RunSpec | str) -> float | None:
        """Seconds that a run takes, or the three runs of a case; None if nothing is known.

        Args:
            wanted: a case, a run, or the key of a run.
        """
        if isinstance(wanted, str):
            return self.by_key.get(wanted)
        if isinstance(wanted, CaseSpec):
            legs = [wanted.reference, wanted.control, wanted.candidate]
            seconds = [self.expected_seconds(leg) for leg in legs]
            known = [leg for leg in seconds if leg is not None]
            return sum(known) if len(known) == len(legs) else None
        if (seen := self.by_work.get(work_of(wanted))) is not None:
            return seen
        model = wanted.config.get("model")
        preset = str(model.get("preset", "")) if isinstance(model, dict) else ""
        similar = (preset, wanted.world_size, wanted.device)
        if similar not in self.start:
            return None
        step_s = self.step[similar] * (SLOWDOWN if wanted.rounding else 1.0)
        return self.start[similar] + int(wanted.config.get("steps", 0)) * step_s


def cost_model(history: History, machine: str) -> CostModel:
    """What the history knows of the time of runs on a kind of machine."""
    joined = "runs JOIN folders ON runs.folder = folders.id"
    wanted = ", ".join(f'runs."{name}"' for name in _Seen._fields)
    with refusals("read", history.path):
        rows = history.connection.execute(
            f"SELECT {wanted} FROM {joined} WHERE folders.machine = ? AND runs.wall_s > 0 "
            f"AND typeof(runs.wall_s) = 'real' "
            f"AND runs.what NOT IN ('interrupted', 'not_run') "
            f"ORDER BY folders.created DESC LIMIT {MAX_RUNS}",
            [machine],
        ).fetchall()
    runs = [_Seen(*row) for row in rows]
    starts, steps = defaultdict[Similar, list[float]](list), defaultdict[Similar, list[float]](list)
    for run in runs:
        if run.what or not isinstance(run.step_s, float) or not run.preset:
            continue
        similar = (run.preset, run.world_size, run.device)
        starts[similar].append(max(0.0, run.wall_s - run.steps * run.step_s))
        steps[similar].append(run.step_s)
    return CostModel(
        machine=machine,
        by_key=_medians([(run.key, run) for run in runs]),
        by_work=_medians([(run.work, run) for run in runs]),
        start={similar: median(values) for similar, values in starts.items()},
        step={similar: median(values) for similar, values in steps.items()},
    )


class _Seen(NamedTuple):
    """What is asked of a run. Rows are not held against their digests: these are estimates, asked
    for before every matrix, and a wrong one costs a minute."""

    key: str
    work: str
    what: str
    wall_s: float
    preset: str
    world_size: int
    device: str
    steps: int
    step_s: float | None


def _medians(runs: list[tuple[str, _Seen]]) -> dict[str, float]:
    well, badly = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for name, run in runs:
        (badly if run.what else well)[name].append(run.wall_s)
    return {name: median(values) for name, values in {**badly, **well}.items()}
