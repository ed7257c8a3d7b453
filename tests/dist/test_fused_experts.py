"""A kernel over sharded layers that it does not call: gathered, marked, reduced, bit for bit."""

from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp import fully_shard
from fsdp_core.model.moe import experts as moe_experts
from fsdp_core.model.moe.dispatcher import Groups, MoeAxes
from fsdp_core.model.moe.experts import FusedExperts, make_fused_experts
from fsdp_core.parallel.mesh import Axis
from tests.dist.rank_pool import RankPool

HIDDEN, FFN, EXPERTS, LAYERS = 6, 10, 3, 2
COUNTS = (4, 0, 3)


class Net(nn.Module):
    """Layers of experts with residuals; the kernel may be told to bypass the hooks."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        nobody = cast("Any", None)
        one = {name: Axis(name, 1, 0, nobody) for name in ("ep", "etp", "tp")}
        axes = MoeAxes(**one, tokens=(), num_averaged=1, sequence_parallel=False)
        self.mode = mode
        self.layers = nn.ModuleList(
            make_fused_experts(EXPERTS, HIDDEN, FFN, axes) for _ in range(LAYERS)
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        if mode == "unfused":
            for layer in self.layers:
                cast("FusedExperts", layer).kernel = None

    def forward(self, rows: torch.Tensor, groups: Groups | None) -> torch.Tensor:
        """[n, H] -> [n, H]."""
        for layer in self.layers:
            experts = cast("FusedExperts", layer)
            rows = rows + (experts._run if self.mode == "bypass" else experts)(rows, groups)
        return rows


def batch(step: int, ragged: bool) -> tuple[torch.Tensor, Groups | None]:
    """Rows of a step on this rank, and how many each expert has."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    if not ragged:
        return torch.randn(EXPERTS, 4, HIDDEN, generator=generator), None
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    rows = torch.randn(sum(COUNTS), HIDDEN, generator=generator)
    return rows, Groups(COUNTS, ends, (), (), None, None)


def train_fused(mode: str, pool: str, ragged: bool) -> list[torch.Tensor]:
    """Outputs, gradients and weights of three steps; gate_up and down are units of their own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = Net(mode)
    for layer in model.layers:
        for unit in (layer.gate_up, layer.down):
            fully_shard(unit, mesh=mesh, pool=pool, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, pool=pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        out = model(*batch(step, ragged))
        at_rest = [type(layer.gate_up.weight).__name__ for layer in model.layers[:-1]]
        if not mode.startswith("bypass"):
            assert at_rest == ["RowSharded"] * (LAYERS - 1), "released between forward and backward"
        out.square().mean().backward()
        for parameter in model.parameters():
            if parameter.to_local().numel():  # a rank without rows has no gradient
                assert parameter.grad is not None, "the gradient was reduced"
                found.append(parameter.grad.to_local().clone())
        optimizer.step()
        optimizer.zero_grad()
        found.append(out.detach())
    return found + [parameter.full_tensor().detach() for parameter in model.parameters()]


def try_bypass(pool: str) -> str:
    """What comes of a kernel that reads the weights without the hooks."""
    try:
        train_fused("bypass", pool, True)
    except Exception as error:  # noqa: BLE001  (whatever it is)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def without_forward_hooks(pool: str) -> str:
    """The tensor that is named where a kernel runs the pre-hooks alone; empty if it trains."""

    def kept(module: nn.Module, inputs: Any, output: Any, *, is_last: bool) -> Any:
        return output

    try:
        with mock.patch.object(moe_experts, "_run_post_hooks", kept):
            train_fused("bypass forward hooks", pool, True)
    except TensorError as error:
        return error.names[0]
    return ""


def gathers(pool: str) -> list[str]:
    """Gathers of a step in order, by unit, and reductions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = Net("fused")
    for layer in model.layers:
        for unit in (layer.gate_up, layer.down):
            fully_shard(unit, mesh=mesh, pool=pool, reshard_after_forward=True, overlap=0)
    fully_shard(model, mesh=mesh, pool=pool, overlap=0)
    events: list[str] = []
    for unit in model.fsdp_schedule.units:
        for group in unit.groups:
            _note(events, unit.name, group)
    out = model(*batch(0, True))
    events.append("forward done")
    out.sum().backward()
    return events


def _note(events: list[str], name: str, group: Any) -> None:
    gather, reduce = group._gather, group.gradients.reduce

    def gathered(full: torch.Tensor) -> None:
        events.append(f"gather {name}")
        gather(full)

    def reduced(*args: Any, **kwargs: Any) -> Any:
        events.append(f"reduce {name}")
        return reduce(*args, **kwargs)

    group._gather, group.gradients.reduce = gathered, reduced


def refuse_cast() -> str:
    """What a unit says that would cast the kernel's inputs."""
    from fsdp_core.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = Net("fused")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer.gate_up, mesh=mesh, mp_policy=policy)
    try:
        model(*batch(0, True))
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("pool", ["dynamic", "double"])
@pytest.mark.parametrize("ragged", [True, False])
def test_fused_trains_as_unfused(pool: str, ragged: bool, warm_ranks: RankPool) -> None:
    """Outputs, gradients and weights of both layers have the bits that calling them gives."""
    fused = warm_ranks.run(train_fused, "fused", pool, ragged, world_size=2)
    unfused = warm_ranks.run(train_fused, "unfused", pool, ragged, world_size=2)
    for one, other in zip(fused, unfused, strict=True):
        assert all(map(torch.equal, one, other))


def test_bypassed_hooks_show(warm_ranks: RankPool) -> None:
    """A kernel without the hooks finds no weights, or leaves gradients: no silent success."""
    for said in warm_ranks.run(try_bypass, "dynamic", world_size=2):
        assert said != "nothing"


def test_bypassed_forward_hooks_are_named(warm_ranks: RankPool) -> None:
    """Weights are gathered, but nothing tells where the unit's backward pass begins."""
    for named in warm_ranks.run(without_forward_hooks, "dynamic", world_size=2):
        assert named == "layers.1.gate_up.weight"


def test_both_gathers_and_the_reduction_happen(warm_ranks: RankPool) -> None:
    """Each unit is gathered in forward, again in backward if it was released, and reduced."""
    for events in warm_ranks.run(gathers, "dynamic", world_size=2):
        middle = events.index("forward done")
        forward, backward = events[:middle], events[middle + 1 :]
        units = [f"layers.{n}.{name}" for n in range(2) for name in ("gate_up", "down")]
        assert forward == [f"gather {unit}" for unit in units]
        # In the first pass nothing is known yet of which unit ends the forward: all are released.
        assert sorted(e for e in backward if e.startswith("gather")) == sorted(
            f"gather {unit}" for unit in units
        )
        assert sorted(e for e in backward if e.startswith("reduce")) == sorted(
            f"reduce {unit}" for unit in units
        )


def test_a_unit_that_casts_is_told_so(warm_ranks: RankPool) -> None:
    """Inputs that FSDP would cast for one layer are refused, with what to do."""
    for said in warm_ranks.run(refuse_cast, world_size=2):
        assert "cast_forward_inputs=False" in said
