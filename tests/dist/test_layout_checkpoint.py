"""Checkpoints between layouts: every bit of weights and states, by the names of the whole model."""

import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core import checkpoint
from fsdp_core.config import ParallelConfig, model_from_preset
from fsdp_core.device import Device
from fsdp_core.fsdp import fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.model.decoder import DecoderStage, make_stages
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import shard_stage
from fsdp_core.parallel.mesh import build_axes
from fsdp_core.parallel.tensor_parallel import Cut, consecutive, named_cuts, set_stretches, take
from tests.dist.parity_programs import Batch, Layout, Problem, sharding_of, streams_of, whole_model
from tests.dist.rank_pool import RankError, RankPool
from tests.support.tensors import own_rows

STATES = ("exp_avg", "exp_avg_sq")
Stages = list[DecoderStage]


def problem(layers: int = 4) -> Problem:
    """Latent attention, a dense layer, then layers of experts with a bias each."""
    config = model_from_preset("mla_moe_tiny", {"layers": layers})
    return Problem(config, Batch(config.vocab_size, config.seq, 2))


def build(what: Problem, layout: Layout | None) -> tuple[Stages, torch.optim.Optimizer]:
    """The stages that this rank has, sharded, or the whole model as it is, and an optimizer."""
    if layout is None:
        stages = [whole_model(what)]
    else:
        axes = build_axes(layout.parallel, Device("cpu"))
        streams, chunks = streams_of(axes), layout.parallel.pp_chunks
        stages = make_stages(what.model, axes, LayerFactory(), streams, chunks=chunks)
        for stage in stages:
            for parameter in stage.parameters():
                torch.nn.init.zeros_(parameter)
            shard_stage(stage, axes, **sharding_of(layout, torch.float32))
    return stages, adamw(stages)


def adamw(stages: Stages) -> torch.optim.Optimizer:
    """Matrices and all else in two groups, with states for all that has rows here."""
    trained = [p for stage in stages for p in stage.parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() > 1]},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.AdamW(groups)
    for parameter in trained:
        if own_rows(parameter).numel():
            made.state[parameter] = {
                "step": torch.zeros(()),
                **{key: torch.zeros_like(parameter.detach()) for key in STATES},
            }
    return made


def known(name: str, tensor: Any, cuts: tuple[Cut, ...], seed: int) -> torch.Tensor:
    """This rank's part of the values that the name of a global tensor draws."""
    shape = list(tensor.shape)
    for cut in cuts:
        shape[cut.dim] *= cut.axis_size
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    part = take(torch.rand(shape, generator=generator).to(tensor.dtype), cuts)
    return tensor.row_spec.own_rows(part) if isinstance(tensor, RowSharded) else part


def parts(
    stages: Stages, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any, tuple[Cut, ...]]]:
    """Weights, buffers and states by global names, with their cuts."""
    for stage in stages:
        cuts = named_cuts(stage)
        for name, parameter in stage.named_parameters():
            yield name, parameter, cuts[name]
            for key, state in optimizer.state.get(parameter, {}).items():
                yield f"{name}.{key}", state, cuts[name] if state.dim() else ()
        saved = stage.state_dict().keys()
        for name, buffer in stage.named_buffers():
            if name in saved:
                yield name, buffer, ()


def fill(stages: Stages, optimizer: torch.optim.Optimizer, seed: int) -> None:
    for name, tensor, cuts in parts(stages, optimizer):
        own_rows(tensor).copy_(known(name, tensor, cuts, seed))


def wrong(stages: Stages, optimizer: torch.optim.Optimizer, seed: int) -> list[str]:
    """Names of what has not the known bits."""
    return [
        name
        for name, tensor, cuts in parts(stages, optimizer)
        if not torch.equal(own_rows(tensor), known(name, tensor, cuts, seed))
    ]


def fill_and_save(folder: str, seed: int, what: Problem, layout: Layout | None) -> None:
    stages, optimizer = build(what, layout)
    fill(stages, optimizer, seed)
    model = stages if layout is not None else stages[0]
    checkpoint.save(folder, 5, model, optimizer, {"seed": seed})


def load_each(
    sources: list[tuple[str, int]], what: Problem, layout: Layout | None
) -> list[tuple[list[str], int]]:
    """Of each folder and seed: what of it is wrong in this layout, and how much was compared."""
    stages, optimizer = build(what, layout)
    model = stages if layout is not None else stages[0]
    found = []
    for folder, seed in sources:
        loaded = checkpoint.load(folder, model, optimizer)
        assert (loaded.step, loaded.extra) == (5, {"seed": seed})
        compared = len(list(parts(stages, optimizer)))
        found.append((wrong(stages, optimizer, seed), compared))
    return found


def drift_and_save(folder: str, what: Problem, layout: Layout) -> None:
    """A replicated norm that has other values on the second rank of tp."""
    stages, optimizer = build(what, layout)
    fill(stages, optimizer, 1)
    axes = stages[0].axes
    norm: Any = next(iter(stages[0].numbered_layers.values())).attn.norm
    if axes.tp.rank and not axes.pp.rank:
        own_rows(norm.weight).mul_(1.001)
    checkpoint.save(folder, 5, stages, optimizer)


def load_part(folder: str, what: Problem, layout: Layout, leave_out: str) -> None:
    """Load into stages of which one layer is missing."""
    stages, _ = build(what, layout)
    for stage in stages:
        if leave_out in stage.numbered_layers:
            del stage.layers[leave_out]
    checkpoint.load(folder, stages)


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


