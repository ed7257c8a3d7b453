"""Layouts and placements of rows as one rank of three sees them: what fits and what does not."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fsdp_core.fsdp.row_sharded import RowShard, RowSharded, RowSpec
from tests.unit.fsdp_core.fsdp.row_pieces import filled, spec


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
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert isinstance(tensor, DTensor) is (version >= (2, 13))
    assert not hasattr(tensor, "__tensor_flatten__")
    assert not hasattr(tensor, "_spec")
    assert "rows [1, 5) of (7, 2)" in repr(tensor)
