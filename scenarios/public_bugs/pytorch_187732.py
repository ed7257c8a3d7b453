"""pytorch #187732: DDP with a static graph cannot accumulate gradients from the first step on.

https://github.com/pytorch/pytorch/pull/187732 (open; reported as huggingface/accelerate #3679). If
the first backward pass is under `no_sync()`, `static_graph=True` ends in an internal assertion.

    torchrun --nproc-per-node 2 pytorch_187732.py
    torchrun --nproc-per-node 2 pytorch_187732.py --static-graph

The two must agree bit for bit, and do with `--microbatches 1`.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train on random numbers, another sequence on each rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--static-graph", action="store_true")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    replicated = DistributedDataParallel(model, static_graph=options.static_graph)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(options.steps):
        optimizer.zero_grad()
        for microbatch in range(options.microbatches):
            is_last = microbatch == options.microbatches - 1
            with contextlib.nullcontext() if is_last else replicated.no_sync():
                loss = replicated(torch.randn(8, 16, generator=data)).square().mean()
                (loss / options.microbatches).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
