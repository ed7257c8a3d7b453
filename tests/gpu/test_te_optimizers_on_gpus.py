"""TransformerEngine's fused optimizers over sharded parameters: the bits of plain parameters."""

import importlib.util
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_core.fsdp import fully_shard
from fsdp_core.fsdp.row_sharded import RowSharded
from fsdp_core.graph.graph import CapturedFunction, GraphMaker
from tests.dist.rank_pool import RankPool
from tests.gpu.test_fsdp_on_gpus import device_here
from tests.support.tensors import whole

WIDTH, ROWS, STEPS, GRAPH_FROM = 96, 32, 6, 3
LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8
U = 2**-24


def model() -> nn.Sequential:
    """Layers of odd sizes, the same values everywhere; all compute is float32."""
    torch.manual_seed(11)
    layers = [nn.Linear(WIDTH, WIDTH + 5), nn.GELU(), nn.Linear(WIDTH + 5, WIDTH)]
    return nn.Sequential(*layers).to(device_here().torch_device)


def sharded_model(strategy: str) -> nn.Sequential:
    """The same with a unit of its own for the first layer."""
    net = model()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    fully_shard(net[0], mesh=mesh, strategy=strategy, keep_grads=True)
    fully_shard(net, mesh=mesh, strategy=strategy, keep_grads=True)
    return net


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same on every rank, so that a mean over ranks is exact."""
    loss: torch.Tensor = net(x).square().mean()
    return loss


def batch(step: int) -> torch.Tensor:
    """Input of a step, [ROWS, WIDTH]."""
    device = device_here().torch_device
    return torch.randn(
        ROWS, WIDTH, device=device, generator=torch.Generator(device).manual_seed(step)
    )


def optimizer_of(name: str, net: nn.Module, *, capturable: bool = False) -> Any:
    from transformer_engine.pytorch import optimizers

    if name == "FusedSGD":
        return optimizers.FusedSGD(net.parameters(), lr=LR, momentum=0.9, weight_decay=DECAY)
    return optimizers.FusedAdam(
        net.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, capturable=capturable
    )


def train(net: nn.Module, optimizer: Any) -> list[list[torch.Tensor]]:
    """Gradients of each step, then parameters, then moments; SGD's are where there are rows."""
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(step)).backward()
        # A rank without rows has no gradient object.
        held = [p.grad if p.grad is not None else torch.zeros_like(p) for p in net.parameters()]
        found.append([whole(grad).clone() for grad in held])
        optimizer.step()
    found.append([whole(p).clone() for p in net.parameters()])
    states = [optimizer.state[p] for p in net.parameters()]
    moments = [s[key] for s in states for key in ("exp_avg", "exp_avg_sq") if key in s]
    found.append([whole(moment).clone() for moment in moments])
    return found


def compare_with_plain(name: str, strategy: str) -> list[str]:
    """What differs, in a bit, between the optimizer over sharded and over plain parameters."""
    plain, sharded = model(), sharded_model(strategy)
    found = [train(net, optimizer_of(name, net)) for net in (plain, sharded)]
    return [
        f"{part}.{number}"
        for part, pair in enumerate(zip(*found, strict=True))
        for number, (one, other) in enumerate(zip(*pair, strict=True))
        if not torch.equal(one, other)
    ]


