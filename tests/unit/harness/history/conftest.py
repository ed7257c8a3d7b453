"""A history of one's own."""

from pathlib import Path

import pytest

from harness.history.ledger import History


@pytest.fixture
def history(tmp_path: Path) -> History:
    """An empty history in a fresh folder."""
    return History.open(tmp_path / "history", create=True)
