"""The trainer under stress: the same steps, with the stressors of its configuration active."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.device import Device
from fsdp_core.parallel.mesh import Axes
from fsdp_core.stress.races import Named
from fsdp_core.stress.stressors import Stressors
from fsdp_core.train.engines import EngineTrainer
from fsdp_core.train.names import holds_gradients
from fsdp_core.train.trainer import Trainer


class StressedTrainer(Trainer):
    """A trainer all of whose work is under stress: it is made under it, and is so `at_work`.

    Steps with their warm-ups and captures, evaluation, smaller steps and the end: each raises
    `RaceFound` if, under `races`, memory was touched on two streams in no order.

    Raises:
        StressorMissing: the device lacks one of the stressors.
    """

    takes_stress: ClassVar[bool] = True

    def __init__(self, config: TrainConfig, axes: Axes, device: Device) -> None:
        self.stressors = Stressors(
            config.stress, device=device, seed=config.stress_seed, rank=dist.get_rank()
        )
        with self.stressors.active():
            super().__init__(config, axes, device)
            for root in self._roots:
                # Made at their first use, which is to be in here.
                _ = root.fsdp_schedule.gather_stream, root.fsdp_schedule.reduce_stream
        for root in self._roots:
            schedule = root.fsdp_schedule
            schedule.pool = self.stressors.watched(schedule.pool)
            for unit in schedule.units:
                for group in unit.groups:
                    group.pool = schedule.pool
        if (races := self.stressors.races) is not None:
            races.named = self._named
            races.units = {group.owner: group.name for group in self.groups}
            self.stream.name = "main"

    def _named(self) -> Iterator[Named]:
        units = {name: group.name for group in self.groups for name in (*group.names, group.name)}
        for name, tensor in self.named_tensors().items():
            yield Named(name, units.get(name.split(" ")[0], ""), tensor, holds_gradients(name))

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """See `Trainer`. What races showed is raised at the end, unless something else was."""
        with self.stressors.active(), self.device.on(self.stream):
            self.stressors.before_step()
            yield
        self.stressors.after_step()

    @property
    def stress_bytes(self) -> int:
        """Of the live bytes of the device, those that stressors hold between steps."""
        return 0 if self.stressors.scramble is None else self.stressors.scramble.held_bytes

    def take_turn(self, names: Sequence[str]) -> None:
        """Between steps: these stressors alone from now on; the next step captures anew.

        What others did while graphs were captured went into these. Every rank calls this, as all of
        them capture together.

        Raises:
            ValueError: a stressor that the configuration does not name.
        """
        self.stressors.only(names)
        with self.device.on(self.stream):
            self.device.synchronize()
            self._graphs.drop()
            self._captured_at = None

    def close(self) -> None:
        """See `Trainer`."""
        try:
            super().close()
        finally:
            self.stressors.close()


def make_trainer(config: TrainConfig, axes: Axes, device: Device) -> Trainer:
    """The trainer that a configuration asks for: of another engine, under stress or plain."""
    if config.engine != "ours":
        return EngineTrainer(config, axes, device)
    kind = StressedTrainer if config.stress else Trainer
    return kind(config, axes, device)
