"""One engine for several executions: turns, sharing, failures, retries, the end."""

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.engine.base import Slots
from harness.errors import Infrastructure, Interrupted
from harness.records import Ending, RunOutcome, RunSpec
from harness.repeats import FIRST_REPEAT
from harness.retries import Retries
from harness.store import RunFolder, begin_run, save_outcome
from harness.under_pytest.pool import MAX_OVERTAKEN, RunPool, Wish

PATIENCE_S = 60.0


def spec(name: str, world_size: int = 1) -> RunSpec:
    return RunSpec(
        config={"graph": [], "name": name}, device="cpu", world_size=world_size, timeout_s=1.0
    )


class TurnEngine:
    """Two slots. Ends the oldest run when both are taken, or when nothing more was started.

    Runs start when the test lets them; `fails` names runs that cannot be started, `dies` runs whose
    first attempt the machine fails.
    """

    def __init__(self, fails: str = "", dies: str = "") -> None:
        self._slots = Slots(2)
        self._under_way: list[tuple[RunSpec, Path, int]] = []
        self._just_started = False
        self._fails, self._dies = fails, dies
        self.go = threading.Event()
        self.started: list[str] = []
        self.beside: dict[str, list[str]] = {}
        self.closed = False

    @property
    def slots(self) -> int:
        return 2

    def check(self, spec: RunSpec) -> None:
        self._slots.check(spec)

    def can_start(self, spec: RunSpec) -> bool:
        return self._slots.fits(spec)

    def adopt(self, spec: RunSpec, folder: Path) -> bool:
        return False

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        assert self.go.wait(PATIENCE_S)
        if spec.config["name"] == self._fails:
            raise Infrastructure("the disk is full")
        self._slots.take(spec)
        begin_run(folder, spec)
        self._under_way.append((spec, folder, attempt))
        self._just_started = True
        names = [run.config["name"] for run, _, _ in self._under_way[:-1]]
        self.beside[spec.config["name"]] = names
        self.started.append(spec.config["name"])

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        just_started, self._just_started = self._just_started, False
        if not self._under_way or (just_started and len(self._under_way) < 2):
            return []
        run, folder, attempt = self._under_way.pop(0)
        self._slots.release(run.key)
        died = run.config["name"] == self._dies and not attempt
        outcome = RunOutcome(
            key=run.key, what="interrupted" if died else "",
            message="the forkserver died by SIGKILL during the run" if died else "",
            ending=Ending(machine="forkserver_died") if died else None,
            culprit_rank=None, ranks=(), started_unix_s=0.0, wall_s=1.0, attempt=attempt,
        )  # fmt: skip
        save_outcome(folder, outcome)
        return [outcome]

    def cancel(self) -> None:
        while self._under_way:
            self._slots.release(self._under_way.pop()[0].key)

    def close(self) -> None:
        self.cancel()
        self.closed = True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "a", {}, "", ()) as made:
        yield made


@pytest.fixture
def pooled() -> Iterator[Callable[[TurnEngine], RunPool]]:
    pools: list[RunPool] = []

    def make(engine: TurnEngine) -> RunPool:
        pools.append(RunPool(engine))
        return pools[-1]

    yield make
    for pool in pools:
        assert isinstance(pool.engine, TurnEngine)
        pool.engine.go.set()
        pool.close()
        assert pool.engine.closed


def wanted(pool: RunPool, folder: RunFolder, *specs: RunSpec, retries: int = 0) -> list[Wish]:
    wishes = []
    for run in specs:
        wish, mine = pool.claim(folder, run, Retries(folder, retries))
        assert mine
        pool.submit(wish)
        wishes.append(wish)
    return wishes


Pooled = Callable[[TurnEngine], RunPool]


def test_a_run_that_needs_all_slots_has_its_turn(pooled: Pooled, folder: RunFolder) -> None:
    """Small runs pass a wide one `MAX_OVERTAKEN` times, then everything waits for it."""
    engine = TurnEngine()
    small = [spec(f"small{number}") for number in range(3 * MAX_OVERTAKEN)]
    wishes = wanted(pooled(engine), folder, small[0], spec("wide", 2), *small[1:])
    engine.go.set()
    for wish in wishes:
        assert wish.outcome.result(PATIENCE_S).what == ""
    assert engine.started.index("wide") == 1 + MAX_OVERTAKEN


