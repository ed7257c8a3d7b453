"""One group of parameters: their flat weight buffers, and gathering. Knows no modules' hooks.

    buffer         cut at level  dtype    lives
    main_weight    main          main     always; the parameters at rest are views of it
    model_weight   weight        compute  always, if the weight is cut less than the main weight or,
                                          whole, has another dtype; else there is none:
                                          main_weight is cast as it is sent
    gathered       0             compute  from the pool, between unshard and reshard; is
                                          model_weight where the weight is whole

Levels are those of `layout`: level k is cut over the first k axes of the nest. Gradients are in
`gradients`.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fsdp_core.device import Device
from fsdp_core.fsdp.gradients import FlatBuffers, Gradients, GroupDtypes
from fsdp_core.fsdp.layout import GatherStep, Nest, all_gather
from fsdp_core.fsdp.optimizer import watch
from fsdp_core.fsdp.pool import GATHER, Key, Pool
from fsdp_core.fsdp.row_sharded import Inner, RowSharded, RowSpec


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Precision of one unit; None keeps what is there.

    param_dtype: parameters are gathered and computed with in this dtype.
    reduce_dtype: gradients are reduced in this dtype; None: in the dtype they are computed in.
    output_dtype: floating-point outputs of the unit's forward are cast to it.
    cast_forward_inputs: cast floating-point inputs of the forward to `param_dtype`.
    main_dtype: dtype of the parameters at rest, their gradients and what the optimizer sees; None:
        the dtype that the parameters had.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_dtype: torch.dtype | None = None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Dtype of the forward's inputs, or None to leave them."""
        return self.param_dtype if self.cast_forward_inputs else None

    def dtypes_of(self, dtype: torch.dtype) -> GroupDtypes:
        """Dtypes of parameters that had `dtype`; complex numbers and integers keep it."""
        if not dtype.is_floating_point:
            return GroupDtypes(dtype, dtype, dtype)
        compute = self.param_dtype or dtype
        return GroupDtypes(self.main_dtype or dtype, compute, self.reduce_dtype or compute)


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors in `dtype`; the same object if nothing changes."""
    if dtype is None:
        return tree
    if isinstance(tree, torch.Tensor):  # the usual case, without walking a tree
        return tree.to(dtype) if tree.is_floating_point() else tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


@dataclass(frozen=True)
class Owned:
    """Where modules hold a parameter, which is not kept: one place, or several if it is shared.
    `dim`: slices of which dim ranks have, its rows.
    """

    places: tuple[tuple[nn.Module, str], ...]
    dim: int = 0

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
    has_moved: a parameter at rest was given other memory, by `Module.to` for one.
    is_unsharded: a gather of the parameters has been issued, and not been given back.
    is_registered: the current stream has waited for it, and the modules hold them.
    """

    def __init__(
        self,
        owned: list[Owned],
        nest: Nest,
        device: Device,
        pool: Pool,
        policy: MixedPrecisionPolicy,
        *,
        keep_grads: bool,
    ) -> None:
        sources = [o.current for o in owned]
        self.owned, self.pool, self._policy = owned, pool, policy
        dtypes = policy.dtypes_of(sources[0].dtype)
        self.name, self.names = "", [o.places[0][1] for o in owned]
        flat = FlatBuffers(sources, [o.dim for o in owned], nest=nest, device=device, dtypes=dtypes)
        self.layout, self.specs, self.nest, self.dtypes = flat.layout, flat.specs, nest, dtypes
        self._flat, self._device = flat, device
        self._gather_key = Key(flat.owner, GATHER)
        self.model_weight: torch.Tensor | None = None
        self._fresh_version: int | None = None
        self.gathered: torch.Tensor | None = None
        self._gathered_at, self.num_moved = 0, 0
        self._gather_steps: list[GatherStep] = []
        self.gathered_version: int | None = None
        self.is_unsharded, self.is_registered, self.has_moved = False, False, False
        self.main_weight = self._first_main_weight(sources)
        self.sharded = [_like(p, flat.sharded(self.main_weight, i)) for i, p in enumerate(sources)]
        empty = torch.empty(0, dtype=dtypes.compute, device=device.torch_device)
        # Clones: parameters over one tensor would share its version counter.
        self.unsharded = [
            _like(p, spec.inner.wrap(empty.clone()) if spec.inner else empty.clone())
            for p, spec in zip(sources, self.specs, strict=True)
        ]
        modules = [[module for module, _ in o.places] for o in owned]
        fused = [i for i, holders in enumerate(modules) if any(map(_adds_up, holders))]
        self.gradients = Gradients(flat, self.sharded, self.unsharded, keep=keep_grads, fused=fused)
        self._make_other_buffers()
        self._register(self.sharded)
        for module in itertools.chain(*modules):
            if nest.weight_level and hasattr(type(module), "is_fsdp2"):
                # TransformerEngine's, which then quantise anew in backward, where weights are
                # gathered anew, and keep no full copy from forward on.
                module._is_fsdp2 = True  # type: ignore[assignment]
        watch(self, sources)

    @property
    def owner(self) -> int:
        return self._flat.owner

    # ---- at rest

    def _first_main_weight(self, sources: list[nn.Parameter]) -> torch.Tensor:
        is_meta = any(p.is_meta for p in sources)
        main = self._flat.zeros(self.nest.main_level, self.dtypes.main, is_meta=is_meta)
        for index, (parameter, spec) in enumerate(zip(sources, self.specs, strict=True)):
            if spec.local_numel and not is_meta:
                self.local_rows(main, index).copy_(_own_rows(parameter, spec))
        return main

    def _make_other_buffers(self) -> None:
        """Make the copy of the weight that is kept at rest, if there must be one, and main_grad."""
        self.model_weight, self._fresh_version = None, None
        if self.main_weight.is_meta:
            return
        self.gradients.make_kept()
        if self.keeps_copy:
            self.model_weight = self._flat.zeros(self.nest.weight_level, self.dtypes.compute)
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

    def local_rows(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of parameter `index` as a view of `shard`, a buffer at main level."""
        return self._flat.rows(shard, index)

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for owned, parameter in zip(self.owned, parameters, strict=True):
            owned.register(parameter)

    def readopt(self) -> None:
        """Copy what the modules' parameters hold now into the flat buffer.

        For after `Module.to`, `to_empty`, `load_state_dict(assign=True)` and the like, which give
        parameters memory of their own or put others in their place. The parameters at rest stay who
        they are, but for those that were on the meta device. Nothing while some still are.

        Raises RuntimeError: the parameters have other dtypes than one that the policy leaves open.
        """
        current = [o.other_than(p) for o, p in zip(self.owned, self.sharded, strict=True)]
        moved = self.main_weight.is_meta or self.has_moved
        others = [i for i, p in enumerate(current) if p is not self.sharded[i]]
        if self.is_registered or any(p.is_meta for p in current) or not (moved or others):
            return
        rows = [_own_rows(p, spec) for p, spec in zip(current, self.specs, strict=True)]
        dtypes = self._policy.dtypes_of(rows[0].dtype)
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
            self.dtypes = self._flat.dtypes = self.gradients.dtypes = dtypes
            self._make_anew(rows)
        else:
            for index in others:
                self.local_rows(self.main_weight, index).copy_(rows[index])
        self._register(self.sharded)

    def _make_anew(self, rows: list[torch.Tensor]) -> None:
        """The flat buffer and the parameters at rest, with what `rows` hold."""
        self.main_weight = self._flat.zeros(self.nest.main_level, self.dtypes.main)
        for index, (old, own) in enumerate(zip(self.sharded, rows, strict=True)):
            self.local_rows(self.main_weight, index).copy_(own)
            new = self._flat.sharded(self.main_weight, index)
            if not old.is_meta:
                cast("RowSharded", old).rebind(new)
                continue
            # In place: the gradients share the list. A meta parameter cannot be given memory.
            self.sharded[index] = _like(old, new)
            self.sharded[index]._post_accumulate_grad_hooks = old._post_accumulate_grad_hooks
        self.has_moved = False
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
        if self.is_unsharded:
            return
        if self.main_weight.is_meta or self.has_moved:
            with torch.no_grad():
                self.readopt()  # the user may have set parameters in place of those
        if self.main_weight.is_meta:
            raise RuntimeError(
                f"Expected {self.names[0]} on {self._device.torch_device}, got a meta tensor; call "
                "to_empty(device=...) and initialise the parameters first."
            )
        # What is made in inference mode could not be used for training afterwards.
        # Nor could what is made under functorch's transforms, which wrap it.
        with torch.inference_mode(mode=False), torch._C._DisableFuncTorch():
            full = None
            if self.nest.weight_level:
                # On the current stream: memory comes from, and goes back to, what it has free.
                total, dtype = self.layout.total_numel, self.dtypes.compute
                full = self.pool.acquire(self._gather_key, total, dtype, stream)
            with self._device.on(stream), torch.no_grad():
                self.refresh_model_weight()
                if full is not None:
                    self._gather(full)
                    self._count_moved(full.data_ptr())
        self.gathered_version = self.main_weight._version
        self.is_unsharded = True

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
        if self.is_registered:
            self._register(self.sharded)
            self.is_registered = False


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
    for name, value in vars(source).items():
        setattr(twin, name, value)
    return twin


def _adds_up(module: nn.Module) -> bool:
    return bool(getattr(module, "fuse_wgrad_accumulation", False))
