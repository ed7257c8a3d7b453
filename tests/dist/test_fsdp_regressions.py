"""Bugs that sharded training is known for, one test each: it fails when the bug is put back."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import MixedPrecisionPolicy
from fsdp_core.fsdp import unit as fsdp_unit
from fsdp_core.fsdp.pool import Key, Pool, make_pool
from tests.dist.fsdp_parameter_programs import EXTRAS
from tests.dist.fsdp_programs import Training
from tests.dist.fsdp_races import watching
from tests.dist.fsdp_sides import (
    WIDTH,
    Net,
    api_of,
    differences,
    gradients,
    loss_of,
    net,
    plain_values,
    rows,
    shard,
    weights,
    within,
)
from tests.dist.rank_pool import RankPool
from tests.support.tensors import own_rows, same_bits

OURS, PLAIN = "ours", "plain"


def whole_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))


def fresh_weights(strategy: str, gathered: str) -> list[tuple[Any, Any]]:
    """Weights written while units are gathered: what does the next forward compute with?

    They are written by an optimizer, through `.data`, or through this rank's rows; `gathered` is
    how they come to be gathered: `by_hand`, `after_backward`, or `at_rest` (they are not).
    """
    mesh = whole_mesh()
    return [
        (_fresh(PLAIN, mesh, how, gathered), _fresh(OURS, mesh, how, gathered, strategy=strategy))
        for how in ("optimizer", "data", "local")
    ]


def _fresh(side: str, mesh: DeviceMesh, how: str, gathered: str, **options: Any) -> dict[str, Any]:
    training = Training(api_of(side), shard(api_of(side), net(), mesh, **options), mesh)
    model = training.model
    if gathered == "after_backward":
        model.set_reshard_after_backward(False)
    training.backward(training.forward(0))
    if gathered == "by_hand":
        for unit in [*model.blocks, model]:
            unit.unshard()
    if how == "optimizer":
        training.optimizer.step()
    for parameter in training.optimizer.param_groups[0]["params"]:
        if how == "data":
            parameter.data.mul_(0.5)
        elif how == "local":
            own_rows(parameter).mul_(0.5)
    training.optimizer.zero_grad()
    with torch.no_grad():
        evaluated = plain_values(model(rows(5)))
    loss = training.forward(1)
    training.backward(loss)
    for unit in [*model.blocks, model]:
        unit.reshard()
    grads = plain_values(gradients(model, mesh))
    found = {"evaluated": evaluated, "loss": loss.detach(), "grads": grads}
    return found | {"weights": plain_values(weights(model, mesh))}


def races(options: dict[str, Any], what: str, shape: tuple[int, ...] = ()) -> dict[str, Any]:
    """Steps with streams that keep clocks: races found, collectives in order, streams used."""
    names = ("outer", "inner")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else whole_mesh()
    elsewhere = _accumulating_elsewhere if what == "elsewhere" else contextlib.nullcontext
    with watching() as found, elsewhere():
        # Wide, so that the head's gradient alone is moved, first of all in a backward pass.
        model = net(1, 40) if what == "not_last" else net(3)
        if what == "checkpointed":
            model.checkpointed = False
        training = Training(api_of(OURS), shard(api_of(OURS), model, mesh, **options), mesh)
        for step in range(3):
            if what == "accumulated":
                training.model.set_requires_gradient_sync(False)
                training.forward(10 + step).backward()
                training.model.set_requires_gradient_sync(True)
            if what == "not_last":
                for micro in range(2):
                    training.model.set_is_last_backward(False)
                    training.forward(10 * micro + step).backward()
                training.model.set_is_last_backward(True)
            if what == "evaluated":
                with torch.no_grad():
                    training.model(rows(50))
            training.forward(step).backward()
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=what != "zeroed")
    return {
        "races": [str(race) for race in found.found],
        "streams": sorted({c.stream for c in found.collectives}),
        "kinds": sorted({c.kind for c in found.collectives}),
        "aliased": [c for c in found.collectives if c.aliased],
    }


@contextlib.contextmanager
def _accumulating_elsewhere() -> Iterator[None]:
    """Parameters whose gradients autograd accumulates on a stream of a capture, after its producer.

    On the CPU autograd has no streams: the hooks that run there are put on one.
    """
    device, hook = Device("cpu"), fsdp_unit._on_gradient_of
    stream = device.new_stream("capture")

    def on_that_stream(*args: Any) -> None:
        stream.wait_stream(device.current_stream())
        with device.on(stream):
            hook(*args)

    with mock.patch.object(fsdp_unit, "_on_gradient_of", on_that_stream):
        yield


class WatchedPool:
    """A pool that fills what it hands out with NaN and counts the gradient buffers out."""

    def __init__(self, kind: str) -> None:
        self.inner: Pool = make_pool(kind, Device("cpu"), persistent_on_miss=True)
        self.most: dict[str, int] = {}
        self._out: dict[str, int] = {}

    def acquire(self, key: Key, numel: int, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        count = self._out[key.role] = self._out.get(key.role, 0) + 1
        self.most[key.role] = max(self.most.get(key.role, 0), count)
        return self.inner.acquire(key, numel, dtype, stream).fill_(torch.nan)

    def release(self, key: Key, stream: Any) -> None:
        self._out[key.role] -= 1
        self.inner.release(key, stream)

    @property
    def out(self) -> int:
        return sum(self._out.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def finite_memory(model: nn.Module) -> bool:
    """Whether all memory that gradients lie in is finite, between and behind them too."""
    held = [p.grad for p in model.parameters() if p.grad is not None]
    memory = [bytes(own_rows(g).untyped_storage().tolist()) for g in held]
    flat = [torch.frombuffer(bytearray(m), dtype=torch.float32) for m in memory]
    return all(bool(t.isfinite().all()) for t in flat)


def poisoned(kind: str, streams: int, strategy: str) -> dict[str, Any]:
    """Steps on a pool of NaN, with a unit's gradients missing in one of them, and without one."""
    mesh, pool = whole_mesh(), WatchedPool(kind)
    options = {"pool": pool, "overlap": streams, "strategy": strategy}
    answers: dict[str, Any] = {}
    for side in (PLAIN, OURS):
        given = options if side == OURS else {}
        training = Training(api_of(side), shard(api_of(side), net(4), mesh, **given), mesh)
        api_of(side).register_fsdp_forward_method(training.model, "features")
        for step in range(3):
            if step == 1:  # the head gets no gradient, others of its unit do
                training.backward(loss_of(training.model.features(rows(step))))
            else:
                training.backward(training.forward(step))
            answers.setdefault("finite", []).append(finite_memory(training.model))
            training.update()
        answers[side] = training.result()
    return answers | {"most": pool.most, "out": pool.out}


