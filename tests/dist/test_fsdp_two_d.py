"""Parameters that `parallelize_module` has cut before they are sharded, on four ranks."""

import copy
import io
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._pytree import tree_leaves

from fsdp_core.fsdp import clip_grad_norm_, fully_shard
from tests.dist.fsdp_sides import WIDTH, Api, Net, api_of, loss_of, net, rows
from tests.dist.rank_pool import RankPool
from tests.support.tensors import same_bits, whole


def world(*sizes: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Of data, on one axis or two, and of tensor parallelism."""
    names = ("replicas", "dp", "tp")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return mesh[names[:-1]], mesh["tp"]


def two_d(api: Api, width: int, sizes: tuple[int, ...], **options: Any) -> Net:
    """Columns of `up` and `embed` and rows of `down` are cut first; the head stays plain."""
    dp, tp = world(*sizes)
    model = net(width=width)
    plan: dict[str, Any] = {"embed": ColwiseParallel(output_layouts=Replicate())}
    # As DTensors between them: a local tensor does not say how 7 columns were cut.
    up = ColwiseParallel(use_local_output=False)
    plan |= {"blocks.*.up": up, "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, tp, plan)
    for block in model.blocks:
        api.fully_shard(block, mesh=dp, **options)
    return cast("Net", api.fully_shard(model, mesh=dp, **options))


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int = 3) -> list[torch.Tensor]:
    """Losses, gradients and weights; ranks of one row of the mesh have the same data."""
    found = []
    for step in range(num):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss = loss_of(model(rows(step, dist.get_rank() // 2)))
        loss.backward()
        found += [loss.detach(), *(whole(p.grad) for p in model.parameters())]
        optimizer.step()
    return found + [whole(p) for p in model.parameters()]


def trains_as_torch(sizes: tuple[int, ...], width: int, low: bool, kept: bool) -> None:
    """Bits of losses, gradients and weights are those of torch FSDP2.

    torch's replicas are ranks of one axis: over shards of one rank its first gradients, as they
    are read after backward, are not yet those of all replicas (2.13, gloo).
    """
    found = []
    one_axis = (math.prod(sizes[:-1]), sizes[-1])
    for api, mesh in ((api_of("torch"), one_axis), (api_of("ours"), sizes)):
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if low else {}
        policy = api.MixedPrecisionPolicy(**dtypes)
        model = two_d(api, width, mesh, mp_policy=policy, reshard_after_forward=not kept)
        found.append(steps(model, torch.optim.AdamW(model.parameters(), lr=0.1)))
    assert [n for n, pair in enumerate(zip(*found, strict=True)) if not same_bits(*pair)] == []


TRAININGS = [
    ((2, 2), 6, False, False),
    ((2, 2), 5, False, True),  # columns, and rows of what is left, that do not divide evenly
    ((2, 2), 4, True, False),
    ((2, 1, 2), 5, False, False),
]


@pytest.mark.parametrize(("sizes", "width", "low", "kept"), TRAININGS)
def test_training(
    warm_ranks: RankPool, sizes: tuple[int, ...], width: int, low: bool, kept: bool
) -> None:
    """Even and uneven cuts, lower precision, replicas."""
    warm_ranks.run(trains_as_torch, sizes, width, low, kept, world_size=4, timeout_s=120.0)


class Norms(nn.Module):
    """A norm over sequences that are cut, whose gradient is a sum that ranks have parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, WIDTH] -> [rows, WIDTH]."""
        out: torch.Tensor = self.last(self.norm(x))
        return out


def pending_sums() -> None:
    """A gradient that is laid out otherwise than its parameter is brought there first."""
    found = []
    for api in (api_of("torch"), api_of("ours")):
        torch.manual_seed(3)
        dp, tp = world(2, 2)
        model, gather = Norms(), ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
        parallelize_module(model, tp, {"norm": SequenceParallel(sequence_dim=0), "last": gather})
        api.fully_shard(model, mesh=dp)
        found.append(steps(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        assert cast("Any", model).norm.weight.placements[1] == Replicate()
    assert all(map(same_bits, *found))


def norms_are_of_all_axes() -> None:
    """Parts of tensor parallelism count, and what it repeats counts once."""
    model: Any = two_d(api_of("ours"), 5, (2, 2))
    loss_of(model(rows(0, dist.get_rank() // 2))).backward()
    grads = [whole(p.grad).double() for p in model.parameters()]
    due = torch.stack([grad.norm() for grad in grads]).norm()
    one = model.blocks[0].up.weight.grad
    torch.testing.assert_close(whole(one.norm()), whole(one).norm())
    torch.testing.assert_close(whole(one.sum()), whole(one).sum())
    found = clip_grad_norm_(model.parameters(), 0.5 * due.item())
    torch.testing.assert_close(found.double(), due, rtol=1e-6, atol=0.0)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(whole(parameter.grad).double(), grad / 2, rtol=1e-5, atol=1e-9)


def at_rest() -> None:
    """A parameter is a tensor of global shape on both axes: draws, copies, pickles, autograd."""
    model: Any = two_d(api_of("ours"), 5, (2, 2))
    weight = model.blocks[0].up.weight
    assert (weight.shape, weight.device_mesh.mesh_dim_names) == ((7, 5), ("dp", "tp"))
    assert weight.placements[1] == Shard(0)
    torch.manual_seed(1)
    nn.init.normal_(weight)
    torch.manual_seed(1)
    drawn = torch.empty(7, 5).normal_()
    stored = io.BytesIO()
    torch.save(weight, stored)
    stored.seek(0)
    others = copy.deepcopy(weight), torch.load(stored), weight.mul(1), weight.lerp(drawn, 0.5)
    assert all(torch.equal(whole(other), drawn) for other in (weight, *others))
    factor = torch.arange(35.0).view(7, 5)
    (weight.full_tensor() * factor).sum().backward()
    assert torch.equal(whole(weight.grad), factor)
    meta: Any = net().to("meta")
    parallelize_module(meta, world(2, 2)[1], {"blocks.*.down": RowwiseParallel()})
    with torch.device("meta"):
        fully_shard(meta, mesh=world(2, 2)[0])
    meta.to_empty(device="cpu")
    nn.init.constant_(meta.blocks[0].down.weight, 2.0)
    meta.unshard()
    assert torch.equal(whole(meta.blocks[0].down.weight), torch.full((5, 7), 2.0))


def refused() -> None:
    """By the parameter's name: pending sums, and meshes of no common world."""
    dp, tp = world(2, 2)
    for placement, mesh in ((Partial(), dp), (Shard(0), init_device_mesh("cpu", (4,)))):
        model = nn.Linear(4, 4)
        cut = DTensor.from_local(model.weight.detach(), tp, [placement], run_check=False)
        model.weight = nn.Parameter(cut)
        error = ValueError if mesh is not dp else NotImplementedError
        with pytest.raises(error, match=r"Expected .*weight"):
            fully_shard(model, mesh=mesh)


