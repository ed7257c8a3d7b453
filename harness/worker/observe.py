"""Turns a trainer's static outputs into record lines, without making the device wait each step.

After every step the outputs are packed into one row of an int32 ring on the device; every
`flush_every` steps the ring is copied to the host once and written as step records. Floats travel
as their bits.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_core.graph.digest import NUM_COLUMNS, digest_hex
from fsdp_core.graph.digest_words import NUM_LANES
from fsdp_core.graph.taps import PLACE_COLUMN
from fsdp_core.train import StepOutputs, Trainer
from fsdp_core.train.stressed import StressedTrainer
from harness.records import UNFINISHED, EventRecord, FloatBits, InitialRecord, StepRecord
from harness.worker.record_file import RecordFile
from harness.worker.step_clock import StepClock

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Observer:
    """Collects one rank's steps and writes their records."""

    def __init__(self, trainer: Trainer, rank: int, file: RecordFile) -> None:
        self._trainer, self._rank, self._file = trainer, rank, file
        self._groups = list(trainer.digested)
        width = self._pack(trainer.outputs).numel()
        rows = trainer.config.flush_every
        device = trainer.device.torch_device
        self._ring = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._pending: list[_HostFacts] = []
        self._pointers = trainer.pointer_changes() if trainer.config.ledger else None
        self.pointer_changes, self.moved = 0, dict[str, int]()
        self._clock = StepClock(trainer.device, trainer.stream, rows)

    @property
    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Names per digest group, in digest order."""
        names = {group: tuple(named) for group, (named, _) in self._trainer.digested.items()}
        return names | {"rng": tuple(self._trainer.rng_states())}

    def initial(self) -> InitialRecord:
        """The state before the first step; once, as it waits for the device."""
        trainer = self._trainer
        digests, nonfinite = {"rng": self._rng()}, {}
        for group, rows in trainer.digest_state().items():
            digests[group], bad = self._of_group(group, rows)
            if bad:
                nonfinite[group] = bad
        return InitialRecord(rank=self._rank, digests=digests, nonfinite=nonfinite)

    def observe(self, step: int) -> None:
        """Take the outputs of `step`; writes records when the ring is full."""
        trainer = self._trainer
        with trainer.device.on(trainer.stream):
            self._ring[len(self._pending)].copy_(self._pack(trainer.outputs))
        self._clock.tick()
        rng = self._rng()
        device, moved = trainer.device, self._count_moved(step)
        # What a stressor holds in its turn is no memory of the program's.
        lent = trainer.stress_bytes if isinstance(trainer, StressedTrainer) else 0
        live = device.live_bytes() - lent
        facts = _HostFacts(step, rng, live, device.peak_bytes(), moved, host_bytes())
        self._pending.append(facts)
        if len(self._pending) == len(self._ring):
            self.flush()

    def _rng(self) -> str:
        states = self._trainer.rng_states().values()
        return "".join(_blake(state.numpy().tobytes()) for state in states)

    def _of_group(self, group: str, rows: torch.Tensor) -> tuple[str, tuple[str, ...]]:
        """Digests of a group out of its rows on the host, and who of it is not finite."""
        text, counts = digest_hex(rows)
        names = self._trainer.digested[group][0]
        return text, tuple(n for n, count in zip(names, counts, strict=True) if count)

    def begin(self) -> None:
        """Forget the taps of the last step, once all have read them: `unfinished` tells of this."""
        trainer = self._trainer
        with trainer.device.on(trainer.stream):
            trainer.taps.begin()

    def unfinished(self, step: int) -> EventRecord | None:
        """What modules have handled in a step that failed; None where no tap looks."""
        rows = self._trainer.taps.rows
        if not rows.numel():
            return None
        with self._trainer.device.on(self._trainer.stream):
            text = self._taps_text(rows.flatten().cpu())
        return EventRecord(name=UNFINISHED, rank=self._rank, step=step, detail={"taps": text})

    def _count_moved(self, step: int) -> int | None:
        if self._pointers is None:
            return None
        moved = self._pointers.count()
        self.pointer_changes += moved
        for name in self._pointers.moved:
            self.moved.setdefault(name, step)
        return moved

    def flush(self) -> None:
        """Copy the ring to the host and write the records of the steps in it."""
        if not self._pending:
            return
        with self._trainer.device.on(self._trainer.stream):
            rows = self._ring[: len(self._pending)].cpu()
        seconds = self._clock.drain()
        pending, self._pending = self._pending, []
        used = self._trainer.device.used_bytes()
        for row, facts, step_s in zip(rows, pending, seconds, strict=True):
            is_last = facts is pending[-1]
            record = self._record(row, facts, step_s, used if is_last else None)
            self._file.write(record)

    def _pack(self, outputs: StepOutputs) -> torch.Tensor:
        floats = torch.cat((outputs.losses, outputs.loss[None], outputs.grad_norm[None]))
        digests = [outputs.digests[group].flatten() for group in self._groups]
        rows = self._trainer.taps.rows.flatten()
        return torch.cat((floats.view(torch.int32), *digests, rows))

    def _record(
        self, row: torch.Tensor, facts: "_HostFacts", step_s: float, device_bytes: int | None
    ) -> StepRecord:
        num_losses = self._trainer.config.microbatches
        bits = [FloatBits.from_bits(v & 0xFFFFFFFF) for v in row[: num_losses + 2].tolist()]
        digests, nonfinite, cursor = {"rng": facts.rng}, {}, num_losses + 2
        for group in self._groups:
            stop = cursor + len(self._trainer.digested[group][0]) * NUM_COLUMNS
            rows = row[cursor:stop].view(-1, NUM_COLUMNS)
            digests[group], bad = self._of_group(group, rows)
            if bad:
                nonfinite[group] = bad
            cursor = stop
        return StepRecord(
            step=facts.step,
            rank=self._rank,
            loss=bits[num_losses],
            microbatch_losses=tuple(bits[:num_losses]),
            grad_norm=bits[num_losses + 1],
            digests=digests,
            nonfinite=nonfinite,
            step_s=step_s,
            live_bytes=facts.live_bytes,
            peak_bytes=facts.peak_bytes,
            taps=self._taps_text(row[cursor:]),
            pointer_changes=facts.moved,
            device_bytes=device_bytes,
            host_bytes=facts.host_bytes,
        )

    def _taps_text(self, row: torch.Tensor) -> str:
        """Rows of taps as hex: four lanes and the place in the step."""
        rows = row.view(self._trainer.taps.rows.shape)
        lanes = rows[:, [*range(NUM_LANES), PLACE_COLUMN]]
        return lanes.contiguous().numpy().astype(">i4").tobytes().hex()


@dataclass(frozen=True)
class _HostFacts:
    """What the host knows of a step that waits in the ring."""

    step: int
    rng: str
    live_bytes: int
    peak_bytes: int
    moved: int | None
    host_bytes: int


def host_bytes() -> int:
    """Resident memory of this process that no file holds: mapped data grows as it is read."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE_BYTES


def _blake(data: bytes) -> str:
    """128 bits of BLAKE2b as 32 hex digits: generator states lie on the host."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
