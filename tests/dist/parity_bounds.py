"""How far a computed value may be from the exact one: derived bounds, not tolerances.

Notation and results of N. J. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., SIAM,
2002 (H). u is the unit roundoff, half the gap between 1 and the next number.

1. fl(x op y) = (x op y)(1 + d), |d| <= u (H 2.4), for +, -, *, / and conversion to a narrower type.
2. A product of at most n factors (1 + d) is 1 + t with |t| <= gamma_n = n u / (1 - n u) (H 3.1).
3. So a computed sum of products, each of whose terms passes at most n roundings, is wrong by at
   most gamma_n times the sum of the terms' magnitudes, in whatever order it is summed: in a row, in
   blocks, by trees, or by ranks that each sum a part (H 3.1, 3.5, 4.2). A sum of k numbers has
   n = k - 1, a dot product n = k.
4. Magnitudes need no guess. Layers that only add and multiply (linear layers, embeddings, scales,
   gating) are polynomials in their inputs, and so are their gradients: the same program on the
   absolute values of all inputs gives the sum of the terms' magnitudes (`exact_and_magnitudes`).
   Chains need no propagation, only the total of n over the longest path.
5. Where two types take part (bfloat16 stored, float32 accumulated), (1 + gamma_n)(1 + gamma'_m) - 1
   bounds n roundings of one kind and m of the other (`growth`).

Underflow is not in 1: a result that is subnormal, or flushed to zero, is wrong by up to the
smallest normal number, which `units` allows for each element.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from harness.recorder.rounding import WIDE as WIDE  # part of the interface
from harness.recorder.rounding import unit_roundoff as unit_roundoff

Named = dict[str, torch.Tensor]
Program = Callable[[Named], torch.Tensor]
"""Named inputs to an output, by additions and multiplications only."""


def gamma(n: int, dtype: torch.dtype) -> float:
    """gamma_n = n u / (1 - n u); n u must be below 1 (H 3.1)."""
    nu = n * unit_roundoff(dtype)
    if nu >= 1:
        raise ValueError(f"Expected n u below 1, got {n} roundings of {dtype}.")
    return nu / (1 - nu)


@dataclass(frozen=True)
class Roundings:
    """The most roundings that a term passes on its way into a result.

    Attributes:
        stored: to the type that tensors have: one for the result of each operator, one for each
            addition of a collective sum.
        accumulated: inside of operators, in the type that `WIDE` gives: the length of each sum.
    """

    stored: int
    accumulated: int = 0

    def __add__(self, other: "Roundings") -> "Roundings":
        return Roundings(self.stored + other.stored, self.accumulated + other.accumulated)

    def growth(self, dtype: torch.dtype) -> float:
        """The relative error of a term: see 5 of the module."""
        wide = gamma(self.accumulated, WIDE[dtype])
        return (1 + gamma(self.stored, dtype)) * (1 + wide) - 1


def product(length: int, ranks: int = 1) -> Roundings:
    """A dot product of `length` terms on a rank, then summed over `ranks`."""
    return Roundings(stored=1 + ranks - 1, accumulated=length)


@dataclass(frozen=True)
class Bounded:
    """An exact value, float64, and by how much a computed one may differ from it, elementwise."""

    exact: torch.Tensor
    bound: torch.Tensor

    def units(self, got: torch.Tensor) -> float:
        """The largest error in units of the bound: at most 1 if `got` is right.

        Infinite for a NaN where none is due, an infinity of the wrong sign, or any error where the
        bound is 0. NaN is due where the exact value is NaN.

        Raises:
            ValueError: another shape.
        """
        if got.shape != self.exact.shape:
            raise ValueError(f"Expected {tuple(self.exact.shape)}, got {tuple(got.shape)}.")
        if not got.numel():
            return 0.0
        floor = torch.finfo(got.dtype).tiny
        exact, got = self.exact.double(), got.double()
        error = (got - exact).abs()
        same = (got == exact) | (got.isnan() & exact.isnan())
        allowed = torch.where(self.bound > 0, self.bound + floor, self.bound)
        ratio = (error / allowed).nan_to_num(math.inf, math.inf)
        return torch.where(same, 0.0, ratio).max().item()


def exact_and_magnitudes(
    program: Program, inputs: Named, cotangent: torch.Tensor
) -> tuple[Named, Named]:
    """Output and gradients of a polynomial program in float64, and the magnitudes of their terms.

    Args:
        cotangent: what the output's gradient is.

    Returns:
        Twice the output under "output" and the gradient of each floating input under its name:
        exact (up to float64's own roundings), and summed over the terms' absolute values.
    """
    magnitudes = {n: t.abs() if t.is_floating_point() else t for n, t in inputs.items()}
    return _derive(program, inputs, cotangent), _derive(program, magnitudes, cotangent.abs())


def _derive(program: Program, inputs: Named, cotangent: torch.Tensor) -> Named:
    inputs = {
        name: t.double().requires_grad_() if t.is_floating_point() else t
        for name, t in inputs.items()
    }
    floating = [name for name, t in inputs.items() if t.is_floating_point()]
    output = program(inputs)
    grads = torch.autograd.grad(output, [inputs[n] for n in floating], cotangent.double())
    return {"output": output.detach(), **dict(zip(floating, grads, strict=True))}


def bounded(
    program: Program,
    inputs: Named,
    cotangent: torch.Tensor,
    roundings: Mapping[str, Roundings],
    dtype: torch.dtype,
) -> dict[str, Bounded]:
    """Output and gradients of a polynomial program as `dtype` may compute them.

    The exact values have float64's own roundings, of the same program: their bound is added.

    Args:
        inputs: with the very values that the program under test gets.
        roundings: of "output" and of the gradient of each floating input, or one for all under "".
    """
    exact, magnitudes = exact_and_magnitudes(program, inputs, cotangent)
    found = {}
    for name, value in exact.items():
        passed = roundings[name] if name in roundings else roundings[""]
        own = gamma(passed.stored + passed.accumulated, torch.float64)
        found[name] = Bounded(value, (passed.growth(dtype) + own) * magnitudes[name])
    return found


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, ranks: int, dtype: torch.dtype
) -> tuple[Bounded, Bounded]:
    """Loss [N] and the logits' gradient [N, V] for gradients 1, as computed over `ranks` shards.

    With m the largest logit, d_i = l_i - m, S = sum exp(d_i), p_i = exp(d_i) / S, t the target, and
    exp and log wrong by at most 2 u relatively (one unit in the last place):

        d_i        is wrong by u |d_i|, so exp(d_i) relatively by u |d_i| + 2 u
        S          relatively by sum p_i (u |d_i| + 2 u) + gamma_n, n = V / ranks + ranks, plus what
                   brings a shard to m: u |d_s| + 4 u, d_s the shard's largest d (subtraction, exp,
                   product), weighted by the shard's share of S
        log S      absolutely by that plus 2 u |log S|
        loss       by that plus u |d_t| + u |loss|
        p_i        relatively by the error of log S + 2 u |d_i| + u |log S| + 2 u
        gradient   by p_i times that, plus 2 u |p_i - 1_t|, plus the rounding to `dtype`

    to first order; 1 % is added for the others.

    Args:
        logits: [N, V] with the very values that the program under test gets, -inf allowed.
    """
    work = WIDE[dtype]
    u = unit_roundoff(work) + unit_roundoff(torch.float64)
    exact = logits.double()
    top = exact.amax(1, keepdim=True)
    p, d = exact.softmax(1), exact - top
    finite = torch.where(p > 0, d.abs(), 0.0)
    log_total = d.logsumexp(1, keepdim=True)
    shards = p.unflatten(1, (ranks, -1)).sum(2)
    shard_tops = d.unflatten(1, (ranks, -1)).amax(2)
    carried = (shards * torch.where(shards > 0, u * shard_tops.abs() + 4 * u, 0.0)).sum(1)
    total_error = (p * (u * finite + 2 * u)).sum(1) + carried
    total_error = total_error + gamma(logits.shape[1] // ranks + ranks, work)
    log_error = total_error[:, None] + 2 * u * log_total
    hit = d.gather(1, targets[:, None])
    loss = (log_total - hit)[:, 0]  # of differences: the logits themselves may be far from zero
    loss_bound = log_error[:, 0] + u * hit[:, 0].abs() + u * loss.abs()
    grad = p.scatter_add(1, targets[:, None], -torch.ones_like(hit))
    p_error = log_error + 2 * u * finite + u * log_total + 2 * u
    grad_bound = p * p_error + 2 * u * grad.abs() + unit_roundoff(dtype) * grad.abs()
    return Bounded(loss, 1.01 * loss_bound), Bounded(grad, 1.01 * grad_bound)
