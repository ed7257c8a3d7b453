"""`fully_shard` on one rank: what it refuses, what it leaves, what it costs."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp.api import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.pool import make_pool

STRATEGIES = ["no_shard", "optim_grads_params"]


class Net(nn.Module):
    """Two inner units and parameters of the root's own, a bias and a 0-d one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return cast("torch.Tensor", self.head(x) * self.gain)


def build(seed: int = 0) -> Net:
    """The net with random weights."""
    torch.manual_seed(seed)
    return Net()


def shard(net: Net, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    """Wrap the blocks, then the root."""
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return cast("FSDPModule", fully_shard(net, mesh=mesh, **options))


def run(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Forward and backward of a simple loss."""
    loss = cast("torch.Tensor", net(x)).square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wrapping_keeps_the_weights_bits(mesh: DeviceMesh, strategy: str) -> None:
    """Wrapping changes no bit of any parameter, at rest and gathered."""
    net = build()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    fsdp = shard(net, mesh, strategy=strategy)
    assert isinstance(net, FSDPModule)
    assert isinstance(net, Net)
    for unit in fsdp.fsdp_schedule.units:
        for name, parameter in zip(unit.group.names, unit.group.sharded, strict=True):
            assert torch.equal(parameter.detach().reshape(-1), before[name].reshape(-1)), name
        unit.unshard()
        for name, parameter in zip(unit.group.names, unit.group.unsharded, strict=True):
            assert torch.equal(parameter, before[name]), name
        unit.reshard()
    assert sorted(n for u in fsdp.fsdp_schedule.units for n in u.group.names) == sorted(before)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_equal_plain_torch(mesh: DeviceMesh, strategy: str) -> None:
    """On one rank loss and gradients, accumulated over two batches, are plain torch's bits."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh, strategy=strategy)
    for number in (1, 2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        assert torch.equal(run(net, x), run(plain, x))
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for unit in fsdp.fsdp_schedule.units:
        for name, parameter in zip(unit.group.names, unit.group.sharded, strict=True):
            wanted = expected[name]
            assert wanted is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.reshape(-1), wanted.reshape(-1)), name
    fsdp.zero_main_grads()
    assert all((unit.group.main_grad == 0).all() for unit in fsdp.fsdp_schedule.units)


@pytest.mark.parametrize("pool", ["dynamic", "double"])
def test_rest_memory_is_shards_and_pool(mesh: DeviceMesh, pool: str) -> None:
    """At rest only the flat buffers live: the full parameters that were wrapped are gone."""
    device = Device("cpu")
    with device.counting_memory():
        torch.manual_seed(0)
        net = Net()
        fsdp = shard(
            net,
            mesh,
            pool=make_pool(pool, device, persistent_on_miss=True),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )
        groups = [unit.group for unit in fsdp.fsdp_schedule.units]
        # main_weight and main_grad in float32, model_weight in bf16.
        assert device.live_bytes() == sum(g.layout.shard_numel * (4 + 4 + 2) for g in groups)


def test_unsharded_memory_is_released(mesh: DeviceMesh) -> None:
    """After forward and backward with the dynamic pool, live bytes are back to those at rest."""
    device = Device("cpu")
    x = torch.randn(4, 6)
    with device.counting_memory():
        net = build()
        fsdp = shard(net, mesh, pool=make_pool("dynamic", device, persistent_on_miss=True))
        rest = device.live_bytes()
        for _ in range(3):
            run(net, x)
            assert device.live_bytes() == rest
        assert device.peak_bytes() > rest
    assert not any(unit.group.is_unsharded for unit in fsdp.fsdp_schedule.units)


def test_no_more_than_two_gathered_blocks(mesh: DeviceMesh) -> None:
    """The double pool's gathered memory does not grow with the number of layers."""
    device = Device("cpu")
    held = []
    for layers in (2, 6):
        with device.counting_memory():
            net = build()
            net.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
            fsdp = shard(net, mesh, pool=make_pool("double", device, persistent_on_miss=True))
            rest = device.live_bytes()
            run(net, torch.randn(4, 6))
            run(net, torch.randn(4, 6))
            held.append(device.live_bytes() - rest)
        del fsdp
    assert held[0] == held[1] > 0


def test_a_parameter_without_gradient_is_named(mesh: DeviceMesh) -> None:
    """A parameter of a unit in the backward pass that gets no gradient is an error naming it."""
    net = build()
    net.blocks[1].register_parameter("forgotten", nn.Parameter(torch.ones(2)))
    shard(net, mesh)
    with pytest.raises(RuntimeError, match=r"unit 'blocks.1'.*1 never came.*'blocks.1.forgotten'"):
        run(net, torch.ones(4, 6))


def test_backward_that_raised_does_not_silence_the_next(mesh: DeviceMesh) -> None:
    """After an exception inside backward the next pass is right, complete and still validated."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    x = torch.ones(4, 6)

    def refuse(grad: torch.Tensor) -> None:
        raise KeyError("planted")

    output = net(x)
    hook = output.register_hook(refuse)
    with pytest.raises(KeyError, match="planted"):
        output.sum().backward()
    hook.remove()

    def poison(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(refuse)

    middle = net.blocks[0].register_forward_hook(poison)
    with pytest.raises(KeyError, match="planted"):
        run(net, x)
    middle.remove()
    for unit in fsdp.fsdp_schedule.units:
        unit.reshard()
    fsdp.zero_main_grads()
    assert torch.equal(run(net, x), run(plain, x))
    expected = dict(plain.named_parameters())
    for unit in fsdp.fsdp_schedule.units:
        assert not unit.group.is_unsharded
        assert not unit.group.has_grads
        for name, parameter in zip(unit.group.names, unit.group.sharded, strict=True):
            wanted = expected[name].grad
            assert wanted is not None
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.reshape(-1), wanted.reshape(-1)), name


def test_half_a_gradient_is_dropped(mesh: DeviceMesh) -> None:
    """Gradients that came in part before an exception hold no buffer after the next pass."""
    net = build()
    fsdp = shard(net, mesh)
    root = next(unit for unit in fsdp.fsdp_schedule.units if unit.name == "root")
    weight = root.group.unsharded[root.group.names.index("head.weight")]

    def refuse(grad: torch.Tensor) -> None:
        raise KeyError("planted")

    hook = weight.register_hook(refuse)
    with pytest.raises(KeyError, match="planted"):
        run(net, torch.ones(4, 6))
    hook.remove()
    assert root.group.has_grads
    net.blocks[0](torch.ones(4, 6)).sum().backward()
    assert not root.group.has_grads


def test_forward_that_raised_leaves_the_unit_usable(mesh: DeviceMesh) -> None:
    """After an exception inside a unit's forward, `reshard` and another pass give plain's bits."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(4, 5))
    for unit in fsdp.fsdp_schedule.units:
        unit.reshard()
        assert not unit.group.is_unsharded
    x = torch.ones(4, 6)
    assert torch.equal(run(net, x), run(plain, x))


def test_refresh_casts_main_weights(mesh: DeviceMesh) -> None:
    """The compute copy follows the main weights only when refreshed, rounded to nearest."""
    net = build()
    fsdp = shard(net, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    group = fsdp.fsdp_schedule.units[0].group
    with torch.no_grad():
        group.main_weight.fill_(1.00390625 + 2**-10)
    assert not (group.model_weight.float() == 1.0078125).any()
    fsdp.refresh_model_weights()
    assert (group.model_weight.float() == 1.0078125).all()
    net.blocks[0].unshard()  # type: ignore[operator]
    assert group.unsharded[0].dtype == torch.bfloat16
    assert (group.unsharded[0].float() == 1.0078125).all()
    net.blocks[0].reshard()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "zero3"}, r"Expected a strategy of \('no_shard', 'optim_grads_params'\)"),
        ({"strategy": ""}, "Expected a strategy"),
    ],
)
def test_refuses_an_unknown_strategy(mesh: DeviceMesh, options: Any, message: str) -> None:
    """A strategy that is not built is an error with the legal ones."""
    with pytest.raises(ValueError, match=message):
        fully_shard(build(), mesh=mesh, **options)


