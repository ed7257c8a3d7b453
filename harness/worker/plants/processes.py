"""Faults of processes, of machines and of records; and how a process ends, for other faults."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.records import PlantSpec, dumps
from harness.worker.plants.planting import Act, Alteration, Planting, keep, once

wait_s: Callable[[float], None] = time.sleep
"""What one that hangs does."""


class PlantedError(RuntimeError):
    """The exception that faults raise."""


# ---- how a process ends


def sent(number: signal.Signals) -> Act:
    """The process is sent a signal by itself."""
    return lambda trainer: os.kill(os.getpid(), number)


def leave() -> NoReturn:
    """End the process at once, without a word."""
    os._exit(13)


def sleep_for_ever() -> NoReturn:
    """Take part in nothing any more."""
    while True:
        wait_s(3600)


def raise_error(trainer: Trainer) -> NoReturn:
    """As a program of a user that fails.

    Raises:
        PlantedError: always.
    """
    del trainer
    raise PlantedError("planted exception")


def _other_environment(config: TrainConfig) -> TrainConfig:
    os.environ["NCCL_PROTO"] = "Simple"
    return replace(config)


# ---- memory


def ask_for_too_much(trainer: Trainer) -> NoReturn:
    """Allocate more and more, untouched, until the allocator itself refuses."""
    held, nbytes = [], 1 << 30
    while True:
        held.append(torch.empty(nbytes, dtype=torch.uint8, device=trainer.device.torch_device))
        # The CPU hands out address space without memory behind it: ask for more than exists.
        nbytes = nbytes if trainer.device.is_cuda else nbytes * 1024


def _hold(trainer: Trainer, nbytes: int) -> None:
    keep(trainer, torch.zeros(nbytes, dtype=torch.uint8, device=trainer.device.torch_device))


def _leak(nbytes: int) -> Planting:
    return Planting(from_step=lambda trainer: _hold(trainer, nbytes))


def _illegal_access(trainer: Trainer) -> None:
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


# ---- records

_Change = Callable[[str, dict[str, Any], list[str]], list[str]]
"""From a line, what it says, and a list that is kept from line to line, to what is written."""


def _written(*changes: tuple[str, int, _Change]) -> Planting:
    """Changes of the records of a kind; a step's is that of the plant's step, or so much later.

    What one change gives, the next gets.
    """

    def make(spec: PlantSpec) -> Alteration:
        kept: list[str] = []

        def alter(line: str, kind: str, later: int, change: _Change) -> list[str]:
            plain = _plain(line)
            is_it = plain.get("kind") == kind
            is_it = is_it and (kind != "step" or plain["step"] == spec.step + later)
            return change(line, plain, kept) if is_it else [line]

        def alter_all(line: str) -> list[str]:
            lines = [line]
            for change in changes:
                lines = [new for each in lines for new in alter(each, *change)]
            return lines

        return alter_all

    return Planting(alter=make)


def _plain(line: str) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(line)
    except ValueError:  # another fault has been here
        return {}
    return plain


def _lost(line: str, plain: dict[str, Any], kept: list[str]) -> list[str]:
    return []


def _hold_back(line: str, plain: dict[str, Any], kept: list[str]) -> list[str]:
    kept.append(line)
    return []


def _remember(line: str, plain: dict[str, Any], kept: list[str]) -> list[str]:
    kept.append(line)
    return [line]


def _with_state_before(line: str, plain: dict[str, Any], kept: list[str]) -> list[str]:
    """As a ring that was not copied."""
    held = json.loads(kept[-1])["digests"] if kept else {}
    return [dumps(plain | {"digests": held})]


def _repeat_last_step(spec: PlantSpec) -> Alteration:
    """The last step's record comes once more, after the end."""
    del spec
    last: list[str] = []

    def alter(line: str) -> list[str]:
        kind = _plain(line).get("kind")
        last[:] = [line] if kind == "step" else last
        return [line, *last] if kind == "end" else [line]

    return alter


PLANTINGS: Mapping[str, Planting] = {
    "sigkill": once(sent(signal.SIGKILL)),
    "sigterm": once(sent(signal.SIGTERM)),
    # As a debugger or a scheduler would: not dead, and answers nobody.
    "stopped": once(sent(signal.SIGSTOP)),
    # As the kernel would for an address that is not mapped; faulthandler prints the stack.
    "segfault": once(sent(signal.SIGSEGV)),
    "hang": once(lambda trainer: sleep_for_ever()),
    "exit": once(lambda trainer: leave()),
    "raise": once(raise_error),
    "left_group": once(lambda trainer: dist.destroy_process_group()),
    "hang_at_end": Planting(after_end=sleep_for_ever),
    "exit_at_end": Planting(after_end=leave),
    "other_environment": Planting(before_make=_other_environment),
    "oom": once(ask_for_too_much),
    "hoard": once(lambda trainer: _hold(trainer, 2 * trainer.device.peak_bytes())),
    "leak": _leak(1 << 20),
    "small_leak": _leak(64 << 10),
    "illegal_access": once(_illegal_access),
    "drop_rank": Planting(alter=lambda spec: lambda line: []),
    "drop_step": _written(("step", 0, _lost)),
    "corrupt_record": _written(("step", 0, lambda line, plain, kept: [line[: len(line) // 2]])),
    "repeated_record": _written(("step", 0, lambda line, plain, kept: [line, line])),
    "record_after_end": Planting(alter=_repeat_last_step),
    "record_of_another_rank": _written(
        ("step", 0, lambda line, plain, kept: [dumps(plain | {"rank": plain["rank"] + 1})])
    ),
    "record_of_another_run": _written(
        ("start", 0, lambda line, plain, kept: [dumps(plain | {"run": plain["run"][:-1] + "x"})])
    ),
    "records_out_of_order": _written(
        ("step", 0, _hold_back), ("step", 1, lambda line, plain, kept: [line, *kept])
    ),
    "record_of_the_step_before": _written(("step", -1, _remember), ("step", 0, _with_state_before)),
    "end_record_lost": _written(("end", 0, _lost)),
}  # fmt: skip
"""By name in the catalogue."""
