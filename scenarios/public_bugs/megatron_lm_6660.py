"""Megatron-LM #6660: megatron-fsdp doubles gradients each microbatch in a group of one rank.

https://github.com/NVIDIA/Megatron-LM/issues/6660 (fixed by pull request 6773; megatron-fsdp 0.6.1
has it). With the strategy `optim_grads_params` and a data-parallel group of one rank, the buffer of
the gradients is not sharded. Where gradients are communicated in another dtype than they are
accumulated in, the sum so far is added to itself at each microbatch.

    torchrun --nproc-per-node 1 megatron_lm_6660.py --comm fp32
    torchrun --nproc-per-node 1 megatron_lm_6660.py --comm bf16

One rank has nothing to communicate, and the gradients are small integers, which bf16 holds exactly:
the two must agree bit for bit. The wheel asks for CUDA; `--device cpu` runs the same code of the
wheel with CUDA's streams replaced by nothing and gloo's sum in place of NCCL's scaled one.
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

HIDDEN, BATCH = 64, 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NoStream:
    """A stream or an event where everything runs in order."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_: NoStream()


def do_without_cuda() -> None:
    """Let the wheel run on CPUs; one rank's scaled sum, by 1, is its plain sum."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.current_stream = lambda *_: NoStream()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda: None
    cuda.current_device = lambda: 0
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self: self
    distributed: Any = dist
    distributed._make_nccl_premul_sum = lambda _: dist.ReduceOp.SUM


def integers(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor:
    """-1, 0 and 1 in bf16: products and short sums of them are exact."""
    return torch.randint(-1, 2, shape, generator=generator).to(device, torch.bfloat16)


def build(device: torch.device, grad_comm: torch.dtype) -> tuple[Any, torch.optim.Optimizer]:
    """A layer and its optimizer, sharded over the one rank."""
    api = importlib.import_module("megatron_fsdp")
    torch.manual_seed(1234)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False)).to(device, torch.bfloat16)
    policy = api.MixedPrecisionPolicy(
        main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=grad_comm
    )
    sharded: tuple[Any, torch.optim.Optimizer] = api.fully_shard(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=2**-6),
        device_mesh=init_device_mesh(device.type, (1, 1), mesh_dim_names=("fsdp", "tp")),
        dp_shard_dim="fsdp",
        tp_dim="tp",
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy="optim_grads_params",
        device=device,
        mixed_precision_policy=policy,
    )
    return sharded


def main() -> None:
    """Train, and print the norm of the gradient that each step took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=3)
    parser.add_argument("--comm", choices=list(DTYPES), default="fp32")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) != 1:
        parser.error("expected one rank: with more the buffer is sharded")

    if options.device == "cpu":
        do_without_cuda()
        device = torch.device("cpu")
    elif torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        parser.error("expected a CUDA device, found none (or give --device cpu)")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, optimizer = build(device, DTYPES[options.comm])
    (weight,) = optimizer.param_groups[0]["params"]
    data = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for _ in range(options.microbatches):
            x, factor = (integers((BATCH, HIDDEN), data, device) for _ in range(2))
            loss = (model(x) * factor).sum()
            loss.backward()
        norm = weight.grad.to_local().norm().item()
        print(f"step {step}: loss {loss.item():.6f}, norm of the gradient {norm:.6f}")
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
