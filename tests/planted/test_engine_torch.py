"""The forkserver with torch in it: one thread, a working store, culprits found behind gloo."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine.local import LocalEngine
from harness.records import RunSpec
from tests.planted.local_runs import LIMITS, TIMEOUT_S, finish, finish_late


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    entry = "tests.planted.stub_torch_ranks:rank_main"
    with LocalEngine(8, entry=entry, limits=LIMITS) as engine:
        yield engine


def spec(stub: dict[str, str] | None = None, world_size: int = 4) -> RunSpec:
    config = {"graph": [], "steps": 1, "microbatches": 1, "stub": stub or {}}
    return RunSpec(config=config, device="cpu", world_size=world_size, timeout_s=TIMEOUT_S)


def test_eight_ranks_meet(engine: LocalEngine, tmp_path: Path) -> None:
    """Ranks find each other through the leader's store and finish a collective."""
    assert finish(engine, spec(world_size=8), tmp_path).what == ""


def test_the_warm_server_has_one_thread(engine: LocalEngine, tmp_path: Path) -> None:
    """Forking is safe only while no other thread can hold a lock."""
    finish(engine, spec(world_size=1), tmp_path)
    assert len(list(Path(f"/proc/{engine.server_pid}/task").iterdir())) == 1


def test_the_killed_rank_is_blamed_and_not_those_that_lost_it(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Three ranks report a lost connection; the culprit is the one that said nothing."""
    outcome = finish(engine, spec({"2": "sigkill"}), tmp_path)
    assert (outcome.what, outcome.culprit_rank) == ("killed", 2), outcome.message
    assert "ranks 0, 1, 3 failed too" in outcome.message


def test_the_hung_rank_is_blamed_and_not_those_that_gave_up(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Ranks whose collective timed out are victims of the one that never came."""
    stderr = tmp_path / "rank1.stderr"
    outcome = finish_late(
        engine, spec({"1": "hang"}), tmp_path, [1], limit_s=LIMITS.grace_s,
        said=lambda: "in sleep_for_ever" in stderr.read_text(),
    )  # fmt: skip
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1), outcome.message
    assert "in sleep_for_ever" in stderr.read_text()
