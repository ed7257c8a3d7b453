"""The weight buffers of one group on one rank: which there are, and how they follow each other."""

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.param_group import ParamGroup, cast_floats
from tests.support.operators import Seeing
from tests.unit.fsdp_core.fsdp.nets import STRATEGIES, batch, local

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def group_of(mesh: DeviceMesh, module: nn.Module | None = None, **options: Any) -> ParamGroup:
    torch.manual_seed(0)
    wrapped = fully_shard(module or nn.Linear(6, 6), mesh=mesh, **options)
    (group,) = cast("FSDPModule", wrapped).fsdp_groups
    return group


def gathered(group: ParamGroup, index: int = 0) -> torch.Tensor:
    stream = group.device.current_stream()
    group.unshard(stream)
    group.register_unsharded()
    found = group.unsharded[index].detach().clone()
    group.reshard(stream)
    return found


@pytest.mark.parametrize(
    ("strategy", "dtype", "numel"),
    [
        ("no_shard", torch.float32, None),
        ("no_shard", torch.bfloat16, 1),
        ("optim", torch.float32, 1),
        ("optim", torch.bfloat16, 1),
        ("optim_grads", torch.bfloat16, 1),
        ("optim_grads_params", torch.float32, None),
        ("optim_grads_params", torch.bfloat16, None),
        (("optim", "optim_grads_params"), torch.float32, 1),
        (("optim", "optim_grads_params"), torch.bfloat16, 1),
        (("no_shard", "optim_grads_params"), torch.bfloat16, None),
        (("no_shard", "no_shard"), torch.float32, None),
    ],
)
def test_which_copies_are_kept(
    mesh: DeviceMesh, strategy: Any, dtype: torch.dtype, numel: int | None
) -> None:
    """A copy for compute is kept where the weight is cut less, or is whole in another dtype."""
    if not isinstance(strategy, str):
        mesh = init_device_mesh("cpu", (1, 1))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    group = group_of(mesh, strategy=strategy, mp_policy=policy)
    if numel is None:
        assert group.model_weight is None
    else:
        assert group.model_weight is not None
        assert group.model_weight.dtype == dtype
        assert group.model_weight.numel() == group.layout.total_numel
    before = local(group.sharded[0].detach()).to(dtype)
    assert torch.equal(gathered(group), before)


@pytest.mark.parametrize("strategy", STRATEGIES[:3])
def test_a_kept_copy_is_made_once_a_change(mesh: DeviceMesh, strategy: str) -> None:
    """Gathering again without a change in between copies and communicates nothing."""
    group = group_of(mesh, strategy=strategy, mp_policy=BF16)
    stream = group.device.current_stream()

    def cost() -> int:
        seen: list[str] = []
        with Seeing(lambda operator, *_: seen.append(operator.name())):
            group.unshard(stream)
            group.reshard(stream)
        return sum(name.startswith(("aten::copy_", "c10d::")) for name in seen)

    assert cost() > 0
    assert cost() == 0
    with torch.no_grad():
        group.sharded[0].add_(1.0)
    assert cost() > 0
    assert cost() == 0
    group.forget_freshness()
    assert cost() > 0


def test_a_change_while_gathered_is_known(mesh: DeviceMesh) -> None:
    """What is gathered counts as out of date once the main weight is written."""
    group = group_of(mesh)
    stream = group.device.current_stream()
    group.unshard(stream)
    current = [group.is_current]
    with torch.no_grad():
        group.sharded[0].zero_()
    current.append(group.is_current)
    group.reshard(stream)
    group.unshard(stream)
    current.append(group.is_current)
    assert current == [True, False, True]
    assert (group.unsharded[0] == 0).all()
    group.reshard(stream)


def test_registration_follows_the_stage(mesh: DeviceMesh) -> None:
    """The module holds the gathered parameter only from when the gather was waited for."""
    module = nn.Linear(6, 6)
    group = group_of(mesh, module)
    stream = group.device.current_stream()

    def held() -> str:
        return "sharded" if module.weight is group.sharded[0] else (
            "gathered" if module.weight is group.unsharded[0] else "neither")  # fmt: skip

    for _ in range(2):
        assert held() == "sharded"
        group.register_unsharded()
        assert held() == "sharded", "nothing is gathered"
        group.unshard(stream)
        group.unshard(stream)
        assert held() == "sharded", "still being written"
        group.register_unsharded()
        assert held() == "gathered"
        group.reshard(stream)
        group.reshard(stream)
    group.unshard(stream)
    group.reshard(stream)
    assert held() == "sharded"


