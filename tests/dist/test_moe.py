"""A mixture of experts over ranks: what one process with the whole weights computes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_core.model.moe.dispatcher import Delivery
from fsdp_core.model.moe.router import RouterRule
from tests.dist.moe_programs import Spec, errors, run_specs
from tests.dist.rank_pool import RankPool

ROUNDINGS = 64 * 2**-53
"""Errors relative to the largest element: twice those that were seen, and less than a worst-case
analysis of these sums allows. A fault changes results by a percent."""
EXACT = {"losses": 2.0**-23, "bias": 2.0**-23, "slots": 0.0}
"""Float32 buffers of sums in float64, and counts."""
GATHERED = Delivery(dispatcher="all_gather")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products are slower on several threads, much slower beside busy ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
        dp=2, cp=2, ep=4, rule=rule(4, 4), padding="some", microbatches=3, shared="gated"
    ),
    "one expert a rank, one chosen": Spec(
        dp=2, cp=2, ep=4, rule=rule(4, 1, **SIGMOID), delivery=GATHERED, padding="rank"
    ),
    "context and sequence cut, lightest dropped": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3), delivery=LIGHTEST,
        padding="some", microbatches=2, shared="gated",
    ),
    "the same, gathered": Spec(
        cp=2, tp=2, sp=True, ep=2, etp=2, rule=rule(6, 3, **SIGMOID),
        delivery=LIGHTEST_GATHERED, padding="microbatch", microbatches=3, shared="plain",
    ),
    "whole sequences, lightest dropped": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(6, 3, expert_bias=False), delivery=LIGHTEST,
        padding="microbatch", microbatches=2, shared="gated",
    ),
    "whole sequences, gathered": Spec(
        cp=2, tp=2, ep=2, etp=2, rule=rule(4, 2, **SIGMOID), delivery=GATHERED,
        padding="rank", microbatches=3, shared="plain",
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
        dp=4, ep=4, rule=rule(8, 2, expert_bias=False, aux_coeff=0.0, z_coeff=0.0), shared="gated"
    ),
    "replicas alone": Spec(
        dp=4, rule=rule(5, 2), delivery=FEW, padding="rank", microbatches=3, shared="gated"
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
