"""What an engine is: slots, runs started and waited for; and who gets which slot.

A run takes one slot a rank. With devices, slot i stands for device i: runs that are under way at
the same time share one only if it is named more than once (`gpus.shared`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from harness.errors import UsageError
from harness.records import RunOutcome, RunSpec


class Engine(Protocol):
    """Starts runs and says what happened to them."""

    @property
    def slots(self) -> int:
        """How many ranks may run at the same time."""
        ...

    def check(self, spec: RunSpec) -> None:
        """Refuse a run that could never start here.

        Raises:
            UsageError: more ranks than slots, or a device that is not there.
        """
        ...

    def can_start(self, spec: RunSpec) -> bool:
        """Whether there is room for the run now."""
        ...

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        """Start a run in its own folder; `can_start` must be true.

        Raises:
            UsageError: see `check`.
            Infrastructure: the engine or the disk refused.
        """
        ...

    def adopt(self, spec: RunSpec, folder: Path) -> bool:
        """Go on with a run that an earlier harness started in `folder`, where engines can.

        `can_start` must be true. If the answer is yes the run counts as started: `wait` gives its
        outcome, even if it has ended in the meantime. If it is no, nothing has changed.

        Raises:
            Infrastructure: it cannot be found out.
        """
        ...

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended since the last call; empty if none did in time or none is left."""
        ...

    def cancel(self) -> None:
        """Kill every run. What they recorded stays; they get no outcome."""
        ...

    def close(self) -> None:
        """Kill every run and give back what the engine holds."""
        ...


class Closing:
    """An engine that a `with` statement closes."""

    def close(self) -> None:
        """See `Engine.close`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Slots:
    """Which slots are free. Hands out the lowest free ones."""

    def __init__(
        self, num_slots: int, devices: Sequence[str] = (), jobs: int | None = None
    ) -> None:
        """Make `num_slots` free slots for at most `jobs` runs at a time.

        Raises:
            UsageError: a count below 1, or as many devices as slots are not given.
        """
        if num_slots < 1:
            raise UsageError(f"expected at least 1 slot, got {num_slots}")
        if jobs is not None and jobs < 1:
            raise UsageError(f"expected at least 1 job, got {jobs}")
        if devices and len(devices) != num_slots:
            raise UsageError(f"expected {num_slots} devices, one a slot, got {len(devices)}")
        self.num_slots = num_slots
        self._devices, self._jobs = tuple(devices), jobs
        self._free = set(range(num_slots))
        self._taken: dict[str, tuple[int, ...]] = {}

    def check(self, spec: RunSpec) -> None:
        """Refuse a run that could never start.

        Raises:
            UsageError: more ranks than slots, or a GPU run without GPUs.
        """
        if spec.world_size < 1:
            raise UsageError(f"run {spec.key}: expected at least 1 rank, got {spec.world_size}")
        if spec.device == "cuda" and not self._devices:
            raise UsageError(f"run {spec.key} needs {spec.world_size} GPUs, this machine has none")
        if spec.world_size > self.num_slots:
            noun = "GPUs" if spec.device == "cuda" else "slots"
            raise UsageError(
                f"run {spec.key} needs {spec.world_size} {noun}, there are {self.num_slots}"
            )

    def fits(self, spec: RunSpec) -> bool:
        """Whether the run can start now."""
        full = self._jobs is not None and len(self._taken) >= self._jobs
        return not full and spec.world_size <= len(self._free)

    def take(self, spec: RunSpec) -> tuple[str, ...]:
        """Take the slots of a run; the devices it may see (none for a run on the CPU).

        Raises:
            UsageError: see `check`.
            RuntimeError: no room now, or the run has slots already.
        """
        self.check(spec)
        if spec.key in self._taken or not self.fits(spec):
            raise RuntimeError(f"no room for run {spec.key}, or it is under way")
        mine = tuple(sorted(self._free)[: spec.world_size])
        self._free -= set(mine)
        self._taken[spec.key] = mine
        return tuple(self._devices[slot] for slot in mine) if spec.device == "cuda" else ()

    def release(self, key: str) -> None:
        """Give the slots of a run back."""
        self._free |= set(self._taken.pop(key))
