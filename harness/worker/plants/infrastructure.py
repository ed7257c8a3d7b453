"""Faults of processes, machines and records: see `harness.faults.infrastructure`.

Those that end a process, or fill its memory, are in `harness.worker.plant`.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from fsdp_core.config import TrainConfig
from fsdp_core.train import Trainer
from harness.plant_spec import PlantSpec
from harness.records import dumps
from harness.worker.plants.planting import Planting

Alteration = Callable[[str], list[str]]
"""From a line of a rank's file to what is written in its place."""
Change = Callable[[str, dict[str, Any]], list[str]]


def _leave_group(trainer: Trainer) -> None:
    del trainer
    dist.destroy_process_group()


def _other_environment(config: TrainConfig) -> TrainConfig:
    os.environ["NCCL_PROTO"] = "Simple"
    return replace(config)


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


ALTERATIONS: Mapping[str, Callable[[PlantSpec], Alteration]] = MappingProxyType(
    {
        "drop_rank": lambda spec: lambda line: [],
        "drop_step": _of_step(lambda line, plain: []),
        "corrupt_record": _of_step(lambda line, plain: [line[: len(line) // 2]]),
        "repeated_record": _of_step(lambda line, plain: [line, line]),
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
)
"""What becomes of lines of records, by name in the catalogue."""

PLANTINGS: Mapping[str, Planting] = MappingProxyType(
    {
        "left_group": Planting(before_step=_leave_group),
        "other_environment": Planting(before_make=_other_environment),
    }
)
"""By name in the catalogue."""
