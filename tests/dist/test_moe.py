"""A mixture of experts over ranks: what one process with the whole weights computes."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from fsdp_core.model.moe.dispatcher import Delivery
from fsdp_core.model.moe.router import RouterRule
from tests.dist.moe_bounds import UNIT, Rounded, Roundings, agrees, bounds, worst
from tests.dist.moe_layouts import Layout
from tests.dist.moe_programs import BIAS_RATE, Case, Part, Whole, join, run_cases
from tests.dist.moe_reference import (
    NUM_EXPERTS,
    Expected,
    Problem,
    expected,
    kept_by_position,
    problem,
)
from tests.dist.rank_pool import RankPool

SOFTMAX = RouterRule(num_experts=NUM_EXPERTS, top_k=2, aux_coeff=0.5, z_coeff=0.05)
SIGMOID = RouterRule(
    num_experts=NUM_EXPERTS, top_k=3, scores="sigmoid", normalised=False, scale=2.5,
    aux_coeff=0.5, z_coeff=0.05, expert_bias=True,
)  # fmt: skip
TASKS = {"softmax": (SOFTMAX, False), "sigmoid": (SIGMOID, True)}
DROPLESS, GATHERED = Delivery(), Delivery(dispatcher="all_gather")
PADDED = Delivery(capacity_factor=1.0)
PADDED_GATHERED = Delivery(dispatcher="all_gather", capacity_factor=1.0)

LAYOUTS = [
    Layout(), Layout(ep=2), Layout(etp=2), Layout(ep=2, etp=2), Layout(ep=4), Layout(ep=8),
    Layout(ep=4, etp=2), Layout(ep=2, edp=2), Layout(ep=2, etp=2, edp=2),
    Layout(ep=4, tp=2, sp=True), Layout(ep=2, etp=2, tp=2, sp=True), Layout(etp=2, tp=2),
    Layout(ep=2, etp=2, tp=2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, much slower beside busy ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def task(name: str) -> Problem:
    """The problem of that name, the same bits in every test."""
    rule, masked = TASKS[name]
    return problem(rule, masked=masked)


@cache
def truth(name: str) -> Expected:
    """What one process computes, nothing dropped."""
    return expected(task(name))


def kept(name: str, delivery: Delivery, layout: Layout) -> torch.Tensor | None:
    """Which choices a capacity keeps in this layout; None if it is dropless."""
    rule, sources = task(name).rule, layout.sources()
    capacity = delivery.capacity(len(sources[0]) * rule.top_k, NUM_EXPERTS)
    if capacity is None:
        return None
    return kept_by_position(truth(name).experts, sources, capacity)


def limits(name: str, case: Case, layout: Layout) -> dict[str, Rounded]:
    """Exact values and error bounds of a case."""
    mask = kept(name, case.delivery, layout)
    run = Roundings(case.dtype, layout.ep, layout.etp, layout.tp)
    key = name, run, None if mask is None else tuple(mask.flatten().tolist())
    if key not in _LIMITS:
        _LIMITS[key] = bounds(case.task, run, truth(name).experts, mask)
    return _LIMITS[key]


_LIMITS: dict[Any, dict[str, Rounded]] = {}


def errors(found: Whole, limit: dict[str, Rounded]) -> dict[str, float]:
    """Worst error of every tensor in units of its bound."""
    assert found.tensors.keys() == limit.keys()
    return {name: worst(tensor, limit[name]) for name, tensor in found.tensors.items()}


def run(warm_ranks: RankPool, layout: Layout, cases: list[Case]) -> list[Whole]:
    """Each case on the ranks of a layout."""
    by_rank: list[list[Part]] = warm_ranks.run(
        run_cases, layout, cases, world_size=layout.world_size
    )
    return [join(layout, list(parts)) for parts in zip(*by_rank, strict=True)]


def losses_agree(found: Whole, name: str, u: float) -> None:
    """Every rank reports the losses of the global batch, and moves its bias by the global load.

    They are float32 buffers of sums in float64: one rounding, over logits of the run's dtype.
    """
    for values, exact in ((found.balance, truth(name).balance), (found.z, truth(name).z)):
        assert values == pytest.approx([exact] * len(values), rel=200 * u + 2.0**-23)
    experts = truth(name).experts
    slots = torch.stack([(experts == e).sum() for e in range(NUM_EXPERTS)])
    assert found.slots.tolist() == slots.tolist()
    bias = task(name).bias
    if bias is not None:
        moved = bias.float() + BIAS_RATE * (slots.double().mean() - slots).sign()
        assert found.bias == [moved.tolist()] * len(found.bias)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("delivery", [DROPLESS, PADDED], ids=["dropless", "padded"])
def test_the_bounds_know_the_formulas(name: str, delivery: Delivery) -> None:
    """The values that the bounds are built on are those of autograd on the reference."""
    layout = Layout(ep=2)
    mask = kept(name, delivery, layout)
    exact = expected(task(name), mask)
    limit = limits(name, Case(task(name), delivery), layout)
    assert agrees(limit, exact) < 1e-14
    assert (mask is None) == (delivery is DROPLESS)
    if mask is not None:
        there = exact.experts < NUM_EXPERTS
        assert 0.5 < (mask.sum() / there.sum()).item() < 1.0


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_equals_one_process(warm_ranks: RankPool, layout: Layout) -> None:
    """Output, every gradient and the losses are those of one process, to float64's roundings."""
    cases = {
        (name, delivery): Case(task(name), delivery)
        for name in TASKS
        for delivery in (DROPLESS, GATHERED, PADDED, PADDED_GATHERED)
    }
    results = dict(zip(cases, run(warm_ranks, layout, list(cases.values())), strict=True))
    for (name, delivery), found in results.items():
        limit = limits(name, cases[name, delivery], layout)
        worst_of = errors(found, limit)
        assert max(worst_of.values()) <= 1.0, (name, delivery, worst_of)
        losses_agree(found, name, UNIT[torch.float64])


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_equals_one_process_in_less_precision(warm_ranks: RankPool, layout: Layout) -> None:
    """With the same routing float32 and bfloat16 stay within their bounds."""
    cases = [
        Case(task("softmax"), delivery, dtype, path, truth("softmax").experts)
        for dtype in (torch.float32, torch.bfloat16)
        for delivery, path in ((DROPLESS, "grouped"), (PADDED_GATHERED, "batched"))
    ]
    for case, found in zip(cases, run(warm_ranks, layout, cases), strict=True):
        limit = limits("softmax", case, layout)
        worst_of = errors(found, limit)
        assert max(worst_of.values()) <= 1.0, (case.dtype, case.delivery, worst_of)
        losses_agree(found, "softmax", UNIT[torch.float32])


