"""What records have of a step, whoever observes it: digests, seconds, contents of tensors.

Used by the observer of programs and by that of the built-in trainer.
"""

import hashlib
import itertools
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fsdp_core.graph.digest import digest_hex

HEX_CHARS = 32
"""Of a digest."""
Rows = tuple[Sequence[str], Tensor, Sequence[str]]
"""Names, their digests, int32 [n, 5] on the host or on their way to it, and shapes for people."""


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


# --- rows of a step of a program ---------------------------------------------------------------


def row_of(data: bytes | None) -> list[int]:
    """A row for what is no tensor; zeros for a generator that no two runs could have alike."""
    return [*struct.unpack(">4i", bytes.fromhex(hashed(data))), 0] if data is not None else [0] * 5


def found_in(group: str, sections: Mapping[str, list[Rows]]) -> dict[str, tuple[str, int, str]]:
    """Digests of a group in hex, whether not all is finite, and shapes, by unique names."""
    looks = [[each for rows in held for each in _read(*rows)] for held in sections.values()]
    if group == "optim":
        # Each optimizer has a state of its own for a parameter they share, and numbers for it.
        looks = [list(itertools.chain(*looks))]
    # Optimizers may share a parameter, or one only hold another: the last look counts.
    found: dict[str, tuple[str, int, str]] = {}
    for look in looks:
        found |= zip(_unique([name for name, _ in look]), [row for _, row in look], strict=True)
    return found


def kind_of(module: str) -> str:
    """Of a twin's name, `EMA#2`, the class."""
    return module.partition("#")[0]


def names_of_twins(found: Mapping[str, tuple[str, int, str]]) -> dict[str, str]:
    """Modules of one class numbered by their digests, old names and new: which one was found first
    tells nothing."""
    modules: dict[str, list[tuple[str, Any]]] = {}
    for name, row in found.items():
        module, _, path = name.partition(".")
        modules.setdefault(module, []).append((path, row))
    numbers, names = dict[str, int](), dict[str, str]()
    for module, rows in sorted(modules.items(), key=lambda each: (kind_of(each[0]), each[1])):
        kind = kind_of(module)
        number = numbers[kind] = numbers.get(kind, 0) + 1
        shown = f"{kind}#{number}" if number > 1 else kind
        names |= {f"{module}.{path}": f"{shown}.{path}" for path, _ in rows}
    return names


def _read(
    names: Sequence[str], rows: Tensor, shapes: Sequence[str]
) -> Iterator[tuple[str, tuple[str, int, str]]]:
    text, flags = digest_hex(rows)
    texts = (text[i : i + HEX_CHARS] for i in range(0, len(text), HEX_CHARS))
    return zip(names, zip(texts, flags, shapes, strict=True), strict=True)


def _unique(names: Iterable[str]) -> list[str]:
    """Names, those that come again with a number."""
    last: dict[str, int] = {}
    found: dict[str, None] = {}
    for name in names:
        number, shown = last.get(name, 1), name
        while shown in found:
            number += 1
            shown = f"{name}#{number}"
        last[name] = number
        found[shown] = None
    return list(found)


def as_tensor(value: Any) -> Tensor:
    """A loss or a norm as the program gives it; a number is a float64, as Python's are."""
    value = getattr(value, "_local_tensor", value)
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def float_bits(value: Tensor) -> dict[str, Any]:
    """A float64 or a whole number by its 64 bits, what is narrower by those of a float32."""
    is_wide = value.dtype == torch.float64 or not value.is_floating_point()
    value = value.double() if is_wide else value.float()
    # By the integer view: a Python float may not keep the pattern of a NaN.
    pattern = int(value.view(torch.int64 if is_wide else torch.int32))
    bits = f"{pattern & (1 << 64) - 1:016x}" if is_wide else f"{pattern & (1 << 32) - 1:08x}"
    number = float(value)
    return {"bits": bits, "value": number if number - number == 0 else None}


def mean(losses: Sequence[Tensor]) -> Mapping[str, Any] | None:
    """What curves show of a step: its only loss, or the mean of its microbatches on this rank."""
    if len(losses) < 2:
        return float_bits(losses[0]) if losses else None
    found = torch.stack([loss.double() for loss in losses]).mean()
    is_wide = any(loss.dtype == torch.float64 for loss in losses)
    return float_bits(found if is_wide else found.float())


# --- sketches: how far is a tensor from another whose bits differ by design? ----------------------

# sketch(x) = (elements, |x|, <s1, x>, ..., <s16, x>)     s: signs, a fixed function of the place
#
# The difference of two sketches is the sketch of the difference, and over random signs the mean of
# <s, d>^2 is |d|^2 (Achlioptas, Database-friendly random projections, 2003). So a wrong direction
# shows as well as a wrong length does. `harness.checks.gradients` compares.
NUM_SIGNS = 16
_WIDTH, _CHUNK = 4096, 1 << 24
_MULTIPLIER = 0x2545F4914F6CDD1D  # of xorshift64* (Vigna, 2016)


def _signs(first: int, count: int, salt: int, device: torch.device) -> Tensor:
    """+1 or -1 by place, float64 [count, NUM_SIGNS]; the same on every device."""
    start = first * NUM_SIGNS + 1
    number = torch.arange(start, start + count * NUM_SIGNS, device=device) + (salt << 40)
    for _ in range(2):
        number = number ^ (number >> 12)
        number = number ^ (number << 25)
        number = (number ^ (number >> 27)) * _MULTIPLIER
    return (1 - 2 * (number >> 41 & 1)).double().view(count, NUM_SIGNS)


def sketch(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """Float64 [2 + NUM_SIGNS] on the tensor's device, made without waiting for it.

    `scale`: what a `GradScaler` has multiplied the tensor by, where the optimizer itself undoes it.
    A tensor is read as rows of `_WIDTH`; the sign of an element is that of its row times that of
    its column. In float64, which no setting of float32 products changes.
    """
    flat = tensor.detach()
    flat = (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
    columns = _signs(0, _WIDTH, 1, flat.device)
    total = torch.zeros(1 + NUM_SIGNS, dtype=torch.float64, device=flat.device)
    for number, chunk in enumerate(flat.split(_CHUNK)):
        padded = torch.nn.functional.pad(chunk.double(), (0, -len(chunk) % _WIDTH))
        rows = padded.view(-1, _WIDTH)
        outer = _signs(number * (_CHUNK // _WIDTH), len(rows), 2, flat.device)
        sums = ((rows @ columns) * outer).sum(0)
        total += torch.cat([padded.square().sum()[None], sums])
    elements = torch.full_like(total[:1], flat.numel())
    numbers = torch.cat([total[:1].sqrt(), total[1:]])
    if scale is not None:
        numbers /= scale.to(numbers)
    return torch.cat([elements, numbers])
