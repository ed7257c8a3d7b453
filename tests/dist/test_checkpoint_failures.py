"""Checkpoints whatever fails or dies: complete or absent, known to all, the last one intact."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_core.checkpoint import latest
from tests.dist import checkpoint_failures as programs
from tests.dist import checkpoint_programs
from tests.dist.forks import FreshProcess
from tests.dist.rank_pool import RankPool


@pytest.fixture(scope="module")
def fresh_process() -> Iterator[FreshProcess]:
    """Runs what kills its processes."""
    process = FreshProcess(programs.__name__)
    yield process
    process.close()


# --- one rank fails ---------------------------------------------------------------------------

FAILURES = {
    "full disk": r"CheckpointError: Saving step 2 into \S+ failed on rank 1 .*Errno 27\] File too",
    "unlike extra": r"ValueError: .*rank 0.*same extra on all ranks, got on rank 1 ",
    "odd extra": r"ValueError: .* failed on rank 1 .*extra\.odd, got a set\.",
}


@pytest.mark.parametrize("how", list(FAILURES))
def test_a_failure_on_one_rank_is_known_to_all(
    warm_ranks: RankPool, tmp_path: Path, how: str
) -> None:
    """All ranks raise and name rank and cause; the last checkpoint stands; the next save works."""
    for found in warm_ranks.run(programs.fail_then_save, str(tmp_path), how, world_size=3):
        assert re.match(FAILURES[how], found["text"]), found["text"]
        assert "step-00000002" not in found["names"]
        assert (found["step"], found["misses"]) == (1, [])
        assert found["after"] == ["step-00000001", "step-00000002"]


def test_what_one_rank_finds_wrong_stops_all(warm_ranks: RankPool, tmp_path: Path) -> None:
    """A misfit or damage that one rank sees raises on all, before anything is changed."""
    folder = str(tmp_path)
    warm_ranks.run(checkpoint_programs.fill_and_save, folder, 1, "more units", world_size=2)
    kinds = ["optimizer on one rank", "damaged"]
    for misfit, damage in warm_ranks.run(programs.refusals, folder, kinds, world_size=2):
        assert re.match(
            r"ValueError: Loading \S+ failed on rank 1 .*Expected SGD with 1 .*got AdamW with 2",
            misfit[0],
        )
        assert re.match(r"CheckpointError: .*__1_0.distcp is damaged", damage[0])
        assert misfit[1] == damage[1] == []


# --- processes are killed ---------------------------------------------------------------------

DEATHS = {
    "rank writing": ([1], "writing"),
    "all writing": ([0, 1, 2, 3], "writing"),
    "coordinator renaming": ([0], "renaming"),
}


@pytest.mark.parametrize("death", list(DEATHS))
def test_a_killed_rank_leaves_the_last_checkpoint(
    warm_ranks: RankPool, fresh_process: FreshProcess, tmp_path: Path, death: str
) -> None:
    """Ranks that live learn of it before any timeout, and what is complete loads bit for bit."""
    victims, where = DEATHS[death]
    codes, reports = fresh_process.run(programs.kill_while_saving, str(tmp_path), victims, where)
    ranks = range(programs.NUM_MORTALS)
    assert codes == [-signal.SIGKILL if rank in victims else 0 for rank in ranks]
    assert len(reports) == len(ranks) - len(victims)
    for text, seconds in reports:
        assert re.match(r"CheckpointError: Saving step 2 into ", text)
        assert "another rank died or did not answer" in text
        assert seconds < 30
    folder = tmp_path / "saved"
    assert latest(folder) == 1
    for step, wrong, names in warm_ranks.run(programs.load_and_save, str(folder), 1, world_size=2):
        assert (step, wrong) == (1, [])
        assert names == ["step-00000001", "step-00000009"]


def test_a_crash_at_any_moment_leaves_a_complete_checkpoint(
    fresh_process: FreshProcess, tmp_path: Path
) -> None:
    """The old one before the rename, the new one after it; all that seem complete load."""
    left = fresh_process.run(programs.die_everywhere, tmp_path)
    assert left == sorted(left)
    assert left.count(1) > 15
    assert 2 in left
