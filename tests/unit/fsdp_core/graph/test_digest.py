"""The digest in plain torch: its definition, what it detects, what a capture needs of it."""

import dataclasses
import importlib.util
import itertools
import os
import random
import struct
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import corruptions
from benchmarks.digest import digest_texts
from fsdp_core.device import Device
from fsdp_core.graph import digest_torch as definition
from fsdp_core.graph.device_graphs import HostGraph
from fsdp_core.graph.digest import Digester, digest_hex, digest_tensors, empty_rows

MASK = 0xFFFF_FFFF


def reference(data: bytes) -> str:
    lanes = [len(data) * factor for factor in definition.LENGTH]
    padded = data + b"\0" * (-len(data) % 4)
    for j, (word,) in enumerate(struct.iter_unpack("<I", padded)):
        terms = mix_terms(word, j, definition.M2)
        lanes = [lane + term for lane, term in zip(lanes, terms, strict=True)]
    return "".join(f"{lane & MASK:08x}" for lane in lanes)


def mix_terms(word: int, j: int, factor: int) -> tuple[int, int, int, int]:
    key = j * definition.C1 + definition.S1 & MASK
    x = word ^ key
    x = (x ^ x >> 16) * definition.M1 & MASK
    x ^= x >> 15
    y = x * factor + key & MASK
    y ^= y >> 16
    z = y * definition.M3 & MASK
    z ^= z >> 15
    return z, x * z, x * y, y * z


def raw(data: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8).view(dtype)


def rows_of(*tensors: Tensor) -> Tensor:
    rows = empty_rows(len(tensors), "cpu")
    digest_tensors(tensors, rows)
    return rows


