"""An engine without processes: what a run leaves behind is written when it starts.

The fault that is planted in a run says what it leaves: `ulp` other weights, `sigkill` no end.
"""

from pathlib import Path

from harness.engine.base import Slots
from harness.records import EndRecord, RankExit, RunOutcome, RunSpec, What
from harness.runner.launch import Prepared
from harness.store import begin_run, save_outcome
from tests.planted.stub_ranks import Stream, initial_record, start_record, step_record


class PretendEngine:
    """Runs end in the order in which they were started; `made` names each."""

    made: list[str]

    def __init__(self, prepared: Prepared) -> None:
        self._slots = Slots(prepared.plan.slots)
        self._under_way: list[tuple[RunSpec, RunOutcome, Path]] = []
        self.made = MADE

    @property
    def slots(self) -> int:
        return self._slots.num_slots

    def check(self, spec: RunSpec) -> None:
        self._slots.check(spec)

    def can_start(self, spec: RunSpec) -> bool:
        return self._slots.fits(spec)

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self._slots.take(spec)
        begin_run(folder, spec)
        self.made.append(spec.key)
        fault = spec.plant.fault if spec.plant else ""
        for rank in range(spec.world_size):
            _write(folder, spec, rank, fault)
        what: What = "killed" if fault == "sigkill" else ""
        code = -9 if what else 0
        outcome = RunOutcome(
            key=spec.key, what=what, message="rank 0 was killed" if what else "",
            culprit_rank=0 if what else None,
            ranks=tuple(RankExit(rank=rank, code=code) for rank in range(spec.world_size)),
            started_unix_s=1.0, wall_s=1.0, attempt=attempt,
        )  # fmt: skip
        self._under_way.append((spec, outcome, folder))

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        if not self._under_way:
            return []
        spec, outcome, folder = self._under_way.pop(0)
        self._slots.release(spec.key)
        save_outcome(folder, outcome)
        return [outcome]

    def cancel(self) -> None:
        while self._under_way:
            self._slots.release(self._under_way.pop()[0].key)

    def close(self) -> None:
        self.cancel()


MADE: list[str] = []


def _write(folder: Path, spec: RunSpec, rank: int, fault: str) -> None:
    stream = Stream(folder, rank)
    stream.write(start_record(spec, rank))
    stream.write(initial_record(rank))
    steps = spec.config["steps"]
    for step in range(steps):
        record = step_record(step, rank)
        if fault == "ulp":
            record.digests["weights"] = "1" * 32
        stream.write(record)
    if fault != "sigkill":
        stream.write(EndRecord(rank=rank, steps=steps, peak_bytes=1, startup_s=0.0, wall_s=0.0))
    stream.file.close()
