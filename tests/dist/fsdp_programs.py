"""Training programs that run on every side of `fsdp_sides`: how a step may be written.

Each returns what a user could see: losses, full gradients, full weights, names.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from tests.dist.fsdp_sides import (
    WIDTH,
    Api,
    average,
    gradients,
    loss_of,
    net,
    rows,
    shard,
    weights,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


class Training:
    """Steps of one model and what was seen of them."""

    def __init__(self, api: Api, model: nn.Module, mesh: DeviceMesh, optimizer: str = "sgd"):
        self.api, self.mesh = api, mesh
        self.model = cast("Any", model)  # an FSDPModule or what stands for it
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[optimizer](trained)
        self.losses: list[torch.Tensor] = []
        self.grads: list[dict[str, torch.Tensor | None]] = []
        self.extra: dict[str, Any] = {}
        self.synced: dict[str, torch.Tensor | None] = {}
        self.unsynced: set[str] = set()

    def forward(self, step: int) -> torch.Tensor:
        """The loss of this rank's rows of a step, noted."""
        loss = loss_of(self.model(rows(step)))
        self.losses.append(loss.detach().clone())
        return loss

    def backward(self, loss: torch.Tensor, *, sync: bool = True, **options: Any) -> None:
        """Backward; the plain side averages what this pass and unsynced ones before it added."""
        if self.api.name != "plain":
            loss.backward(**options)
            return
        for name, parameter in self.model.named_parameters():
            if name not in self.unsynced:
                self.synced[name], parameter.grad = parameter.grad, None
        loss.backward(**options)
        self.unsynced = set() if sync else {name for name, _ in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters() if sync else ():
            before = self.synced.pop(name)
            if parameter.grad is not None:
                average(parameter.grad, self.mesh)
                parameter.grad = parameter.grad if before is None else before.add_(parameter.grad)
            else:
                parameter.grad = before

    def update(self, *, set_to_none: bool = True) -> None:
        """After the last backward: note the gradients, step the optimizer, zero the gradients."""
        self.grads.append(gradients(self.model, self.mesh))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, step: int) -> None:
        self.backward(self.forward(step))
        self.update()

    def result(self) -> dict[str, Any]:
        seen = {"losses": self.losses, "grads": self.grads, "extra": self.extra}
        return seen | {"weights": weights(self.model, self.mesh)}


def steps(
    api: Api, mesh: DeviceMesh, num_steps: int = 3, optimizer: str = "sgd", **options: Any
) -> dict[str, Any]:
    """Blocks and root as units; `options` go to `fully_shard`."""
    training = Training(api, shard(api, net(), mesh, **options), mesh, optimizer)
    for step in range(num_steps):
        training.step(step)
    return training.result()


