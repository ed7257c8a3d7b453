"""Random corruptions of a tensor: what a digest must not miss.

`KINDS` names them; each takes a tensor [rows, columns] and returns a copy that differs in bits from
the original. `draw_corruptions` draws shape, dtype, values and kind at random, reproducibly.
"""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

INT_OF = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
DTYPES = tuple(INT_OF)

Change = Callable[[Tensor, random.Random], None]


def one_ulp(t: Tensor, rng: random.Random) -> None:
    """One element to the next representable value: its pattern plus or minus one."""
    _bits(t)[_element(t, rng)] += rng.choice((-1, 1))


def bit_flipped(t: Tensor, rng: random.Random) -> None:
    """Any one bit of any one element."""
    bit = rng.randrange(t.itemsize * 8)
    mask = (1 << bit) - (1 << t.itemsize * 8 if bit == t.itemsize * 8 - 1 else 0)
    _bits(t)[_element(t, rng)] ^= mask


def bits_flipped(t: Tensor, rng: random.Random) -> None:
    """The same bit of two to eight elements, as a stuck wire would."""
    bit = rng.randrange(t.itemsize * 8 - 1)
    for _ in range(rng.randint(2, 8)):
        _bits(t)[_element(t, rng)] ^= 1 << bit


def elements_swapped(t: Tensor, rng: random.Random) -> None:
    """Two elements exchanged."""
    a, b = _element(t, rng), _element(t, rng)
    bits = _bits(t)
    first, second = bits[a].clone(), bits[b].clone()
    bits[a], bits[b] = second, first


def rows_swapped(t: Tensor, rng: random.Random) -> None:
    """Two rows exchanged."""
    a, b = rng.sample(range(t.shape[0]), 2)
    t[[a, b]] = t[[b, a]]


def rows_rolled(t: Tensor, rng: random.Random) -> None:
    """All rows moved on, mostly by one."""
    t.copy_(t.roll(rng.choice((1, 1, -1, t.shape[0] // 2)), 0))


def columns_rolled(t: Tensor, rng: random.Random) -> None:
    """All columns moved on by one."""
    t.copy_(t.roll(rng.choice((1, -1)), 1))


def row_negated(t: Tensor, rng: random.Random) -> None:
    """The sign bit of a whole row flipped."""
    row = _bits(t)[rng.randrange(t.shape[0])]
    row ^= torch.iinfo(row.dtype).min


def pair_negated(t: Tensor, rng: random.Random) -> None:
    """The sign bits of two elements flipped, which cancels in many sums."""
    for _ in range(2):
        _bits(t)[_element(t, rng)] ^= torch.iinfo(INT_OF[t.dtype]).min


def signs_swapped(t: Tensor, rng: random.Random) -> None:
    """The sign bits of two rows exchanged, every other bit kept."""
    a, b = rng.sample(range(t.shape[0]), 2)
    bits, sign = _bits(t), torch.iinfo(INT_OF[t.dtype]).min
    different = (bits[a] ^ bits[b]) & sign
    bits[a] ^= different
    bits[b] ^= different


def stale_row(t: Tensor, rng: random.Random) -> None:
    """One row keeps the values of before an update by one part in a hundred."""
    t[rng.randrange(t.shape[0])] *= 0.99


def row_repeated(t: Tensor, rng: random.Random) -> None:
    """One row overwritten by another."""
    a, b = rng.sample(range(t.shape[0]), 2)
    t[a] = t[b]


def row_zeroed(t: Tensor, rng: random.Random) -> None:
    """One row lost."""
    t[rng.randrange(t.shape[0])] = 0


def zero_sign(t: Tensor, rng: random.Random) -> None:
    """A zero that becomes a negative zero (or the reverse); `draw` has put zeros there."""
    zeros = (t == 0).nonzero().tolist()
    if zeros:
        _bits(t)[tuple(rng.choice(zeros))] ^= torch.iinfo(INT_OF[t.dtype]).min


def nan_moved(t: Tensor, rng: random.Random) -> None:
    """A NaN exchanged with a number."""
    places = t.isnan().nonzero().tolist()
    if places:
        a, b = tuple(rng.choice(places)), _element(t, rng)
        bits = _bits(t)
        first, second = bits[a].clone(), bits[b].clone()
        bits[a], bits[b] = second, first


def nan_payload(t: Tensor, rng: random.Random) -> None:
    """Another payload of the same NaN."""
    places = t.isnan().nonzero().tolist()
    if places:
        _bits(t)[tuple(rng.choice(places))] ^= rng.randint(1, 0x3F)


def halves_exchanged(t: Tensor, rng: random.Random) -> None:
    """The first half and the second exchanged, as two shards would be."""
    del rng
    half = t.shape[0] // 2
    t[: 2 * half] = t[: 2 * half].roll(half, 0)


def shifted(t: Tensor, rng: random.Random) -> None:
    """One constant added to every bit pattern."""
    _bits(t).add_(rng.randint(1, 100))


KINDS: tuple[Change, ...] = (
    one_ulp, bit_flipped, bits_flipped, elements_swapped, rows_swapped, rows_rolled,
    columns_rolled, row_negated, pair_negated, signs_swapped, stale_row, row_repeated, row_zeroed,
    zero_sign, nan_moved, nan_payload, halves_exchanged, shifted,
)  # fmt: skip


def corrupt(tensor: Tensor, change: Change, rng: random.Random) -> Tensor:
    """A changed copy; equal to the original if the change had nothing to change."""
    changed = tensor.clone()
    change(changed, rng)
    return changed


def draw_corruptions(count: int, seed: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """`count` times (kind, original, corrupted), each pair different in at least one bit."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    while count:
        change = rng.choice(KINDS)
        original = draw(rng, generator)
        changed = corrupt(original, change, rng)
        if not torch.equal(_bits(original), _bits(changed)):
            yield change.__name__, original, changed
            count -= 1


def draw(rng: random.Random, generator: torch.Generator) -> Tensor:
    """A tensor [2..16, 1..24]: Gaussian, constant, or few values; zeros and a NaN in some."""
    shape = (rng.randint(2, 16), rng.randint(1, 24))
    kind = rng.randrange(4)
    if kind == 0:
        values = torch.full(shape, rng.choice((0.0, 1.0, 0.02)))
    elif kind == 1:
        values = torch.randint(-2, 3, shape, generator=generator).float()
    else:
        values = torch.randn(shape, generator=generator) * 0.02
    if rng.random() < 0.5:
        values.view(-1)[rng.randrange(values.numel())] = 0.0
        values.view(-1)[rng.randrange(values.numel())] = float("nan")
    return values.to(rng.choice(DTYPES))


def _bits(t: Tensor) -> Tensor:
    return t.view(INT_OF[t.dtype])


def _element(t: Tensor, rng: random.Random) -> tuple[int, int]:
    return rng.randrange(t.shape[0]), rng.randrange(t.shape[1])
