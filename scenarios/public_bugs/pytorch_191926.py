"""pytorch #191926: the gradient of a convolution of a DTensor has the wrong placement.

https://github.com/pytorch/pytorch/issues/191926 (a regression of torch 2.13; 2.12 is right). An
image that is cut along its width gets a gradient that is marked as cut along the batch. Strides are
as wide as the kernels, so no rank needs its neighbour's columns.

    torchrun --nproc-per-node 2 pytorch_191926.py --cut batch
    torchrun --nproc-per-node 2 pytorch_191926.py --cut width

Only the order of sums differs, so losses must agree to rounding.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

CUTS = {"batch": 0, "width": 3}


def main() -> None:
    """Train on random images, the same on all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cut", choices=list(CUTS), default="batch")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, kernel_size=4, stride=4), nn.Conv2d(8, 8, kernel_size=2, stride=2)
    )
    distribute_module(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(options.steps):
        images = distribute_tensor(torch.randn(4, 3, 16, 32), mesh, [Shard(CUTS[options.cut])])
        loss = model(images).square().mean().full_tensor()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
