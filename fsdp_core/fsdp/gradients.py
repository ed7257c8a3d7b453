"""The gradients of one parameter group: from autograd through the reduction into `grad`.

buffer         cut at level  dtype   lives
full           0             reduce  from the pool, from first gradient to reduction; own memory
                                     where gradients accumulate without communication
carried        grad          reduce  sum of earlier backward passes that were not the last
main_grad      main          main    what `grad` of the parameters at rest are views of: fresh
                                     memory each time they are all None, or with `keep` the same
                                     for ever, as a graph needs that is replayed
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core.device import Device
from fsdp_core.fsdp.layout import Nest, all_reduce, build_layout, view_at
from fsdp_core.fsdp.pool import GRAD, Key, Pool
from fsdp_core.fsdp.row_sharded import Inner, RowSharded, RowSpec, joined_mesh, rows_first

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of a group of parameters: at rest, in compute, in the reduction."""

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


class FlatBuffers:
    """What all flat buffers of a group have in common: owner of their keys, places, and cuts."""

    def __init__(
        self, sources: list[nn.Parameter], dims: list[int], *, nest: Nest, device: Device,
        dtypes: GroupDtypes,
    ) -> None:  # fmt: skip
        self.nest, self.device, self.dtypes = nest, device, dtypes
        self.owner = next(_NUMBERS)
        inners = [Inner.of(p) for p in sources]
        shapes = [i.part_shape if i else p.shape for p, i in zip(sources, inners, strict=True)]
        layout = build_layout(list(map(rows_first, shapes, dims)), nest.num_shards)
        slots = (replace(slot, dim=dim) for slot, dim in zip(layout.slots, dims, strict=True))
        self.layout = replace(layout, slots=tuple(slots))
        self.specs = [
            RowSpec(
                joined_mesh(nest.mesh, inner.mesh) if inner else nest.mesh,
                parameter.shape,
                self.layout.row_bounds(index),
                nest.axes,
                inner,
                dim,
            )
            for index, (parameter, inner, dim) in enumerate(zip(sources, inners, dims, strict=True))
        ]

    def zeros(self, level: int, dtype: torch.dtype, *, is_meta: bool = False) -> torch.Tensor:
        """A new buffer that is cut at `level`."""
        numel = self.nest.numel(self.layout.total_numel, level)
        device = torch.device("meta") if is_meta else self.device.torch_device
        return torch.zeros(numel, dtype=dtype, device=device)

    def rows(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of parameter `index` as a view of `shard`, a buffer at main level."""
        spec, slot = self.specs[index], self.layout.slots[index]
        if not spec.local_numel:
            return shard[:0].view(spec.local_shape)
        start = slot.offset + spec.row_start * slot.row_numel
        start -= spec.shard_index * self.layout.shard_numel
        return view_at(shard, start, rows_first(spec.local_shape, spec.dim), spec.dim)

    def sharded(self, shard: torch.Tensor, index: int) -> RowSharded:
        return RowSharded.make(self.rows(shard, index), self.specs[index])


class Gradients:
    """Gradient buffers of a group on one rank.

    sharded, unsharded: the group's parameters at rest and in compute.
    main_grad: with `keep`, where gradients at rest lie.
    pooled: the full buffer that the pool gave last, also while it has it back.
    divide_factor: what sums are divided by; None: the number of ranks.
    fused: numbers of parameters whose backward kernels write into `main_grad` themselves.
    sum_hook: called with the sum over the ranks before it is divided; may write to it.
    reduce_unused: give parameters without a gradient zeros where others of the group have one.
    """

    def __init__(
        self,
        flat: FlatBuffers,
        sharded: list[nn.Parameter],
        unsharded: list[nn.Parameter],
        *,
        keep: bool,
        fused: list[int],
    ) -> None:
        self._flat, self.sharded, self.unsharded, self.keep = flat, sharded, unsharded, keep
        self.fused = fused
        self.layout, self.specs = flat.layout, flat.specs
        self.nest, self.dtypes = flat.nest, flat.dtypes
        self.divide_factor: float | None = None
        self.reduce_unused = False
        self.sum_hook: Callable[[torch.Tensor], Any] | None = None
        self.main_grad: torch.Tensor | None = None
        self.pooled: torch.Tensor | None = None
        self._kept: list[RowSharded] = []
        self._key = Key(flat.owner, GRAD)
        self._pool: Pool | None = None
        self._full: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._is_reducing = False
        self._arrived: set[int] = set()
        self._copied: set[int] = set()
        self._carried: torch.Tensor | None = None
        self._carried_from: set[int] = set()
        for index in fused:  # what they write into is zeroed for them
            unsharded[index].overwrite_main_grad = False  # type: ignore[attr-defined]

    def make_kept(self) -> None:
        """Make the buffer that gradients are kept in, if they are, and what lies in it."""
        if self.keep:
            self.main_grad = self._flat.zeros(self.nest.main_level, self.dtypes.main)
            everything = range(len(self.sharded))
            self._kept = [self._flat.sharded(self.main_grad, index) for index in everything]

    # ---- before the reduction

    def arrived(self, index: int) -> None:
        """Autograd has accumulated the gradient of one unsharded parameter."""
        parameter: Any = self.unsharded[index]
        if getattr(parameter, "grad_added_to_main_grad", False):
            # The backward kernel wrote into main_grad itself; what autograd got is a stand-in.
            parameter.grad_added_to_main_grad, parameter.grad = False, None
            self._copied.add(index)
        elif parameter.grad is not None:  # a backward function may return no gradient at all
            inner = self.specs[index].inner
            if inner is not None:
                # Here, where ranks of one row of the mesh are at the same gradient. How much waits
                # to be copied may differ between them.
                parameter.grad = inner.wrap(inner.unwrap(parameter.grad))
            self._arrived.add(index)

    @property
    def waiting_numel(self) -> int:
        """Elements of gradients that have arrived and are not in the full buffer yet."""
        return sum(self.layout.slots[i].numel for i in self._arrived)

    @property
    def is_pending(self) -> bool:
        return self._full is not None and not self._is_reducing

    def is_due(self, *, final: bool) -> bool:
        """Whether there is a sum to reduce: of the full buffer, or what was carried, if `final`."""
        return self.is_pending or (final and self._carried is not None)

    def copy_in(self, pool: Pool | None, stream: Any) -> None:
        """Move the gradients that have arrived into the full buffer. It comes from `pool`, used on
        `stream`; None: it will outlive this backward pass unreduced, and gets memory of its own.
        """
        if not self._arrived:
            return
        self._take_full(pool, stream)
        again = sorted(self._arrived & self._copied)
        first = sorted(self._arrived - self._copied)
        if first:
            torch._foreach_copy_([self._views[i] for i in first], [self._arrival(i) for i in first])
        if again:
            torch._foreach_add_([self._views[i] for i in again], [self._arrival(i) for i in again])
        for index in self._arrived:
            self.unsharded[index].grad = None
        self._copied |= self._arrived
        self._arrived.clear()

    def _arrival(self, index: int) -> torch.Tensor:
        grad = self.unsharded[index].grad
        if grad is None:
            raise RuntimeError("Expected the gradient that has arrived, got None: who took it?")
        return grad.to_local() if isinstance(grad, DTensor) else grad

    def _take_full(self, pool: Pool | None, stream: Any) -> None:
        if self._full is not None:
            return
        total, dtype = self.layout.total_numel, self.dtypes.reduce
        if pool is None:
            self._full = torch.empty(total, dtype=dtype, device=self._flat.device.torch_device)
        else:
            self._full = self.pooled = pool.acquire(self._key, total, dtype, stream)
        self._pool, self._views = pool, self.layout.views(self._full)

    def expose(self, pool: Pool | None, stream: Any) -> None:
        """Give fused parameters a zeroed `main_grad` in the full buffer. Megatron's and
        TransformerEngine's convention: the kernel adds to it, and sets `grad_added_to_main_grad`.
        `pool`, `stream`: see `copy_in`.
        """
        self._take_full(pool, stream)
        for index in self.fused:
            parameter: Any = self.unsharded[index]
            view = self._views[index]
            if parameter.requires_grad and getattr(parameter, "main_grad", None) is not view:
                parameter.main_grad, parameter.grad_added_to_main_grad = view, False
                if index not in self._copied:
                    view.zero_()

    # ---- the reduction

    def reduce(self, stream: Any, *, final: bool) -> list[torch.Tensor]:
        """Reduce the full buffer, and what was carried, on `stream`, after the current one.

        Up to the main level and into the parameters' `grad`, if `final`; else to the gradient's
        level, and the sum is carried into the next backward pass. All memory is made on the current
        stream, so that it comes from what that one has free. Returns the tensors that must live
        until `stream` has done its work.
        """
        full, nest = self._full, self.nest
        like = self._carried if full is None else full
        assert like is not None
        first = nest.grad_level if full is None else 0
        levels = nest.main_level if final else nest.grad_level
        sizes = [nest.numel(self.layout.total_numel, k + 1) for k in range(first, levels)]
        outputs = [like.new_empty(size) for size in sizes]
        written = self._copied | self._carried_from
        rows = self._make_rows(like, outputs, written) if final else {}
        self._is_reducing = True
        with self._flat.device.on(stream), torch.no_grad():
            partial = self._own_sum(full, outputs[: nest.grad_level - first])
            if self._carried is not None:
                outputs.append(self._carried)
            self._carried, self._carried_from = (None, set()) if final else (partial, written)
            if not final:
                return outputs
            above = outputs[nest.grad_level - first : levels - first]
            partial = nest.reduce(partial, above, nest.grad_level)
            for group in nest.replica_groups:
                all_reduce(partial, group)
            if self.sum_hook is not None:
                self.sum_hook(partial)
            self._fill_rows(rows, partial)
            self._deposit(rows)
        return [*outputs, *rows.values()]

    def _own_sum(self, full: torch.Tensor | None, outputs: list[torch.Tensor]) -> torch.Tensor:
        """The sum at the gradient's level: of the full buffer, and what was carried."""
        if full is None:
            assert self._carried is not None
            return self._carried
        self._zero_unwritten(full)
        partial = self.nest.reduce(full, outputs, 0)
        return partial if self._carried is None else partial.add_(self._carried)

    @property
    def scale(self) -> float:
        return 1.0 / (self.divide_factor or self.nest.mesh.size())

    def _make_rows(
        self, like: torch.Tensor, outputs: list[torch.Tensor], written: set[int]
    ) -> dict[int, torch.Tensor]:
        """Memory of the reduced gradients: in the last output, or in the kept buffer if it is free.
        Else in pieces, a parameter each, which find room between activations.
        """
        wanted = range(len(self.sharded)) if self.reduce_unused else sorted(written)
        home = self.main_grad if all(p.grad is None for p in self.sharded) else None
        if outputs and outputs[-1].dtype == self.dtypes.main:
            home = outputs[-1] = outputs[-1] if home is None else home
        if home is not None:
            return {i: self._flat.rows(home, i) for i in wanted}
        dtype = self.dtypes.main
        return {i: like.new_empty(self.specs[i].local_shape, dtype=dtype) for i in wanted}

    def _fill_rows(self, rows: dict[int, torch.Tensor], reduced: torch.Tensor) -> None:
        """Bring the sum over the ranks into `rows`, divided."""
        here = [i for i in rows if self.specs[i].local_numel]
        if not here:
            return
        sources = [self._flat.rows(reduced, i) for i in here]
        targets = [rows[i] for i in here]
        if targets[0].data_ptr() != sources[0].data_ptr():
            torch._foreach_copy_(targets, sources)
        if self.scale != 1.0:
            torch._foreach_mul_(targets, self.scale)

    def _zero_unwritten(self, full: torch.Tensor) -> None:
        """Padding and absent gradients hold what the last user left; the sum must add zeros."""
        for start, stop in self.layout.gaps:
            full[start:stop].zero_()
        for index in set(range(len(self._views))) - self._copied:
            self._views[index].zero_()
        self._copied = set()

    def _deposit(self, rows: dict[int, torch.Tensor]) -> None:
        """Add the reduced gradients to `grad` of the parameters that had one in compute. Then hooks
        of `register_post_accumulate_grad_hook` run: autograd accumulates elsewhere.
        """
        old = [i for i in rows if self.sharded[i].grad is not None]
        if old:
            grads = [self.sharded[i].grad.to_local() for i in old]  # type: ignore[union-attr]
            torch._foreach_add_(grads, [rows[i] for i in old])
        for index in rows:
            if self.sharded[index].grad is None:
                self.sharded[index].grad = self._grad_object(index, rows[index])
        for index in rows:
            parameter: Any = self.sharded[index]
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)

    def _grad_object(self, index: int, row: torch.Tensor) -> RowSharded:
        if not self.keep:
            return RowSharded.make(row, self.specs[index])
        kept = self._kept[index].to_local()
        if row.data_ptr() != kept.data_ptr():
            kept.copy_(row)
        return self._kept[index]

    def release_full(self, stream: Any) -> None:
        """Give the full buffer back; `stream` must come after the reduction."""
        pool, self._pool = self._pool, None
        self._full, self._views, self._is_reducing = None, [], False
        for index in self.fused:
            self.unsharded[index].main_grad = None  # type: ignore[attr-defined]
        if pool is not None:
            pool.release(self._key, stream)

    def forget(self, stream: Any) -> None:
        """Drop every gradient that is not in the parameters' `grad` yet."""
        for parameter in self.unsharded:
            parameter.grad = None
        self.release_full(stream)
        self._arrived, self._copied = set(), set()
        self._carried, self._carried_from = None, set()
