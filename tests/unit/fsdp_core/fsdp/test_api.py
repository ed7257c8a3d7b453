"""`fully_shard` on one rank: what it refuses, what it leaves, what it costs."""

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_core.device import Device
from fsdp_core.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    api,
    fully_shard,
)
from fsdp_core.fsdp.pool import make_pool
from tests.unit.fsdp_core.fsdp.nets import (
    STRATEGIES,
    Net,
    assert_grads,
    batch,
    build,
    group_named,
    local,
    run,
    shard,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wrapping_keeps_the_weights_bits(mesh: DeviceMesh, strategy: str) -> None:
    """Wrapping changes no bit of any parameter, at rest and gathered."""
    net = build()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    fsdp = shard(net, mesh, strategy=strategy)
    assert isinstance(net, FSDPModule)
    assert isinstance(net, Net)
    assert type(net).__name__ == "FSDPNet"
    assert {name: p.shape for name, p in net.named_parameters()} == {
        name: p.shape for name, p in before.items()
    }
    for unit in fsdp.fsdp_schedule.units:
        for group in unit.groups:
            for name, parameter in zip(group.names, group.sharded, strict=True):
                assert torch.equal(local(parameter.detach()), before[name]), name
        unit.unshard()
        unit.wait_unshard()
        for group in unit.groups:
            for name, parameter in zip(group.names, group.unsharded, strict=True):
                assert torch.equal(parameter, before[name]), name
        unit.reshard()
    assert sorted(n for group in fsdp.fsdp_groups for n in group.names) == sorted(before)


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_equal_plain_torch(mesh: DeviceMesh, strategy: str, keep_grads: bool) -> None:
    """On one rank loss and gradients, accumulated over two batches, are plain torch's bits."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh, strategy=strategy, keep_grads=keep_grads)
    for _ in range(2):
        for number in (1, 2):
            assert torch.equal(run(net, batch(number)), run(plain, batch(number)))
        assert_grads(fsdp, plain)
        fsdp.zero_main_grads()
        plain.zero_grad()
        assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rest_memory_is_the_formula(
    mesh: DeviceMesh, strategy: str, keep_grads: bool, dtype: torch.dtype
) -> None:
    """At rest live: main weights, kept gradients, and a compute copy where the weight is whole.

    Nothing else: the parameters that were wrapped are gone, and a copy would be the main weight
    itself where nothing is cut and the dtype is the same.
    """
    device = Device("cpu")
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    with device.counting_memory():
        net = build()
        fsdp = shard(net, mesh, strategy=strategy, keep_grads=keep_grads, mp_policy=policy)
        numel = sum(group.layout.total_numel for group in fsdp.fsdp_groups)
        copied = {"optim_grads_params": 0, "no_shard": int(dtype != torch.float32)}.get(strategy, 1)
        an_element = 4 + 4 * keep_grads + copied * dtype.itemsize
        assert device.live_bytes() == numel * an_element


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_memory_of_a_step_is_released(mesh: DeviceMesh, strategy: str) -> None:
    """After a step nothing but the gradients is added to what lives at rest; zeroed, nothing is."""
    device = Device("cpu")
    with device.counting_memory():
        net = build()
        fsdp = shard(net, mesh, strategy=strategy)
        rest = device.live_bytes()
        grads = 4 * sum(group.layout.total_numel for group in fsdp.fsdp_groups)
        if strategy == "no_shard":  # nothing is scattered: a piece a parameter, without padding
            specs = [spec for group in fsdp.fsdp_groups for spec in group.specs]
            grads = 4 * sum(spec.local_numel for spec in specs)
        for _ in range(3):
            for number in (1, 2):
                run(net, batch(number))
                assert device.live_bytes() == rest + grads
            fsdp.zero_main_grads()
            assert device.live_bytes() == rest
        assert device.peak_bytes() > rest + grads
    assert not any(group.is_unsharded for group in fsdp.fsdp_groups)


@pytest.mark.parametrize("pool", ["double", "traced"])
def test_no_more_than_two_gathered_blocks(mesh: DeviceMesh, pool: str) -> None:
    """The gathered memory of pools with fixed buffers does not grow with the number of layers."""
    device = Device("cpu")
    held = []
    for layers in (2, 6):
        with device.counting_memory():
            net = build()
            net.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))
            fsdp = shard(net, mesh, pool=make_pool(pool, device, persistent_on_miss=True))
            rest = device.live_bytes()
            for number in range(3):
                run(net, batch(number))
                fsdp.zero_main_grads()
            held.append(device.live_bytes() - rest)
        del fsdp
    assert held[0] == held[1] > 0


def test_the_roots_pool_serves_all_units(mesh: DeviceMesh) -> None:
    """Units that were wrapped with a pool each share the root's, and its schedule."""
    net = build()
    fsdp = shard(net, mesh, pool="double")
    assert {id(group.pool) for group in fsdp.fsdp_groups} == {id(fsdp.fsdp_schedule.pool)}
    assert {id(unit.schedule) for unit in fsdp.fsdp_schedule.units} == {id(fsdp.fsdp_schedule)}
    assert [unit.name for unit in fsdp.fsdp_schedule.units] == ["root", "blocks.0", "blocks.1"]
    assert fsdp.fsdp_schedule.root.modules == [net]


def test_a_list_is_one_unit(mesh: DeviceMesh) -> None:
    """Modules of a list become one unit that opens with the first and closes with the last."""
    net = build()
    plain = copy.deepcopy(net)
    made = fully_shard(list(net.blocks), mesh=mesh)
    assert made == list(net.blocks)
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    _, unit = fsdp.fsdp_schedule.units
    assert unit.modules == list(net.blocks)
    assert [g.names for g in unit.groups] == [
        ["blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias"]
    ]
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)


