"""One group of parameters: its flat buffers, gathering and reducing. Knows no modules' hooks.

    buffer         cut at level  dtype    lives
    main_weight    main          main     always; the parameters at rest are views of it
    model_weight   weight        compute  always, if the weight is cut less than the main weight or,
                                          whole, has another dtype; else there is none:
                                          main_weight is cast as it is sent
    gathered       0             compute  from the pool, between unshard and reshard; is
                                          model_weight where the weight is whole
    full           0             reduce   from the pool, from first gradient to reduction; own
                                          memory where gradients accumulate without communication
    carried        grad          reduce   sum of earlier backward passes that were not the last
    main_grad      main          main     what `grad` of the parameters at rest are views of: fresh
                                          memory each time they are all None, or with `keep` the
                                          same for ever, as a graph needs that is replayed

Levels are those of `layout`: level k is cut over the first k axes of the nest.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import DTensor

from fsdp_core.device import Device
from fsdp_core.dispatch import opens_itself
from fsdp_core.fsdp.dtypes import dtypes_of
from fsdp_core.fsdp.layout import (
    FlatLayout,
    GatherStep,
    Inner,
    Nest,
    RowSpec,
    all_gather,
    all_reduce,
    build_layout,
    joined_mesh,
    rows_first,
    view_at,
)
from fsdp_core.fsdp.pool import GATHER, GRAD, Key, Pool
from fsdp_core.fsdp.row_sharded import RowSharded, watch

NUMBERS = itertools.count()


@dataclass(frozen=True)
class Owned:
    """Where modules hold a parameter, which is not kept: one place, or several if it is shared.
    `dim`: slices of which dim ranks have, its rows. `gathers_itself`: see `extension`.
    """

    places: tuple[tuple[nn.Module, str], ...]
    dim: int = 0
    gathers_itself: bool = False

    @property
    def current(self) -> nn.Parameter:
        """What the modules hold now: the wrapped parameter, later one of the group's."""
        module, attribute = self.places[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def other_than(self, parameter: nn.Parameter) -> nn.Parameter:
        """What a place holds in its stead, if any does."""
        held = (module._parameters.get(attribute) for module, attribute in self.places)
        return next((p for p in held if p is not None and p is not parameter), parameter)

    def register(self, parameter: nn.Parameter) -> None:
        for module, attribute in self.places:
            module._parameters[attribute] = parameter


class ParamGroup:
    """Flat buffers of parameters that are gathered and reduced together, on one rank.

    gathered: the buffer of the last gather; None if there was none.
    num_moved: parameters that a gather put elsewhere than the gather before, so far.
    is_unsharded: a gather of the parameters has been issued, and not been given back.
    is_registered: the current stream has waited for it, and the modules hold them.
    is_watched: the unit's hooks are on the unsharded parameters.
    """

    def __init__(
        self,
        owned: list[Owned],
        nest: Nest,
        device: Device,
        pool: Pool,
        policy: torch_fsdp.MixedPrecisionPolicy,
        *,
        keep_grads: bool,
    ) -> None:
        sources = [o.current for o in owned]
        self.owned, self.nest, self.device, self.pool = owned, nest, device, pool
        self.owner, self._policy = next(NUMBERS), policy
        self.dtypes = dtypes_of(policy, sources[0].dtype)
        self.name, self.names = "", [o.places[0][1] for o in owned]
        self._place(sources)
        self._gather_key = Key(self.owner, GATHER)
        self.model_weight: torch.Tensor | None = None
        self._fresh_version: int | None = None
        self.gathered: torch.Tensor | None = None
        self._gathered_at, self.num_moved = 0, 0
        self._gather_steps: list[GatherStep] = []
        self.gathered_version: int | None = None
        self.is_unsharded = self.is_registered = self.is_watched = False
        self.main_weight = self._main_of(self._own_rows(sources))
        rows = (self.at_rest(self.main_weight, index) for index in range(len(sources)))
        self.sharded: list[Any] = list(map(_like, sources, rows))
        empty = torch.empty(0, dtype=self.dtypes.compute, device=device.torch_device)
        # Clones: parameters over one tensor would share its version counter.
        self.unsharded = [
            _like(p, spec.inner.wrap(empty.clone()) if spec.inner else empty.clone())
            for p, spec in zip(sources, self.specs, strict=True)
        ]
        modules = [[module for module, _ in o.places] for o in owned]
        adds_up = [[getattr(m, "fuse_wgrad_accumulation", False) for m in held] for held in modules]
        fused = [index for index, held in enumerate(adds_up) if any(held)]
        self.gradients = Gradients(self, keep=keep_grads, fused=fused)
        self._make_other_buffers()
        self._register(self.sharded)
        for module in itertools.chain(*modules):
            if nest.weight_level and hasattr(type(module), "is_fsdp2"):
                # TransformerEngine's, which then quantise anew in backward, where weights are
                # gathered anew, and keep no full copy from forward on.
                module._is_fsdp2 = True  # type: ignore[assignment]
        watch(self, sources)

    # ---- places

    def _place(self, sources: list[nn.Parameter]) -> None:
        """Where the parameters lie in the flat buffer, and which rows of each this rank has."""
        nest, dims = self.nest, [o.dim for o in self.owned]
        inners = [Inner.of(p) for p in sources]
        shapes = [i.part_shape if i else p.shape for p, i in zip(sources, inners, strict=True)]
        layout = self._flat_layout(list(map(rows_first, shapes, dims)))
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

    def _flat_layout(self, shapes: list[torch.Size]) -> FlatLayout:
        return build_layout(shapes, self.nest.num_shards)

    def zeros(self, level: int, dtype: torch.dtype, *, is_meta: bool = False) -> torch.Tensor:
        """A new buffer that is cut at `level`."""
        numel = self.nest.numel(self.layout.total_numel, level)
        device = torch.device("meta") if is_meta else self.device.torch_device
        return torch.zeros(numel, dtype=dtype, device=device)

    def local_rows(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of parameter `index` as a view of `shard`, a buffer at main level."""
        spec, slot = self.specs[index], self.layout.slots[index]
        if not spec.local_numel:
            return shard[:0].view(spec.local_shape)
        start = slot.offset + spec.row_start * slot.row_numel
        start -= spec.shard_index * self.layout.shard_numel
        return view_at(shard, start, rows_first(spec.local_shape, spec.dim), spec.dim)

    def at_rest(self, shard: torch.Tensor, index: int) -> RowSharded:
        """What stands for parameter `index` over its rows in `shard`."""
        return RowSharded.make(self.local_rows(shard, index), self.specs[index])

    # ---- at rest

    def _own_rows(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        return [_own_rows(p, spec) for p, spec in zip(parameters, self.specs, strict=True)]

    def _main_of(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """A main weight that holds `rows`; without memory if any of them has none."""
        is_meta = any(own.is_meta for own in rows)
        main = self.zeros(self.nest.main_level, self.dtypes.main, is_meta=is_meta)
        for index, own in enumerate(rows if not is_meta else ()):
            self.local_rows(main, index).copy_(own)
        return main

    def _make_other_buffers(self) -> None:
        """Make the copy of the weight that is kept at rest, if there must be one, and main_grad."""
        self._rows_made = [p._local_tensor for p in self.sharded]
        self.model_weight, self._fresh_version = None, None
        if self.main_weight.is_meta:
            return
        self.gradients.make_kept()
        if self.keeps_copy:
            self.model_weight = self.zeros(self.nest.weight_level, self.dtypes.compute)
        if self.nest.weight_level == 0:
            self._bind_unsharded(self._sent)

    @property
    def keeps_copy(self) -> bool:
        """Whether there is a `model_weight` beside the main weight, once both have memory."""
        nest, dtypes = self.nest, self.dtypes
        as_main = dtypes.main == dtypes.compute or nest.weight_level
        return nest.weight_level != nest.main_level or not as_main

    def copies_at_rest(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The kept copies in the compute dtype: whole parameters, else the rank's part of all."""
        if self.model_weight is None:
            return
        if self.nest.weight_level:
            yield self.name or self.names[0], self.model_weight
        else:
            yield from zip(self.names, self.layout.views(self.model_weight), strict=True)

    @property
    def _sent(self) -> torch.Tensor:
        return self.main_weight if self.model_weight is None else self.model_weight

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for owned, parameter in zip(self.owned, parameters, strict=True):
            owned.register(parameter)

    @property
    def has_moved(self) -> bool:
        """Whether a parameter at rest was given other memory, by `Module.to` for one."""
        made = zip(self.sharded, self._rows_made, strict=True)
        return any(p._local_tensor is not rows for p, rows in made)

    def readopt(self) -> None:
        """Copy what the modules' parameters hold now into the flat buffer.

        For after `Module.to`, `to_empty`, `load_state_dict(assign=True)` and the like, which give
        parameters memory of their own or put others in their place. The parameters at rest stay who
        they are, but for those that were on the meta device. Nothing while some still are.

        Raises RuntimeError: the parameters have other dtypes than one that the policy leaves open.
        """
        watch(self)  # what was swapped has lost its tie
        current = [o.other_than(p) for o, p in zip(self.owned, self.sharded, strict=True)]
        moved = self.main_weight.is_meta or self.has_moved
        others = [i for i, p in enumerate(current) if p is not self.sharded[i]]
        if self.is_registered or any(p.is_meta for p in current) or not (moved or others):
            return
        rows = self._own_rows(current)
        dtypes = dtypes_of(self._policy, rows[0].dtype)
        converted = dtypes != self.dtypes
        is_fixed = self.gathered is not None or self.gradients.pooled is not None
        is_fixed = is_fixed or any(spec.inner for spec in self.specs)
        if any(t.dtype != dtypes.main for t in rows) or (converted and is_fixed):
            raise RuntimeError(
                f"Expected the parameters of {self.name} to stay {self.dtypes.main}, or all to get "
                "one dtype that the policy leaves open, before the first forward and without "
                f"tensor parallelism; got {', '.join(sorted({str(t.dtype) for t in rows}))}."
            )
        if moved or converted:
            self.dtypes = dtypes
            self._make_anew(rows)
        else:
            for index in others:
                self.local_rows(self.main_weight, index).copy_(rows[index])
        self._register(self.sharded)

    def _make_anew(self, rows: list[torch.Tensor]) -> None:
        """The flat buffer and the parameters at rest, with what `rows` hold."""
        self.main_weight = self._main_of(rows)
        for index, old in enumerate(self.sharded):
            new = self.at_rest(self.main_weight, index)
            if not old.is_meta:
                old.rebind(new)
                continue
            # In place: the gradients share the list. A meta parameter cannot be given memory.
            self.sharded[index] = _like(old, new)
            self.sharded[index]._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
        watch(self)
        self._make_other_buffers()

    # ---- weights

    def refresh_model_weight(self) -> None:
        """Bring the copy kept at rest up to date with main_weight, if there is one and it is not.
        By the version counter of main_weight; `main_weight_changed` is for writers that do not
        raise it, such as kernels that are given addresses.
        """
        if self.model_weight is None or self._fresh_version == self.main_weight._version:
            return
        nest = self.nest
        own = nest.slice(self.model_weight, nest.weight_level, nest.main_level)
        own.copy_(self.main_weight)
        for step in nest.gather_steps(self.model_weight, nest.main_level, nest.weight_level):
            all_gather(*step)
        self._fresh_version = self.main_weight._version

    def forget_freshness(self) -> None:
        self._fresh_version = self.gathered_version = None

    def main_weight_changed(self) -> None:
        """Bring every copy of main_weight up to date, whatever the version counter says."""
        self.forget_freshness()
        self.refresh_model_weight()

    @property
    def is_current(self) -> bool:
        return self.gathered_version == self.main_weight._version

    def can_unshard(self) -> bool:
        return self.nest.weight_level == 0 or self.pool.can_acquire(self._gather_key)

    def unshard(self, stream: Any) -> None:
        """Gather the full parameters on `stream`; the caller orders compute after it."""
        if self.main_weight.is_meta or self.has_moved:
            with torch.no_grad():
                self.readopt()  # the user may have set parameters in place of those
        if self.main_weight.is_meta:
            raise RuntimeError(
                f"Expected {self.names[0]} on {self.device.torch_device}, got a meta tensor; call "
                "to_empty(device=...) and initialise the parameters first."
            )
        # What is made in inference mode could not be used for training afterwards.
        # Nor could what is made under functorch's transforms, which wrap it.
        with torch.inference_mode(mode=False), torch._C._DisableFuncTorch():
            self._issue_gather(stream)
        self.gathered_version = self.main_weight._version
        self.is_unsharded = True

    def _issue_gather(self, stream: Any) -> None:
        full = None
        if self.nest.weight_level:
            # On the current stream: memory comes from, and goes back to, what it has free.
            total, dtype = self.layout.total_numel, self.dtypes.compute
            full = self.pool.acquire(self._gather_key, total, dtype, stream)
        with self.device.on(stream), torch.no_grad():
            self.refresh_model_weight()
            if full is not None:
                self._gather(full)
                self._count_moved(full.data_ptr())

    def _count_moved(self, address: int) -> None:
        if self._gathered_at not in (0, address):
            self.num_moved += len(self.unsharded)
        self._gathered_at = address

    def register_unsharded(self) -> None:
        """Make the modules hold the gathered parameters, once somebody has waited for them."""
        if not self.is_unsharded or self.is_registered:
            return
        for index, owned in enumerate(self.owned):
            if any(m._parameters.get(name) is not self.sharded[index] for m, name in owned.places):
                raise RuntimeError(
                    f"Expected {self.names[index]} to be the parameter that fully_shard made, got "
                    "another, or none: it would be put back. Replace parameters before wrapping, "
                    "set values by copy_ or load_state_dict; functional_call cannot swap them."
                )
        for sharded, unsharded in zip(self.sharded, self.unsharded, strict=True):
            if sharded.requires_grad != unsharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
        self._register(self.unsharded)
        self.is_registered = True

    def _gather(self, full: torch.Tensor) -> None:
        nest = self.nest
        if full is not self.gathered:
            self.gathered = full
            self._gather_steps = nest.gather_steps(full, nest.weight_level, 0)
            self._bind_unsharded(full)
        source, (_, own, group) = self._sent, self._gather_steps[0]
        if source.dtype == full.dtype and nest.weight_level == 1:
            all_gather(full, source, group)
            return
        own.copy_(source)
        for step in self._gather_steps:
            all_gather(*step)

    def _bind_unsharded(self, full: torch.Tensor) -> None:
        # `.data` keeps the buffer's version counter out of autograd: gathering again into a buffer
        # that saved views share is no in-place change of a parameter.
        for parameter, view in zip(self.unsharded, self.layout.views(full), strict=True):
            if isinstance(parameter, DTensor):
                parameter._local_tensor = view.data
            else:
                parameter.data = view

    def reshard(self, stream: Any) -> None:
        """Give the gathered buffer back after the work issued on `stream` so far."""
        if not self.is_unsharded:
            return
        if self.nest.weight_level:
            self.pool.release(self._gather_key, stream)
        self.is_unsharded = False
        self.register_sharded()

    def register_sharded(self) -> None:
        """Make the modules hold the parameters at rest, whether or not they are gathered."""
        if self.is_registered:
            self._register(self.sharded)
            self.is_registered = False


class Gradients:
    """Gradient buffers of a group on one rank.

    sharded, unsharded: the group's parameters at rest and in compute.
    main_grad: with `keep`, where gradients at rest lie.
    pooled: the full buffer that the pool gave last, also while it has it back.
    divide_factor: what sums are divided by; None: the number of ranks.
    fused: numbers of parameters whose backward kernels write into `main_grad` themselves.
    sum_hook: called with the sum over the ranks, divided; may write to it.
    gives_sum: the hook is called before the sum is divided, as always if it `_is_divided_twice`.
    reduce_unused: give parameters without a gradient zeros where others of the group have one.
    """

    def __init__(self, group: ParamGroup, *, keep: bool, fused: list[int]) -> None:
        self._group, self.keep, self.fused = group, keep, fused
        self.sharded, self.unsharded = group.sharded, group.unsharded
        self.layout, self.specs, self.nest = group.layout, group.specs, group.nest
        self.divide_factor: float | None = None
        self.reduce_unused = self.gives_sum = False
        self.sum_hook: Callable[[torch.Tensor], Any] | None = None
        self.main_grad: torch.Tensor | None = None
        self.pooled: torch.Tensor | None = None
        self._kept: list[RowSharded] = []
        self._key = Key(group.owner, GRAD)
        self._pool: Pool | None = None
        self._full: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self._is_reducing = False
        self._arrived: set[int] = set()
        self._copied: set[int] = set()
        self._carried: torch.Tensor | None = None
        self._carried_from: set[int] = set()
        for index in fused:  # what they write into is zeroed for them
            self.unsharded[index].overwrite_main_grad = False  # type: ignore[attr-defined]

    def make_kept(self) -> None:
        """Make the buffer that gradients are kept in, if they are, and what lies in it."""
        if self.keep:
            self.main_grad = self._group.zeros(self.nest.main_level, self._group.dtypes.main)
            everything = range(len(self.sharded))
            self._kept = [self._group.at_rest(self.main_grad, index) for index in everything]

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
        if grad.layout != torch.strided:
            raise NotImplementedError(
                f"Expected a dense gradient of {self._group.names[index]}, got {grad.layout}: "
                "leave out sparse=True."
            )
        if isinstance(grad, DTensor):
            return grad.to_local()
        if opens_itself(type(grad)):  # it would be added once for each tensor that it holds
            return torch.empty_like(self._views[index]).copy_(grad)
        return grad

    def _take_full(self, pool: Pool | None, stream: Any) -> None:
        if self._full is not None:
            return
        total, dtype = self.layout.total_numel, self._group.dtypes.reduce
        if pool is None:
            self._full = torch.empty(total, dtype=dtype, device=self._group.device.torch_device)
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
        before, after = self._divisors
        self._is_reducing = True
        with self._group.device.on(stream), torch.no_grad():
            partial = self._own_sum(full, outputs[: nest.grad_level - first], before)
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
                if not (self.gives_sum or self._is_divided_twice):
                    partial.mul_(1.0 / after)
                    after = 1.0
                self.sum_hook(partial)
            self._fill_rows(rows, partial, 1.0 / after)
            self._deposit(rows)
        return [*outputs, *rows.values()]

    def _own_sum(
        self, full: torch.Tensor | None, outputs: list[torch.Tensor], divisor: float
    ) -> torch.Tensor:
        """The sum at the gradient's level: of the full buffer, divided, and what was carried."""
        if full is None:
            assert self._carried is not None
            return self._carried
        self._zero_unwritten(full)
        if divisor != 1.0:
            full.div_(divisor)
        partial = self.nest.reduce(full, outputs, 0)
        return partial if self._carried is None else partial.add_(self._carried)

    @property
    def _is_divided_twice(self) -> bool:
        return self._group.dtypes.reduce not in (torch.float32, torch.bfloat16)

    @property
    def _divisors(self) -> tuple[float, float]:
        """Of each rank's gradients, and of their sum. In float16 sums overflow: as in torch, about
        the root of the whole comes before, in every dtype but two.
        """
        whole, before = float(self.divide_factor or self.nest.mesh.size()), 1.0
        if self._is_divided_twice:
            while whole % before == 0 and whole / before > before:
                before *= 2
        return before, whole / before

    def _make_rows(
        self, like: torch.Tensor, outputs: list[torch.Tensor], written: set[int]
    ) -> dict[int, torch.Tensor]:
        """Memory of the reduced gradients: in the last output, or in the kept buffer if it is free.
        Else in pieces, a parameter each, which find room between activations.
        """
        wanted = range(len(self.sharded)) if self.reduce_unused else sorted(written)
        home = self.main_grad if all(p.grad is None for p in self.sharded) else None
        if outputs and outputs[-1].dtype == self._group.dtypes.main:
            home = outputs[-1] = outputs[-1] if home is None else home
        if home is not None:
            return {i: self._group.local_rows(home, i) for i in wanted}
        dtype = self._group.dtypes.main
        return {i: like.new_empty(self.specs[i].local_shape, dtype=dtype) for i in wanted}

    def _fill_rows(
        self, rows: dict[int, torch.Tensor], reduced: torch.Tensor, scale: float
    ) -> None:
        """Bring the sum over the ranks into `rows`, scaled."""
        here = [i for i in rows if self.specs[i].local_numel]
        if not here:
            return
        sources = [self._group.local_rows(reduced, i) for i in here]
        targets = [rows[i] for i in here]
        if targets[0].data_ptr() != sources[0].data_ptr():
            torch._foreach_copy_(targets, sources)
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)

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
            grads = [self.sharded[i].grad.to_local() for i in old]
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


def _own_rows(parameter: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    """This rank's rows of a parameter that is cut in any way, or whole; maybe a collective."""
    value: Any = parameter.detach()
    if isinstance(value, RowSharded) and value.row_spec == spec:
        return value.to_local()
    if spec.inner and Inner.of(value) == spec.inner:
        return spec.rows_of_part(value.to_local())
    return spec.own_rows(value.full_tensor() if hasattr(value, "full_tensor") else value)


def _like(source: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A parameter over `data` with the marks that somebody set on `source`: optimizers group by."""
    twin = nn.Parameter(data, requires_grad=source.requires_grad)
    inner = source.__tensor_flatten__()[0] if hasattr(source, "__tensor_flatten__") else ()
    for name in vars(source).keys() - set(inner):
        setattr(twin, name, vars(source)[name])
    return twin
