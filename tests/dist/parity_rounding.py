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

Results in float64 have no wider type to be measured in. Their program is the one in float32, whose
s is scaled by the ratio of unit roundoffs, and doubled, as the reference itself errs as much.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.dist.parity_bounds import WIDE, unit_roundoff
from tests.dist.parity_programs import Problem, Routes, run_whole
from tests.dist.parity_watch import Found

SAMPLES = 3
PARTS = 4
CONFIDENCE = 6.0
NARROW = (torch.float32, torch.bfloat16)
MOVES = {
    "alias", "arange", "cat", "clone", "detach", "empty", "empty_like", "eq", "expand", "fill_",
    "gather", "index", "index_select", "lift_fresh", "masked_fill", "masked_fill_", "neg",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "scatter_", "sort", "stack",
    "where", "zero_", "zeros", "zeros_like", "_unsafe_view", "embedding", "full", "full_like",
}  # fmt: skip
"""Operators that put numbers elsewhere and make none."""


FLOAT64_SCALE = 2 * unit_roundoff(torch.float64) / unit_roundoff(torch.float32)
"""From the bound of float32 to that of float64."""


def bounds(problem: Problem, dtype: torch.dtype, exact: Found, routes: Routes) -> dict[Any, float]:
    """The largest norm of each tensor's error in float32 or bfloat16, by its key."""
    powers = dict.fromkeys(exact, 0.0)
    for sample in range(SAMPLES):
        found, _ = run_whole(problem, dtype, routes, RandomRounding(sample))
        for key, tensor in found.items():
            powers[key] += float((tensor - exact[key]).square().sum()) / SAMPLES
    scale = (1 + CONFIDENCE) * math.sqrt(1.5)
    return {key: scale * math.sqrt(power) for key, power in powers.items()}


class RandomRounding(TorchDispatchMode):
    """Compute every operator in float64 and round its result, at random, to its type."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in MOVES or _is_view(func) or not _floats((args, kwargs)):
            return func(*args, **kwargs)
        if name in ("copy_", "_to_copy"):
            return self._converted(func, args, kwargs)
        # In float64, on copies, before an in-place operator changes its arguments.
        wide_args, wide_kwargs = tree_map_only(torch.Tensor, _widened, (args, kwargs))
        exact = func(*wide_args, **wide_kwargs)
        out = func(*args, **kwargs)
        if name in ("mm", "bmm"):
            exact = self._product(func, wide_args[0], wide_args[1], out.dtype)
        flat_out, flat_exact = (list(x) if isinstance(x, (tuple, list)) else [x]
                                for x in (out, exact))  # fmt: skip
        for result, value in zip(flat_out, flat_exact, strict=True):
            if isinstance(result, torch.Tensor) and result.dtype in NARROW:
                result.copy_(self._rounded(value.double(), result.dtype))
        return out

    def _converted(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = args[1] if func.overloadpacket.__name__ == "copy_" else args[0]
        value = source.double() if source.is_floating_point() else None
        out = func(*args, **kwargs)
        if value is not None and out.dtype in NARROW:
            out.copy_(self._rounded(value, out.dtype))
        return out

    def _product(
        self, func: Any, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        length = a.shape[-1]
        parts = PARTS if length % PARTS == 0 else 1
        total = None
        for left, right in zip(a.chunk(parts, -1), b.chunk(parts, -2), strict=True):
            part = self._rounded(func(left, right), dtype)
            total = part if total is None else self._rounded(total + part, dtype)
        assert total is not None
        error = math.sqrt(length) * unit_roundoff(WIDE[dtype]) * func(a.abs(), b.abs())
        signs = torch.randint(0, 2, error.shape, generator=self._generator) * 2 - 1
        noisy: torch.Tensor = total + signs * error
        return noisy

    def _rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Up or down to a number of `dtype`, the nearer the likelier; float64 in and out."""
        # The bits past the type's last become a carry with the probability that they stand for.
        dropped = 52 + int(math.log2(torch.finfo(dtype).eps))
        bits = value.contiguous().view(torch.int64)
        carry = torch.randint(0, 1 << dropped, bits.shape, generator=self._generator)
        return (bits + carry).bitwise_and_(-1 << dropped).view(torch.float64)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def _floats(tree: Any) -> bool:
    found = []
    tree_map_only(torch.Tensor, lambda t: found.append(t.dtype in NARROW), tree)
    return any(found)


def _is_view(func: Any) -> bool:
    """Whether what it returns is memory of its arguments that it does not write."""
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
