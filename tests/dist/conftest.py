"""Which tests of ranks the suite has the time for; all others are marked `long`.

`--share 2/5` takes a fifth of the long ones, by a hash of their names: `.ci/run` takes another with
each commit, and says which.
"""

import zlib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = {
    "test_capture_orders",
    "test_capture_session",
    "test_fused_experts",
    "test_graph_collectives",
    "test_lending",
    "test_nest",
    "test_parallel_collectives",
    "test_parity_bounds",
    "test_products_of_features_equal_one_process",
}
"""Files, and a test; together some seconds on two cores; the others take many minutes."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; those of others are listed, too."""
    index, number = config.getoption("share")
    left: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        is_long = item.path.parent == HERE and not {item.path.stem, item.name} & QUICK
        if is_long:
            item.add_marker(pytest.mark.long)
        ours = not is_long or zlib.crc32(item.nodeid.encode()) % number == index - 1
        (left if ours else others).append(item)
    items[:] = left
    if others:
        config.hook.pytest_deselected(items=others)