def build_fused(tp: int, dim: int) -> tuple[nn.Module, torch.optim.Optimizer, Cut]:
    """Fused over tp and sharded over the other ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size() // tp, tp),
                            mesh_dim_names=("dp", "tp"))  # fmt: skip
    cut = Cut("tp", 0, tp, mesh["tp"].get_local_rank())
    model = Fused(cut, dim)
    fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters()), cut


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    (parameter,) = model.parameters()
    made = optimizer.state.get(parameter, {})
    return {"weight": parameter, **{k: v for k, v in made.items() if k != "step"}}


def save_fused(folder: str, tp: int, dim: int) -> None:
    model, optimizer, cut = build_fused(tp, dim)
    (parameter,) = model.parameters()
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, tensor in states(model, optimizer).items():
        own_rows(tensor).copy_(rows_of(parameter, key, cut, dim))
    checkpoint.save(folder, 1, model, optimizer)


def save_apart(folder: str) -> None:
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
        model, optimizer, cut = build_fused(tp, dim)
        checkpoint.load(folder, model, optimizer)
        (parameter,) = model.parameters()
        found = states(model, optimizer)
        assert len(found) == 3
        for key, tensor in found.items():
            if not torch.equal(own_rows(tensor), rows_of(parameter, key, cut, dim)):
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
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
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


LAYOUTS: dict[str, Layout | None] = {
    "one process": None,
    "DP2xTP2xPP2 SP": Layout(ParallelConfig(dp=2, tp=2, pp=2, sequence_parallel=True)),
    "DP2xCP4xEP4": Layout(ParallelConfig(dp=2, cp=4, ep=4), strategy="optim_grads"),
    "HSDP2xTP2xPP2 interleaved EP2xETP2": Layout(
        ParallelConfig(dp_outer=2, tp=2, pp=2, pp_chunks=2, ep=2, etp=2)
    ),
}
FEW = Layout(ParallelConfig(tp=2, pp=2, sequence_parallel=True))
"""Few ranks: quick to start again after a failure."""


def world_of(name: str) -> int:
    layout = LAYOUTS[name]
    return 1 if layout is None else layout.parallel.world_size


Saved = dict[str, tuple[str, int]]


@pytest.fixture(scope="module")
def saved(warm_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Of each layout: a folder with a checkpoint, and the seed of its values."""
    found = {}
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        folder = str(tmp_path_factory.mktemp("saved"))
        what = problem()
        warm_ranks.run(fill_and_save, folder, seed, what, layout, world_size=world_of(name))
        found[name] = folder, seed
    return found


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_every_layout_loads_what_any_other_saved(
    warm_ranks: RankPool, saved: Saved, name: str
) -> None:
    """Weights, router biases and moments are those saved, cut as this layout cuts them."""
    names = list(saved)
    sources = [saved[n] for n in dict.fromkeys([names[0], names[names.index(name) - 1], name])]
    if name == names[0]:
        sources = list(saved.values())
    world = world_of(name)
    ranks = warm_ranks.run(load_each, sources, problem(), LAYOUTS[name], world_size=world)
    for found in ranks:
        assert [(names, compared > 20) for names, compared in found] == [([], True)] * len(sources)


def test_copies_that_drifted_apart_are_not_saved(warm_ranks: RankPool, tmp_path: Path) -> None:
    """A replicated weight with other bits on another rank of tp stops the save, by its name."""
    what = problem(2)
    match = r"same model\.layers\.0\.attn\.norm\.weight.* on rank 1 than on rank 0"
    with pytest.raises(RankError, match=match):
        warm_ranks.run(drift_and_save, str(tmp_path), what, FEW, world_size=4)
    assert not list(tmp_path.glob("step-*"))


def test_stages_without_a_layer_do_not_load(warm_ranks: RankPool, saved: Saved) -> None:
    """Stages may each have a part of the names, but all together must have all of them."""
    folder, what = saved["one process"][0], problem()
    with pytest.raises(RankError, match=r"ValueError: .*over all stages.*layers\.3\."):
        warm_ranks.run(load_part, folder, what, FEW, "3", world_size=4)


def test_other_sizes_are_refused(warm_ranks: RankPool, saved: Saved) -> None:
    """A model of fewer layers is told what the checkpoint has besides, in one process too."""
    sources = [saved["DP2xTP2xPP2 SP"]]
    with pytest.raises(RankError, match=r"ValueError: .*with layers\.2\."):
        warm_ranks.run(load_each, sources, problem(2), None, world_size=1)


@pytest.mark.parametrize("dim", [0, 1])
def test_parameters_of_several_tensors(warm_ranks: RankPool, tmp_path: Path, dim: int) -> None:
    """Gate and up in one parameter are stored apart, and loaded so, whatever cuts them."""
    folders = [str(tmp_path / name) for name in ("tp 2", "tp 1", "apart")]
    warm_ranks.run(save_fused, folders[0], 2, dim, world_size=4)
    warm_ranks.run(save_fused, folders[1], 1, dim, world_size=3)
    warm_ranks.run(save_apart, folders[2], world_size=1)
    assert warm_ranks.run(load_apart, folders, world_size=1) == [[]]
    assert warm_ranks.run(load_fused, folders, 2, dim, world_size=4) == [[]] * 4
    assert warm_ranks.run(load_fused, folders, 4, dim, world_size=4) == [[]] * 4
    assert warm_ranks.run(load_fused, folders, 1, dim, world_size=3) == [[]] * 3


def test_states_that_one_library_alone_has(warm_ranks: RankPool, tmp_path: Path) -> None:
    """Layers without scales take none; layers that find none keep theirs, and say so once."""
    ((wrong, scale, said),) = warm_ranks.run(change_library, str(tmp_path), world_size=1)
    assert (wrong, scale) == ([], 3.0)
    assert len(said) == 1
    assert "has no _extra_state: these stay as they are" in said[0]
