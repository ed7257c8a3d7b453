"""Checkpoints over ranks: every bit back, in any layout."""

import itertools
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.checkpoint import load, save
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from tests.dist.fsdp_sides import WIDTH, Net, differences, loss_of, rows
from tests.dist.rank_pool import RankPool
from tests.support.tensors import own_rows, same_bits

PARAMS = "optim_grads_params"
LAYOUTS: dict[str, tuple[tuple[int, ...], Any]] = {
    "plain": ((1,), None),
    "no_shard": ((2,), "no_shard"),
    "optim": ((3,), "optim"),
    "optim_grads": ((2,), "optim_grads"),
    "params": ((3,), PARAMS),
    "alone": ((1,), PARAMS),
    "hsdp": ((2, 2), ("no_shard", PARAMS)),
    "hfsdp": ((2, 2), ("optim", PARAMS)),
    "one unit": ((2,), PARAMS),
    "more units": ((2,), PARAMS),
}
OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def world_of(layout: str) -> int:
    shape = LAYOUTS[layout][0]
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


class Odd(Net):
    """Beside what divides badly: a 0-d and a frozen parameter, shared weights, a buffer."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.frozen = nn.Parameter(torch.randn(2, WIDTH), requires_grad=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.embed.weight
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, 3]."""
        self.seen += 1
        features = self.features(self.again(x) + (self.frozen @ x.mT).sum()) * self.scale
        out: torch.Tensor = self.head(features)
        return out


