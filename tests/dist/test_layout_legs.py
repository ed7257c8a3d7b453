"""Between layouts, on real ranks: sound layouts are within bounds, a fault is found where it is."""

from dataclasses import replace
from typing import Any

import pytest

from tests.dist.layout_legs import PROJECTION, Comparer, Layout
from tests.dist.rank_pool import RankPool


def test_a_layout_is_within_its_bound_and_a_fault_is_not(warm_ranks: RankPool) -> None:
    """Tensor parallel beside one process, sound and with two rows of a gradient swapped."""
    compare = Comparer(warm_ranks)
    reference, sound = Layout(layers=1), Layout({"tp": 2}, layers=1)
    found = compare(reference, sound)
    assert found.location is None, found.message
    assert len(found.tensors) == 1 + 2 * 12
    wrong = compare(reference, replace(sound, fault="two rows swapped"))
    assert wrong.location is not None
    assert (wrong.location.tensor, wrong.location.quantity) == (PROJECTION, "grads")
    assert wrong.location.ranks == (1,)
    (row,) = (each.row for each in wrong.wrong if each.name == f"grads:{PROJECTION}")
    assert row in (0, 1)
    # The weight that this gradient moves may be off, too; no other gradient is.
    gradients = [each.name for each in wrong.wrong if each.name.startswith("grads:")]
    assert gradients == [f"grads:{PROJECTION}"]


@pytest.mark.parametrize("degrees", [{"pp": 2}, {"cp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_a_fault_of_the_forward_pass_is_named_where_it_begins(
    warm_ranks: RankPool, degrees: dict[str, Any]
) -> None:
    """The first branch that returns something else, not the loss or the last gradient."""
    compare = Comparer(warm_ranks)
    wrong = compare(Layout(layers=2), Layout(degrees, layers=2, fault="scaled branch"))
    assert wrong.location is not None
    found = wrong.location
    assert (found.phase, found.module, found.microbatch) == ("forward", "layers.1.attn", 0)
    assert (found.tensor, found.quantity) == ("layers.1.attn:output[0]", "taps.output")
