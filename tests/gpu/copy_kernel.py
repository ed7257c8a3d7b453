"""A kernel that no operator of torch shows."""

import triton
import triton.language as tl


@triton.jit
def copy(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
