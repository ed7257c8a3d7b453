"""The life of a unit on one rank: which gradients come, passes that raise, odd modules."""

import copy
import types
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fsdp_core.fsdp import FSDPModule, fully_shard
from tests.unit.fsdp_core.fsdp.nets import Net, assert_grads, batch, build, group_named, run, shard


def refuse(grad: torch.Tensor) -> None:
    raise KeyError("planted")


@pytest.mark.parametrize("reduce_unused", [False, True])
def test_a_parameter_without_gradient(mesh: DeviceMesh, reduce_unused: bool) -> None:
    """A parameter that the loss does not depend on keeps None, or gets zeros where asked."""
    net = build()
    net.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(2)))
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    fsdp.set_reduce_scatter_unused_params(reduce_unused)
    run(net, batch(1))
    run(plain, batch(1))
    if reduce_unused:
        plain.blocks[1].unused.grad = torch.zeros(2)
    assert_grads(fsdp, plain)


class Hidden:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Hiding(nn.Linear):
    """Returns its output where nobody finds it, alone or beside one that is found."""

    def __init__(self, beside: bool) -> None:
        super().__init__(6, 6)
        self.beside = beside

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return (Hidden(out), out.sum()) if self.beside else (Hidden(out),)


def hiding(beside: bool) -> Net:
    net = build()
    net.blocks[1] = Hiding(beside)
    net.forward = types.MethodType(through_hidden, net)  # type: ignore[method-assign]
    return net


def through_hidden(net: Net, x: torch.Tensor) -> torch.Tensor:
    return cast("torch.Tensor", net.head(net.blocks[1](net.blocks[0](x))[0].tensor))


@pytest.mark.parametrize("overlap", [2, 0])
def test_a_hidden_output_keeps_the_unit_gathered(mesh: DeviceMesh, overlap: int) -> None:
    """Where no output tells when backward comes, the parameters stay for it: plain's bits."""
    net, plain = hiding(beside=False), hiding(beside=False)
    plain.load_state_dict(net.state_dict())
    fsdp = shard(net, mesh, overlap=overlap)
    for number in (1, 2):
        assert torch.equal(run(net, batch(number)), run(plain, batch(number)))
        assert_grads(fsdp, plain)
        assert not any(group.is_unsharded for group in fsdp.fsdp_groups)


def test_a_hidden_output_beside_others_is_refused(mesh: DeviceMesh) -> None:
    """A backward pass that enters a released unit other than by its outputs names both."""
    net = hiding(beside=True)
    shard(net, mesh)
    with pytest.raises(RuntimeError, match=r"unit 'blocks\.1' through its outputs.*'blocks\.1\."):
        run(net, batch(1))


class Maybe(torch.autograd.Function):
    """A product whose backward kernel knows that the weight's gradient is nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Sparse(nn.Module):
    """A bias that trains, and a scale for which backward returns None."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", Maybe.apply(x, self.scale)) + self.bias


def test_a_backward_that_returns_none(mesh: DeviceMesh) -> None:
    """A custom function may say that a gradient is nothing: None stays None, as in plain torch."""
    net = build()
    net.blocks[1] = Sparse()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    for number in (1, 2):
        assert torch.equal(run(net, batch(number)), run(plain, batch(number)))
        assert_grads(fsdp, plain)


