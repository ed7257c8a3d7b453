"""The table of library errors: each entry is met, and its words in another's mouth are not."""

import pytest

from harness.recorder.session import TABLE, failures_of

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
MET = {
    "peer_lost": ("RuntimeError", GLOO + "Connection closed by peer [127.0.0.1]:1"),
    "mismatched": ("RuntimeError", "Received data size doesn't match expected size"),
    "illegal_access": ("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    "out_of_memory": ("OutOfMemoryError", "Tried to allocate 2 GiB"),
    "no_host_memory": ("RuntimeError", "DefaultCPUAllocator: can't allocate memory"),
    "no_group": ("RuntimeError", "Could not resolve the process group registered under the name 0"),
    "port_in_use": ("DistNetworkError", "EADDRINUSE, address already in use"),
    "rendezvous_timeout": ("DistStoreError", "Timed out after 61 seconds: 1/2 clients joined."),
    "nccl_system_error": ("DistBackendError", "NCCL error: unhandled system error"),
    "device_unavailable": (
        "AcceleratorError", "CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    ),
    "memory_error": ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered"),
    "of_device": ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
}  # fmt: skip


def test_every_entry_has_a_test() -> None:
    """An entry without one is words that somebody once saw."""
    assert [each.name for each in TABLE] == list(MET)


@pytest.mark.parametrize("name", MET)
def test_an_entry_is_met_by_what_its_library_raises(name: str) -> None:
    """By type, or by the words of that type."""
    assert name in failures_of(*MET[name])


@pytest.mark.parametrize("name", [each.name for each in TABLE if each.source != "any"])
def test_a_program_that_says_the_same_is_not_forgiven(name: str) -> None:
    """What excuses a run counts only from the library's own types, or with its place in front."""
    words = MET[name][1]
    assert name not in failures_of("ValueError", words)
    assert name not in failures_of("RuntimeError", f"as they say: {words}")


@pytest.mark.parametrize(
    ("kind", "message", "name"),
    [
        ("RendezvousTimeoutError", "", "rendezvous_timeout"),
        ("MemoryError", "", "out_of_memory"),
        ("RuntimeError", GLOO + "bind: Address already in use", "port_in_use"),
        ("", "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal_access"),
    ],
)
def test_other_ways_of_saying_it(kind: str, message: str, name: str) -> None:
    """Types alone, gloo's plain RuntimeError, and what a dying process printed."""
    assert name in failures_of(kind, message)


def test_most_exceptions_mean_nothing() -> None:
    """A program's own error is in no entry."""
    assert failures_of("ValueError", "expected 3 layers, got 2") == frozenset()
