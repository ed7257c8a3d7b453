"""What a rank has of a tensor that tensor, expert or row parallelism cuts, as torch DCP sees it.

    global [8, 6]   --tp cuts dim 0 in 2, this rank has the second-->   rows 4 to 7
                    --FSDP cuts those rows, this rank has the last-->   rows 6 and 7
    piece           offsets (6, 0), sizes (2, 6), of shape (8, 6)

So a checkpoint holds the tensor of the model that is not cut, under its name, and any other layout
finds its own piece in it. A parameter that a library makes of several tensors, as of gate and up,
is stored as these: side by side on each rank, they are not in the order of any other layout.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.parallel.param_sharding import Stretch, Stretches, named_stretches

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of a name that torch.compile and checkpoint_wrapper put in."""

Stretched = Mapping[str, Stretches]
"""By the name of a parameter; one that is not in it is itself a global tensor."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def stretches_of(modules: Iterable[nn.Module]) -> Stretched:
    """What every parameter that is cut, or called otherwise, is made of, by its plain name."""
    return {
        plain_name(name): tuple(replace(each, name=plain_name(each.name)) for each in stretches)
        for module in modules
        for name, stretches in named_stretches(module).items()
        if stretches != (Stretch(name),)
    }


def global_parts(name: str, value: Any, stretched: Stretched) -> dict[str, Any]:
    """A parameter, or a state of its shape, by the names of the global tensors that it is of.

    One that is not cut is returned as it is.
    """
    if name not in stretched:
        return {name: value}
    return {each.name: Piece.of(value, each) for each in stretched[name]}


def global_names(name: str, stretched: Stretched) -> list[str]:
    """The names of `global_parts`."""
    return [each.name for each in stretched[name]] if name in stretched else [name]


class Piece(torch.Tensor):
    """A rank's part of a global tensor, plain or sharded by rows: what DCP asks of a tensor.

    Of the global shape, and without operators. Build it with `of`.

    Attributes:
        part: the parameter that holds it, [rows, ...] or its rows on this rank.
        stretch: which stretch of the parameter, and how the global tensor is cut.
    """

    part: torch.Tensor
    stretch: Stretch

    @classmethod
    def of(cls, part: torch.Tensor, stretch: Stretch) -> "Piece":
        """The piece that a stretch of `part` is; no copy."""
        sizes = list(part.shape)
        if stretch.length is not None:
            sizes[stretch.dim] = stretch.length
        for cut in stretch.cuts:
            sizes[cut.dim] *= cut.axis_size
        self: Piece = torch.Tensor._make_wrapper_subclass(
            cls, tuple(sizes), dtype=part.dtype, device=part.device
        )
        self.part, self.stretch = part.detach(), stretch
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: it is not there for arithmetic."""
        raise NotImplementedError(f"Expected nothing to compute with a Piece, got {func}.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Piece({self.part!r}, {self.stretch})"

    @property
    def local(self) -> torch.Tensor:
        """What this rank has: the very memory."""
        return self._rows()[1]

    def _rows(self) -> tuple[int, torch.Tensor]:
        """The first row of the stretch that this rank has, and all of those that it has."""
        part, stretch, first = self.part, self.stretch, 0
        local = part
        if isinstance(part, RowSharded):
            local, first = part.to_local(), part.row_spec.row_start
        if stretch.length is None:
            return first, local
        if stretch.dim:
            return first, local.narrow(stretch.dim, stretch.start, stretch.length)
        low = max(first, stretch.start)
        high = max(low, min(first + local.shape[0], stretch.start + stretch.length))
        inside = min(low - first, local.shape[0])
        return low - stretch.start, local.narrow(0, inside, high - low)

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Where it lies in the global tensor, if this rank has any of it."""
        first, local = self._rows()
        if not local.numel():
            return []
        offsets, sizes = [0] * local.dim(), list(self.shape)
        for cut in self.stretch.cuts:
            sizes[cut.dim] //= cut.axis_size
            offsets[cut.dim] += cut.index * sizes[cut.dim]
        offsets[0] += first
        return [metadata.ChunkStorageMetadata(torch.Size(offsets), local.shape)]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        about = metadata.TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, about, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: metadata.MetadataIndex) -> torch.Tensor:
        return self.local


def has_pieces(tensor: Any) -> bool:
    """Whether a tensor tells DCP which pieces of it this rank has."""
    return hasattr(tensor, "__create_chunk_list__")


def is_here(tensor: Any) -> bool:
    """Whether this rank has any of a tensor: optimizers keep no state of what has no rows here."""
    return not has_pieces(tensor) or bool(tensor.__create_chunk_list__())


def on_cpu(tensor: Any) -> Any:
    """A copy; of pieces as pieces."""
    if isinstance(tensor, Piece):
        return Piece.of(on_cpu(tensor.part), tensor.stretch)
    if isinstance(tensor, RowSharded):
        return RowSharded.make(_copy(tensor.to_local()), tensor.row_spec)
    return _copy(tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def local_pieces(tensors: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's memory of every tensor that has pieces, with a name of tensor and place."""
    for key, tensor in tensors.items():
        for chunk in tensor.__create_chunk_list__() if has_pieces(tensor) else ():
            place = ", ".join(map(str, chunk.offsets))
            yield f"{key}[{place}]", tensor.__get_tensor_shard__(None)
