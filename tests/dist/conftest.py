"""Which tests of ranks the suite has the time for; all others are marked `long`."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
QUICK = {
    "test_capture_session",
    "test_fused_experts",
    "test_graph_collectives",
    "test_moe",
    "test_parallel_collectives",
}
"""Files; together some seconds on two cores; the others take many minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder; those of others are listed, too."""
    for item in items:
        if item.path.parent == HERE and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.long)
