"""A mixture of experts over ranks: what one process with the whole weights computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.config import ModelConfig
from fsdp_core.dispatch import TensorError
from fsdp_core.fsdp import fully_shard
from fsdp_core.model.decoder import MoeLayer
from fsdp_core.model.layers import Mlp
from fsdp_core.model.moe.dispatcher import Groups
from fsdp_core.model.moe.experts import Experts, FusedExperts, make_fused_experts
from fsdp_core.model.moe.router import watches_load
from fsdp_core.parallel.mesh import Axes, Axis
from fsdp_core.parallel.tensor_parallel import Cut, named_cuts, take
from tests.dist.parity_programs import moe_model, single_axes
from tests.dist.rank_pool import RankPool
from tests.support.global_weights import place

BATCH, TIME = 8, 4
NUM_TOKENS = BATCH * TIME
HIDDEN, FFN, SHARED_FFN, BIAS_RATE = 16, 16, 8, 0.125
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run.

    Attributes:
        padding: which tokens are no tokens: "none", "some", "rank" (all of the first rank and some
            others) or "microbatch" (all of the first one and some others).
        shared: whether there are shared experts.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sp: bool = False
    rule: ModelConfig = field(default_factory=lambda: moe_model(HIDDEN, 8))
    padding: str = "none"
    microbatches: int = 1
    shared: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp

    @property
    def num_averaged(self) -> int:
        """Ranks over which dense gradients are averaged."""
        return self.dp * self.cp

    @property
    def name(self) -> str:
        degrees = {name: getattr(self, name) for name in ("dp", "cp", "tp", "ep", "etp")}
        return "-".join(f"{n}{d}" for n, d in degrees.items() if d > 1) + "-sp" * self.sp or "one"

    def tokens(self, rank: int) -> torch.Tensor:
        """Numbers of a rank's tokens, int64 [B, T] of the global [BATCH, TIME]."""
        numbers = torch.arange(NUM_TOKENS).view(BATCH, TIME)
        tp, cp, dp = rank % self.tp, rank // self.tp % self.cp, rank // self.tp // self.cp
        mine = numbers.chunk(self.dp)[dp].chunk(self.cp, 1)[cp]
        return mine.chunk(self.tp, 1)[tp] if self.sp else mine

    def sources(self) -> list[list[int]]:
        """Tokens of each etp group, in its order."""
        same = self.tp > 1 and not self.sp
        return [
            [n for rank in range(first, first + (1 if same else self.etp))
             for n in self.tokens(rank).flatten().tolist()]
            for first in range(0, self.world_size, self.etp)
        ]  # fmt: skip


