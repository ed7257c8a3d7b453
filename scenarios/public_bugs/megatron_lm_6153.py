"""Megatron-LM #6153: activation recompute leaves layers unsharded, and they miss updates.

https://github.com/NVIDIA/Megatron-LM/pull/6153 (merged after the release of megatron-fsdp 0.6.1).
Under megatron-fsdp's experimental engine a recomputed forward pass in the backward pass prefetches
the next layer, whose own backward pass is over, so nothing reshards it. The next step takes its
weights from before the optimizer's step. Nothing is raised.

    torchrun --nproc-per-node 1 megatron_lm_6153.py
    torchrun --nproc-per-node 1 megatron_lm_6153.py --recompute

Recomputed activations are those that were dropped: the two must agree bit for bit, and do with
`--layers 1`. The wheel asks for CUDA; `--device cpu` runs the same code of the wheel with CUDA's
streams replaced by nothing.
"""

import argparse
import contextlib
import importlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

HIDDEN, BATCH = 32, 8


class NoStream:
    """A stream or an event where everything runs in order."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: NoStream()


def do_without_cuda() -> None:
    """Let the wheel run on CPUs."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = lambda *_: NoStream()
    cuda.stream = cuda.device = lambda _: contextlib.nullcontext()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None


class Model(nn.Module):
    """Layers whose activations may be dropped."""

    def __init__(self, layers: int, *, recompute: bool) -> None:
        super().__init__()
        made = (nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(layers))
        self.layers, self.recompute = nn.ModuleList(made), recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of `[B, H]`."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def shard(model: Model, device: torch.device) -> torch.optim.Optimizer:
    """Each layer a unit, and the rest one with the root."""
    engine: Any = importlib.import_module("megatron_fsdp.experimental")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    flat = [engine.Flat()]
    placements = engine.Placements(dp_axes=[0], parameter=flat, gradient=flat, optimizer=flat)
    for unit in (*model.layers, model):
        engine.fully_shard(unit, mesh, placements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.fully_shard_optimizer(optimizer)
    return optimizer


def main() -> None:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--recompute", action="store_true", help="drop activations of each layer")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        do_without_cuda()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(1234)
    model = Model(options.layers, recompute=options.recompute).to(device)
    optimizer = shard(model, device)
    data = torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        optimizer.zero_grad()
        x, target = torch.randn(2, BATCH, HIDDEN, generator=data).to(device)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        print(f"step {step}: loss {loss.item():.9f}", flush=True)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
