"""What exceptions of libraries mean: by type, and by words where the type does not say it.

The one table in which words of other people's messages decide anything; each entry has a test.

    name                types                        its words say
    peer_lost           any                          a peer is gone, or does not answer
    mismatched          any                          gloo got another message than it waited for
    illegal_access      any                          an illegal address on a GPU
    out_of_memory       OutOfMemoryError, any        no memory on a GPU
    no_host_memory      any                          no memory on the host
    no_group            any                          process groups are not there any more
    port_in_use         torch.distributed's, gloo's  the address is taken
    rendezvous_timeout  torch.distributed's, gloo's  ranks did not all meet
    nccl_system_error   torch.distributed's, gloo's  a call of the system or network failed
    device_unavailable  CUDA's                       CUDA gives out no GPU
    memory_error        CUDA's                       a GPU has an uncorrectable error of memory
    of_device           CUDA's, NCCL's, any          anything of CUDA, NCCL, cuBLAS or cuDNN
"""

import re
from typing import Literal, NamedTuple

DISTRIBUTED = (
    "DistError", "DistBackendError", "DistNetworkError", "DistStoreError",
    "RendezvousTimeoutError", "RendezvousConnectionError",
)  # fmt: skip
"""Types that torch.distributed raises for NCCL, the store and the network."""
_GLOO = re.compile(r"\[(?:enforce fail at )?[^\]\s]*/gloo/[^\]\s]+:\d+\] ")
"""How what gloo throws begins: the place in its sources."""
_CUDA = ("AcceleratorError", "RuntimeError")
_CUDA_BEGINS = "CUDA error: "
_MEMORY = ("OutOfMemoryError", "MemoryError")


class LibraryError(NamedTuple):
    """An entry of the table.

    Attributes:
        source: whose exceptions count.
        types: that say it by themselves.
        phrases: in lower case; one of them is in the type and the message.
    """

    name: str
    phrases: tuple[str, ...]
    source: Literal["any", "distributed", "cuda"] = "any"
    types: tuple[str, ...] = ()


TABLE = (
    LibraryError(
        "peer_lost",
        (
            "connection closed by peer", "connection reset by peer", "broken pipe",
            "connection refused", "connection was likely closed", "remote process exited",
            "socket timeout", "timed out waiting", "wait timeout after",
            "nccl communicator was aborted", "sendbytes failed", "recvvalue failed",
            "failed to recv",
        ),
    ),
    LibraryError("mismatched", ("collective mismatch", "match expected size")),
    LibraryError("illegal_access", ("illegal memory access", "cuda_error_illegal_address")),
    LibraryError(
        "out_of_memory", ("cuda out of memory", "cuda_error_out_of_memory"), types=_MEMORY
    ),
    LibraryError("no_host_memory", ("can't allocate memory",)),
    LibraryError(
        "no_group",
        (
            "could not resolve the process group", "process group has not been initialized",
            "invalid process group specified",
        ),
    ),
    LibraryError("port_in_use", ("address already in use", "eaddrinuse"), "distributed"),
    LibraryError(
        "rendezvous_timeout",
        (
            "clients joined", "timed out waiting for clients", "client socket has timed out",
        ),
        "distributed",
        types=("RendezvousTimeoutError", "RendezvousConnectionError"),
    ),
    LibraryError(
        "nccl_system_error", ("ncclsystemerror", "nccl error: unhandled system error"),
        "distributed",
    ),
    LibraryError(
        "device_unavailable", ("cuda-capable device(s) is/are busy or unavailable",), "cuda"
    ),
    LibraryError("memory_error", ("uncorrectable ecc error encountered",), "cuda"),
    LibraryError("of_device", ("cuda", "nccl", "cublas", "cudnn"), types=("AcceleratorError",)),
)  # fmt: skip


def failures_of(kind: str, message: str) -> frozenset[str]:
    """Names of what an exception means; none for most of them.

    Args:
        kind: name of its type; "" for what a process printed as it died.
        message: its text.
    """
    text = f"{kind}: {message}".lower()
    return frozenset(
        each.name
        for each in TABLE
        if kind in each.types
        or (_is_from(each.source, kind, message) and any(p in text for p in each.phrases))
    )


def _is_from(source: str, kind: str, message: str) -> bool:
    if source == "cuda":
        return kind in _CUDA and message.startswith(_CUDA_BEGINS)
    if source == "distributed":
        return kind in DISTRIBUTED or (kind == "RuntimeError" and bool(_GLOO.match(message)))
    return True
