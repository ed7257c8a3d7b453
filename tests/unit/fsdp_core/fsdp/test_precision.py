"""Precision: which tensors are cast, and that nothing is touched where nothing changes."""

from typing import NamedTuple

import pytest
import torch

from fsdp_core.fsdp.param_group import MixedPrecisionPolicy, cast_floats


class Pair(NamedTuple):
    """A container with a name for each part."""

    values: torch.Tensor
    number: int


def test_only_floating_point_tensors_are_cast() -> None:
    """Integers, bools and things that are no tensors stay; containers keep their types."""
    floats, ints, flags = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2) > 0
    tree = {"a": [floats, ints], "b": Pair(floats.double(), 3), "c": (flags, None, "x")}
    cast = cast_floats(tree, torch.bfloat16)
    assert cast["a"][0].dtype == torch.bfloat16
    assert cast["a"][1] is ints
    assert isinstance(cast["b"], Pair)
    assert (cast["b"].values.dtype, cast["b"].number) == (torch.bfloat16, 3)
    assert cast["c"][0] is flags
    assert cast["c"][1:] == (None, "x")
    assert cast_floats(ints, torch.bfloat16) is ints
    assert cast_floats(floats, torch.bfloat16).dtype == torch.bfloat16
    assert tree["a"][0] is floats, "the caller's containers are not changed"


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_nothing_is_copied_where_nothing_changes(dtype: torch.dtype | None) -> None:
    """A tensor that has the dtype, or no dtype asked for, comes back as the same object."""
    floats = torch.ones(2)
    assert cast_floats(floats, dtype) is floats
    assert cast_floats([floats], dtype)[0] is floats
    tree = {"a": floats}
    if dtype is None:
        assert cast_floats(tree, dtype) is tree


def test_casting_is_differentiable() -> None:
    """Gradients go through a cast and come back in the dtype of what was cast."""
    x = torch.ones(3, requires_grad=True)
    (cast_floats((x, 1), torch.bfloat16)[0] * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert (x.grad == 2).all()


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        (MixedPrecisionPolicy(), None),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.bfloat16),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False), None),
        (MixedPrecisionPolicy(output_dtype=torch.bfloat16), None),
    ],
)
def test_inputs_follow_the_parameters(
    policy: MixedPrecisionPolicy, dtype: torch.dtype | None
) -> None:
    """Inputs are cast to the dtype of the parameters, unless told not to."""
    assert policy.input_dtype == dtype
