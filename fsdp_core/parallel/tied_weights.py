"""A weight that the first and the last stage of a pipeline share, such as embedding and head.

Each end has a parameter of its own, which starts with the same values, gets the sum of both ends'
gradients, and so stays the same. Sharded parameters are summed row by row, so both ends must hold
the same rows: wrap the module of the weight as a unit of its own on both.
"""

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_core.parallel.mesh import Axis
from fsdp_core.parallel.pipeline_p2p import swap


class TiedWeights:
    """This rank's ends of one shared weight: none, its first stage's, its last one's, or both.

    Raises:
        ValueError: more parameters than this rank has ends.
    """

    def __init__(self, axis: Axis, parameters: Sequence[nn.Parameter]) -> None:
        self.axis = axis
        self.parameters = list({id(parameter): parameter for parameter in parameters}.values())
        ends = (axis.rank == 0) + (axis.rank == axis.size - 1)
        if len(self.parameters) > ends:
            raise ValueError(
                f"Expected tied weights on the first and last rank of {axis.name}, one on each, "
                f"got {len(self.parameters)} on rank {axis.rank} of {axis.size}."
            )

    def describe(self) -> str:
        """Shapes, rows and checksums of this rank's ends, to compare with the other's."""
        return "; ".join(map(_describe, self.parameters))

    def check(self, described: Sequence[str]) -> None:
        """Compare the ends, given what each rank of the axis has described.

        Raises:
            ValueError: one end is missing, frozen, or has another shape, other rows or values.
        """
        ends = described[0].split("; ") if len(described) == 1 else [described[0], described[-1]]
        if len(set(ends)) > 1:
            raise ValueError(
                "Expected the tied weight to be the same at both ends, and rows of it on the same "
                f"ranks, got first stage: {ends[0] or None}, last stage: {ends[-1] or None}."
            )

    def sum_gradients(self) -> None:
        """Give both ends the sum of their gradients, with the same bits; both ranks call it.

        Raises:
            RuntimeError: a parameter has no gradient.
            TransferFailed: the other end did not take part within the timeout of the group.
        """
        axis = self.axis
        grads = [_rows(_gradient(p)) for p in self.parameters if p.requires_grad]
        if axis.size == 1 and len(grads) == 2:
            grads[1].copy_(grads[0].add_(grads[1]))
        elif axis.size > 1 and grads:
            grads[0].add_(swap(axis, grads[0].contiguous(), axis.size - 1 - axis.rank))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a sharded tensor; any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.grad is not None:
        return parameter.grad
    rows = _rows(parameter.detach())
    if rows.numel():
        raise RuntimeError("Expected a gradient of the tied weight at both ends, got none.")
    return rows  # a rank that holds no rows has no gradient


def _describe(parameter: nn.Parameter) -> str:
    rows = _rows(parameter.detach()).contiguous()
    checksum = _checksum(rows)
    kind = "trained" if parameter.requires_grad else "frozen"
    shapes = f"{list(parameter.shape)} {rows.dtype}, {list(rows.shape)} here"
    return f"{kind} {shapes}, checksum {checksum}"


_BLOCK_BYTES = 2**22
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
_HIGH_BITS = 29


def _checksum(rows: torch.Tensor) -> int:
    """Of every byte and its place: a sum of bytes alone would not see rows in another order."""
    flat = rows.reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=rows.device)
    for start in range(0, flat.numel(), _BLOCK_BYTES):
        block = flat[start : start + _BLOCK_BYTES]
        place = torch.arange(start + 1, start + 1 + len(block), device=rows.device) * _ODD
        total += (block * (place ^ (place >> _HIGH_BITS))).sum()
    return int(total)
