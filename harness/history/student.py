"""Student's t: how far a value may be off when the noise is known from few others only.

The distribution for whole degrees of freedom is a finite sum (Abramowitz and Stegun, Handbook of
Mathematical Functions, 1964, 26.7.3 and 26.7.4); its quantile is found by halving.
"""

import functools
import math

_HALVINGS = 80


def exceeds(value: float, freedom: int) -> float:
    """Probability of more than `value`, which is >= 0, with so many degrees of freedom."""
    angle = math.atan2(value, math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for place in range(1, (freedom - odd) // 2 + 1):
        total += term
        term *= cosine * cosine * (2 * place - 1 + odd) / (2 * place + odd)
    between = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1.0 - between) / 2


@functools.cache
def quantile(probability: float, freedom: int) -> float:
    """What is exceeded with this probability.

    Raises:
        ValueError: a probability that is not between 0 and 1 / 2, or no degree of freedom.
    """
    if not 0 < probability < 0.5 or freedom < 1:
        raise ValueError(f"Expected 0 < p < 0.5 and freedom >= 1, got {probability}, {freedom}")
    low, high = 0.0, 1.0
    while exceeds(high, freedom) > probability:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle, freedom) > probability else (low, middle)
    return high
