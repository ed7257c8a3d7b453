"""The forkserver with torch in it: one thread, a working store, culprits found behind gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine.local import LocalEngine
from harness.engine.watch import Limits
from harness.records import RunOutcome, RunSpec


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    limits = Limits(grace_s=1.0, stacks_s=0.3)
    with LocalEngine(8, entry="tests.planted.stub_torch_ranks:rank_main", limits=limits) as engine:
        yield engine


def finish(
    engine: LocalEngine, folder: Path, stub: dict[str, str], world_size: int = 4
) -> RunOutcome:
    config = {"graph": [], "steps": 1, "microbatches": 1, "stub": stub}
    run = RunSpec(config=config, device="cpu", world_size=world_size, timeout_s=30.0)
    engine.start(run, folder)
    (outcome,) = engine.wait(60.0)
    return outcome


def test_eight_ranks_meet(engine: LocalEngine, tmp_path: Path) -> None:
    """Ranks find each other through the leader's store and finish a collective."""
    assert finish(engine, tmp_path, {}, world_size=8).what == ""


def test_the_warm_server_has_one_thread(engine: LocalEngine, tmp_path: Path) -> None:
    """Forking is safe only while no other thread can hold a lock."""
    finish(engine, tmp_path, {}, world_size=1)
    assert len(list(Path(f"/proc/{engine.server_pid}/task").iterdir())) == 1


def test_the_killed_rank_is_blamed_and_not_those_that_lost_it(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Three ranks report a lost connection; the culprit is the one that said nothing."""
    outcome = finish(engine, tmp_path, {"2": "sigkill"})
    assert (outcome.what, outcome.culprit_rank) == ("killed", 2), outcome.message
    assert "ranks 0, 1, 3 failed too" in outcome.message


def test_the_hung_rank_is_blamed_and_not_those_that_gave_up(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Ranks whose collective timed out are victims of the one that never came."""
    outcome = finish(engine, tmp_path, {"1": "hang"})
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1), outcome.message
    assert "in sleep_for_ever" in (tmp_path / "rank1.stderr").read_text()
