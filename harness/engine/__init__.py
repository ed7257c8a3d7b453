"""What an engine is: runs are started and waited for, and take one slot a rank.

With devices, slot i stands for device i. A run that is `placed` says itself on which GPU, or pinned
to which CPU cores, each rank is, and has the machine to itself.
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from harness.engine.machine import core_set, cores_in
from harness.errors import UsageError
from harness.records import RunOutcome, RunSpec

ENTRY = "harness.worker.main:rank_main"
"""What a rank is, `module:function` of a `RankMain`, where nothing else is said."""


class Engine(ABC):
    """Starts runs and says what happened to them; a `with` statement closes it."""

    slots: int  # how many ranks may run at the same time

    @abstractmethod
    def check(self, spec: RunSpec) -> None:
        """Refuse a run that could never start here (`UsageError`): too many ranks, no device."""

    @abstractmethod
    def can_start(self, spec: RunSpec) -> bool:
        """Whether there is room for the run now."""

    @abstractmethod
    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        """Start a run in its own folder; `can_start` must be true.

        Raises `UsageError` as `check`, `Infrastructure` if the engine or the disk refused.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended since the last call; empty if none did in time or none is left."""

    @abstractmethod
    def cancel(self) -> None:
        """Kill every run. What they recorded stays; they get no outcome. The next start works."""

    def close(self) -> None:
        self.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(kw_only=True)
class ActiveRun:
    """A run under way, and since when, by both clocks."""

    spec: RunSpec
    folder: Path
    attempt: int
    started_unix_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)


class Slots:
    """Which slots are free, for at most `jobs` runs. Hands out the lowest free ones."""

    def __init__(
        self, num_slots: int, devices: Sequence[str] = (), jobs: int | None = None
    ) -> None:
        if num_slots < 1 or (jobs is not None and jobs < 1):
            raise UsageError(f"expected at least 1 slot and job, got {num_slots}, {jobs}")
        if devices and len(devices) != num_slots:
            raise UsageError(f"expected {num_slots} devices, one a slot, got {len(devices)}")
        self.num_slots = num_slots
        self._devices, self._jobs = tuple(devices), jobs
        self._free = set(range(num_slots))
        self._taken: dict[str, tuple[int, ...]] = {}

    def check(self, spec: RunSpec) -> None:
        if spec.world_size < 1:
            raise UsageError(f"run {spec.key}: expected at least 1 rank, got {spec.world_size}")
        if spec.device == "cuda" and not self._devices:
            raise UsageError(f"run {spec.key} needs {spec.world_size} GPUs, this machine has none")
        if spec.world_size > self.num_slots:
            noun = "GPUs" if spec.device == "cuda" else "slots"
            raise UsageError(
                f"run {spec.key} needs {spec.world_size} {noun}, there are {self.num_slots}"
            )
        if spec.placed:
            self._check_placed(spec)

    def _check_placed(self, spec: RunSpec) -> None:
        if spec.device == "cuda":
            legal = f"a GPU of {', '.join(dict.fromkeys(self._devices))}"
            is_here = set(self._devices).issuperset(spec.placed)
        else:
            cores = os.sched_getaffinity(0)
            legal = f"cores of {core_set(cores)}"
            is_here = all(cores_in(each) <= cores for each in spec.placed)
        if len(spec.placed) != spec.world_size or not is_here:
            raise UsageError(
                f"run {spec.key}: expected {legal} for each of {spec.world_size} ranks, got "
                f"{'; '.join(spec.placed)}"
            )

    def fits(self, spec: RunSpec) -> bool:
        full = self._jobs is not None and len(self._taken) >= self._jobs
        if spec.placed:  # alone: where another run is would be a difference, too
            return not full and not self._taken
        return not full and spec.world_size <= len(self._free)

    def take(self, spec: RunSpec) -> tuple[str, ...]:
        """Take the slots of a run that fits; the devices it may see (none for a run on the CPU)."""
        self.check(spec)
        if spec.key in self._taken or not self.fits(spec):
            raise RuntimeError(f"no room for run {spec.key}, or it is under way")
        mine = tuple(sorted(self._free)[: None if spec.placed else spec.world_size])
        self._free -= set(mine)
        self._taken[spec.key] = mine
        if spec.placed:
            return spec.placed if spec.device == "cuda" else ()
        return tuple(self._devices[slot] for slot in mine) if spec.device == "cuda" else ()

    def pass_on(self, key: str, heir: str) -> None:
        self._taken[heir] = self._taken.pop(key)

    def release(self, key: str) -> None:
        self._free |= set(self._taken.pop(key))
