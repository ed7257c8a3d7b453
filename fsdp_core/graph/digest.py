"""A 128-bit digest of every tensor, position-sensitive, computed where the tensor lives.

    bytes of the logical elements, row-major
      -> 32-bit little-endian words w at index j, the last one padded with zero bytes
      -> (x, z) = mix(w, j), two 32-bit integers
      -> four lanes: sums of z, x*z, (x >> 16)*z and x*(z >> 16), modulo 2**32
      -> plus the number of bytes times one odd constant a lane

    mix(w, j):  x = w ^ (j*C1 + S1);      x ^= x >>> 16;  x *= M1;  x ^= x >>> 15
                z = x*M2 + (j*C2 + S2);   z ^= z >>> 16;  z *= M3;  z ^= z >>> 15

`>>>` shifts in zeros, `>>` the sign; j counts on in S1 and S2 past 2**32 words. Integer sums have no
order, so threads, pages and devices may add as they like: CPU (plain torch) and CUDA (one Triton
kernel, each byte read once) give the same bits. A fifth number counts non-finite elements in the
same pass.

What is known of it. (w, j) -> (x, z) is one to one within 2**32 words, and z is one to one in w, so
a change confined to one word, or another number of bytes, is always seen. Any other change is
missed only if its four lane sums all cancel. Measured over single-bit changes of zeros, ones and
Gaussian values, at consecutive and at strided indices: pairs of lane differences cancel as often as
random 32-bit integers would, so an accidental miss has odds of about 2**-128. It is no
cryptographic hash: a miss can be constructed.

Nothing here reads a value on the host or allocates by value, so a call can be captured into a graph.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

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

PAGE_WORDS = 1 << 16  # 256 KiB: a page and its temporaries stay in the caches
ROW_WORDS = 64  # a page row belongs to one tensor; also keeps every slot aligned for any dtype


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


@dataclass(frozen=True)
class Read:
    """A storage range that the digest reads: whose, where, how many bytes."""

    name: str
    address: int
    num_bytes: int


class _Plan(Protocol):
    def update(self, tensors: Sequence[Tensor], out: Tensor) -> None: ...
    def scratch(self) -> tuple[Tensor, ...]: ...


class Digester:
    """Digests a fixed list of tensors: same shapes, dtypes and device at every call.

    The tensors themselves are passed to each call and may have moved since the last one; what is
    prepared once are the integer tables, a page buffer (CPU) or the address table (CUDA). On CUDA a
    call inside a capture needs the addresses of the latest call outside it, else `RuntimeError`:
    a graph must not read a table that is rewritten later. One digester serves one stream.

    Args:
        tensors: plain strided tensors on one device; a DTensor's `to_local()`, not the DTensor.
        names: one a tensor, for messages and `reads`; by default their position.
        kernel: `auto` is `triton` on CUDA where Triton is installed, else `torch`.

    Raises:
        ValueError: dtype without a bit pattern, several devices, wrong number of names.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str] | None = None,
        *,
        kernel: Literal["auto", "torch", "triton"] = "auto",
    ) -> None:
        self.names = tuple(str(i) for i in range(len(tensors))) if names is None else tuple(names)
        if len(self.names) != len(tensors):
            raise ValueError(f"Expected {len(tensors)} names, got {len(self.names)}.")
        for name, tensor in zip(self.names, tensors, strict=True):
            _check_kind(name, tensor)
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise ValueError(f"Expected tensors of one device, got {sorted(map(str, devices))}.")
        self.device = devices.pop() if devices else torch.device("cpu")
        self._signature = tuple((t.shape, t.dtype) for t in tensors)
        with torch.no_grad():
            self._plan = _make_plan(tensors, self.device, kernel)

    def __call__(self, tensors: Sequence[Tensor], out: Tensor) -> None:
        """Write one row a tensor: four lanes, then the number of non-finite elements.

        Args:
            tensors: as many as at construction, of the same shapes, dtypes and device.
            out: int32 [num_tensors, 5], contiguous, on the tensors' device.

        Raises:
            ValueError: tensors or `out` are not as planned.
            RuntimeError: addresses differ from the prepared ones inside a CUDA capture.
        """
        if len(tensors) != len(self.names):
            raise ValueError(f"Expected {len(self.names)} tensors, got {len(tensors)}.")
        for name, tensor, planned in zip(self.names, tensors, self._signature, strict=True):
            if (tensor.shape, tensor.dtype) != planned or tensor.device != self.device:
                raise ValueError(
                    f"Expected {name} to be {planned[1]} {list(planned[0])} on {self.device}, "
                    f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}."
                )
        expected = (len(self.names), NUM_COLUMNS)
        if (
            out.shape != expected
            or out.dtype != torch.int32
            or out.device != self.device
            or not out.is_contiguous()
        ):
            raise ValueError(
                f"Expected out to be contiguous int32 {list(expected)} on {self.device}, "
                f"got {out.dtype} {list(out.shape)} on {out.device}."
            )
        with torch.no_grad():
            self._plan.update(tensors, out)

    def reads(self, tensors: Sequence[Tensor]) -> tuple[Read, ...]:
        """The storage of each non-empty tensor, for an address ledger to watch."""
        return tuple(
            Read(name, tensor.data_ptr(), tensor.untyped_storage().nbytes())
            for name, tensor in zip(self.names, tensors, strict=True)
            if tensor.numel()
        )

    def scratch(self) -> tuple[Tensor, ...]:
        """Tensors that this object owns and a captured call reads or writes; they never move."""
        return self._plan.scratch()


