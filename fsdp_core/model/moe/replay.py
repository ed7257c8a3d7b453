"""Routings on tape: recorded in one run and replayed in another, so that both route alike.

The choice of experts is not continuous: one rounding can flip it, and with it a whole row. A run
that replays another's choices differs from it by roundings alone. Weights are computed from the
run's own scores, so gradients still reach the router.
"""

import torch


class RoutingTape:
    """Experts of one router's tokens, a tensor int64 [S, K] a forward pass, in order.

    An empty tape that `recording` is set on takes what the router chooses; any other gives back
    what it holds. A forward pass that is recomputed inside a backward pass reads again what its
    first run read, which takes for granted that microbatches go backward in the order in which they
    went forward, as 1F1B schedules do.

    In a captured graph an entry is a static tensor: a replay reads (or writes) it in place. Use
    `load` to change it.
    """

    def __init__(self, entries: list[torch.Tensor] | None = None) -> None:
        self.recording = entries is None
        self.entries: list[torch.Tensor] = list(entries or [])
        self._next = [0, 0]

    def rewind(self) -> None:
        """Replay from the first entry on; ends the recording."""
        self.recording = False
        self._next = [0, 0]

    def load(self, number: int, experts_SK: torch.Tensor) -> None:
        """Overwrite an entry in place, where a graph finds it."""
        self.entries[number].copy_(experts_SK)

    def experts(self, chosen_SK: torch.Tensor) -> torch.Tensor:
        """What the router is to use in place of what it chose.

        Raises:
            RuntimeError: replayed more often than it was recorded.
            ValueError: the entry has not the shape or the device of the router's choice.
        """
        recomputing = _in_backward()
        if self.recording:
            if not recomputing:
                self.entries.append(chosen_SK.clone())
            return chosen_SK
        number = self._next[recomputing]
        if number == len(self.entries):
            raise RuntimeError(f"Expected at most {number} forward passes on this tape, got more.")
        self._next[recomputing] += 1
        entry = self.entries[number]
        wanted = (chosen_SK.shape, torch.int64, chosen_SK.device)
        if (entry.shape, entry.dtype, entry.device) != wanted:
            raise ValueError(
                f"Expected a routing int64 {tuple(chosen_SK.shape)} on {chosen_SK.device}, got "
                f"{entry.dtype} {tuple(entry.shape)} on {entry.device} as entry {number} of the "
                "tape."
            )
        return entry


def _in_backward() -> bool:
    """Whether this forward pass is a recomputation inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
