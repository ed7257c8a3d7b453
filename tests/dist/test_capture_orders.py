"""Orders of captures: what a graph gives up is the next one's, so it is the order of runs."""

from tests.dist.capture_order_programs import captures_in_order
from tests.dist.rank_pool import RankPool
from tests.dist.scope_programs import Scoped
from tests.dist.train_layout_programs import Run

PIECES = [f"layers.{layer}.{branch}" for layer in (0, 1) for branch in ("attn", "mlp")]


def test_backwards_are_captured_in_reverse(warm_ranks: RankPool) -> None:
    """All warm-ups, then forwards as layers run, then backwards as autograd runs them."""
    scoped = Scoped(Run({"dp": 1}), ("attn", "mlp"))
    (seen,) = warm_ranks.run(captures_in_order, scoped, world_size=1)
    assert seen == [
        *(("warm_up", name) for name in PIECES),
        *(("capture_forward", name) for name in PIECES),
        *(("capture_backward", name) for name in reversed(PIECES)),
    ]
