"""How often the digest's lanes cancel for two changes, against random 32-bit integers.

    python -m benchmarks.lanes

Two changes at different places are missed by a lane if its two differences cancel. For one flipped
bit in each of 2**20 words, the number of pairs of equal lane differences is counted; of as many
random 32-bit integers, 128 pairs would be equal. The table gives the worst and the mean ratio to
that over bits, values (zeros, ones, Gaussian) and index patterns (consecutive, strided by 128).
Exit code 1 if a mean is off by more than a tenth or a single ratio by more than a half.
"""

import sys

import numpy as np
import numpy.typing as npt

from fsdp_core.graph import digest_words as definition

Words = npt.NDArray[np.uint32]

COUNT = 1 << 20
EXPECTED = COUNT * (COUNT - 1) / 2 / 2**32


def main() -> int:
    """Count, print, judge."""
    random = np.random.default_rng(1)
    values: dict[str, Words] = {
        "zeros": np.zeros(COUNT, np.uint32),
        "ones": np.ones(COUNT, np.float32).view(np.uint32),
        "Gaussian": (random.standard_normal(COUNT) * 0.02).astype(np.float32).view(np.uint32),
    }
    consecutive = np.arange(COUNT, dtype=np.uint32)
    ratios = np.array(
        [
            [equal_pairs(lane) / EXPECTED for lane in differences(words, index, bit)]
            for words in values.values()
            for index in (consecutive, consecutive * np.uint32(128))
            for bit in range(32)
        ]
    )
    print(f"{len(ratios)} patterns of 2**20 changes; ratio of equal pairs to random integers")
    for lane, column in enumerate(ratios.T):
        print(f"  lane {lane}: mean {column.mean():.3f}, {column.min():.2f} to {column.max():.2f}")
    good = np.abs(ratios.mean(0) - 1).max() < 0.1 and np.abs(ratios - 1).max() < 0.5
    return 0 if good else 1


def differences(words: Words, index: Words, bit: int) -> list[Words]:
    """Per lane, what flipping `bit` of each word adds to the sum."""
    flipped = words ^ np.uint32(1 << bit)
    pairs = zip(terms(flipped, index), terms(words, index), strict=True)
    return [after - before for after, before in pairs]


def terms(words: Words, index: Words) -> list[Words]:
    """The four terms of each word at its index, by the definition."""
    c1, s1, c2, s2, m1, m2, m3 = (
        np.uint32(getattr(definition, name)) for name in ("C1", "S1", "C2", "S2", "M1", "M2", "M3")
    )
    x = words ^ (index * c1 + s1)
    x = (x ^ (x >> np.uint32(16))) * m1
    x ^= x >> np.uint32(15)
    z = x * m2 + (index * c2 + s2)
    z = (z ^ (z >> np.uint32(16))) * m3
    z ^= z >> np.uint32(15)
    return [z, x * z, high_half(x) * z, x * high_half(z)]


def high_half(words: Words) -> Words:
    """The upper 16 bits, sign extended."""
    return (words.view(np.int32) >> 16).view(np.uint32)


def equal_pairs(numbers: Words) -> int:
    """Number of pairs of equal numbers."""
    _, counts = np.unique(numbers, return_counts=True)
    return int((counts * (counts - 1) // 2).sum())


if __name__ == "__main__":
    sys.exit(main())
