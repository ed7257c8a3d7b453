"""Causal attention over a context axis, keys and values travelling from rank to rank.

    step       0            1              2            ...
    rank r     own keys     those of r-1   those of r-2

At each step a rank sends on the keys and values that it works with and receives the next ones
meanwhile; outputs are joined as they come (Liu, Zaharia and Abbeel, 2023). In backward keys and
values make the same round, and their gradients follow one step behind, gathering a share on every
rank, until the last hop brings them home.

A hop is one all-to-all with a single neighbour to send to and one to receive from: on NCCL a
grouped send and receive, which a graph can hold, and no order of two calls to deadlock on.
"""

import torch
import torch.distributed as dist

from fsdp_core.parallel.attention_block import (
    BlockKernel,
    Pair,
    Task,
    Three,
    attend,
    merge,
    pack_tensors,
    unpack_tensors,
)
from fsdp_core.parallel.context import ContextPlan
from fsdp_core.parallel.mesh import Axis


class Hop:
    """A tensor on its way to the next rank of an axis, while that of the rank before arrives."""

    def __init__(self, sent: torch.Tensor, axis: Axis) -> None:
        to_ranks, from_ranks = [0] * axis.size, [0] * axis.size
        to_ranks[(axis.rank + 1) % axis.size] = sent.numel()
        from_ranks[(axis.rank - 1) % axis.size] = sent.numel()
        # Kept until the hop is over: its memory must not be given out again before.
        self._sent = sent
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(
            self._received, sent, from_ranks, to_ranks, group=axis.group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """What has arrived; on a GPU the stream waits, not the host."""
        assert self._work is not None
        self._work.wait()
        return self._received


def source_of(axis: Axis, step: int) -> int:
    """Whose keys this rank works with at a step."""
    return (axis.rank - step) % axis.size


class _Ring:
    """See the module's docstring."""

    def forward(self, qkv: Three, task: Task) -> Pair:
        q, k, v = qkv
        plan, axis = task.plan, task.axis
        joined = None
        travelling = pack_tensors((k, v)) if axis.size > 1 else None
        for step in range(axis.size):
            hop = Hop(travelling, axis) if travelling is not None and step + 1 < axis.size else None
            part = task.block_forward(plan.ring_block(source_of(axis, step)), (q, k, v))
            joined = part if joined is None else merge(joined, part)
            if hop is not None:
                travelling = hop.wait()
                k, v = unpack_tensors(travelling, (k, v))
        assert joined is not None
        return joined

    def backward(self, grad_out: torch.Tensor, qkv: Three, out_lse: Pair, task: Task) -> Three:
        q, k, v = qkv
        plan, axis = task.plan, task.axis
        dq, dk, dv = task.block_backward(plan.ring_block(axis.rank), grad_out, qkv, out_lse)
        if axis.size == 1:
            return dq, dk, dv
        travelling = pack_tensors((k, v))
        gathering = pack_tensors((dk, dv))
        for step in range(1, axis.size):
            hop, grad_hop = Hop(travelling, axis), Hop(gathering, axis)
            travelling = hop.wait()
            k, v = unpack_tensors(travelling, (k, v))
            block = plan.ring_block(source_of(axis, step))
            more_dq, dk, dv = task.block_backward(block, grad_out, (q, k, v), out_lse)
            dq = dq + more_dq
            gathering = grad_hop.wait() + pack_tensors((dk, dv))
        dk, dv = unpack_tensors(Hop(gathering, axis).wait(), (dk, dv))
        return dq, dk, dv


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: ContextPlan,
    axis: Axis,
    kernel: BlockKernel,
    scale: float,
) -> torch.Tensor:
    """Causal attention with keys and values sent round the axis. `attend` says more.

    Args:
        q, k, v: this rank's part, [B, T, N, D], [B, T, K, D], [B, T, K, E]; N a multiple of K.

    Returns:
        [B, T, N, E].

    Raises:
        ValueError: shapes or dtypes that no attention has, or a plan for other tokens or ranks.
    """
    return attend((q, k, v), _Ring(), Task(plan, axis, kernel, scale))
