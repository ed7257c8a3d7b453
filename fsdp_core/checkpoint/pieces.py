"""What a rank has of a tensor that tensor, expert or row parallelism cuts, as torch DCP sees it.

    global [8, 6]   --tp cuts dim 0 in 2, this rank has the second-->   rows 4 to 7
                    --FSDP cuts those rows, this rank has the last-->   rows 6 and 7
    piece           offsets (6, 0), sizes (2, 6), of shape (8, 6)

So a checkpoint holds the tensor of the model that is not cut, under its name, and any other layout
finds its own piece in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.parallel.cuts import Cut, named_cuts

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}
"""Parts of a name that torch.compile and checkpoint_wrapper put in."""

Cuts = Mapping[str, tuple[Cut, ...]]
"""By the name of a parameter; one that is not in it is not cut."""


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def cuts_of(modules: Iterable[nn.Module]) -> Cuts:
    """The cuts of all parameters that are cut, by plain name."""
    return {
        plain_name(name): cuts
        for module in modules
        for name, cuts in named_cuts(module).items()
        if cuts
    }


def whole_shape(shape: torch.Size, cuts: tuple[Cut, ...]) -> torch.Size:
    """The shape of the global tensor of which `cuts` leave `shape`."""
    sizes = list(shape)
    for cut in cuts:
        sizes[cut.dim] *= cut.axis_size
    return torch.Size(sizes)


class Piece(torch.Tensor):
    """A rank's part of a global tensor, plain or sharded by rows: what DCP asks of a tensor.

    Of the global shape, and without operators. Build it with `of`.

    Attributes:
        part: what the cuts leave, [rows, ...] or its rows on this rank.
        cuts: at least one.
    """

    part: torch.Tensor
    cuts: tuple[Cut, ...]

    @classmethod
    def of(cls, part: torch.Tensor, cuts: tuple[Cut, ...]) -> "Piece":
        """The piece that `part` is; no copy."""
        self: Piece = torch.Tensor._make_wrapper_subclass(
            cls, whole_shape(part.shape, cuts), dtype=part.dtype, device=part.device
        )
        self.part, self.cuts = part.detach(), cuts
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: it is not there for arithmetic."""
        raise NotImplementedError(f"Expected nothing to compute with a Piece, got {func}.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Piece({self.part!r}, {self.cuts})"

    @property
    def local(self) -> torch.Tensor:
        """What this rank has: the very memory."""
        return self.part.to_local() if isinstance(self.part, RowSharded) else self.part

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        """Where it lies in the global tensor, if this rank has any of it."""
        sizes, offsets = list(self.size()), [0] * self.part.dim()
        for cut in self.cuts:
            sizes[cut.dim] //= cut.axis_size
            offsets[cut.dim] += cut.index * sizes[cut.dim]
        if not isinstance(self.part, RowSharded):
            return [metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]
        return [
            metadata.ChunkStorageMetadata(
                torch.Size(a + b for a, b in zip(offsets, rows.offsets, strict=True)), rows.sizes
            )
            for rows in self.part.__create_chunk_list__()
        ]

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
        return Piece.of(on_cpu(tensor.part), tensor.cuts)
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