def digest_tensors(tensors: Sequence[Tensor], out: Tensor) -> None:
    """One-off digest: `Digester(tensors)(tensors, out)`. Not for a capture or a training loop."""
    Digester(tensors)(tensors, out)


def empty_rows(num_tensors: int, device: torch.device | str) -> Tensor:
    """An `out` tensor for `num_tensors` tensors: int32 [num_tensors, 5], zeros."""
    return torch.zeros(num_tensors, NUM_COLUMNS, dtype=torch.int32, device=device)


def digest_hex(rows: Tensor) -> tuple[str, list[int]]:
    """Rows on the host as text: 32 lower-case hex characters a tensor, concatenated, and counts.

    Args:
        rows: int32 [num_tensors, 5] on the CPU.

    Returns:
        The digests of all tensors as one string, and the number of non-finite elements of each.
    """
    if rows.dtype != torch.int32 or rows.dim() != 2 or rows.shape[1] != NUM_COLUMNS:
        raise ValueError(f"Expected int32 [n, {NUM_COLUMNS}], got {rows.dtype} {list(rows.shape)}.")
    lanes = rows[:, :NUM_LANES].contiguous().numpy()
    return lanes.astype(">i4").tobytes().hex(), [int(n) for n in rows[:, NUM_LANES].tolist()]


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


def _check_kind(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or hasattr(tensor, "to_local"):
        raise ValueError(f"Expected {name} to be a plain strided tensor, got {type(tensor)}.")
    if tensor.dtype not in PATTERNS:
        legal = ", ".join(str(dtype) for dtype in PATTERNS)
        raise ValueError(f"Expected {name} to be one of {legal}; got {tensor.dtype}.")


def _make_plan(tensors: Sequence[Tensor], device: torch.device, kernel: str) -> _Plan:
    if sys.byteorder != "little":
        raise NotImplementedError("Expected a little-endian machine.")
    if kernel == "auto":
        kernel = "triton" if device.type == "cuda" and _has_triton() else "torch"
    if kernel == "triton":
        # Imported late: the CPU build of torch comes without Triton.
        from fsdp_core.graph.digest_triton import TritonPlan

        return TritonPlan(tensors, device)
    return TorchPlan(tensors, device)


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401  (asking whether it is there)
    except ImportError:
        return False
    return True


# --- plain torch ------------------------------------------------------------------------------


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
