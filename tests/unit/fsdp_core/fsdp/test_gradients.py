"""Gradient buffers of one group on one rank: what is copied when, what is kept, what is dropped."""

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.param_group import Gradients
from tests.support.operators import Seeing
from tests.unit.fsdp_core.fsdp.nets import STRATEGIES, local, run

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
