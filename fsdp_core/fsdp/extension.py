"""Parameters whose tensor class says how they are gathered, as torch FSDP2's extensions do.

    piece -fsdp_pre_all_gather-> inputs -all-gather-> outputs -fsdp_post_all_gather-> parameter

So a class may send its rows in another form, in fp8 for one. What rests on a rank is a piece of the
class itself, not rows of a flat buffer. All ranks have as many rows, the last ones fewer or none:
extensions pad by that rule. Each such parameter is a group by itself; its gradient is as any other.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_core.fsdp.layout import FlatLayout, Nest, Slot, all_gather
from fsdp_core.fsdp.param_group import NUMBERS, ParamGroup
from fsdp_core.fsdp.pool import GATHER, Key
from fsdp_core.fsdp.row_sharded import watch

_LEGAL = (1, 5)


def is_extended(name: str, parameter: torch.Tensor, nest: Nest) -> bool:
    """Whether a tensor's class gathers it in its own way (`ValueError`, `NotImplementedError`: it
    says half of how, or cannot be cut so).
    """
    halves = [hasattr(parameter, f"fsdp_{half}_all_gather") for half in ("pre", "post")]
    if halves[0] != halves[1]:
        raise ValueError(
            "Expected fsdp_pre_all_gather and fsdp_post_all_gather, or neither, got one of them in "
            f"the {type(parameter).__name__} {name}."
        )
    is_cut_once = nest.placements.levels == (1, 1, 1) and parameter.ndim
    if halves[0] and not (is_cut_once and (nest.mesh.ndim == 1 or nest.mesh.mesh_dim_names)):
        raise NotImplementedError(
            f"Expected {name}, a {type(parameter).__name__} with an all-gather of its own, to have "
            "rows, to be cut by optim_grads_params over one axis of the mesh, and two axes to have "
            f"names, got {nest.placements} of {nest.mesh}."
        )
    return halves[0]


class ExtendedGroup(ParamGroup):
    """One such parameter, its weight cut over one axis of the mesh; `main_weight` is its piece."""

    _keys: Sequence[Key] = ()  # of the buffers that inputs are gathered in, one each
    _homes: Sequence[torch.Tensor] = ()  # where the class made the parameter
    _inner: Sequence[tuple[torch.Tensor, int]] = ()  # and its bytes elsewhere, of which it told
    _outputs: Sequence[torch.Tensor] = ()

    def _flat_layout(self, shapes: Sequence[tuple[int, ...]]) -> FlatLayout:
        slot, ranks = Slot(tuple(shapes[0]), 0), self.nest.num_shards
        return FlatLayout((slot,), -(-slot.shape[0] // ranks) * slot.row_numel, ranks)

    def _main_of(self, rows: list[torch.Tensor]) -> torch.Tensor:
        device = rows[0].device if rows[0].is_meta else self.device.torch_device
        return rows[0].to(device=device, dtype=self.dtypes.main, copy=True)

    def local_rows(self, shard: torch.Tensor, index: int) -> torch.Tensor:
        """See `ParamGroup`; of the piece it is all."""
        return shard if shard is self.main_weight else super().local_rows(shard, index)

    def _issue_gather(self, stream: Any) -> None:
        with self.device.on(stream), torch.no_grad():
            inputs = self._inputs()
        while len(self._keys) < len(inputs):
            key = Key(next(NUMBERS), GATHER) if self._keys else self._gather_key
            self._keys = (*self._keys, key)
        ranks, pairs = self.nest.num_shards, list(zip(self._keys, inputs, strict=True))
        outputs = [self.pool.acquire(k, ranks * x.numel(), x.dtype, stream) for k, x in pairs]
        with self.device.on(stream), torch.no_grad():
            for whole, x in zip(outputs, inputs, strict=True):
                all_gather(whole, x.contiguous().view(-1), self.nest.groups[0])
        self._outputs = outputs
        self._shapes = [(-1, *x.shape[1:]) for x in inputs]
        self.gathered = outputs[0]
        self._count_moved(outputs[0].data_ptr())

    def _inputs(self) -> list[torch.Tensor]:
        piece: Any = self.main_weight
        (spec,), axis = self.specs, self.nest.axes[0]
        mesh = self.nest.mesh
        mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]
        given = (mesh, spec.shape, spec.stride, self.owned[0].places[0][0], self._policy)
        number = len(inspect.signature(piece.fsdp_pre_all_gather).parameters)
        if number not in _LEGAL:
            raise ValueError(
                f"Expected fsdp_pre_all_gather of {self.names[0]} to take a mesh, or a mesh, outer "
                f"size, outer stride, module and policy, got {number} arguments."
            )
        inputs, self._metadata = piece.fsdp_pre_all_gather(*given[:number])
        rows = self.layout.shard_numel // self.layout.slots[0].row_numel
        if piece.shape[0] != rows and any(x.shape[0] != rows for x in inputs):
            raise ValueError(
                f"Expected fsdp_pre_all_gather to pad {self.names[0]} to the {rows} rows of other "
                f"ranks, got {[tuple(x.shape) for x in inputs]}."
            )
        return list(inputs)

    def register_unsharded(self) -> None:
        """See `ParamGroup`; first the class makes the parameter of what has been gathered."""
        if self.is_unsharded and not self.is_registered:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._finish()
        super().register_unsharded()

    def _finish(self) -> None:
        piece: Any = self.main_weight
        pairs = zip(self._outputs, self._shapes, strict=True)
        whole = tuple(out.view(shape) for out, shape in pairs)
        given = whole, self._metadata, self.dtypes.compute
        if list(map(id, self._homes)) == list(map(id, self._outputs)):
            for tensor, nbytes in self._inner:
                self.device.resize_storage(tensor.untyped_storage(), nbytes)
            piece.fsdp_post_all_gather(*given, out=self.unsharded[0])
            return
        weight, inner = piece.fsdp_post_all_gather(*given)
        self._homes, (spec,) = self._outputs, self.specs
        storages = {t.untyped_storage()._cdata for t in self._homes}
        elsewhere = (t for t in inner if t.untyped_storage()._cdata not in storages)
        self._inner = [(t, t.untyped_storage().nbytes()) for t in elsewhere]
        # Without the rows that pad it.
        weight = torch.as_strided(weight, spec.shape, spec.stride, 0)
        # In place: the gradients share the list.
        self.unsharded[0] = nn.Parameter(weight, requires_grad=self.sharded[0].requires_grad)
        self.is_watched = False
        watch(self)

    def reshard(self, stream: Any) -> None:
        if not self.is_unsharded:
            return
        for tensor, _ in self._inner if self.is_registered else ():
            self.device.resize_storage(tensor.untyped_storage(), 0)
        for key in self._keys[1:]:
            self.pool.release(key, stream)
        super().reshard(stream)
