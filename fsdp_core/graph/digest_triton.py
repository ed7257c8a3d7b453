"""The digest of `digest_torch` as one Triton kernel over many tensors.

    tensors -> chunks of up to 1 MiB, each with its address, in one table on the device
    program -> one chunk: loads words, mixes, sums lanes in registers, five atomics at the end

Integer addition has no order, so the atomics are deterministic. One launch covers every tensor of
one bit pattern. What cannot be read in place as 32-bit words is copied to a staging buffer first,
inside the call. Vector loads need 16-byte addresses: a tensor that starts elsewhere gets a first
chunk of up to three words, which the masked path reads.

What makes it fast: few instructions a word (fp32: 17 on the integer pipes) and few registers (32).
Hence a tile is [words / 4, 4], a thread's 16 bytes are summed before they meet an accumulator; the
key is stepped, not computed; and floats are tested as word * 0.0, which is NaN if the word is not
finite.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsdp_core.graph import digest_torch as definition
from fsdp_core.graph.digest_torch import (
    INT_OF_SIZE,
    NUM_COLUMNS,
    PATTERNS,
    WORD_BYTES,
    Pattern,
    length_rows,
)

REST_WORDS = 512  # a tile of what whole tiles leave over
VECTOR_BYTES = 16
INDEX_SPAN = 1 << 32  # words that share the high half of their index
TABLE_COLUMNS = 5  # address, first word index, whole words, bytes after them, row of out

# Triton reads a module's globals only as constexpr.
_C1, _S1 = tl.constexpr(definition.C1), tl.constexpr(definition.S1)
_M1, _M2, _M3 = map(tl.constexpr, (definition.M1, definition.M2, definition.M3))
_HIGH = tl.constexpr(definition.HIGH)
_TABLE_COLUMNS, _OUT_COLUMNS = tl.constexpr(TABLE_COLUMNS), tl.constexpr(NUM_COLUMNS)
_VECTOR = tl.constexpr(VECTOR_BYTES // WORD_BYTES)

# Words, or their halves as bfloat16, that are not finite exactly where a float32 would not be.
_AS_FLOAT = (PATTERNS[torch.float32], PATTERNS[torch.bfloat16])


@dataclass(frozen=True)
class Launch:
    """Shape of a launch: words a tile, warps a program, words a program, tiles in flight.
    `num_stages` of 1 means no pipeline through shared memory.
    """

    tile_words: int = 4096
    num_warps: int = 8
    chunk_words: int = 1 << 18
    num_stages: int = 3


DEFAULT_LAUNCH = Launch()


@triton.jit
def _mix(word, key, factor):  # type: ignore[no-untyped-def]
    """(x, y, z) of uint32 words with their keys, by the definition."""
    x = word ^ key
    x = (x ^ (x >> 16)) * tl.cast(_M1, tl.uint32)
    x = x ^ (x >> 15)
    y = x * factor + key
    y = y ^ (y >> 16)
    z = y * tl.cast(_M3, tl.uint32)
    z = z ^ (z >> 15)
    return x, y, z


@triton.jit
def _nonfinite(  # type: ignore[no-untyped-def]
    word, index, FIELDS: tl.constexpr, MASK: tl.constexpr, VALUE: tl.constexpr,
    HIGH_WORD_ONLY: tl.constexpr, AS_FLOAT: tl.constexpr,
):  # fmt: skip
    """Sums over the last dim: zero if all fields of the words are finite; else more, or NaN."""
    if AS_FLOAT:
        found = tl.sum(word.to(tl.float32, bitcast=True) * 0.0, -1)
        if FIELDS == 2:
            found += tl.sum((word << 16).to(tl.float32, bitcast=True) * 0.0, -1)
        return found
    else:
        count = tl.zeros_like(word)
        for i in tl.static_range(FIELDS):
            field = (word >> (i * (32 // FIELDS))) & MASK
            count += (field == VALUE).to(tl.uint32)
        if HIGH_WORD_ONLY:
            count = count * (index.to(tl.uint32) & 1)
        return tl.sum(count, -1)


@triton.jit
def _load_rest(address, num_words, num_tail, offset):  # type: ignore[no-untyped-def]
    """Words at `offset` of a chunk and whether they exist; the last may be a partial one. Casts of
    its own: the alignment that whole tiles claim does not hold here.
    """
    words = address.to(tl.pointer_type(tl.uint32))
    word = tl.load(words + offset, mask=offset < num_words, other=0)
    after = address.to(tl.pointer_type(tl.uint8)) + num_words.to(tl.int64) * 4
    for i in tl.static_range(3):
        here = (offset == num_words) & (i < num_tail)
        byte = tl.load(after + i + tl.zeros_like(offset), mask=here, other=0)
        word = word | (byte.to(tl.uint32) << (8 * i))
    return word, (offset < num_words) | ((offset == num_words) & (num_tail > 0))


@triton.jit
def _add_row(target, sum0, sum1, sum2, sum3, found):  # type: ignore[no-untyped-def]
    """Add the sums of a program to the tensor's row."""
    tl.atomic_add(target, tl.sum(sum0, 0).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_add(target + 1, tl.sum(sum1, 0).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_add(target + 2, tl.sum(sum2, 0).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_add(target + 3, tl.sum(sum3, 0).to(tl.int32, bitcast=True), sem="relaxed")
    # NaN differs from zero as well.
    tl.atomic_max(target + 4, (found != 0).to(tl.int32), sem="relaxed")


@triton.jit
def _digest_chunks(  # type: ignore[no-untyped-def]
    table, out, FIELDS: tl.constexpr, MASK: tl.constexpr, VALUE: tl.constexpr,
    HIGH_WORD_ONLY: tl.constexpr, AS_FLOAT: tl.constexpr, TILE: tl.constexpr,
    REST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk a program: whole tiles in a loop, five atomics, then what is left, if any."""
    entry = table + tl.program_id(0) * _TABLE_COLUMNS
    address = tl.load(entry)
    first = tl.load(entry + 1)
    num_words = tl.load(entry + 2).to(tl.int32)
    num_whole = num_words // TILE * TILE
    aligned = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
    vector = tl.arange(0, TILE // _VECTOR) * _VECTOR
    within = tl.arange(0, _VECTOR)
    lane = vector[:, None] + within[None, :]
    low = first.to(tl.uint32)
    factor = tl.cast(_M2, tl.uint32) + (first >> 32).to(tl.uint32) * tl.cast(_HIGH, tl.uint32)
    # The key of each vector's first word; its others are constants away.
    c1 = tl.cast(_C1, tl.uint32)
    key = (low + vector.to(tl.uint32)) * c1 + tl.cast(_S1, tl.uint32)
    steps = within.to(tl.uint32) * c1

    target = out + tl.load(entry + 4) * _OUT_COLUMNS
    sum0 = tl.zeros([TILE // _VECTOR], tl.uint32)
    sum1 = tl.zeros([TILE // _VECTOR], tl.uint32)
    sum2 = tl.zeros([TILE // _VECTOR], tl.uint32)
    sum3 = tl.zeros([TILE // _VECTOR], tl.uint32)
    bad = tl.zeros([TILE // _VECTOR], tl.float32 if AS_FLOAT else tl.uint32)
    for start in tl.range(0, num_whole, TILE, num_stages=STAGES):
        word = tl.load(aligned + start + lane)
        x, y, z = _mix(word, key[:, None] + steps[None, :], factor)
        sum0 += tl.sum(z, 1)
        sum1 += tl.sum(x * z, 1)
        sum2 += tl.sum(x * y, 1)
        sum3 += tl.sum(y * z, 1)
        bad += _nonfinite(word, low + lane, FIELDS, MASK, VALUE, HIGH_WORD_ONLY, AS_FLOAT)
        key += tl.cast(TILE, tl.uint32) * c1
    _add_row(target, sum0, sum1, sum2, sum3, tl.sum(bad, 0))

    # In tiles of one row, and apart: its registers would be the loop's above.
    num_tail = tl.load(entry + 3).to(tl.int32)
    for start in tl.range(num_whole, num_words + (num_tail > 0).to(tl.int32), REST, num_stages=1):
        offset = start + tl.arange(0, REST)
        word, present = _load_rest(address, num_words, num_tail, offset)
        index = low + offset.to(tl.uint32)
        x, y, z = _mix(word, index * c1 + tl.cast(_S1, tl.uint32), factor)
        # Absent words are zero, which is finite; as zeros they add nothing to the lanes either.
        x = tl.where(present, x, tl.zeros_like(x))
        y = tl.where(present, y, tl.zeros_like(y))
        z = tl.where(present, z, tl.zeros_like(z))
        found = _nonfinite(word, index, FIELDS, MASK, VALUE, HIGH_WORD_ONLY, AS_FLOAT)
        _add_row(target, z, x * z, x * y, y * z, found)


class TritonPlan:
    """Address table and staging buffers for the kernel; one launch a bit pattern. The table of a
    captured call is kept for ever: its graph reads it at every replay.
    """

    def __init__(
        self, tensors: Sequence[Tensor], device: torch.device, launch: Launch = DEFAULT_LAUNCH
    ) -> None:
        self._device = device
        self._launch = launch
        self._start = length_rows(tensors, device)
        self._staged: dict[int, Tensor] = {}
        self._addresses: tuple[int, ...] = ()
        self._tables: dict[Pattern, Tensor] = {}
        self._captured: list[dict[Pattern, Tensor]] = []
        self._prepare(tensors)

    def update(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write the rows of `tensors` to `out`, on the current stream."""
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._locate(tensors) != self._addresses:
            if capturing:
                raise RuntimeError(
                    "Expected the addresses of the last call outside the capture: call the "
                    "digester once on the tensors to be captured before capturing."
                )
            self._prepare(tensors)
        if capturing and not any(tables is self._tables for tables in self._captured):
            self._captured.append(self._tables)
        for i, buffer in self._staged.items():
            buffer.copy_(_as_integers(tensors[i]))
        out.copy_(self._start)
        launch = self._launch
        for pattern, table in self._tables.items():
            _digest_chunks[(table.shape[0],)](
                table, out, FIELDS=pattern.fields, MASK=pattern.mask, VALUE=pattern.value,
                HIGH_WORD_ONLY=pattern.high_word_only, AS_FLOAT=pattern in _AS_FLOAT,
                TILE=launch.tile_words, REST=REST_WORDS, STAGES=launch.num_stages,
                num_warps=launch.num_warps,
            )  # fmt: skip

    def scratch(self) -> tuple[Tensor, ...]:
        return (self._start, *self._tables.values(), *self._staged.values())

    def _locate(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """Where the kernel reads each tensor; -1 of one that needs a buffer and has none yet."""
        addresses = []
        for i, tensor in enumerate(tensors):
            if i in self._staged:
                addresses.append(self._staged[i].data_ptr())
            else:
                addresses.append(-1 if _needs_staging(tensor) else tensor.data_ptr())
        return tuple(addresses)

    def _prepare(self, tensors: Sequence[Tensor]) -> None:
        for i, tensor in enumerate(tensors):
            if i not in self._staged and _needs_staging(tensor):
                self._staged[i] = torch.empty_like(
                    _as_integers(tensor), memory_format=torch.contiguous_format
                )
        self._addresses = self._locate(tensors)
        rows: dict[Pattern, list[tuple[int, ...]]] = {}
        for i, (tensor, address) in enumerate(zip(tensors, self._addresses, strict=True)):
            rows.setdefault(PATTERNS[tensor.dtype], []).extend(
                _chunks(i, address, tensor.nbytes, self._launch.chunk_words)
            )
        self._tables = {
            pattern: self._upload(torch.tensor(entries, dtype=torch.int64))
            for pattern, entries in rows.items()
            if entries
        }

    def _upload(self, table: Tensor) -> Tensor:
        if self._device.type != "cuda":
            return table
        # Pinned, so that a table rebuilt in mid-run does not synchronise; the pinned block is
        # kept back by its allocator until the copy is done.
        return table.pin_memory().to(self._device, non_blocking=True)


def _as_integers(tensor: Tensor) -> Tensor:
    """A view as integers of the elements' size: not every dtype can be copied."""
    return tensor.detach().view(INT_OF_SIZE[tensor.itemsize])


def _needs_staging(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (
        not tensor.is_contiguous() or tensor.data_ptr() % WORD_BYTES != 0
    )


def _chunks(row: int, address: int, num_bytes: int, chunk_words: int) -> Iterator[tuple[int, ...]]:
    """Table entries of one tensor: address, first word index, whole words, tail bytes, row. Cut at
    16-byte addresses and at multiples of 2**32 words, so that a chunk's high index is one.
    """
    num_words, tail = divmod(num_bytes, WORD_BYTES)
    word = 0
    while word < num_words:
        here = address + word * WORD_BYTES
        most = min(chunk_words, INDEX_SPAN - word % INDEX_SPAN)
        if here % VECTOR_BYTES:
            most = min(most, (VECTOR_BYTES - here % VECTOR_BYTES) // WORD_BYTES)
        count = min(most, num_words - word)
        last = word + count == num_words
        yield here, word, count, tail if last else 0, row
        word += count
    if not num_words and tail:
        yield address, 0, 0, tail, row
