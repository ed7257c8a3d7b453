"""Train a small transformer under DistributedDataParallel: accumulation, clipping, a schedule.

Planted difference: --plant-step S --plant-rank R adds 2**-18 to one input element of microbatch 1.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DIM, HEADS, LENGTH, BATCH = 64, 4, 16, 4


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    on_off = argparse.BooleanOptionalAction
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--bucket-view", action=on_off, default=False)
    parser.add_argument("--foreach", action=on_off, default=True)
    parser.add_argument("--fused", action=on_off, default=False)
    parser.add_argument("--set-to-none", action=on_off, default=True)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--plant-step", type=int, default=-1)
    parser.add_argument("--plant-rank", type=int, default=0)
    return parser.parse_args()


def start(choice: str, seed: int) -> torch.device:
    """Join the process group that torchrun describes; return this rank's device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(seed)
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def main() -> None:
    args = parse_args()
    device = start(args.device, args.seed)
    rank = dist.get_rank()
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, args.dropout, batch_first=True)
    model = DistributedDataParallel(
        nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False).to(device),
        bucket_cap_mb=args.bucket_cap_mb,
        gradient_as_bucket_view=args.bucket_view,
    )
    foreach = None if args.fused else args.foreach
    optimizer = torch.optim.AdamW(
        model.parameters(), args.lr, foreach=foreach, fused=args.fused or None
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    data = torch.Generator().manual_seed(args.seed + 1000 * (rank + 1))
    torch.manual_seed(args.seed + rank)  # every rank drops other elements
    for step in range(args.steps):
        total = 0.0
        for microbatch in range(args.microbatches):
            x, y = torch.randn(2, BATCH, LENGTH, DIM, generator=data).to(device)
            if (step, rank, microbatch) == (args.plant_step, args.plant_rank, 1):
                x[0, 0, 0] += 2**-18
            last = microbatch == args.microbatches - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.mse_loss(model(x), y) / args.microbatches
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_norm, foreach=foreach)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=args.set_to_none)
        print(f"rank {rank} step {step} loss {total.hex()} norm {float(norm).hex()}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after the model: DDP's reducer must not free the last reference
