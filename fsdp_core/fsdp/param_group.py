"""One unit's parameters in flat buffers, and the collectives on them. Knows no modules' hooks.

    buffer         elements            dtype     lives
    main_weight    shard               float32   always; the optimizer's parameters are views of it
    model_weight   shard               compute   always; is main_weight where the dtypes agree
    gathered       full                compute   from the pool, between unshard and reshard
    grads          full                reduce    from the pool, from first gradient to reduction
    main_grad      shard               float32   always; the optimizer's gradients are views of it

With strategy `no_shard` a shard is the full buffer, `gathered` is `model_weight`, and the reduction
is an all-reduce.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.device import Device
from fsdp_core.fsdp.collectives import all_gather, reduce_scatter
from fsdp_core.fsdp.layout import FlatLayout, build_layout
from fsdp_core.fsdp.pool import Key, Pool


@dataclass(frozen=True)
class Owned:
    """Where a module holds a parameter. The parameter itself is not kept: it has its full size."""

    module: nn.Module
    attribute: str

    @property
    def current(self) -> nn.Parameter:
        """What the module holds now: the wrapped parameter, later one of the group's."""
        parameter = self.module._parameters[self.attribute]
        assert parameter is not None
        return parameter


@dataclass(frozen=True)
class GroupPolicy:
    """What a group needs to know: sharded or not, and three dtypes are float32 or lower."""

    sharded: bool
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype


