"""Banks: one set of graphs for each value of what a capture fixes and a program changes.

A graph fixes its communicator, its sizes, and the way that its code took. Where these change from
microbatch to microbatch, because more or fewer ranks share a pack of sequences, there is a set of
graphs for each value, and a microbatch is replayed from the set of its own.

    capture   largest value first: what it frees in the memory that sets share is enough for others
    install   all at once, when the last one is there: until then the program runs eagerly, so that
              no set is captured over the replays of another
    select    by the microbatch's value; one that was not captured is an error
    reset     graphs first, then what was kept alive for them

**Memory.** Two sets may share a private pool only if no replay of one comes between forward and
backward of the other. So graphs of one slot, of whatever value, share a pool, and slots have pools
of their own: a slot holds one microbatch at a time, two slots may hold any two values.
"""

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar


class GraphSet(Protocol):
    """Captured graphs that are dropped together."""

    def reset(self) -> None:
        """Drop them; a second time does nothing."""


S = TypeVar("S", bound=GraphSet)


class GraphBank(Generic[S]):
    """Sets of graphs by value.

    Args:
        values: for which a set is captured.
        what: the value's name in messages: "context size".

    Raises:
        ValueError: no values, or one twice.
    """

    def __init__(self, values: Iterable[int], what: str) -> None:
        given = tuple(values)
        if not given or len(set(given)) < len(given):
            raise ValueError(f"Expected a {what} or more, each once, got {given}.")
        self._order, self._what = tuple(sorted(given, reverse=True)), what
        self._sets: dict[int, S] = {}
        self._kept: list[Any] = []

    @property
    def order(self) -> tuple[int, ...]:
        """Values in the order of capture: largest first, on every rank the same."""
        return self._order

    @property
    def sets(self) -> tuple[S, ...]:
        """All sets, in the order of capture; none until `capture` has ended."""
        return tuple(self._sets.values())

    def capture(
        self, capture_set: Callable[[int], S], between: Callable[[], None] | None = None
    ) -> None:
        """Capture a set for each value, largest first; if one fails, there is none.

        Args:
            capture_set: captures the set of a value and installs nothing.
            between: called before each, to bring ranks and streams together.

        Raises:
            RuntimeError: captured already.
        """
        if self._sets:
            raise RuntimeError(f"Expected an empty bank, got one of {self._names()}; reset it.")
        made: dict[int, S] = {}
        try:
            for value in self._order:
                if between is not None:
                    between()
                made[value] = capture_set(value)
        except BaseException:
            for each in reversed(made.values()):
                each.reset()
            self._kept.clear()
            raise
        self._sets = made

    def keep(self, *objects: Any) -> None:
        """Hold what graphs read as long as there are graphs.

        A graph knows addresses, not tensors. Tables that a model made may be replaced, and what a
        replay then reads is what came into their memory.
        """
        self._kept.extend(objects)

    def select(self, value: int) -> S:
        """The set of a value.

        Raises:
            ValueError: there is no set for it.
            RuntimeError: nothing is captured, or captured yet.
        """
        if not self._sets:
            raise RuntimeError(f"Expected captured graphs for {self._what} {value}, got none.")
        if value not in self._sets:
            raise ValueError(
                f"Expected a {self._what} that graphs were captured for ({self._names()}), "
                f"got {value}."
            )
        return self._sets[value]

    def reset(self) -> None:
        """Drop all graphs, and let go of what was kept for them."""
        for each in reversed(self._sets.values()):
            each.reset()
        self._sets = {}
        self._kept.clear()

    def _names(self) -> str:
        return ", ".join(map(str, self._order))
