"""A 128-bit digest of every tensor, position-sensitive, computed where the tensor lives.

CPU (plain torch) and CUDA (one Triton kernel, each byte read once) give the same bits;
`digest_torch` says which. Any change there changes every digest.
"""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fsdp_core.graph.digest_torch import NUM_COLUMNS, NUM_LANES, PATTERNS, TorchPlan

__all__ = ["NUM_COLUMNS", "NUM_LANES", "Digester", "digest_hex", "digest_tensors", "empty_rows"]


class Digester:
    """Digests a fixed list of tensors: same shapes, dtypes and device at every call.

    The tensors are passed to each call and may have moved since the last one. On CUDA a call inside
    a capture needs the addresses of the latest call outside it, else `RuntimeError`: a graph must
    not read a table that is rewritten later. One digester serves one stream.


    `ValueError` for a dtype without a bit pattern, several devices, or a wrong number of names.

    tensors: plain strided tensors on one device; a DTensor's `to_local()`, not the DTensor.
    names: one a tensor, for messages; by default their position.
    kernel: `auto` is `triton` on CUDA where Triton is installed, else `torch`.
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
        """Write one row a tensor: four lanes, then 1 if any element is not finite, else 0. `out` is
        int32 [num_tensors, 5], contiguous, on the tensors' device; `ValueError` if it or the
        tensors are not as planned.
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
        got = (out.shape, out.dtype, out.device, out.is_contiguous())
        if got != (expected, torch.int32, self.device, True):
            raise ValueError(
                f"Expected out to be contiguous int32 {list(expected)} on {self.device}, "
                f"got {out.dtype} {list(out.shape)} on {out.device}."
            )
        with torch.no_grad():
            self._plan.update(tensors, out)

    def scratch(self) -> tuple[Tensor, ...]:
        """Tensors that this object owns and a captured call reads or writes; they never move."""
        return tuple(self._plan.scratch())


def digest_tensors(tensors: Sequence[Tensor], out: Tensor) -> None:
    """One-off digest: `Digester(tensors)(tensors, out)`. Not for a capture or a training loop."""
    Digester(tensors)(tensors, out)


def empty_rows(num_tensors: int, device: torch.device | str) -> Tensor:
    """An `out` tensor for `num_tensors` tensors: int32 [num_tensors, 5], zeros."""
    return torch.zeros(num_tensors, NUM_COLUMNS, dtype=torch.int32, device=device)


def digest_hex(rows: Tensor) -> tuple[str, list[int]]:
    """Rows on the host, int32 [num_tensors, 5], as text and flags. Returns 32 lower-case hex
    characters a tensor, concatenated, and each one's non-finite flag.
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


def _make_plan(tensors: Sequence[Tensor], device: torch.device, kernel: str) -> Any:
    if sys.byteorder != "little":
        raise NotImplementedError("Expected a little-endian machine.")
    if kernel == "auto":
        installed = importlib.util.find_spec("triton") is not None
        kernel = "triton" if device.type == "cuda" and installed else "torch"
    if kernel == "torch":
        return TorchPlan(tensors, device)
    # Late: the CPU build of torch comes without Triton.
    from fsdp_core.graph.digest_triton import TritonPlan

    return TritonPlan(tensors, device)
