"""The real forkserver, leader and processes, with ranks that misbehave on purpose (no torch)."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine.local import LocalEngine
from harness.engine.machine import parent_of
from harness.errors import Infrastructure, UsageError
from harness.records import RunOutcome, RunSpec
from harness.store import RunFolder, load_run_folder, read_outcome
from tests.planted.leader_clock import put_ahead
from tests.planted.local_runs import (
    LIMITS,
    PATIENCE_S,
    TIMEOUT_S,
    doomed_harness,
    finish,
    finish_late,
    leader_of,
    rank_pids,
    wait_for,
    wait_gone,
)

ENTRY = "tests.planted.clocked_ranks:rank_main"


def spec(
    stub: dict[str, str] | None = None,
    world_size: int = 4,
    timeout_s: float = TIMEOUT_S,
    name: str = "",
    device: str = "cpu",
) -> RunSpec:
    config = {"graph": [], "steps": 4, "microbatches": 1, "stub": stub or {}, "name": name}
    plain = {"config": config, "device": device, "world_size": world_size, "timeout_s": timeout_s}
    return RunSpec.from_json(plain)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with pytest.MonkeyPatch.context() as patch:
        # Set on many CI machines, it would hide a buffer that a killed rank never flushes.
        patch.delenv("PYTHONUNBUFFERED", raising=False)
        with LocalEngine(8, entry=ENTRY, limits=LIMITS) as engine:
            yield engine


def stray_pids(folder: Path) -> list[int]:
    return [int(pid) for path in folder.glob("children*") for pid in path.read_text().split()]


ROWS = {
    "all well": ({}, "", None, ""),
    "SIGKILL": ({"2": "sigkill"}, "killed", 2, "rank 2 died by SIGKILL after step 1"),
    "SIGSEGV": ({"1": "segv"}, "crashed", 1, "SIGSEGV"),
    "exit 13": ({"1": "exit13"}, "crashed", 1, "exited with code 13"),
    "exit 256": ({"0": "exit256"}, "crashed", 0, "exited with code 1"),
    "exit text": ({"1": "exit_text"}, "crashed", 1, "exited with code 1 after step 1: last words"),
    "exception": ({"3": "raise"}, "crashed", 3, "ZeroDivisionError: planted"),
    "recorded oom": ({"3": "oom"}, "oom", 3, "CUDA out of memory"),
    "error but exit 0": ({"3": "error_exit0"}, "crashed", 3, "odd"),
    "victims": ({"0": "sigkill", "*": "peer_lost"}, "killed", 0, "ranks 1, 2, 3 failed too"),
    "left early": ({"0": "leave_early", "*": "peer_lost"}, "crashed", 0, "before its end record"),
    "half a line": ({"1": "half_line"}, "killed", 1, "SIGKILL"),
    "illegal access": ({"1": "illegal_access"}, "illegal_access", 1, "illegal memory access"),
    "leader killed": ({"0": "kill_leader"}, "killed", None, "leader of the run died by SIGKILL"),
    "others killed": ({"0": "exit13", "1": "hang"}, "crashed", 0, "rank 1 ended by the harness"),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_misbehaving_rank_is_called(engine: LocalEngine, tmp_path: Path, row: str) -> None:
    """Each way to die has its own outcome and culprit, on disk too, and leaves no process."""
    stub, what, culprit, told = ROWS[row]
    hanging = [int(rank) for rank, how in stub.items() if how == "hang"]
    if hanging:
        limit_s = LIMITS.grace_s
        outcome = finish_late(engine, spec(stub), tmp_path, hanging, limit_s=limit_s)
    else:
        outcome = finish(engine, spec(stub), tmp_path)
    assert (outcome.what, outcome.culprit_rank) == (what, culprit), outcome.message
    assert told in outcome.message
    assert load_run_folder(tmp_path, spec(stub)).outcome == outcome
    wait_gone(*rank_pids(tmp_path))


@pytest.mark.parametrize("how", ["hang", "ignore_term", "stop_self"])
def test_a_hanging_rank_is_ended_at_the_timeout(
    engine: LocalEngine, tmp_path: Path, how: str
) -> None:
    """A rank that hangs, ignores SIGTERM or is stopped ends as `hang`, named, and is gone."""
    outcome = finish_late(engine, spec({"1": how}), tmp_path, [1])
    assert (outcome.what, outcome.culprit_rank) == ("hang", 1)
    assert "rank 1 after step 1" in outcome.message
    assert [r.killed_by_harness for r in outcome.ranks] == [False, True, False, False]
    assert [r.is_stopped for r in outcome.ranks] == [False, how == "stop_self", False, False]
    wait_gone(*rank_pids(tmp_path))


def test_a_hang_leaves_the_stack_of_every_rank(engine: LocalEngine, tmp_path: Path) -> None:
    """Before a hung run is killed, each rank's stack lands in its output file."""
    files = [tmp_path / f"rank{rank}.stderr" for rank in range(4)]
    outcome = finish_late(
        engine, spec({"*": "hang"}), tmp_path, range(4),
        said=lambda: all("in sleep_for_ever" in file.read_text() for file in files),
    )  # fmt: skip
    assert (outcome.what, outcome.culprit_rank) == ("hang", None)
    for file in files:
        assert "in sleep_for_ever" in file.read_text()


