"""Checkpoints of a layer whose gate and up lie in one parameter, as libraries have it."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core import checkpoint
from fsdp_core.fsdp import fully_shard
from fsdp_core.parallel.param_sharding import Cut, consecutive, set_stretches, take
from tests.dist.layout_checkpoint_programs import local

WIDTH, INNER = 6, 8
NAMES = ("gate.weight", "up.weight")
SHAPE = (INNER, WIDTH)


class Fused(nn.Module):
    """A rank's rows of gate, then those of up; or where `dim` is 1 side by side."""

    def __init__(self, cut: Cut, dim: int) -> None:
        super().__init__()
        length = INNER // cut.axis_size
        shape = (2 * length, WIDTH) if dim == 0 else (length, 2 * WIDTH)
        self.gate_up = nn.Parameter(torch.zeros(shape))
        named = dict.fromkeys(NAMES, shape[dim] // 2)
        set_stretches(self, {"gate_up": consecutive(named, (cut,), dim)})


class Apart(nn.Module):
    """The same as one process has it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in NAMES)


def whole(name: str, key: str) -> torch.Tensor:
    """Known values of a weight, or of a state of it."""
    start = 1000 * NAMES.index(name) + 100 * ("weight", "exp_avg", "exp_avg_sq").index(key)
    return torch.arange(INNER * WIDTH, dtype=torch.float32).view(SHAPE) + start


def rows_of(parameter: Any, key: str, cut: Cut, dim: int) -> torch.Tensor:
    """What this rank should have of the fused parameter."""
    both = torch.cat([take(whole(name, key), (cut,)) for name in NAMES], dim)
    spec = getattr(parameter, "row_spec", None)
    return both if spec is None else spec.own_rows(both)


def build(tp: int, dim: int) -> tuple[nn.Module, torch.optim.Optimizer, Cut]:
    """Fused over tp and sharded over the other ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // tp, tp),
                            mesh_dim_names=("dp", "tp"))  # fmt: skip
    cut = Cut("tp", 0, tp, mesh["tp"].get_local_rank())
    model = Fused(cut, dim)
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters()), cut


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The parameter and its states."""
    (parameter,) = model.parameters()
    made = optimizer.state.get(parameter, {})
    return {"weight": parameter, **{k: v for k, v in made.items() if k != "step"}}


def save_fused(folder: str, tp: int, dim: int) -> None:
    """Known values, fused."""
    model, optimizer, cut = build(tp, dim)
    (parameter,) = model.parameters()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, tensor in states(model, optimizer).items():
        local(tensor).copy_(rows_of(parameter, key, cut, dim))
    checkpoint.save(folder, 1, model, optimizer)


def save_apart(folder: str) -> None:
    """Known values, of one process."""
    model = Apart()
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        parameter.data.copy_(whole(name, "weight"))
        for key in ("exp_avg", "exp_avg_sq"):
            optimizer.state[parameter][key].copy_(whole(name, key))
        optimizer.state[parameter]["step"].fill_(1.0)
    checkpoint.save(folder, 1, model, optimizer)


def load_fused(folders: list[str], tp: int, dim: int) -> list[str]:
    """What is wrong after a load into a fused layer."""
    wrong = []
    for folder in folders:
        model, optimizer, cut = build(tp, dim)
        checkpoint.load(folder, model, optimizer)
        (parameter,) = model.parameters()
        found = states(model, optimizer)
        assert len(found) == 3
        for key, tensor in found.items():
            if not torch.equal(local(tensor), rows_of(parameter, key, cut, dim)):
                wrong.append(f"{folder}: {key}")
        if optimizer.state[parameter]["step"] != 1:
            wrong.append(f"{folder}: step")
    return wrong


def load_apart(folders: list[str]) -> list[str]:
    """What is wrong after a load into one process."""
    wrong = []
    for folder in folders:
        model = Apart()
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoint.load(folder, model, optimizer)
        for name, parameter in model.named_parameters():
            found = {"weight": parameter, **optimizer.state[parameter]}
            assert found.pop("step") == 1
            wrong += [k for k, t in found.items() if not torch.equal(t, whole(name, k))]
    return wrong


class Scaled(nn.Linear):
    """Keeps a scale that is no parameter, as layers of eight-bit numbers do."""

    scale = 1.0

    def get_extra_state(self) -> dict[str, float]:
        """The scale."""
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        """Take a scale over."""
        self.scale = state["scale"]


def change_library(folder: str) -> tuple[list[str], float, list[str]]:
    """Layers with scales and without load each other's checkpoints: what is wrong, what is said."""
    scaled, plain = Scaled(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    scaled.scale = 3.0
    checkpoint.save(folder, 1, scaled)
    checkpoint.save(folder, 2, plain)
    wanted = [layer.weight.detach().clone() for layer in (scaled, plain)]
    wrong, said = [], []
    for target, step in ((plain, 1), (scaled, 2), (scaled, 1)):
        scaled.scale = 5.0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            checkpoint.load(folder, target, step=step)
        said += [str(each.message) for each in caught if "other modules" in str(each.message)]
        if not torch.equal(target.weight, wanted[step - 1]):
            wrong.append(f"step {step}")
        if step == 2 and scaled.scale != 5.0:
            wrong.append("scale")
    return wrong, scaled.scale, said
