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
from harness.recorder import RecordFile
from harness.records import EventRecord, PlantSpec, RunSpec, each_of
from harness.worker.plants import PLANTINGS
from harness.worker.plants.planting import Act, NotHere, Planting, on_its_stream


class Plant:
    """The planted faults of one rank; does nothing on the ranks that they do not name."""

    def __init__(self, spec: RunSpec, rank: int, file: RecordFile) -> None:
        self._rank, self._file = rank, file
        self._faults: list[tuple[PlantSpec, Planting]] = []
        for fault in each_of(spec.plant):
            is_here = _is_everywhere(fault) or rank == fault.rank % spec.world_size
            self._faults.append((fault, PLANTINGS[fault.fault] if is_here else Planting()))
        self._alters = {
            fault.fault: planting.alter(fault)
            for fault, planting in self._faults
            if planting.alter is not None
        }
        self._drawn: dict[str, bool] = {}
        self._is_first = True
        if self._alters:
            file.alter = self._alter

    def draw(self, store: dist.Store) -> None:
        """Decide which faults of chance fire in this run: rank 0 does, and tells the others."""
        for spec, _ in self._faults:
            if spec.chance == 1.0:
                continue
            key = f"plant/{spec.fault}"
            if self._rank == 0:
                # Not from the seed: every run of a specification has a chance of its own.
                fires = random.SystemRandom().random() < spec.chance
                store.set(key, "fires" if fires else "rests")
            self._drawn[spec.fault] = store.get(key) == b"fires"
            if not self._drawn[spec.fault]:
                self._alters.pop(spec.fault, None)
        self._faults = [each for each in self._faults if self._drawn.get(each[0].fault, True)]

    def before_train(self, config: TrainConfig) -> TrainConfig:
        """The configuration that this rank really trains by."""
        for _, planting in self._faults:
            if planting.before_make is not None:
                config = planting.before_make(config)
        return config

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Act before `step` runs."""
        for name, fires in self._drawn.items():
            self._write("chance", step, fault=name, fires=fires)
        self._drawn = {}
        for spec, planting in self._faults:
            if self._is_first and (planting.before_make or planting.after_end):
                self._write("planted", step, fault=spec.fault)
            if planting.from_step is not None and step >= spec.step:
                self._act(spec, planting.from_step, trainer, step, is_said=step == spec.step)
            if step != (trainer.config.graph_warmup_steps if planting.at_capture else spec.step):
                continue
            if planting.before_step is not None:
                self._act(spec, planting.before_step, trainer, step)
            if planting.before_step_on is not None:
                tensor = planting.before_step_on(trainer, spec.tensor)
                self._write("planted", step, fault=spec.fault, tensor=tensor)
        self._is_first = False

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Act after the optimizer of `step`, before its digests are read."""
        for spec, planting in self._faults:
            if step == spec.step and planting.after_step_on is not None:
                with on_its_stream(trainer):
                    tensor = planting.after_step_on(trainer, spec.tensor)
                trainer.redigest_state()
                self._write("planted", step, fault=spec.fault, tensor=tensor)

    def after_end(self) -> None:
        """Act once the end record is written."""
        for _, planting in self._faults:
            if planting.after_end is not None:
                planting.after_end()

    def _alter(self, line: str) -> list[str]:
        lines = [line]
        for change in self._alters.values():
            lines = [altered for each in lines for altered in change(each)]
        return lines

    def _act(
        self, spec: PlantSpec, act: Act, trainer: Trainer, step: int, *, is_said: bool = True
    ) -> None:
        everywhere = _is_everywhere(spec)
        if is_said and not everywhere:
            self._write("planted", step, fault=spec.fault)  # no record comes after what it does
        try:
            act(trainer)
        except NotHere:
            # A fault of all ranks is one of those that hold what it is planted in.
            if everywhere:
                return
            raise
        if is_said and everywhere:
            self._write("planted", step, fault=spec.fault)

    def _write(self, name: str, step: int, **detail: str | bool) -> None:
        self._file.write(EventRecord(name=name, rank=self._rank, step=step, detail=dict(detail)))


def _is_everywhere(spec: PlantSpec) -> bool:
    return CATALOGUE[spec.fault].everywhere