def test_a_neighbour_does_not_notice_a_crash(engine: LocalEngine, tmp_path: Path) -> None:
    """Of runs under way together, the crash, hang or dead leader of one leaves the rest whole.

    The one that hangs has its time in real seconds; once it is asked for its stack, no more.
    """
    runs = {
        "good": spec({}, 2, name="good"),
        "segv": spec({"0": "segv"}, 2, name="segv"),
        "leader": spec({"0": "kill_leader"}, 2, name="leader"),
        "hang": spec({"0": "hang"}, 2, timeout_s=0.6, name="hang"),
    }
    for name, run in runs.items():
        engine.start(run, tmp_path / name)
    assert not engine.can_start(spec({}, 1))
    hanging = tmp_path / "hang"
    wait_for(hanging / "rank0.stderr", hanging / "hanging0")
    leader = leader_of(hanging)
    found: dict[str, RunOutcome] = {}
    while len(found) < len(runs):
        found |= {outcome.key: outcome for outcome in engine.wait(0.02)}
        if (hanging / "rank0.stderr").read_text():
            put_ahead(hanging, leader, LIMITS.stacks_s)
    expected = {"good": "", "segv": "crashed", "leader": "killed", "hang": "hang"}
    assert {name: found[run.key].what for name, run in runs.items()} == expected
    assert found[runs["hang"].key].wall_s >= 0.6
    ranks = load_run_folder(tmp_path / "good", runs["good"]).ranks
    assert all(rank.end is not None and not rank.problems for rank in ranks)


@pytest.mark.parametrize(
    "how", ["children", "children_then_die", "children_then_hang", "children_then_kill_leader"]
)
def test_children_of_ranks_are_not_left_behind(
    engine: LocalEngine, tmp_path: Path, how: str
) -> None:
    """What a rank forks ends with the run, even in a session of its own."""
    if how == "children_then_hang":
        finish_late(engine, spec({"1": how}), tmp_path, [1])
    else:
        finish(engine, spec({"1": how}), tmp_path)
    strays = stray_pids(tmp_path)
    assert len(strays) == 2
    wait_gone(*strays)


@pytest.mark.parametrize("how", ["tidies", "tidies_then_dies", "tidies_then_hangs"])
def test_children_may_tidy_up(engine: LocalEngine, tmp_path: Path, how: str) -> None:
    """As trackers of shared memory do, which nobody else would unlink; of a cancelled run, too."""
    engine.start(spec({"1": how}), tmp_path)
    if how == "tidies_then_hangs":
        wait_for(tmp_path / "hanging1")
        engine.cancel()
    else:
        engine.wait(PATIENCE_S)
    assert (tmp_path / "tidied1").exists()


def test_a_helper_lives_as_long_as_its_run(engine: LocalEngine, tmp_path: Path) -> None:
    """A daemon that a rank started is not swept away by the end of another run, only by its own."""
    run, folder = spec({"0": "orphan_helper"}, 2, name="helped"), tmp_path / "helped"
    engine.start(run, folder)
    wait_for(folder / "helped0")
    assert finish(engine, spec({}, 2), tmp_path / "other").what == ""
    (folder / "go").touch()
    (outcome,) = engine.wait(PATIENCE_S)
    assert outcome.what == "", outcome.message
    wait_gone(int((folder / "helper0").read_text()))


