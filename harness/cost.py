"""What a candidate takes beside its reference: memory and time, of the runs that were compared.

A case's three runs are enough for memory. For time they are a first look: one run a leg, digests
included, on a machine that other runs may have shared. So the control stands beside: how far it is
from the reference is how far two equal programs were apart just then. What may fail a case is the
check `throughput`, which has runs of its own.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from harness.checks.memory import peak_bytes
from harness.checks.throughput import step_times
from harness.records import RunResult
from harness.shared_gpus import shares_gpus

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Memory and step time of the legs of one case; 0 and None where nothing was measured.

    Attributes:
        peak_bytes: of each leg's worst rank.
        step_s: of each leg, the median over the later half of its steps of the slowest rank's time.
        neighbours: the most runs that were under way on the machine during a run of the case.
        shares_gpus: whether ranks of one run shared a GPU, where times mean nothing.
    """

    peak_bytes: Mapping[str, int]
    step_s: Mapping[str, float | None]
    neighbours: int
    shares_gpus: bool

    @property
    def memory(self) -> float | None:
        """The candidate's peak over the reference's."""
        ours, theirs = (self.peak_bytes.get(leg, 0) for leg in ("reference", "candidate"))
        return theirs / ours if ours and theirs else None

    @property
    def speed(self) -> float | None:
        """Reference's step time over the candidate's: above 1, the candidate is faster."""
        return self._speed_of("candidate")

    @property
    def control_speed(self) -> float | None:
        """The same of the reference's second run: 1 but for noise."""
        return self._speed_of("control")

    @property
    def words(self) -> str:
        """Both on one line; "" if neither was measured."""
        parts = []
        if self.memory is not None:
            peak = self.peak_bytes["candidate"] / MIB
            parts.append(f"peak memory {peak:.1f} MiB, {self.memory:.2f} of the reference's")
        if self.speed is not None:
            again = "" if self.control_speed is None else f", its second run {self._ms('control')}"
            parts.append(
                f"a step takes {self._ms('candidate')} ms, the reference's "
                f"{self._ms('reference')}{again}"
            )
            parts += [self.caution] if self.caution else []
        return "; ".join(parts)

    def _ms(self, leg: str) -> str:
        return f"{(self.step_s.get(leg) or 0.0) * 1e3:.4g}"

    def _speed_of(self, leg: str) -> float | None:
        ours, theirs = self.step_s.get("reference"), self.step_s.get(leg)
        return ours / theirs if ours and theirs else None

    @property
    def caution(self) -> str:
        """Why the times are not those of the program alone; "" if nothing is known."""
        if self.shares_gpus:
            return "ranks shared GPUs, so times mean nothing"
        if self.neighbours:
            other = "another run was" if self.neighbours == 1 else f"{self.neighbours} others were"
            return f"{other} under way beside"
        return ""


class Timeline:
    """When the runs of a folder were under way."""

    def __init__(self, runs: Iterable[RunResult]) -> None:
        spans = [_span(run) for run in runs if run.outcome.wall_s > 0]
        self._begun = sorted(begun for begun, _ in spans)
        self._ended = sorted(ended for _, ended in spans)

    def neighbours(self, run: RunResult) -> int:
        """How many other runs were under way at some time of this one."""
        if run.outcome.wall_s <= 0:
            return 0
        begun, ended = _span(run)
        return bisect_left(self._begun, ended) - bisect_right(self._ended, begun) - 1


def beside(legs: Mapping[str, RunResult], timeline: Timeline) -> Beside:
    """Look at the legs of a case.

    Args:
        legs: reference, control and candidate, as far as they were made.
        timeline: of every run of the folder, theirs included.
    """
    return Beside(
        peak_bytes={
            leg: max((peak_bytes(rank) for rank in run.ranks), default=0)
            for leg, run in legs.items()
        },
        step_s={leg: _step_s(run) for leg, run in legs.items()},
        neighbours=max((timeline.neighbours(run) for run in legs.values()), default=0),
        shares_gpus=any(shares_gpus(run) for run in legs.values()),
    )


def _span(run: RunResult) -> tuple[float, float]:
    return run.outcome.started_unix_s, run.outcome.started_unix_s + run.outcome.wall_s


def _step_s(run: RunResult) -> float | None:
    times = step_times(run, max((len(rank.steps) for rank in run.ranks), default=0) // 2)
    return median(times) if times and not run.outcome.what else None
