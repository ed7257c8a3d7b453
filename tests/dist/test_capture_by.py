"""Partial scopes captured by libraries, over their stand-ins: each bit of each step is eager's."""

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.capture_by_programs import fail_and_try_again
from tests.dist.rank_pool import RankPool
from tests.dist.scope_programs import CAPACITY, MIXED, Scoped, train_all
from tests.dist.te_graph_programs import train_all as train_all_by_te
from tests.dist.train_layout_programs import Run

LIBRARIES = ("te", "torch")
PARTS = ("attn", "mlp", "moe_router", "moe_preprocess")
EXPERTS = ("moe_tiny", MIXED | CAPACITY)
DENSE = "dense_tiny_dropout"
RUNS: dict[str, tuple[Run, list[tuple[str, ...]]]] = {
    "every scope": (Run({"dp": 2, "ep": 2}, *EXPERTS), [PARTS, ("attn", "moe"), ("layer",)]),
    "tp": (Run({"tp": 2, "sequence_parallel": True}, DENSE), [("attn", "mlp")]),
    "two slots": (Run({"pp": 2}, DENSE, microbatches=4), [("attn",)]),
    "context sizes": (Run({"dp": 2, "dynamic_cp": (1, 2)}, DENSE, {"layers": 1}), [("attn",)]),
    "weights stay": (Run({"dp": 2}, DENSE, fsdp={"strategy": "optim_grads", "pool": "dynamic"}),
                     [("layer",)]),
    "traced pool": (Run({"dp": 2}, DENSE, fsdp={"pool": "traced"}), [("attn", "mlp")]),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_graphs_of_libraries_have_the_bits_of_eager(name: str, warm_ranks: RankPool) -> None:
    """On every kind of scope and layout, with as many graphs and launches as ours."""
    run, scopes = RUNS[name]
    makers = ("ours", *LIBRARIES)
    graphed = [Scoped(run, scope, capture_by=by) for scope in scopes for by in makers]
    runs = [Scoped(run), *graphed]
    for eager, *found in warm_ranks.run(train_all, runs, world_size=run.parallel.world_size):
        assert eager.bits[0] != eager.bits[1]
        for scoped, seen in zip(graphed, found, strict=True):
            assert seen.bits == eager.bits, (scoped.capture_by, scoped.graph)
        for number in range(0, len(found), len(makers)):
            counts = {(each.captured, each.replays) for each in found[number : number + 3]}
            assert len(counts) == 1, "each maker captures and replays as much"
            assert min(counts.pop()) > 0


@pytest.mark.parametrize("by", LIBRARIES)
def test_delayed_scales_move_as_eagerly(by: str, warm_ranks: RankPool) -> None:
    """TransformerEngine moves scales around its own graphs, we do around those of torch."""
    options: dict[str, Any] = {"backend": "te", "fp8": "delayed"}
    run = Run({"dp": 1}, "dense_tiny_dropout", {"layers": 2}, **options)
    runs = [run, replace(run, graph=("attn", "mlp"), capture_by=by)]
    ((eager, seen),) = warm_ranks.run(train_all_by_te, runs, world_size=1)
    for what in ("steps", "scales", "moved"):
        assert seen[what] == eager[what], what
    assert seen["captured"] > 0 < seen["replays"]


@pytest.mark.parametrize("where", ["warm-up", "capture", "backward"])
@pytest.mark.parametrize("by", LIBRARIES)
def test_a_failed_capture_leaves_everything_as_it_was(
    by: str, where: str, warm_ranks: RankPool
) -> None:
    """All ranks say why, hooks and classes are as before, and the capture may be tried again."""
    scoped = Scoped(Run({"dp": 2}, DENSE), ("attn", "mlp"), capture_by=by)
    expected = warm_ranks.run(train_all, [Scoped(scoped.run)], world_size=2)
    ranks = warm_ranks.run(fail_and_try_again, scoped, where, world_size=2)
    for (text, traces, bits), (eager,) in zip(ranks, expected, strict=True):
        assert "given up on every rank: rank 0: ZeroDivisionError: told to" in text
        assert traces == []
        assert bits == eager.bits
