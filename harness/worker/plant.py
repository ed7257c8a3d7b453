"""Plants the faults of `harness.faults.catalogue` in a rank, through public seams of the trainer.

    before_train  the rank will run eagerly where it should capture
    before_step   the rank dies, hangs, hoards memory, or memory moves under a graph; or from now on
                  work is in no order (see `stress`); or it will fail as this step captures
                  (see `capture_faults`)
    after_step    a main weight changes, and the state is digested again
    alter         a record line is dropped or damaged, or all of a rank's lines
    after_end     a line too many

The catalogue says which faults take a step, a rank or a tensor; the decoder requires the step.
"""

import functools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import torch
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.faults.catalogue import CATALOGUE
from harness.plant_spec import PlantSpec, each_of
from harness.records import EventRecord, RunSpec
from harness.worker.capture_faults import PLACES, plant_in_capture
from harness.worker.plants import PLANTINGS
from harness.worker.plants.infrastructure import ALTERATIONS
from harness.worker.plants.planting import Planting
from harness.worker.record_file import RecordFile

_LEAKED_BYTES = {"leak": 1 << 20, "small_leak": 64 << 10}
"""What each leak keeps more of a step."""


class PlantedError(RuntimeError):
    """The exception that fault `raise` raises."""


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
            config = fault.before_train(config)
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
            fault.after_end()

    def _alter(self, line: str) -> list[str]:
        lines = [line]
        for fault in self._faults:
            lines = [altered for each in lines for altered in fault.alter(each)]
        return lines


