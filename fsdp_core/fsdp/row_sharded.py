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
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _clip_foreach_types

from fsdp_core.fsdp import row_sharded_ops
from fsdp_core.fsdp.row_reductions import replicated
from fsdp_core.fsdp.row_spec import RowShard, RowSpec, gather_rows

__all__ = ["RowShard", "RowSharded", "RowSpec"]

# Earlier, torch's C++ took every DTensor's operators before a subclass of DTensor saw them.
_Base: Any = DTensor if torch.__version__ >= "2.13" else torch.Tensor


class RowSharded(_Base):
    """A tensor of global shape of which this rank holds the rows that `row_spec` says.

    Build it with `make`. Where torch allows it, this is a DTensor to `isinstance`.
    """

    __slots__ = ("_local_tensor", "row_spec", "tie")
    _local_tensor: torch.Tensor
    row_spec: RowSpec
    tie: Any  # to the group that must know when it is trained, see `optimizer`

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, *_args: Any, **_kwargs: Any) -> "RowSharded":
        """Refuse: arguments would mean other things to torch's classes."""
        raise TypeError("RowSharded is built with RowSharded.make(local, spec).")

    @staticmethod
    def make(local: torch.Tensor, spec: RowSpec) -> "RowSharded":
        """A tensor of `spec.shape` over `local`, this rank's rows [spec.local_shape]; no copy.

        Raises:
            ValueError: the shape is not that of this rank's rows, or autograd tracks `local`.
        """
        plain = type(local) is torch.Tensor and not local.requires_grad
        if not plain or local.shape != spec.local_shape:
            raise ValueError(
                f"Expected a plain tensor without gradient of rows [{spec.row_start}, "
                f"{spec.row_stop}) of {tuple(spec.shape)}, of shape {tuple(spec.local_shape)}, got "
                f"{tuple(local.shape)}, {type(local)}, requires_grad={local.requires_grad}."
            )
        return RowSharded._wrap(local, spec)

    @staticmethod
    def _wrap(local: torch.Tensor, spec: RowSpec) -> "RowSharded":
        self = torch.Tensor._make_wrapper_subclass(
            RowSharded, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device
        )
        # A kernel that takes addresses must not take this object's: it has no memory.
        torch._C._set_throw_on_mutable_data_ptr(self)
        self._local_tensor, self.row_spec, self.tie = local, spec, None
        return self

    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return row_sharded_ops.run(RowSharded, func, args, kwargs or {})

    def data_ptr(self) -> int:
        """0, by which torch's Python tells a tensor that wraps another; in C++ it raises."""
        return 0

    @torch.compiler.disable
    def to_local(self) -> torch.Tensor:
        """This rank's rows: the very memory. Differentiable, as DTensor's."""
        if self.requires_grad and torch.is_grad_enabled():
            return _Rows.apply(self, False)
        return self._local_tensor

    @torch.compiler.disable
    def full_tensor(self) -> torch.Tensor:
        """All rows, in memory of their own: a collective over the mesh.

        Differentiable under DTensor's rule: every rank computes the same from it, so the gradient
        of this rank's rows is this rank's gradient of them, not a sum.
        """
        if self.requires_grad and torch.is_grad_enabled():
            return _Rows.apply(self, True)
        return gather_rows(self._local_tensor, self.row_spec)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        """A standard DTensor on the same mesh, for Replicate on every axis: a collective.

        Raises:
            NotImplementedError: any other placement or mesh, and options.
        """
        mesh, asked = self.device_mesh, (device_mesh or self.device_mesh, list(placements or ()))
        if asked != (mesh, [Replicate()] * mesh.ndim) or any(options.values()):
            raise NotImplementedError(
                f"Expected Replicate on every axis of {mesh}, got {asked} and {options}: use "
                ".full_tensor()."
            )
        return replicated(self.full_tensor(), mesh)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the layout."""
        return self.row_spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """`RowShard` on the axes that cut, Replicate on the others."""
        return self.row_spec.placements

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
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            self._local_tensor = value._local_tensor
        elif value._local_tensor is not self._local_tensor:
            with torch.no_grad():
                self.copy_(value)

    @property
    def __tensor_flatten__(self) -> NoReturn:
        # Hidden from hasattr: torch would take it apart and put a DTensor together from it.
        raise AttributeError("RowSharded tensors cannot be flattened for tracing.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        spec, rows = self.row_spec, f"[{self.row_spec.row_start}, {self.row_spec.row_stop})"
        return f"RowSharded(rows {rows} of {tuple(spec.shape)}, {self._local_tensor}, {spec})"

    # --- copies ------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> "RowSharded":
        if not self.is_leaf:
            raise RuntimeError("Expected a leaf of autograd to copy, got the result of operators.")
        _, (local, spec, attributes) = self.__reduce_ex__(None)
        twin = _rebuild(local, spec, copy.deepcopy(attributes, memo))
        twin.grad = copy.deepcopy(self.grad, memo)
        return twin

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy of the rows: the view's storage is the unit's whole buffer, all other parameters'.
        local = self._local_tensor.detach().clone()
        # What was set on the object, nn.Parameter's mark included.
        attributes = self.__dict__ | {"requires_grad": self.requires_grad}
        return _rebuild, (local, self.row_spec, attributes)

    # --- torch.distributed.checkpoint --------------------------------------------------------

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Where this rank's rows lie, if it has any. Shard 0 has those without elements."""
        spec = self.row_spec
        if not spec.local_numel and (self.numel() or spec.shard_index):
            return []
        offsets = torch.Size((spec.row_start, *(0 for _ in spec.shape[1:]))[: len(spec.shape)])
        return [metadata.ChunkStorageMetadata(offsets=offsets, sizes=spec.local_shape)]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        about = metadata.TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, about, self.row_spec.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self._local_tensor


class _Rows(torch.autograd.Function):
    """This rank's rows, or with `gather` all of them."""

    @staticmethod
    def forward(ctx: Any, tensor: RowSharded, gather: bool) -> torch.Tensor:  # noqa: FBT001
        ctx.row_spec, ctx.gather, local = tensor.row_spec, gather, tensor._local_tensor
        return gather_rows(local, tensor.row_spec) if gather else local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[RowSharded, None]:
        rows = ctx.row_spec.own_rows(grad.contiguous()).clone() if ctx.gather else grad
        return RowSharded._wrap(rows, ctx.row_spec), None


def _rebuild(local: torch.Tensor, spec: RowSpec, attributes: dict[str, Any]) -> RowSharded:
    tensor = RowSharded.make(local, spec)
    tensor.requires_grad_(attributes.pop("requires_grad"))
    tensor.__dict__.update(attributes)
    return tensor


# What torch.load with weights_only may call, and the types for which torch's optimizers and
# clipping choose foreach on their own: DTensor enters itself into the same lists.
torch.serialization.add_safe_globals([_rebuild, RowSpec, RowShard])
for _types in (_optim_foreach_types, _clip_foreach_types):
    if RowSharded not in _types:
        _types.append(RowSharded)  # type: ignore[arg-type]
