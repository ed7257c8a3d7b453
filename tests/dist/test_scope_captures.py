"""Captures of the trainer that are refused or fail, and what is left when graphs are dropped."""

from dataclasses import replace

import pytest

from tests.dist.captured_events import captured, refused
from tests.dist.rank_pool import RankPool
from tests.dist.scope_failures import fail_and_go_on, memory_left, never_captured
from tests.dist.scope_programs import CAPACITY, MIXED, Scoped
from tests.dist.train_layout_programs import Run

RUN = Run({"dp": 2, "ep": 2}, "moe_tiny", MIXED | CAPACITY)
ROUTER, LAYER = ("attn", "mlp", "moe_router"), ("layer",)


@pytest.mark.parametrize(
    ("scope", "module", "hook", "said"),
    [
        (
            LAYER,
            "layers.1.attn.attention",
            "forward",
            "Expected no forward_hooks of attn.attention",
        ),
        (ROUTER, "layers.1.mlp.moe.router", "forward", "Expected no forward_hooks of "),
        (ROUTER, "layers.1.mlp.moe", "forward", "Expected no hooks of the MoeLayer of layers.1."),
        (ROUTER, "layers.1.mlp.moe", "backward", "Expected no hooks of the MoeLayer of layers.1."),
        (("attn",), "layers.1.attn.norm", "reads", "cannot capture aten._local_scalar_dense"),
    ],
    ids=["inside", "part", "bypassed", "bypassed in backward", "reads data"],
)
def test_all_ranks_capture_or_none(
    warm_ranks: RankPool, scope: tuple[str, ...], module: str, hook: str, said: str
) -> None:
    """Where one rank cannot, all say why, go on with eager's bits, and may try again."""
    scoped = Scoped(RUN, scope)
    expected = warm_ranks.run(never_captured, Scoped(RUN), world_size=2)
    ranks = warm_ranks.run(fail_and_go_on, scoped, module, hook, world_size=2)
    for rank, bits in zip(ranks, expected, strict=True):
        text, cause, eager, again = rank
        assert "was given up on every rank: rank 1: " in text
        assert said in text
        assert cause == (
            "CaptureRefused" if hook == "reads" and (text, cause) == ranks[1][:2] else "NoneType"
        )
        assert eager == bits
        assert again == bits


def test_a_whole_step_is_captured_after_a_refusal(warm_ranks: RankPool) -> None:
    """What stopped in the middle of a pass is no hindrance to steps after it."""
    run = replace(RUN, degrees={"dp": 1})
    (expected,) = warm_ranks.run(never_captured, Scoped(run), world_size=1)
    scoped = Scoped(run, ("full_iteration",))
    ((text, _, eager, again),) = warm_ranks.run(
        fail_and_go_on, scoped, "layers.1.attn.norm", "reads", world_size=1
    )
    assert "cannot capture aten._local_scalar_dense" in text
    assert eager == expected
    assert again == expected


@pytest.mark.parametrize("scope", [("attn", "moe"), ("full_iteration",)])
def test_events_stay_on_their_side_of_a_capture(
    warm_ranks: RankPool, scope: tuple[str, ...]
) -> None:
    """None that was recorded in a capture is waited for outside, nor the reverse."""
    expected = warm_ranks.run(never_captured, Scoped(RUN), world_size=2)
    assert warm_ranks.run(captured, Scoped(RUN, scope), world_size=2) == expected


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_events_of_a_refused_capture_are_forgotten(warm_ranks: RankPool, where: str) -> None:
    """Nobody waits for what was gathered ahead, or was being reduced, when it was refused."""
    run = replace(RUN, degrees={"dp": 1})
    expected = warm_ranks.run(never_captured, Scoped(run), world_size=1)
    scoped = Scoped(run, ("full_iteration",))
    ((said, seen),) = warm_ranks.run(refused, scoped, where, world_size=1)
    assert "cannot capture aten._local_scalar_dense" in said
    assert [seen] == expected


def test_nothing_is_left_of_graphs(warm_ranks: RankPool) -> None:
    """After `close` a trainer holds what one without graphs holds, to the byte."""
    for scope in (ROUTER, LAYER, ("full_iteration",)):
        for eager, left, graphed in warm_ranks.run(memory_left, Scoped(RUN, scope), world_size=2):
            assert graphed > eager + 2**16
            assert left == eager, scope
