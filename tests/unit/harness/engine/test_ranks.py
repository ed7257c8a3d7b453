"""The leader's clock over its ranks, what they record and print; no run is started."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine.ranks import CappedOutput, Job, Limits, Records, Watch, flush_output
from harness.store.streams import has_begun, has_end_record, rank_path
from harness.values import SoakSpec
from tests.planted.local_runs import wait_gone
from tests.support.records import run_spec

LIMITS = Limits(grace_s=3.0, stacks_s=1.0, leave_s=5.0)
STACKS, KILL = signal.SIGUSR1, signal.SIGKILL
UP, STALL = "time was up", "no rank recorded anything"


def watch(num_ranks: int = 2, timeout_s: float = 10.0, stall_s: float = math.inf) -> Watch:
    """Of a run that starts at 0 s."""
    return Watch(
        ranks=range(num_ranks), timeout_s=timeout_s, limits=LIMITS, started_s=0.0, stall_s=stall_s
    )


Act = Callable[[Watch], None]
CLOCKS: dict[str, tuple[Watch, list[Act], dict[float, int | None], str]] = {
    "time is up": (watch(), [], {9.9: None, 10.0: STACKS, 10.9: None, 11.0: KILL}, UP),
    "a rank stuck in the kernel": (
        watch(), [], {10.0: STACKS, 11.0: KILL, 11.5: None, 12.0: KILL}, UP,
    ),
    "a failure gives grace, a second one no more": (
        watch(3), [lambda w: w.ended(0, 13, 1.0), lambda w: w.ended(1, 1, 3.0)],
        {3.9: None, 4.0: STACKS}, "",
    ),
    "grace does not outlast the timeout": (
        watch(), [lambda w: w.ended(0, 1, 9.0)], {9.9: None, 10.0: STACKS}, UP,
    ),
    "a good end gives no grace": (
        watch(), [lambda w: w.ended(0, 0, 1.0)], {9.9: None, 10.0: STACKS}, UP,
    ),
    "one that leaves early does": (
        watch(), [lambda w: w.ended(0, 0, 1.0, left_early=True)], {3.9: None, 4.0: STACKS},
        "",
    ),
    "nobody is left to wait": (
        watch(1), [lambda w: w.ended(0, 0, 1.0, left_early=True)], {99.0: None}, "",
    ),
    "nothing recorded": (watch(stall_s=4.0), [], {3.9: None, 4.0: STACKS}, STALL),
    "a record starts the wait anew": (
        watch(stall_s=4.0), [lambda w: w.progressed(4.0)], {7.9: None, 8.0: STACKS}, STALL,
    ),
    "but not beyond the timeout": (
        watch(stall_s=4.0), [lambda w: w.progressed(9.0)], {9.9: None, 10.0: STACKS},
        UP,
    ),
    "nor after a failure": (
        watch(stall_s=9.0), [lambda w: w.ended(0, 13, 1.0), lambda w: w.progressed(3.0)],
        {4.0: STACKS}, "",
    ),
    "only to exit": (
        watch(stall_s=9.0), [lambda w: w.leaves(1.0), lambda w: w.leaves(4.0)],
        {5.9: None, 6.0: STACKS}, "",
    ),
    "only to exit, as a stall is due": (
        watch(stall_s=4.0), [lambda w: w.leaves(3.9)], {8.8: None, 8.9: STACKS}, "",
    ),
    "failed, as a stall is due": (
        watch(stall_s=4.0), [lambda w: w.ended(0, 13, 3.9)], {6.8: None, 6.9: STACKS},
        "",
    ),
    "told to stop": (watch(), [lambda w: w.stop(2.0)], {1.9: None, 2.0: STACKS}, ""),
}  # fmt: skip


@pytest.mark.parametrize("row", CLOCKS)
def test_when_ranks_are_asked_for_stacks_and_killed(row: str) -> None:
    """Each way of waiting ends at its time, with stacks first, and says why it ended."""
    clock, acts, signals, why = CLOCKS[row]
    for act in acts:
        act(clock)
    assert {at_s: clock.advance(at_s) for at_s in signals} == signals
    assert (clock.waited.partition(" for ")[0].partition(" after ")[0]) == why


def test_ranks_say_where_they_are_before_stacks_may_end_them() -> None:
    """They have so long to answer; a rank that ends meanwhile has ended by itself."""
    clock = watch()
    clock.limits = replace(LIMITS, answers_s=2.0)
    times = {9.9: None, 10.0: None, 11.9: None, 12.0: STACKS, 12.9: None, 13.0: signal.SIGKILL}
    phases = []
    for at_s, number in times.items():
        assert clock.advance(at_s) == number
        phases.append(clock.phase.name)
    assert phases == ["RUNNING", "ASKED", "ASKED", "STACKS", "STACKS", "KILLED"]
    clock = watch()
    clock.limits = replace(LIMITS, answers_s=2.0)
    clock.advance(10.0)
    clock.ended(0, -signal.SIGSEGV, 10.5)
    assert not clock.exits[0].killed_by_harness


@pytest.mark.parametrize(
    ("asked", "code", "by_us"),
    [(0, -signal.SIGSEGV, False), (0, -signal.SIGUSR1, False), (1, -signal.SIGSEGV, True),
     (1, -signal.SIGUSR1, True), (1, -signal.SIGKILL, False), (1, -signal.SIGABRT, False),
     (1, 1, False), (2, -signal.SIGKILL, True), (2, -signal.SIGSEGV, True), (2, 1, False)],
)  # fmt: skip
def test_who_ended_a_rank(asked: int, code: int, by_us: bool) -> None:
    """Once it was asked for its stacks, to print them may end it; then SIGKILL is ours, too."""
    clock = watch()
    for at_s in (10.0, 11.0)[:asked]:
        clock.advance(at_s)
    clock.ended(0, code, 11.5)
    found = clock.exits[0]
    assert (found.killed_by_harness, found.failed_at is None) == (by_us, by_us)


# --- what ranks record ------------------------------------------------------------------------


def job(soak: SoakSpec | None = None, **config: Any) -> Job:
    spec = run_spec(2, config=config, timeout_s=100, soak=soak)
    return Job(spec=spec, folder=Path(), ranks=range(2))


START, NAMES = '{"kind":"start"}\n', '{"kind":"names","step":-1}\n'
INITIAL, STEP = '{"digests":{},"kind":"initial"}\n', '{"kind":"step","step":0}\n'
END = '{"kind":"end"}\n'
STEPS_OF_4_S = '{"kind":"step","step_s":9.0}\n{"kind":"step","step_s":4.0}\n{"kind":"step","st'


@pytest.mark.parametrize(
    ("text", "begun", "ended"),
    [(None, False, False), ("", False, False), (START, False, False),
     (START + NAMES, False, False), (START + INITIAL, True, False), (START + STEP, True, False),
     (START + STEP + END, True, True), (END + STEP, True, False)],
)  # fmt: skip
def test_what_a_rank_has_recorded(text: Any, begun: bool, ended: bool, tmp_path: Path) -> None:
    """It has begun with its state: importing and loading are no silence of a run that trains."""
    path = tmp_path / "rank0.jsonl"
    if text is not None:
        path.write_text(text)
        assert has_end_record(path) == ended
    assert has_begun(path, is_builtin=False) == begun
    # The built-in trainer has yet to compile and capture when it records its state.
    assert has_begun(path, is_builtin=True) == (begun and text != START + INITIAL)


def test_a_stall_is_looked_for_once_a_rank_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that a program may be silent; afterwards each look needs new records."""
    monkeypatch.chdir(tmp_path)
    records, looks = Records(job(program={"script": "train.py"})), []
    begun = START + INITIAL
    for text in ("", START, START, begun, begun, begun, begun + STEP):
        rank_path(Path(), 1).write_text(text)
        looks.append(records.have_grown(1e6))
    assert looks == [True, True, True, True, True, False, True]


