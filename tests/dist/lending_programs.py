"""Programs about what collectives that are under way are lent."""

import torch
import torch.distributed as dist

from fsdp_core.device import Device


def drop_while_under_way() -> list[int]:
    """Live bytes of a tensor that is dropped first, while rank 1 is waited for, and after."""
    device = Device("cpu")
    with device.counting_memory():
        ready, tensor = torch.zeros(1), torch.ones(1000)
        if dist.get_rank() == 1:
            dist.recv(ready, 0)
            dist.all_reduce(tensor)
            return []
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        del tensor
        before = device.live_bytes()
        dist.send(ready, 1)
        work.wait()
        return [before, device.live_bytes()]