def draw(shape: Sequence[int], seed: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, float64, each exact in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().double()


def kept_of_source(waiting: list[tuple[int, float]], capacity: int, drop: str) -> list[int]:
    """Which of (number, weight) one source keeps for one expert, the earlier of equals."""
    if drop == "probs":
        waiting = sorted(waiting, key=lambda each: -each[1])
    return [number for number, _ in waiting[:capacity]]


@dataclass(frozen=True)
class Data:
    """Global weights, and x, its cotangent and the mask of each microbatch."""

    weights: Weights
    x: torch.Tensor
    cotangent: torch.Tensor
    valid: torch.Tensor
    bias: torch.Tensor


def data_of(spec: Spec) -> Data:
    num = spec.rule.experts
    shapes = {
        "router.weight": (num, HIDDEN),
        "experts.gate.weight": (num, FFN, HIDDEN),
        "experts.up.weight": (num, FFN, HIDDEN),
        "experts.down.weight": (num, HIDDEN, FFN),
    }
    if spec.shared:
        shapes |= {
            "shared.gate.weight": (SHARED_FFN, HIDDEN),
            "shared.up.weight": (SHARED_FFN, HIDDEN),
            "shared.down.weight": (HIDDEN, SHARED_FFN),
        }
    weights = {n: draw(shape, 300 + i, 0.4) for i, (n, shape) in enumerate(shapes.items())}
    batch = (spec.microbatches, BATCH, TIME)
    valid = torch.ones(batch, dtype=torch.bool)
    if spec.padding != "none":
        valid = torch.rand(batch, generator=torch.Generator().manual_seed(77)) > 0.4
    if spec.padding == "rank":
        valid.flatten(1)[:, spec.tokens(0).flatten()] = False
    if spec.padding == "microbatch":
        valid[0] = False
    x, cotangent = draw((*batch, HIDDEN), 320), draw((*batch, HIDDEN), 321)
    return Data(weights, x, cotangent, valid, draw((num,), 322, 0.1))


# ---- a rank


@dataclass(frozen=True)
class Seen:
    """What a rank computed; lists have an entry a microbatch."""

    y: list[torch.Tensor]
    x_grad: list[torch.Tensor]
    losses: list[tuple[float, float]]
    grads: dict[str, tuple[torch.Tensor, tuple[Cut, ...]]]
    bias: torch.Tensor | None
    slots: torch.Tensor


def run_specs(specs: list[Spec]) -> list[Seen]:
    """Every spec on this rank; specs of one layout share its groups."""
    known: dict[str, Axes] = {}
    found = []
    for spec in specs:
        if spec.name not in known:
            known[spec.name] = make_axes(spec)
        found.append(_run(spec, known[spec.name]))
    return found


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    return Axis(name, mesh[name].size(), mesh[name].get_local_rank(), mesh[name].get_group())


def make_axes(spec: Spec) -> Axes:
    """The axes on the ranks of the default group."""
    dense = init_device_mesh("cpu", (spec.dp, spec.cp, spec.tp), mesh_dim_names=("dp", "cp", "tp"))
    edp = spec.world_size // spec.ep // spec.etp
    expert = init_device_mesh("cpu", (edp, spec.ep, spec.etp), mesh_dim_names=("edp", "ep", "etp"))
    found: dict[str, Any] = {name: _axis(dense, name) for name in ("dp", "cp")}
    found |= {name: _axis(expert, name) for name in ("edp", "ep", "etp")}
    return replace(single_axes(), **found, tp=replace(_axis(dense, "tp"), cuts_sequence=spec.sp))


def _layer(spec: Spec, axes: Axes, data: Data) -> MoeLayer:
    shared = Mlp(HIDDEN, SHARED_FFN, axes) if spec.shared else None
    experts = Experts(spec.rule.experts, HIDDEN, FFN, axes)
    layer = MoeLayer(spec.rule, axes, experts, shared)
    cuts = named_cuts(layer)
    for name, parameter in layer.named_parameters():
        parameter.data = take(data.weights[name], cuts[name]).double()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(data.bias)
    layer.router.loss_scale.fill_(1 / spec.microbatches)
    return layer


def _run(spec: Spec, axes: Axes) -> Seen:
    data, mine = data_of(spec), spec.tokens(dist.get_rank())
    layer = _layer(spec, axes, data)
    router, cuts = layer.router, named_cuts(layer)
    ys, grads, losses = [], [], []
    for number in range(spec.microbatches):
        valid = data.valid[number].flatten()[mine]
        x = data.x[number].flatten(0, 1)[mine].masked_fill(~valid[..., None], math.nan)
        x.requires_grad_()
        y = layer(x, None if spec.padding == "none" else valid)
        cotangent = data.cotangent[number].flatten(0, 1)[mine] * valid[..., None]
        y.backward((cotangent * spec.num_averaged / spec.microbatches).double())
        assert x.grad is not None
        assert y.dtype == torch.float64
        ys.append(y.detach())
        grads.append(x.grad)
        losses.append((router.balance_loss.item(), router.z_loss.item()))
    bias, slots = None, router.slots_per_expert.clone()
    if router.expert_bias is not None:
        router.update_bias(BIAS_RATE)
        bias = router.expert_bias.clone()
    named = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        named[name] = (parameter.grad, cuts[name])
    return Seen(ys, grads, losses, named, bias, slots)


# ---- one process


@dataclass(frozen=True)
class Whole:
    """What one process computes; `x` is the gradient of all microbatches."""

    y: list[torch.Tensor]
    x: torch.Tensor
    losses: list[tuple[float, float]]
    grads: Weights
    bias: torch.Tensor
    slots: torch.Tensor


def whole(spec: Spec) -> Whole:
    """Mean over microbatches of sum(y * cotangent) + balance + z, and its gradients."""
    data, rule = data_of(spec), spec.rule
    weights = {name: weight.clone().requires_grad_() for name, weight in data.weights.items()}
    x = data.x.clone().requires_grad_()
    total, ys, losses = torch.zeros(()).double(), [], []
    load = torch.zeros(rule.experts).double()
    for number in range(spec.microbatches):
        valid = data.valid[number].flatten()
        rows = x[number].flatten(0, 1)[:] * valid[:, None]
        logits = rows @ weights["router.weight"].t()
        scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
        chosen = _chosen(rule, scores.detach(), data.bias, valid)
        gates = scores * chosen
        if rule.normalise_top_k:
            gates = gates / (gates.sum(-1, keepdim=True) + ~valid[:, None])
        gates = gates * rule.route_scale
        kept = _kept(spec, chosen, gates.detach())
        y = _experts(weights, rows, gates * kept) + _shared(spec, weights, rows)
        num = max(int(valid.sum()), 1)
        slots = chosen.sum(0).double()
        load += slots
        shares = (scores / scores.sum(-1, keepdim=True))[valid].sum(0) / num
        balance = rule.experts * (slots / (rule.top_k * num) * shares).sum()
        z = logits[valid].exp().sum(-1).log().square().sum() / num
        balance, z = rule.aux_loss * balance, rule.z_loss * z
        cotangent = data.cotangent[number].flatten(0, 1) * valid[:, None]
        total = total + ((y * cotangent).sum() + balance + z) / spec.microbatches
        ys.append(y.detach())
        losses.append((balance.item(), z.item()))
    total.backward()
    assert x.grad is not None
    grads = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}
    bias = data.bias.float() + BIAS_RATE * (load.mean() - load).sign()
    return Whole(ys, x.grad, losses, grads, bias, load.long())


