"""Arithmetic that rounds at random: how far rounding takes a program's tensors, by running it.

Every result is computed in float64 and rounded up or down to its type, the nearer number the
likelier, so with mean zero (stochastic rounding; D. S. Parker, Monte Carlo Arithmetic, 1997).
Products of matrices are computed in `PARTS` parts, each rounded, and so is their sum, as layouts
split them; inside a product of length n its own type of accumulation adds sqrt(n) u |A| |B| with
random signs (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41, 2019, theorem 2.4). A result that
its type can hold is not rounded. Collectives, and operators that return nothing, run as they are.
"""

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fsdp_core.device import is_fake, opens_itself

WIDE = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
"""What products of a type are accumulated in."""
PARTS = 4
NARROW = (torch.float32, torch.bfloat16)
MOVES = {
    "alias", "arange", "cat", "clone", "detach", "empty", "empty_like", "eq", "expand", "fill_",
    "gather", "index", "index_select", "lift_fresh", "masked_fill", "masked_fill_", "neg",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "scatter_", "sort", "stack",
    "where", "zero_", "zeros", "zeros_like", "_unsafe_view", "embedding", "full", "full_like",
}  # fmt: skip
"""Operators that put numbers elsewhere and make none."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: 2^-53, 2^-24 or 2^-8 for float64, float32 and bfloat16."""
    return torch.finfo(dtype).eps / 2


class RandomRounding(TorchDispatchMode):
    """Compute every operator in float64 and round its result, at random, to its type.

    On the CPU. Not for programs that draw random numbers: each would be drawn twice.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and round what it returns."""
        if any(map(opens_itself, types)):
            if is_fake(types):
                return func(*args, **(kwargs or {}))
            return NotImplemented  # what the wrapper holds comes by itself
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if _is_left(func, name) or not _floats((args, kwargs)):
            return func(*args, **kwargs)
        if name in ("copy_", "_to_copy"):
            return self._converted(func, args, kwargs)
        # In float64, on copies, before an in-place operator changes its arguments.
        wide_args, wide_kwargs = tree_map_only(
            (torch.Tensor, torch.dtype), _widened, (args, kwargs)
        )
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


def _widened(x: torch.Tensor | torch.dtype) -> torch.Tensor | torch.dtype:
    if isinstance(x, torch.dtype):
        return torch.float64 if x in NARROW else x
    return x.double() if x.is_floating_point() else x


def _floats(tree: Any) -> bool:
    found = []
    tree_map_only(torch.Tensor, lambda t: found.append(t.dtype in NARROW), tree)
    return any(found)


def _is_left(func: Any, name: str) -> bool:
    """Whether an operator runs as it is."""
    as_it_is = "c10d" in func.namespace or not func._schema.returns
    return as_it_is or name in MOVES or _is_view(func)


def _is_view(func: Any) -> bool:
    """Whether what it returns is memory of its arguments that it does not write."""
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
