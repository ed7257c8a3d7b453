"""In which dtypes parameters rest, compute and are reduced: torch's policy, and one dtype more."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed import fsdp as torch_fsdp
from torch.utils._pytree import tree_map_only


class GroupDtypes(NamedTuple):
    """Dtypes of a group of parameters: at rest, in compute, in the reduction."""

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class MixedPrecisionPolicy(torch_fsdp.MixedPrecisionPolicy):
    """torch's, and `main_dtype`: that of parameters at rest, their gradients and what the optimizer
    sees; None: the dtype that the parameters had.
    """

    main_dtype: torch.dtype | None = None


def dtypes_of(policy: torch_fsdp.MixedPrecisionPolicy, dtype: torch.dtype) -> GroupDtypes:
    """Dtypes of parameters that had `dtype`; complex numbers and integers keep it."""
    if not dtype.is_floating_point:
        return GroupDtypes(dtype, dtype, dtype)
    compute, main = policy.param_dtype or dtype, getattr(policy, "main_dtype", None)
    return GroupDtypes(main or dtype, compute, policy.reduce_dtype or compute)


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors in `dtype`; the same object if nothing changes."""
    if dtype is None:
        return tree
    if isinstance(tree, torch.Tensor):  # the usual case, without walking a tree
        return tree.to(dtype) if tree.is_floating_point() else tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
