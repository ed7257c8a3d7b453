"""What a candidate costs: memory and step time of the runs of a case.

Three runs are enough for memory. For time they are a first look: one run each, digests included,
on a machine that other runs may have shared; how far the control is from the reference says how far
two equal programs were from each other just then. What may fail a case is the check `throughput`,
which has runs of its own.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from harness.checks.memory import peak_bytes
from harness.checks.speed import step_times
from harness.infrastructure import shares_gpus
from harness.records import RunResult

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Memory and step time by role (reference, control, candidate); 0 and None if not measured.

    Attributes:
        peak_bytes: of the worst rank.
        step_s: median over the later half of the steps of the slowest rank's time.
        concurrent: the most other runs that were under way during a run of the case.
        shares_gpus: whether ranks of one run shared a GPU, where times mean nothing.
    """

    peak_bytes: Mapping[str, int]
    step_s: Mapping[str, float | None]
    concurrent: int
    shares_gpus: bool

    @property
    def memory(self) -> float | None:
        """The candidate's peak over the reference's."""
        ours, theirs = (self.peak_bytes.get(role, 0) for role in ("reference", "candidate"))
        return theirs / ours if ours and theirs else None

    @property
    def speed(self) -> float | None:
        """Reference's step time over the candidate's: above 1, the candidate is faster."""
        return self._speed_of("candidate")

    @property
    def control_speed(self) -> float | None:
        """The same of the control: 1 but for noise."""
        return self._speed_of("control")

    @property
    def words(self) -> str:
        """Both on one line; "" if neither was measured."""
        parts = []
        if self.memory is not None:
            peak = self.peak_bytes["candidate"] / MIB
            parts.append(f"peak memory {peak:.1f} MiB, {self.memory:.2f} of the reference's")
        if self.speed is not None:
            control = "" if self.control_speed is None else f", the control's {self._ms('control')}"
            parts.append(
                f"a step takes {self._ms('candidate')} ms, the reference's "
                f"{self._ms('reference')}{control}"
            )
            parts += [self.caution] if self.caution else []
        return "; ".join(parts)

    @property
    def caution(self) -> str:
        """Why the times are not those of the program alone; "" if nothing is known."""
        if self.shares_gpus:
            return "ranks shared GPUs, so times mean nothing"
        runs = "run was" if self.concurrent == 1 else "runs were"
        return f"{self.concurrent} other {runs} under way meanwhile" if self.concurrent else ""

    def _ms(self, role: str) -> str:
        return f"{(self.step_s.get(role) or 0.0) * 1e3:.4g}"

    def _speed_of(self, role: str) -> float | None:
        ours, theirs = self.step_s.get("reference"), self.step_s.get(role)
        return ours / theirs if ours and theirs else None


class Timeline:
    """When the runs of a folder were under way."""

    def __init__(self, runs: Iterable[RunResult]) -> None:
        spans = [_span(run) for run in runs if run.outcome.wall_s > 0]
        self._begun = sorted(begun for begun, _ in spans)
        self._ended = sorted(ended for _, ended in spans)

    def concurrent(self, run: RunResult) -> int:
        """How many other runs were under way at some time of this one."""
        if run.outcome.wall_s <= 0:
            return 0
        begun, ended = _span(run)
        return bisect_left(self._begun, ended) - bisect_right(self._ended, begun) - 1


def cost(runs: Mapping[str, RunResult], timeline: Timeline) -> Cost:
    """Measure the runs of a case.

    Args:
        runs: reference, control and candidate, as far as there are any.
        timeline: of every run of the folder, theirs included.
    """
    return Cost(
        peak_bytes={
            role: max((peak_bytes(rank) for rank in run.ranks), default=0)
            for role, run in runs.items()
        },
        step_s={role: _step_s(run) for role, run in runs.items()},
        concurrent=max((timeline.concurrent(run) for run in runs.values()), default=0),
        shares_gpus=any(shares_gpus(run) for run in runs.values()),
    )


def _span(run: RunResult) -> tuple[float, float]:
    return run.outcome.started_unix_s, run.outcome.started_unix_s + run.outcome.wall_s


def _step_s(run: RunResult) -> float | None:
    times = step_times(run, max((len(rank.steps) for rank in run.ranks), default=0) // 2)
    return median(times) if times and not run.outcome.what else None
