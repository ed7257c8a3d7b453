"""Which GPU a rank has, and what lets several ranks share one.

NCCL refuses two ranks of one communicator on one GPU, as it sees by host and bus. Ranks that share
GPUs are therefore put on hosts of their own, by NCCL_HOSTID: the first rank of each GPU makes up
the first host, the second rank of each the next, and so on. Ranks of one such host talk as ever;
hosts talk through sockets on the loopback device. A layout of 8 ranks so runs on 2 GPUs as on four
hosts of two: with NCCL's own kernels and bits, and with times that mean nothing.
"""

import os
from collections.abc import Sequence

from harness.shared_gpus import HOST_KEY, SHARED_HOST

MPS_PIPES = "/tmp/nvidia-mps"
"""Folder of the pipes of CUDA's MPS, unless CUDA_MPS_PIPE_DIRECTORY names another."""


def shared(gpus: Sequence[str], ranks_per_gpu: int) -> tuple[str, ...]:
    """The GPU of each rank slot: every GPU once, then every GPU again.

    Raises:
        ValueError: less than one rank a GPU.
    """
    if ranks_per_gpu < 1:
        raise ValueError(f"Expected at least 1 rank a GPU, got {ranks_per_gpu}.")
    return tuple(gpus) * ranks_per_gpu


def gpu_environment(devices: Sequence[str], rank: int) -> dict[str, str]:
    """Variables of one rank: the GPUs that it sees, and its own as LOCAL_RANK.

    Args:
        devices: GPU of each rank, as CUDA_VISIBLE_DEVICES names it; empty for ranks without.
        rank: whose environment.
    """
    if not devices:
        return {"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": str(rank)}
    # CUDA sees no GPU at all where one is named twice.
    seen = list(dict.fromkeys(devices))
    found = {
        "CUDA_VISIBLE_DEVICES": ",".join(seen),
        "LOCAL_RANK": str(seen.index(devices[rank])),
    }
    if len(seen) < len(devices):
        host = devices[:rank].count(devices[rank])
        found |= {HOST_KEY: f"{SHARED_HOST}-{host}", "NCCL_SOCKET_IFNAME": "lo"}
    return found


def mps_runs() -> bool:
    """Whether processes that use CUDA here go through MPS: its daemon has made its control pipe."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES
    return os.path.exists(os.path.join(folder, "control"))  # noqa: PTH110, PTH118 - never raises