class PlantedFault:
    """One planted fault in one rank.

    Attributes:
        spec: what is planted.
        is_here: whether this is a rank that it names.
    """

    def __init__(self, spec: PlantSpec, rank: int, world_size: int, file: RecordFile) -> None:
        self.spec = spec
        self.is_here = CATALOGUE[spec.fault].everywhere or rank == spec.rank % world_size
        self._planting = PLANTINGS.get(self._fault, Planting())
        self._rank, self._file = rank, file
        alteration = ALTERATIONS.get(self._fault)
        self._altered = None if alteration is None else alteration(spec)
        self._last_step = ""
        self._is_first = True
        self._leaked: list[torch.Tensor] = []

    @property
    def _fault(self) -> str:
        return self.spec.fault if self.is_here else ""

    def before_train(self, config: TrainConfig) -> TrainConfig:
        """The configuration that this rank really trains by.

        Capturing takes collectives of its own, so all ranks skip it, or none.
        """
        if self._planting.before_make is not None:
            config = self._planting.before_make(config)
        return replace(config, graph=()) if self.spec.fault == "skip_graphs" else config

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Act before `step` runs."""
        if self._is_first and self._planting.before_make is not None:
            self._announce(step)
        self._is_first = False
        if self._fault in _LEAKED_BYTES:
            self._leak(trainer, step)
        if not self.is_here or step != self._step_of(trainer):
            return
        actions: dict[str, Callable[[], None]] = {
            "sigkill": self._sigkill,
            "hang": self._hang,
            "exit": self._exit,
            "raise": self._raise,
            "oom": lambda: self._oom(trainer),
            "skip_graphs": lambda: None,  # `before_train` did it
            "hoard": lambda: self._hoard(trainer),
            "leak": lambda: None,  # in every step, above
            "exit_at_end": lambda: None,  # `after_end` does it
            "hang_at_end": lambda: None,  # the same
            "small_leak": lambda: None,
            "segfault": self._segfault,
            "sigterm": self._sigterm,
            "stopped": self._stop,
            "illegal_access": lambda: self._illegal_access(trainer),
            "stale_parameter": lambda: self._move_parameter(trainer),
        }
        action = actions.get(PLACES.get(self._fault, self._fault))
        if self._fault in PLACES:
            assert action is not None
            action = functools.partial(plant_in_capture, trainer, self._fault, action)
        if self._planting.before_step is not None:
            action = functools.partial(self._planting.before_step, trainer)
        if action is not None:
            self._announce(step)
            action()

    def _step_of(self, trainer: Trainer) -> int | None:
        """Captures have a step of their own."""
        captures = self._fault in PLACES
        return trainer.config.graph_warmup_steps if captures else self.spec.step

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Act after the optimizer of `step`, before its digests are read."""
        if not self.is_here or step != self.spec.step:
            return
        if self._planting.after_step is not None:
            with torch.no_grad(), trainer.device.on(trainer.stream):
                self._planting.after_step(trainer)
            trainer.redigest_state()
            self._announce(step)
            return
        values = {"nan": float("nan"), "negative_zero": -0.0, "positive_zero": 0.0}
        if self.spec.fault != "ulp" and self.spec.fault not in values:
            return
        names, tensors = trainer.digested["weights"]
        name = self.spec.tensor or names[0]
        if name not in names:
            raise ValueError(
                f"plant.tensor: expected a parameter with rows on rank {self._rank}, got {name!r}; "
                f"legal values: {', '.join(names)}"
            )
        with torch.no_grad(), trainer.device.on(trainer.stream):
            element = tensors[names.index(name)].view(-1)[:1]
            if self.spec.fault == "ulp":
                element.view(torch.int32).add_(1)
            else:
                element.fill_(values[self.spec.fault])
        trainer.redigest_state()
        self._announce(step, tensor=name)

    def after_end(self) -> None:
        """Act once the end record is written."""
        if self._fault == "record_after_end":
            self._file.write_raw(self._last_step + "\n")
        elif self._fault == "hang_at_end":
            self._hang()
        elif self._fault == "exit_at_end":
            self._exit()

    def _announce(self, step: int, **detail: str) -> None:
        event = EventRecord(
            name="planted", rank=self._rank, step=step, detail={"fault": self._fault, **detail}
        )
        self._file.write(event)

    def alter(self, line: str) -> list[str]:
        """What is written in place of a line."""
        if '"kind":"step"' in line:
            self._last_step = line
        return [line] if self._altered is None else self._altered(line)

    def _sigkill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _sigterm(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def _stop(self) -> None:
        """As a debugger or a scheduler would: not dead, and answers nobody."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def _segfault(self) -> None:
        """As the kernel would for an address that is not mapped; faulthandler prints the stack."""
        os.kill(os.getpid(), signal.SIGSEGV)

    def _hang(self) -> NoReturn:
        while True:
            time.sleep(3600)

    def _exit(self) -> NoReturn:
        os._exit(13)

    def _raise(self) -> NoReturn:
        raise PlantedError("planted exception")

    def _oom(self, trainer: Trainer) -> NoReturn:
        """Allocate more and more, untouched, until the allocator itself refuses."""
        held, nbytes = [], 1 << 30
        while True:
            held.append(torch.empty(nbytes, dtype=torch.uint8, device=trainer.device.torch_device))
            # The CPU hands out address space without memory behind it: ask for more than exists.
            nbytes = nbytes if trainer.device.is_cuda else nbytes * 1024

    def _hoard(self, trainer: Trainer) -> None:
        """Hold twice the peak so far, as one tensor."""
        device = trainer.device
        nbytes = 2 * device.peak_bytes()
        self.hoarded = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)

    def _leak(self, trainer: Trainer, step: int) -> None:
        """Hold more from the planted step on."""
        if step >= self.spec.step:
            device, nbytes = trainer.device.torch_device, _LEAKED_BYTES[self._fault]
            self._leaked.append(torch.zeros(nbytes, dtype=torch.uint8, device=device))

    def _illegal_access(self, trainer: Trainer) -> None:
        """Replay a graph over memory that was given back to the driver and unmapped."""
        device = trainer.device
        with device.on(trainer.stream):
            # Larger than any block that the allocator would cut from a shared segment.
            source = torch.ones(256 << 20, dtype=torch.uint8, device=device.torch_device)
            total = torch.zeros(256 << 20, dtype=torch.uint8, device=device.torch_device)
            graph = torch.cuda.CUDAGraph()
            device.synchronize()
            with torch.cuda.graph(graph, stream=trainer.stream, capture_error_mode="thread_local"):
                total.copy_(source)
            del source
            torch.cuda.empty_cache()
            graph.replay()
            device.synchronize()

    def _move_parameter(self, trainer: Trainer) -> None:
        """Free the memory behind a parameter and let its storage live on somewhere else.

        Its contents come along, so a program that looks the parameter up finds it intact; only who
        remembers the old address is wrong. A tensor of NaN takes the old place.

        Raises:
            ValueError: no such parameter, or its storage has no memory between steps.
        """
        held = {
            name: parameter
            for group in trainer.groups
            for name, parameter in zip(group.names, group.unsharded, strict=True)
        }
        # The first that every graph scope reads: attention's, of this rank's first layer.
        name = self.spec.tensor or next(name for name in held if ".attn.attention." in name)
        if name not in held:
            raise ValueError(
                f"plant.tensor: expected a parameter, got {name!r}; legal values: {', '.join(held)}"
            )
        device = trainer.device
        device.synchronize()
        storage = held[name].data.untyped_storage()
        nbytes, address = storage.nbytes(), storage.data_ptr()
        if not nbytes:
            raise ValueError(
                f"plant.fault: expected {name} to have memory between steps, which stale_parameter "
                "moves; with fsdp.pool dynamic it has none"
            )
        # Growing allocates the new block before it frees the old one, so the address must change.
        # Freed and allocated again at its old size, the storage could get its old place back.
        device.resize_storage(storage, 2 * nbytes)
        assert storage.data_ptr() != address
        self.squatter = torch.full((nbytes // 4,), float("nan"), device=device.torch_device)
        device.synchronize()
