"""One group of parameters: their flat weight buffers, and gathering. Knows no modules' hooks.

    buffer         cut at level  dtype    lives
    main_weight    main          main     always; the parameters at rest are views of it
    model_weight   weight        compute  always, if the weight is quantised, or cut less than the
                                          main weight or, whole, has another dtype; else there is
                                          none: main_weight is cast as it is sent
    gathered       0             compute  from the pool, between unshard and reshard; is
                                          model_weight where the weight is whole

Levels are those of `placement`: level k is cut over the first k axes of the nest. Gradients are in
`gradients`.
"""

import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp_core.device import Device
from fsdp_core.fsdp.collectives import Nest, all_gather
from fsdp_core.fsdp.gradients import GradDtypes, Gradients
from fsdp_core.fsdp.layout import FlatLayout, build_layout
from fsdp_core.fsdp.optimizer import watch
from fsdp_core.fsdp.pool import Key, Pool
from fsdp_core.fsdp.quantized import (
    HIDDEN,
    QuantizedWeights,
    announce,
    initial_value,
    is_quantized,
)
from fsdp_core.fsdp.row_sharded import RowSharded, RowSpec

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Owned:
    """Where modules hold a parameter: one place, or several if it is shared.

    The parameter itself is not kept: it has its full size.
    """

    places: tuple[tuple[nn.Module, str], ...]

    @property
    def current(self) -> nn.Parameter:
        """What the modules hold now: the wrapped parameter, later one of the group's."""
        module, attribute = self.places[0]
        parameter = module._parameters[attribute]
        assert parameter is not None
        return parameter

    def register(self, parameter: nn.Parameter) -> None:
        """Make the modules hold `parameter`."""
        for module, attribute in self.places:
            module._parameters[attribute] = parameter


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of a group: at rest, in compute, in the reduction."""

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


class ParamGroup:
    """Flat buffers of parameters that are gathered and reduced together, on one rank."""

    def __init__(
        self,
        owned: list[Owned],
        *,
        nest: Nest,
        device: Device,
        pool: Pool,
        dtypes: GroupDtypes,
        keep_grads: bool,
    ) -> None:
        self.owned, self.nest, self.dtypes, self.pool = owned, nest, dtypes, pool
        self._device = device
        sources = [o.current for o in owned]
        self.name = ""
        self.names = [o.places[0][1] for o in owned]
        self.layout: FlatLayout = build_layout([tuple(p.shape) for p in sources], nest.num_shards)
        self.specs = [
            RowSpec(nest.mesh, p.shape, self.layout.row_bounds(i), nest.axes)
            for i, p in enumerate(sources)
        ]
        self._gather_key = Key(next(_NUMBERS), "gather")
        self._is_quantized = is_quantized(sources[0])
        self.main_weight = self._fill_main_weight(sources)
        self.model_weight: torch.Tensor | None = None
        self._fresh_version: int | None = None
        self._gathered: torch.Tensor | None = None
        self._own: torch.Tensor | None = None
        self._gather_steps: list[tuple[torch.Tensor, torch.Tensor, dist.ProcessGroup]] = []
        self.gathered_version: int | None = None
        self.is_unsharded, self._is_registered = False, False
        self.sharded = [self._sharded_parameter(i, p) for i, p in enumerate(sources)]
        self.unsharded = [self._unsharded_parameter(p) for p in sources]
        self._quantized = QuantizedWeights(self.unsharded) if self._is_quantized else None
        self.gradients = Gradients(
            self.sharded,
            self.unsharded,
            layout=self.layout,
            specs=self.specs,
            nest=nest,
            device=device,
            dtypes=GradDtypes(reduce=dtypes.reduce, main=dtypes.main),
            keep=keep_grads,
        )
        self._make_other_buffers()
        self._register(self.sharded)
        for module, _ in (place for o in owned for place in o.places if nest.weight_level):
            announce(module)
        watch(self, sources)

    # ---- at rest

    def _fill_main_weight(self, sources: list[nn.Parameter]) -> torch.Tensor:
        is_meta = any(p.is_meta for p in sources)
        device = torch.device("meta") if is_meta else self._device.torch_device
        numel = self.layout.total_numel // self.nest.num_shards
        main = torch.zeros(numel, dtype=self.dtypes.main, device=device)
        for index, parameter in enumerate(sources):
            piece = self.layout.local_piece(index, self.nest.shard_index)
            if piece.numel and not is_meta:
                source = initial_value(parameter) if self._is_quantized else parameter.detach()
                rows = source[piece.row_start : piece.row_stop] if source.dim() else source
                main[piece.offset : piece.offset + piece.numel].copy_(rows.reshape(-1))
        return main

    def _make_other_buffers(self) -> None:
        """Make the copy of the weight that is kept at rest, if there must be one, and main_grad."""
        nest, dtypes = self.nest, self.dtypes
        self.model_weight, self._fresh_version = None, None
        if self.main_weight.is_meta:
            return
        self.gradients.make_kept()
        as_main = dtypes.main == dtypes.compute or (nest.weight_level and not self._is_quantized)
        if nest.weight_level != nest.main_level or not as_main:
            self.model_weight = torch.zeros(
                nest.numel(self.layout.total_numel, nest.weight_level),
                dtype=dtypes.compute,
                device=self._device.torch_device,
            )
        if nest.weight_level == 0:
            self._bind_unsharded(
                self.main_weight if self.model_weight is None else self.model_weight
            )

    def holds_rows(self, parameter: nn.Parameter) -> bool:
        """Whether this rank has any of a sharded parameter."""
        return bool(cast("RowSharded", parameter).to_local().numel())

    def local_rows(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """This rank's rows of parameter `index` as a view of `shard`, a buffer at main level."""
        rows: torch.Tensor = self.layout.local_rows(shard, index, self.nest.shard_index)
        return rows

    def _sharded_parameter(self, index: int, source: nn.Parameter) -> nn.Parameter:
        data = RowSharded.make(self.local_rows(self.main_weight, index), self.specs[index])
        parameter = nn.Parameter(data, requires_grad=source.requires_grad)
        _carry_attributes(source, parameter)
        return parameter

    def _unsharded_parameter(self, source: nn.Parameter) -> nn.Parameter:
        if self._is_quantized:
            return source
        empty = torch.empty(0, dtype=self.dtypes.compute, device=self._device.torch_device)
        parameter = nn.Parameter(empty, requires_grad=source.requires_grad)
        _carry_attributes(source, parameter)
        return parameter

    def _register(self, parameters: list[nn.Parameter]) -> None:
        for owned, parameter in zip(self.owned, parameters, strict=True):
            owned.register(parameter)

    def readopt(self) -> None:
        """Take what the modules' parameters hold now as the parameters at rest.

        For after `Module.to_empty` and the like, which give parameters memory of their own: their
        rows are copied into the flat buffer, and they become views of it again.
        """
        current = [o.current for o in self.owned]
        if not all(isinstance(p, RowSharded) for p in current):
            raise RuntimeError(f"Expected the parameters of {self.name} to stay sharded.")
        locals_ = [cast("RowSharded", p).to_local() for p in current]
        home = self.main_weight.untyped_storage()._cdata
        moved = any(t.untyped_storage()._cdata != home for t in locals_ if t.numel())
        if not moved and (not self.main_weight.is_meta or all(t.is_meta for t in locals_)):
            return
        if any(t.dtype != self.dtypes.main for t in locals_):
            raise RuntimeError(
                f"Expected the parameters of {self.name} to stay {self.dtypes.main}; convert "
                "before sharding, or use MixedPrecisionPolicy(param_dtype=...)."
            )
        self.main_weight = torch.zeros(
            self.main_weight.numel(), dtype=self.dtypes.main, device=self._device.torch_device
        )
        for index, (old, local) in enumerate(zip(self.sharded, locals_, strict=True)):
            self.local_rows(self.main_weight, index).copy_(local)
            # In place: the gradients share the list. A meta parameter cannot be given memory.
            self.sharded[index] = self._sharded_parameter(index, old)
        watch(self)
        self._register(self.sharded)
        self._make_other_buffers()

    # ---- weights

    def refresh_model_weight(self) -> None:
        """Bring the copy kept at rest up to date with main_weight, if there is one and it is not.

        Whether it is shows in the version counter of main_weight, which most torch operators raise
        that write into it; `main_weight_changed` is for writers that do not, such as kernels that
        are given addresses.
        """
        if self.model_weight is None or self._fresh_version == self.main_weight._version:
            return
        nest = self.nest
        own = nest.slice(self.model_weight, nest.weight_level, nest.main_level)
        if self._quantized is None:
            own.copy_(self.main_weight)
        else:
            self._quantize(self._quantized, own)
        nest.gather(self.model_weight, nest.main_level, nest.weight_level)
        self._fresh_version = self.main_weight._version

    def _quantize(self, weights: QuantizedWeights, own: torch.Tensor) -> None:
        everything = range(len(self.specs))
        weights.quantize(
            [self.local_rows(self.main_weight, i).flatten() for i in everything],
            [self.local_rows(own, i).flatten() for i in everything],
            [self.specs[i].row_start * self.layout.slots[i].row_numel for i in everything],
            self.nest.main_group,
        )

    def forget_freshness(self) -> None:
        """Count what was copied or gathered from main_weight as out of date."""
        self._fresh_version = self.gathered_version = None

    def main_weight_changed(self) -> None:
        """Bring every copy of main_weight up to date, whatever the version counter says."""
        self.forget_freshness()
        self.refresh_model_weight()

    @property
    def is_current(self) -> bool:
        """Whether what is gathered holds the main weight of now."""
        return self.gathered_version == self.main_weight._version

    def can_unshard(self) -> bool:
        """Whether the buffer to gather into is free now."""
        return self.nest.weight_level == 0 or self.pool.can_acquire(self._gather_key)

    def unshard(self, stream: Any) -> None:
        """Gather the full parameters on `stream`; the caller orders compute after it."""
        if self.is_unsharded:
            return
        if self.main_weight.is_meta:
            raise RuntimeError(
                f"Expected {self.names[0]} on {self._device.torch_device}, got a meta tensor; call "
                "to_empty(device=...) and initialise the parameters first."
            )
        # What is made in inference mode could not be used for training afterwards.
        with torch.inference_mode(mode=False):
            full = None
            if self.nest.weight_level:
                # On the current stream: memory comes from, and goes back to, what it has free.
                total, dtype = self.layout.total_numel, self.dtypes.compute
                full = self.pool.acquire(self._gather_key, total, dtype, stream)
            with self._device.on(stream), torch.no_grad():
                self.refresh_model_weight()
                if full is not None:
                    self._gather(full)
        self.gathered_version = self.main_weight._version
        self.is_unsharded = True

    def register_unsharded(self) -> None:
        """Make the modules hold the gathered parameters; the current stream waits for the gather.

        Not before somebody waits: whoever looked at them would read what is still being written.
        """
        if not self.is_unsharded or self._is_registered:
            return
        for sharded, unsharded in zip(self.sharded, self.unsharded, strict=True):
            if sharded.requires_grad != unsharded.requires_grad:
                unsharded.requires_grad_(sharded.requires_grad)
        self._register(self.unsharded)
        self._is_registered = True

    def _gather(self, full: torch.Tensor) -> None:
        nest = self.nest
        if full is not self._gathered:
            self._gathered = full
            self._own = nest.slice(full, 0, nest.weight_level)
            self._gather_steps = nest.gather_steps(full, nest.weight_level, 0)
            self._bind_unsharded(full)
        source = self.main_weight if self.model_weight is None else self.model_weight
        if source.dtype == full.dtype and nest.weight_level == 1:
            all_gather(full, source, nest.groups[0])
            return
        assert self._own is not None
        self._own.copy_(source)
        for whole, part, group in self._gather_steps:
            all_gather(whole, part, group)

    def _bind_unsharded(self, full: torch.Tensor) -> None:
        """Point the unsharded parameters into a full buffer; they stay bound while it is the same.

        `.data` keeps the buffer's version counter out of autograd: gathering again into a buffer
        that saved views share is no in-place change of a parameter.
        """
        for index, parameter in enumerate(self.unsharded):
            view = self.layout.view(full, index)
            if self._quantized is None:
                parameter.data = view
            else:
                self._quantized.bind(parameter, view)

    def reshard(self, stream: Any) -> None:
        """Give the gathered buffer back after the work issued on `stream` so far."""
        if not self.is_unsharded:
            return
        if self.nest.weight_level:
            self.pool.release(self._gather_key, stream)
            if self._quantized is not None:
                self._quantized.drop_derived()
        self.is_unsharded = False
        if self._is_registered:
            self._register(self.sharded)
            self._is_registered = False


def _carry_attributes(source: nn.Parameter, to: nn.Parameter) -> None:
    """Give `to` what somebody set on the wrapped parameter: optimizers group by such marks."""
    skipped = HIDDEN if is_quantized(source) else ()
    for name, value in vars(source).items():
        if not name.startswith(skipped):
            setattr(to, name, value)
