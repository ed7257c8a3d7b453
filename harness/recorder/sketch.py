"""A few numbers of a tensor that tell how far another one is from it, whose bits differ by design.

    sketch(x) = (elements, |x|, <s1, x>, ..., <s16, x>)     s: signs, a fixed function of the place

The difference of two sketches is the sketch of the difference, and over random signs the mean of
<s, d>^2 is |d|^2 (Achlioptas, Database-friendly random projections, 2003). So a wrong direction
shows as well as a wrong length does. `harness.checks.gradients` compares.
"""

import torch
from torch import Tensor

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
    flat = tensor.detach().reshape(-1)
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
