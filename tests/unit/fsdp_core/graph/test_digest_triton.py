"""The Triton kernel gives the bits of the plain torch digest, in and out of CUDA graphs.

Needs a GPU, or Triton and its interpreter: `TRITON_INTERPRET=1 pytest <this file>`.
"""

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from fsdp_core.graph import digest_torch as definition
from fsdp_core.graph.digest import Digester, empty_rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_kernel = pytest.mark.skipif(
    not HAS_TRITON or not (INTERPRETED or torch.cuda.is_available()),
    reason="needs Triton and a GPU (or TRITON_INTERPRET=1)",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter computes in NumPy, which warns of inf * 0.0 (NaN is what the kernel is after), and
# of how the interpreter itself reads loop bounds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def samples() -> list[Tensor]:
    """Every dtype, sizes around tiles and pages, odd addresses, strides, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(20_000, generator=generator)
    specials = torch.tensor([float("inf"), float("nan"), -0.0, -float("inf"), 1.0] * 700)
    tensors = [
        torch.randn(7, 5), torch.zeros(0), torch.tensor(3.0), base, base[1:], base[2:9000],
        base[3:], torch.randn(9, 4).t(), base.half()[1:], base[:7001].bfloat16(), specials,
        specials.double(),
        base[:2048], base[:2047], base[:2049], torch.arange(3, dtype=torch.uint8),
    ]  # fmt: skip
    # One NaN in the low or the high half of a word, in whole tiles and in the rest; doubles that
    # are finite though their low words are a float's NaN.
    for place in (0, 1, 5000, 5001):
        halves = torch.ones(5002).bfloat16()
        halves[place] = float("nan")
        tensors += [halves, halves.half()]
    low_nan = torch.tensor([0x3FF000007FF80000]).repeat(1500).view(torch.float64)
    tensors += [low_nan, low_nan[1:]]
    for dtype in definition.PATTERNS:
        data = torch.randint(0, 2, (1001 * dtype.itemsize,), generator=generator)
        scale = 1 if dtype == torch.bool else 127
        tensors.append((data * scale).to(torch.uint8).view(dtype))
    return tensors


def plain_rows(tensors: list[Tensor]) -> Tensor:
    copies = [t.cpu() for t in tensors]
    rows = empty_rows(len(copies), "cpu")
    Digester(copies, kernel="torch")(copies, rows)
    return rows


@needs_kernel
def test_same_bits_as_plain_torch() -> None:
    """Lanes and non-finite counts of the kernel equal those of the CPU, tensor by tensor."""
    # Addresses and strides as they are: a copy to the device would straighten both.
    tensors = [_like(t) for t in samples()]
    rows = empty_rows(len(tensors), DEVICE)
    Digester(tensors, kernel="triton")(tensors, rows)
    assert torch.equal(rows.cpu(), plain_rows(tensors))


@needs_kernel
def test_same_bits_in_every_launch_shape() -> None:
    """Launch shapes and chunks decide the order of summation, which changes nothing."""
    from fsdp_core.graph.digest_triton import Launch, TritonPlan

    tensors = [_like(t) for t in samples()]
    rows, expected = empty_rows(len(tensors), DEVICE), plain_rows(tensors)
    for launch in (Launch(1024, 4, 4096), Launch(4096, 8, 8192, 2), Launch(512, 2, 1000)):
        TritonPlan(tensors, torch.device(DEVICE), launch).update(tensors, rows)
        assert torch.equal(rows.cpu(), expected), launch


@needs_kernel
def test_rebuilds_its_table_when_a_tensor_moved() -> None:
    """Outside a capture a moved tensor is read at its new place, misaligned or not."""
    tensors = [torch.randn(5000, device=DEVICE), torch.randn(300, device=DEVICE)]
    digester, rows = Digester(tensors, kernel="triton"), empty_rows(2, DEVICE)
    digester(tensors, rows)
    for moved in (tensors[0].clone(), torch.randn(5003, device=DEVICE)[3:]):
        tensors[0] = moved
        digester(tensors, rows)
        assert torch.equal(rows.cpu(), plain_rows(tensors))


@needs_kernel
def test_stages_a_tensor_that_lost_its_layout() -> None:
    """A tensor contiguous when planned and strided later is copied, not misread."""
    square = torch.randn(64, 64, device=DEVICE)
    digester, rows = Digester([square], kernel="triton"), empty_rows(1, DEVICE)
    digester([square.t()], rows)
    assert torch.equal(rows.cpu(), plain_rows([square.t()]))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_chunks_cover_each_byte_once() -> None:
    """Chunks follow each other, cover all words and the tail, and are 16-byte aligned but heads."""
    from fsdp_core.graph.digest_triton import INDEX_SPAN, _chunks

    most = 1 << 18
    for address in (0, 4, 8, 12):
        for num_bytes in (0, 1, 3, 4, 17, most * 4, most * 8 + 6, INDEX_SPAN * 4 + 40):
            word = tail = 0
            for here, first, count, rest, row in _chunks(3, address, num_bytes, most):
                assert (here, first, row) == (address + word * 4, word, 3)
                assert count <= 3 or here % 16 == 0
                assert count <= most
                assert first // INDEX_SPAN == max(first, first + count - 1) // INDEX_SPAN
                word += count
                tail += rest
            assert word * 4 + tail == num_bytes


@pytest.mark.gpu(1)
def test_captured_digest_follows_the_data() -> None:
    """A replay digests what the tensors hold then; plain torch on CUDA agrees too."""
    tensors = [_like(t) for t in samples()]
    rows = empty_rows(len(tensors), "cuda")
    digester = Digester(tensors)
    digester(tensors, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        digester(tensors, rows)
    for tensor in tensors[:4]:
        tensor.mul_(1.5)
    graph.replay()
    assert torch.equal(rows.cpu(), plain_rows(tensors))
    Digester(tensors, kernel="torch")(tensors, rows)
    assert torch.equal(rows.cpu(), plain_rows(tensors))


@pytest.mark.gpu(1)
def test_capture_refuses_moved_tensors_and_keeps_its_table() -> None:
    """In a capture new addresses are refused; a later rebuild leaves the graph's table alone."""
    tensors = [torch.randn(5000, device="cuda")]
    rows, other = empty_rows(1, "cuda"), empty_rows(1, "cuda")
    digester = Digester(tensors)
    digester(tensors, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        digester(tensors, rows)
        with pytest.raises(RuntimeError, match="outside the capture"):
            digester([torch.randn(5001, device="cuda")[1:]], rows)
    expected = plain_rows(tensors)
    for _ in range(5):
        digester([torch.randn(5000, device="cuda")], other)
    rows.zero_()
    graph.replay()
    assert torch.equal(rows.cpu(), expected)


@pytest.mark.gpu(1)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_no_host_synchronisation() -> None:
    """Neither a call nor a rebuilt table waits for the device."""
    tensors = [torch.randn(5000, device="cuda")]
    rows = empty_rows(1, "cuda")
    digester = Digester(tensors)
    digester(tensors, rows)
    moved = [tensors[0].clone()]
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        digester(tensors, rows)
        digester(moved, rows)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    assert torch.equal(rows.cpu(), plain_rows(moved))


def _like(tensor: Tensor) -> Tensor:
    """The same values on the device, at an address with the same offset and with its strides."""
    if tensor.device.type == DEVICE:
        return tensor
    storage = tensor.untyped_storage()
    moved = torch.empty(storage.nbytes(), dtype=torch.uint8, device=DEVICE)
    moved.untyped_storage().copy_(storage)
    out = torch.empty(0, dtype=tensor.dtype, device=DEVICE)
    out.set_(moved.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return out