def nested(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """A unit inside a unit inside the root: each holds what the inner ones do not."""
    model = net()
    api.fully_shard(model.blocks[0].up, mesh=mesh)
    api.fully_shard(model.blocks[0], mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    training = Training(api, model, mesh)
    for step in range(3):
        training.step(step)
    return training.result()


def listed(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """One unit made of a list of modules that run one after the other."""
    model = net()
    api.fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh)
    api.fully_shard([model.embed, model.head], mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    training = Training(api, model, mesh)
    for step in range(3):
        training.step(step)
    training.extra["classes"] = [type(m).__name__ for m in model.modules()]
    return training.result()


def setters(api: Api, mesh: DeviceMesh, what: str) -> dict[str, Any]:
    """Settings that change the schedule and no result."""
    model = cast("Any", shard(api, net(3), mesh))
    blocks = list(model.blocks)
    if what == "reshard_after_forward":
        model.set_reshard_after_forward(False)
    elif what == "reshard_after_backward":
        model.set_reshard_after_backward(False)
    elif what == "prefetch":
        model.set_modules_to_forward_prefetch(blocks[:2])
        blocks[0].set_modules_to_forward_prefetch(blocks[1:])
        model.set_modules_to_backward_prefetch(blocks[1:][::-1])
        blocks[2].set_modules_to_backward_prefetch(blocks[:2][::-1])
    elif what == "unshard_in_backward":
        model.set_unshard_in_backward(True)
    elif what == "all_reduce":
        model.set_requires_all_reduce(True)
    training = Training(api, model, mesh)
    for step in range(3):
        training.backward(training.forward(step))
        if what == "reshard_after_backward":
            for module in [*blocks, model]:
                module.reshard()  # it is the user's to do before the optimizer looks
        training.update()
    return training.result()


def divide_factor(api: Api, mesh: DeviceMesh, factor: float) -> dict[str, Any]:
    """Gradients are the sum over ranks divided by a factor of the user's."""
    training = Training(api, shard(api, net(), mesh), mesh)
    for module in training.model.modules():
        if isinstance(module, api.FSDPModule):
            module = cast("Any", module)
            module.set_gradient_divide_factor(factor)
            # gloo has no reduction that multiplies first, which FSDP2 asks for otherwise.
            if hasattr(module, "set_force_sum_reduction_for_comms"):
                module.set_force_sum_reduction_for_comms(True)
    training.backward(training.forward(0))
    if api.name == "plain":
        for parameter in training.model.parameters():
            parameter.grad.mul_(mesh.size()).div_(factor)
    return {"losses": training.losses, "grads": gradients(training.model, mesh)}


def hooked(api: Api, mesh: DeviceMesh, summed: bool, reduce: str) -> dict[str, Any]:
    """An all-reduce hook that is not linear, of means or of sums."""
    policy = api.MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduce))
    training = Training(api, shard(api, net(), mesh, mp_policy=policy), mesh)
    for module in training.model.modules():
        if isinstance(module, api.FSDPModule):
            module = cast("Any", module)
            module.set_all_reduce_hook(lambda reduced: reduced.clamp_(-0.01, 0.01))
            module.set_force_sum_reduction_for_comms(summed)
    training.step(0)
    return training.result()


def large(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """Gradients whose mean is a number in float16 and whose sum is none."""
    policy = api.MixedPrecisionPolicy(reduce_dtype=torch.float16)
    model = api.fully_shard(nn.Linear(WIDTH, 2), mesh=mesh, mp_policy=policy)
    model(torch.full((1, WIDTH), 2.0**15)).sum().backward()
    if api.name == "plain":
        return {"grads": {name: p.grad for name, p in model.named_parameters()}}
    return {"grads": gradients(model, mesh)}


def by_hand(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """`unshard` and `reshard` called by the user, waiting or by handle, around training steps."""
    training = Training(api, shard(api, net(), mesh), mesh)
    seen = training.extra
    for step in range(2):
        block = training.model.blocks[step]
        assert block.unshard() is None
        seen[f"shapes {step}"] = [tuple(p.shape) for p in block.parameters()]
        seen[f"values {step}"] = [p.detach().clone() for p in block.parameters()]
        handle = training.model.unshard(async_op=True)
        handle.wait()
        handle.wait()  # a second wait is harmless
        seen[f"root {step}"] = [p.detach().clone() for p in training.model.head.parameters()]
        block.reshard()
        training.model.reshard()
        training.model.reshard()
        training.step(step)
    return training.result()


def forward_method(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """A method other than forward gathers the unit like forward."""
    model = cast("Any", shard(api, net(), mesh))
    api.register_fsdp_forward_method(model, "features")
    training = Training(api, model, mesh)
    for step in range(2):
        loss = loss_of(model.features(rows(step)))
        training.losses.append(loss.detach().clone())
        training.backward(loss)
        training.update()
    return training.result()


def zeroing(api: Api, mesh: DeviceMesh, set_to_none: bool) -> dict[str, Any]:
    """Gradients after `zero_grad`, and steps after it."""
    training = Training(api, shard(api, net(), mesh), mesh)
    for step in range(3):
        training.backward(training.forward(step))
        training.update(set_to_none=set_to_none)
        training.grads.append(gradients(training.model, mesh))
    return training.result()


def checkpointed(api: Api, mesh: DeviceMesh, where: str, reentrant: bool) -> dict[str, Any]:
    """Activations recomputed around units, inside units, or around the whole model."""
    model = net()
    if where == "units":
        model.checkpointed = reentrant
    for block in model.blocks if where == "inside" else ():
        cast("Any", block).checkpointed = reentrant
    training = Training(api, shard(api, model, mesh), mesh)
    for step in range(3):
        x = rows(step).requires_grad_(reentrant)
        if where == "model":
            out = checkpoint(training.model, x, use_reentrant=reentrant)
        else:
            out = training.model(x)
        loss = loss_of(out)
        training.losses.append(loss.detach().clone())
        training.backward(loss)
        training.update()
    return training.result()


def recomputed_twice(api: Api, mesh: DeviceMesh, frozen: bool) -> dict[str, Any]:
    """A unit that runs twice, each time in a reentrant checkpoint: two passes inside the pass."""
    model = net(3)
    model.checkpointed, model.times = True, {1: 2}
    cast("Any", model.blocks[1]).up.bias.requires_grad_(not frozen)
    training = Training(api, shard(api, model, mesh), mesh)
    for step in range(2):
        training.step(step)
    return training.result()


def skipped(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """A unit that sits out some steps: its gradient is None in those."""
    training = Training(api, shard(api, net(3), mesh), mesh)
    for step, skip in enumerate(({1}, set(), {0, 2}, {1}, set())):
        training.model.skipped = skip
        training.step(step)
    return training.result()


def run_twice(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """A unit that runs twice in one forward: its gradient is the sum of both."""
    training = Training(api, shard(api, net(), mesh), mesh)
    for step in range(3):
        training.model.times = {0: 2} if step != 1 else {}
        training.step(step)
    return training.result()


def two_forwards(api: Api, mesh: DeviceMesh, order: str) -> dict[str, Any]:
    """Two forwards before their backwards: `first` or `last` goes first, or both in one."""
    training = Training(api, shard(api, net(), mesh), mesh)
    for step in range(2):
        losses = [training.forward(2 * step), training.forward(2 * step + 1)]
        if order == "together":
            training.backward(torch.stack(losses).sum())
        else:
            for loss in losses if order == "first" else losses[::-1]:
                training.backward(loss)
        training.update()
    return training.result()


def backward_twice(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """One forward, its graph kept, two backwards: gradients are doubled."""
    training = Training(api, shard(api, net(), mesh), mesh)
    for step in range(2):
        loss = training.forward(step)
        training.backward(loss, retain_graph=True)
        training.backward(loss)
        training.update()
    return training.result()


def evaluation(api: Api, mesh: DeviceMesh, when: str) -> dict[str, Any]:
    """Passes without gradients `between` steps, or between a step's forward and `backward`."""
    training = Training(api, shard(api, net(), mesh), mesh)
    evaluated: list[torch.Tensor] = []

    def evaluate(step: int) -> None:
        training.model.eval()
        with torch.no_grad():
            evaluated.append(loss_of(training.model(rows(50 + step))))
        training.model.train()

    for step in range(3):
        evaluate(step)
        loss = training.forward(step)
        if when == "backward":
            evaluate(10 + step)
        training.backward(loss)
        training.update()
    training.extra["evaluated"] = evaluated
    return training.result()


class Boom(RuntimeError):
    """Raised on purpose."""


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom


def recovery(api: Api, mesh: DeviceMesh, where: str, reset: bool) -> dict[str, Any]:
    """A step that raises in `forward` or `backward`, then steps as if it had not been.

    The plain side runs the steps without the failing one.
    """
    training = Training(api, shard(api, net(3), mesh), mesh)
    training.step(0)
    if api.name != "plain":
        middle = cast("nn.Module", training.model.blocks[1])

        def fail(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise Boom
            return cast("torch.Tensor", _Raise.apply(out))

        handle = middle.down.register_forward_hook(fail)  # type: ignore[union-attr]
        with suppress(Boom):
            loss_of(training.model(rows(99))).backward()
            training.extra["raised"] = False
        handle.remove()
        if reset and (api.name == "ours" or hasattr(training.model, "reset_iter_state")):
            training.model.reset_iter_state()
        training.optimizer.zero_grad()
    training.extra.setdefault("raised", True)
    for step in range(1, 3):
        training.step(step)
    return training.result()
