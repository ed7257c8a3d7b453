"""What a digest is, and the digest in torch operators, for any device.

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
Integer sums have no order, so threads, pages and devices may add as they like. A fifth number, from
the same pass, is 1 if any element is not finite, else 0.

A change confined to one word, or another number of bytes, is always seen: within 2**32 words
(w, j) -> (x, z) is one to one, and for one j so is w -> z. Any other change is missed only if its
four lane sums all cancel: in a lane as often as in random integers, within a tenth (`python -m
benchmarks.lanes`; sign bits are the worst case, hence the shift before the first multiplication).
If lanes cancel independently, which is not proved, a miss has odds of about 2**-128. It is no
cryptographic hash: a miss can be constructed.

In torch operators tensors are cut into pieces of at most a page, and pages of one dtype are copied
in, mixed in place, and summed by rows, each of one tensor. Only ATen operators on tensors made at
construction, none of which reads a value on the host: a recorder can replay a call.
"""

from collections.abc import Iterator, Sequence
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
    """Which bit patterns are not finite: a field is, if `field & mask == value`. A word holds
    `fields` fields of equal width (0: integers). `high_word_only` is for elements of two words,
    whose exponent is in the second one.
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


PAGE_WORDS = 1 << 18  # 1 MiB: smaller pages pay more for calling operators than they save in caches
ROW_WORDS = 64  # a page row belongs to one tensor; also keeps every slot aligned for any dtype


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of tensor number `tensor`, whose first word has index `word`; `shape`
    is that of a tensor which is one piece and is copied without more views.
    """

    tensor: int
    start: int
    stop: int
    word: int
    num_words: int
    shape: torch.Size | None

    def elements(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self.start : self.stop] if self.shape is None else tensor


