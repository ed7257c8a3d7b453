"""Parameters by the names of the whole model: stretches, names of modules around, refusals."""

import pytest
import torch
from torch import nn

from fsdp_core.parallel.param_sharding import (
    Cut,
    Stretch,
    consecutive,
    join_stretches,
    named_cuts,
    named_stretches,
    set_stretches,
)

CUTS = (Cut("tp", 0, 2, 1),)


def branch() -> nn.Module:
    """A linear layer two modules deep."""
    return nn.ModuleDict({"mlp": nn.ModuleDict({"fused": nn.Linear(3, 6)})})


def test_names_are_those_of_the_whole_model() -> None:
    """Names join the module's, or that of the module around it; others keep theirs."""
    model = branch()
    mlp = model.get_submodule("mlp")
    set_stretches(mlp, {
        "fused.weight": consecutive({"gate.weight": 4, "up.weight": 2}, CUTS),
    })  # fmt: skip
    found = named_stretches(model)
    assert [s.name for s in found["mlp.fused.weight"]] == ["mlp.gate.weight", "mlp.up.weight"]
    assert found["mlp.fused.bias"] == (Stretch("mlp.fused.bias"),)
    assert named_cuts(model) == {"mlp.fused.weight": CUTS, "mlp.fused.bias": ()}
    set_stretches(mlp, {"fused.bias": Stretch("../norm.weight")})
    assert named_stretches(model)["mlp.fused.bias"] == (Stretch("norm.weight"),)


def test_stretches_lie_one_after_another() -> None:
    """Each is its own part of the parameter, along its dim, and they join to it."""
    parameter = torch.randn(2, 6, 3)
    stretches = consecutive({"a": 4, "b": 2}, CUTS, dim=1)
    parts = [stretch.of(parameter) for stretch in stretches]
    assert [part.shape[1] for part in parts] == [4, 2]
    assert torch.equal(join_stretches(stretches, parts), parameter)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"fused.wait": Stretch("a")}, "Expected a parameter of ModuleDict, got 'fused.wait'"),
        ({"fused.weight": consecutive({"a": 4}, CUTS)}, "of 6 together, got 4"),
        ({"fused.weight": (Stretch("a", CUTS, 0, 0, 4), Stretch("b", CUTS, 0, 3, 3))},
         "one after another"),
        ({"fused.weight": (Stretch("a", CUTS, 0, 0, 4), Stretch("b", (), 0, 4, 2))},
         "the same axes"),
        ({"fused.weight": (Stretch("a", CUTS), Stretch("b", CUTS))}, "one after another"),
    ],
)  # fmt: skip
def test_wrong_tables_are_refused(table: dict[str, Stretch], said: str) -> None:
    """A table that leaves elements out or gives them twice would lose weights silently."""
    with pytest.raises(ValueError, match=said):
        set_stretches(branch().get_submodule("mlp"), table)
