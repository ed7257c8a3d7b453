"""kill -9 of the harness in mid-matrix, then --resume: nothing is repeated and nothing is lost."""

import random
from pathlib import Path

from tests.kill_and_resume.matrix import Matrix, torment


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    """Harness, forkserver, leader or rank: what is finished stays, the reports end up the same."""
    whole = Matrix(tmp_path / "whole", real=False)
    assert whole.to_the_end() == ""
    rng = random.Random(3)
    found = torment(
        Matrix(tmp_path / "killed", real=False), 2, rng, longest_s=0.5, expected=whole.reports()
    )
    assert found.problems == []
    assert sum(found.kills.values()) == 2
