"""Training data as a pure function of (seed, step, data-parallel rank, microbatch).

    synthetic   arithmetic sequences modulo the vocabulary, one token in eight replaced by a hash
    text        byte-level tokens of real files, cut at hashed offsets

Out of either come rows of one length (`Batches`) or documents of many lengths (`PackedDocuments`).
"""

import hashlib
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fsdp_core.config import DataConfig

_GOLDEN = 0x9E3779B97F4A7C15
MAX_DOCUMENTS = 8
"""Of a pack."""


def mix(*values: int) -> int:
    """Hash integers to 64 bits: splitmix64's finaliser (Steele et al., 2014), chained."""
    state = 0
    for value in values:
        state = (state ^ (value & (2**64 - 1))) + _GOLDEN & (2**64 - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state


class SyntheticTokens:
    """Tokens with enough order that the loss falls: t[i] = first + i * stride, with noise."""

    checksum = "synthetic-1"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def window(self, key: int, length: int) -> npt.NDArray[np.int64]:
        first, stride = mix(key, 1) % self.vocab_size, 1 + mix(key, 2) % 7
        tokens = (first + stride * np.arange(length, dtype=np.int64)) % self.vocab_size
        noise = np.random.Generator(np.random.PCG64(mix(key, 3)))
        replace = noise.random(length) < 0.125
        tokens[replace] = noise.integers(0, self.vocab_size, int(replace.sum()))
        return tokens


class TextTokens:
    """Bytes of a corpus as tokens; `checksum` is the SHA-256 of all of them, in order."""

    def __init__(self, path: str | None) -> None:
        self.corpus = b"".join(file.read_bytes() for file in corpus_files(path))
        self.checksum = hashlib.sha256(self.corpus).hexdigest()
        self._bytes = np.frombuffer(self.corpus, dtype=np.uint8)

    def window(self, key: int, length: int) -> npt.NDArray[np.int64]:
        """`length` bytes from an offset decided by `key` (`ValueError`: there are fewer)."""
        if len(self._bytes) < length:
            raise ValueError(
                f"data.path: expected a corpus of at least {length} bytes, "
                f"got {len(self._bytes)} bytes."
            )
        offset = mix(key, 1) % (len(self._bytes) - length + 1)
        return self._bytes[offset : offset + length].astype(np.int64)


def corpus_files(path: str | None) -> Iterator[Path]:
    """The corpus' files in order; None: the standard library's (`ValueError`: no such path)."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
            if "site-packages" not in file.parts and "dist-packages" not in file.parts:
                yield file
        return
    given = Path(path)
    if given.is_file():
        yield given
    elif given.is_dir():
        files = (file for file in given.rglob("*") if file.is_file())
        yield from sorted(files, key=lambda file: file.relative_to(given).as_posix())
    else:
        raise ValueError(f"data.path: expected a file or a folder, got {path!r}.")


@dataclass(frozen=True)
class Batches:
    """Batches of one data-parallel rank: tokens int64 [microbatches, micro_batch, seq + 1]. `ranks`
    read the samples of a step, which are numbered as `numbered_by` ranks read them: microbatches of
    one number on all `ranks` go on where those of the one before ended.
    """

    source: SyntheticTokens | TextTokens
    seed: int
    dp_rank: int
    microbatches: int
    micro_batch_size: int
    seq: int
    ranks: int = 1
    numbered_by: int = 1

    def tokens(self, step: int) -> torch.Tensor:
        """The tokens of `step`: inputs are `[..., :-1]`, targets `[..., 1:]`."""
        rows = [
            [
                self.source.window(mix(self.seed, step, rank, m, b), self.seq + 1)
                for b in range(self.micro_batch_size)
            ]
            for m, rank in map(self._numbered, range(self.microbatches))
        ]
        return torch.from_numpy(np.array(rows))

    def _numbered(self, microbatch: int) -> tuple[int, int]:
        if self.ranks == self.numbered_by:
            return microbatch, self.dp_rank
        return divmod(microbatch * self.ranks + self.dp_rank, self.numbered_by)


@dataclass(frozen=True)
class PackedDocuments:
    """Documents for packs that are cut over a number of ranks which changes by microbatch.

    A microbatch has a size: how many ranks share a pack of `tokens_per_rank` tokens a rank. One of
    its documents is too long for the next smaller size.

    sizes: that a microbatch may have, ascending.
    multiples: what a document's length is padded to, by size.
    seq: no document is longer.
    leaves_tail: the last quarter of a pack has no documents.
    """

    source: SyntheticTokens | TextTokens
    seed: int
    sizes: Sequence[int]
    tokens_per_rank: int
    multiples: Mapping[int, int]
    seq: int
    leaves_tail: bool = False

    def size(self, step: int, microbatch: int) -> int:
        return self.sizes[mix(self.seed, step, microbatch, 1) % len(self.sizes)]

    def pack(self, step: int, microbatch: int, number: int) -> list[npt.NDArray[np.int64]]:
        """Tokens of every document of the pack of that number, each with the one after its last."""
        lengths = self._lengths(step, microbatch, number)
        return [
            self.source.window(mix(self.seed, step, microbatch, number, 2, i), length + 1)
            for i, length in enumerate(lengths)
        ]

    def _lengths(self, step: int, microbatch: int, number: int) -> list[int]:
        size = self.size(step, microbatch)
        left, multiple = self.tokens_per_rank * size, self.multiples[size]
        if self.leaves_tail:
            left = max(left * 3 // 4 // multiple, 1) * multiple
        smaller = max((s for s in self.sizes if s < size), default=0)
        longest = min(left, self.seq)
        shortest = min(self.tokens_per_rank * smaller + 1, longest)
        lengths: list[int] = []
        while left >= multiple and len(lengths) < MAX_DOCUMENTS:
            low, high = (1, min(left, self.seq)) if lengths else (shortest, longest)
            key = mix(self.seed, step, microbatch, number, 3, len(lengths))
            lengths.append(low + key % (high - low + 1))
            left -= -(-lengths[-1] // multiple) * multiple
        return lengths


def token_source(config: DataConfig, vocab_size: int) -> SyntheticTokens | TextTokens:
    """The token source that a configuration names."""
    return SyntheticTokens(vocab_size) if config.kind == "synthetic" else TextTokens(config.path)
