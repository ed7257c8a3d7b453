"""What `fully_shard` leaves at rest over ranks: whole rows, and memory to the byte."""

import copy
import io
import math
import time
from dataclasses import dataclass
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

from fsdp_core.config import ModelConfig
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, clip_grad_norm_, fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import init_weights
from fsdp_core.parallel.rng import RandomStreams
from tests.dist.fsdp_sides import WIDTH, Api, Net, api_of, loss_of, net, rows
from tests.dist.parity_programs import single_axes
from tests.dist.rank_pool import RankPool
from tests.support.dense_parts import dense_part
from tests.support.tensors import same_bits, whole

CONFIG = ModelConfig(vocab_size=37, hidden=24, layers=2, heads=3, kv_heads=3, ffn=40, seq=8)
ROWS = 4
SHARDED = "optim_grads_params"
Strategy = str | tuple[str, ...]


class Decoder(DecoderStage):
    """The whole model, from tokens and targets to the loss."""

    def forward(  # type: ignore[override]
        self, tokens: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        local = dense_part(tokens, targets, self.axes.cp)
        return super().forward(local.tokens, local.part)


def decoder() -> Decoder:
    axes = single_axes()
    streams = RandomStreams(0, (axes.tp,), torch.device("cpu"))
    model = Decoder(CONFIG, axes, LayerFactory(), streams)
    init_weights([model], 3, layers=CONFIG.layers, init_std=CONFIG.init_std)
    return model


def batch(step: int) -> torch.Tensor:
    """The global batch of a step: int64 [ROWS, seq + 1]."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, CONFIG.vocab_size, (ROWS, CONFIG.seq + 1), generator=generator)


def mesh_for(strategy: Strategy) -> DeviceMesh:
    """One axis over all ranks, or two outer groups for a strategy a mesh axis."""
    world = dist.get_world_size()
    one = isinstance(strategy, str)
    if one:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_outer", "dp"))


def shard_all(
    strategy: Strategy, mesh: DeviceMesh | None = None, **options: Any
) -> tuple[Decoder, FSDPModule]:
    """The decoder with its blocks and root as units over all ranks."""
    mesh = mesh or mesh_for(strategy)
    model = decoder()
    for block in model.numbered_layers.values():
        fully_shard(block, mesh=mesh, strategy=strategy, **options)
    fully_shard(model, mesh=mesh, strategy=strategy, reshard_after_forward=False, **options)
    return model, cast("FSDPModule", model)


def look_at_rest(strategy: Strategy) -> dict[str, Any]:
    """Placement of a rank's parameters at rest, before and after a step."""
    model, root = shard_all(strategy)
    found: dict[str, Any] = {"bytes": 0, "rows": []}
    tokens = batch(0)
    named = dict(model.named_parameters())
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(parameter is named[name] for name, parameter in model.named_parameters())
    full = dict(decoder().named_parameters())
    for group in root.fsdp_groups:
        found["bytes"] += group.main_weight.untyped_storage().nbytes()
        for index, (name, parameter) in enumerate(zip(group.names, group.sharded, strict=True)):
            assert named[name] is parameter, name
            assert isinstance(parameter, RowSharded)
            assert parameter.shape == full[name].shape
            local = parameter.to_local()
            start, stop = group.specs[index].row_start, group.specs[index].row_stop
            assert torch.equal(local.detach(), full[name][start:stop]), name
            found["rows"].append((name, start, stop))
            if local.numel():
                slot, layout = group.layout.slots[index], group.layout
                place = slot.offset + start * slot.row_numel
                offset = place - group.specs[index].shard_index * layout.shard_numel
                assert local.data_ptr() == group.main_weight[offset:].data_ptr()
            grad: Any = parameter.grad
            assert (grad.shape, grad.to_local().shape) == (parameter.shape, local.shape)
    found["total"] = sum(p.numel() * 4 for p in full.values())
    found["names"] = {name: p.shape[0] for name, p in full.items()}
    return found


@pytest.mark.parametrize(
    ("world_size", "strategy", "shards"),
    [(2, SHARDED, 2), (4, SHARDED, 4), (4, "optim", 4), (4, ("no_shard", SHARDED), 2),
     (4, ("optim", SHARDED), 4)],
)  # fmt: skip
def test_parameters_at_rest(
    warm_ranks: RankPool, world_size: int, strategy: Strategy, shards: int
) -> None:
    """At rest a module holds whole rows, views of its shard; the shards cover each parameter."""
    ranks = warm_ranks.run(look_at_rest, strategy, world_size=world_size)
    for name, num_rows in ranks[0]["names"].items():
        all_held = [(a, b) for r in ranks for n, a, b in r["rows"] if n == name and b > a]
        held = sorted(set(all_held))
        assert len(all_held) == len(held) * world_size // shards, name
        assert [a for a, _ in held] == [0, *(b for _, b in held[:-1])], name
        assert held[-1][1] == num_rows, name
    for rank in ranks:
        # 5 % for padding: the tiny shapes have few num_rows to cut at.
        assert rank["bytes"] <= 1.05 * rank["total"] / shards


def settled(device: Device, expected: int) -> int:
    """Live bytes once gloo's threads have let go of what they sent, or after 10 s."""
    deadline = time.monotonic() + 10
    while device.live_bytes() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return device.live_bytes()


@dataclass
class Memory:
    """Bytes by formula and counted: at rest, after steps, after zeroing, and at the peak."""

    expected: int
    expected_grads: int
    rest: int
    after: list[int]
    zeroed: list[int]
    peak: int


def memory_of_steps(strategy: Strategy, keep_grads: bool, copied: int) -> Memory:
    """Three steps in bf16; `copied` is the number of ranks over which the compute copy is cut."""
    device = Device("cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    mesh = mesh_for(strategy)  # has a small tensor of its own
    with device.counting_memory():
        tokens = [batch(step) for step in range(3)]
        model, root = shard_all(strategy, mesh, mp_policy=policy, keep_grads=keep_grads)
        tables = 2 * 4 * CONFIG.seq * CONFIG.head_dim // 2
        inputs = 3 * 8 * ROWS * (CONFIG.seq + 1)
        total = sum(group.layout.total_numel for group in root.fsdp_groups)
        shard = total // root.fsdp_groups[0].nest.num_shards
        expected = inputs + tables + 4 * shard + (2 * total // copied if copied else 0)
        # Kept in one buffer with padding; else a piece a parameter, as sums have another dtype.
        pieces = sum(spec.local_numel for group in root.fsdp_groups for spec in group.specs)
        memory = Memory(expected + 4 * shard * keep_grads, 4 * pieces * (not keep_grads),
                        device.live_bytes(), [], [], 0)  # fmt: skip
        for step in range(3):
            model(tokens[step][:, :-1], tokens[step][:, 1:]).backward()
            memory.after.append(settled(device, memory.rest + memory.expected_grads))
            root.zero_main_grads()
            memory.zeroed.append(settled(device, memory.rest))
        memory.peak = device.peak_bytes()
    return memory


@pytest.mark.parametrize("keep_grads", [False, True])
@pytest.mark.parametrize(
    ("world_size", "strategy", "copied"),
    [(1, SHARDED, 0), (1, "optim", 1), (2, "no_shard", 1), (2, "optim", 1), (2, "optim_grads", 1),
     (2, SHARDED, 0), (4, SHARDED, 0), (4, ("no_shard", SHARDED), 0), (4, ("optim", SHARDED), 2),
     (4, ("optim", "optim"), 1), (4, (SHARDED, SHARDED), 0)],
)  # fmt: skip
def test_memory_returns_to_rest(
    warm_ranks: RankPool, world_size: int, strategy: Strategy, copied: int, keep_grads: bool
) -> None:
    """At rest a rank holds main weights, kept gradients, and a compute copy where it is cut less.

    A step adds the gradients, if they are not kept, and zeroing them takes them away.
    """
    ranks = warm_ranks.run(memory_of_steps, strategy, keep_grads, copied, world_size=world_size)
    for memory in ranks:
        assert memory.rest == memory.expected
        assert memory.after == [memory.rest + memory.expected_grads] * 3
        assert memory.zeroed == [memory.rest] * 3
        assert memory.peak > memory.rest + memory.expected_grads


# --- parameters that `parallelize_module` has cut before they are sharded, on four ranks ----------


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
