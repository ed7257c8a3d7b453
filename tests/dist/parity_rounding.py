"""How far rounding may take a whole model's tensors: a derived bound of their norms.

Worst-case bounds of a deep network exceed its gradients. The bound here is probabilistic, on the
model of N. J. Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J.
Sci. Comput. 41 (2019): roundings are independent with mean zero. To first order the error of a
tensor is e = sum_i c_i d_i over all roundings i, |d_i| <= h_i, h_i half the gap between numbers at
the rounded value, c_i the tensor's derivative by it.

1. E |e|^2 <= sum_i h_i^2 |c_i|^2 =: s^2, and changing one d_i changes |e| by at most 2 h_i |c_i|,
   so (McDiarmid, 1989)  P(|e| > (1 + k) s) <= exp(-k^2 / 2):  k = 6 gives 1.5e-8 a tensor.
2. s is measured, not guessed: the single-process program is run with every result rounded up or
   down at random, with mean zero (stochastic rounding; D. S. Parker, Monte Carlo Arithmetic, 1997).
   A result at fraction f between two numbers then errs by d with E d^2 = 4 h^2 f (1 - f), 2/3 h^2
   on average over f. So s^2 is 3/2 of the mean of |e|^2 over such runs.
3. A result that its type can hold is not rounded: copies, masks and zeros add nothing, as it is.
4. Layouts round in places where one process does not: sums are split over ranks. Every product of
   matrices is computed in `PARTS` parts, each rounded, and so is their sum. Inside a product of
   length n its own type of accumulation adds sqrt(n) u |A| |B| (theorem 2.4 there, without its
   constant, which 1 has), drawn with random signs.

5. In bfloat16 and eight bits s is a good part of the tensor, or more than it is, and would let a
   missing half of it pass. There the error is also looked at along the tensor itself: what a wrong
   divisor or a missing sum changes most, and what rounding, which has no favourite direction,
   changes least. That is one number, nearly normal as a sum of many independent roundings. Of
   `NARROW_SAMPLES` runs it has a mean, which is of second order in the roundings and at most that
   of a program whose roundings have two thirds of their power, and a spread; what it may be is
   |mean| + t spread sqrt(3/2 (1 + 1 / runs)), t the quantile of Student's distribution that leaves
   out as much as k = 6 does in 1: the prediction interval of one more run.

Results in float64 have no wider type to be measured in. Their program is the one in float32, whose
s is scaled by the ratio of unit roundoffs, and doubled, as the reference itself errs as much.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from fsdp_core.config import ModelConfig
from fsdp_core.model import cp_attention as sdpa
from fsdp_core.model.cp_attention import Pair, Three
from fsdp_core.parallel.context import Spans
from harness.recorder.rounding import RandomRounding, unit_roundoff
from tests.dist.parity_programs import DTYPES, Found, Problem, Routes, run_whole

HALF = torch.bfloat16


class HalfKernel:
    """`TorchKernel` whose second products are of weights in bfloat16, and their results too."""

    def forward(
        self, qkv: Three, spans: tuple[Spans, Spans], *, causal: bool, scale: float
    ) -> Pair:
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


SAMPLES, NARROW_SAMPLES = 3, 13
QUANTILE = 13.32
"""Of Student's distribution with 12 degrees of freedom: 0.75e-8 are above it."""
CONFIDENCE = 6.0
FLOAT64_SCALE = 2 * unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
"""From the bound of float32 to that of float64."""


@dataclass(frozen=True)
class Allowed:
    """By how much a tensor may be off: the norm of its error, and its error along itself."""

    norm: float
    along: float = math.inf

    def scaled(self, factor: float) -> "Allowed":
        return Allowed(factor * self.norm, factor * self.along)

    def units(self, got: torch.Tensor, exact: torch.Tensor) -> float:
        """The larger of both errors, each in units of what is allowed; infinite for NaN."""
        error = (got - exact).double()
        return max(
            _units(float(error.norm()), self.norm), _units(abs(_along(error, exact)), self.along)
        )


def _along(error: torch.Tensor, exact: torch.Tensor) -> float:
    norm = float(exact.norm())
    return float((error * exact).sum()) / norm if norm else 0.0


def _units(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    units = error / bound if bound else math.inf
    return math.inf if math.isnan(units) else units


def bounds(problem: Problem, arithmetic: str, exact: Found, routes: Routes) -> dict[Any, Allowed]:
    """How far each tensor may be off in an arithmetic, by its key.

    Args:
        arithmetic: "fp32" or "bf16"; "bf16 fused" with attention in one kernel, as on GPUs; "fp8"
            that and products of eight-bit numbers.
    """
    narrow = arithmetic != "fp32"
    samples = NARROW_SAMPLES if narrow else SAMPLES
    powers, along = dict.fromkeys(exact, 0.0), {key: list[float]() for key in exact}
    for sample in range(samples):
        around = _rounded_at_random(arithmetic, sample, problem.model)
        found, _ = run_whole(problem, DTYPES[arithmetic.split()[0]], routes, around)
        for key, tensor in found.items():
            error = tensor - exact[key]
            powers[key] += float(error.square().sum()) / samples
            along[key].append(_along(error, exact[key]))
    scale = (1 + CONFIDENCE) * math.sqrt(1.5)
    return {
        key: Allowed(scale * math.sqrt(power), _most(along[key]) if narrow else math.inf)
        for key, power in powers.items()
    }


def _most(errors: list[float]) -> float:
    """5 of the module, from errors along a tensor in `NARROW_SAMPLES` runs."""
    mean, spread = statistics.fmean(errors), statistics.stdev(errors)
    return abs(mean) + QUANTILE * math.sqrt(1.5 * (1 + 1 / len(errors))) * spread


@contextlib.contextmanager
def _rounded_at_random(arithmetic: str, sample: int, model: ModelConfig) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if arithmetic in ("bf16 fused", "fp8"):
            stack.enter_context(half_attention())
        if arithmetic == "fp8":
            wide = (model.vocab_size, model.qk_rope_head_dim)
            stack.enter_context(eighth_linears(sample, wide))
        stack.enter_context(RandomRounding(sample))
        yield