def distance_to_torch(strategy: str) -> tuple[float, float]:
    """Largest difference to torch's AdamW given the same gradients, and how far weights moved.

    In units of the bound below, and of the learning rate.

    Bound: with roundings of U, moments after n steps are off by at most 3 n U of the largest
    gradient g so far. sqrt(v) is at least g / sqrt(n), and an update at most lr sqrt(n), so it is
    off by at most lr U (3 n + 8) sqrt(n); a weight rounds by U |w| thrice a step.
    """
    net = sharded_model(strategy)
    start = [whole(p).clone() for p in net.parameters()]
    *grads, weights, _ = train(net, optimizer_of("FusedAdam", net))
    references = [nn.Parameter(value.clone()) for value in start]
    adamw = torch.optim.AdamW(references, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for step in grads:
        for parameter, grad in zip(references, step, strict=True):
            parameter.grad = grad
        adamw.step()
    update = LR * U * (3 * STEPS + 8) * STEPS**0.5
    largest, moved = 0.0, 0.0
    for before, ours, theirs in zip(start, weights, references, strict=True):
        bound = STEPS * (update + 3 * U * theirs.detach().abs().clamp(min=LR))
        largest = max(largest, ((ours - theirs.detach()).abs() / bound).max().item())
        moved = max(moved, (ours - before).abs().max().item() / LR)
    return largest, moved


def compare_with_graph(strategy: str) -> list[int]:
    """Parameters that differ between eager steps and those that a graph replays from a step on."""
    found = []
    for is_graphed in (False, True):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            net = sharded_model(strategy)
            optimizer = optimizer_of("FusedAdam", net, capturable=True)
            schedule = cast("Any", net).fsdp_schedule
            static = batch(0)

            def iteration(
                net: nn.Module = net, optimizer: Any = optimizer, static: torch.Tensor = static
            ) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net, static)
                loss.backward()
                optimizer.step()
                return loss.detach()

            run: Any = iteration
            for step in range(STEPS):
                static.copy_(batch(step))
                if is_graphed and step == GRAPH_FROM:
                    schedule.quiesce()
                    run = CapturedFunction(GraphMaker(device_here()), iteration, None)
                    schedule.quiesce()
                run()
            found.append([whole(p).clone() for p in net.parameters()])
            torch.cuda.synchronize()
            if is_graphed:
                run.reset()
    pairs = zip(*found, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


def resumes() -> list[int]:
    """Parameters that differ after the state went through a state dict into a new optimizer."""
    found = []
    for is_resumed in (False, True):
        net = sharded_model("optim_grads_params")
        optimizer = optimizer_of("FusedAdam", net)
        train(net, optimizer)
        if is_resumed:
            state = optimizer.state_dict()
            optimizer = optimizer_of("FusedAdam", net)
            optimizer.load_state_dict(state)
        train(net, optimizer)
        found.append([whole(p).clone() for p in net.parameters()])
    pairs = zip(*found, strict=True)
    return [number for number, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)
STRATEGIES = ["no_shard", "optim_grads_params"]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_has_the_bits_of_plain_parameters(
    gpu_ranks: RankPool, name: str, strategy: str
) -> None:
    """Gradients, parameters and states are those of the same optimizer without sharding."""
    assert gpu_ranks.run(compare_with_plain, name, strategy, world_size=1) == [[]]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gpus_have_the_bits_of_plain_parameters(
    gpu_ranks: RankPool, name: str, strategy: str
) -> None:
    """With equal data the mean of two ranks is exact: uneven and empty shards change no bit."""
    assert gpu_ranks.run(compare_with_plain, name, strategy, world_size=2) == [[], []]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_torchs_adamw_up_to_rounding(gpu_ranks: RankPool, strategy: str) -> None:
    """Given the same gradients, weights agree with torch's AdamW within a bound on roundings."""
    for distance, moved in gpu_ranks.run(distance_to_torch, strategy, world_size=1):
        assert distance <= 1
        assert moved > 1


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_gpu_replays_its_steps(gpu_ranks: RankPool, strategy: str) -> None:
    """A capturable FusedAdam inside a graph of the whole iteration gives the bits of eager."""
    assert gpu_ranks.run(compare_with_graph, strategy, world_size=1) == [[]]


@pytest.mark.gpu(1)
@pytest.mark.skipif(
    issubclass(RowSharded, DTensor),
    reason=f"TransformerEngine makes DTensors of uneven rows on torch {torch.__version__}, "
    "which torch refuses",
)
def test_one_gpu_resumes(gpu_ranks: RankPool) -> None:
    """FusedAdam's own state dict holds sharded states, and a new optimizer goes on from it."""
    assert gpu_ranks.run(resumes, world_size=1) == [[]]
