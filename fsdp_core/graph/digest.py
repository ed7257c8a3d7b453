"""A 128-bit digest of every tensor, position-sensitive, computed where the tensor lives.

    digest_words    what the bits are: the definition, and what is known of its misses
    digest_torch    plain torch operators, every device
    digest_triton   one CUDA kernel over many tensors, each byte read once
    digest          this file: a planned digest of a fixed list of tensors, and its text

Both makers give the same bits. A call reads no value on the host and allocates nothing by value, so
it can be captured into a graph.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fsdp_core.graph.digest_torch import TorchPlan
from fsdp_core.graph.digest_words import NUM_COLUMNS, NUM_LANES, PATTERNS

__all__ = ["NUM_COLUMNS", "Digester", "Read", "digest_hex", "digest_tensors", "empty_rows"]


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
        """Write one row a tensor: four lanes, then 1 if any element is not finite, else 0.

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
    """Rows on the host as text: 32 lower-case hex characters a tensor, concatenated, and flags.

    Args:
        rows: int32 [num_tensors, 5] on the CPU.

    Returns:
        The digests of all tensors as one string, and the flag of non-finite elements of each.
    """
    if rows.dtype != torch.int32 or rows.dim() != 2 or rows.shape[1] != NUM_COLUMNS:
        raise ValueError(f"Expected int32 [n, {NUM_COLUMNS}], got {rows.dtype} {list(rows.shape)}.")
    lanes = rows[:, :NUM_LANES].contiguous().numpy()
    return lanes.astype(">i4").tobytes().hex(), [int(n) for n in rows[:, NUM_LANES].tolist()]


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
