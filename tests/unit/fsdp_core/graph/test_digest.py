"""The digest in plain torch: its definition, what it detects, what a capture needs of it."""

import dataclasses
import itertools
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
