"""Programs on ours alone: each would show one bug that sharded training is known for.

They run on ranks; `test_fsdp_regressions` says what is due.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, fully_shard
from fsdp_core.fsdp import unit as fsdp_unit
from fsdp_core.fsdp.pool import Key, Pool, make_pool
from tests.dist.fsdp_models import WIDTH, Block, Net, loss_of, net, rows, shard
from tests.dist.fsdp_parameter_programs import EXTRAS, Awkward
from tests.dist.fsdp_programs import Training
from tests.dist.fsdp_races import watching
from tests.dist.fsdp_sides import api_of, gradients, local, plain_values, weights

OURS, PLAIN = "ours", "plain"


def whole_mesh() -> DeviceMesh:
    """All ranks on one axis."""
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
            local(parameter).mul_(0.5)
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
        """See `Pool`."""
        count = self._out[key.role] = self._out.get(key.role, 0) + 1
        self.most[key.role] = max(self.most.get(key.role, 0), count)
        return self.inner.acquire(key, numel, dtype, stream).fill_(torch.nan)

    def release(self, key: Key, stream: Any) -> None:
        """See `Pool`."""
        self._out[key.role] -= 1
        self.inner.release(key, stream)

    @property
    def out(self) -> int:
        """Buffers that are held now."""
        return sum(self._out.values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def finite_memory(model: nn.Module) -> bool:
    """Whether all memory that gradients lie in is finite, between and behind them too."""
    held = [p.grad for p in model.parameters() if p.grad is not None]
    memory = [bytes(local(g).untyped_storage().tolist()) for g in held]
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


def empty_pieces() -> list[dict[str, Any]]:
    """A parameter of one row over all ranks: rows of its piece and gradient, whether all sum."""
    mesh, api = whole_mesh(), api_of(OURS)
    torch.manual_seed(5)
    model = Awkward(EXTRAS["one_row"]())
    api.fully_shard(model, mesh=mesh)
    training = Training(api, model, mesh, "adamw_fused")
    seen = []
    for step in range(2):
        training.backward(training.forward(step))
        for name, parameter in model.named_parameters():
            grad: Any = parameter.grad
            here = {"name": name, "rows": local(parameter).shape[0], "grad": local(grad).shape[0]}
            seen.append(here | {"whole": grad.full_tensor().shape == parameter.shape})
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=step == 0)
    states = [len(training.optimizer.state[p]) for p in model.parameters()]
    seen.append({"states": states})
    return seen


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


def fused(
    sync: bool, times: int, poison: bool, own_unit: bool, marked: bool, ahead: int = 1
) -> dict[str, Any]:
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
        given = {"pool": WatchedPool("double")} if poison and side == OURS else {}
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


def attributes() -> dict[str, Any]:
    """Marks set on parameters before wrapping: found at rest, gathered, after a step."""
    model, marks = net(), {"sequence_parallel": True, "allreduce": False, "tag": ("a", 1)}
    for name, value in marks.items():
        setattr(model.blocks[0].up.weight, name, value)  # type: ignore[union-attr]
    training = Training(api_of(OURS), shard(api_of(OURS), model, whole_mesh()), whole_mesh())
    block = cast("Any", model.blocks[0])
    found = {"rest": {n: getattr(block.up.weight, n, None) for n in marks}}
    block.unshard()
    found["gathered"] = {n: getattr(block.up.weight, n, None) for n in marks}
    block.reshard()
    training.step(0)
    found["after"] = {n: getattr(block.up.weight, n, None) for n in marks}
    found["others"] = {n: hasattr(block.down.weight, n) for n in marks}
    return found


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


def in_flight(what: str) -> str:
    """Wrap around a unit that is not at rest; what was raised, or how many losses went on."""
    mesh, model = whole_mesh(), net(1)
    block = cast("Any", fully_shard(model.blocks[0], mesh=mesh))
    if what == "gathered":
        block.unshard()
    elif what == "accumulating":
        block.set_requires_gradient_sync(False)
        loss_of(block(rows(0))).backward()
    elif what == "forward":
        loss_of(block(rows(0)))
        block.unshard()
    try:
        fully_shard(model, mesh=mesh)
    except RuntimeError as error:
        return str(error)
    return "wrapped"


def stale_grads(set_to_none: bool, keep_grads: bool) -> list[bool]:
    """Optimizer steps without a backward: whether the weights stayed the same, bit by bit."""
    mesh, kept = whole_mesh(), []
    model = shard(api_of(OURS), net(), mesh, keep_grads=keep_grads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        before = weights(model, mesh)
        optimizer.step()
        with torch.no_grad():
            model(rows(step))
        optimizer.step()
        after = weights(model, mesh)
        kept += [torch.equal(before[n], after[n]) for n in before]  # type: ignore[arg-type]
    return kept


def ownership() -> dict[str, Any]:
    """Units in units in a list: which parameter is held how often, and wrapping outside in."""
    mesh, model = whole_mesh(), net(3)
    fully_shard(cast("Block", model.blocks[0]).up, mesh=mesh)
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard([model.blocks[1], model.blocks[2]], mesh=mesh)
    fully_shard(model, mesh=mesh)
    units = cast("FSDPModule", model).fsdp_schedule.units
    names = [n for unit in units for group in unit.groups for n in group.names]
    raised = []
    for late in (cast("Block", model.blocks[0]).down, cast("Block", model.blocks[0]).up, model):
        try:
            fully_shard(late, mesh=mesh)
        except ValueError as error:
            raised.append(str(error))
    return {"held": sorted(names), "names": sorted(n for n, _ in net(3).named_parameters()),
            "units": [unit.name for unit in units], "raised": raised}  # fmt: skip
