"""Arithmetic that rounds at random: how far rounding takes a program's tensors, by running it.

Every result is computed in float64 and rounded up or down to its type, the nearer number the
likelier, so with mean zero (stochastic rounding; D. S. Parker, Monte Carlo Arithmetic, 1997).
Products of matrices are computed in `PARTS` parts, each rounded, and so is their sum, as layouts
split them; inside a product of length n its own type of accumulation adds sqrt(n) u |A| |B| with
random signs (N. J. Higham and T. Mary, SIAM J. Sci. Comput. 41, 2019, theorem 2.4). A result that
its type can hold is not rounded.

What has no float64 form (kernels of attention on GPUs, operators of other libraries) runs as it is,
and its result is moved by up to half a gap at random. Collectives run as they are, and so does what
draws random numbers, which would be drawn twice otherwise.
"""

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from fsdp_core.dispatch import is_fake, opens_itself

WIDE = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32,
    torch.float64: torch.float64,
}  # fmt: skip
"""What products of a type are accumulated in."""
PARTS = 4
NARROW = (torch.float32, torch.bfloat16, torch.float16)
MOVES = {
    "alias", "arange", "cat", "clone", "detach", "empty", "empty_like", "eq", "expand", "fill_",
    "gather", "index", "index_select", "lift_fresh", "masked_fill", "masked_fill_", "neg",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones_like", "scatter_", "sort", "stack",
    "where", "zero_", "zeros", "zeros_like", "_unsafe_view", "embedding", "full", "full_like",
}  # fmt: skip
"""Operators that put numbers elsewhere and make none."""
ADDED = {"addmm": "mm", "baddbmm": "bmm"}
"""Products that something is added to."""
MANY = ("_foreach_", "_fused_ad", "_fused_sgd")
"""Operators of optimizers, on lists of tensors, most of which change them and return nothing."""
EXACT_ARGUMENTS = ("state_steps", "grad_scale", "found_inf", "lr")
"""Of those: float32 numbers that kernels on GPUs read as such."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """u: 2^-53, 2^-24, 2^-11 or 2^-8 for float64, float32, float16 and bfloat16."""
    return torch.finfo(dtype).eps / 2


class RandomRounding(TorchDispatchMode):
    """Compute every operator in float64 and round its result, at random, to its type."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and round what it returns."""
        if any(map(opens_itself, types)):
            if is_fake(types):
                return func(*args, **(kwargs or {}))
            return NotImplemented  # what the wrapper holds comes by itself
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name.startswith(MANY) and not func._schema.returns:
            return self._changed(func, args, kwargs)
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        if _is_left(func, name) or not any(each.dtype in NARROW for each in given):
            return func(*args, **kwargs)
        if name in ("copy_", "_to_copy"):
            return self._converted(func, args, kwargs)
        # In float64, on copies, before an in-place operator changes its arguments.
        exact = _in_float64(func, args, kwargs)
        out = func(*args, **kwargs)
        if exact is not None and name in ("mm", "bmm"):
            exact = self._product(func, args[0].double(), args[1].double(), out.dtype)
        elif exact is not None and name in ADDED and not kwargs:
            added, left, right = (each.double() for each in args)
            product = getattr(torch.ops.aten, ADDED[name]).default
            exact = added + self._product(product, left, right, out.dtype)
        flat_out = _flat(out)
        for result, value in zip(flat_out, _flat(exact) or [None] * len(flat_out), strict=True):
            if isinstance(result, torch.Tensor) and result.dtype in NARROW:
                value = self._moved(result) if value is None else value.double()
                result.copy_(self._rounded(value, result.dtype))
        return out

    def _changed(self, func: Any, args: Any, kwargs: Any) -> None:
        named = dict(zip((each.name for each in func._schema.arguments), args, strict=False))
        named |= kwargs
        wide = {
            name: value if name in EXACT_ARGUMENTS else tree_map_only(_KINDS, _own, value)
            for name, value in named.items()
        }
        func(**wide)
        written = {each.name for each in func._schema.arguments
                   if each.alias_info is not None and each.alias_info.is_write}  # fmt: skip
        for name in written & named.keys():
            for tensor, value in zip(_flat(named[name]), _flat(wide[name]), strict=True):
                if isinstance(tensor, torch.Tensor) and tensor is not value:
                    narrow = tensor.dtype in NARROW
                    tensor.copy_(self._rounded(value, tensor.dtype) if narrow else value)

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
        signs = self._drawn(2, error) * 2 - 1
        noisy: torch.Tensor = total + signs * error
        return noisy

    def _rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Up or down to a number of `dtype`, the nearer the likelier; float64 in and out."""
        # The bits past the type's last become a carry with the probability that they stand for.
        dropped = 52 + int(math.log2(torch.finfo(dtype).eps))
        bits = value.contiguous().view(torch.int64)
        carry = self._drawn(1 << dropped, bits)
        return (bits + carry).bitwise_and_(-1 << dropped).view(torch.float64)

    def _moved(self, result: torch.Tensor) -> torch.Tensor:
        """By up to half a gap, whatever way its own last rounding went."""
        share = self._drawn(1 << 30, result).double() * 2.0**-30 - 0.5
        return result.double() * (1 + 2 * unit_roundoff(result.dtype) * share)

    def _drawn(self, below: int, like: torch.Tensor) -> torch.Tensor:
        """Integers in [0, below), where and as many as the elements of `like`."""
        device = like.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        generator = self._generators[device]
        return torch.randint(0, below, like.shape, generator=generator, device=device)


_KINDS = (torch.Tensor, torch.dtype)


def _widened(x: torch.Tensor | torch.dtype, *, copy: bool = False) -> torch.Tensor | torch.dtype:
    """In float64; as a copy also what is no narrow number, if asked for."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x in NARROW else x
    wide = x.double() if x.is_floating_point() else x
    return wide.clone() if copy and wide is x else wide


