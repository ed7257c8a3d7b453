"""A parameter, gradient or optimizer state at rest: this rank's whole rows of a global tensor.

To a user it is a tensor of the global shape on a mesh, as DTensor is:

    .full_tensor()                    all rows, on every rank (a collective)
    .to_local()                       this rank's rows, a view of the flat buffer: writes go through
    optimizers, nn.init, norms, `==`  work, see `row_sharded_ops`
    checkpoints                       hold pieces at their true row offsets
    matmul, views, indexing, .item()  raise

torch's optimizers never learn that rows are cut: elementwise arithmetic is the same on a piece.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _clip_foreach_types

from fsdp_core.fsdp import row_sharded_ops
from fsdp_core.fsdp.row_spec import RowShard, RowSpec, gather_rows

__all__ = ["RowShard", "RowSharded", "RowSpec"]


def _subclass_may_dispatch() -> bool:
    """Whether a subclass of DTensor gets its own `__torch_dispatch__` called.

    It does not where torch's C++ takes every DTensor's operators before Python sees them, and
    there asks a probe for the `_spec` that it does not have.
    """

    class Probe(DTensor):
        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> torch.Tensor:
            return torch.empty(2)

    probe = torch.Tensor._make_wrapper_subclass(Probe, (1,))
    try:
        return torch.ops.aten.sin.default(probe).shape == (2,)
    except AttributeError:
        return False


if TYPE_CHECKING:
    _Base = torch.Tensor
else:
    _Base = DTensor if _subclass_may_dispatch() else torch.Tensor


class RowSharded(_Base):
    """A tensor of global shape of which this rank holds the rows that `row_spec` says.

    Build it with `make`. Where torch allows it, this is a DTensor to `isinstance`.
    """

    __slots__ = ("_local_tensor", "row_spec")
    _local_tensor: torch.Tensor
    row_spec: RowSpec

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "RowSharded":
        """Refuse: arguments would mean other things to torch's classes."""
        raise TypeError("RowSharded is built with RowSharded.make(local, spec).")

    @staticmethod
    def make(local: torch.Tensor, spec: RowSpec) -> "RowSharded":
        """A tensor of `spec.shape` over `local`, this rank's rows [spec.local_shape]; no copy.

        Raises:
            ValueError: the shape is not that of this rank's rows, or autograd tracks `local`.
        """
        if local.shape != spec.local_shape:
            raise ValueError(
                f"Expected rows [{spec.row_start}, {spec.row_stop}) of {tuple(spec.shape)}, of "
                f"shape {tuple(spec.local_shape)}, got {tuple(local.shape)}."
            )
        if type(local) is not torch.Tensor or local.requires_grad:
            raise ValueError(
                f"Expected a plain tensor without gradient, got a {type(local).__name__} with "
                f"requires_grad={local.requires_grad}."
            )
        return RowSharded._wrap(local, spec)

    @staticmethod
    def _wrap(local: torch.Tensor, spec: RowSpec) -> "RowSharded":
        self = torch.Tensor._make_wrapper_subclass(
            RowSharded, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device
        )
        self._local_tensor, self.row_spec = local, spec
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return row_sharded_ops.run(RowSharded, func, args, kwargs or {})

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows: the very memory. Differentiable, as DTensor's."""
        _check_default("grad_placements", grad_placements)
        if self.requires_grad and torch.is_grad_enabled():
            return _ToLocal.apply(self)
        return self._local_tensor

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """All rows, in memory of their own: a collective over the mesh.

        Differentiable under DTensor's rule: every rank computes the same from it, so the gradient
        of this rank's rows is this rank's gradient of them, not a sum.
        """
        _check_default("grad_placements", grad_placements)
        if self.requires_grad and torch.is_grad_enabled():
            return _FullTensor.apply(self)
        return gather_rows(self._local_tensor, self.row_spec)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Itself for its own placements, a standard DTensor for Replicate on every axis.

        Raises:
            NotImplementedError: any other placement or mesh, and dtype conversions on the way.
        """
        mesh = self.device_mesh
        wanted = None if placements is None else tuple(placements)
        if any(options.values()) or (device_mesh is not None and device_mesh != mesh):
            raise NotImplementedError(
                f"Expected the tensor's own mesh {mesh} and no options, got {device_mesh} and "
                f"{options}: use .full_tensor()."
            )
        if wanted == (Replicate(),) * mesh.ndim:
            return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)
        if wanted == self.placements:
            return self
        raise NotImplementedError(
            f"Expected Replicate() on every axis or {self.placements}, got {wanted}: use "
            ".full_tensor()."
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the layout."""
        return self.row_spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """`RowShard` on the axes that cut, Replicate on the others."""
        return self.row_spec.placements

    @property
    def _spec(self) -> NoReturn:
        # Hidden from hasattr, as DTensorSpec cannot hold uneven rows.
        raise AttributeError("RowSharded has no DTensorSpec, only even rows do: use .row_spec.")

    @property
    def data(self) -> torch.Tensor:
        """A detached tensor over the same rows.

        Setting it to a tensor of this layout copies the rows into this one's memory, which the
        unit's flat buffer shares; if its device or dtype differ, as in Module.to, it is rebound.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RowSharded) or value.row_spec != self.row_spec:
            raise NotImplementedError(
                f"Expected a RowSharded tensor of layout {self.row_spec}, got {value!r}: use "
                ".copy_(x) under torch.no_grad(), x being of the global shape."
            )
        if (value.dtype, value.device) != (self.dtype, self.device):
            self.rebind(value._local_tensor)
        elif value._local_tensor is not self._local_tensor:
            with torch.no_grad():
                self.copy_(value)

    def rebind(self, local: torch.Tensor) -> None:
        """Make this object stand for the rows in `local` [row_spec.local_shape] from now on.

        Raises:
            ValueError: as `make`.
        """
        twin = RowSharded.make(local, self.row_spec)
        if (twin.dtype, twin.device) != (self.dtype, self.device):
            torch.Tensor.data.__set__(self, twin)  # type: ignore[attr-defined]
        self._local_tensor = local

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # Hidden from hasattr: torch would take it apart and put a DTensor together from it.
        raise AttributeError("RowSharded tensors cannot be flattened for tracing.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self.row_spec
        return (
            f"RowSharded(rows [{spec.row_start}, {spec.row_stop}) of {tuple(spec.shape)}, "
            f"local_tensor={self._local_tensor}, device_mesh={spec.mesh}, "
            f"placements={spec.placements})"
        )

    # --- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowSharded":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Expected a leaf of autograd to copy, got the result of operators.")
        twin = _rebuild(self._local_tensor.clone(), self.row_spec, {})
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self._attributes(), memo))
        twin.requires_grad_(self.requires_grad)
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy of the rows: the view's storage is the unit's whole buffer, all other parameters'.
        local = self._local_tensor.detach().clone()
        attributes = self._attributes() | {"requires_grad": self.requires_grad}
        return _rebuild, (local, self.row_spec, attributes)

    def _attributes(self) -> dict[str, Any]:
        """What was set on the object, nn.Parameter's mark included, but for ties to its owners."""
        found = self.__dict__.items()
        return {key: value for key, value in found if not isinstance(value, weakref.ref)}

    # --- torch.distributed.checkpoint --------------------------------------------------------

    def _chunk(self) -> ChunkStorageMetadata | None:
        """Where this rank's rows lie; None if it has none. Shard 0 has those without elements."""
        spec = self.row_spec
        has_any = spec.local_numel > 0 or (not self.numel() and spec.shard_index == 0)
        if not has_any:
            return None
        offsets = torch.Size((spec.row_start, *(0 for _ in spec.shape[1:]))[: len(spec.shape)])
        return ChunkStorageMetadata(offsets=offsets, sizes=spec.local_shape)

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        chunk = self._chunk()
        if chunk is None:
            return []
        data = TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(self._local_tensor),
            size=self.row_spec.shape,
        )
        index = MetadataIndex(fqn, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        chunk = self._chunk()
        return [] if chunk is None else [chunk]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        chunk = self._chunk()
        if chunk is None or index.offset != chunk.offsets:
            raise ValueError(f"Expected the offsets of {chunk}, got {index}.")
        return self._local_tensor


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowSharded) -> torch.Tensor:
        ctx.row_spec = tensor.row_spec
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowSharded:
        return RowSharded._wrap(grad, ctx.row_spec)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowSharded) -> torch.Tensor:
        ctx.row_spec = tensor.row_spec
        return gather_rows(tensor._local_tensor, tensor.row_spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RowSharded:
        rows = ctx.row_spec.own_rows(grad.contiguous())
        return RowSharded._wrap(rows.clone(), ctx.row_spec)


def _check_default(name: str, value: object) -> None:
    if value is not None:
        raise NotImplementedError(f"Expected {name} None, got {value}.")


def _rebuild(local: torch.Tensor, spec: RowSpec, attributes: dict[str, Any]) -> RowSharded:
    tensor = RowSharded.make(local, spec)
    requires_grad = attributes.pop("requires_grad", False)
    tensor.__dict__.update(attributes)
    tensor.requires_grad_(requires_grad)
    return tensor


# What torch.load with weights_only may call, and the types for which torch's optimizers and
# clipping choose foreach on their own: DTensor enters itself into the same lists.
torch.serialization.add_safe_globals([_rebuild, RowSpec, RowShard])
for _types in (_optim_foreach_types, _clip_foreach_types):
    if RowSharded not in _types:
        _types.append(RowSharded)
