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
    INT_OF_SIZE,
    M1,
    M3,
    MASK32,
    NUM_COLUMNS,
    PATTERNS,
    WORD_BYTES,
    as_int32,
    index_key,
    length_rows,
    second_factor,
)

PAGE_WORDS = 1 << 18  # 1 MiB: smaller pages pay more for calling operators than they save in caches
ROW_WORDS = 64  # a page row belongs to one tensor; also keeps every slot aligned for any dtype


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of tensor number `tensor`, whose first word has index `word`.

    `shape` is that of a tensor which is one piece: it is copied as it is, without more views.
    """

    tensor: int
    start: int
    stop: int
    word: int
    num_words: int
    shape: torch.Size | None

    def elements(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor of integers."""
        return tensor.reshape(-1)[self.start : self.stop] if self.shape is None else tensor


class _Page:
    """Up to `PAGE_WORDS` words of one dtype: a zeroed buffer, its keys, which row is whose.

    Padding has a key of zero as well as words of zero: it mixes to zeros and adds nothing.
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
    """The digest in torch operators over pages of words; needs no kernel of our own.

    Tensors are cut into pieces, pieces of one dtype share pages. Holds two integers a word.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self._start = length_rows(tensors, device)
        self._pages = [_Page(*page, device) for page in _paginate(tensors)]
        most = max((page.words.numel() for page in self._pages), default=0)
        self._mixed = torch.empty(4, most, dtype=torch.int32, device=device)
        self._sums = torch.empty(NUM_COLUMNS, most // ROW_WORDS, dtype=torch.int32, device=device)

    def update(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write the rows of `tensors` to `out`."""
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
    """Pages of whole rows: consecutive pieces of one dtype, together at most `PAGE_WORDS`.

    Words 2**32 apart have another second factor, so they share no page.
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
            tensor=number,
            start=start,
            stop=stop,
            word=start * tensor.itemsize // WORD_BYTES,
            num_words=-(-(stop - start) * tensor.itemsize // WORD_BYTES),
            shape=tensor.shape if stop - start == tensor.numel() else None,
        )
