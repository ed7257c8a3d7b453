"""RowSharded as one rank of three sees it: layouts, memory, operators, refusals, chunks."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core.dispatch import IS_2_13
from fsdp_core.fsdp.layout import RowShard, RowSpec
from fsdp_core.fsdp.row_sharded import RowSharded


def spec(trio: DeviceMesh, shape: tuple[int, ...], *bounds: int) -> RowSpec:
    return RowSpec(trio, torch.Size(shape), bounds, (0,))


def filled(layout: RowSpec, value: float = 2.0, **options: Any) -> Any:
    return RowSharded.make(torch.full(layout.local_shape, value, **options), layout)


def parameter_of(tensor: torch.Tensor) -> Any:
    """An nn.Parameter, which type checkers know not to be of the tensor's own type too."""
    return nn.Parameter(tensor)


def is_parameter(value: Any) -> bool:
    """Whether modules would register it; as a function, so that it narrows no type."""
    return isinstance(value, nn.Parameter)


def test_a_spec_knows_this_ranks_rows(trio: DeviceMesh) -> None:
    """Rows and shapes of this rank's piece follow from the bounds, 0-d and empty ones included."""
    middle = spec(trio, (7, 2), 0, 1, 5, 7)
    assert (middle.row_start, middle.row_stop, middle.local_shape) == (1, 5, (4, 2))
    assert spec(trio, (7, 2), 0, 4, 4, 7).local_shape == (0, 2)
    assert spec(trio, (), 0, 0, 1, 1).local_shape == ()
    assert spec(trio, (), 0, 1, 1, 1).local_shape == (0,)
    whole = RowSpec(trio, torch.Size((7, 2)), (0, 7), ())
    assert (whole.local_shape, whole.placements) == ((7, 2), (Replicate(),))


def test_it_is_built_in_one_way(trio: DeviceMesh) -> None:
    """Arguments would mean other things to torch's classes."""
    with pytest.raises(TypeError, match=r"RowSharded\.make"):
        RowSharded(torch.zeros(4, 2), spec(trio, (7, 2), 0, 1, 5, 7))


def test_placements_with_other_cuts_are_not_equal() -> None:
    """Two placements are the same only with the same bounds, and never torch's even Shard(0)."""
    placement = RowShard((0, 2, 5))
    assert isinstance(placement, Shard)
    assert placement.dim == 0
    assert placement == RowShard((0, 2, 5))
    assert copy.deepcopy(placement) == placement
    assert hash(placement) == hash(RowShard((0, 2, 5)))
    assert placement not in (Shard(0), RowShard((0, 3, 5)), RowShard((0, 2, 5), 1))
    assert Shard(0) != placement


def test_a_placement_answers_for_its_cuts_where_it_alone_cuts() -> None:
    """What asks for shards of one axis gets the true ones; of one axis of two, an error."""
    bounds = (0, 2, 2, 5, 7)
    alone = RowShard(bounds)
    shards = [alone._local_shard_size_and_offset(7, 4, rank) for rank in range(4)]
    assert shards == [(2, 0), (0, 2), (3, 2), (2, 5)]
    for level in range(2):
        with pytest.raises(NotImplementedError, match="one axis"):
            RowShard(bounds, level)._local_shard_size_and_offset(7, 2, 0)


def test_redistribute_does_what_it_can_and_refuses_the_rest(trio: DeviceMesh) -> None:
    """Replicate gives a DTensor; even shards, own and other cuts, and dtypes are refused."""
    tensor = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    replicated = tensor.redistribute(trio, [Replicate()])
    assert type(replicated) is DTensor
    assert (replicated.placements, replicated.to_local().shape) == ((Replicate(),), (7, 2))
    for placements in ([Shard(0)], [RowShard((0, 2, 5, 7))], tensor.placements, None):
        with pytest.raises(NotImplementedError, match="full_tensor"):
            tensor.redistribute(placements=placements)
    with pytest.raises(NotImplementedError, match="forward_dtype"):
        tensor.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)


def test_dtensors_own_algorithms_never_make_uneven_rows(trio: DeviceMesh) -> None:
    """A standard DTensor cannot be moved to our placement, nor gathered if it claims to have it."""
    placements = [RowShard((0, 1, 5, 7))]
    for source in ([Replicate()], [Shard(0)]):
        local = torch.zeros(7 if source == [Replicate()] else 3, 2)
        even = DTensor.from_local(local, trio, source, shape=torch.Size((7, 2)), stride=(2, 1))
        with pytest.raises((NotImplementedError, RuntimeError, AssertionError)):
            even.redistribute(placements=placements)
    with pytest.raises((NotImplementedError, RuntimeError, AssertionError)):
        DTensor.from_local(
            torch.zeros(4, 2), trio, placements, shape=torch.Size((7, 2)), stride=(2, 1)
        ).full_tensor()


def test_it_is_a_dtensor_where_torch_lets_subclasses_dispatch(trio: DeviceMesh) -> None:
    """From torch 2.13 on code that asks for DTensor finds one; nothing can take it apart."""
    tensor = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    assert isinstance(tensor, DTensor) is IS_2_13
    assert not hasattr(tensor, "__tensor_flatten__")
    assert not hasattr(tensor, "_spec")
    assert "rows [1, 5) of (7, 2)" in repr(tensor)


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