class _Page:
    """Up to `PAGE_WORDS` words of one dtype: a zeroed buffer, its keys, which row is whose. Padding
    has a key of zero as well as words of zero: it mixes to zeros and adds nothing.
    """

    def __init__(self, pieces: Sequence[_Piece], dtype: torch.dtype, device: torch.device) -> None:
        rows = [-(-piece.num_words // ROW_WORDS) for piece in pieces]
        key = torch.zeros(sum(rows) * ROW_WORDS, dtype=torch.int64)
        start, self.slots, self.pieces = 0, [], tuple(pieces)
        self.words = torch.zeros(key.numel(), dtype=torch.int32, device=device)
        self.int_dtype = INT_OF_SIZE[dtype.itemsize]
        elements = self.words.view(self.int_dtype)
        for piece, num_rows in zip(pieces, rows, strict=True):
            ramp = torch.arange(piece.num_words) * C1 + index_key(piece.word)
            key[start : start + piece.num_words] = ramp & MASK32
            first_element = start * WORD_BYTES // dtype.itemsize
            slot = elements[first_element : first_element + piece.stop - piece.start]
            self.slots.append(slot if piece.shape is None else slot.view(piece.shape))
            start += num_rows * ROW_WORDS
        self.key = key.to(torch.int32).to(device)
        self.factor = as_int32(second_factor(pieces[0].word))
        owners = torch.tensor([piece.tensor for piece in pieces])
        self.owners = owners.repeat_interleave(torch.tensor(rows)).to(device)
        # An element is not finite if (bits ^ flip) & mask is the mask, which is the maximum.
        pattern = PATTERNS[dtype]
        shift = 32 if pattern.high_word_only else 0
        self.mask, self.flip = pattern.mask << shift, (pattern.mask ^ pattern.value) << shift
        self.most = torch.empty(sum(rows), dtype=self.int_dtype, device=device)
        self.found = torch.empty(sum(rows), dtype=torch.bool, device=device)

    def flag_nonfinite(self, out: Tensor, t: Tensor) -> None:
        """out = 1 for each row with an element that is not finite, else 0; `t` is scratch."""
        if not self.mask:
            out.zero_()
            return
        masked = t.view(self.int_dtype)
        torch.bitwise_and(self.words.view(self.int_dtype), self.mask, out=masked)
        if self.flip:
            masked.bitwise_xor_(self.flip)
        torch.amax(masked.view(len(self.most), -1), 1, out=self.most)
        out.copy_(torch.eq(self.most, self.mask, out=self.found))


class TorchPlan:
    """The digest in torch operators over pages of words; holds two integers a word."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._start = length_rows(tensors, device)
        self._pages = [_Page(*page, device) for page in _paginate(tensors)]
        most = max((page.words.numel() for page in self._pages), default=0)
        self._mixed = torch.empty(4, most, dtype=torch.int32, device=device)
        self._sums = torch.empty(NUM_COLUMNS, most // ROW_WORDS, dtype=torch.int32, device=device)

    def update(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(self._start)
        columns = out.t()
        for page in self._pages:
            sources = [p.elements(tensors[p.tensor].view(page.int_dtype)) for p in page.pieces]
            torch._foreach_copy_(page.slots, sources)
            columns.index_add_(1, page.owners, self._row_sums(page))
        columns[-1].clamp_(max=1)

    def scratch(self) -> tuple[Tensor, ...]:
        """Everything that a recorded call touches besides its arguments."""
        tables = [t for p in self._pages for t in (p.words, p.key, p.owners, p.most, p.found)]
        return (self._start, self._mixed, self._sums, *tables)

    def _row_sums(self, page: _Page) -> Tensor:
        n = page.words.numel()
        x, y, z, t = self._mixed[:, :n].unbind()
        sums = self._sums[:, : n // ROW_WORDS]
        _fold(torch.bitwise_xor(page.words, page.key, out=x), t, 16).mul_(as_int32(M1))
        _fold(x, t, 15)
        _fold(torch.mul(x, page.factor, out=y).add_(page.key), t, 16)
        _fold(torch.mul(y, as_int32(M3), out=z), t, 15)
        _sum_rows(z, sums[0])
        _sum_rows(torch.mul(x, z, out=t), sums[1])
        _sum_rows(x.mul_(y), sums[2])
        _sum_rows(y.mul_(z), sums[3])
        page.flag_nonfinite(sums[4], t)
        return sums


def _fold(x: Tensor, t: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, with `t` as scratch: int32 shifts in the sign, which the mask removes."""
    torch.bitwise_right_shift(x, shift, out=t)
    return x.bitwise_xor_(t.bitwise_and_(MASK32 >> shift))


def _sum_rows(words: Tensor, out: Tensor) -> None:
    torch.sum(words.view(-1, ROW_WORDS), 1, dtype=torch.int32, out=out)


def _paginate(tensors: Sequence[Tensor]) -> Iterator[tuple[list[_Piece], torch.dtype]]:
    """Pages of whole rows: consecutive pieces of one dtype, at most `PAGE_WORDS`. Words 2**32 apart
    have another second factor, so they share no page.
    """
    open_pages: dict[tuple[torch.dtype, int], tuple[list[_Piece], int]] = {}
    for number, tensor in enumerate(tensors):
        for piece in _cut(number, tensor):
            kind = (tensor.dtype, second_factor(piece.word))
            pieces, used = open_pages.get(kind, ([], 0))
            size = -(-piece.num_words // ROW_WORDS) * ROW_WORDS
            if used + size > PAGE_WORDS:
                yield pieces, tensor.dtype
                pieces, used = [], 0
            open_pages[kind] = ([*pieces, piece], used + size)
    for (dtype, _), (pieces, _) in open_pages.items():
        yield pieces, dtype


def _cut(number: int, tensor: Tensor) -> Iterator[_Piece]:
    most = PAGE_WORDS * WORD_BYTES // tensor.itemsize
    for start in range(0, tensor.numel(), most):
        stop = min(start + most, tensor.numel())
        yield _Piece(
            number, start, stop, word=start * tensor.itemsize // WORD_BYTES,
            num_words=-(-(stop - start) * tensor.itemsize // WORD_BYTES),
            shape=tensor.shape if stop - start == tensor.numel() else None,
        )  # fmt: skip