def test_parameters_of_several_dtypes_are_groups_of_one_unit(mesh: DeviceMesh) -> None:
    """Each dtype has buffers of its own; names say which group is meant."""
    net = build()
    net.head.half()
    net.forward = lambda x: net.head(net.blocks[0](x).half()).float() * net.gain  # type: ignore[method-assign]
    plain = copy.deepcopy(net)
    plain.forward = lambda x: plain.head(plain.blocks[0](x).half()).float() * plain.gain  # type: ignore[method-assign]
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    first, second = fsdp.fsdp_groups
    assert (first.name, second.name) == ("root", "root group 1")
    assert (first.main_weight.dtype, second.main_weight.dtype) == (torch.float32, torch.float16)
    assert second.names == ["head.weight"]
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)


def test_a_parameter_shared_inside_a_unit_stays_one(mesh: DeviceMesh) -> None:
    """Two places hold one parameter, at rest and gathered, and its gradient is the sum."""
    net = build()
    net.blocks[1].weight = net.blocks[0].weight
    plain = copy.deepcopy(net)
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    (group,) = fsdp.fsdp_groups
    assert group.names.count("blocks.0.weight") == 1
    assert "blocks.1.weight" not in group.names
    assert net.blocks[0].weight is net.blocks[1].weight
    fsdp.unshard()
    assert net.blocks[0].weight is net.blocks[1].weight
    assert not hasattr(net.blocks[0].weight, "to_local")
    fsdp.reshard()
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_parameter_is_left_alone(mesh: DeviceMesh, strategy: str) -> None:
    """A frozen parameter gets no gradient; thawed, it gets plain torch's."""
    net = build()
    net.head.weight.requires_grad_(False)
    net.blocks[0].requires_grad_(False)
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh, strategy=strategy)
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == [
        n for n, p in plain.named_parameters() if not p.requires_grad
    ]
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)
    for model in (net, plain):
        model.head.weight.requires_grad_(True)
        model.gain.requires_grad_(False)
    assert torch.equal(run(net, batch(2)), run(plain, batch(2)))
    assert_grads(fsdp, plain)


def test_ignored_parameters_stay_as_they_are(mesh: DeviceMesh) -> None:
    """An ignored parameter is the same object after wrapping, in no group, and trains as before."""
    net = build()
    plain = copy.deepcopy(net)
    gain = net.gain
    fsdp = shard(net, mesh, ignored_params={gain})
    assert net.gain is gain
    assert not any("gain" in group.names for group in fsdp.fsdp_groups)
    run(net, batch(1))
    run(plain, batch(1))
    assert gain.grad is not None
    assert torch.equal(gain.grad, cast("torch.Tensor", plain.gain.grad))


