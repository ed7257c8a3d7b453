"""Runs of a local engine for tests: started, waited for by events, ended by a clock put ahead."""

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from harness.engine.local import LocalEngine
from harness.engine.machine import parent_of
from harness.engine.ranks import Limits
from harness.records import RunOutcome, RunSpec
from tests.planted.leader_clock import put_ahead

PATIENCE_S = 120.0
"""How long to wait for what must happen, however busy the machine; reached only by a failing test.
"""
TIMEOUT_S = 10 * PATIENCE_S
LIMITS = Limits(grace_s=PATIENCE_S, stacks_s=10.0, output_cap_bytes=100_000)
"""Where a limit is to end, tests put the leader's clock ahead."""


_DOOMED = """
import json, sys
from pathlib import Path
from harness.engine.local import LocalEngine
from harness.records import RunSpec
engine = LocalEngine(int(sys.argv[3]), entry=sys.argv[4])
for name, plain in json.loads(sys.argv[2]).items():
    engine.start(RunSpec.from_json(plain), Path(sys.argv[1]) / name)
print(engine.server_pid, flush=True)
while True:
    engine.wait()
"""


def doomed_harness(folder: Path, runs: Mapping[str, RunSpec], slots: int, entry: str) -> list[str]:
    """The command of a process that starts `runs` by name, prints its server's pid and waits."""
    plain = json.dumps({name: run.to_json() for name, run in runs.items()})
    return [sys.executable, "-c", _DOOMED, str(folder), plain, str(slots), entry]


def finish(engine: LocalEngine, run: RunSpec, folder: Path) -> RunOutcome:
    engine.start(run, folder)
    (outcome,) = engine.wait(PATIENCE_S)
    return outcome


def finish_late(
    engine: LocalEngine,
    run: RunSpec,
    folder: Path,
    hanging: Iterable[int],
    *,
    limit_s: float = TIMEOUT_S,
    said: Callable[[], bool] = lambda: True,
) -> RunOutcome:
    """Start a run and let `limit_s` pass for it, and what comes after, once nobody gets further.

    Args:
        hanging: ranks that make a file as they hang; all others end.
        said: what must be true before the leader ends those that do not end by themselves.
    """
    engine.start(run, folder)
    wait_for(*(folder / f"hanging{rank}" for rank in hanging))
    until(lambda: len(rank_pids(folder)) == run.world_size, "no start record of every rank")
    pids = rank_pids(folder)
    ended_pids = [pid for rank, pid in enumerate(pids) if rank not in hanging]
    wait_gone(*ended_pids)
    # The leader must have seen it, too: what it has not seen yet begins after the clock's leap.
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ended_pids), "not reaped")
    assert engine.wait(0.0) == [], "ended before its time"
    leader = leader_of(folder)
    put_ahead(folder, leader, limit_s)
    again_s = time.monotonic() + PATIENCE_S / 4
    while not said():
        if time.monotonic() > again_s:  # it took the time between a reap and its note of it
            put_ahead(folder, leader, limit_s)
            break
        time.sleep(0.01)
    until(said, "not said")
    while not (ended := engine.wait(0.02)):
        put_ahead(folder, leader, PATIENCE_S)
    (outcome,) = ended
    return outcome


def until(done: Callable[[], bool], otherwise: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def wait_for(*paths: Path) -> None:
    until(lambda: all(path.exists() for path in paths), paths)


def wait_gone(*pids: int) -> None:
    """Until every process has ended; its end is an event, not a poll."""
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([fd], [], [], PATIENCE_S)[0], f"process {pid} is still there"
        finally:
            os.close(fd)


def rank_pids(folder: Path) -> list[int]:
    """Of the ranks that have begun, in order."""
    lines = [path.read_text().partition("\n")[0] for path in sorted(folder.glob("rank*.jsonl"))]
    return [json.loads(line)["pid"] for line in lines if line]


def leader_of(folder: Path) -> int:
    """The process whose children the ranks are that have not ended."""
    (leader,) = {parent for pid in rank_pids(folder) if (parent := parent_of(pid)) is not None}
    return leader
