"""A fault that is planted in a part of the model which its rank does not hold."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

from fsdp_core.parallel.axes import Axis
from fsdp_core.parallel.tensor import reduce_replicated_of
from fsdp_core.train import Trainer
from harness.plant_spec import PlantSpec
from harness.worker.plant import PlantedFault
from harness.worker.plants.seams import NotHere, module_named


class _File:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)


def _trainer(**layers: nn.Module) -> Trainer:
    """Of the first stage of a pipeline, without layer 1 if it is not given."""
    first = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Identity(), **layers})})
    return cast(
        "Trainer",
        SimpleNamespace(stages=[first], config=SimpleNamespace(graph_warmup_steps=2)),
    )


def _fault(name: str, file: _File | None = None) -> PlantedFault:
    spec = PlantSpec(fault=name, step=3, rank=0)
    return PlantedFault(spec, 0, 2, cast("Any", file or _File()))


def _with_norm(norm: nn.Module) -> Trainer:
    return _trainer(**{"1": nn.ModuleDict({"mlp": nn.ModuleDict({"norm": norm})})})


def test_a_fault_of_all_ranks_acts_where_its_part_is() -> None:
    """`row_sum_missing` is of every rank: the first stage, which has no layer 1, goes on."""
    file = _File()
    _fault("row_sum_missing", file).before_step(_trainer(), 3)
    assert file.records == []  # what is not planted is not said to be


def test_a_norm_whose_gradient_nobody_sums_cannot_lose_the_sum() -> None:
    """Without tp there is nothing that `norm_sum_missing` could take away: no crash, no record."""
    file = _File()
    _fault("norm_sum_missing", file).before_step(_with_norm(nn.Identity()), 3)
    assert file.records == []


def test_a_norm_that_is_summed_loses_the_sum() -> None:
    """`norm_sum_missing` leaves the norm an axis of one rank, and says so."""
    norm, file = nn.LayerNorm(2), _File()
    axis = Axis(name="tp", size=2, rank=0, group=cast("Any", None))
    reduce_replicated_of(norm, ["weight"], axis)
    _fault("norm_sum_missing", file).before_step(_with_norm(norm), 3)
    assert cast("Any", norm)._reduced_axis.size == 1
    assert [(record.name, record.step) for record in file.records] == [("planted", 3)]


def test_a_fault_of_one_rank_says_that_the_rank_does_not_hold_its_part() -> None:
    """`nan_activation` names a rank: the wrong one is a mistake, told in one line."""
    with pytest.raises(NotHere, match=r"holds no layers\.1\.mlp\.mlp: plant the fault on one"):
        _fault("nan_activation").before_step(_trainer(), 3)


def test_what_the_rank_holds_is_found() -> None:
    """The module itself."""
    trainer = _trainer()
    assert isinstance(module_named(trainer, "layers.0"), nn.Identity)
