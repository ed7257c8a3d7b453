"""Programs about what parameters a unit can hold and how they look: for every side of `fsdp_sides`.

Modules here hold parameters of awkward kinds; steps are those of `fsdp_programs.Training`.
"""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.fsdp_programs import Training
from tests.dist.fsdp_sides import (
    WIDTH,
    Api,
    Block,
    gradients,
    is_piece,
    loss_of,
    net,
    rows,
    shard,
    weights,
)


def full(tensor: Any) -> torch.Tensor:
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
    """What users' loops find on each rank: shapes and whole values of gradients, states."""
    model = layers(api, mesh)
    loss_of(model(rows(0))).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    wholes = [full(grad) for grad in found]
    norms = [full(grad.norm()) for grad in found]
    near = [torch.isclose(n, w.norm(), rtol=1e-6) for n, w in zip(norms, wholes, strict=True)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer.step()
    states = [len(optimizer.state[parameter]) for parameter in model.parameters()]
    return [[tuple(grad.shape) for grad in found], wholes, near, states]


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


class Awkward(nn.Module):
    """One parameter of a kind beside a Linear, and a count of its forwards in buffers."""

    calls: torch.Tensor
    mean: torch.Tensor

    def __init__(self, extra: torch.Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(extra)
        self.last = nn.Linear(WIDTH, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 1]."""
        with torch.no_grad():
            self.calls += 1
            self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.5)
        h = torch.tanh(self.first(x))
        scale = self.extra.to(h.dtype)
        if scale.dim() == 2:
            h = h @ scale[:WIDTH] if scale.shape[0] >= WIDTH else h * scale.sum(0)
        else:
            h = h * scale.sum()
        out: torch.Tensor = self.last(h)
        return out


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random values, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(11)).to(dtype)


EXTRAS: dict[str, Any] = {
    "scalar": lambda: seeded(),
    "one_row": lambda: seeded(1, WIDTH),
    "one_element": lambda: seeded(1),
    "column": lambda: seeded(3, 1).expand(3, WIDTH).contiguous(),
    "many_dims": lambda: seeded(3, 2, 2),
    "transposed": lambda: seeded(WIDTH, WIDTH + 1).t(),
    "empty": lambda: seeded(0, WIDTH),
    "double": lambda: seeded(WIDTH, WIDTH, dtype=torch.float64),
    "bfloat16": lambda: seeded(WIDTH, WIDTH, dtype=torch.bfloat16),
}


def awkward(api: Api, mesh: DeviceMesh, kind: str, optimizer: str = "sgd") -> dict[str, Any]:
    """A unit with one parameter of an awkward kind; buffers stay whole, plain and right."""
    torch.manual_seed(5)
    extra = EXTRAS[kind]()
    # Rows are kept whole, so a parameter is contiguous once sharded; products round by strides.
    model = Awkward(extra.contiguous() if api.name == "plain" else extra)
    api.fully_shard(model, mesh=mesh)
    training = Training(api, model, mesh, optimizer)
    for step in range(3):
        training.step(step)
    training.extra = {
        "calls": model.calls,
        "mean": model.mean,
        "buffers": [(name, is_piece(b)) for name, b in model.named_buffers()],
        "dtypes": [str(p.dtype) for p in model.parameters()],
        "shapes": [tuple(p.shape) for p in model.parameters()],
    }
    return training.result()


class Tied(nn.Module):
    """An embedding whose table is also the head's weight, the block between them a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] floats -> [rows, WIDTH, 7]; tokens are the floats' bins."""
        tokens = (x * 3).long() % 7
        out: torch.Tensor = self.head(self.block(self.table(tokens)))
        return out


def tied(api: Api, mesh: DeviceMesh, inner: bool) -> dict[str, Any]:
    """One parameter under two names in a unit: gradients of both uses add up, names stay."""
    torch.manual_seed(5)
    model = Tied()
    if inner:
        api.fully_shard(model.block, mesh=mesh)
    api.fully_shard(model, mesh=mesh)
    training = Training(api, model, mesh)
    for step in range(3):
        training.step(step)
    training.extra = {
        "is one": model.head.weight is model.table.weight,
        "names": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
    }
    return training.result()


def frozen(api: Api, mesh: DeviceMesh, what: str) -> dict[str, Any]:
    """Parameters that do not train: some of a unit (`mixed`), a whole `unit`, the `first` one.

    With `thawed`, what was frozen in the first step trains from the second on.
    """
    model = net(3)
    middle = model.blocks[1]
    chosen: list[nn.Parameter] = {
        "mixed": lambda: [p for n, p in model.named_parameters() if n.endswith("bias")],
        "unit": lambda: list(middle.parameters()),
        "first": lambda: list(model.blocks[0].parameters()),
        "root": lambda: [*model.embed.parameters(), *model.head.parameters()],
        "thawed": lambda: list(middle.parameters()),
    }[what]()
    for parameter in chosen:
        parameter.requires_grad_(False)
    training = Training(api, shard(api, model, mesh), mesh)
    for step in range(3):
        if what == "thawed" and step == 1:
            middle.requires_grad_(True)
        training.step(step)
    training.extra["trains"] = [p.requires_grad for p in model.parameters()]
    return training.result()


def ignored(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """Ignored parameters stay whole and plain, with this rank's own gradient."""
    model = net()
    block = cast("Block", model.blocks[0])
    held = {model.embed.weight, block.up.bias}
    names = [name for name, p in model.named_parameters() if p in held]
    api.fully_shard(model.blocks[0], mesh=mesh, ignored_params=held)
    api.fully_shard(model.blocks[1], mesh=mesh)
    api.fully_shard(model, mesh=mesh, ignored_params=held)
    loss = loss_of(model(rows(0)))
    Training(api, model, mesh).backward(loss)
    own = net()
    loss_of(own(rows(0))).backward()
    found = dict(model.named_parameters())
    return {
        "same objects": [found[name] in held for name in names],
        "loss": loss,
        "own": {name: found[name].grad for name in names} if api.name != "plain" else {
            name: dict(own.named_parameters())[name].grad for name in names
        },
        "averaged": {n: g for n, g in gradients(model, mesh).items() if n not in names},
        "state": list(model.state_dict()),
    }  # fmt: skip


class Looking(nn.Module):
    """A Linear that notes the dtypes that its forward meets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.seen: set[str] = set()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        """Any floating dtype in; a tree of outputs."""
        weight = next(self.inner.parameters())
        self.seen.add(f"x {x.dtype} scale {scale.dtype} weight {weight.dtype}")
        y = self.inner(x.to(weight.dtype)) * scale.to(weight.dtype)
        return {"y": [y], "index": torch.arange(2), "name": "y"}


def precision(api: Api, mesh: DeviceMesh, on_block: bool, **policy: Any) -> dict[str, Any]:
    """A policy on a block, or on block and root: dtypes met in forward, at rest, of gradients."""
    dtypes = {k: getattr(torch, v) if isinstance(v, str) else v for k, v in policy.items()}
    torch.manual_seed(5)
    model = Looking(nn.Sequential(Block(), nn.Linear(WIDTH, 3)))
    mp = api.MixedPrecisionPolicy(**dtypes)
    if on_block:
        inner = {k: v for k, v in dtypes.items() if k != "output_dtype"}
        api.fully_shard(
            cast("nn.Sequential", model.inner)[0],
            mesh=mesh,
            mp_policy=api.MixedPrecisionPolicy(**inner),
        )
    api.fully_shard(model, mesh=mesh, mp_policy=mp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, grads, outputs = [], [], []
    for step in range(3):
        out = model(rows(step), scale=torch.tensor(0.5))
        outputs.append((str(out["y"][0].dtype), str(out["index"].dtype), out["name"]))
        loss = loss_of(out["y"][0])
        losses.append(loss)
        loss.backward()
        grads.append(gradients(model, mesh))
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "grads": grads,
        "outputs": outputs,
        "seen": sorted(model.seen),
        "rest": [str(p.dtype) for p in model.parameters()],
        "weights": weights(model, mesh),
    }


def names(api: Api, mesh: DeviceMesh) -> dict[str, Any]:
    """Names, their order, classes and membership: what checkpoints and loggers rely on."""
    model = shard(api, net(), mesh)
    before = [name for name, _ in model.named_parameters()]
    Training(api, model, mesh).step(0)
    model.eval()
    return {
        "before": before,
        "after": [name for name, _ in model.named_parameters()],
        "state": list(model.state_dict()),
        "modules": [name for name, _ in model.named_modules()],
        "classes": [type(m).__name__ for m in model.modules()],
        "units": [isinstance(m, api.FSDPModule) for m in model.modules()],
        "is a Net": isinstance(model, type(net())),
        "returns the module": api.fully_shard(block := Block(), mesh=mesh) is block,
        "training": [m.training for m in model.modules()],
    }