def _chosen(
    rule: ModelConfig, scores: torch.Tensor, bias: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """bool [N, E]."""
    ranked = scores + bias if rule.expert_bias else scores
    edge = ranked.sort(dim=-1).values[:, -rule.top_k, None]
    assert (ranked == edge)[valid].sum() == valid.sum(), "no ties"
    return (ranked >= edge) & valid[:, None]


def _kept(spec: Spec, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """bool [N, E]: what the capacity of each source and expert leaves."""
    factor = spec.rule.capacity_factor
    if factor is None:
        return chosen
    kept = torch.zeros_like(chosen)
    for source in spec.sources():
        limit = math.ceil(len(source) * spec.rule.top_k / spec.rule.experts * factor)
        for expert in range(spec.rule.experts):
            waiting = [(n, float(gates[n, expert])) for n in source if chosen[n, expert]]
            kept[kept_of_source(waiting, limit, spec.rule.drop), expert] = True
    return kept


def _experts(weights: Weights, rows: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    gate = torch.einsum("nh,efh->nef", rows, weights["experts.gate.weight"])
    up = torch.einsum("nh,efh->nef", rows, weights["experts.up.weight"])
    down = weights["experts.down.weight"]
    return torch.einsum("ne,nef,ehf->nh", gates, F.silu(gate) * up, down)


def _shared(spec: Spec, weights: Weights, rows: torch.Tensor) -> torch.Tensor:
    if not spec.shared:
        return torch.zeros_like(rows)
    mats = [weights[f"shared.{name}.weight"] for name in ("gate", "up", "down")]
    return (F.silu(rows @ mats[0].t()) * (rows @ mats[1].t())) @ mats[2].t()


# ---- both


def errors(spec: Spec, ranks: list[Seen]) -> dict[str, float]:
    """The largest difference of every kind of result, relative to the largest element."""
    due, found = whole(spec), dict[str, float]()

    def compare(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
        found[name] = max(found.get(name, 0.0), float(error.nan_to_num(torch.inf)))

    for rank, seen in enumerate(ranks):
        mine = spec.tokens(rank).flatten()
        for number in range(spec.microbatches):
            compare("y", seen.y[number].flatten(0, 1), due.y[number][mine])
            grad = due.x[number].flatten(0, 1)[mine]
            compare("x", seen.x_grad[number].flatten(0, 1) / spec.num_averaged, grad)
            expected = due.losses[number] if watches_load(spec.rule) else (0.0, 0.0)
            compare("losses", torch.tensor(seen.losses[number]), torch.tensor(expected))
        if seen.bias is not None:
            compare("bias", seen.bias, due.bias)
    if watches_load(spec.rule):
        copies = spec.tp if spec.tp > 1 and not spec.sp else 1
        slots = torch.stack([seen.slots for seen in ranks]).sum(0) / copies
        compare("slots", slots, due.slots.double())
    for name, expected_grad in due.grads.items():
        total = torch.zeros_like(expected_grad)
        for rank, seen in enumerate(ranks):
            part, cuts = seen.grads[name]
            dense = not name.startswith("experts.")
            if dense and not cuts and rank % spec.tp:
                first = ranks[rank - rank % spec.tp].grads[name][0]
                assert torch.equal(part, first), f"{name} differs between ranks of tp"
                continue
            piece = torch.zeros_like(total)
            place(part.double(), piece, cuts)
            total += piece
        compare(name, total / spec.num_averaged, expected_grad)
    return found


ROUNDINGS = 64 * 2**-53
"""Errors relative to the largest element: twice those that were seen, and less than a worst-case
analysis of these sums allows. A fault changes results by a percent."""
EXACT = {"losses": 2.0**-23, "bias": 2.0**-23, "slots": 0.0}
"""Float32 buffers of sums in float64, and counts."""
GATHERED: dict[str, Any] = {"dispatcher": "all_gather"}


def rule(experts: int, top_k: int, **changes: Any) -> ModelConfig:
    """A router with both losses and a bias."""
    settings: dict[str, Any] = {"aux_loss": 0.7, "z_loss": 0.3, "expert_bias": True}
    return moe_model(HIDDEN, experts, top_k, **(settings | changes))


SIGMOID: dict[str, Any] = {"score": "sigmoid", "normalise_top_k": False, "route_scale": 2.5}
FEW: dict[str, Any] = {"capacity_factor": 0.5}
LIGHTEST: dict[str, Any] = FEW | {"drop": "probs"}
LIGHTEST_GATHERED: dict[str, Any] = LIGHTEST | GATHERED | {"capacity_factor": 0.75}
PRODUCTS = {
    "one expert a rank, all of them chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 4), padding="some", microbatches=3, shared=True
    ),
    "one expert a rank, one chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 1, **SIGMOID, **GATHERED), padding="rank"
    ),
    "context and sequence cut, lightest dropped": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3, **LIGHTEST),
        padding="some", microbatches=2, shared=True,
    ),
    "the same, gathered": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3, **SIGMOID, **LIGHTEST_GATHERED),
        padding="microbatch", microbatches=3, shared=True,
    ),
    "whole sequences, lightest dropped": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(6, 3, expert_bias=False, **LIGHTEST),
        padding="microbatch", microbatches=2, shared=True,
    ),
    "whole sequences, gathered": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(4, 2, **SIGMOID, **GATHERED),
        padding="rank", microbatches=3, shared=True,
    ),
    "more etp than tp": Spec(
        dp=2, tp=2, sp=True, etp=4, rule=rule(6, 2, **FEW), padding="rank",
        microbatches=2,
    ),
    "tp without etp": Spec(
        dp=2, tp=2, sp=True, ep=4, rule=rule(8, 8, aux_loss=0.0, **LIGHTEST_GATHERED),
        padding="some",
    ),
    "no expert's replica, nothing watched": Spec(
        dp=4, ep=4, rule=rule(8, 2, expert_bias=False, aux_loss=0.0, z_loss=0.0), shared=True
    ),
    "replicas alone": Spec(
        dp=4, rule=rule(5, 2, **FEW), padding="rank", microbatches=3, shared=True
    ),
}  # fmt: skip