REFUSED: dict[str, Callable[[Any], Any]] = {
    "aten.mm": lambda t: t @ torch.ones(2, 3),
    "aten.transpose": lambda t: t.mT,
    "aten.sum": lambda t: torch.sum(t, 0, out=t.new_zeros(2)),
    "aten.select": lambda t: t[0],
    "aten.view": lambda t: t.view(-1),
    "aten.t": lambda t: t.t(),
    "aten._foreach_mul": lambda t: torch._foreach_mul([t], t),
    "aten.bernoulli": lambda t: t.bernoulli(),
    "aten.normal": lambda t: torch.normal(t, t),
    "aten.bernoulli_": lambda t: t.bernoulli_(t),
    "aten.bernoulli_.Tensor": lambda t: torch.zeros(7, 2).bernoulli_(t),
    "aten.new_empty": lambda t: t.new_empty(4, 2),
    "aten.eye": lambda t: nn.init.eye_(t),
    "aten.index_put_": lambda t: t.__setitem__(t > 0, torch.ones(3)),
    "aten.index_put_.default": lambda t: t.__setitem__((t > 0).to_local(), 1.0),
}


@pytest.mark.parametrize("operator", list(REFUSED))
def test_what_no_copy_can_give_is_refused(trio: DeviceMesh, operator: str) -> None:
    """What would view or write to a copy, or draw otherwise on each rank, raises by name."""
    tensor = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    with pytest.raises(NotImplementedError, match=r"use \.full_tensor\(\)") as caught:
        REFUSED[operator](tensor)
    assert operator in str(caught.value)


def test_another_memory_format_is_refused(trio: DeviceMesh) -> None:
    """Rows lie one after another, so a copy in channels-last order has no place for them."""
    tensor = filled(spec(trio, (7, 2, 3, 3), 0, 1, 5, 7))
    with pytest.raises(NotImplementedError, match="memory format"):
        tensor.to(torch.float64, memory_format=torch.channels_last)
    with pytest.raises(NotImplementedError, match="memory format"):
        tensor.clone(memory_format=torch.channels_last)
    assert tensor.to(torch.float64, memory_format=torch.contiguous_format).dtype == torch.float64


@pytest.mark.parametrize("shape", [(4, 2), (1, 2), (2,), (7, 1), (8, 2), (1, 1, 1), (2, 7)])
def test_a_plain_tensor_of_another_shape_is_refused(
    trio: DeviceMesh, shape: tuple[int, ...]
) -> None:
    """Not even a shape that fits this rank's rows passes, because it fits no other rank's."""
    tensor = filled(spec(trio, (7, 2), 0, 1, 5, 7))
    plain = torch.ones(shape)
    for call in (
        lambda: tensor.mul_(plain),
        lambda: tensor * plain,
        lambda: tensor.copy_(plain),
        lambda: torch._foreach_add_([tensor], [plain]),
        lambda: torch.where(tensor > 0, tensor, plain),
    ):
        with pytest.raises(ValueError, match="one element or of the global shape"):
            call()
    assert tensor.to_local().eq(2.0).all()


def test_tensors_of_different_layouts_do_not_mix(trio: DeviceMesh) -> None:
    """The same global shape and even the same local shape are not enough."""
    here, there = spec(trio, (7, 2), 0, 1, 5, 7), spec(trio, (7, 2), 0, 2, 6, 7)
    one, other = filled(here), filled(there)
    assert one.to_local().shape == other.to_local().shape
    for call in (
        lambda: one + other,
        lambda: one.copy_(other),
        lambda: torch._foreach_add_([one, one], [one, other]),
        lambda: torch.lerp(one, one, other),
    ):
        with pytest.raises(ValueError, match="one layout"):
            call()
    assert (one + filled(spec(trio, (7, 2), 0, 1, 5, 7))).to_local().eq(4.0).all()


def test_a_plain_tensor_is_never_written_to(trio: DeviceMesh) -> None:
    """A sharded argument cannot fill a plain tensor, which would get some rows on each rank."""
    tensor, plain = filled(spec(trio, (7, 2), 0, 1, 5, 7)), torch.zeros(7, 2)
    for call in (
        lambda: plain.copy_(tensor),
        lambda: plain.add_(tensor),
        lambda: torch.add(tensor, 1.0, out=plain),
        lambda: torch._foreach_copy_([plain], [tensor]),
        lambda: torch._foreach_add_([tensor, plain], [tensor, tensor]),
    ):
        with pytest.raises(ValueError, match="write to"):
            call()
    assert plain.eq(0).all()


def test_lists_may_hold_plain_tensors_at_places_of_their_own(trio: DeviceMesh) -> None:
    """Optimizers group plain and sharded parameters of a dtype into the same lists."""
    tensor, plain = filled(spec(trio, (7, 2), 0, 1, 5, 7)), torch.ones(3)
    torch._foreach_add_([tensor, plain], [tensor.clone(), plain.clone()])
    assert tensor.to_local().eq(4.0).all()
    assert plain.eq(2.0).all()
    doubled = torch._foreach_mul([plain, tensor], 2.0)
    assert [type(t) for t in doubled] == [torch.Tensor, RowSharded]


def test_a_mask_of_its_layout_sets_elements(trio: DeviceMesh) -> None:
    """`tensor[mask] = number` writes where the mask of this rank's rows holds."""
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    tensor = filled(layout).copy_(torch.arange(14.0).view(7, 2))
    for number in (-1.0, torch.tensor([-1.0])):
        tensor[tensor > 4] = number
    assert tensor.to_local().flatten().tolist() == [2, 3, 4, -1, -1, -1, -1, -1]


def test_autograd_sees_elementwise_operators(trio: DeviceMesh) -> None:
    """Gradients of elementwise operators and of .to_local() are tensors of the layout."""
    layout = spec(trio, (7, 2), 0, 1, 5, 7)
    for loss in (lambda p: (p * p).to_local().sum(), lambda p: p.to_local().square().sum()):
        parameter = parameter_of(filled(layout, 3.0))
        loss(parameter).backward()
        assert isinstance(parameter.grad, RowSharded)
        assert parameter.grad.to_local().eq(6.0).all()