def test_what_a_rank_printed_before_it_was_killed_is_stored(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """Nothing that was printed waits in a buffer for an end that never comes."""
    finish(engine, spec({"0": "print_then_die", "2": "print"}), tmp_path)
    assert (tmp_path / "rank0.stderr").read_text() == "last words\n"
    # Both streams, in the order in which they were printed.
    assert (tmp_path / "rank2.stderr").read_text() == "to stdout\nto stderr\n"
    assert not (tmp_path / "leader.stderr").exists()


def test_a_flood_of_output_is_cut_and_its_end_kept(engine: LocalEngine, tmp_path: Path) -> None:
    """2 MB of output against a cap of 0.1 MB: the run passes, the file is small, the end is in."""
    assert finish(engine, spec({"0": "flood"}), tmp_path).what == ""
    stored = (tmp_path / "rank0.stderr").read_bytes()
    assert len(stored) < 400_000
    assert stored.endswith(b"the last words\n")
    assert b"bytes dropped here" in stored


def test_ranks_are_fresh_processes_with_their_place(engine: LocalEngine, tmp_path: Path) -> None:
    """Every rank of every run is a new process that finds its rank, store and device list."""
    for name in ("one", "two"):
        finish(engine, spec({}, name=name), tmp_path / name)
    pids = rank_pids(tmp_path / "one") + rank_pids(tmp_path / "two")
    assert len(set(pids)) == 8
    starts = [rank.start for rank in load_run_folder(tmp_path / "one", spec()).ranks]
    shown = [start.environment["env"] for start in starts if start is not None]
    assert [env["RANK"] for env in shown] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in shown} == {"4"}
    assert len({env["MASTER_PORT"] for env in shown}) == 1
    assert {env["CUDA_VISIBLE_DEVICES"] for env in shown} == {""}
    assert {(env["OMP_NUM_THREADS"], env["PYTHONHASHSEED"]) for env in shown} == {("1", "0")}


def test_a_placed_run_is_pinned_and_alone(engine: LocalEngine, tmp_path: Path) -> None:
    """Each rank has the cores that its run names; cores that are not here are refused."""
    cores = sorted(os.sched_getaffinity(0))
    last = replace(spec({"*": "hang"}, 2), placed=(str(cores[0]), str(cores[-1])))
    engine.start(last, tmp_path / "placed")
    assert not engine.can_start(spec(world_size=1))
    wait_for(*(tmp_path / "placed" / f"hanging{rank}" for rank in (0, 1)))
    pids = rank_pids(tmp_path / "placed")
    assert [os.sched_getaffinity(pid) for pid in pids] == [{cores[0]}, {cores[-1]}]
    engine.cancel()
    for placed in (("0",), (str(cores[0]), "4095")):
        with pytest.raises(UsageError):
            engine.check(replace(last, placed=placed))


def test_runs_on_gpus_see_only_their_own(tmp_path: Path) -> None:
    """Two GPU runs at a time get distinct GPUs, in the words of the caller."""
    runs = [spec({}, 2, name=name, device="cuda") for name in "ab"]
    with LocalEngine(4, entry=ENTRY, devices=("3", "5", "6", "7")) as engine:
        for i, run in enumerate(runs):
            engine.start(run, tmp_path / str(i))
        ended: list[RunOutcome] = []
        while len(ended) < 2:
            ended += engine.wait(PATIENCE_S)
    seen = []
    for i, run in enumerate(runs):
        for rank in load_run_folder(tmp_path / str(i), run).ranks:
            assert rank.start is not None
            seen.append(rank.start.environment["env"]["CUDA_VISIBLE_DEVICES"])
    assert seen == ["3,5", "3,5", "6,7", "6,7"]


def test_the_forkserver_dies(engine: LocalEngine, tmp_path: Path) -> None:
    """Its runs end as `interrupted`, nothing survives it, and the next run has a new server."""
    engine.start(spec({"*": "children_then_hang"}, 2, name="a"), tmp_path / "a")
    engine.start(spec({"*": "hang"}, 2, name="b"), tmp_path / "b")
    wait_for(*(tmp_path / run / f"hanging{rank}" for run in "ab" for rank in (0, 1)))
    pids = rank_pids(tmp_path / "a") + rank_pids(tmp_path / "b")
    leaders = {parent_of(pid) for pid in pids}
    server = engine.server_pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    outcomes = engine.wait(PATIENCE_S)
    assert [outcome.what for outcome in outcomes] == ["interrupted", "interrupted"]
    assert "the forkserver died by SIGKILL" in outcomes[0].message
    wait_gone(server, *pids, *(pid for pid in leaders if pid))
    # Those in sessions of their own, too, whom nobody had adopted.
    wait_gone(*stray_pids(tmp_path / "a"))
    assert finish(engine, spec({}), tmp_path / "after").what == ""
    assert engine.server_pid not in (None, server)


