"""`fully_shard` on one rank: what it refuses, what it leaves, what it costs."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_core.device import Device
from fsdp_core.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    api,
    fully_shard,
    register_fsdp_forward_method,
)
from fsdp_core.fsdp.pool import make_pool
from fsdp_core.stress.races import Clocks
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


@pytest.mark.parametrize("how", ["gathered", "accumulating"])
def test_refuses_to_wrap_around_a_unit_in_flight(mesh: DeviceMesh, how: str) -> None:
    """An inner unit that is gathered, or has gradients to reduce, must come to rest before."""
    net = build()
    block = cast("FSDPModule", fully_shard(net.blocks[0], mesh=mesh))
    if how == "gathered":
        block.unshard()
    else:
        block.set_requires_gradient_sync(False)
        run(net.blocks[0], batch(1))
    with pytest.raises(RuntimeError, match="Expected inner units at rest"):
        fully_shard(net, mesh=mesh)
    block.set_requires_gradient_sync(True)
    run(net.blocks[0], batch(1))
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    assert group_named(fsdp, "blocks.0").names == ["blocks.0.weight", "blocks.0.bias"]


def test_units_in_units_hold_each_parameter_once(mesh: DeviceMesh) -> None:
    """Of units that are nested and listed; wrapping outside in is refused."""
    inner = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    net: Any = nn.Sequential(inner, nn.Linear(6, 6), nn.Linear(6, 6))
    names = [name for name, _ in net.named_parameters()]
    for each in (inner[0], inner, [net[1], net[2]], net):
        fully_shard(each, mesh=mesh)
    assert sorted(name for group in net.fsdp_groups for name in group.names) == sorted(names)
    assert sorted(unit.name for unit in net.fsdp_schedule.units) == ["0", "0.0", "1", "root"]
    for late in (inner[1], inner[0], net):
        with pytest.raises(ValueError, match="Expected"):
            fully_shard(late, mesh=mesh)


def test_marks_of_a_parameter_are_carried(mesh: DeviceMesh) -> None:
    """They are there at rest, gathered, and after a step; other parameters get none."""
    net, marks = build(), {"sequence_parallel": True, "allreduce": False, "tag": ("a", 1)}
    for name, value in marks.items():
        setattr(net.blocks[0].weight, name, value)
    fsdp, block = shard(net, mesh), net.blocks[0]

    def seen() -> dict[str, Any]:
        return {name: getattr(block.weight, name, None) for name in marks}

    found = [seen()]
    fsdp.unshard()
    cast("FSDPModule", block).unshard()
    found.append(seen())
    run(net, batch(1))
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert [*found, seen()] == [marks] * 3
    assert not any(hasattr(block.bias, name) for name in marks)


@pytest.mark.parametrize("streams", [1, 2])
def test_overlap_is_the_number_of_side_streams(mesh: DeviceMesh, streams: int) -> None:
    """With one, gathers and reductions share it."""
    with Device("cpu").modelling_streams(Clocks()):
        schedule = shard(build(), mesh, overlap=streams).fsdp_schedule
        assert (schedule.gather_stream is schedule.reduce_stream) == (streams == 1)


class Extended(torch.Tensor):
    def fsdp_pre_all_gather(self, *args: Any) -> Any:
        raise AssertionError(args)


class Whole(Extended):
    fsdp_post_all_gather = Extended.fsdp_pre_all_gather


class ListWithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self[0](x))


def shared() -> Net:
    net = build()
    net.blocks[1].weight = net.blocks[0].weight
    return net


def with_head(weight: torch.Tensor) -> Net:
    net = build()
    net.head.weight = nn.Parameter(weight)
    return net


def gathers_whole_weights(mesh: DeviceMesh) -> None:
    fully_shard(with_head(torch.ones(3, 6).as_subclass(Whole)), mesh=mesh, strategy="optim")


OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"strategy": "zero3"}, ValueError, r"one for each of 1 mesh axes, .*'no_shard'.*'zero3'"),
    ({"strategy": ""}, ValueError, "a strategy"),
    ({"strategy": ("no_shard", "optim")}, ValueError, "one for each of 1 mesh axes"),
    ({"reshard_after_forward": 2}, ValueError, "a divisor of 1 ranks, got 2"),
    ({"reshard_after_forward": 0}, ValueError, "a divisor of 1 ranks, got 0"),
    ({"shard_placement_fn": lambda p: Shard(p.ndim)}, ValueError, r"blocks\.0\.weight"),
    ({"shard_placement_fn": lambda p: Replicate()}, ValueError, "a Shard or None for gain"),
    ({"offload_policy": object()}, ValueError, "OffloadPolicy"),
    ({"pool": "triple"}, ValueError, "triple"),
    *(({"overlap": n}, ValueError, "0, 1 or 2 side streams, got") for n in (True, False, 3, -1)),
]


@pytest.mark.parametrize(("options", "error", "said"), OPTIONS)
def test_options_out_of_range_are_refused(
    mesh: DeviceMesh, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    """The error has the legal ones, or names the parameter, and the module stays plain."""
    net = build()
    with pytest.raises(error, match=said):
        fully_shard(net, mesh=mesh, **options)
    assert type(net) is Net
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(-p.ndim) if p.ndim > 1 else None)


MODULES: dict[str, tuple[Callable[[DeviceMesh], Any], type[Exception], str]] = {
    "wrapped": (lambda mesh: fully_shard(nn.Linear(3, 3), mesh=mesh), ValueError, "FSDPLinear"),
    "list": (lambda mesh: nn.ModuleList([nn.Linear(3, 3)]), ValueError, "got ModuleList"),
    "dict": (lambda mesh: nn.ModuleDict(), ValueError, "got ModuleDict"),
    "nothing": (lambda mesh: [], ValueError, "each once, in the list"),
    "twice": (lambda mesh: [nn.Linear(3, 3)] * 2, ValueError, "each once, in the list"),
    "nested": (lambda mesh: (lambda n: [n, n.blocks[0]])(build()), ValueError, "each once"),
    "shared": (lambda mesh: sharded_first(mesh).blocks[1], ValueError, "weight.*shared"),
    "shared root": (lambda mesh: sharded_first(mesh), ValueError, r"blocks\.1\.weight.*shared"),
    "half": (lambda m: with_head(torch.ones(3, 6).as_subclass(Extended)), ValueError, "or neither"),
    "quantised": (
        lambda mesh: with_head(TwoTensor(torch.ones(3, 6), torch.ones(3, 6))),
        NotImplementedError,
        r"head\.weight .*TwoTensor",
    ),
    "whole": (gathers_whole_weights, NotImplementedError, r"head\.weight, a Whole .*rows"),
}


def sharded_first(mesh: DeviceMesh) -> Net:
    net = shared()
    fully_shard(net.blocks[0], mesh=mesh)
    return net


@pytest.mark.parametrize("name", MODULES)
def test_modules_that_cannot_be_a_unit_are_refused(mesh: DeviceMesh, name: str) -> None:
    """Wrapped already, without a forward, listed twice, or with a parameter of another unit."""
    make, error, said = MODULES[name]
    with pytest.raises(error, match=said):
        fully_shard(make(mesh), mesh=mesh)


def test_a_container_with_a_forward_is_a_unit(mesh: DeviceMesh) -> None:
    """A list that can be called can be wrapped."""
    called = fully_shard(ListWithForward([nn.Linear(3, 3)]), mesh=mesh)
    assert called(torch.ones(1, 3)).shape == (1, 3)


def test_other_meshes_and_collectives_are_refused(mesh: DeviceMesh) -> None:
    """A third axis has no meaning, and nothing would call others' collectives."""
    three = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("pod", "outer", "inner"))
    with pytest.raises(ValueError, match="a mesh of one or two axes, got 3"):
        fully_shard(build(), mesh=three)
    for name in ("set_custom_all_gather", "set_symm_mem_for_comm"):
        with pytest.raises(NotImplementedError, match="custom collectives"):
            getattr(shard(build(), mesh), name)(object())


# --- `FSDPModule`'s methods and the life of a unit, on one rank: right bits whatever happens ------


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
