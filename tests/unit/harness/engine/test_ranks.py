"""The leader's clock over its ranks, what they record and print; no run is started."""

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engine.evidence import tail_of
from harness.engine.ranks import (
    TAIL_BYTES,
    CappedOutput,
    Job,
    Limits,
    Phase,
    Records,
    Watch,
)
from harness.records import RunSpec
from harness.soaking import SoakSpec
from harness.store.streams import has_begun, has_end_record, rank_path

LIMITS = Limits(grace_s=3.0, stacks_s=1.0, leave_s=5.0)
STACKS, KILL = signal.SIGUSR1, signal.SIGKILL


def watch(num_ranks: int = 2, timeout_s: float = 10.0, stall_s: float = math.inf) -> Watch:
    """Of a run that starts at 0 s."""
    return Watch(
        ranks=range(num_ranks), timeout_s=timeout_s, limits=LIMITS, started_s=0.0, stall_s=stall_s
    )


Act = Callable[[Watch], None]
CLOCKS: dict[str, tuple[Watch, list[Act], dict[float, int | None], tuple[bool, bool]]] = {
    "time is up": (watch(), [], {9.9: None, 10.0: STACKS, 10.9: None, 11.0: KILL}, (True, False)),
    "a rank stuck in the kernel": (
        watch(), [], {10.0: STACKS, 11.0: KILL, 11.5: None, 12.0: KILL}, (True, False),
    ),
    "a failure gives grace, a second one no more": (
        watch(3), [lambda w: w.ended(0, 13, 1.0), lambda w: w.ended(1, 1, 3.0)],
        {3.9: None, 4.0: STACKS}, (False, False),
    ),
    "grace does not outlast the timeout": (
        watch(), [lambda w: w.ended(0, 1, 9.0)], {9.9: None, 10.0: STACKS}, (True, False),
    ),
    "a good end gives no grace": (
        watch(), [lambda w: w.ended(0, 0, 1.0)], {9.9: None, 10.0: STACKS}, (True, False),
    ),
    "one that leaves early does": (
        watch(), [lambda w: w.ended(0, 0, 1.0, left_early=True)], {3.9: None, 4.0: STACKS},
        (False, False),
    ),
    "nobody is left to wait": (
        watch(1), [lambda w: w.ended(0, 0, 1.0, left_early=True)], {99.0: None}, (False, False),
    ),
    "nothing recorded": (watch(stall_s=4.0), [], {3.9: None, 4.0: STACKS}, (False, True)),
    "a record starts the wait anew": (
        watch(stall_s=4.0), [lambda w: w.progressed(4.0)], {7.9: None, 8.0: STACKS}, (False, True),
    ),
    "but not beyond the timeout": (
        watch(stall_s=4.0), [lambda w: w.progressed(9.0)], {9.9: None, 10.0: STACKS},
        (True, False),
    ),
    "nor after a failure": (
        watch(stall_s=9.0), [lambda w: w.ended(0, 13, 1.0), lambda w: w.progressed(3.0)],
        {4.0: STACKS}, (False, False),
    ),
    "only to exit": (
        watch(stall_s=9.0), [lambda w: w.leaves(1.0), lambda w: w.leaves(4.0)],
        {5.9: None, 6.0: STACKS}, (False, False),
    ),
    "only to exit, as a stall is due": (
        watch(stall_s=4.0), [lambda w: w.leaves(3.9)], {8.8: None, 8.9: STACKS}, (False, False),
    ),
    "failed, as a stall is due": (
        watch(stall_s=4.0), [lambda w: w.ended(0, 13, 3.9)], {6.8: None, 6.9: STACKS},
        (False, False),
    ),
    "told to stop": (watch(), [lambda w: w.stop(2.0)], {1.9: None, 2.0: STACKS}, (False, False)),
}  # fmt: skip


@pytest.mark.parametrize("row", CLOCKS)
def test_when_ranks_are_asked_for_stacks_and_killed(row: str) -> None:
    """Each way of waiting ends at its time, with stacks first, and says why it ended."""
    clock, acts, signals, why = CLOCKS[row]
    for act in acts:
        act(clock)
    assert {at_s: clock.advance(at_s) for at_s in signals} == signals
    assert (clock.timed_out, clock.stalled) == why


def test_whose_end_a_signal_was() -> None:
    """After our request or our kill it is ours, before it somebody else's, and a failure."""
    clock = watch(6)
    clock.ended(4, 0, 1.0, left_early=True)
    clock.ended(5, -STACKS, 2.0)
    clock.advance(10.0)
    clock.ended(0, -KILL, 10.2)
    clock.ended(1, -STACKS, 10.3)
    clock.ended(2, 1, 10.5)
    assert clock.phase is Phase.STACKS, "a late failure does not put the killing off"
    clock.advance(11.0)
    clock.ended(3, -KILL, 11.1)
    ours = [rank for rank, state in clock.exits.items() if state.killed_by_harness]
    assert (ours, list(clock.failed_s)) == ([1, 3], [5, 0, 2])
    assert not clock.running


def test_a_stall_is_looked_for_only_when_it_may_be_there() -> None:
    """Not before its time, not after a failure, not of ranks that have only to exit."""
    silent, failing, leaving = (watch(stall_s=4.0, timeout_s=100.0) for _ in range(3))
    assert [silent.may_stall(at_s) for at_s in (3.9, 4.0)] == [False, True]
    failing.ended(0, 13, 1.0)
    leaving.leaves(1.0)
    assert not failing.may_stall(99.0)
    assert not leaving.may_stall(99.0)


# --- what ranks record ------------------------------------------------------------------------


def job(soak: SoakSpec | None = None, **config: Any) -> Job:
    spec = RunSpec(config=config, device="cpu", world_size=2, timeout_s=100, soak=soak)
    return Job(spec=spec, folder=Path())


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
def test_what_a_rank_has_recorded(
    text: str | None, begun: bool, ended: bool, tmp_path: Path
) -> None:
    """It has begun with its state: importing and loading are no silence of a run that trains.

    Only a last line is an end.
    """
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
    """Steps written 100 at a time, of 4 s each, are no stall after 300 s, nor is a start of 1800.

    What goes on for longer is.
    """
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


@pytest.mark.parametrize("number", [100, 3 * TAIL_BYTES])
def test_output_beyond_the_cap_keeps_its_head_and_its_end(tmp_path: Path, number: int) -> None:
    """Up to the cap byte for byte; above it the head, the number of bytes dropped, the tail.

    What somebody else still holds open is closed with what has arrived.
    """
    read_fd, write_fd = os.pipe()
    output, data = CappedOutput(read_fd, tmp_path / "out", cap_bytes=100), os.urandom(number)
    for start in range(0, number, 1 << 16):
        os.write(write_fd, data[start : start + (1 << 16)])
        output.drain()
    output.close()
    output.close()
    os.close(write_fd)
    found, dropped = (tmp_path / "out").read_bytes(), number - 100 - TAIL_BYTES
    if number == 100:
        assert found == data
        return
    remark = b"\n[harness: output above 100 bytes: %d bytes dropped here, the last %d follow]\n"
    assert found == data[:100] + remark % (dropped, TAIL_BYTES) + data[-TAIL_BYTES:]


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


def test_tail_of_a_file(tmp_path: Path) -> None:
    """The tail is the last bytes; a file that is not there is empty."""
    (tmp_path / "x").write_bytes(b"abc\xffdef")
    tails = [tail_of(tmp_path / name, size) for name, size in (("x", 3), ("x", 100), ("none", 9))]
    assert tails == ["def", "abc\ufffddef", ""]
