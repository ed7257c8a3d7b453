"""Programs that use what torch FSDP2's interface has around a training step, for every side."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.fsdp_models import WIDTH, Net, loss_of, net, rows, shard
from tests.dist.fsdp_programs import Training
from tests.dist.fsdp_sides import Api


def full(tensor: Any) -> torch.Tensor:
    """All rows, on every rank."""
    value: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return value.detach()


def layers(api: Api, mesh: DeviceMesh, device: str = "cpu", *, together: bool = False) -> Any:
    """A Linear, a LayerNorm and a narrow Linear, each a unit, or `together` one; and the root."""
    torch.manual_seed(3)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    for part in [list(model)] if together else model:
        api.fully_shard(part, mesh=mesh)
    return api.fully_shard(model, mesh=mesh)


def assigned(
    api: Api, mesh: DeviceMesh, device: str, kind: str, *, together: bool
) -> dict[str, torch.Tensor]:
    """`load_state_dict(assign=True)`, then a step: gradients and weights; `kind` is of the values.

    They are copies of another model's own, or made by `distribute_tensor`.
    """
    model, saved = layers(api, mesh, device, together=together), layers(api, mesh).state_dict()
    values = {key: value.clone().mul_(0.5) for key, value in saved.items()}
    if kind == "distributed":
        values = {k: distribute_tensor(full(v), mesh, [Shard(0)]) for k, v in values.items()}
    model.load_state_dict(values, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(rows(0))).backward()
    found = {f"{name} grad": full(p.grad) for name, p in model.named_parameters()}
    optimizer.step()
    return found | {name: full(p) for name, p in model.named_parameters()}


def loaded_while_gathered(api: Api, mesh: DeviceMesh, assign: bool) -> dict[str, Any]:
    """A state is taken, and loaded, after a forward without a backward: the root stays gathered."""
    torch.manual_seed(3)
    model = api.fully_shard(nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 1)), mesh=mesh)
    values = {key: value.clone().fill_(0.5) for key, value in model.state_dict().items()}
    model(rows(0)).sum()
    taken = {key: full(value.clone()) for key, value in model.state_dict().items()}
    model.load_state_dict(values, assign=assign)
    model.reshard()
    return {"taken": taken, "out": model(rows(1)), "now": [full(p) for p in model.parameters()]}


def optimizer_states(api: Api, mesh: DeviceMesh, flat: bool) -> dict[str, Any]:
    """A running optimizer's state: all of it on rank 0, and set into another that runs, too."""
    first, second = layers(api, mesh), layers(api, mesh)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (first, second)]
    for step, (model, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
        loss_of(model(rows(step))).backward()
        optimizer.step()
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    complete = get_state_dict(first, optimizers[0], options=whole)[1]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(first, optimizers[0], options=options)
    set_state_dict(
        second, optimizers[1], model_state_dict=weights, optim_state_dict=states, options=options
    )
    loss_of(second(rows(2))).backward()
    optimizers[1].step()
    return {
        "complete": complete.get("state", {}),
        "weights": [full(p) for p in second.parameters()],
        "states": [
            {key: full(value) for key, value in optimizers[1].state[p].items()}
            for p in second.parameters()
        ],
    }


def stepped_in_backward(api: Api, mesh: DeviceMesh, on_meta: bool) -> dict[str, Any]:
    """An optimizer a parameter, which steps as soon as its gradient is there."""
    model = layers(api, mesh, "meta" if on_meta else "cpu")
    order: list[str] = []

    def step(name: str, parameter: torch.Tensor) -> None:
        order.append(name)
        optimizers[name].step()
        parameter.grad = None

    if on_meta:
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.25)
    optimizers = {n: torch.optim.Adam([p], lr=0.1) for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: step(name, p))
    losses = []
    for number in range(3):
        loss = loss_of(model(rows(number)))
        loss.backward()
        losses.append(loss.detach())
    return {"order": order, "losses": losses, "weights": [full(p) for p in model.parameters()]}


def loops_over_gradients(api: Api, mesh: DeviceMesh) -> list[Any]:
    """What users' loops over gradients find on each rank: shapes, whole values, elements here."""
    model = layers(api, mesh)
    loss_of(model(rows(0))).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    wholes = [full(grad) for grad in found]
    norms = [full(grad.norm()) for grad in found]
    near = [torch.isclose(n, w.norm(), rtol=1e-6) for n, w in zip(norms, wholes, strict=True)]
    return [[tuple(grad.shape) for grad in found], wholes, near]


def output_dtypes(api: Api, mesh: DeviceMesh) -> list[str]:
    """Of the outputs of two modules that are one unit."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    policy = api.MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
    api.fully_shard(list(model), mesh=mesh, mp_policy=policy)
    api.fully_shard(model, mesh=mesh)
    found: list[str] = []
    for part in model:
        part.register_forward_hook(lambda *seen: found.append(str(seen[2].dtype)))
    model(rows(0))
    return found


def skipped_by_the_last(api: Api, mesh: DeviceMesh, how: str) -> dict[str, Any]:
    """Microbatches, the last of which skips a unit: it gets what came before, in this step."""
    training = Training(api, shard(api, net(), mesh), mesh)
    model = cast("Net", training.model)
    for step in range(2):
        for micro in range(3):
            is_last = micro == 2
            model.skipped = {1} if is_last else set()
            if how == "no sync":
                training.model.set_requires_gradient_sync(is_last)
            elif how == "no all-reduce":
                training.model.set_requires_all_reduce(is_last)
            elif api.name == "ours":
                training.model.set_is_last_backward(is_last)
            training.backward(training.forward(3 * step + micro), sync=is_last)
        training.update()
    return training.result()