class _Fused(torch.autograd.Function):
    """A Linear without bias whose backward adds to `main_grad` itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        # Read here, as TransformerEngine does.
        ctx.overwrites = getattr(weight, "overwrite_main_grad", False)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        computed = grad.t() @ x
        if ctx.overwrites:
            weight.main_grad.copy_(computed)
        else:
            weight.main_grad.add_(computed)
        weight.grad_added_to_main_grad = True
        # A stand-in of the right shape, which nobody may use as a gradient.
        return grad @ weight, torch.full_like(weight, torch.nan)


class FusedLinear(nn.Module):
    """TransformerEngine's convention: the module says that it fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * EXTRAS["bfloat16"]().float())
        self.fuse_wgrad_accumulation = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, WIDTH]."""
        y: torch.Tensor = _Fused.apply(x, self.weight)
        return y


class PlainLinear(FusedLinear):
    """The same without fusion."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, WIDTH]."""
        return x @ self.weight.t()


def fused(sync: bool, times: int, own_unit: bool, marked: bool, ahead: int = 1) -> dict[str, Any]:
    """Microbatches through a module that accumulates its own weight gradient, run `times` times.

    `ahead` forwards run before the first backward, as in a pipeline.
    """
    mesh, answers = whole_mesh(), {}
    for side, kind in ((PLAIN, PlainLinear), (OURS, FusedLinear)):
        api = api_of(side)
        torch.manual_seed(5)
        linear = kind()
        if marked:
            linear.weight.overwrite_main_grad = True  # type: ignore[attr-defined]
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *[linear] * times, nn.Linear(WIDTH, 1))
        given = {"pool": WatchedPool("double")} if side == OURS else {}
        if own_unit:
            api.fully_shard(linear, mesh=mesh, **given)
        api.fully_shard(model, mesh=mesh, **given)
        training = Training(api, model, mesh)
        for step in range(2):
            waiting = [training.forward(4 * step + micro) for micro in range(ahead)]
            for micro in range(4):
                synced = sync or micro == 3
                training.model.set_requires_gradient_sync(synced)
                training.backward(waiting.pop(0), sync=synced)
                if micro + ahead < 4:
                    waiting.append(training.forward(4 * step + micro + ahead))
            training.update()
        answers[side] = training.result()
    return answers


