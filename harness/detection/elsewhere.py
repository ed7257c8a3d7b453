"""Faults in other cells than their own: what the catalogue's cells were never tuned to.

    entry, seed -> step, rank, layout, dtype, pool, microbatches, seed and tensor, one to three of
                   them drawn anew -> the first draw that is a scenario by the rules

A fault bites in its own cell because somebody made it so. Here it is planted where nobody looked,
so whoever changes the bisector cannot fit it to the cells. What the entry says of its own cell
stays: a fault of experts keeps its experts, one of a capture its step.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from harness.errors import UsageError
from harness.faults.cases import CELL, Variant, cases_of, scenario_text, stress_of
from harness.faults.fault import Cell, Fault
from harness.scenario.matrix import Device

ELSEWHERE_LABEL = "elsewhere"
CAPTURES_AT = 2
"""The step that captures: a fault planted there is one of it."""
STEPS = (1, 3, 4)
MICROBATCHES = (1, 3, 4)
POOLS = ("dynamic", "double", "traced")
LAYOUTS: tuple[Mapping[str, int | bool], ...] = (
    {"dp": 4},
    {"dp": 2, "tp": 2},
    {"dp": 2, "tp": 2, "sequence_parallel": True},
    {"dp": 2, "cp": 2},
    {"dp": 2, "pp": 2},
    {"dp": 2, "dp_outer": 2},
)
TENSORS = (
    "embedding.weight",
    "layers.0.attn.norm.weight",
    "layers.1.mlp.norm.weight",
    "norm.weight",
)
_DRAWS = 40
_Change = Callable[[Fault, random.Random], Fault]


def elsewhere(fault: Fault, seed: int, device: Device) -> Fault:
    """The entry with another cell; its own where no draw is a scenario."""
    for moved in _draws(fault, random.Random(f"{seed}/{fault.name}")):
        variant = Variant(name=CELL, stress=stress_of(moved.cell, device))
        try:
            (case,) = cases_of(scenario_text(moved, variant), device)
        except UsageError:
            continue
        if not case.skip_reason:
            return moved
    return fault


def _draws(fault: Fault, draw: random.Random) -> Iterator[Fault]:
    for _ in range(_DRAWS):
        moved = fault
        for change in draw.sample(_CHANGES, draw.choice((1, 2, 3))):
            moved = change(moved, draw)
        if moved != fault:
            yield moved


def _with(fault: Fault, key: str, value: Any) -> Fault:
    """The entry with one setting more, unless its own cell says what it must be."""
    if key in fault.cell.settings:
        return fault
    cell = replace(fault.cell, settings={**fault.cell.settings, key: value})
    return replace(fault, cell=cell)


def _step(fault: Fault, draw: random.Random) -> Fault:
    if "step" not in fault.takes or fault.cell.step == CAPTURES_AT:
        return fault
    steps = [s for s in STEPS if s > CAPTURES_AT or not fault.cell.graph]
    return replace(fault, cell=replace(fault.cell, step=draw.choice(steps)))


def _rank(fault: Fault, draw: random.Random) -> Fault:
    if "rank" not in fault.takes or fault.everywhere:
        return fault
    return replace(fault, cell=replace(fault.cell, rank=0))


def _layout(fault: Fault, draw: random.Random) -> Fault:
    return _with(fault, "parallel", dict(draw.choice(LAYOUTS)))


def _dtype(fault: Fault, draw: random.Random) -> Fault:
    return _with(fault, "dtype", "bf16")


def _fsdp(fault: Fault, draw: random.Random) -> Fault:
    return _with(fault, "fsdp", {"pool": draw.choice(POOLS)})


def _microbatches(fault: Fault, draw: random.Random) -> Fault:
    return _with(fault, "microbatches", draw.choice(MICROBATCHES))


def _seed(fault: Fault, draw: random.Random) -> Fault:
    return _with(fault, "seed", draw.randrange(2, 1 << 20))


def _tensor(fault: Fault, draw: random.Random) -> Fault:
    pointer = fault.points_at
    if "tensor" not in fault.takes or pointer is None or not pointer.tensor:
        return fault
    name = draw.choice(TENSORS)
    cell: Cell = replace(fault.cell, tensor=name)
    module = name.rpartition(".")[0]
    return replace(fault, cell=cell, points_at=replace(pointer, module=module, tensor=name))


_CHANGES: tuple[_Change, ...] = (
    _step, _rank, _layout, _dtype, _fsdp, _microbatches, _seed, _tensor,
)  # fmt: skip
