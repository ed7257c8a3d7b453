"""`RowSharded` as one rank of three sees it: memory, copies and checkpoint chunks."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.fsdp.row_sharded import RowSharded, RowSpec
from tests.unit.fsdp_core.fsdp.row_pieces import filled, is_parameter, parameter_of, spec


def test_writes_go_through_to_the_flat_buffer(trio: DeviceMesh) -> None:
    """The tensor, a Parameter of it and its local rows are one memory."""
    flat = torch.zeros(20)
    tensor: Any = RowSharded.make(flat[4:12].view(4, 2), spec(trio, (7, 2), 0, 1, 5, 7))
    parameter = parameter_of(tensor)
    assert is_parameter(parameter)
    assert (parameter.shape, parameter.stride(), parameter.requires_grad) == ((7, 2), (2, 1), True)
    with torch.no_grad():
        parameter.add_(3.0)
        assert parameter.to_local().data_ptr() == flat[4:].data_ptr()
    assert flat.tolist() == [0.0] * 4 + [3.0] * 8 + [0.0] * 8


def fused_adamw(parameter: nn.Parameter) -> None:
    """One fused step."""
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda p: p.sub_(2.0),
    "copy": lambda p: p.copy_(torch.ones(7, 2)),
    "out": lambda p: torch.add(p.detach(), 1.0, out=p.detach()),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "random": lambda p: p.normal_(),
    "fused": fused_adamw,
    "data": lambda p: setattr(p, "data", torch.ones_like(p)),
}


@pytest.mark.parametrize("write", list(WRITES))
def test_every_write_shows_in_the_flat_buffers_version(trio: DeviceMesh, write: str) -> None:
    """Who keeps a copy of the buffer can tell by its version counter that the copy is stale."""
    flat = torch.zeros(20)
    rows = RowSharded.make(flat[4:12].view(4, 2), spec(trio, (7, 2), 0, 1, 5, 7))
    parameter = parameter_of(rows)
    before = flat._version
    with torch.no_grad():
        WRITES[write](parameter)
    assert flat._version > before
    assert flat[4:12].any()


def test_reading_leaves_the_flat_buffers_version(trio: DeviceMesh) -> None:
    """Norms, products, copies and detaching are no writes."""
    flat = torch.ones(8)
    tensor: Any = RowSharded.make(flat.view(4, 2), spec(trio, (7, 2), 0, 1, 5, 7))
    before = flat._version
    for read in (tensor.clone, tensor.detach, tensor.sum, tensor.norm, lambda: tensor * 2):
        read()
    torch._foreach_norm([tensor])
    assert flat._version == before


def test_setting_data_keeps_the_flat_buffer_or_rebinds(trio: DeviceMesh) -> None:
    """Same dtype: rows are copied in. Another dtype: the object stands for the new memory."""
    flat = torch.zeros(8)
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    holder = nn.Module()
    holder.weight = parameter_of(RowSharded.make(flat.view(4, 2), layout))
    parameter: Any = holder.weight
    holder.float()
    assert parameter.to_local().data_ptr() == flat.data_ptr()
    parameter.data = parameter.data + 1.5
    assert parameter.to_local().data_ptr() == flat.data_ptr()
    assert flat.eq(1.5).all()
    holder.double()
    assert id(holder.weight) == id(parameter)
    assert parameter.dtype == parameter.to_local().dtype == torch.float64
    assert parameter.to_local().eq(1.5).all()
    parameter.data = RowSharded.make(flat.view(4, 2), layout)
    assert (parameter.dtype, parameter.to_local().data_ptr()) == (torch.float32, flat.data_ptr())
    with pytest.raises(NotImplementedError, match="copy_"):
        parameter.data = torch.zeros(7, 2)


def test_a_deep_copy_has_memory_of_its_own(trio: DeviceMesh) -> None:
    """The copy is a Parameter with the same values, attributes and gradient, in other memory."""
    parameter = parameter_of(filled(spec(trio, (7, 2), 0, 1, 5, 7)))
    parameter.grad = torch.ones_like(parameter)
    parameter.color = ["red"]
    twin: Any = copy.deepcopy(parameter)
    with torch.no_grad():
        parameter.zero_()
        parameter.grad.zero_()
    assert is_parameter(twin)
    assert twin.requires_grad
    assert twin.row_spec is parameter.row_spec
    assert twin.to_local().eq(2.0).all()
    assert twin.grad.to_local().eq(1.0).all()
    assert twin.color == ["red"]
    assert twin.color is not parameter.color
    shared = [parameter, parameter]
    assert len({id(t) for t in copy.deepcopy(shared)}) == 1


def test_saved_pieces_hold_no_more_than_their_rows(trio: DeviceMesh) -> None:
    """torch.save of a view of a large buffer stores the view, and loads with weights_only."""
    flat = torch.arange(100_000.0)
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    parameter = parameter_of(RowSharded.make(flat[4:12].view(4, 2), layout))
    file = io.BytesIO()
    torch.save({"weight": parameter}, file)
    assert file.tell() < 10_000
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["weight"]
    assert is_parameter(loaded)
    assert loaded.row_spec == layout
    assert loaded.requires_grad
    assert loaded.to_local().equal(flat[4:12].view(4, 2))


def test_checkpoint_chunks_lie_at_the_true_offsets(trio: DeviceMesh) -> None:
    """A piece is one chunk at its first row; none without rows; all where nothing is cut."""
    piece = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    (chunk,) = piece.__create_chunk_list__()
    assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((1, 0), (4, 2))
    (item,) = piece.__create_write_items__("w", piece)
    assert (item.index.fqn, item.index.offset) == ("w", chunk.offsets)
    data = item.tensor_data
    assert data is not None
    assert (data.chunk, data.size) == (chunk, (7, 2))
    assert piece.__get_tensor_shard__(item.index) is piece.to_local()
    empty = filled(spec(trio, (7, 2), 0, 1, 1, 7))
    assert empty.__create_chunk_list__() == []
    assert empty.__create_write_items__("w", empty) == []
    whole = filled(RowSpec(trio, torch.Size((7, 2)), (0, 7), ()))
    assert [tuple(c.sizes) for c in whole.__create_chunk_list__()] == [(7, 2)]
    scalar = filled(spec(trio, (), 0, 0, 1, 1))
    assert [tuple(c.offsets) for c in scalar.__create_chunk_list__()] == [()]
    assert filled(spec(trio, (), 0, 0, 0, 1)).__create_chunk_list__() == []
