"""A 128-bit digest of every tensor, position-sensitive, computed where the tensor lives.

    bytes of the logical elements, row-major
      -> 32-bit little-endian words w at index j, the last one padded with zero bytes
      -> (x, z) = mix(w, j), two 32-bit integers
      -> four lanes: sums of z, x*z, (x >> 16)*z and x*(z >> 16), modulo 2**32
      -> plus the number of bytes times one odd constant a lane

    mix(w, j):  x = w ^ (j*C1 + S1);      x ^= x >>> 16;  x *= M1;  x ^= x >>> 15
                z = x*M2 + (j*C2 + S2);   z ^= z >>> 16;  z *= M3;  z ^= z >>> 15

`>>>` shifts in zeros, `>>` the sign; past 2**32 words j counts on in S1 and S2. Integer sums have
no order, so threads, pages and devices may add as they like: CPU (plain torch) and CUDA (one Triton
kernel, each byte read once) give the same bits. A fifth number counts non-finite elements in the
same pass.

What is known of it. (w, j) -> (x, z) is one to one within 2**32 words, and z is one to one in w, so
a change confined to one word, or another number of bytes, is always seen. Any other change is
missed only if its four lane sums all cancel. Measured by `python -m benchmarks.lanes` over
single-bit changes of zeros, ones and Gaussian values, at consecutive and at strided indices: in
each lane, pairs of differences cancel as often as random 32-bit integers would, within a tenth. If
lanes cancel independently, which is plausible and not proven, a miss has odds of about 2**-128. It
is no cryptographic hash: a miss can be constructed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_LANES = 4
NUM_COLUMNS = NUM_LANES + 1
WORD_BYTES = 4
MASK32 = 0xFFFF_FFFF

# Odd multipliers: the golden ratio and other constants of published integer hashes (xxHash,
# MurmurHash3, Wellons' prospector), seeds from the fractions of pi and e. Any change here changes
# every digest: records are comparable only within one version of this file.
C1, S1, HIGH1 = 0x9E3779B1, 0x243F6A89, 0x27D4EB2F
C2, S2, HIGH2 = 0x85EBCA77, 0xB7E15163, 0x165667B1
M1, M2, M3 = 0x21F0AAAD, 0xD35A2D97, 0xC2B2AE35
LENGTH = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


@dataclass(frozen=True)
class Pattern:
    """Which bit patterns are not finite: a field is, if `field & mask == value`.

    A word holds `fields` fields of equal width (0: integers, all finite). `high_word_only` is for
    elements of two words, whose exponent is in the second (little-endian) one.
    """

    fields: int = 0
    mask: int = 0
    value: int = 0
    high_word_only: bool = False


PATTERNS: dict[torch.dtype, Pattern] = {
    torch.float64: Pattern(1, 0x7FF00000, 0x7FF00000, high_word_only=True),
    torch.float32: Pattern(1, 0x7F800000, 0x7F800000),
    torch.bfloat16: Pattern(2, 0x7F80, 0x7F80),
    torch.float16: Pattern(2, 0x7C00, 0x7C00),
    torch.float8_e4m3fn: Pattern(4, 0x7F, 0x7F),
    torch.float8_e5m2: Pattern(4, 0x7C, 0x7C),
    torch.float8_e4m3fnuz: Pattern(4, 0xFF, 0x80),
    torch.float8_e5m2fnuz: Pattern(4, 0xFF, 0x80),
    torch.float8_e8m0fnu: Pattern(4, 0xFF, 0xFF),
} | dict.fromkeys(
    (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
        torch.uint64, torch.int64,
    ),
    Pattern(),
)  # fmt: skip


def as_int32(value: int) -> int:
    """The signed integer with the low 32 bits of `value`: what an int32 tensor operator takes."""
    return ((value & MASK32) ^ 0x8000_0000) - 0x8000_0000


def index_keys(index: int) -> tuple[int, int]:
    """(j*C1 + S1, j*C2 + S2) modulo 2**32 for word index j, its high half mixed in."""
    low, high = index & MASK32, index >> 32
    return (low * C1 + S1 + high * HIGH1) & MASK32, (low * C2 + S2 + high * HIGH2) & MASK32


def length_rows(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """What `out` starts from: number of bytes times a constant a lane, count 0. [T, 5] int32."""
    rows = [[as_int32(t.nbytes * factor) for factor in LENGTH] + [0] for t in tensors]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, NUM_COLUMNS)