def initialise(model: nn.Module) -> None:
    """Draw every Linear anew, in the order of the modules."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()


def meta_init(strategy: str) -> dict[str, Any]:
    """A model made on the meta device and initialised sharded, beside one initialised whole."""
    mesh, expected = whole_mesh(), Net()
    torch.manual_seed(4)
    initialise(expected)
    with torch.device("meta"):
        model = Net()
    shard(api_of(OURS), model, mesh, strategy=strategy)
    model.to_empty(device="cpu")
    torch.manual_seed(4)
    initialise(model)
    answers: dict[str, Any] = {"initial": (weights(expected, mesh), weights(model, mesh))}
    other = Training(api_of(PLAIN), shard(api_of(PLAIN), expected, mesh), mesh)
    training = Training(api_of(OURS), model, mesh)
    for each in (other, training):
        each.step(0)
        each.step(1)
    return answers | {"steps": (other.result(), training.result())}


STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
TIMEOUT_S = 30.0


def on_ranks(ranks: RankPool, program: Any, *args: Any, world_size: int = 2) -> list[Any]:
    return ranks.run(program, *args, world_size=world_size, timeout_s=TIMEOUT_S)


def assert_equal(expected: Any, got: Any) -> None:
    """Every bit, with the differences in the message."""
    wrong = differences(expected, got)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("gathered", ["at_rest", "by_hand", "after_backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stale_gather(warm_ranks: RankPool, strategy: str, gathered: str) -> None:
    """A forward computes with the weights of now, whoever wrote them, though gathered before."""
    for rank in on_ranks(warm_ranks, fresh_weights, strategy, gathered):
        for plain, ours in rank:
            assert_equal(plain, ours)


@pytest.mark.parametrize(
    "what", ["plain", "accumulated", "evaluated", "checkpointed", "zeroed", "elsewhere"]
)
@pytest.mark.parametrize("pool", ["dynamic", "double", "traced"])
def test_streams_wait(warm_ranks: RankPool, pool: str, what: str) -> None:
    """No operator touches memory that another stream may still use, nor does the allocator.

    A gather launched before the shard is written, a gradient buffer released or taken again before
    its reduction has ended, and a wait the wrong way round are all such a touch.
    """
    for rank in on_ranks(warm_ranks, races, {"pool": pool}, what):
        assert rank["races"] == []
        assert rank["streams"] == ["gather", "reduce"]  # the clocks had something to order
        assert rank["kinds"] == ["gather", "scatter"]


@pytest.mark.parametrize("what", ["accumulated", "not_last"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_streams_wait_for_each_strategy(warm_ranks: RankPool, strategy: str, what: str) -> None:
    """The same where weights, gradients, or both stay whole.

    And where a backward pass begins before the reductions of the one before have ended.
    """
    options = {"strategy": strategy}
    for rank in on_ranks(warm_ranks, races, options, what):
        assert rank["races"] == []
        assert rank["streams"]


TWO_AXES = ("optim", "optim_grads_params")
BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [("optim", (2,)), ("optim_grads_params", (2,)), (TWO_AXES, (2, 2)), (TWO_AXES[1], (2, 2))],
    ids=str,
)
def test_reduction_output_is_other_memory(
    warm_ranks: RankPool, policy: MixedPrecisionPolicy, strategy: Any, shape: tuple[int, ...]
) -> None:
    """A reduce-scatter never writes into its input, which other ranks may still read.

    Whether it writes into the gradient itself (float32) or into memory of its own, on one axis or
    two, where nothing races either.
    """
    options = {"strategy": strategy, "mp_policy": policy}
    world_size = 2 ** len(shape)
    for rank in on_ranks(warm_ranks, races, options, "accumulated", shape, world_size=world_size):
        assert rank["aliased"] == []
        assert rank["races"] == []
        assert "scatter" in rank["kinds"]


@pytest.mark.parametrize(("streams", "most"), [(2, 2), (1, 1), (0, 1)])
@pytest.mark.parametrize("kind", ["dynamic", "double", "traced"])
def test_gradient_buffers(warm_ranks: RankPool, kind: str, streams: int, most: int) -> None:
    """At most two gradient buffers are out with two streams, one with fewer; none at the end."""
    args = (kind, streams, "optim_grads_params")
    for rank in on_ranks(warm_ranks, poisoned, *args):
        assert rank["most"]["grad"] == most
        assert rank["out"] == 0
        assert_equal(rank["plain"], rank["ours"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padding_leaks_nothing(warm_ranks: RankPool, strategy: str) -> None:
    """What the last user left in a buffer reaches no gradient, nor the memory between them."""
    for rank in on_ranks(warm_ranks, poisoned, "double", 2, strategy):
        assert_equal(rank["plain"], rank["ours"])
        assert all(rank["finite"]), rank["finite"]


@pytest.mark.parametrize(("times", "marked"), [(1, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("own_unit", [True, False])
def test_fused_accumulation(
    warm_ranks: RankPool, sync: bool, times: int, marked: bool, own_unit: bool
) -> None:
    """A module that adds its weight gradient to `main_grad` itself has it counted once."""
    # Two uses add up in another order: the kernel's sum, then the next one's.
    bound = 8 * 4 * torch.finfo(torch.float32).eps if times == 2 else 0.0
    for rank in on_ranks(warm_ranks, fused, sync, times, own_unit, marked):
        assert not differences(rank["plain"], rank["ours"], same=within(bound))


@pytest.mark.parametrize(("sync", "marked"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("own_unit", [True, False])
def test_fused_accumulation_of_forwards_ahead(
    warm_ranks: RankPool, sync: bool, marked: bool, own_unit: bool
) -> None:
    """Each backward pass adds what its own forward used, however many forwards are ahead of it."""
    for rank in on_ranks(warm_ranks, fused, sync, 1, own_unit, marked, 3):
        assert_equal(rank["plain"], rank["ours"])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_meta_initialisation(warm_ranks: RankPool, strategy: str) -> None:
    """Made on the meta device and initialised sharded, a model has the bits of one made whole."""
    for rank in on_ranks(warm_ranks, meta_init, strategy, world_size=3):
        assert_equal(*rank["initial"])
    rank = on_ranks(warm_ranks, meta_init, strategy)[0]
    assert_equal(*rank["steps"])


def test_the_comparison_sees_one_bit() -> None:
    """What these tests compare by tells zeros apart and takes NaN for itself."""
    nan = torch.tensor([torch.nan])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert differences({"a": [nan]}, {"a": [nan.clone(), nan]})
