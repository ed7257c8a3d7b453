"""A 128-bit digest of every tensor, position-sensitive, computed where the tensor lives.

    bytes of the logical elements, row-major
      -> 32-bit little-endian words w at index j, the last one padded with zero bytes
      -> (x, y, z) = mix(w, j), three 32-bit integers
      -> four lanes: sums of z, x*z, x*y and y*z, modulo 2**32
      -> plus the number of bytes times one odd constant a lane

mix(w, j):  key = j*C1 + S1
            x = w ^ key;      x ^= x >>> 16;  x *= M1;  x ^= x >>> 15
            y = x*M2 + key;   y ^= y >>> 16
            z = y*M3;         z ^= z >>> 15

`>>>` shifts in zeros; past 2**32 words j starts again and M2 has grown by HIGH, an even number.
Integer sums have no order, so threads, pages and devices may add as they like: CPU (plain torch)
and CUDA (one Triton kernel, each byte read once) give the same bits. A fifth number, from the same
pass, is 1 if any element is not finite, else 0.

What is known of it. Within 2**32 words (w, j) -> (x, z) is one to one: z gives y, y and x give the
key, the key gives j and w. For one j, z is one to one in w: so a change confined to one word, or
another number of bytes, is always seen. Any other change is missed only if its four lane sums all
cancel. `python -m benchmarks.lanes` counts how often two changes cancel in a lane: any single bit,
and sign bits in every direction (exchanged between rows, say), the worst case, as a top bit passes
a multiplication by an odd number unchanged; hence the shift before the first one. Lanes cancel as
often as random 32-bit integers would, within a tenth (y*z a little more often, as a product is
oftener even than odd), and so does a number made of eight bits of each lane. If lanes cancel
independently, which that joint count supports and does not prove, a miss has odds of about 2**-128.
It is no cryptographic hash: a miss can be constructed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_LANES = 4
NUM_COLUMNS = NUM_LANES + 1
WORD_BYTES = 4
MASK32 = 0xFFFF_FFFF
# Elements are copied and tested as integers of their size: not every dtype has every operator.
INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Odd multipliers: the golden ratio and other constants of published integer hashes (xxHash,
# MurmurHash3, Wellons' prospector), a seed from the fraction of pi; HIGH is even, so that M2 stays
# odd. Any change here changes every digest: records are comparable only within one version of this
# file.
C1, S1 = 0x9E3779B1, 0x243F6A89
M1, M2, M3 = 0x21F0AAAD, 0xD35A2D97, 0xC2B2AE35
HIGH = 0x27D4EB2E
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


def index_key(index: int) -> int:
    """j*C1 + S1 modulo 2**32 for word index j."""
    return (index * C1 + S1) & MASK32


def second_factor(index: int) -> int:
    """M2, or what it has grown to at word index j."""
    return (M2 + (index >> 32) * HIGH) & MASK32


def length_rows(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """What `out` starts from: number of bytes times a constant a lane, flag 0. [T, 5] int32."""
    rows = [[as_int32(t.nbytes * factor) for factor in LENGTH] + [0] for t in tensors]
    return torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, NUM_COLUMNS)
