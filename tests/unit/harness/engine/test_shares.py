"""Which ranks go on which node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.engine.slurm_job import SlurmOptions, share_out

COUNT = st.integers(1, 70)


@given(COUNT, COUNT, st.none() | COUNT)
def test_every_rank_is_on_one_node_and_no_node_is_empty(
    world_size: int, nodes: int, most: int | None
) -> None:
    """The nodes' ranks are all ranks in order; no node is empty or holds more than it may."""
    options = SlurmOptions(nodes=nodes, ranks_per_node=most)
    shares = share_out(world_size, options, "cpu")
    parts = [list(shares.ranks(node)) for node in range(shares.num_nodes)]
    assert [rank for part in parts for rank in part] == list(range(world_size))
    assert all(parts)
    assert max(map(len, parts)) == shares.ranks_per_node <= (most or world_size)


@pytest.mark.parametrize(
    ("world_size", "options", "device", "expected"),
    [
        (4, SlurmOptions(), "cpu", (1, 4)),
        (4, SlurmOptions(nodes=2), "cpu", (2, 2)),
        (1, SlurmOptions(nodes=2), "cpu", (1, 1)),
        (8, SlurmOptions(nodes=3), "cpu", (3, 3)),
        (16, SlurmOptions(gpus_per_node=8), "cuda", (2, 8)),
        (16, SlurmOptions(gpus_per_node=8), "cpu", (1, 16)),
        (16, SlurmOptions(gpus_per_node=8, ranks_per_node=4), "cuda", (4, 4)),
        (16, SlurmOptions(gpus_per_node=8, nodes=4), "cuda", (4, 4)),
        (5, SlurmOptions(nodes=4), "cpu", (3, 2)),
    ],
)
def test_how_many_nodes_a_run_takes(
    world_size: int, options: SlurmOptions, device: str, expected: tuple[int, int]
) -> None:
    """As few as `ranks_per_node` (by default the GPUs) allows, at least `nodes`."""
    shares = share_out(world_size, options, device)
    assert (shares.num_nodes, shares.ranks_per_node) == expected


def test_a_node_that_is_not_there() -> None:
    """Asking for the ranks of a node beyond the last is a mistake, not an empty share."""
    with pytest.raises(ValueError, match="Expected a node below 2, got 2"):
        share_out(4, SlurmOptions(nodes=2), "cpu").ranks(2)