def test_units_without_parameters(mesh: DeviceMesh) -> None:
    """A root whose parameters all belong to inner units, and a unit that never had any, train."""
    inner = nn.Linear(6, 3)
    net = nn.Sequential(inner, nn.ReLU())
    plain = copy.deepcopy(net)
    for module in (inner, net[1], net):
        fully_shard(module, mesh=mesh)
    fsdp = cast("FSDPModule", cast("object", net))
    assert [unit.name for unit in fsdp.fsdp_schedule.units] == ["root", "0", "1"]
    assert [group.name for group in fsdp.fsdp_groups] == ["0"]
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)


def test_without_a_mesh_all_ranks_are_one_axis(mesh: DeviceMesh) -> None:
    """The default mesh has one axis over the world, of the device that the parameters are on."""
    del mesh
    (group,) = cast("FSDPModule", fully_shard(build())).fsdp_groups
    assert group.nest.mesh.shape == (1,)
    assert group.nest.mesh.device_type == "cpu"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategy": "zero3"},
            r"one for each of 1 mesh axes, of \('no_shard', 'optim', .*'zero3'",
        ),
        ({"strategy": ""}, "Expected a strategy"),
        ({"strategy": ("no_shard", "optim")}, "one for each of 1 mesh axes"),
        ({"reshard_after_forward": 2}, "a divisor of 1 ranks, got 2"),
        ({"reshard_after_forward": 0}, "a divisor of 1 ranks, got 0"),
        ({"shard_placement_fn": lambda p: Shard(p.ndim)}, r"a dimension of blocks\.0\.weight"),
        (
            {"shard_placement_fn": lambda p: Replicate()},
            r"Shard\(0\) or None for gain",
        ),
        ({"offload_policy": object()}, "Expected an OffloadPolicy"),
        ({"pool": "triple"}, "triple"),
    ],
)
def test_refuses_what_is_not_built(mesh: DeviceMesh, options: Any, message: str) -> None:
    """An option out of range is an error with the legal ones, and the module stays plain."""
    net = build()
    with pytest.raises(ValueError, match=message):
        fully_shard(net, mesh=mesh, **options)
    assert type(net) is Net
    fully_shard(net, mesh=mesh)


def test_refuses_a_mesh_of_three_axes(mesh: DeviceMesh) -> None:
    """Two axes are outer and inner; a third has no meaning."""
    del mesh
    three = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pod", "outer", "inner"))
    with pytest.raises(ValueError, match="a mesh of one or two axes, got 3"):
        fully_shard(build(), mesh=three)


def test_refuses_modules_that_cannot_be_a_unit(mesh: DeviceMesh) -> None:
    """Wrapped twice, no forward, nothing, the same twice, or one inside another: all refused."""
    block = nn.Linear(3, 3)
    fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match="no unit yet, got FSDPLinear"):
        fully_shard(block, mesh=mesh)
    with pytest.raises(ValueError, match="got ModuleList"):
        fully_shard(nn.ModuleList([nn.Linear(3, 3)]), mesh=mesh)
    with pytest.raises(ValueError, match="got ModuleDict"):
        fully_shard(nn.ModuleDict(), mesh=mesh)
    called = fully_shard(ListWithForward([nn.Linear(3, 3)]), mesh=mesh)
    assert called(torch.ones(1, 3)).shape == (1, 3)
    with pytest.raises(ValueError, match="each once, in the list"):
        fully_shard([], mesh=mesh)
    twice = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="each once, in the list"):
        fully_shard([twice, twice], mesh=mesh)
    net = build()
    with pytest.raises(ValueError, match="each once, in the list"):
        fully_shard([net, net.blocks[0]], mesh=mesh)


