"""The next run starts while the present one trains, and waits for its devices."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_core.config import ParallelConfig, TrainConfig
from harness.engine.local import EARLY_VARIABLE, LocalEngine
from harness.engine.machine import parent_of
from harness.engine.ranks import Limits
from harness.records import RunOutcome, RunSpec
from harness.repeats import FIRST_REPEAT
from harness.store import load_run_folder
from harness.values import SoakSpec
from tests.planted.leader_clock import put_ahead
from tests.planted.local_runs import (
    LIMITS,
    PATIENCE_S,
    TIMEOUT_S,
    doomed_harness,
    rank_pids,
    wait_for,
    wait_gone,
)

ENTRY = "tests.planted.early_ranks:rank_main"


def spec(name: str, stub: dict[str, str] | None = None, world_size: int = 2) -> RunSpec:
    config = {"graph": [], "steps": 4, "microbatches": 1, "stub": stub or {}, "name": name}
    return RunSpec(config=config, device="cpu", world_size=world_size, timeout_s=TIMEOUT_S)


PRESENT = spec("present", {"0": "await_go"})


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngine]:
    monkeypatch.setenv(EARLY_VARIABLE, "cpu")
    with LocalEngine(2, entry=ENTRY, limits=LIMITS) as engine:
        yield engine


def begin(engine: LocalEngine, folder: Path, following: RunSpec) -> tuple[Path, Path, list[int]]:
    """The folders of a run that waits for `go` and of the next one, and the next one's ranks."""
    present, early = folder / "present", folder / "early"
    engine.start(PRESENT, present)
    wait_for(present / "waiting0")
    assert engine.can_start(following)
    engine.start(following, early)
    wait_for(*(early / f"joined{rank}" for rank in range(2)))
    return present, early, [int((early / f"joined{rank}").read_text()) for rank in range(2)]


def ended(engine: LocalEngine, number: int) -> dict[str, RunOutcome]:
    found: dict[str, RunOutcome] = {}
    while len(found) < number:
        outcomes = engine.wait(PATIENCE_S)
        assert outcomes
        found |= {outcome.key: outcome for outcome in outcomes}
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_it_goes_when_the_run_before_it_has_ended(
    engine: LocalEngine, tmp_path: Path, fails: bool
) -> None:
    """Its ranks record nothing before, its time begins then, however the other one ends."""
    following = spec("early")
    present, early, pids = begin(engine, tmp_path, following)
    assert not engine.can_start(spec("third"))
    # Whatever it waits, its time is not up.
    put_ahead(early, parent_of(pids[0]) or 0, 2 * TIMEOUT_S)
    assert engine.wait(0.05) == []
    assert not list(early.glob("rank*.jsonl"))
    if fails:
        os.kill(rank_pids(present)[0], 9)
    else:
        (present / "go").touch()
    found = ended(engine, 2)
    before, after = found[PRESENT.key], found[following.key]
    assert (before.what, after.what) == ("killed" if fails else "", "")
    starts = [records.start for records in load_run_folder(early, following).ranks]
    gone_unix_s = before.started_unix_s + before.wall_s
    assert all(start and start.environment["unix_s"] >= gone_unix_s - 0.05 for start in starts)
    assert after.started_unix_s >= gone_unix_s - 0.05
    assert (early / "rank0.stderr").read_text() == "", "asked for its stack"
    # The slots are free again, and were its own.
    assert engine.can_start(PRESENT)
    engine.start(spec("third"), tmp_path / "third")
    assert ended(engine, 1)[spec("third").key].what == ""