def test_products_of_features_equal_one_process(warm_ranks: RankPool) -> None:
    """Outputs, losses, gradients, loads and bias, with NaN in padding and what a capacity drops."""
    specs = list(PRODUCTS.values())
    by_rank = warm_ranks.run(run_specs, specs, world_size=specs[0].world_size)
    for spec, *ranks in zip(specs, *by_rank, strict=True):
        found = errors(spec, ranks)
        wrong = {k: e for k, e in found.items() if not e <= EXACT.get(k, ROUNDINGS)}
        assert not wrong, (spec, wrong)


# --- a kernel over sharded layers that it does not call: gathered, marked, reduced, bit for bit ---


WIDTH, INNER, EXPERTS, LAYERS = 6, 10, 3, 2
COUNTS = (4, 0, 3)


class Net(nn.Module):
    """Layers of experts with residuals; the kernel may be told to bypass the hooks."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        axes = single_axes()
        self.mode = mode
        self.layers = nn.ModuleList(
            make_fused_experts(EXPERTS, WIDTH, INNER, axes) for _ in range(LAYERS)
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
            if self.mode == "bypass forward hooks":
                for module in (experts.gate_up, experts.down):
                    for hook in module._forward_pre_hooks.values():
                        cast("Any", hook)(module, (rows, groups), {})
            is_called = not self.mode.startswith("bypass")
            rows = rows + (experts if is_called else experts._run)(rows, groups)
        return rows


def batch(step: int, ragged: bool) -> tuple[torch.Tensor, Groups | None]:
    """Rows of a step on this rank, and how many each expert has."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    if not ragged:
        return torch.randn(EXPERTS, 4, WIDTH, generator=generator), None
    ends = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
    rows = torch.randn(sum(COUNTS), WIDTH, generator=generator)
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
    try:
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