@given(st.lists(st.binary(max_size=700), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_equals_definition(contents: list[bytes]) -> None:
    """Any bytes, in tensors of any length, digest to what ten lines of Python integers give."""
    assert digest_texts([raw(data) for data in contents]) == [reference(d) for d in contents]


def test_equals_definition_across_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor longer than a page counts its word index on, and shares pages with others."""
    monkeypatch.setattr(definition, "PAGE_WORDS", 1 << 14)
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(0, 256, (definition.PAGE_WORDS * 4 + 4099,), generator=generator)
    tensors = [torch.ones(5), long.to(torch.uint8), torch.arange(70, dtype=torch.int16)]
    texts = digest_texts(tensors)
    assert texts == [reference(bytes_of(t)) for t in tensors]


def bytes_of(tensor: Tensor) -> bytes:
    """The bytes of the logical elements, by a road that the digest does not take."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


@pytest.mark.parametrize("dtype", definition.PATTERNS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7), (2, 3, 65)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Each supported dtype is read by its bytes: 0-d, empty, odd tails, several rows."""
    elements = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(elements)
    most = 2 if dtype == torch.bool else 256
    data = torch.randint(0, most, (elements * dtype.itemsize,), generator=generator)
    tensor = data.to(torch.uint8).view(dtype).reshape(shape)
    assert digest_texts([tensor]) == [reference(bytes(data.tolist()))]


def test_row_major_order_of_logical_elements() -> None:
    """Strides do not count, order does: a transpose equals its contiguous copy, not its base."""
    base = torch.arange(12.0).reshape(3, 4)
    transposed, copy, straight = digest_texts([base.t(), base.t().contiguous(), base])
    assert transposed == copy
    assert transposed != straight


def test_independent_of_grouping_and_page_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors alone, together, reversed and over small pages have the same digests."""
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(n, generator=generator) for n in (5000, 1, 64, 65, 777)]
    together = digest_texts(tensors)
    assert together == [digest_texts([t])[0] for t in tensors]
    assert together == digest_texts(tensors[::-1])[::-1]
    monkeypatch.setattr(definition, "PAGE_WORDS", 128)
    assert together == digest_texts(tensors)


def test_index_counts_on_past_32_bits() -> None:
    """Words 2**32 apart share a key but not the second factor, and that stays odd."""
    far = [5 + (n << 32) for n in range(1000)]
    assert len({definition.index_key(index) for index in far}) == 1
    factors = {definition.second_factor(index) for index in far}
    assert len(factors) == 1000
    assert all(factor % 2 for factor in factors)


def test_reads_words_past_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan takes key and second factor from a piece's own index, next to pieces of others."""
    monkeypatch.setattr(definition, "PAGE_WORDS", 64)
    cut = definition._cut

    def far_cut(number: int, tensor: Tensor) -> Iterator[definition._Piece]:
        for i, piece in enumerate(cut(number, tensor)):
            yield dataclasses.replace(piece, word=piece.word + (i << 32))

    tensors = [torch.arange(150, dtype=torch.int32), torch.zeros(3)]
    monkeypatch.setattr(definition, "_cut", far_cut)
    rows = rows_of(*tensors)
    lanes = [tensors[0].nbytes * factor for factor in definition.LENGTH]
    for j, word in enumerate(tensors[0].tolist()):
        terms = mix_terms(word, j, definition.second_factor((j // 64) << 32))
        lanes = [lane + term for lane, term in zip(lanes, terms, strict=True)]
    assert [lane & MASK for lane in lanes] == [int(n) & MASK for n in rows[0, :4].tolist()]
    assert digest_hex(rows[1:])[0] == reference(bytes(12))


@given(st.sampled_from(corruptions.KINDS), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_change_of_bits_changes_the_digest(change: corruptions.Change, seed: int) -> None:
    """Digests are equal exactly where bytes are."""
    rng = random.Random(seed)
    original = corruptions.draw(rng, torch.Generator().manual_seed(seed))
    changed = corruptions.corrupt(original, change, rng)
    first, second = digest_texts([original, changed])
    assert (first == second) == (bytes_of(original) == bytes_of(changed))


# --- text -------------------------------------------------------------------------------------


def test_hex_is_big_endian_lanes() -> None:
    """32 lower-case characters a row, lane by lane, most significant digit first."""
    rows = torch.tensor([[1, -1, 0x10, -(2**31), 7], [0, 0, 0, 0xABC, 0]], dtype=torch.int32)
    text, counts = digest_hex(rows)
    assert text == "00000001ffffffff0000001080000000" + "0" * 24 + "00000abc"
    assert counts == [7, 0]


def test_hex_of_nothing() -> None:
    """No tensors: an empty string, no counts."""
    assert digest_hex(rows_of()) == ("", [])


def test_hex_refuses_other_shapes() -> None:
    """Rows of another width or dtype are refused, not misread."""
    with pytest.raises(ValueError, match="int32"):
        digest_hex(torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="int64"):
        digest_hex(torch.zeros(2, 5, dtype=torch.int64))


# --- what a capture needs ---------------------------------------------------------------------


def test_a_graph_holds_a_digest() -> None:
    """A replay digests what the tensors hold then; all it touches are arguments and `scratch`.

    A capture refuses reads of values on the host, and tensors made of numbers.
    """
    tensors = [torch.randn(50), torch.randn(6, 7).t(), torch.randn(400).bfloat16()]
    digester, rows, graph = Digester(tensors), empty_rows(3, "cpu"), HostGraph(Device("cpu"))
    digester(tensors, rows)
    before = rows.clone()
    graph.capture(lambda: digester(tensors, rows))
    for tensor in tensors:
        tensor.mul_(2)
    graph.replay()
    replayed = rows.clone()
    digester(tensors, rows)
    assert torch.equal(replayed, rows)
    assert not torch.equal(replayed, before)
    known = {t.untyped_storage().data_ptr() for t in (*tensors, rows, *digester.scratch())}
    assert {entry.address for entry in graph.recording.storages} <= known


def test_moved_and_grad_requiring_tensors_are_read_where_they_are() -> None:
    """Parameters work, and a tensor whose storage was replaced is read at its new place."""
    parameter = torch.nn.Parameter(torch.randn(10))
    digester, rows = Digester([parameter]), empty_rows(1, "cpu")
    digester([parameter], rows)
    parameter.data = torch.randn(10)
    digester([parameter], rows)
    assert digest_hex(rows)[0] == reference(bytes_of(parameter.detach()))
    assert not rows.requires_grad


# --- misuse -----------------------------------------------------------------------------------


def test_refuses_other_tensors_than_planned() -> None:
    """A changed shape, dtype, number or output is refused with the tensor's name."""
    planned = torch.zeros(4)
    digester, rows = Digester([planned], ["w"]), empty_rows(1, "cpu")
    with pytest.raises(ValueError, match=r"Expected w to be torch.float32 \[4\].*\[5\]"):
        digester([torch.zeros(5)], rows)
    with pytest.raises(ValueError, match="float64"):
        digester([torch.zeros(4).double()], rows)
    with pytest.raises(ValueError, match="Expected 1 tensors, got 2"):
        digester([planned, planned], rows)
    with pytest.raises(ValueError, match="Expected out"):
        digester([planned], empty_rows(2, "cpu"))
    with pytest.raises(ValueError, match="Expected out"):
        digester([planned], empty_rows(2, "cpu").t()[:1])


def test_refuses_what_it_cannot_read() -> None:
    """Unknown dtypes, sparse tensors, mixed devices and missing names are refused by name."""
    with pytest.raises(ValueError, match="Expected z to be one of"):
        Digester([torch.zeros(2, dtype=torch.complex64)], ["z"])
    with pytest.raises(ValueError, match="strided"):
        Digester([torch.zeros(2, 2).to_sparse()])
    with pytest.raises(ValueError, match="one device"):
        Digester([torch.zeros(1), torch.zeros(1, device="meta")])
    with pytest.raises(ValueError, match="names"):
        Digester([torch.zeros(1)], ["a", "b"])


FLOATS = [dtype for dtype, pattern in definition.PATTERNS.items() if pattern.fields]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_flags_nonfinite(dtype: torch.dtype) -> None:
    """The fifth column agrees with `isfinite` on every exponent, wherever in the tensor it is."""
    size = dtype.itemsize
    lows = (0, 1, 0x7F, 0x80, 0xEF, 0xF0, 0xFB, 0xFC, 0xFF) if size > 1 else (0,)
    tensors = []
    for i, (high, low) in enumerate(itertools.product(range(256), lows)):
        data = torch.zeros(5, size, dtype=torch.uint8)
        data[i % 5, -2 if size > 1 else -1] = low
        data[i % 5, -1] = high
        tensors.append(data.view(dtype).reshape(-1))
    expected = [int(not t.to(torch.float64).isfinite().all()) for t in tensors]
    assert 0 < sum(expected) < len(expected)
    assert digest_hex(rows_of(*tensors))[1] == expected


def test_flag_is_one_however_many() -> None:
    """A tensor of nothing but NaN, over several rows of a page, has the flag 1, as one NaN has."""
    many, one = torch.full((1000,), float("nan")), torch.zeros(1000)
    one[999] = float("inf")
    assert digest_hex(rows_of(many, one, torch.zeros(3)))[1] == [1, 1, 0]


def test_low_half_of_a_double_is_no_exponent() -> None:
    """A finite float64 whose low word looks like a float32 NaN is finite."""
    tensor = torch.tensor([0x3FF000007FF80000] * 3).view(torch.float64)
    assert bool(tensor.isfinite().all())
    assert digest_hex(rows_of(tensor))[1] == [0]


def test_integers_are_finite() -> None:
    """All-ones integers are no NaN."""
    tensors = [torch.full((9,), -1, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    assert digest_hex(rows_of(*tensors))[1] == [0, 0]


# --- the Triton kernel gives the bits of the plain torch digest, in and out of CUDA graphs --------


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