def test_a_timed_run_has_the_machine_to_itself(pooled: Pooled, folder: RunFolder) -> None:
    """A run that is made for its times starts when nothing runs, and nothing starts beside it."""
    engine = TurnEngine()
    timed = dataclasses.replace(spec("timed"), replica=FIRST_REPEAT)
    wishes = wanted(pooled(engine), folder, spec("a"), timed, spec("b"), spec("c"))
    engine.go.set()
    for wish in wishes:
        wish.outcome.result(PATIENCE_S)
    assert engine.beside["timed"] == []
    assert all("timed" not in others for others in engine.beside.values())


def test_a_run_is_made_once_for_all_and_its_outcome_stands(
    pooled: Pooled, folder: RunFolder
) -> None:
    """Who asks while it runs, or after it, gets the outcome of the one attempt."""
    engine = TurnEngine()
    pool = pooled(engine)
    (wish,) = wanted(pool, folder, spec("one"))
    again, mine = pool.claim(folder, spec("one"), Retries(folder, 0))
    assert (again, mine) == (wish, False)
    engine.go.set()
    wish.outcome.result(PATIENCE_S)
    assert pool.claim(folder, spec("one"), Retries(folder, 0)) == (wish, False)
    assert engine.started == ["one"]


def test_the_same_work_of_two_scenarios_takes_turns(
    pooled: Pooled, folder: RunFolder, tmp_path: Path
) -> None:
    """An engine knows runs by their key: two folders' runs of one key never overlap."""
    engine = TurnEngine()
    pool = pooled(engine)
    with RunFolder.create(tmp_path / "b", {}, "", ()) as other:
        wishes = wanted(pool, folder, spec("one")) + wanted(pool, other, spec("one"))
        engine.go.set()
        assert [wish.outcome.result(PATIENCE_S).what for wish in wishes] == ["", ""]


def test_what_cannot_be_started_fails_those_who_asked_and_no_others(
    pooled: Pooled, folder: RunFolder
) -> None:
    """The engine's error reaches whoever waits for that run; other runs are made."""
    engine = TurnEngine(fails="bad")
    pool = pooled(engine)
    bad, good = wanted(pool, folder, spec("bad"), spec("good"))
    engine.go.set()
    with pytest.raises(Infrastructure, match="disk is full"):
        bad.outcome.result(PATIENCE_S)
    assert good.outcome.result(PATIENCE_S).what == ""


def test_a_claim_that_is_given_up_is_told(pooled: Pooled, folder: RunFolder) -> None:
    """Whoever waits for a run that its claimant cannot start hears why, and may claim it anew."""
    pool = pooled(TurnEngine())
    wish, _ = pool.claim(folder, spec("one"), Retries(folder, 0))
    pool.drop(wish, Infrastructure("cannot set aside"))
    with pytest.raises(Infrastructure, match="set aside"):
        wish.outcome.result(PATIENCE_S)
    assert pool.claim(folder, spec("one"), Retries(folder, 0))[1]


@pytest.mark.parametrize(("retries", "what", "attempts"), [(1, "", 1), (0, "interrupted", 0)])
def test_a_failure_of_the_machine_is_made_good_before_anybody_hears_of_it(
    pooled: Pooled, folder: RunFolder, retries: int, what: str, attempts: int
) -> None:
    """With retries left the outcome is the second attempt's, and the first is kept beside it."""
    engine = TurnEngine(dies="one")
    (wish,) = wanted(pooled(engine), folder, spec("one"), retries=retries)
    engine.go.set()
    assert wish.outcome.result(PATIENCE_S).what == what
    assert folder.num_attempts(spec("one").key) == attempts


def test_the_end_of_the_session_is_told_to_all_who_wait(pooled: Pooled, folder: RunFolder) -> None:
    """Runs under way, queued or only claimed: everybody gets `Interrupted`, nobody waits on."""
    engine = TurnEngine()
    pool = pooled(engine)
    engine.go.set()
    claimed, _ = pool.claim(folder, spec("claimed"), Retries(folder, 0))
    pool.close()
    with pytest.raises(Interrupted):
        claimed.outcome.result(PATIENCE_S)
    with pytest.raises(Interrupted):
        pool.claim(folder, spec("later"), Retries(folder, 0))