def test_refuses_a_parameter_of_two_units(mesh: DeviceMesh) -> None:
    """A parameter in two units would silently become two: refused, and the way out is named."""
    net = build()
    net.blocks[1].weight = net.blocks[0].weight
    fully_shard(net.blocks[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"weight.*shared with another; wrap .* as one unit"):
        fully_shard(net.blocks[1], mesh=mesh)
    net = build()
    net.blocks[1].weight = net.blocks[0].weight
    fully_shard(net.blocks[0], mesh=mesh)
    with pytest.raises(ValueError, match=r"blocks\.1\.weight.*shared"):
        fully_shard(net, mesh=mesh)


class ListWithForward(nn.ModuleList):
    """A container that can be called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self[0](x))


class Extended(torch.Tensor):
    """A tensor that says what is gathered of it."""

    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        raise AssertionError(args)


def test_refuses_extensions_of_the_all_gather(mesh: DeviceMesh) -> None:
    """What they would send is not what is sent."""
    net = build()
    net.head.weight = nn.Parameter(torch.ones(3, 6).as_subclass(Extended))
    with pytest.raises(NotImplementedError, match=r"head\.weight .*extension of the all-gather"):
        fully_shard(net, mesh=mesh)


def test_refuses_cuts_that_are_not_of_rows(mesh: DeviceMesh) -> None:
    """Rows are what is cut: any other dimension is refused by name, and the module stays plain."""
    net = build()
    with pytest.raises(NotImplementedError, match=r"Expected Shard\(0\) for blocks\.0\.weight"):
        fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(-1))
    assert type(net) is Net
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(-p.ndim) if p.ndim > 1 else None)


def test_offloads_to_the_cpu_from_there_only(mesh: DeviceMesh) -> None:
    """On CPU ranks parameters rest on the CPU anyway; a GPU's would not move."""
    fully_shard(build(), mesh=mesh, offload_policy=OffloadPolicy())
    fully_shard(build(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    gpu = SimpleNamespace(device_type="cuda")
    with pytest.raises(NotImplementedError, match=r"OffloadPolicy\(\) on cuda, got CPUOffload"):
        api._check_options(CPUOffloadPolicy(), cast("Any", gpu), 2)


def test_integers_stay_what_they_are(mesh: DeviceMesh) -> None:
    """They are in a group of their own, which the policy's dtypes do not reach."""
    net = build()
    numbers = torch.arange(18).reshape(3, 6)
    net.head.weight = nn.Parameter(numbers, requires_grad=False)
    fsdp = shard(net, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fsdp.unshard()
    assert torch.equal(cast("Any", fsdp).head.weight, numbers)
    fsdp.reshard()
    assert torch.equal(cast("Any", fsdp).head.weight.full_tensor(), numbers)


@pytest.mark.parametrize("name", ["set_custom_all_gather", "set_symm_mem_for_comm"])
def test_refuses_others_collectives(mesh: DeviceMesh, name: str) -> None:
    """Never in silence: nothing would call them."""
    with pytest.raises(NotImplementedError, match="custom collectives"):
        getattr(shard(build(), mesh), name)(object())


def test_refuses_to_wrap_around_a_gathered_unit(mesh: DeviceMesh) -> None:
    """An inner unit that is gathered must be resharded before a root takes it over."""
    net = build()
    block = cast("FSDPModule", fully_shard(net.blocks[0], mesh=mesh))
    block.unshard()
    with pytest.raises(RuntimeError, match=r"inner units at rest.*gathered"):
        fully_shard(net, mesh=mesh)
    block.reshard()
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    assert group_named(fsdp, "blocks.0").names == ["blocks.0.weight", "blocks.0.bias"]


@pytest.mark.parametrize("streams", [1, 2])
def test_overlap_is_the_number_of_side_streams(mesh: DeviceMesh, streams: int) -> None:
    """With one, gathers and reductions share it."""
    schedule = shard(build(), mesh, overlap=streams).fsdp_schedule
    assert (schedule.gather_stream is schedule.reduce_stream) == (streams == 1)


@pytest.mark.parametrize("overlap", [True, False, 3, -1])
def test_refuses_other_overlaps(mesh: DeviceMesh, overlap: Any) -> None:
    """A bool could mean any number."""
    with pytest.raises(ValueError, match="0, 1 or 2 side streams, got"):
        shard(build(), mesh, overlap=overlap)
