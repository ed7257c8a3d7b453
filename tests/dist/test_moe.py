"""A mixture of experts over ranks: what one process with the whole weights computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.model.decoder import MoeLayer
from fsdp_core.model.layers import Mlp
from fsdp_core.model.moe.dispatcher import Delivery, MoeAxes
from fsdp_core.model.moe.experts import Experts
from fsdp_core.model.moe.router import RouterRule
from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.tensor_parallel import Cut, named_cuts, take
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
    rule: RouterRule = field(default_factory=lambda: RouterRule(num_experts=8, top_k=2))
    delivery: Delivery = field(default_factory=Delivery)
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
    num = spec.rule.num_experts
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
    known: dict[str, MoeAxes] = {}
    found = []
    for spec in specs:
        if spec.name not in known:
            known[spec.name] = make_axes(spec)
        found.append(_run(spec, known[spec.name]))
    return found


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    return Axis(name, mesh[name].size(), mesh[name].get_local_rank(), mesh[name].get_group())


def make_axes(spec: Spec) -> MoeAxes:
    """The axes on the ranks of the default group."""
    dense = init_device_mesh("cpu", (spec.dp, spec.cp, spec.tp), mesh_dim_names=("dp", "cp", "tp"))
    edp = spec.world_size // spec.ep // spec.etp
    expert = init_device_mesh("cpu", (edp, spec.ep, spec.etp), mesh_dim_names=("edp", "ep", "etp"))
    tokens = (_axis(dense, "dp"), _axis(dense, "cp"))
    tp = _axis(dense, "tp")
    return MoeAxes(
        ep=_axis(expert, "ep"), etp=_axis(expert, "etp"), tp=tp,
        tokens=(*tokens, tp) if spec.sp else tokens, num_averaged=spec.num_averaged,
        sequence_parallel=spec.sp,
    )  # fmt: skip


def _layer(spec: Spec, axes: MoeAxes, data: Data) -> MoeLayer:
    # An `Mlp` asks the same of them as of `Axes`.
    shared = Mlp(HIDDEN, SHARED_FFN, cast("Any", axes)) if spec.shared else None
    experts = Experts(spec.rule.num_experts, HIDDEN, FFN, axes)
    layer = MoeLayer(
        HIDDEN, spec.rule, axes, delivery=spec.delivery, experts=experts, shared=shared
    )
    cuts = named_cuts(layer)
    for name, parameter in layer.named_parameters():
        parameter.data = take(data.weights[name], cuts[name]).double()
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(data.bias)
    layer.router.loss_scale.fill_(1 / spec.microbatches)
    return layer


def _run(spec: Spec, axes: MoeAxes) -> Seen:
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
    load = torch.zeros(rule.num_experts).double()
    for number in range(spec.microbatches):
        valid = data.valid[number].flatten()
        rows = x[number].flatten(0, 1)[:] * valid[:, None]
        logits = rows @ weights["router.weight"].t()
        scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
        chosen = _chosen(rule, scores.detach(), data.bias, valid)
        gates = scores * chosen
        if rule.normalised:
            gates = gates / (gates.sum(-1, keepdim=True) + ~valid[:, None])
        gates = gates * rule.scale
        kept = _kept(spec, chosen, gates.detach())
        y = _experts(weights, rows, gates * kept) + _shared(spec, weights, rows)
        num = max(int(valid.sum()), 1)
        slots = chosen.sum(0).double()
        load += slots
        shares = (scores / scores.sum(-1, keepdim=True))[valid].sum(0) / num
        balance = rule.num_experts * (slots / (rule.top_k * num) * shares).sum()
        z = logits[valid].exp().sum(-1).log().square().sum() / num
        balance, z = rule.aux_coeff * balance, rule.z_coeff * z
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
    rule: RouterRule, scores: torch.Tensor, bias: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """bool [N, E]."""
    ranked = scores + bias if rule.expert_bias else scores
    edge = ranked.sort(dim=-1).values[:, -rule.top_k, None]
    assert (ranked == edge)[valid].sum() == valid.sum(), "no ties"
    return (ranked >= edge) & valid[:, None]


def _kept(spec: Spec, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """bool [N, E]: what the capacity of each source and expert leaves."""
    factor = spec.delivery.capacity_factor
    if factor is None:
        return chosen
    kept = torch.zeros_like(chosen)
    for source in spec.sources():
        limit = math.ceil(len(source) * spec.rule.top_k / spec.rule.num_experts * factor)
        for expert in range(spec.rule.num_experts):
            waiting = [(n, float(gates[n, expert])) for n in source if chosen[n, expert]]
            kept[kept_of_source(waiting, limit, spec.delivery.drop), expert] = True
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
            expected = due.losses[number] if spec.rule.watches_load else (0.0, 0.0)
            compare("losses", torch.tensor(seen.losses[number]), torch.tensor(expected))
        if seen.bias is not None:
            compare("bias", seen.bias, due.bias)
    if spec.rule.watches_load:
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
GATHERED = Delivery(dispatcher="all_gather")


def rule(experts: int, top_k: int, **changes: Any) -> RouterRule:
    """A router with both losses and a bias."""
    settings: dict[str, Any] = {"aux_coeff": 0.7, "z_coeff": 0.3, "expert_bias": True}
    return RouterRule(num_experts=experts, top_k=top_k, **(settings | changes))


SIGMOID: dict[str, Any] = {"scores": "sigmoid", "normalised": False, "scale": 2.5}
LIGHTEST = Delivery(capacity_factor=0.5, drop="probs")
LIGHTEST_GATHERED = Delivery(dispatcher="all_gather", capacity_factor=0.75, drop="probs")
FEW = Delivery(capacity_factor=0.5)
PRODUCTS = {
    "one expert a rank, all of them chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 4), padding="some", microbatches=3, shared=True
    ),
    "one expert a rank, one chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 1, **SIGMOID), delivery=GATHERED, padding="rank"
    ),
    "context and sequence cut, lightest dropped": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3), delivery=LIGHTEST,
        padding="some", microbatches=2, shared=True,
    ),
    "the same, gathered": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3, **SIGMOID),
        delivery=LIGHTEST_GATHERED, padding="microbatch", microbatches=3, shared=True,
    ),
    "whole sequences, lightest dropped": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(6, 3, expert_bias=False), delivery=LIGHTEST,
        padding="microbatch", microbatches=2, shared=True,
    ),
    "whole sequences, gathered": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(4, 2, **SIGMOID), delivery=GATHERED,
        padding="rank", microbatches=3, shared=True,
    ),
    "more etp than tp": Spec(
        dp=2, tp=2, sp=True, etp=4, rule=rule(6, 2), delivery=FEW, padding="rank",
        microbatches=2,
    ),
    "tp without etp": Spec(
        dp=2, tp=2, sp=True, ep=4, rule=rule(8, 8, aux_coeff=0.0), delivery=LIGHTEST_GATHERED,
        padding="some",
    ),
    "no expert's replica, nothing watched": Spec(
        dp=4, ep=4, rule=rule(8, 2, expert_bias=False, aux_coeff=0.0, z_coeff=0.0), shared=True
    ),
    "replicas alone": Spec(
        dp=4, rule=rule(5, 2), delivery=FEW, padding="rank", microbatches=3, shared=True
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
