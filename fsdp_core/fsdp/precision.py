"""Which dtype computes, which is reduced, which comes out. A leaf: it knows nothing of FSDP."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Precision of one unit; None keeps what is there.

    Attributes:
        param_dtype: parameters are gathered and computed with in this dtype.
        reduce_dtype: gradients are reduced in this dtype; None: in the dtype they are computed in.
        output_dtype: floating-point outputs of the unit's forward are cast to it.
        cast_forward_inputs: cast floating-point inputs of the forward to `param_dtype`.
        main_dtype: dtype of the parameters at rest, their gradients and what the optimizer sees;
            None: the dtype that the parameters had.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_dtype: torch.dtype | None = None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """Dtype of the forward's inputs, or None to leave them."""
        return self.param_dtype if self.cast_forward_inputs else None


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of a group of parameters: at rest, in compute, in the reduction."""

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """`tree` with its floating-point tensors in `dtype`; the same object if nothing changes."""
    if dtype is None:
        return tree
    if isinstance(tree, torch.Tensor):  # the usual case, without walking a tree
        return tree.to(dtype) if tree.is_floating_point() else tree
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