def test_a_gradient_that_never_comes_is_named(mesh: DeviceMesh) -> None:
    """Where the engine planned a gradient of which nobody heard, the pass says whose."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    group = group_named(fsdp, "blocks.0")
    bias: Any = group.unsharded[group.names.index("blocks.0.bias")]
    hooks = dict(bias._post_accumulate_grad_hooks)
    bias._post_accumulate_grad_hooks.clear()
    message = r"unit 'blocks\.0' .*, 1 never came, such as 'blocks\.0\.bias'; .* was not reduced"
    with pytest.raises(RuntimeError, match=message):
        run(net, batch(1))
    # The released parameter itself must not be shown by a failing assertion: it has no memory.
    has_part = bias.grad is not None or group.gradients.is_pending
    assert not has_part
    assert all(parameter.grad is None for parameter in group.sharded)
    bias._post_accumulate_grad_hooks.update(hooks)
    fsdp.zero_main_grads()
    run(net, batch(2))
    run(plain, batch(2))
    assert_grads(fsdp, plain)


# ---- recomputation


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in "ab"})

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.tanh(self.layers[name](x))


class Thrice(nn.Module):
    """Uses one unit directly, in a reentrant checkpoint, and directly."""

    def __init__(self) -> None:
        super().__init__()
        self.either = Either()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.either, self.either(x, "b"), "b", use_reentrant=True)
        return cast("torch.Tensor", self.either(x, "a"))


def test_a_pass_inside_a_pass_forgets_no_gradient(mesh: DeviceMesh) -> None:
    """What came before a nested backward pass is not waited for after it: plain's bits."""
    net = Thrice()
    plain = copy.deepcopy(net)
    fully_shard(net.either, mesh=mesh)
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    for number in (1, 2):
        assert torch.equal(run(net, batch(number)), run(plain, batch(number)))
        assert_grads(fsdp, plain)


class Apart(nn.Module):
    """Two layers, each in a checkpoint of its own that stops before the layer's end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            x = cast("torch.Tensor", checkpoint(layer, x.sin(), use_reentrant=False))
        return x


def test_modules_of_one_unit_are_recomputed_apart(mesh: DeviceMesh) -> None:
    """A unit of two modules whose recomputations stop early begins its next forward anew."""
    net = Apart()
    plain = copy.deepcopy(net)
    fully_shard([net.first, net.second], mesh=mesh)
    fsdp = cast("FSDPModule", fully_shard(net, mesh=mesh))
    for number in (1, 2):
        assert torch.equal(run(net, batch(number)), run(plain, batch(number)))
        assert_grads(fsdp, plain)


@pytest.mark.parametrize("how", ["reset", "forward"])
def test_half_a_gradient_is_dropped(mesh: DeviceMesh, how: str) -> None:
    """Gradients that came in part before an exception are in no later gradient, nor held."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    root = group_named(fsdp, "root")
    hook = root.unsharded[root.names.index("head.weight")].register_hook(refuse)
    with pytest.raises(KeyError, match="planted"):
        run(net, batch(1))
    hook.remove()
    gain = root.unsharded[root.names.index("gain")]
    # The released parameter itself must not be shown by a failing assertion: it has no memory.
    has_part = gain.grad is not None or root.gradients.is_pending
    assert has_part
    if how == "reset":
        fsdp.reset_iter_state()
    else:
        with torch.no_grad():
            net(batch(2))
    has_part = gain.grad is not None or root.gradients.is_pending
    assert not has_part
    assert not any(group.is_unsharded for group in fsdp.fsdp_groups)
    run(net, batch(2))
    run(plain, batch(2))
    has_part = gain.grad is not None
    assert not has_part
    assert not root.gradients.is_pending
    assert_grads(fsdp, plain)


def test_forward_that_raised_leaves_the_units_usable(mesh: DeviceMesh) -> None:
    """After an exception inside a unit's forward the next pass gives plain's bits."""
    net = build()
    plain = copy.deepcopy(net)
    fsdp = shard(net, mesh)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(4, 5))
    assert torch.equal(run(net, batch(1)), run(plain, batch(1)))
    assert_grads(fsdp, plain)
    assert not any(group.is_unsharded for group in fsdp.fsdp_groups)


def test_a_live_graph_without_backward_is_named(mesh: DeviceMesh) -> None:
    """Outputs that somebody keeps end no pass; what then cannot be says so."""
    net = build()
    pool = shard(net, mesh, pool="traced").fsdp_schedule.pool
    kept = [net(batch(1))]
    run(net, batch(2))
    with pytest.raises(RuntimeError, match="let go of outputs of forwards under grad mode"):
        pool.freeze()
    kept.clear()
    run(net, batch(3))
    pool.freeze()
