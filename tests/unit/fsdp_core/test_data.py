"""Data: a pure function of (seed, step, rank, microbatch), and a corpus that is what it says."""

import hashlib
import random
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp_core.config import DataConfig
from fsdp_core.data import (
    MAX_DOCUMENTS,
    Batches,
    PackedDocuments,
    SyntheticTokens,
    TextTokens,
    corpus_files,
    mix,
    token_source,
)


def batches(seed: int = 7, rank: int = 0, vocab_size: int = 256, micro: int = 3) -> Batches:
    return Batches(SyntheticTokens(vocab_size), seed, rank, micro, 2, 16)


def test_independent_of_call_order() -> None:
    """Any step again, in any order, from a new object, gives the same tokens."""
    forward = [batches().tokens(step) for step in range(8)]
    order = list(range(8))
    random.Random(0).shuffle(order)
    again = batches()
    for step in order + order:
        assert torch.equal(again.tokens(step), forward[step])


def test_every_coordinate_matters() -> None:
    """Seeds, steps, ranks, microbatches and rows all get tokens of their own."""
    rows = [
        tuple(row.tolist())
        for seed in (0, 1, 2)
        for rank in range(3)
        for step in range(3)
        for row in batches(seed, rank, vocab_size=4096).tokens(step).flatten(0, 1)
    ]
    assert len(set(rows)) == len(rows) == 3 * 3 * 3 * 3 * 2


@pytest.mark.parametrize(("ranks", "micro"), [(4, 1), (1, 4), (2, 2)])
def test_other_ranks_read_the_same_samples(ranks: int, micro: int) -> None:
    """In the order of microbatch and rank those of two ranks with two microbatches each."""
    made = [replace(batches(rank=rank, micro=micro), ranks=ranks, numbered_by=2)
            for rank in range(ranks)]  # fmt: skip
    found = [made[rank].tokens(3)[number] for number in range(micro) for rank in range(ranks)]
    due = [
        batches(rank=rank, micro=2).tokens(3)[number] for number in range(2) for rank in range(2)
    ]
    assert torch.equal(torch.stack(found), torch.stack(due))


def test_mix_is_position_sensitive_and_stable() -> None:
    """The hash tells (a, b) from (b, a), and its bits never change between releases."""
    assert mix(1, 2) != mix(2, 1)
    assert mix(0) != mix(0, 0)
    assert mix(0) == 0xE220A8397B1DCDAF  # splitmix64's first output for state 0
    assert mix(1234, 5, 6) == 0xAD24EA290ECD9C04


def test_synthetic_tokens_are_learnable() -> None:
    """Most neighbours differ by the sequence's own stride, so a loss can fall."""
    tokens = SyntheticTokens(256).window(99, 4000)
    steps = (tokens[1:] - tokens[:-1]) % 256
    stride, count = max(
        ((int(s), int((steps == s).sum())) for s in set(steps.tolist())), key=lambda p: p[1]
    )
    assert 1 <= stride <= 7
    # One in eight is noise: a step survives where both of its ends do, (7/8)^2 = 0.766.
    assert 0.70 < count / len(steps) < 0.83


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, text in [
        ("b.txt", "second"),
        ("sub/z.txt", "fourth"),
        ("a.txt", "first"),
        ("c", "third"),
    ]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_corpus_order_and_checksum(corpus: Path) -> None:
    """A folder is its files joined in the order of their paths; the checksum covers them."""
    text = TextTokens(str(corpus))
    assert text.corpus == b"firstsecondthirdfourth"
    assert text.checksum == hashlib.sha256(b"firstsecondthirdfourth").hexdigest()


def test_a_changed_byte_changes_the_checksum(corpus: Path) -> None:
    """One changed byte, or two swapped files, is another corpus."""
    before = TextTokens(str(corpus)).checksum
    (corpus / "c").write_text("thirD")
    changed = TextTokens(str(corpus)).checksum
    (corpus / "c").write_text("third")
    assert TextTokens(str(corpus)).checksum == before != changed
    (corpus / "a.txt").write_text("second")
    (corpus / "b.txt").write_text("first")
    assert TextTokens(str(corpus)).checksum != before


def test_text_windows_are_consecutive_bytes(corpus: Path) -> None:
    """Every window is a slice of the corpus, and all offsets occur, the last one too."""
    text = TextTokens(str(corpus))
    offsets = set()
    for key in range(400):
        window = bytes(text.window(key, 18).astype("uint8"))
        assert window in text.corpus
        offsets.add(text.corpus.index(window))
    assert offsets == set(range(len(text.corpus) - 18 + 1))


def test_corpus_of_exactly_one_window(corpus: Path) -> None:
    """A corpus as long as the window has one window; one byte less is a clear error."""
    text = TextTokens(str(corpus / "a.txt"))
    assert text.window(1, 5).tolist() == list(b"first")
    with pytest.raises(
        ValueError, match=r"data\.path: expected a corpus of at least 6 bytes, got 5 bytes"
    ):
        text.window(1, 6)


def test_missing_path_is_named(tmp_path: Path) -> None:
    """A path that does not exist is an error with the path."""
    missing = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"data\.path: expected a file or a folder") as caught:
        TextTokens(missing)
    assert missing in str(caught.value)


def test_default_corpus_is_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a path the corpus is the running Python's `.py` files, sorted, no site-packages."""
    for name in ("json/decoder.py", "argparse.py", "site-packages/x.py", "x.txt", "json.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    found = [file.relative_to(tmp_path).as_posix() for file in corpus_files(None)]
    assert found == ["argparse.py", "json.py", "json/decoder.py"]


def test_token_source_by_kind(corpus: Path) -> None:
    """The configuration's kind chooses the source."""
    assert isinstance(token_source(DataConfig(), 64), SyntheticTokens)
    chosen = token_source(DataConfig(kind="text", path=str(corpus)), 256)
    assert isinstance(chosen, TextTokens)
    assert chosen.corpus.startswith(b"first")


def documents(seed: int = 3, sizes: tuple[int, ...] = (1, 2, 8)) -> PackedDocuments:
    multiples = {size: 2 * size for size in sizes}
    return PackedDocuments(SyntheticTokens(64), seed, sizes, 16, multiples, 100)


def test_documents_fit_their_pack_and_need_its_size() -> None:
    """Padded documents fit, none is past `seq`, and the first is too long for a smaller size."""
    source, seen = documents(), set()
    for step in range(40):
        size = source.size(step, 0)
        smaller = {1: 0, 2: 1, 8: 2}[size]
        for number in range(8 // size):
            lengths = [len(ids) - 1 for ids in source.pack(step, 0, number)]
            assert 16 * smaller < lengths[0]
            assert max(lengths) <= 100
            assert len(lengths) <= MAX_DOCUMENTS
            padded = [-(-length // (2 * size)) * 2 * size for length in lengths]
            assert sum(padded) <= 16 * size
            seen.add((size, len(lengths)))
    assert {size for size, _ in seen} == {1, 2, 8}
    assert max(number for _, number in seen) > 2


def test_every_coordinate_of_a_pack_matters() -> None:
    """The same pack again is the same; another seed, step, microbatch or pack is another."""
    packs = [
        documents(seed, sizes=(1,)).pack(step, microbatch, number)
        for seed, step, microbatch, number in
        [(1, 2, 3, 4), (1, 2, 3, 4), (0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)]
    ]  # fmt: skip
    texts = [[ids.tolist() for ids in pack] for pack in packs]
    assert texts[0] == texts[1]
    assert all(texts[0] != other for other in texts[2:])
