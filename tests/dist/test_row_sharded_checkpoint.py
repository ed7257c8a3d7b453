"""Checkpoints and state dicts of `RowSharded` over ranks: every row is where it belongs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from tests.dist.rank_pool import RankPool
from tests.dist.test_row_sharded import SHAPES, layouts, reference, sharded, world_of
from tests.support.tensors import same_bits, whole


def contents(name: str, cut: int, *, zeros: bool = False) -> dict[str, Any]:
    """A state dict of one tensor a shape, cut in one way."""
    specs = layouts(name)
    state: dict[str, Any] = {}
    for index, shape in enumerate(SHAPES):
        full = reference(shape, seed=index)
        spec = specs(shape)[cut]
        state[f"tensor{index}"] = sharded(torch.zeros_like(full) if zeros else full, spec)
    return state


def saves(name: str, cut: int, folder: str, how: str) -> None:
    state = contents(name, cut)
    if how == "async":
        future: Any = dcp.async_save(state, checkpoint_id=folder)
        for tensor in state.values():  # what is written must be what was staged
            tensor.zero_()
        future.result()
    else:
        dcp.save(state, checkpoint_id=folder)


def loads(name: str, cut: int, folder: str) -> None:
    state = contents(name, cut, zeros=True)
    dcp.load(state, checkpoint_id=folder)
    for index, shape in enumerate(SHAPES):
        got = state[f"tensor{index}"].full_tensor()
        assert same_bits(got, reference(shape, seed=index)), (name, cut, shape)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_checkpoints_load_into_other_layouts(
    warm_ranks: RankPool, tmp_path: Path, how: str
) -> None:
    """What 3 ranks saved, 1, 2 and 4 ranks load into other cuts and meshes, bit for bit."""
    folder = str(tmp_path / how)
    warm_ranks.run(saves, "three", 1, folder, how, world_size=3)
    others = ["two", "replicas of two", "inner then outer"]
    for cut, name in enumerate(others if how == "sync" else others[:1]):
        warm_ranks.run(loads, name, cut, folder, world_size=world_of(name))
    warm_ranks.run(loads, "one", 0, folder, world_size=1)


class Net(nn.Module):
    """Sharded parameters and a plain one."""

    def __init__(self, name: str, cut: int, *, zeros: bool) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.zeros(3) if zeros else reference((3,), seed=9))
        for key, tensor in contents(name, cut, zeros=zeros).items():
            if tensor.numel():
                self.register_parameter(key, nn.Parameter(tensor))


def whole_state() -> dict[str, torch.Tensor]:
    """What one process would have in its state dict."""
    state = {f"tensor{i}": reference(s, seed=i) for i, s in enumerate(SHAPES) if 0 not in s}
    return {"plain": reference((3,), seed=9), **state}


def state_dicts_are_whole(name: str) -> None:
    for cut in range(3):
        state = get_model_state_dict(
            Net(name, cut, zeros=False),
            options=StateDictOptions(full_state_dict=True, cpu_offload=False),
        )
        expected = whole_state()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            got: Any = state[key]
            assert type(got) is torch.Tensor
            assert same_bits(got, value), (cut, key)


def set_state_dicts(name: str, broadcast: bool) -> None:
    for cut in range(3):
        net = Net(name, cut, zeros=True)
        state: Any = whole_state() if not broadcast or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(net, state, options=options)
        for key, value in whole_state().items():
            got: Any = net.get_parameter(key)
            assert same_bits(whole(got), value), (cut, key)


@pytest.mark.parametrize("name", ["one", "three", "replicas of two", "inner then outer"])
def test_torchs_full_state_dict_has_whole_tensors(warm_ranks: RankPool, name: str) -> None:
    """get_model_state_dict gathers, also where ours are no DTensors."""
    warm_ranks.run(state_dicts_are_whole, name, world_size=world_of(name))


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("name", ["one", "three", "replicas of two"])
def test_torchs_full_state_dict_can_be_set(
    warm_ranks: RankPool, name: str, broadcast: bool
) -> None:
    """set_model_state_dict gives each rank its rows, from all ranks' copies or from rank 0's."""
    warm_ranks.run(set_state_dicts, name, broadcast, world_size=world_of(name))
