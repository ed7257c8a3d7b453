"""What records have of a step, whoever observes it: digests, seconds, contents of tensors.

Used by the observer of programs and by that of the built-in trainer.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

HEX_CHARS = 32
"""Of a digest."""


def hashed(data: bytes) -> str:
    """128 bits of BLAKE2b as hex: of what lies on the host and is no tensor."""
    return hashlib.blake2b(data, digest_size=HEX_CHARS // 2).hexdigest()


def seconds_between(before: Any, after: Any) -> float:
    """Between two marks, CUDA's events that the device has passed or times of the host's clock.

    0 if the first one is none of the kind of the second.
    """
    if isinstance(after, torch.cuda.Event):
        return 1e-3 * before.elapsed_time(after) if isinstance(before, torch.cuda.Event) else 0.0
    return float(after - before) if isinstance(before, float) else 0.0


def write_kept(folder: Path, run: str, rank: int, step: int, kept: Iterable[Any]) -> None:
    """Write tensors that a run keeps, as `entry_of` takes them, whole or not at all."""
    from harness.store.contents import write_contents

    write_contents(folder, run, rank, step, map(entry_of, kept))


def entry_of(kept: Any) -> tuple[Any, bytes]:
    """A `fsdp_core.train.taps.Snapshot`, or its like, as `harness.store.contents` has it."""
    from harness.store.contents import KeptTensor, Place

    about = KeptTensor(
        name=kept.name, part=kept.part, dtype=str(kept.tensor.dtype).removeprefix("torch."),
        shape=tuple(kept.tensor.shape), as_digested=kept.as_digested,
        places=tuple(Place(**vars(place)) for place in kept.places),
    )  # fmt: skip
    return about, kept.tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