def test_a_soak_may_be_silent_for_as_long_as_its_steps_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps written 100 at a time, of 4 s each, are no stall after 300 s."""
    monkeypatch.chdir(tmp_path)
    soak = SoakSpec(by="steps", amount=1000, stall_s=300)
    records, clock = Records(job(soak=soak, flush_every=100)), watch(timeout_s=1e6, stall_s=300)
    file = rank_path(Path(), 0)
    file.write_text(START)
    assert [records.have_grown(run_s) for run_s in (300, 1799, 1800)] == [True, True, False]
    file.write_text(START + STEPS_OF_4_S)
    assert [records.have_grown(run_s) for run_s in (1800, 1801)] == [True, True]
    clock.progressed(1801, records.window_s)
    assert [clock.may_stall(1801 + silent_s) for silent_s in (799, 800)] == [False, True]
    assert not records.have_grown(1801 + 800)


# --- what ranks print -------------------------------------------------------------------------


def test_a_full_disk_is_noted_and_draining_goes_on() -> None:
    """The rank is not blocked by a disk that takes no more, and the loss is on record."""
    read_fd, write_fd = os.pipe()
    output = CappedOutput(read_fd, Path("/dev/full"))
    for _ in range(3):
        os.write(write_fd, bytes(1 << 15))
        assert output.drain()
    output.close()
    os.close(write_fd)
    assert "No space left" in output.problem


# --- contracts of the forkserver's process before it can serve ---


PARENT = """
import sys, time
from harness.engine.local import ServerProcess
from harness.engine.ranks import Limits
server = ServerProcess("slow_entry:rank_main", Limits())
print(server.pid, flush=True)
time.sleep(600)
"""
SLOW_ENTRY = """
import pathlib, time
with open(pathlib.Path(__file__).with_name("importing"), "w") as pipe:
    pipe.write("importing")
time.sleep(600)
"""


def test_a_server_that_still_imports_ends_with_a_killed_harness(tmp_path: Path) -> None:
    """Nobody waits for its imports any more; they can take many seconds."""
    (tmp_path / "slow_entry.py").write_text(SLOW_ENTRY)
    os.mkfifo(tmp_path / "importing")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command, environment = [sys.executable, "-c", PARENT], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        assert (tmp_path / "importing").read_text() == "importing"
        parent.kill()
        wait_gone(server)


def test_a_rank_may_have_nothing_to_print_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon takes its streams away; what is done last in its process does not fail by that."""
    monkeypatch.setattr(sys, "stdout", None)
    flush_output()
