"""Named mesh of ranks: one axis a parallel degree, size 1 included where it is used.

Degree 1 goes through the same code as any other: a mesh of size 1 has a process group of one rank.
"""

import datetime

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_core.config import ParallelConfig
from fsdp_core.device import Device


def init_ranks(
    device: Device, store: dist.Store, rank: int, world_size: int, timeout_s: float
) -> None:
    """Join the default process group through `store`.

    Raises:
        torch.distributed.DistStoreError: not every rank arrived within `timeout_s`.
    """
    dist.init_process_group(
        device.collective_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device.torch_device if device.is_cuda else None,
    )


def build_mesh(parallel: ParallelConfig, device: Device) -> DeviceMesh:
    """The mesh of a layout over the ranks of the default process group: (dp_outer,) dp.

    Raises:
        ValueError: the degrees do not multiply to the number of ranks.
    """
    world_size = dist.get_world_size()
    if parallel.world_size != world_size:
        raise ValueError(f"Expected {parallel.world_size} ranks for {parallel}, got {world_size}.")
    if parallel.dp_outer == 1:
        return init_device_mesh(device.kind, (parallel.dp,), mesh_dim_names=("dp",))
    shape = (parallel.dp_outer, parallel.dp)
    return init_device_mesh(device.kind, shape, mesh_dim_names=("dp_outer", "dp"))
