"""How often the digest's lanes cancel for two changes, against random 32-bit integers.

    python -m benchmarks.lanes

Two changes at different places are missed by a lane if its two differences cancel. For a change in
each of 2**20 words, the number of pairs that cancel is counted; of as many random 32-bit integers,
128 pairs would. Two kinds of pairs, as a ratio to that:

    one bit     the same bit flipped in both words, one up, one down; every bit, 0 to 31
    sign, both  the sign bit flipped in both words, in every combination of directions: what
                negated rows do, and rows exchanged that differ in signs only

over values (zeros, ones of random sign, Gaussian) and index patterns (consecutive, and strided as
the rows of a matrix 64 and 4,096 words wide). Beside the four lanes, `joint` is a number made of
eight bits of each of them: it cancels as often as a random one if lanes do not cancel together.
Exit code 1 if a mean is off by more than 0.15 or a single ratio by more than a half.
"""

import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fsdp_core.graph import digest_torch as definition

Words = npt.NDArray[np.uint32]

COUNT = 1 << 20
EXPECTED = COUNT * (COUNT - 1) / 2 / 2**32
STRIDES = (1, 64, 4096)
SIGN = 31
LANES = ("z", "x*z", "x*y", "y*z", "joint")


def main() -> int:
    """Count, print, judge."""
    good = True
    for title, found in (
        ("one bit", [row for bit in range(32) for row in ratios(bit)]),
        ("sign, both", list(ratios(SIGN, both=True))),
    ):
        table = np.array(found)
        print(f"{title}: {len(table)} patterns of 2**20 changes; pairs against random integers")
        for lane, column in zip(LANES, table.T, strict=True):
            spread = f"{column.min():.2f} to {column.max():.2f}"
            print(f"  {lane:6} mean {column.mean():.3f}, {spread}")
        good &= bool(np.abs(table.mean(0) - 1).max() < 0.15 and np.abs(table - 1).max() < 0.5)
    return 0 if good else 1


def ratios(bit: int, *, both: bool = False) -> Iterator[list[float]]:
    """Cancelling pairs of each lane over the expected number, per values and index pattern."""
    random = np.random.default_rng(bit)
    ones = random.choice([-1.0, 1.0], COUNT).astype(np.float32)
    gaussian = (random.standard_normal(COUNT) * 0.02).astype(np.float32)
    for words in (np.zeros(COUNT, np.uint32), ones.view(np.uint32), gaussian.view(np.uint32)):
        for stride in STRIDES:
            index = np.arange(COUNT, dtype=np.uint32) * np.uint32(stride)
            changes, expected = differences(words, index, bit), EXPECTED
            if both:
                # Either direction: a change equal to another cancels, and one opposite to it.
                changes, expected = [np.concatenate((c, 0 - c)) for c in changes], EXPECTED * 4
            yield [equal_pairs(c) / expected for c in (*changes, joint(changes))]


def differences(words: Words, index: Words, bit: int) -> list[Words]:
    """Per lane, what flipping `bit` of each word adds to the sum."""
    flipped = words ^ np.uint32(1 << bit)
    pairs = zip(terms(flipped, index), terms(words, index), strict=True)
    return [after - before for after, before in pairs]


def terms(words: Words, index: Words) -> list[Words]:
    """The four terms of each word at its index, by the definition."""
    c1, s1, m1, m2, m3 = (
        np.uint32(getattr(definition, name)) for name in ("C1", "S1", "M1", "M2", "M3")
    )
    key = index * c1 + s1
    x = fold(fold(words ^ key, 16) * m1, 15)
    y = fold(x * m2 + key, 16)
    z = fold(y * m3, 15)
    return [z, x * z, x * y, y * z]


def fold(words: Words, shift: int) -> Words:
    """w ^= w >>> shift."""
    return words ^ (words >> np.uint32(shift))


def joint(lanes: list[Words]) -> Words:
    """Bits 5 to 12 of each of four lanes, side by side."""
    parts = [
        (lane >> np.uint32(5) & np.uint32(255)) << np.uint32(8 * i) for i, lane in enumerate(lanes)
    ]
    return np.bitwise_or.reduce(parts)


def equal_pairs(numbers: Words) -> int:
    """Number of pairs of equal numbers."""
    _, counts = np.unique(numbers, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


if __name__ == "__main__":
    sys.exit(main())
