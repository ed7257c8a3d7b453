"""What kernels of a GPU keep in narrower types than the operators of the CPU do, as torch programs.

`bounds` of `parity_rounding` measures what rounding does to a program that rounds where a program
under test does. The decoder on a GPU rounds in more places than on the CPU:

    fp32   nowhere else: TF32 is off, products accumulate in float32, in whatever order
    bf16   fused attention keeps weights P and dS in the inputs' type between its products, and
           each block's results: FlashAttention-2 (Dao, 2023, algorithms 1 and 2, whose products
           are those of tensor cores on half-precision inputs), cuDNN's alike. `HalfKernel`.
    fp8    inputs of linear layers, and of their gradients, are e4m3 or e5m2 numbers, times a scale
           that puts the tensor's largest value at the type's largest (Micikevicius et al., FP8
           Formats for Deep Learning, 2022; current scaling). `eighth_linears`.

Rounding to an eight-bit number is of half a gap: u = 2^-4 of e4m3's normal numbers, 2^-3 of e5m2's,
and below them half of their smallest gap. As everywhere in these bounds it is drawn at random with
mean zero (`parity_rounding`, 2); a weight is rounded once for all microbatches, as its error is the
same in each.

Tensor cores add eight-bit products with fewer bits than float32 has, about 14 (DeepSeek-V3
Technical Report, 2024, section 3.3.2): sqrt(n) 2^-14 of |A| |B|, n the length of the sum, which is
a hundredth of what the rounding of the inputs does, and left out.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from fsdp_core.model import cp_attention as sdpa
from fsdp_core.model.cp_attention import Pair, Three
from fsdp_core.parallel.context import Spans

HALF = torch.bfloat16


class HalfKernel:
    """`TorchKernel` whose second products are of weights in bfloat16, and their results too."""

    def forward(
        self, qkv: Three, spans: tuple[Spans, Spans], *, causal: bool, scale: float
    ) -> Pair:
        """See `BlockKernel.forward`."""
        time, heads = qkv[0].shape[1], qkv[1].shape[2]
        q, k, v = (sdpa._by_head(t, heads) for t in qkv)
        scores = sdpa._scores(q, k, time, spans, causal=causal, scale=scale)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        out = torch.exp(scores - lse).to(HALF) @ v.to(HALF)
        return sdpa._by_token(out, time), sdpa._by_token(lse, time)[..., 0]

    def backward(
        self, grad_out: torch.Tensor, qkv: Three, out_lse: Pair, spans: tuple[Spans, Spans], *,
        causal: bool, scale: float,
    ) -> Three:  # fmt: skip
        """See `BlockKernel.backward`."""
        time, heads = qkv[0].shape[1], qkv[1].shape[2]
        q, k, v = (sdpa._by_head(t, heads) for t in qkv)
        grad, out, lse = (
            sdpa._by_head(t, heads) for t in (grad_out, out_lse[0], out_lse[1][..., None])
        )
        weights = torch.exp(sdpa._scores(q, k, time, spans, causal=causal, scale=scale) - lse)
        shift = (grad * out).sum(-1, keepdim=True)
        dscores = (weights * (grad @ v.transpose(-1, -2) - shift) * scale).to(HALF)
        dq = sdpa._by_token(dscores @ k.to(HALF), time)
        dk = (dscores.transpose(-1, -2) @ q.to(HALF)).transpose(1, 2)
        dv = (weights.to(HALF).transpose(-1, -2) @ grad.to(HALF)).transpose(1, 2)
        return dq, dk, dv


@contextlib.contextmanager
def half_attention() -> Iterator[None]:
    """Attention on bfloat16 inputs is that of `HalfKernel`."""
    right = sdpa.kernel_for

    def chosen(q: torch.Tensor, v: torch.Tensor) -> Any:
        return HalfKernel() if q.dtype == HALF else right(q, v)

    with mock.patch.object(sdpa, "kernel_for", chosen):
        yield


# ---- eight bits

E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Bits behind the point, least exponent of a normal number, largest number."""


def to_eighth(
    x: torch.Tensor, kind: tuple[int, int, float], generator: torch.Generator
) -> torch.Tensor:
    """x, each element up or down at random to one of `kind` times the tensor's scale."""
    bits, least, largest = kind
    top = x.abs().amax()
    if not top:
        return x
    wide = x.double() * (largest / top.double())
    exponent = (torch.frexp(wide).exponent - 1).clamp(min=least) - bits
    gap = torch.ldexp(torch.ones_like(wide), exponent)
    carry = torch.rand(wide.shape, dtype=torch.float64, generator=generator)
    rounded = (torch.floor(wide / gap + carry) * gap).clamp(-largest, largest)
    return (rounded * (top.double() / largest)).to(x.dtype)


class _EighthLinear(torch.autograd.Function):
    """A linear layer without bias on eight-bit inputs, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rounder: "_Rounder") -> Any:
        kept, narrow = rounder(x, E4M3), rounder.weight(weight)
        ctx.save_for_backward(kept, narrow)
        ctx.rounder = rounder
        return (kept.flatten(0, -2) @ narrow.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kept, narrow = ctx.saved_tensors
        grad = ctx.rounder(grads[0], E5M2).flatten(0, -2)
        dx = (grad @ narrow).view(kept.shape)
        return dx, grad.t() @ kept.flatten(0, -2), None


class _Rounder:
    """Rounds tensors to eight bits; weights once."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._weights: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def __call__(self, x: torch.Tensor, kind: tuple[int, int, float]) -> torch.Tensor:
        return to_eighth(x, kind, self._generator)

    def weight(self, weight: torch.Tensor) -> torch.Tensor:
        """e4m3, the same each time."""
        key = (weight.data_ptr(), weight.shape)
        if key not in self._weights:
            self._weights[key] = self(weight.detach(), E4M3)
        return self._weights[key]


@contextlib.contextmanager
def eighth_linears(seed: int, wide_features: tuple[int, ...]) -> Iterator[None]:
    """Linear layers on bfloat16 have eight-bit inputs, but those of `wide_features` outputs.

    These are the head's and the rotated keys' (`wk_rope`), which no backend narrows, as it does not
    narrow the router's, whose inputs are float32.
    """
    right: Callable[..., torch.Tensor] = F.linear
    rounder = _Rounder(torch.Generator().manual_seed(seed))

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        if x.dtype != HALF or not x.numel() or weight.shape[0] in wide_features:
            return right(x, weight, bias)
        found: torch.Tensor = _EighthLinear.apply(x, weight, rounder)
        return found

    with mock.patch.object(F, "linear", linear):
        yield