class ParamGroup:
    """Flat buffers of one unit on one rank, over one process group."""

    def __init__(
        self,
        owned: list[Owned],
        *,
        group: dist.ProcessGroup,
        device: Device,
        pool: Pool,
        policy: GroupPolicy,
    ) -> None:
        self.owned, self.policy = owned, policy
        self.pool = pool
        self._group, self._device = group, device
        self.num_ranks = dist.get_world_size(group)
        self.shard_index = dist.get_rank(group) if policy.sharded else 0
        shards = self.num_ranks if policy.sharded else 1
        self.layout: FlatLayout = build_layout([tuple(o.current.shape) for o in owned], shards)
        self._gather_key, self._grad_key = Key(id(self), "gather"), Key(id(self), "grad")
        self._make_persistent_buffers()
        self._gathered: torch.Tensor | None = None
        self._full_grad: torch.Tensor | None = None
        self._grad_home: torch.Tensor | None = None
        self._grad_views: list[torch.Tensor] = []
        self.is_unsharded = False
        self.names = [o.attribute for o in owned]
        empty = torch.empty(0, dtype=policy.compute_dtype, device=device.torch_device)
        self.unsharded = [nn.Parameter(empty.clone()) for _ in owned]
        self.sharded = [self._sharded_parameter(i) for i in range(len(owned))]
        if not policy.sharded:
            self._bind_unsharded_views(self.model_weight)
        self._register(self.sharded)

    def _make_persistent_buffers(self) -> None:
        numel, device = self.layout.shard_numel, self._device.torch_device
        self.main_weight = torch.zeros(numel, dtype=torch.float32, device=device)
        self.main_grad = torch.zeros(numel, dtype=torch.float32, device=device)
        for index, owned in enumerate(self.owned):
            piece = self.layout.local_piece(index, self.shard_index)
            if piece.numel:
                source = owned.current.detach()
                rows = source[piece.row_start : piece.row_stop] if source.dim() else source
                self._piece(self.main_weight, index).copy_(rows.reshape(-1))
        same = self.policy.compute_dtype == torch.float32
        self.model_weight = (
            self.main_weight if same else self.main_weight.to(self.policy.compute_dtype)
        )

    def _piece(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        piece = self.layout.local_piece(index, self.shard_index)
        return shard[piece.offset : piece.offset + piece.numel]

    def _local_rows(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of parameter `index` as a view of `shard`."""
        piece = self.layout.local_piece(index, self.shard_index)
        shape = self.layout.slots[index].shape
        rows = (piece.row_stop - piece.row_start, *shape[1:]) if shape else (piece.numel,)
        return self._piece(shard, index).view(rows)

    def _sharded_parameter(self, index: int) -> nn.Parameter:
        parameter = nn.Parameter(self._local_rows(self.main_weight, index))
        # An empty piece keeps grad None: fused optimizers must never see zero-element tensors.
        if parameter.numel():
            parameter.grad = self._local_rows(self.main_grad, index)
        return parameter

    def _view(self, full: torch.Tensor, index: int) -> torch.Tensor:
        slot = self.layout.slots[index]
        return full[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def _bind_unsharded_views(self, full: torch.Tensor) -> None:
        """Point the unsharded parameters into a full buffer; they stay bound while it is the same.

        `.data` keeps the buffer's version counter out of autograd: gathering again into a buffer
        that saved views share is no in-place change of a parameter.
        """
        for index, parameter in enumerate(self.unsharded):
            parameter.data = self._view(full, index)

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for owned, parameter in zip(self.owned, parameters, strict=True):
            owned.module._parameters[owned.attribute] = parameter

    def unshard(self, stream: Any) -> None:
        """Gather the full parameters on `stream`; the caller orders compute after it."""
        if self.is_unsharded:
            return
        if self.policy.sharded:
            total, dtype = self.layout.total_numel, self.policy.compute_dtype
            full = self.pool.acquire(self._gather_key, total, dtype, stream)
            with self._device.on(stream):
                all_gather(full, self.model_weight, self._group)
            if full is not self._gathered:
                self._gathered = full
                self._bind_unsharded_views(full)
        self._register(self.unsharded)
        self.is_unsharded = True

    def reshard(self, stream: Any) -> None:
        """Give the gathered buffer back after the work issued on `stream` so far."""
        if not self.is_unsharded:
            return
        if self.policy.sharded:
            self.pool.release(self._gather_key, stream)
        self._register(self.sharded)
        self.is_unsharded = False

    def take_grad(self, index: int, stream: Any) -> None:
        """Move one unsharded parameter's gradient into the full gradient buffer."""
        parameter = self.unsharded[index]
        if parameter.grad is None:
            raise RuntimeError(f"Expected a gradient of {self.names[index]}, got none.")
        if self._full_grad is None:
            total, dtype = self.layout.total_numel, self.policy.reduce_dtype
            self._full_grad = full = self.pool.acquire(self._grad_key, total, dtype, stream)
            if full is not self._grad_home:
                self._grad_home = full
                self._grad_views = [self._view(full, i) for i in range(len(self.owned))]
            # Padding holds what the buffer's last user left there; the reduction must add zeros.
            for start, stop in self.layout.gaps:
                full[start:stop].zero_()
        self._grad_views[index].copy_(parameter.grad)
        parameter.grad = None

    @property
    def has_grads(self) -> bool:
        """Whether gradients wait to be reduced."""
        return self._full_grad is not None

    def reduce(self, stream: Any) -> None:
        """Average the full gradients over the ranks on `stream` and add them to main_grad."""
        full = self._full_grad
        if full is None:
            return
        with self._device.on(stream):
            if self.policy.sharded:
                # An output of its own: reducing into a slice of the input lets a collective
                # overwrite what other ranks have yet to read.
                reduced = torch.empty(self.layout.shard_numel, dtype=full.dtype, device=full.device)
                reduce_scatter(reduced, full, self._group)
            else:
                reduced = full
                dist.all_reduce(reduced, group=self._group)
            self.main_grad.add_(reduced, alpha=1.0 / self.num_ranks)

    def release_grad(self, stream: Any) -> None:
        """Give the full gradient buffer back; `stream` must come after the reduction."""
        self._full_grad = None
        self.pool.release(self._grad_key, stream)

    def zero_grad(self) -> None:
        """Zero main_grad in place; gradient objects and addresses stay."""
        self.main_grad.zero_()

    def refresh_model_weight(self) -> None:
        """Cast main_weight to the compute dtype, once for the whole unit."""
        if self.model_weight is not self.main_weight:
            self.model_weight.copy_(self.main_weight)