BITS = [Layout(ep=2), Layout(ep=4), Layout(ep=2, etp=2), Layout(ep=2, etp=2, tp=2)]


@pytest.mark.parametrize("layout", BITS, ids=lambda layout: layout.name)
def test_dispatchers_agree_bit_for_bit(warm_ranks: RankPool, layout: Layout) -> None:
    """With two choices a token every sum has one order, so both dispatchers give the same bits."""
    cases = [
        Case(task("softmax"), delivery, dtype, experts=truth("softmax").experts)
        for dtype in (torch.float64, torch.bfloat16)
        for delivery in (DROPLESS, GATHERED, PADDED, PADDED_GATHERED)
    ]
    found = run(warm_ranks, layout, cases)
    for first, second in zip(found[::2], found[1::2], strict=True):
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor, second.tensors[name]), name


def test_expert_paths_agree_bit_for_bit(warm_ranks: RankPool) -> None:
    """On the CPU a grouped product is a loop of products: the same bits, forward and backward.

    A batched product may sum in another order; the bounds above hold for it.
    """
    layout = Layout(ep=2, etp=2)
    cases = [
        Case(task("softmax"), delivery, dtype, path, truth("softmax").experts)
        for delivery in (DROPLESS, PADDED)
        for dtype in (torch.float32, torch.bfloat16)
        for path in ("loop", "grouped")
    ]
    found = run(warm_ranks, layout, cases)
    for loop, grouped in zip(found[::2], found[1::2], strict=True):
        for name, tensor in loop.tensors.items():
            assert torch.equal(tensor, grouped.tensors[name]), name


EXPERTS = {f"experts.{name}.weight" for name in ("gate", "up", "down")}
FAULTS = {
    "down slices swapped": (Layout(ep=2, etp=2), {"y"} | EXPERTS),
    "etp group along ep": (Layout(ep=2, etp=2), {"y"} | EXPERTS),
    "aux loss twice": (Layout(ep=2), {"router.weight", "x"}),
    "aux counts of one rank": (Layout(ep=4), {"router.weight", "x"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_exceed_the_bound_tenfold(warm_ranks: RankPool, fault: str) -> None:
    """A fault of the layout is far outside the bound of the tensors that it touches."""
    layout, touched = FAULTS[fault]
    of_losses = fault.startswith("aux")
    dtypes = [torch.float64, torch.float32] + [torch.bfloat16] * (not of_losses)
    cases = [
        Case(task("softmax"), DROPLESS, dtype, experts=truth("softmax").experts, fault=fault)
        for dtype in dtypes
    ]
    for case, found in zip(cases, run(warm_ranks, layout, cases), strict=True):
        ratios = errors(found, limits("softmax", case, layout))
        assert all(ratios[name] > 10 for name in touched), (case.dtype, ratios)
        if of_losses:
            assert max(ratios[name] for name in ratios.keys() - touched) <= 1.0


def test_experts_divided_by_their_replicas_exceed_the_bound_tenfold(warm_ranks: RankPool) -> None:
    """Gradients of experts are averaged over dp, not over the ranks that share an expert."""
    layout = Layout(ep=2, etp=2, edp=2)
    for dtype in UNIT:
        case = Case(task("softmax"), DROPLESS, dtype, experts=truth("softmax").experts)
        parts = warm_ranks.run(run_cases, layout, [case], world_size=layout.world_size)
        limit = limits("softmax", case, layout)
        found = [join(layout, [p[0] for p in parts], divisor=d) for d in (None, layout.edp)]
        right, wrong = (errors(whole, limit) for whole in found)
        assert max(right.values()) <= 1.0
        assert all(wrong[name] > 10 for name in EXPERTS), (dtype, wrong)