def test_refuses_a_mesh_of_several_axes(mesh: DeviceMesh) -> None:
    """A mesh of two axes needs placements that are not built."""
    del mesh
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="a mesh of one axis, got 2 axes"):
        fully_shard(build(), mesh=both)


def test_refuses_a_second_wrap_and_an_empty_module(mesh: DeviceMesh) -> None:
    """Wrapping twice, or a module whose parameters all belong to inner units, is an error."""
    block = nn.Linear(3, 3)
    fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match="no unit yet"):
        fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match="parameters of its own"):
        fully_shard(nn.Sequential(block), mesh=mesh)
    with pytest.raises(ValueError, match="parameters of its own"):
        fully_shard(nn.ReLU(), mesh=mesh)


def test_refuses_tied_parameters(mesh: DeviceMesh) -> None:
    """A parameter in two places would silently become two: refused, within a unit and across."""
    net = build()
    net.blocks[1].weight = net.blocks[0].weight
    with pytest.raises(ValueError, match=r"blocks\.1\.weight.*shared"):
        fully_shard(net, mesh=mesh)
    net = build()
    net.blocks[1].weight = net.blocks[0].weight
    fully_shard(net.blocks[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"weight.*shared"):
        fully_shard(net.blocks[1], mesh=mesh)


def test_refuses_frozen_and_foreign_parameters(mesh: DeviceMesh) -> None:
    """A frozen parameter would silently train, an integer one would be cast: both refused."""
    net = build()
    net.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"head\.weight.*requires_grad"):
        fully_shard(net, mesh=mesh)
    net = build()
    net.head.weight = nn.Parameter(torch.ones(3, 6, dtype=torch.int64), requires_grad=False)
    with pytest.raises(ValueError, match=r"head\.weight"):
        fully_shard(net, mesh=mesh)
