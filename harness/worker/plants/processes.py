"""Faults of processes, machines and records: see `harness.faults.infrastructure`."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.plant_spec import PlantSpec
from harness.records import dumps
from harness.worker.plants import endings
from harness.worker.plants.planting import Act, Alteration, Planting
from harness.worker.plants.seams import keep

Change = Callable[[str, dict[str, Any]], list[str]]


def _leave_group(trainer: Trainer) -> None:
    del trainer
    dist.destroy_process_group()


def _other_environment(config: TrainConfig) -> TrainConfig:
    os.environ["NCCL_PROTO"] = "Simple"
    return replace(config)


# ---- memory


def _hoard(trainer: Trainer) -> None:
    """Hold twice the peak so far, as one tensor."""
    keep(trainer, _zeros(trainer, 2 * trainer.device.peak_bytes()))


def _leak(nbytes: int) -> Act:
    """Hold so much more with each call."""
    return lambda trainer: keep(trainer, _zeros(trainer, nbytes))


def _zeros(trainer: Trainer, nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=trainer.device.torch_device)


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


def _of_step(change: Change, *, later: int = 0) -> Callable[[PlantSpec], Alteration]:
    """A change of the record of the plant's step, or of one that comes `later`."""

    def make(spec: PlantSpec) -> Alteration:
        def alter(line: str) -> list[str]:
            plain = _plain(line)
            is_it = plain.get("kind") == "step" and plain["step"] == spec.step + later
            return change(line, plain) if is_it else [line]

        return alter

    return make


def _of_kind(kind: str, change: Change) -> Callable[[PlantSpec], Alteration]:
    def make(spec: PlantSpec) -> Alteration:
        del spec

        def alter(line: str) -> list[str]:
            plain = _plain(line)
            return change(line, plain) if plain.get("kind") == kind else [line]

        return alter

    return make


def _plain(line: str) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(line)
    except ValueError:  # another fault has been here
        return {}
    return plain


def _exchange(spec: PlantSpec) -> Alteration:
    """The step's record comes after the next one's."""
    held: list[str] = []

    def hold(line: str, plain: dict[str, Any]) -> list[str]:
        del plain
        held.append(line)
        return []

    first = _of_step(hold)(spec)
    second = _of_step(lambda line, plain: [line, *held], later=1)(spec)
    return lambda line: [found for each in first(line) for found in second(each)]


def _repeat_state(spec: PlantSpec) -> Alteration:
    """The step's record has the digests of the step before, as a ring that was not copied."""
    digests: dict[str, Any] = {}

    def remember(line: str, plain: dict[str, Any]) -> list[str]:
        digests.update(plain["digests"])
        return [line]

    def repeat(line: str, plain: dict[str, Any]) -> list[str]:
        del line
        return [dumps(plain | {"digests": digests})]

    first, second = _of_step(remember, later=-1)(spec), _of_step(repeat)(spec)
    return lambda line: [found for each in first(line) for found in second(each)]


def _repeat_last_step(spec: PlantSpec) -> Alteration:
    """The last step's record comes once more, after the end."""
    del spec
    last: list[str] = []

    def alter(line: str) -> list[str]:
        kind = _plain(line).get("kind")
        last[:] = [line] if kind == "step" else last
        return [line, *last] if kind == "end" else [line]

    return alter


_ALTERATIONS: Mapping[str, Callable[[PlantSpec], Alteration]] = {
    "drop_rank": lambda spec: lambda line: [],
    "drop_step": _of_step(lambda line, plain: []),
    "corrupt_record": _of_step(lambda line, plain: [line[: len(line) // 2]]),
    "repeated_record": _of_step(lambda line, plain: [line, line]),
    "record_after_end": _repeat_last_step,
    "record_of_another_rank": _of_step(
        lambda line, plain: [dumps(plain | {"rank": plain["rank"] + 1})]
    ),
    "record_of_another_run": _of_kind(
        "start", lambda line, plain: [dumps(plain | {"run": plain["run"][:-1] + "x"})]
    ),
    "records_out_of_order": _exchange,
    "record_of_the_step_before": _repeat_state,
    "end_record_lost": _of_kind("end", lambda line, plain: []),
}
"""What becomes of lines of records."""

_BEFORE_STEP: Mapping[str, Act] = {
    "sigkill": endings.sent(signal.SIGKILL),
    "sigterm": endings.sent(signal.SIGTERM),
    # As a debugger or a scheduler would: not dead, and answers nobody.
    "stopped": endings.sent(signal.SIGSTOP),
    # As the kernel would for an address that is not mapped; faulthandler prints the stack.
    "segfault": endings.sent(signal.SIGSEGV),
    "hang": endings.before(endings.sleep_for_ever),
    "exit": endings.before(endings.leave),
    "raise": endings.raise_error,
    "oom": endings.ask_for_too_much,
    "hoard": _hoard,
    "illegal_access": _illegal_access,
    "left_group": _leave_group,
}

PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {name: Planting(before_step=act) for name, act in _BEFORE_STEP.items()}
    | {name: Planting(alter=alter) for name, alter in _ALTERATIONS.items()}
    | {
        "leak": Planting(from_step=_leak(1 << 20)),
        "small_leak": Planting(from_step=_leak(64 << 10)),
        "hang_at_end": Planting(after_end=endings.sleep_for_ever),
        "exit_at_end": Planting(after_end=endings.leave),
        "other_environment": Planting(before_make=_other_environment),
    }
)
"""By name in the catalogue."""
