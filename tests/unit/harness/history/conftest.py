"""A history of one's own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.history import History


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """An empty history in a fresh folder."""
    with History.open(tmp_path / "history.sqlite", create=True) as made:
        # What a power cut would lose does not matter here, and waiting for the disk takes long.
        made.connection.execute("PRAGMA synchronous = OFF")
        yield made
