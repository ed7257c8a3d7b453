"""Plants the faults of `harness.faults.catalogue` in a rank, as their `Planting` says.

    before_train  before there is a trainer
    before_step   before the step that the plant names, or each from it on
    after_step    after it; the state is digested again
    alter         each line of the rank's file
    after_end     once all records are written

The catalogue says which faults take a step, a rank or a tensor; the decoder requires the step.
"""

import random

import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.faults.catalogue import CATALOGUE
from harness.records import EventRecord, PlantSpec, RunSpec, each_of
from harness.worker.plants import PLANTINGS
from harness.worker.plants.planting import Act, NotHere, Planting, on_its_stream
from harness.worker.record_file import RecordFile


class Plant:
    """The planted faults of one rank; does nothing on the ranks that they do not name."""

    def __init__(self, spec: RunSpec, rank: int, file: RecordFile) -> None:
        self._rank, self._file = rank, file
        self._faults = [
            PlantedFault(fault, rank, spec.world_size, file) for fault in each_of(spec.plant)
        ]
        self._drawn: dict[str, bool] = {}
        if any(fault.is_here for fault in self._faults):
            file.alter = self._alter

    def draw(self, store: dist.Store) -> None:
        """Decide which faults of chance fire in this run: rank 0 does, and tells the others."""
        for fault in self._faults:
            spec, key = fault.spec, f"plant/{fault.spec.fault}"
            if spec.chance == 1.0:
                continue
            if self._rank == 0:
                # Not from the seed: every run of a specification has a chance of its own.
                fires = random.SystemRandom().random() < spec.chance
                store.set(key, "fires" if fires else "rests")
            self._drawn[spec.fault] = store.get(key) == b"fires"
        self._faults = [f for f in self._faults if self._drawn.get(f.spec.fault, True)]

    def before_train(self, config: TrainConfig) -> TrainConfig:
        """The configuration that this rank really trains by."""
        for fault in self._faults:
            if fault.planting.before_make is not None:
                config = fault.planting.before_make(config)
        return config

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Act before `step` runs."""
        for name, fires in self._drawn.items():
            detail = {"fault": name, "fires": fires}
            self._file.write(EventRecord(name="chance", rank=self._rank, step=step, detail=detail))
        self._drawn = {}
        for fault in self._faults:
            fault.before_step(trainer, step)

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Act after the optimizer of `step`, before its digests are read."""
        for fault in self._faults:
            fault.after_step(trainer, step)

    def after_end(self) -> None:
        """Act once the end record is written."""
        for fault in self._faults:
            if fault.planting.after_end is not None:
                fault.planting.after_end()

    def _alter(self, line: str) -> list[str]:
        lines = [line]
        for fault in self._faults:
            if fault.alter is not None:
                lines = [altered for each in lines for altered in fault.alter(each)]
        return lines


class PlantedFault:
    """One planted fault in one rank.

    Attributes:
        spec: what is planted.
        is_here: whether this is a rank that it names.
        planting: what it does here.
        alter: what it does to lines of records, or None.
    """

    def __init__(self, spec: PlantSpec, rank: int, world_size: int, file: RecordFile) -> None:
        self.spec, self._rank, self._file = spec, rank, file
        self._everywhere = CATALOGUE[spec.fault].everywhere
        self.is_here = self._everywhere or rank == spec.rank % world_size
        self.planting = PLANTINGS[spec.fault] if self.is_here else Planting()
        self.alter = None if self.planting.alter is None else self.planting.alter(spec)
        self._is_first = True

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Act before `step` runs."""
        planting, spec = self.planting, self.spec
        if self._is_first and (planting.before_make or planting.after_end):
            self._announce(step)  # no record comes after what it does
        self._is_first = False
        if planting.from_step is not None and step >= spec.step:
            self._act(planting.from_step, trainer, step, is_said=step == spec.step)
        if step != (trainer.config.graph_warmup_steps if planting.at_capture else spec.step):
            return
        if planting.before_step is not None:
            self._act(planting.before_step, trainer, step)
        if planting.before_step_on is not None:
            self._announce(step, tensor=planting.before_step_on(trainer, spec.tensor))

    def _act(self, act: Act, trainer: Trainer, step: int, *, is_said: bool = True) -> None:
        if is_said and not self._everywhere:
            self._announce(step)  # no record comes after what it does
        try:
            act(trainer)
        except NotHere:
            # A fault of all ranks is one of those that hold what it is planted in.
            if self._everywhere:
                return
            raise
        if is_said and self._everywhere:
            self._announce(step)

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Act after the optimizer of `step`, before its digests are read."""
        if step != self.spec.step or self.planting.after_step_on is None:
            return
        with on_its_stream(trainer):
            tensor = self.planting.after_step_on(trainer, self.spec.tensor)
        trainer.redigest_state()
        self._announce(step, tensor=tensor)

    def _announce(self, step: int, **detail: str) -> None:
        detail = {"fault": self.spec.fault, **detail}
        self._file.write(
            EventRecord(name="planted", rank=self._rank, step=step, detail=dict(detail))
        )