def test_freezing_at_rest_reaches_compute(mesh: DeviceMesh) -> None:
    """`requires_grad` set on the parameter at rest holds for the gathered one, both ways."""
    module = nn.Linear(6, 6)
    group = group_of(mesh, module)
    for wanted in (False, True):
        module.weight.requires_grad_(wanted)
        gathered(group)
        assert [p.requires_grad for p in group.unsharded] == [wanted, True]


@pytest.mark.parametrize("main", [None, torch.float32])
def test_main_dtype(mesh: DeviceMesh, main: torch.dtype | None) -> None:
    """Main weights have the dtype asked for, or the one that the parameters had."""
    module = nn.Linear(6, 6).bfloat16()
    bits = module.weight.detach().clone()
    group = group_of(mesh, module, mp_policy=MixedPrecisionPolicy(main_dtype=main))
    assert group.main_weight.dtype == (main or torch.bfloat16)
    assert module.weight.dtype == group.main_weight.dtype
    assert gathered(group).dtype == torch.bfloat16
    assert torch.equal(gathered(group), bits)


def test_noncontiguous_and_0d_parameters(mesh: DeviceMesh) -> None:
    """A transposed parameter and a scalar keep their values."""
    module = nn.Linear(6, 4)
    torch.manual_seed(1)
    source = torch.randn(6, 4)
    module.weight = nn.Parameter(source.t())
    module.register_parameter("gain", nn.Parameter(torch.tensor(2.5)))
    group = group_of(mesh, module)
    assert torch.equal(gathered(group, group.names.index("weight")), source.t())
    assert torch.equal(gathered(group, group.names.index("gain")), torch.tensor(2.5))
    assert module(batch(1)).shape == (4, 4)


def test_a_parameter_without_elements_keeps_its_shape(mesh: DeviceMesh) -> None:
    """Rows of no width are rows all the same, at rest and gathered."""
    module = nn.Linear(6, 6)
    module.register_parameter("nothing", nn.Parameter(torch.zeros(8, 0)))
    group = group_of(mesh, module)
    index = group.names.index("nothing")
    assert local(group.sharded[index]).shape == (8, 0)
    assert gathered(group, index).shape == (8, 0)


class Pair(NamedTuple):
    values: torch.Tensor
    number: int


def test_only_floating_point_tensors_are_cast() -> None:
    """Integers, bools and things that are no tensors stay; containers keep their types."""
    floats, ints, flags = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2) > 0
    tree = {"a": [floats, ints], "b": Pair(floats.double(), 3), "c": (flags, None, "x")}
    cast = cast_floats(tree, torch.bfloat16)
    assert cast["a"][0].dtype == torch.bfloat16
    assert cast["a"][1] is ints
    assert isinstance(cast["b"], Pair)
    assert (cast["b"].values.dtype, cast["b"].number) == (torch.bfloat16, 3)
    assert cast["c"][0] is flags
    assert cast["c"][1:] == (None, "x")
    assert cast_floats(ints, torch.bfloat16) is ints
    assert cast_floats(floats, torch.bfloat16).dtype == torch.bfloat16
    assert tree["a"][0] is floats, "the caller's containers are not changed"


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_nothing_is_copied_where_nothing_changes(dtype: torch.dtype | None) -> None:
    """A tensor that has the dtype, or no dtype asked for, comes back as the same object."""
    floats = torch.ones(2)
    assert cast_floats(floats, dtype) is floats
    assert cast_floats([floats], dtype)[0] is floats
    tree = {"a": floats}
    if dtype is None:
        assert cast_floats(tree, dtype) is tree


def test_casting_is_differentiable() -> None:
    """Gradients go through a cast and come back in the dtype of what was cast."""
    x = torch.ones(3, requires_grad=True)
    (cast_floats((x, 1), torch.bfloat16)[0] * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert (x.grad == 2).all()


@pytest.mark.parametrize("of", [MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({"param_dtype": torch.bfloat16}, torch.bfloat16),
        ({"param_dtype": torch.bfloat16, "cast_forward_inputs": False}, torch.float32),
        ({"output_dtype": torch.bfloat16}, torch.float32),
    ],
)
def test_inputs_follow_the_parameters(
    mesh: DeviceMesh, of: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Inputs are cast to the dtype of parameters, unless told not to; by torch's policy, too."""
    seen, model = [], nn.Embedding(2, 2)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[1].dtype))
    model.forward = lambda *args: args[1]  # type: ignore[method-assign]
    fully_shard(model, mesh=mesh, mp_policy=of(**options))
    model(torch.zeros(2, dtype=torch.long), torch.ones(2))
    assert seen == [dtype]
