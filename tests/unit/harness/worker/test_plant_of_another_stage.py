"""A fault that is planted in a part of the model which its rank does not hold."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from fsdp_core.train import Trainer
from harness.plant_spec import PlantSpec
from harness.worker.plant import PlantedFault
from harness.worker.plants.seams import NotHere, module_named


class _File:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)


def _trainer() -> Trainer:
    """Of the first stage of a pipeline, without layer 1."""
    first = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Identity()})})
    return cast(
        "Trainer",
        SimpleNamespace(stages=[first], config=SimpleNamespace(graph_warmup_steps=2)),
    )


def _fault(name: str) -> PlantedFault:
    return PlantedFault(PlantSpec(fault=name, step=3, rank=0), 0, 2, cast("Any", _File()))


def test_a_fault_of_all_ranks_acts_where_its_part_is() -> None:
    """`row_sum_missing` is of every rank: the first stage, which has no layer 1, goes on."""
    _fault("row_sum_missing").before_step(_trainer(), 3)


def test_a_fault_of_one_rank_says_that_the_rank_does_not_hold_its_part() -> None:
    """`nan_activation` names a rank: the wrong one is a mistake, told in one line."""
    with pytest.raises(NotHere, match=r"holds no layers\.1\.mlp\.mlp: plant the fault on one"):
        _fault("nan_activation").before_step(_trainer(), 3)


def test_what_the_rank_holds_is_found() -> None:
    """The module itself."""
    trainer = _trainer()
    assert isinstance(module_named(trainer, "layers.0"), nn.Identity)