def stored(folder: str) -> None:
    """Saved by 2-D, loaded by 2-D and by rows alone, goes on with the same bits."""
    whole_state = StateDictOptions(full_state_dict=True, cpu_offload=True)
    first = two_d(api_of("ours"), 5, (2, 2))
    running = torch.optim.AdamW(first.parameters(), lr=0.1)
    steps(first, running, 2)
    weights, states = get_state_dict(first, running)
    dcp.save({"weights": weights, "states": states}, checkpoint_id=folder)
    # A copy: a number of steps is the optimizer's own tensor.
    complete = copy.deepcopy(get_state_dict(first, running, options=whole_state))
    due = steps(first, running, 2)
    last = two_d(api_of("ours"), 5, (2, 2))
    for twin in (fully_shard(net()), last):
        optimizer = torch.optim.AdamW(twin.parameters(), lr=0.1)
        weights, states = get_state_dict(twin, optimizer)
        dcp.load({"weights": weights, "states": states}, checkpoint_id=folder)
        set_state_dict(twin, optimizer, model_state_dict=weights, optim_state_dict=states)
        now = get_state_dict(twin, optimizer, options=whole_state)
        if dist.get_rank() == 0:
            assert all(map(same_bits, tensors(now), tensors(complete)))
        if twin is last:
            assert all(map(same_bits, steps(twin, optimizer, 2), due))


@pytest.mark.parametrize("program", [pending_sums, norms_are_of_all_axes, at_rest, refused])
def test_two_d(warm_ranks: RankPool, program: Any) -> None:
    """See each program."""
    warm_ranks.run(program, world_size=4, timeout_s=120.0)


def test_checkpoint(warm_ranks: RankPool, tmp_path: Path) -> None:
    """Pieces lie at their global offsets, and each is stored once."""
    warm_ranks.run(stored, str(tmp_path), world_size=4, timeout_s=120.0)