def test_a_leader_without_descriptors_ends_its_own_run_only(tmp_path: Path) -> None:
    """A run that the machine has no room to lead was not run; the others, and the next, are."""
    with LocalEngine(64, entry=ENTRY, limits=LIMITS) as small:
        assert finish(small, spec({}, 1, name="first"), tmp_path / "first").what == ""
        assert small.server_pid is not None
        _, hard = resource.prlimit(small.server_pid, resource.RLIMIT_NOFILE)
        resource.prlimit(small.server_pid, resource.RLIMIT_NOFILE, (48, hard))
        small.start(spec({"*": "hang"}, 1, name="beside"), tmp_path / "beside")
        wait_for(tmp_path / "beside" / "hanging0")
        outcome = finish(small, spec({}, 60, name="wide"), tmp_path / "wide")
        assert (outcome.what, "Too many open files" in outcome.message) == ("not_run", True)
        assert finish(small, spec({}, 2, name="next"), tmp_path / "next").what == ""
        assert not (tmp_path / "beside" / "outcome.json").exists()


def test_cancel_kills_and_leaves_the_folder_unfinished(engine: LocalEngine, tmp_path: Path) -> None:
    """A cancelled run keeps its records, has no outcome, leaves nobody, frees its slots."""
    run = spec({"*": "children_then_hang"}, 8)
    engine.start(run, tmp_path)
    wait_for(*(tmp_path / f"hanging{rank}" for rank in range(8)))
    engine.cancel()
    wait_gone(*rank_pids(tmp_path), *stray_pids(tmp_path))
    assert not (tmp_path / "outcome.json").exists()
    assert len(load_run_folder(tmp_path, run).ranks[0].steps) == 2
    assert engine.wait(0.0) == []
    assert finish(engine, spec({}, 8), tmp_path / "after").what == ""


def test_a_leader_writes_where_its_folder_went(engine: LocalEngine, tmp_path: Path) -> None:
    """A run whose folder was set aside cannot put its outcome into a newer attempt's folder."""
    folder = tmp_path / "run"
    run = spec({"*": "hang"})
    engine.start(run, folder)
    wait_for(*(folder / f"hanging{rank}" for rank in range(4)))
    leader, moved = leader_of(folder), tmp_path / "run.attempt0"
    folder.rename(moved)
    folder.mkdir()
    put_ahead(moved, leader, TIMEOUT_S)
    while not engine.wait(0.02):
        put_ahead(moved, leader, PATIENCE_S)
    kept, _ = read_outcome(moved, run.key)
    assert kept is not None
    assert kept.what == "hang"


@pytest.mark.parametrize(
    "entry", ["no_such_module:rank_main", "harness.errors:nothing", "harness.errors"]
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, entry: str) -> None:
    """A failing import is one infrastructure error that names what failed; no slot is lost."""
    with LocalEngine(4, entry=entry) as engine:
        with pytest.raises(Infrastructure, match="forkserver could not start") as caught:
            engine.start(spec({}), tmp_path)
        assert entry in str(caught.value)
        assert engine.can_start(spec({}))


@pytest.mark.parametrize("with_server", [False, True, "stopped"])
def test_kill_9_of_the_harness_leaves_nobody(tmp_path: Path, with_server: bool | str) -> None:
    """When the harness is killed, alone or with its server, server, leaders and ranks all end,
    also if the server was stopped.

    Children of ranks end too, unless nobody is left who knows them.
    """
    folder = RunFolder.create(tmp_path / "out", {}, "", [])
    runs = {"a": spec({"*": "children_then_hang"}, 2, name="a"), "b": spec({"*": "hang"}, 2)}
    places = {name: folder.path / "runs" / name for name in runs}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = doomed_harness(folder.path / "runs", runs, 8, "tests.planted.stub_ranks:rank_main")
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        server = int(harness.stdout.readline())
        wait_for(*(place / f"hanging{rank}" for place in places.values() for rank in (0, 1)))
        ranks = [pid for place in places.values() for pid in rank_pids(place)]
        leaders = {parent_of(pid) for pid in ranks}
        if with_server:
            os.kill(server, signal.SIGSTOP if with_server == "stopped" else signal.SIGKILL)
        harness.kill()
    wait_gone(server, *ranks, *(pid for pid in leaders if pid))
    for pid in stray_pids(places["a"]):
        if with_server is True:
            os.kill(pid, signal.SIGKILL)
        wait_gone(pid)
    for name, run in runs.items():
        result = load_run_folder(places[name], run)
        assert result.outcome.what == "interrupted"
        assert [len(rank.steps) for rank in result.ranks] == [2, 2]
        assert all(not rank.problems for rank in result.ranks)
