"""`FSDPModule`'s methods and the life of a unit, on one rank: right bits whatever happens."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from tests.unit.fsdp_core.fsdp.nets import (
    STRATEGIES,
    assert_grads,
    batch,
    build,
    group_named,
    local,
    run,
    shard,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def as_unit(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module


# ---- gradients


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("keep_grads", [False, True])
def test_accumulation_without_sync(mesh: DeviceMesh, strategy: str, keep_grads: bool) -> None:
    """Without synchronisation gradients stay unreduced; the pass after brings the sum of all."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh, strategy=strategy, keep_grads=keep_grads)
    for _ in range(2):
        fsdp.set_requires_gradient_sync(False)
        for number in (1, 2):
            run(net, batch(number))
            run(plain, batch(number))
            assert all(p.grad is None for p in net.parameters())
        fsdp.set_requires_gradient_sync(True)
        run(net, batch(3))
        run(plain, batch(3))
        assert_grads(fsdp, plain)
        fsdp.zero_main_grads()
        plain.zero_grad()


@pytest.mark.parametrize("name", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
def test_divide_factor_is_of_one_unit(mesh: DeviceMesh, name: str) -> None:
    """The factor divides the gradients of its own unit and no other's."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    getattr(net.blocks[1], name)(4.0)
    run(net, batch(1))
    run(plain, batch(1))
    for parameter in plain.blocks[1].parameters():
        assert parameter.grad is not None
        parameter.grad.div_(4.0)
    assert_grads(fsdp, plain)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("keep_grads", [True, False])
def test_a_step_without_gradients_changes_nothing(
    mesh: DeviceMesh, set_to_none: bool, keep_grads: bool
) -> None:
    """After `zero_grad`, whatever ran forward since."""
    net = build()
    shard(net, mesh, keep_grads=keep_grads)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(2):
        run(net, batch(number))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        before = [local(p.detach()).clone() for p in net.parameters()]
        optimizer.step()
        with torch.no_grad():
            net(batch(number))
        optimizer.step()
        assert all(map(torch.equal, before, [local(p.detach()) for p in net.parameters()]))


@pytest.mark.parametrize("told", ["refresh", "step"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_write_by_address_shows_when_told(mesh: DeviceMesh, strategy: str, told: str) -> None:
    """A kernel's write, which no version counter shows, is seen after a refresh or a step."""
    net = build()
    fsdp = shard(net, mesh, mp_policy=BF16, strategy=strategy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    net(batch(1))
    group = group_named(fsdp, "blocks.1")
    version = group.main_weight._version
    group.main_weight.numpy()[:] = 0.5
    assert group.main_weight._version == version
    if told == "refresh":
        fsdp.refresh_model_weights()
    else:
        optimizer.step()
    unit = as_unit(net.blocks[1])
    unit.unshard()
    assert (group.unsharded[0] == 0.5).all()
    unit.reshard()


def test_unshard_is_reentrant(mesh: DeviceMesh) -> None:
    """Gathering twice gathers once; a handle may be waited for more than once, or never."""
    net = build()
    fsdp = shard(net, mesh)
    block = as_unit(net.blocks[0])
    handle = block.unshard(async_op=True)
    assert handle is not None
    handle.wait()
    handle.wait()
    gathered = net.blocks[0].weight
    assert block.unshard() is None
    assert net.blocks[0].weight is gathered
    block.reshard()
    block.reshard()
    assert net.blocks[0].weight is not gathered
    block.unshard(async_op=True)
    block.reshard()
    assert not group_named(fsdp, "blocks.0").is_unsharded


# ---- the rest


def test_refusals(mesh: DeviceMesh) -> None:
    """What cannot be meant is refused by name."""
    net = build()
    fsdp = shard(net, mesh)
    with pytest.raises(RuntimeError, match="copy before sharding"):
        copy.deepcopy(net)
    with pytest.raises(ValueError, match="Expected a bool, got 2"):
        fsdp.set_reshard_after_forward(2)  # type: ignore[arg-type]
    plain: Any = net.head
    for name in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
        with pytest.raises(ValueError, match="Expected FSDP units to prefetch, got Linear"):
            getattr(fsdp, name)([plain])
    with pytest.raises(ValueError, match="a method 'encode' of FSDPNet, got none"):
        register_fsdp_forward_method(net, "encode")


def test_recursion_of_the_setters(mesh: DeviceMesh) -> None:
    """A setter of the root reaches every unit, unless told not to; one of a block reaches it."""
    net = build()
    fsdp = shard(net, mesh)
    units = fsdp.fsdp_schedule.units
    fsdp.set_reshard_after_forward(False, recurse=False)
    assert [u.reshard_after_forward for u in units] == [False, None, None]
    fsdp.set_reshard_after_forward(True)
    assert [u.reshard_after_forward for u in units] == [True] * 3
    as_unit(net.blocks[1]).set_reshard_after_backward(False)
    assert [u.reshard_after_backward for u in units] == [True, True, False]
    as_unit(net.blocks[0]).set_unshard_in_backward(False)
    assert [u.unshard_in_backward for u in units] == [True, False, True]


def test_forward_methods_of_units_and_others(mesh: DeviceMesh) -> None:
    """A registered method gathers like a forward; for a module that is no unit nothing happens."""

    class Encoder(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self(x) * 2)

        def project(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    encoder = Encoder(6, 6)
    register_fsdp_forward_method(encoder, "project")
    assert "project" not in vars(encoder)
    plain = copy.deepcopy(encoder)
    fsdp = cast("FSDPModule", fully_shard(encoder, mesh=mesh))
    register_fsdp_forward_method(encoder, "project")
    assert torch.equal(encoder.project(batch(1)), plain.project(batch(1)))
    encoder.project(batch(1)).square().sum().backward()
    plain.project(batch(1)).square().sum().backward()
    assert_grads(fsdp, plain)


def test_a_slice_of_a_wrapped_container_is_plain(mesh: DeviceMesh) -> None:
    """`model[1:]` of a wrapped Sequential is a plain Sequential of the same modules."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU())
    fully_shard(net, mesh=mesh)
    rest = net[1:]
    assert type(rest) is nn.Sequential
    assert list(rest) == list(net)[1:]


def test_changing_the_dtype_after_the_first_forward_is_refused(mesh: DeviceMesh) -> None:
    """Before it all parameters may get another; later gradients and states would be left behind."""
    net = build()
    shard(net, mesh)
    net.double()
    assert net(batch(1).double()).dtype == torch.float64
    assert {p.dtype for p in net.parameters()} == {torch.float64}
    with pytest.raises(RuntimeError, match=r"to stay torch\.float64, or all to get one dtype"):
        net.half()


def test_meta_parameters_are_filled_later(mesh: DeviceMesh) -> None:
    """A model wrapped on the meta device refuses to gather; filled, it trains like any other."""
    plain = build()
    with torch.device("meta"):
        net = build()
    fsdp = shard(net, mesh, strategy="optim")
    with pytest.raises(RuntimeError, match=r"got a meta tensor; call to_empty"):
        net(batch(1))
    net.to_empty(device="cpu")
    with torch.no_grad():
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            local(ours.data).copy_(theirs)
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)
