"""Megatron-LM #5974: megatron-fsdp's optimizer trains before step 0, then too little.

https://github.com/NVIDIA/Megatron-LM/issues/5974 (fixed by pull request 5976; releases up to
0.6.1 have it). `fully_shard_optimizer` makes the optimizer's state by a step with gradients of
zero. That step applies the weight decay and counts: the first real update has the bias correction
of a second one and is 0.744 of what it should be.

    torchrun --nproc-per-node 2 megatron_lm_5974.py --optimizer torch
    torchrun --nproc-per-node 2 megatron_lm_5974.py --optimizer megatron

torch FSDP2 shards the model in both runs, on CPUs: only who wraps the optimizer differs. The two
must agree bit for bit.
"""

import argparse
import importlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

HIDDEN, BATCH, LEARNING_RATE = 64, 8, 1e-3


class Sharded:
    """What the wheel's optimizer asks of the model that it belongs to; torch FSDP2 does it all."""

    model_auto_sync = True

    def install_optimized_model_weights(self) -> None:
        """The optimizer works on the model's own weights."""

    def zero_grad_buffer(self) -> None:
        """There is no buffer beside the gradients."""


def build() -> nn.Module:
    """The same weights on all ranks, each layer and the root sharded."""
    torch.manual_seed(1234)
    layers = [nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, dropout=0.0) for _ in range(2)]
    model = nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*layers, model):
        fully_shard(part, mesh=mesh)
    return model


def make_optimizer(model: nn.Module, kind: str, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW, as it is or wrapped by the wheel."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=weight_decay)
    if kind == "torch":
        return optimizer
    api = importlib.import_module("megatron_fsdp")
    for parameter in model.parameters():
        parameter._megatron_fsdp_model = Sharded()  # type: ignore[attr-defined]
    wrapped: torch.optim.Optimizer = api.fully_shard_optimizer(optimizer)
    return wrapped


def local_copies(model: nn.Module) -> list[torch.Tensor]:
    """This rank's shards."""
    shards = (p.to_local() for p in model.parameters() if isinstance(p, DTensor))
    return [shard.detach().clone() for shard in shards]


def norm(tensors: Iterable[torch.Tensor]) -> float:
    """Over all ranks."""
    total = torch.stack([tensor.double().square().sum() for tensor in tensors]).sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def main() -> None:
    """Train, and print on rank 0 what each step did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--optimizer", choices=["torch", "megatron"], default="torch")
    parser.add_argument("--weight-decay", type=float, default=0.01)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    say = print if dist.get_rank() == 0 else lambda *_: None
    model = build()
    optimizer = make_optimizer(model, options.optimizer, options.weight_decay)
    data = torch.Generator().manual_seed(dist.get_rank())
    say(f"before step 0: norm of the weights {norm(local_copies(model)):.9f}")
    for step in range(options.steps):
        x, target = (torch.randn(4, BATCH, HIDDEN, generator=data) for _ in range(2))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        before = local_copies(model)
        optimizer.step()
        update = norm(b - a for a, b in zip(before, local_copies(model), strict=True))
        say(f"step {step}: loss {loss.item():.9f}, norm of the update {update:.9f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
