"""Programs that save and load on ranks: round trips, gathered weights."""

import warnings
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.checkpoint import load, save
from fsdp_core.fsdp import MixedPrecisionPolicy, fully_shard
from tests.dist.checkpoint_layouts import (
    LAYOUTS,
    build,
    fill,
    local,
    misses,
    snapshot,
    tensors,
    train,
    unlike,
)
from tests.dist.fsdp_models import Net, rows
from tests.dist.fsdp_sides import differences, same_bits

# --- round trips ------------------------------------------------------------------------------


def fill_and_save(folder: str, seed: int, layout: str, optimizer: str = "AdamW") -> None:
    """Known values, saved as step 3."""
    model, made = build(layout, optimizer)
    train(model, made, range(1))
    fill(model, made, seed)
    save(folder, 3, model, made, {"tokens": [seed, 0.1]})


def load_each(sources: list[tuple[str, int]], layout: str, optimizer: str = "AdamW") -> list[Any]:
    """Of each folder and seed, loaded into a fresh model: the step, `extra`, and what is wrong."""
    found = []
    for folder, seed in sources:
        model, made = build(layout, optimizer, seed=4)
        loaded = load(folder, model, made)
        found.append((loaded.step, loaded.extra, misses(model, made, optimizer, seed)))
        train(model, made, range(3, 4))  # states are such as the optimizer works with
    return found


def continue_or_not(folder: str, layout: str, optimizer: str) -> list[str]:
    """How training resumed in fresh objects, or in live ones that went astray, differs."""
    model, made = build(layout, optimizer)
    train(model, made, range(2))
    save(folder, 2, model, made)
    train(model, made, range(2, 4))
    expected = snapshot(model, made)
    other, other_made = build(layout, optimizer, seed=4)
    load(folder, other, other_made)
    train(other, other_made, range(2, 4))
    memory = addresses(made)
    load(folder, model, made)
    assert addresses(made) == memory
    train(model, made, range(2, 4))
    resumed, put_back = snapshot(other, other_made), snapshot(model, made)
    return differences(expected, resumed, "resumed") + differences(expected, put_back, "put back")


def addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    """Where states and learning rates lie."""
    values = [v for states in optimizer.state.values() for v in states.values()]
    values += [v for group in optimizer.param_groups for v in group.values()]
    return [local(v).data_ptr() for v in values if torch.is_tensor(v)]


class Norm(Net):
    """Statistics that are of each rank's own data."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        out: torch.Tensor = self.norm(super().forward(x))
        return out


def rank_statistics(folder: str, saving: bool) -> list[list[float]]:
    """Each rank's running mean after training and saving, or as loaded."""
    layout = {1: "alone", 2: "more units", 3: "params"}[dist.get_world_size()]
    model, made = build(layout, factory=Norm)
    if saving:
        train(model, made, range(2))
        save(folder, 1, model, made)
    else:
        load(folder, model, made)
    return cast("list[list[float]]", model.norm.running_mean.tolist())


def warned_statistics(folder: str) -> tuple[list[list[float]], list[str]]:
    """As loaded, and what was said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = rank_statistics(folder, False)
    return found, [str(warning.message) for warning in caught]


def own_parameters(folder: str, saving: bool) -> str:
    """A plain parameter that each rank trains alone: saved, or what loading it comes to."""
    model = nn.Linear(2, 2)
    made = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    if saving:
        nn.init.constant_(model.weight, dist.get_rank())
        save(folder, 1, model, made)
        return ""
    try:
        load(folder, model, made)
    except ValueError as error:
        return str(error)
    return str(model.weight[0, 0].item())


def read_with_dcp(folder: str, seed: int) -> list[str]:
    """Names of weights and buffers that torch's own load, into this layout, does not give back."""
    model, _ = build("params", seed=4)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/step-00000003")
    return unlike(tensors(model), seed)


# --- gathered weights ---------------------------------------------------------------------------


def gathered(folder: str, layout: str) -> tuple[list[str], list[torch.Tensor]]:
    """Save and load while units are gathered: what changed, and what forward sees."""
    shape, strategy = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    torch.manual_seed(3)
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy=strategy, mp_policy=policy)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    before = {name: local(p).clone() for name, p in tensors(model).items()}
    x = rows(0, rank=0)
    with torch.no_grad():
        outs = [model(x)]
        model.blocks[0].unshard()
        save(folder, 1, model)
        model.blocks[0].reshard()
        model.reshard()
        for parameter in model.parameters():
            parameter.mul_(2)
        outs.append(model(x))
        model.blocks[0].unshard()
        load(folder, model)
        check_copies(model)
        outs.append(model(x))
    after = {name: local(p) for name, p in tensors(model).items()}
    return differences(before, after), outs


def check_copies(model: Any) -> None:
    """Copies that are kept at rest hold the weights, for graphs that replay without a gather."""
    for group in model.fsdp_groups:
        for copy, parameter in zip(group.unsharded, group.sharded, strict=True):
            if group.nest.weight_level == 0:
                assert same_bits(copy.detach(), parameter.detach().full_tensor().bfloat16())
