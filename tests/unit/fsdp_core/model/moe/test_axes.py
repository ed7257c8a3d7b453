"""Which layouts a mixture of experts takes, and which axes hold different tokens."""

from dataclasses import replace
from typing import cast

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_core.model.moe.dispatcher import MoeAxes
from fsdp_core.parallel.mesh import Axes, Axis

SIZES = {"tp": 2, "cp": 3, "pp": 5, "dp": 7, "dp_outer": 11, "ep": 4, "etp": 2, "edp": 13}


def axes(*, sequence_parallel: bool) -> Axes:
    """Axes of different sizes, to tell them apart."""
    group = cast("dist.ProcessGroup", None)
    mesh = cast("DeviceMesh", None)
    return Axes(
        **{name: Axis(name, size, 0, group) for name, size in SIZES.items()},
        dense_mesh=mesh,
        expert_mesh=mesh,
        sequence_parallel=sequence_parallel,
    )


def test_tokens_differ_over_tp_under_sequence_parallel_alone() -> None:
    """Counts are summed over dp_outer, dp and cp, and over tp where it cuts the sequence."""
    cut, whole = (MoeAxes.of(axes(sequence_parallel=sp)) for sp in (True, False))
    assert [axis.name for axis in cut.tokens] == ["dp_outer", "dp", "cp", "tp"]
    assert [axis.name for axis in whole.tokens] == ["dp_outer", "dp", "cp"]
    assert not cut.etp_shares_tokens
    assert whole.etp_shares_tokens


def test_dense_gradients_are_averaged_over_dp_and_cp() -> None:
    """The losses' factor is the number of ranks of dp_outer, dp and cp, with or without tp."""
    for sequence_parallel in (True, False):
        found = MoeAxes.of(axes(sequence_parallel=sequence_parallel))
        assert found.num_averaged == 11 * 7 * 3
        assert (found.ep.size, found.etp.size, found.tp.size) == (4, 2, 2)


def test_copies_of_a_token_are_refused() -> None:
    """Tensor parallel without sequence parallel needs an etp group of the ranks of tp."""
    layout = MoeAxes.of(axes(sequence_parallel=False))
    for size in (1, 4):
        with pytest.raises(ValueError, match=rf"Expected sequence_parallel, or etp .*etp={size}"):
            replace(layout, etp=replace(layout.etp, size=size))
    replace(layout, etp=replace(layout.etp, size=1), sequence_parallel=True)


def test_ep_divides_the_experts() -> None:
    """Every rank has as many experts."""
    layout = MoeAxes.of(axes(sequence_parallel=True))
    assert layout.local_experts(12) == 3
    with pytest.raises(ValueError, match="divisible by ep=4, got 6"):
        layout.local_experts(6)
