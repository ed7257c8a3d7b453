"""`fully_shard` over ranks: the same training as one process, and sharded memory at rest."""

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from fsdp_core.config import ModelConfig, ParallelConfig
from fsdp_core.device import Device
from fsdp_core.fsdp.api import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.fsdp.pool import make_pool
from fsdp_core.mesh import build_mesh
from fsdp_core.model.backend import TorchBackend
from fsdp_core.model.transformer import Decoder
from tests.dist.rank_pool import RankError, RankPool

CONFIG = ModelConfig(vocab_size=37, hidden=24, layers=2, heads=3, kv_heads=3, ffn=40, seq=8)
ROWS, STEPS, LR = 4, 3, 0.5
SHARDED = "optim_grads_params"


def decoder() -> Decoder:
    """The model, the same bits everywhere."""
    model = Decoder(CONFIG, TorchBackend())
    model.init_weights(3)
    model.set_rope(torch.device("cpu"))
    return model


def batch(step: int) -> torch.Tensor:
    """The global batch of a step: int64 [ROWS, seq + 1]."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, CONFIG.vocab_size, (ROWS, CONFIG.seq + 1), generator=generator)


def shard_all(strategy: str, pool: str = "double") -> tuple[Decoder, FSDPModule, Device]:
    """The decoder with its blocks and root as units over all ranks."""
    device = Device("cpu")
    mesh = build_mesh(ParallelConfig(dp=dist.get_world_size()), device)
    shared = make_pool(pool, device, persistent_on_miss=True)
    model = decoder()
    for block in model.layers:
        fully_shard(block, mesh=mesh, strategy=strategy, pool=shared)
    fully_shard(model, mesh=mesh, strategy=strategy, pool=shared, reshard_after_forward=False)
    return model, cast("FSDPModule", model), device


@dataclass
class Trace:
    """What a rank saw: losses, and its pieces of gradients and weights as (name, row, values)."""

    losses: list[float]
    grads: list[list[tuple[str, int, Any]]]
    weights: list[tuple[str, int, Any]]


def pieces(root: FSDPModule, *, grads: bool) -> list[tuple[str, int, Any]]:
    """This rank's rows of every parameter, with the number of the first row."""
    found = []
    for unit in root.fsdp_schedule.units:
        group = unit.group
        for index, (name, parameter) in enumerate(zip(group.names, group.sharded, strict=True)):
            tensor = parameter.grad if grads else parameter.detach()
            if tensor is not None:
                row = group.layout.local_piece(index, group.shard_index).row_start
                found.append((name, row, tensor.numpy().copy()))
    return found


def sgd_steps(strategy: str, pool: str) -> Trace:
    """Plain SGD on shards, each rank on its rows of the batch."""
    model, root, _ = shard_all(strategy, pool)
    rank, world = dist.get_rank(), dist.get_world_size()
    trace = Trace([], [], [])
    for step in range(STEPS):
        mine = batch(step).chunk(world)[rank]
        root.zero_main_grads()
        loss = model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        trace.losses.append(loss.item())
        trace.grads.append(pieces(root, grads=True))
        with torch.no_grad():
            for unit in root.fsdp_schedule.units:
                unit.group.main_weight.sub_(unit.group.main_grad, alpha=LR)
            root.refresh_model_weights()
    trace.weights = pieces(root, grads=False)
    return trace


def assemble(parts: list[list[tuple[str, int, Any]]]) -> dict[str, torch.Tensor]:
    """Full tensors out of the ranks' rows; rows must follow each other without gap or overlap."""
    full: dict[str, list[torch.Tensor]] = {}
    rows: dict[str, int] = {}
    for part in parts:
        for name, row, values in part:
            tensor = torch.from_numpy(values)
            if not tensor.numel():
                continue
            assert rows.get(name, 0) == row, name
            rows[name] = row + tensor.shape[0]
            full.setdefault(name, []).append(tensor)
    return {name: torch.cat(found) for name, found in full.items()}