def test_a_rank_that_dies_as_it_waits_fails_its_own_run(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """The run before it goes on, and another one may wait in its place."""
    following = spec("early", {"early": "1"})
    engine.start(PRESENT, tmp_path / "present")
    wait_for(tmp_path / "present" / "waiting0")
    engine.start(following, tmp_path / "early")
    wait_for(tmp_path / "early" / "joined0")
    leader = parent_of(int((tmp_path / "early" / "joined0").read_text())) or 0
    while not (outcomes := engine.wait(0.02)):
        put_ahead(tmp_path / "early", leader, PATIENCE_S)
    (outcome,) = outcomes
    assert (outcome.key, outcome.what, outcome.culprit_rank) == (following.key, "killed", 1)
    third = spec("third")
    assert engine.can_start(third)
    engine.start(third, tmp_path / "third")
    (tmp_path / "present" / "go").touch()
    assert {each.what for each in ended(engine, 2).values()} == {""}


def test_what_fails_as_it_waits_on_gpus_is_undecided(tmp_path: Path) -> None:
    """Two communicators may be too much for a machine: what fails without is a run's own."""
    first, second = (
        replace(run, device="cuda") for run in (PRESENT, spec("early", {"early": "1"}))
    )
    third = replace(spec("third"), device="cuda")
    with LocalEngine(2, entry=ENTRY, limits=Limits(grace_s=0.1), devices=("0", "1")) as engine:
        engine.start(first, tmp_path / "present")
        wait_for(tmp_path / "present" / "waiting0")
        engine.start(second, tmp_path / "early")
        early = ended(engine, 1)[second.key]
        assert (early.what, early.culprit_rank, early.undecided) == ("killed", 1, True)
        assert not engine.can_start(second)
        (tmp_path / "present" / "go").touch()
        assert ended(engine, 1)[first.key].what == ""
        engine.start(second, tmp_path / "again")
        assert not engine.can_start(third)
        again = ended(engine, 1)[second.key]
    assert (again.what, again.culprit_rank, again.undecided) == ("killed", 1, False)


def test_under_mps_runs_that_share_gpus_go_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault of one would end the other; without MPS, or on the CPU, they go together."""
    first, second = (replace(run, device="cuda") for run in (PRESENT, spec("second")))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    with LocalEngine(4, entry=ENTRY, limits=LIMITS, devices=("0", "1") * 2) as engine:
        engine.start(first, tmp_path / "first")
        assert engine.can_start(second)
        (tmp_path / "control").touch()
        assert not engine.can_start(second)
        assert engine.can_start(spec("on the cpu"))
        (tmp_path / "first" / "go").touch()
        assert ended(engine, 1)[first.key].what == ""
        assert engine.can_start(second)


def test_cancelled_it_was_never_run(engine: LocalEngine, tmp_path: Path) -> None:
    """It has no outcome and no records, leaves nobody, and gives back what it never had."""
    _, early, pids = begin(engine, tmp_path, spec("early"))
    engine.cancel()
    wait_gone(*pids)
    assert not (early / "outcome.json").exists()
    assert not list(early.glob("rank*.jsonl"))
    engine.start(spec("after"), tmp_path / "after")
    assert ended(engine, 1)[spec("after").key].what == ""


def test_the_forkserver_dies_while_it_waits(engine: LocalEngine, tmp_path: Path) -> None:
    """Both runs are interrupted, nobody is left."""
    _, _, pids = begin(engine, tmp_path, spec("early"))
    assert engine.server_pid is not None
    os.kill(engine.server_pid, 9)
    assert {each.what for each in ended(engine, 2).values()} == {"interrupted"}
    wait_gone(*pids)


@pytest.mark.parametrize(
    "following",
    [
        replace(spec("timed"), replica=FIRST_REPEAT),
        replace(spec("soak"), soak=SoakSpec(by="steps", amount=10)),
        replace(spec("program"), config={**spec("program").config, "program": {"script": "a.py"}}),
        spec("narrow", world_size=1),
        replace(spec("elsewhere"), device="cuda"),
        PRESENT,
    ],
    ids=lambda run: run.config["name"],
)
def test_who_never_starts_early(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, following: RunSpec
) -> None:
    """Not a timed run, a soak, a program, other devices, or a run that was started before."""
    monkeypatch.setenv(EARLY_VARIABLE, "cpu,cuda")
    with LocalEngine(2, entry=ENTRY, limits=LIMITS, devices=("0", "1")) as engine:
        engine.start(PRESENT, tmp_path)
        assert not engine.can_start(following)
        assert engine.can_start(spec("early"))


def test_runs_on_the_cpu_do_not_start_early_by_default(tmp_path: Path) -> None:
    with LocalEngine(2, entry=ENTRY, limits=LIMITS) as engine:
        engine.start(PRESENT, tmp_path)
        assert not engine.can_start(spec("early"))


@pytest.mark.parametrize("with_server", [False, True])
def test_kill_9_of_the_harness_leaves_nobody_who_waits(tmp_path: Path, with_server: bool) -> None:
    """Waiting ranks end, and never begin, with the harness alone and with its server."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), EARLY_VARIABLE: "cpu"}
    command = doomed_harness(tmp_path, {"present": PRESENT, "early": spec("early")}, 2, ENTRY)
    early = tmp_path / "early"
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        server = int(harness.stdout.readline())
        wait_for(*(early / f"joined{rank}" for rank in range(2)))
        pids = [int((early / f"joined{rank}").read_text()) for rank in range(2)]
        leader = parent_of(pids[0]) or 0
        if with_server:
            os.kill(server, 9)
        harness.kill()
    wait_gone(server, leader, *pids)
    assert not list(early.glob("rank*.jsonl"))
    assert not (early / "outcome.json").exists()


def test_real_ranks_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that started early trains after the other, has its bits, and times of its own."""
    monkeypatch.setenv(EARLY_VARIABLE, "cpu")
    for name in [name for name in os.environ if name.startswith("COV")]:
        monkeypatch.delenv(name)
    config = TrainConfig(parallel=ParallelConfig(dp=2), steps=4, graph=("full_iteration",))
    first = RunSpec(config=config.to_dict(), device="cpu", world_size=2, timeout_s=TIMEOUT_S)
    second = replace(first, replica=1)
    with LocalEngine(2) as engine:
        engine.start(first, tmp_path / "first")
        assert engine.can_start(second)
        engine.start(second, tmp_path / "second")
        found = ended(engine, 2)
    one, two = (load_run_folder(tmp_path / name, run)
                for name, run in (("first", first), ("second", second)))  # fmt: skip
    assert (one.outcome.what, two.outcome.what) == ("", "")
    gone_unix_s = one.outcome.started_unix_s + one.outcome.wall_s - 0.1
    assert found[second.key].started_unix_s >= gone_unix_s
    for ours, theirs in zip(two.ranks, one.ranks, strict=True):
        assert ours.start is not None
        assert ours.end is not None
        assert [step.digests for step in ours.steps] == [step.digests for step in theirs.steps]
        assert ours.initial == theirs.initial
        assert ours.start.environment["started_unix_s"] >= gone_unix_s
        assert ours.end.startup_s < ours.end.wall_s <= two.outcome.wall_s + 0.1
