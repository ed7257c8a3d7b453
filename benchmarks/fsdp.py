"""Step time and memory of sharded training: ours, torch FSDP2, and no communication at all.

    python -m benchmarks.fsdp [--ranks 4] [--rounds 2] [--steps 8] [--only NAME ...] [--json FILE]

Two workloads, bf16 compute, fp32 main weights, fused AdamW, every engine on the same modules in
fresh processes, order alternating between rounds, medians of CUDA-event times:

    decoder   3.5B parameters: hidden 4096, 16 layers, FFN 11008, sequence 4096, microbatch 2
    stack     launch-bound: 16 Linear(1024), 64 rows

`limit` computes with full bf16 weights on every rank and updates a rank's share of the optimizer
state, so it does all the work of a step but the communication. Memory is the allocator's peak,
allocated and reserved, over the timed steps, after the cache was emptied.
"""

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_core.config import ModelConfig, OptimConfig
from fsdp_core.fsdp.api import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp_core.graph.capture import CapturedFunction, GraphMaker
from fsdp_core.model.backend import TorchBackend
from fsdp_core.model.transformer import Decoder
from fsdp_core.optim import AdamW

DECODER = ModelConfig(
    preset="3.5b", vocab_size=32_000, hidden=4096, layers=16, heads=32, kv_heads=32, ffn=11_008,
    seq=4096,
)  # fmt: skip
STACK_WIDTH, STACK_LAYERS, STACK_ROWS = 1024, 16, 64

Step = Callable[[], None]


@dataclass(frozen=True)
class Figures:
    """One engine on one workload: median step in ms, peaks in GiB."""

    workload: str
    engine: str
    step_ms: float
    allocated_gib: float
    reserved_gib: float


class Stack(nn.Module):
    """A chain of linear layers whose output is its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(STACK_WIDTH, STACK_WIDTH, bias=False) for _ in range(STACK_LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] -> scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def build(workload: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """A model on the GPU with weights of ordinary size, and its loss."""
    device = torch.device("cuda")
    with device:
        if workload == "stack":
            x = torch.randn(STACK_ROWS, STACK_WIDTH, dtype=torch.bfloat16)
            return Stack(), lambda model: model(x)
        model = Decoder(DECODER, TorchBackend())
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        model.set_rope(device)
        tokens = torch.randint(0, DECODER.vocab_size, (2, DECODER.seq + 1))
    return model, lambda model: model(tokens[:, :-1], tokens[:, 1:])


def layers_of(model: nn.Module) -> nn.ModuleList:
    """The layers that become units."""
    assert isinstance(model, Stack | Decoder)
    return model.layers


def ours(workload: str, mesh: DeviceMesh) -> Step:
    """This project's `fully_shard` and AdamW."""
    return _ours(workload, mesh)[0]


def ours_graph(workload: str, mesh: DeviceMesh) -> Step:
    """The same, the whole iteration and the optimizer as one CUDA graph."""
    step, model = _ours(workload, mesh)
    for _ in range(3):
        step()
    schedule = model.fsdp_schedule
    schedule.quiesce()
    captured = CapturedFunction(GraphMaker(schedule.device), step, None)
    schedule.quiesce()
    return captured


def _ours(workload: str, mesh: DeviceMesh) -> tuple[Step, FSDPModule]:
    model, loss = build(workload)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    if workload == "stack":
        # The root owns nothing of its own here: a unit needs parameters.
        model.register_parameter("scale", nn.Parameter(torch.ones(8, device="cuda")))
        model.register_forward_pre_hook(lambda m, a: (a[0] * m.scale[0],))
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    assert isinstance(model, FSDPModule)
    named = [
        (name, p)
        for unit in model.fsdp_schedule.units
        for name, p in zip(unit.group.names, unit.group.sharded, strict=True)
    ]
    optimizer = AdamW(named, OptimConfig(lr=1e-5))

    def step() -> None:
        model.zero_main_grads()
        loss(model).backward()
        optimizer.step()
        with torch.no_grad():
            model.refresh_model_weights()

    return step, model


