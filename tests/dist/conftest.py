"""Which tests of ranks the suite has the time for; all others are marked `long`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = {
    "test_capture_session",
    "test_moe",
    "test_gradients::test_gradients_show_before_the_last_pass_only_where_fully_reduced",
    "test_gradients::test_a_sum_is_divided_in_the_dtype_of_the_gradient",
    "test_graph_collectives",
    "test_parallel_collectives",
}
"""Files, and tests in them; together some seconds on two cores; the others take many minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; those of others are listed, too."""
    for item in items:
        stem, name = item.path.stem, item.name.partition("[")[0]
        if item.path.parent == HERE and not {stem, f"{stem}::{name}"} & QUICK:
            item.add_marker(pytest.mark.long)
