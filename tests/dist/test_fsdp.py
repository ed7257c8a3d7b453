"""What `fully_shard` leaves at rest over ranks: whole rows, and memory to the byte."""

import time
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.config import ModelConfig
from fsdp_core.device import Device
from fsdp_core.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.model.decoder import DecoderStage
from fsdp_core.model.layers import LayerFactory
from fsdp_core.model.sharding import init_weights
from fsdp_core.parallel.rng import RandomStreams
from tests.dist.parity_programs import single_axes
from tests.dist.rank_pool import RankPool
from tests.support.dense_parts import dense_part

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
    for name, rows in ranks[0]["names"].items():
        all_held = [(a, b) for r in ranks for n, a, b in r["rows"] if n == name and b > a]
        held = sorted(set(all_held))
        assert len(all_held) == len(held) * world_size // shards, name
        assert [a for a, _ in held] == [0, *(b for _, b in held[:-1])], name
        assert held[-1][1] == rows, name
    for rank in ranks:
        # 5 % for padding: the tiny shapes have few rows to cut at.
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