def fsdp2(workload: str, mesh: DeviceMesh) -> Step:
    """torch FSDP2 with fused AdamW."""
    model, loss = build(workload)
    policy = TorchPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers_of(model):
        torch_fully_shard(layer, mesh=mesh, mp_policy=policy)
    torch_fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


def limit(workload: str, mesh: DeviceMesh) -> Step:
    """Full bf16 weights on every rank, a share of the optimizer's work, no communication."""
    model, loss = build(workload)
    model.bfloat16()
    if isinstance(model, Decoder):
        model.set_rope(torch.device("cuda"))
    share = sum(p.numel() for p in model.parameters()) // mesh.size()
    main = nn.Parameter(torch.zeros(share, device="cuda"))
    main.grad = torch.zeros(share, device="cuda")
    optimizer = torch.optim.AdamW([main], lr=1e-5, fused=True)

    def step() -> None:
        model.zero_grad()
        loss(model).backward()
        optimizer.step()

    return step


ENGINES: dict[str, Callable[[str, DeviceMesh], Step]] = {
    "ours": ours, "ours_graph": ours_graph, "fsdp2": fsdp2, "limit": limit,
}  # fmt: skip


def measure(workload: str, engine: str, mesh: DeviceMesh, steps: int) -> Figures:
    """Build, warm up, time `steps` steps, and drop everything again."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step = ENGINES[engine](workload, mesh)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        dist.barrier()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    figures = Figures(
        workload,
        engine,
        statistics.median(times),
        torch.cuda.max_memory_allocated() / 2**30,
        torch.cuda.max_memory_reserved() / 2**30,
    )
    return figures


def rank_main(rank: int, ranks: int, port: int, what: tuple[str, str], steps: int, to: str) -> None:
    """One rank of one measurement; rank 0 writes the figures to the file `to`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    mesh = init_device_mesh("cuda", (ranks,), mesh_dim_names=("dp",))
    figures = measure(*what, mesh, steps)
    gc.collect()  # destroying a group while a graph that used it is alive hangs
    if rank == 0:
        Path(to).write_text(json.dumps(asdict(figures)))
    dist.destroy_process_group()


def run(chosen: argparse.Namespace) -> list[Figures]:
    """Every measurement in fresh processes: what one engine leaves in memory is not the next's."""
    found: list[Figures] = []
    engines = [name for name in ENGINES if not chosen.only or name in chosen.only]
    with tempfile.TemporaryDirectory() as scratch:
        for workload in ("stack", "decoder"):
            for number in range(chosen.rounds):
                for engine in engines if number % 2 == 0 else reversed(engines):
                    port, file = 29_500 + len(found) + os.getpid() % 1000, f"{scratch}/figures"
                    arguments = (chosen.ranks, port, (workload, engine), chosen.steps, file)
                    mp.spawn(rank_main, args=arguments, nprocs=chosen.ranks)
                    found.append(Figures(**json.loads(Path(file).read_text())))
                    print(found[-1], flush=True)
    return found


def report(found: list[Figures], ranks: int, path: Path | None) -> None:
    """Best medians over the rounds, as a table and as JSON."""
    print(f"\n{torch.cuda.get_device_name()} x {ranks}, torch {torch.__version__}")
    for workload in ("stack", "decoder"):
        peers = [f.step_ms for f in found if (f.workload, f.engine) == (workload, "fsdp2")]
        for engine in ENGINES:
            mine = [f for f in found if (f.workload, f.engine) == (workload, engine)]
            if mine:
                ms = min(f.step_ms for f in mine)
                ratio = f"{min(peers) / ms:5.2f} x fsdp2" if peers else ""
                print(
                    f"{workload:8} {engine:10} {ms:9.2f} ms  {ratio}  "
                    f"allocated {mine[0].allocated_gib:6.2f}  reserved {mine[0].reserved_gib:6.2f}"
                )
    if path is not None:
        path.write_text(json.dumps([asdict(f) for f in found], indent=1) + "\n")


def main() -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", nargs="*", choices=sorted(ENGINES))
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if torch.cuda.device_count() < chosen.ranks:
        print(f"needs {chosen.ranks} GPUs, found {torch.cuda.device_count()}", file=sys.stderr)
        return 6
    report(run(chosen), chosen.ranks, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