_own = functools.partial(_widened, copy=True)


def _in_float64(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives on widened arguments; None if it has no such form."""
    if func.namespace not in ("aten", "prims") or _draws(func):
        return None
    copied = _own if func._schema.is_mutable else _widened
    wide_args, wide_kwargs = tree_map_only(_KINDS, copied, (args, kwargs))
    try:
        return func(*wide_args, **wide_kwargs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError):
        return None  # of a wrong call the narrow one raises as well


def _flat(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [] if x is None else [x]


def _is_left(func: Any, name: str) -> bool:
    returns = [each.alias_info for each in func._schema.returns]
    as_it_is = "c10d" in func.namespace or func.namespace == "fsdp" or not returns
    draws = _draws(func) and "attention" not in name
    is_view = any(each is not None and not each.is_write for each in returns)
    return as_it_is or draws or name in MOVES or is_view


def _draws(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return torch.Tag.nondeterministic_seeded in func.tags and not name.endswith("_for_cpu")


# --- programs that round at random -------------------------------------------------------------

RANKS = 1 << 20
"""Seeds of a run's ranks are next to each other, those of runs further away."""


class CannotRound(RuntimeError):
    """The program does not round at random all the time."""

    deltazero_what = "unsupported"


class Rounding:
    """A program that rounds at random from its first training forward or step on.

    What the recorder does is outside of it. The mode of torch's dispatcher sees operators of its
    thread and of its backward passes, and keeps torch.compile out; what was compiled before it
    began, and what a CUDA graph replays, would not round: such a run is not judged.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._mode = RandomRounding(seed * RANKS + rank)
        self._thread: threading.Thread | None = None
        self.num_compiled = num_compiled()

    def begins(self, original: Callable[[], None]) -> None:
        original()
        if self._thread is None:
            self._thread = threading.current_thread()
            self._mode.__enter__()

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._thread is None else _disable_current_modes()

    def end(self) -> None:
        """Round as usual again (`CannotRound`: not all of the program rounded at random)."""
        if self._thread is None:
            return  # one that never began has no step: it is no sample
        if threading.current_thread() is self._thread:
            modes = _get_current_dispatch_mode_stack()
            if self._mode not in modes:
                raise CannotRound("another dispatch mode of the program ended random rounding")
            if modes[-1] is self._mode:
                self._mode.__exit__(None, None, None)
        self._thread = None
        if num_compiled() > self.num_compiled:
            raise CannotRound("what torch.compile made before training does not round at random")


def refuse(*args: Any, **kwargs: Any) -> None:
    """In place of a capture, whose replays would round as usual."""
    raise CannotRound("replays of a graph do not round at random: expected an eager reference")


def num_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"].get("unique_graphs", 0))
