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
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import torch

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.faults.catalogue import CATALOGUE
from harness.records import EventRecord, PlantSpec, RunSpec
from harness.worker.capture_faults import PLACES, plant_in_capture
from harness.worker.plants import PLANTINGS
from harness.worker.plants.planting import Planting
from harness.worker.record_file import RecordFile

_LEAKED_BYTES = {"leak": 1 << 20, "small_leak": 64 << 10}
"""What each leak keeps more of a step."""


class PlantedError(RuntimeError):
    """The exception that fault `raise` raises."""


class Plant:
    """One planted fault in one rank; does nothing on the ranks that it does not name."""

    def __init__(self, spec: RunSpec, rank: int, file: RecordFile) -> None:
        plant = spec.plant
        everywhere = plant is not None and CATALOGUE[plant.fault].everywhere
        target = -1 if plant is None else plant.rank % spec.world_size
        self._plant: PlantSpec | None = plant if everywhere or rank == target else None
        self._planting = PLANTINGS.get(self._fault, Planting())
        self._everywhere = "" if plant is None else plant.fault
        self._rank, self._file = rank, file
        self._last_step = ""
        self._leaked: list[torch.Tensor] = []
        if self._plant is not None:
            file.alter = self._alter

    @property
    def _fault(self) -> str:
        return self._plant.fault if self._plant else ""

    def before_train(self, config: TrainConfig) -> TrainConfig:
        """The configuration that this rank really trains by.

        Capturing takes collectives of its own, so all ranks skip it, or none.
        """
        if self._planting.before_make is not None:
            config = self._planting.before_make(config)
        return replace(config, graph=()) if self._everywhere == "skip_graphs" else config

    def before_step(self, trainer: Trainer, step: int) -> None:
        """Act before `step` runs."""
        if self._fault in _LEAKED_BYTES:
            self._leak(trainer, step)
        if self._plant is None or step != self._step_of(trainer):
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
            "small_leak": lambda: None,  # the same
            "segfault": self._segfault,
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
        assert self._plant is not None
        captures = self._fault in PLACES
        return trainer.config.graph_warmup_steps if captures else self._plant.step

    def after_step(self, trainer: Trainer, step: int) -> None:
        """Act after the optimizer of `step`, before its digests are read."""
        if self._plant is None or step != self._plant.step:
            return
        if self._planting.after_step is not None:
            with torch.no_grad(), trainer.device.on(trainer.stream):
                self._planting.after_step(trainer)
            trainer.redigest_state()
            self._announce(step)
            return
        values = {"nan": float("nan"), "negative_zero": -0.0, "positive_zero": 0.0}
        if self._plant.fault != "ulp" and self._plant.fault not in values:
            return
        names, tensors = trainer.digested["weights"]
        name = self._plant.tensor or names[0]
        if name not in names:
            raise ValueError(
                f"plant.tensor: expected a parameter with rows on rank {self._rank}, got {name!r}; "
                f"legal values: {', '.join(names)}"
            )
        with torch.no_grad(), trainer.device.on(trainer.stream):
            element = tensors[names.index(name)].view(-1)[:1]
            if self._plant.fault == "ulp":
                element.view(torch.int32).add_(1)
            else:
                element.fill_(values[self._plant.fault])
        trainer.redigest_state()
        self._announce(step, tensor=name)

    def after_end(self) -> None:
        """Act once the end record is written."""
        if self._fault == "record_after_end":
            self._file.write_raw(self._last_step + "\n")

    def _announce(self, step: int, **detail: str) -> None:
        event = EventRecord(
            name="planted", rank=self._rank, step=step, detail={"fault": self._fault, **detail}
        )
        self._file.write(event)

    def _alter(self, line: str) -> list[str]:
        if self._fault == "drop_rank":
            return []
        plain = json.loads(line)
        if plain["kind"] == "step":
            self._last_step = line
        if plain["kind"] != "step" or self._plant is None or plain["step"] != self._plant.step:
            return [line]
        if self._fault == "drop_step":
            return []
        if self._fault == "corrupt_record":
            return [line[: len(line) // 2]]
        return [line]

    def _sigkill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

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
        assert self._plant is not None
        if step >= self._plant.step:
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
        assert self._plant is not None
        held = {
            name: parameter
            for group in trainer.groups
            for name, parameter in zip(group.names, group.unsharded, strict=True)
        }
        # The first that every graph scope reads: attention's, of this rank's first layer.
        name = self._plant.tensor or next(name for name in held if ".attn.attention." in name)
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
