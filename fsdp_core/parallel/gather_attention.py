"""Causal attention over a context axis, keys and values of all ranks gathered on each.

    forward     all-gather k, v      each half of the queries attends to the keys up to its end
    backward    all-gather k, v      dk, dv of all keys      reduce-scatter

Simpler than the ring and with one collective a pass to overlap or wait for, against memory for the
keys and values of the whole sequence. They are gathered again in backward, not kept.
"""

from typing import Any

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

# torch 2.13 renamed both; the old names warn there and the new ones are absent before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_rows(k: torch.Tensor, v: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """[B, T, ...] of each rank -> [B, size * T, ...], rank after rank."""
    if axis.size == 1:
        return [k, v]
    mine = pack_tensors((k, v))
    everyone = mine.new_empty(axis.size * mine.numel())
    _all_gather(everyone, mine, group=axis.group)
    by_rank = unpack_tensors(everyone.view(axis.size, -1), (k, v))
    return [t.transpose(0, 1).flatten(1, 2) for t in by_rank]


def scatter_sum(dk: torch.Tensor, dv: torch.Tensor, axis: Axis) -> list[torch.Tensor]:
    """[B, size * T, ...], rank after rank -> this rank's [B, T, ...], summed over the ranks."""
    if axis.size == 1:
        return [dk, dv]
    parts = [t.unflatten(1, (axis.size, -1)).transpose(0, 1) for t in (dk, dv)]
    everyone = torch.cat([part.flatten(1) for part in parts], dim=1)
    mine = everyone.new_empty(everyone.shape[1])
    _reduce_scatter(mine, everyone.flatten(), group=axis.group)
    return unpack_tensors(mine, [part[0] for part in parts])


class _Gather:
    """See the module's docstring."""

    def forward(self, qkv: Three, task: Task) -> Pair:
        q, k, v = qkv
        k, v = gather_rows(k, v, task.axis)
        first, *rest = (task.block_forward(b, (q, k, v)) for b in task.plan.gather_blocks())
        for part in rest:
            first = merge(first, part)
        return first

    def backward(self, grad_out: torch.Tensor, qkv: Three, out_lse: Pair, task: Task) -> Three:
        q, k, v = qkv
        k, v = gather_rows(k, v, task.axis)
        shares = (
            task.block_backward(block, grad_out, (q, k, v), out_lse)
            for block in task.plan.gather_blocks()
        )
        dq, dk, dv = next(shares)
        for more_dq, more_dk, more_dv in shares:
            dq, dk, dv = dq + more_dq, dk + more_dk, dv + more_dv
        dk, dv = scatter_sum(dk, dv, task.axis)
        return dq, dk, dv


def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    plan: ContextPlan,
    axis: Axis,
    kernel: BlockKernel,
    scale: float,
) -> torch.Tensor:
    """Causal attention with keys and values gathered; `plan` must be made with `prefixes=True`.

    Args:
        q, k, v: this rank's part, [B, T, N, D], [B, T, K, D], [B, T, K, E]; N a multiple of K.

    Returns:
        [B, T, N, E].

    Raises:
        ValueError: shapes or dtypes that no attention has, or a plan for other tokens or ranks.
    """
    return attend((q, k, v), _Gather(), Task(plan, axis, kernel, scale))