def single_process(dtype: torch.dtype) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """The same SGD on the whole batch in one process: losses and gradients of each step."""
    model = decoder().to(dtype)
    losses, grads = [], []
    for step in range(STEPS):
        model.zero_grad()
        loss = model(batch(step)[:, :-1], batch(step)[:, 1:])
        loss.backward()
        losses.append(loss.item())
        named = dict(model.named_parameters())
        grads.append({n: p.grad.double() for n, p in named.items() if p.grad is not None})
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=LR)
    return losses, grads


# Normwise error of a gradient in float32 (unit roundoff u = 2^-24): a pass forward and back is a
# chain of about 2 * (9 * layers + 4) operators; one whose longest inner sum has K terms adds at
# most gamma_K = K u relative error, K <= max(vocab, ffn, ROWS * seq) = 40. Averaging over ranks
# adds log2(world) + 1 roundings. The chain's conditioning (residual branches, softmax) is taken as
# at most 4. Weights of a later step differ by LR * the gradients' errors so far: a factor per step.
U = 2**-24
CHAIN = 2 * (9 * CONFIG.layers + 4)
GRAD_BOUND = 4 * CHAIN * 40 * U


@pytest.mark.parametrize("pool", ["double", "dynamic"])
@pytest.mark.parametrize("strategy", [SHARDED, "no_shard"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process(
    warm_ranks: RankPool, world_size: int, strategy: str, pool: str
) -> None:
    """Losses and gradients of every step equal one process on the concatenated batch."""
    traces = warm_ranks.run(sgd_steps, strategy, pool, world_size=world_size)
    losses, grads = single_process(torch.float32)
    for step in range(STEPS):
        mean = sum(trace.losses[step] for trace in traces) / world_size
        size = math.sqrt(sum(g.square().sum().item() for g in grads[step].values()))
        bound = GRAD_BOUND * (step + 1)
        # The loss moves by gradient times weight error, and has its own sum's rounding.
        weight_error = step * LR * bound * size
        assert abs(mean - losses[step]) <= size * weight_error + 60 * U * losses[step]
        shown = [trace.grads[step] for trace in traces]
        whole = assemble(shown if strategy == SHARDED else shown[:1])
        assert whole.keys() == grads[step].keys()
        for name, expected in grads[step].items():
            error = (whole[name].double() - expected).norm() / expected.norm()
            assert error <= bound, (step, name, error, bound)


def test_ranks_agree_without_sharding(warm_ranks: RankPool) -> None:
    """With `no_shard` every rank holds the same gradients and weights, bit for bit."""
    first, *others = warm_ranks.run(sgd_steps, "no_shard", "double", world_size=4)
    for other in others:
        for ours, theirs in zip(
            [first.weights, *first.grads], [other.weights, *other.grads], strict=True
        ):
            for (name, row, a), (other_name, other_row, b) in zip(ours, theirs, strict=True):
                assert (name, row, a.tobytes()) == (other_name, other_row, b.tobytes())


@pytest.mark.parametrize("pool", ["double", "dynamic"])
def test_strategies_agree_bit_for_bit_at_two_ranks(warm_ranks: RankPool, pool: str) -> None:
    """At two ranks sharding changes no bit: the sum of two gradients has one order."""
    whole = warm_ranks.run(sgd_steps, "no_shard", pool, world_size=2)
    sharded = warm_ranks.run(sgd_steps, SHARDED, pool, world_size=2)
    assert [t.losses for t in whole] == [t.losses for t in sharded]
    for step in range(STEPS):
        assembled = assemble([t.grads[step] for t in sharded])
        for name, _, values in whole[0].grads[step]:
            assert values.tobytes() == assembled[name].numpy().tobytes(), (step, name)
    assembled = assemble([t.weights for t in sharded])
    for name, _, values in whole[0].weights:
        assert values.tobytes() == assembled[name].numpy().tobytes(), name


def look_at_rest() -> dict[str, Any]:
    """Placement of a rank's parameters at rest, before and after a step."""
    model, root, _ = shard_all(SHARDED)
    found: dict[str, Any] = {"bytes": 0, "rows": []}
    tokens = batch(0)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    named = dict(model.named_parameters())
    full = dict(decoder().named_parameters())
    for unit in root.fsdp_schedule.units:
        group = unit.group
        found["bytes"] += group.main_weight.untyped_storage().nbytes()
        for index, (name, parameter) in enumerate(zip(group.names, group.sharded, strict=True)):
            assert named[name] is parameter, name
            storage = parameter.untyped_storage()._cdata
            assert not parameter.numel() or storage == group.main_weight.untyped_storage()._cdata
            if parameter.numel():
                assert parameter.grad is not None
                gradients = group.main_grad.untyped_storage()._cdata
                assert parameter.grad.untyped_storage()._cdata == gradients
            else:
                assert parameter.grad is None
            assert parameter.shape[1:] == full[name].shape[1:]
            piece = group.layout.local_piece(index, group.shard_index)
            start, stop = piece.row_start, piece.row_stop
            assert torch.equal(parameter.detach(), full[name][start:stop]), name
            found["rows"].append((name, start, stop))
    found["total"] = sum(p.numel() * 4 for p in full.values())
    found["names"] = {name: p.shape[0] for name, p in full.items()}
    return found


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_at_rest(warm_ranks: RankPool, world_size: int) -> None:
    """At rest a module holds whole rows, views of its shard; the ranks cover each parameter."""
    ranks = warm_ranks.run(look_at_rest, world_size=world_size)
    for name, rows in ranks[0]["names"].items():
        held = [(a, b) for r in ranks for n, a, b in r["rows"] if n == name and b > a]
        assert [a for a, _ in held] == [0, *(b for _, b in held[:-1])], name
        assert held[-1][1] == rows, name
    for rank in ranks:
        # 5 % for padding: the tiny shapes have few rows to cut at.
        assert rank["bytes"] <= 1.05 * rank["total"] / world_size


def settled(device: Device, expected: int) -> int:
    """Live bytes once gloo's threads have let go of what they sent, or after 10 s."""
    deadline = time.monotonic() + 10
    while device.live_bytes() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return device.live_bytes()


def live_bytes_of_steps() -> tuple[int, int, list[int], int]:
    """Bytes at rest by formula and counted, then after each of three steps, and the peak."""
    device = Device("cpu")
    mesh = build_mesh(ParallelConfig(dp=dist.get_world_size()), device)
    pool = make_pool("dynamic", device, persistent_on_miss=True)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with device.counting_memory():
        tokens = [batch(step) for step in range(3)]
        model = decoder()
        for block in model.layers:
            fully_shard(block, mesh=mesh, pool=pool, mp_policy=bf16)
        fully_shard(model, mesh=mesh, pool=pool, mp_policy=bf16, reshard_after_forward=False)
        units = cast("FSDPModule", model).fsdp_schedule.units
        tables = 2 * 4 * CONFIG.seq * CONFIG.head_dim // 2
        inputs = 3 * 8 * ROWS * (CONFIG.seq + 1)
        expected = (
            inputs + tables + sum(unit.group.layout.shard_numel * (4 + 4 + 2) for unit in units)
        )
        rest, after = device.live_bytes(), []
        for step in range(3):
            model(tokens[step][:, :-1], tokens[step][:, 1:]).backward()
            after.append(settled(device, rest))
        return expected, rest, after, device.peak_bytes()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_memory_returns_to_rest(warm_ranks: RankPool, world_size: int) -> None:
    """At rest a rank holds its shards in three buffers and nothing else, before and after steps."""
    for expected, rest, after, peak in warm_ranks.run(live_bytes_of_steps, world_size=world_size):
        assert rest == expected
        assert after == [rest] * 3
        assert peak > rest


def forget_a_parameter() -> None:
    """A unit with a parameter that the forward pass does not use."""
    device = Device("cpu")
    mesh = build_mesh(ParallelConfig(dp=dist.get_world_size()), device)
    model = decoder()
    model.layers[1].register_parameter("forgotten", torch.nn.Parameter(torch.ones(4)))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model(batch(0)[:, :-1], batch(0)[:, 1:]).backward()


def test_a_missing_gradient_is_an_error_on_every_rank(warm_ranks: RankPool) -> None:
    """A parameter without gradient ends the backward pass with its unit and name."""
    with pytest.raises(RankError, match=r"unit 'layers.1'.*'layers.1.forgotten'") as caught:
        warm_ranks.run(forget_a_parameter, world_size=2)
    assert caught.value.kind == "RuntimeError"