def build(
    layout: str, optimizer: str = "AdamW", seed: int = 3, factory: Callable[[], nn.Module] = Odd
) -> tuple[Any, torch.optim.Optimizer]:
    """A model in a layout, and its optimizer in groups: matrices, and all else."""
    shape, strategy = LAYOUTS[layout]
    torch.manual_seed(seed)
    model: Any = factory()
    if strategy is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
        if layout == "more units":
            for block in model.blocks:
                fully_shard(block.up, mesh=mesh, strategy=strategy)
        if layout != "one unit":
            for block in model.blocks:
                fully_shard(block, mesh=mesh, strategy=strategy)
        fully_shard(model, mesh=mesh, strategy=strategy)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = ([p for p in trained if (p.dim() == 2) == is_2d] for is_2d in (True, False))
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.3, "note": (1, "b")}]
    made = OPTIMIZERS[optimizer](groups)
    return model, made


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps of training; every step and rank has data of its own."""
    for step in steps:
        loss_of(model(rows(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- this rank's part -------------------------------------------------------------------------


def tensors(model: Any, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Weights, buffers and states by name, as far as this rank has rows of their parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    # Adagrad makes states for parameters without rows as well, and does not go on with them.
    weights = {name: p for name, p in model.named_parameters() if own_rows(p).numel()}
    states = {} if optimizer is None else optimizer.state
    found = weights | dict(model.named_buffers())
    for name, parameter in weights.items():
        found |= {f"{name}.{key}": v for key, v in states.get(parameter, {}).items()}
    assert found
    return dict(sorted(found.items()))


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters, tensors in memory of their own."""
    return [
        {k: v.clone() if torch.is_tensor(v) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all that this rank has: weights, buffers, states and hyperparameters."""
    copies: dict[str, Any] = {n: own_rows(t).clone() for n, t in tensors(model, optimizer).items()}
    return copies | {"groups": groups_of(optimizer)}


# --- known values -----------------------------------------------------------------------------


def known_rows(name: str, tensor: Any, seed: int) -> torch.Tensor:
    """Values of this rank's rows, by the tensor's name and their place in it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    full = (torch.rand(tensor.shape, generator=generator) * 1000).to(tensor.dtype)
    return tensor.row_spec.own_rows(full) if isinstance(tensor, RowSharded) else full


def fill(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Give every tensor and some hyperparameters known values."""
    for name, tensor in tensors(model, optimizer).items():
        own_rows(tensor).copy_(known_rows(name, tensor, seed))
    for number, group in enumerate(optimizer.param_groups):
        group.update(_known_group(number, seed))


def _known_group(number: int, seed: int) -> dict[str, Any]:
    return {"lr": 1 / (3 + seed), "weight_decay": 0.1 * number, "mine": (number, [seed, "b"])}


def misses(model: Any, optimizer: torch.optim.Optimizer, kind: str, seed: int) -> list[str]:
    """What this rank should have after a load of what `fill` left with this seed, and has not."""
    found = tensors(model, optimizer)
    trained = {n for n, p in model.named_parameters() if n in found and p.requires_grad}
    expected = {f"{name}.{key}" for name in trained for key in _state_keys(kind)}
    wrong = sorted((expected | set(tensors(model))) ^ set(found))
    wrong += [
        f"group {i}"
        for i, group in enumerate(groups_of(optimizer))
        if not (_known_group(i, seed).items() <= group.items())
    ]
    return wrong + unlike(found, seed)


def unlike(found: dict[str, Any], seed: int) -> list[str]:
    """Names of tensors whose rows on this rank are not the known ones, bit for bit."""
    return [n for n, t in found.items() if not same_bits(known_rows(n, t, seed), own_rows(t))]


def _state_keys(kind: str) -> list[str]:
    """What an optimizer of a kind keeps of a parameter."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = OPTIMIZERS[kind]([{"params": [parameter]}])
    optimizer.step()
    return list(optimizer.state[parameter])


def fill_and_save(folder: str, seed: int, layout: str, optimizer: str = "AdamW") -> None:
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
    values = [v for states in optimizer.state.values() for v in states.values()]
    values += [v for group in optimizer.param_groups for v in group.values()]
    return [own_rows(v).data_ptr() for v in values if torch.is_tensor(v)]


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
    before = {name: own_rows(p).clone() for name, p in tensors(model).items()}
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
    after = {name: own_rows(p) for name, p in tensors(model).items()}
    return differences(before, after), outs


def check_copies(model: Any) -> None:
    """Copies that are kept at rest hold the weights, for graphs that replay without a gather."""
    for group in model.fsdp_groups:
        for copy, parameter in zip(group.unsharded, group.sharded, strict=True):
            if group.nest.weight_level == 0:
                assert same_bits(copy.detach(), parameter.detach().full_tensor().bfloat16())


HUBS = ("plain", "more units")
"""Every layout is loaded into these; into others the first of these and the layout before it."""

Saved = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def saved(warm_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of each layout: a folder with a checkpoint, and the seed of its values."""
    found = {}
    for seed, layout in enumerate(LAYOUTS):
        folder = str(tmp_path_factory.mktemp("saved"))
        warm_ranks.run(fill_and_save, folder, seed, layout, world_size=world_of(layout))
        found[layout] = folder, seed
    return found


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_checkpoint_loads_into_other_layouts_bit_for_bit(
    warm_ranks: RankPool, saved: Saved, layout: str
) -> None:
    """Weights, buffers, optimizer states and hyperparameters are those saved, on every rank."""
    names = list(LAYOUTS)
    before = names[names.index(layout) - 1]
    sources = [saved[n] for n in LAYOUTS if layout in HUBS or n in (HUBS[0], before)]
    for rank in warm_ranks.run(load_each, sources, layout, world_size=world_of(layout)):
        assert rank == [(3, {"tokens": [seed, 0.1]}, []) for _, seed in sources]


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "NAdam", "ASGD"])
def test_states_of_any_optimizer_load_into_other_layouts(
    warm_ranks: RankPool, tmp_path: Path, optimizer: str
) -> None:
    """Cut and single states alike, of matrices and of numbers, both ways."""
    sources = [(str(tmp_path / "cut"), 1), (str(tmp_path / "whole"), 2)]
    warm_ranks.run(fill_and_save, *sources[0], "params", optimizer, world_size=3)
    warm_ranks.run(fill_and_save, *sources[1], "plain", optimizer, world_size=1)
    for layout in ("plain", "optim_grads"):
        for rank in warm_ranks.run(
            load_each, sources, layout, optimizer, world_size=world_of(layout)
        ):
            assert [wrong for _, _, wrong in rank] == [[], []]


CONTINUED = [("AdamW", name) for name in ("plain", "no_shard", "optim", "params", "hfsdp")]
OTHERS = [name for name in OPTIMIZERS if name != "AdamW"]
CONTINUED += zip(OTHERS, itertools.cycle(("more units", "optim_grads", "alone")), strict=False)


@pytest.mark.parametrize(("optimizer", "layout"), CONTINUED)
def test_continued_training_is_uninterrupted_training(
    warm_ranks: RankPool, tmp_path: Path, optimizer: str, layout: str
) -> None:
    """Two steps after a load give the bits of two steps after the save; live memory stays put."""
    for found in warm_ranks.run(
        continue_or_not, str(tmp_path), layout, optimizer, world_size=world_of(layout)
    ):
        assert found == []


def test_buffers_that_differ_between_ranks_come_back_to_their_rank(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """BatchNorm's statistics of each rank are its own again."""
    ranks = warm_ranks.run(rank_statistics, str(tmp_path), True, world_size=2)
    assert ranks[0] != ranks[1]
    assert warm_ranks.run(rank_statistics, str(tmp_path), False, world_size=2) == ranks


def test_buffers_of_other_ranks_are_the_firsts_with_a_warning(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """On another number of ranks BatchNorm's statistics are the first rank's, and that is said."""
    first, _ = warm_ranks.run(rank_statistics, str(tmp_path), True, world_size=2)
    for statistics, texts in warm_ranks.run(warned_statistics, str(tmp_path), world_size=3):
        assert statistics == first
        assert any("model.norm.running_mean differed between the ranks" in t for t in texts)


def test_parameters_that_differ_between_ranks_load_on_as_many_only(
    warm_ranks: RankPool, tmp_path: Path
) -> None:
    """A parameter of each rank's own is its own again, and is refused on other numbers of ranks."""
    warm_ranks.run(own_parameters, str(tmp_path), True, world_size=2)
    loaded = warm_ranks.run(own_parameters, str(tmp_path), False, world_size=2)
    assert loaded == ["0.0", "1.0"]
    for text in warm_ranks.run(own_parameters, str(tmp_path), False, world_size=3):
        assert "Expected the 2 ranks that saved, as model.weight differed" in text


@pytest.mark.parametrize("layout", ["no_shard", "optim_grads", "more units", "hfsdp"])
def test_units_may_be_gathered_while_saved_and_loaded(
    warm_ranks: RankPool, tmp_path: Path, layout: str
) -> None:
    """Main weights are saved, not their bfloat16 copies, and copies follow a load at once."""
    for changed, outs in warm_ranks.run(
        gathered, str(tmp_path), layout, world_size=world_of(layout)
    ):
        assert changed == []
        assert not same_bits(outs[0], outs[1])
        assert same_bits(outs[0], outs[2])


def test_torchs_own_load_reads_the_folder(warm_ranks: RankPool, saved: Saved) -> None:
    """`torch.distributed.checkpoint.load` of the model's state_dict loads the same weights."""
    for wrong in warm_ranks.run(read_with_dcp, *saved["hsdp"], world_size=3):
        assert wrong == []
