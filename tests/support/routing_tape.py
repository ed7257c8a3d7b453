"""Routings of one run, replayed in another, so that both route alike.

The choice of experts is not continuous: one rounding can flip it, and with it a whole row. A run
that replays another's choices differs from it by roundings alone. Weights are computed from the
run's own scores, so gradients still reach the router.
"""

import torch

from fsdp_core.model.moe.router import Router


class RoutingTape:
    """Experts of one router's tokens, int64 [S, K] a forward pass, in order; None: to record."""

    def __init__(self, entries: list[torch.Tensor] | None = None) -> None:
        self._records = entries is None
        self.entries: list[torch.Tensor] = list(entries or [])
        self._next = 0

    def experts(self, chosen: torch.Tensor) -> torch.Tensor:
        """What the router is to use in place of what it chose."""
        if self._records:
            self.entries.append(chosen.clone())
            return chosen
        entry = self.entries[self._next]
        self._next += 1
        assert (entry.shape, entry.dtype) == (chosen.shape, torch.int64), entry.shape
        return entry


def attach(router: Router, tape: RoutingTape) -> RoutingTape:
    """Have a router record on a tape, or route by it."""
    place = router._without_invalid

    def routed(experts: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        # A tape may come from a run with other padding.
        return place(tape.experts(place(experts, valid)), valid)

    router._without_invalid = routed  # type: ignore[assignment, method-assign]
    return tape
