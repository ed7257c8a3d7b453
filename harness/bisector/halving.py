"""Halving: the first of ordered values that fails, where all after it do."""

from collections.abc import Callable, Sequence


def first_failing(values: Sequence[int], fails: Callable[[int], bool]) -> int | None:
    """The first value from which on all fail; None if none was seen to.

    The first one is asked first, as most faults need little. A value after the last is taken to
    fail: where those that are asked pass, the answer lies behind them.

    Args:
        values: in order.
        fails: asks about one; called once for each that matters.
    """
    if not values or fails(values[0]):
        return values[0] if values else None
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        if fails(values[middle]):
            high = middle
        else:
            low = middle
    return values[high] if high < len(values) else None
