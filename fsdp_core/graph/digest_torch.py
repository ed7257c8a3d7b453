"""The digest in plain torch operators, for any device; on the CPU, the one that counts.

    tensors -> pieces of at most a page -> pages of one dtype, every row of a page one tensor's
    page    -> copy in, mix and multiply in place, sum rows -> add row sums to their tensors' rows

Only ATen operators on tensors made at construction, none of which reads a value on the host or
makes a constant: a recorder can replay a call into the same storages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp_core.graph.digest_words import (
    C1,
    C2,
    M1,
    M2,
    M3,
    MASK32,
    NUM_COLUMNS,
    PATTERNS,
    WORD_BYTES,
    as_int32,
    index_keys,
    length_rows,
)

PAGE_WORDS = 1 << 16  # 256 KiB: a page and its temporaries stay in the caches
ROW_WORDS = 64  # a page row belongs to one tensor; also keeps every slot aligned for any dtype


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of tensor number `tensor`, whose first word has index `word`."""

    tensor: int
    start: int
    stop: int
    word: int
    num_words: int


class _Page:
    """Up to `PAGE_WORDS` words of one dtype: a zeroed buffer, its keys, which row is whose.

    Padding has keys of zero as well as words of zero: it mixes to (0, 0) and adds nothing.
    """

    def __init__(self, pieces: Sequence[_Piece], dtype: torch.dtype, device: torch.device) -> None:
        rows = [-(-piece.num_words // ROW_WORDS) for piece in pieces]
        words = torch.zeros(sum(rows) * ROW_WORDS, dtype=torch.int64)
        keys = [words, words.clone()]
        start, self.slots, self.pieces = 0, [], tuple(pieces)
        self.words = torch.zeros(words.numel(), dtype=torch.int32, device=device)
        elements = self.words.view(torch.uint8).view(dtype)
        for piece, num_rows in zip(pieces, rows, strict=True):
            for key, first, factor in zip(keys, index_keys(piece.word), (C1, C2), strict=True):
                ramp = torch.arange(piece.num_words) * factor + first
                key[start : start + piece.num_words] = ramp & MASK32
            first_element = start * WORD_BYTES // dtype.itemsize
            self.slots.append(elements[first_element : first_element + piece.stop - piece.start])
            start += num_rows * ROW_WORDS
        self.key_x, self.key_z = (key.to(torch.int32).to(device) for key in keys)
        owners = torch.tensor([piece.tensor for piece in pieces])
        self.owners = owners.repeat_interleave(torch.tensor(rows)).to(device)
        self.pattern = PATTERNS[dtype]


class TorchPlan:
    """The digest in torch operators over pages of words; needs no kernel of our own.

    Tensors are cut into pieces, pieces of one dtype share pages. Holds three integers a word.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._start = length_rows(tensors, device)
        self._pages = [_Page(*page, device) for page in _paginate(tensors)]
        most = max((page.words.numel() for page in self._pages), default=0)
        self._x, self._z, self._t = (
            torch.empty(most, dtype=torch.int32, device=device) for _ in range(3)
        )
        self._sums = torch.empty(NUM_COLUMNS, most // ROW_WORDS, dtype=torch.int32, device=device)

    def update(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write the rows of `tensors` to `out`."""
        out.copy_(self._start)
        columns = out.t()
        for page in self._pages:
            sources = [tensors[p.tensor].reshape(-1)[p.start : p.stop] for p in page.pieces]
            torch._foreach_copy_(page.slots, sources)
            columns.index_add_(1, page.owners, self._row_sums(page))

    def scratch(self) -> tuple[Tensor, ...]:
        """Everything that a recorded call touches besides its arguments."""
        tables = [t for p in self._pages for t in (p.words, p.key_x, p.key_z, p.owners)]
        return (self._start, self._x, self._z, self._t, self._sums, *tables)

    def _row_sums(self, page: _Page) -> Tensor:
        n = page.words.numel()
        x, z, t = self._x[:n], self._z[:n], self._t[:n]
        sums = self._sums[:, : n // ROW_WORDS]
        torch.bitwise_xor(page.words, page.key_x, out=x)
        _fold(x, t, 16).mul_(as_int32(M1))
        _fold(x, t, 15)
        torch.mul(x, as_int32(M2), out=z).add_(page.key_z)
        _fold(z, t, 16).mul_(as_int32(M3))
        _fold(z, t, 15)
        _sum_rows(z, sums[0])
        _sum_rows(torch.mul(x, z, out=t), sums[1])
        _sum_rows(torch.bitwise_right_shift(x, 16, out=t).mul_(z), sums[2])
        _sum_rows(z.bitwise_right_shift_(16).mul_(x), sums[3])
        if page.pattern.fields:
            _mark_finite(page, x, t)
            _sum_rows(x, sums[4])
            # Non-finite is what is missing from the row's full number of fields.
            sums[4].neg_().add_(page.pattern.fields * ROW_WORDS)
        else:
            sums[4].zero_()
        return sums


def _fold(x: Tensor, t: Tensor, shift: int) -> Tensor:
    """x ^= x >>> shift, with `t` as scratch: int32 shifts in the sign, which the mask removes."""
    torch.bitwise_right_shift(x, shift, out=t)
    return x.bitwise_xor_(t.bitwise_and_(MASK32 >> shift))


def _sum_rows(words: Tensor, out: Tensor) -> None:
    torch.sum(words.view(-1, ROW_WORDS), 1, dtype=torch.int32, out=out)


def _mark_finite(page: _Page, out: Tensor, t: Tensor) -> None:
    """out = number of finite fields of each word; `t` is scratch.

    Comparisons give bool, and int32 += bool converts piecemeal at five times the cost: so a field
    is 1 if its masked bits differ from the pattern, by xor and clamp.
    """
    pattern = page.pattern
    for i in range(pattern.fields):
        field = t if i else out
        torch.bitwise_right_shift(page.words, i * 32 // pattern.fields, out=field)
        field.bitwise_and_(pattern.mask).bitwise_xor_(pattern.value).clamp_(max=1)
        if i:
            out.add_(field)
    if pattern.high_word_only:
        out.view(-1, 2)[:, 0].fill_(1)


def _paginate(tensors: Sequence[Tensor]) -> Iterator[tuple[list[_Piece], torch.dtype]]:
    """Pages of whole rows: consecutive pieces of one dtype, together at most `PAGE_WORDS`."""
    open_pages: dict[torch.dtype, tuple[list[_Piece], int]] = {}
    for number, tensor in enumerate(tensors):
        for piece in _cut(number, tensor):
            pieces, used = open_pages.get(tensor.dtype, ([], 0))
            size = -(-piece.num_words // ROW_WORDS) * ROW_WORDS
            if used + size > PAGE_WORDS:
                yield pieces, tensor.dtype
                pieces, used = [], 0
            open_pages[tensor.dtype] = ([*pieces, piece], used + size)
    for dtype, (pieces, _) in open_pages.items():
        yield pieces, dtype


def _cut(number: int, tensor: Tensor) -> Iterator[_Piece]:
    most = PAGE_WORDS * WORD_BYTES // tensor.itemsize
    for start in range(0, tensor.numel(), most):
        stop = min(start + most, tensor.numel())
        yield _Piece(
            tensor=number,
            start=start,
            stop=stop,
            word=start * tensor.itemsize // WORD_BYTES,
            num_words=-(-(stop - start) * tensor.itemsize // WORD_BYTES),
        )
