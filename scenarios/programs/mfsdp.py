"""Train a small residual MLP under megatron-fsdp: its production path or its experimental one.

Its engines need a GPU. On the CPU torch's FSDP2 shards the model, and the optimizer alone may be
that of megatron-fsdp.

Planted difference: --plant-step S --plant-rank R adds 2**-18 to one input element of microbatch 1.
"""

import argparse
import os
from collections.abc import Callable
from types import SimpleNamespace

import megatron_fsdp
import torch
import torch.distributed as dist
from megatron_fsdp import experimental
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

DIM, BATCH = 64, 32
Built = tuple[nn.Module, torch.optim.Optimizer, Callable[[], None], Callable[[], None]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + branch


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--engine", choices=("auto", "production", "experimental", "torch"))
    parser.add_argument("--optimizer", choices=("torch", "megatron"), default="megatron")
    parser.add_argument("--overlap", action=on_off, default=True)
    parser.add_argument("--double-buffer", action=on_off, default=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.engine in (None, "auto"):
        args.engine = "production" if args.device == "cuda" else "torch"
    if args.device == "cpu" and args.engine != "torch":
        parser.error(f"--engine {args.engine} needs a GPU: it makes CUDA streams")
    return args


def nothing() -> None:
    """What torch's FSDP2 needs after a step."""


def adamw(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay)


def torch_engine(model: nn.Sequential, args: argparse.Namespace) -> Built:
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    optimizer = adamw(model, args)
    if args.optimizer == "megatron":
        owner = SimpleNamespace(
            model_auto_sync=True, install_optimized_model_weights=nothing, zero_grad_buffer=nothing
        )
        for parameter in model.parameters():
            parameter._megatron_fsdp_model = owner  # type: ignore[attr-defined]
        megatron_fsdp.fully_shard_optimizer(optimizer)
    return model, optimizer, nothing, nothing


def production(model: nn.Sequential, args: argparse.Namespace) -> Built:
    options = {
        "fsdp_unit_modules": [Block],
        "zero_dp_strategy": "optim_grads_params",
        "overlap_grad_reduce": args.overlap,
        "overlap_param_gather": args.overlap,
        "fsdp_double_buffer": args.double_buffer,
    }
    if args.optimizer == "megatron":
        sharded, optimizer = megatron_fsdp.fully_shard(
            module=model, optimizer=adamw(model, args), **options
        )
        optimizer.param_groups[0]["weight_decay"] = args.weight_decay
        return sharded, optimizer, nothing, nothing
    sharded = megatron_fsdp.fully_shard_model(module=model, **options)
    sharded._replace_param_with_distributed_if_needed()
    optimizer = adamw(sharded, args)
    return sharded, optimizer, sharded.install_optimized_model_weights, sharded.zero_grad_buffer


def experimental_engine(model: nn.Sequential, args: argparse.Namespace) -> Built:
    mesh = init_device_mesh(args.device, (dist.get_world_size(),))
    flat = [experimental.Flat()]
    placements = experimental.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    for unit in (*model, model):
        experimental.fully_shard(unit, mesh, placements)
    optimizer = adamw(model, args)
    experimental.fully_shard_optimizer(optimizer)  # it copies the weights back, whose step it is
    return model, optimizer, nothing, nothing


def main() -> None:
    args = parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]) * (args.device == "cuda"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = nn.Sequential(*(Block() for _ in range(args.layers)), nn.Linear(DIM, DIM)).to(device)
    engines = {"torch": torch_engine, "production": production, "experimental": experimental_engine}
    sharded, optimizer, after_step, after_zero = engines[args.engine](model, args)
    data = torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))
    for step in range(args.steps):
        total = 0.0
        for microbatch in range(args.microbatches):
            x, y = torch.randn(2, BATCH, DIM, generator=data).to(device)
            if (step, rank, microbatch) == (args.plant_step, args.plant_rank, 1):
                x[0, 0] += 2**-18
            loss = nn.functional.mse_loss(sharded(x), y) / args.microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        after_step()
        optimizer.zero_grad()
        after_zero()
        print(f"rank {rank} step {step} loss {total.hex()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
