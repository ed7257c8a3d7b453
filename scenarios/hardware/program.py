"""Train two layers under DistributedDataParallel, on a CPU or on GPUs; one input may go wrong.

--wrong device   on GPU, or CPU core, 0       --wrong program   everywhere
--wrong rank     on rank 1                    --wrong once      on rank 1, in the first run that
                                                                finds no file --mark
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

BAD_STEP = 1


def has_device_0() -> bool:
    """Whether this process has the first GPU of the machine, or may run on the first core."""
    if not torch.cuda.is_available():
        return 0 in os.sched_getaffinity(0)
    import pynvml

    pynvml.nvmlInit()
    first = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) in first


def is_wrong(how: str, mark: Path) -> bool:
    """Whether this process is at fault, which is found out once."""
    if how == "once" and dist.get_rank() == 1:
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
    return {
        "device": has_device_0(), "rank": dist.get_rank() == 1, "program": True,
    }.get(how, False)  # fmt: skip


def main() -> None:
    """Read the options and train for three steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrong", default="", choices=("", "device", "rank", "program", "once"))
    parser.add_argument("--mark", type=Path, default=Path("mark"))
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(device)
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrong = is_wrong(options.wrong, options.mark)
    for step in range(3):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        batch = torch.randn(8, 16, generator=generator).to(device)
        if wrong and step == BAD_STEP:
            batch[0, 0] += 2**-18
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
