"""kill -9 of the harness in mid-matrix, then --resume: nothing is repeated and nothing is lost."""

import random
from pathlib import Path

from tests.chaos.kills import Matrix, torment


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    """Harness, forkserver, leader or rank: what is finished stays, the reports end up the same."""
    whole = Matrix(tmp_path / "whole", seeds=2)
    assert whole.to_the_end() == ""
    killed = Matrix(tmp_path / "killed", seeds=2)
    found = torment(killed, 2, random.Random(3), longest_s=0.5, expected=whole.report())
    assert found.problems == []
    assert found.kills.total() == 2
