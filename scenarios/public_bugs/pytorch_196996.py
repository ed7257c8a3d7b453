"""pytorch #196996: FSDP2 refuses a gradient that is new in the last microbatch.

https://github.com/pytorch/pytorch/issues/196996 (open). In mixed precision the gradients that were
accumulated without reduction are float32, one that the last microbatch makes first is bfloat16, and
the reduction asserts that all are alike.

    torchrun --nproc-per-node 1 pytorch_196996.py --fresh first
    torchrun --nproc-per-node 1 pytorch_196996.py --fresh last

One rank, so nothing is communicated. `--fresh` says which of two equal microbatches uses the second
layer: the two must agree bit for bit.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Model(nn.Module):
    """A layer, and one that not every microbatch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(16, 16)
        self.sometimes = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, *, uses_both: bool) -> torch.Tensor:
        """[n, 16] to [n, 16]."""
        hidden = self.always(x)
        return self.sometimes(hidden) if uses_both else hidden


def main() -> None:
    """Train on random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fresh", choices=["first", "last"], default="first")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        x = torch.randn(8, 16)
        for microbatch in ("first", "last"):
            model.set_requires_gradient_sync(microbatch == "last")
            model(x, uses_both=microbatch == options.fresh).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
