"""Train a small transformer under FSDP2 (`fully_shard`), each layer a unit and the root another.

Planted difference: --plant-step S --plant-rank R adds 2**-18 to one input element of microbatch 1.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

DIM, HEADS, LENGTH, BATCH = 64, 4, 16, 4


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.output = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.output(x)
        return result


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--reshard-after-forward", action=on_off, default=True)
    parser.add_argument("--explicit-prefetching", action=on_off, default=False)
    parser.add_argument("--sync-last-only", action=on_off, default=True)
    parser.add_argument("--mixed-precision", action=on_off, default=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    return parser.parse_args()


def shard(model: Model, args: argparse.Namespace, device: torch.device) -> None:
    """Shard each layer, then the rest with the root."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if args.mixed_precision:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model.layers, model):
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=args.reshard_after_forward, mp_policy=policy
        )
    if args.explicit_prefetching:
        for first, second in itertools.pairwise(model.layers):
            assert isinstance(first, FSDPModule)
            assert isinstance(second, FSDPModule)
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])


def main() -> None:
    args = parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    device = torch.device("cpu")
    if args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available()):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = Model(args.layers).to(device)
    shard(model, args, device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    data = torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))
    for step in range(args.steps):
        total = 0.0
        for microbatch in range(args.microbatches):
            x, y = torch.randn(2, BATCH, LENGTH, DIM, generator=data).to(device)
            if (step, rank, microbatch) == (args.plant_step, args.plant_rank, 1):
                x[0, 0, 0] += 2**-18
            if args.sync_last_only:
                last = microbatch == args.microbatches - 1
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            loss = nn.functional.mse_loss(model(x).float(), y) / args.microbatches
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} step {step} loss {total.hex()} norm {float(norm).hex()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
