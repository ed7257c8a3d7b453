"""The weight buffers of one group on one rank: which there are, and how they follow each other."""

from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.dtypes import cast_floats
from fsdp_core.fsdp.param_group import Gradients, ParamGroup
from tests.support.operators import Seeing
from tests.unit.fsdp_core.fsdp.nets import STRATEGIES, batch, local, run

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


# --- gradient buffers of one group on one rank: what is copied when, what is kept, what is dropped


STREAM = Device("cpu").current_stream()


def unit_of(mesh: DeviceMesh, net: nn.Module, **options: Any) -> tuple[FSDPModule, Gradients]:
    root = cast("FSDPModule", fully_shard(net, mesh=mesh, **options))
    (group,) = root.fsdp_groups
    return root, group.gradients


def pair(mesh: DeviceMesh, **options: Any) -> tuple[FSDPModule, Gradients]:
    torch.manual_seed(0)
    return unit_of(mesh, nn.Linear(3, 2), **options)


def arrive(gradients: Gradients, index: int, value: float) -> None:
    parameter = gradients.unsharded[index]
    parameter.data = torch.zeros(gradients.layout.slots[index].shape)
    parameter.grad = torch.full_like(parameter, value)
    gradients.arrived(index)


def reduce(gradients: Gradients) -> None:
    gradients.reduce(STREAM, final=True)
    gradients.release_full(STREAM)


def values(gradients: Gradients) -> list[float | None]:
    found: list[float | None] = []
    for parameter in gradients.sharded:
        grad = parameter.grad
        found.append(None if grad is None else float(local(grad).flatten()[0]))
        assert grad is None or len(local(grad).unique()) == 1
    return found


def test_gradients_are_copied_a_quarter_at_a_time(mesh: DeviceMesh) -> None:
    """Eight equal gradients are moved by four kernels, however they come; none is left over."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))
    root, gradients = unit_of(mesh, layers)
    copied: list[int] = []

    def see(operator: Any, args: Any, _: Any) -> None:
        if operator is torch.ops.aten._foreach_copy_.default:
            copied.append(len(args[0]))

    with Seeing(see):
        run(layers, torch.ones(4, 8))
    assert copied == [2, 2, 2, 2]
    assert gradients.waiting_numel == 0
    assert all(p.grad is None for p in gradients.unsharded)
    assert root.fsdp_schedule.reductions == []


def test_a_stolen_gradient_is_an_error(mesh: DeviceMesh) -> None:
    """A gradient that arrived and was then set to None is an error, not a zero."""
    _, gradients = pair(mesh)
    arrive(gradients, 0, 1.0)
    gradients.unsharded[0].grad = None
    with pytest.raises(RuntimeError, match="the gradient that has arrived, got None"):
        gradients.copy_in(None, STREAM)


def test_kept_gradients_keep_objects_and_memory(mesh: DeviceMesh) -> None:
    """With `keep` each `grad` is the same object over the same memory, however often zeroed."""
    root, gradients = pair(mesh, keep_grads=True)
    assert gradients.main_grad is not None
    address = gradients.main_grad.data_ptr()
    seen: list[list[Any]] = []
    for number in (1, 2, 3):
        arrive(gradients, 0, float(number))
        arrive(gradients, 1, 10.0)
        gradients.copy_in(None, STREAM)
        reduce(gradients)
        if number == 2:
            assert values(gradients) == [3.0, 20.0], "not zeroed in between"
            root.zero_main_grads()
        seen.append([p.grad for p in gradients.sharded] if number != 2 else seen[0])
    assert values(gradients) == [3.0, 10.0]
    assert all(a is b for a, b in zip(seen[0], seen[2], strict=True))
    assert gradients.main_grad.data_ptr() == address
    first = gradients.sharded[0].grad
    assert local(first).untyped_storage().data_ptr() == address


def test_kept_memory_is_reduced_into_only_while_nothing_in_it_counts(mesh: DeviceMesh) -> None:
    """The first reduction after zeroing writes where gradients are kept, the next one beside it."""
    root, gradients = pair(mesh, keep_grads=True)
    direct = []
    for number in range(3):
        arrive(gradients, 0, 1.0)
        gradients.copy_in(None, STREAM)
        used = gradients.reduce(STREAM, final=True)
        direct.append(any(tensor is gradients.main_grad for tensor in used))
        gradients.release_full(STREAM)
        if number == 1:
            assert values(gradients) == [2.0, None]
            root.zero_main_grads()
    assert direct == [True, False, True]


def test_dtypes_of_the_reduction_and_at_rest(mesh: DeviceMesh) -> None:
    """The full buffer has the reduction's dtype, gradients at rest that of the main weight."""
    _, gradients = pair(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    arrive(gradients, 0, 1.00390625)
    gradients.copy_in(None, STREAM)
    assert gradients._full is not None
    assert gradients._full.dtype == torch.bfloat16
    reduce(gradients)
    grad = gradients.sharded[0].grad
    assert grad is not None
    assert grad.dtype == torch.float32
    assert values(gradients) == [1.0, None], "rounded to even on the way in"


def write_main_grad(gradients: Gradients, value: float) -> None:
    """What a kernel of the first parameter does in backward, by what it read before."""
    parameter: Any = gradients.unsharded[0]
    parameter.data = torch.zeros(2, 3)
    gradients.expose(None, STREAM)
    if parameter.overwrite_main_grad:
        parameter.main_grad.fill_(value)
    else:
        parameter.main_grad.add_(value)
    parameter.grad_added_to_main_grad = True
    parameter.grad = torch.full((2, 3), 99.0)  # a stand-in for autograd
    gradients.arrived(0)


@pytest.mark.parametrize("marked", [False, True])
def test_kernels_write_into_the_full_buffer(mesh: DeviceMesh, marked: bool) -> None:
    """An exposed `main_grad` is the parameter's place in the buffer; what lies there is reduced."""
    net = nn.Linear(3, 2)
    net.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    if marked:
        net.weight.overwrite_main_grad = True  # type: ignore[attr-defined]
    _, gradients = unit_of(mesh, net)
    parameter: Any = gradients.unsharded[0]
    for total in (8.0, 16.0):
        write_main_grad(gradients, 3.0)
        write_main_grad(gradients, 5.0)
        assert parameter.grad is None
        assert gradients.waiting_numel == 0
        assert (gradients._views[0] == 8.0).all()
        reduce(gradients)
        assert values(gradients) == [total, None]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_absent_is_zero_in_the_sum_and_none_at_rest(
    mesh: DeviceMesh, strategy: str, keep: bool
) -> None:
    """NaN that a buffer's last user left leaks neither by absent gradients nor by padding."""
    root, gradients = pair(mesh, strategy=strategy, keep_grads=keep, pool="double")
    pool = root.fsdp_schedule.pool
    total, key = gradients.layout.total_numel, gradients._key
    pool.acquire(key, total, torch.float32, STREAM).fill_(torch.nan)
    pool.release(key, STREAM)
    arrive(gradients, 1, 4.0)
    gradients.copy_in(pool, STREAM)
    reduce(gradients)
    assert values(gradients) == [None, 4.0]
    gradients.reduce_unused = True
    arrive(gradients, 1, 4.0)
    gradients.copy_in(pool, STREAM)
    reduce(gradients)
    assert values(gradients) == [0.0, 8.0]
    if keep:
        assert gradients.main_grad is not None
        assert gradients.main_grad.isfinite().all()
        assert gradients.main_grad.sum() == 16.0
