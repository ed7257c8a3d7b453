"""The leader of one run: forks its ranks, waits, keeps the wall clock, says what happened.

    open a listening port -> fork the ranks -> host the rendezvous store -> watch -> outcome.json

Watching is one state machine over (exits, clock), free of processes so that it can be tested alone:

    running --a rank fails--> grace --grace_s--> stacks --stacks_s--> killed
       '---------- timeout_s is up ----------------^

In `stacks` every rank left gets SIGUSR1, which makes faulthandler print the stack of each thread.
A leader is forked from the warm server, has no torch of its own, and must fork its ranks before it
starts a thread (the store does).
"""

import faulthandler
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from harness.engine.first_failure import FirstFailure, claim
from harness.engine.gpus import gpu_environment
from harness.engine.outcome import RankEvidence, classify, signal_name
from harness.engine.output import CAP_BYTES, CappedOutput
from harness.engine.process import (
    ChildWakeup,
    adopt_orphans,
    die_with_parent,
    kill_children,
    signal_quietly,
)
from harness.errors import HarnessError
from harness.records import ExitCode, RankExit, RunOutcome, RunSpec
from harness.store import save_outcome
from harness.streams import read_ranks

RankMain = Callable[[RunSpec, Path, int, int], int]
"""Runs one rank: specification, folder, rank, port of the store; gives the exit code."""
OpenStore = Callable[[socket.socket], object]
"""Hosts the rendezvous store on a listening socket, until the returned object dies."""

EVIDENCE_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How patient a leader is (seconds) and how much it stores of a rank's output (bytes)."""

    grace_s: float = 3.0
    stacks_s: float = 1.0
    output_cap_bytes: int = CAP_BYTES


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to lead. `devices`: GPU of each rank as CUDA_VISIBLE_DEVICES names it, or none."""

    spec: RunSpec
    folder: Path
    devices: tuple[str, ...] = ()
    attempt: int = 0


class Phase(Enum):
    """Where a run is; it only moves forward."""

    RUNNING = 0
    GRACE = 1
    STACKS = 2
    KILLED = 3


@dataclass
class Watch:
    """Decides when ranks are asked for stacks and killed. Times are monotonic seconds."""

    num_ranks: int
    timeout_s: float
    limits: Limits
    started_s: float
    phase: Phase = Phase.RUNNING
    timed_out: bool = False
    exits: dict[int, RankExit] = field(default_factory=dict)
    failed_order: list[int] = field(default_factory=list)
    deadline_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline_s = self.started_s + self.timeout_s

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in range(self.num_ranks) if rank not in self.exits]

    def ended(self, rank: int, code: int | None, now_s: float) -> None:
        """Take note that a rank ended; the first failure starts the grace of the others."""
        ours = (self.phase is Phase.KILLED and code == -signal.SIGKILL) or (
            self.phase in (Phase.STACKS, Phase.KILLED) and code == -signal.SIGUSR1
        )
        self.exits[rank] = RankExit(rank=rank, code=code, killed_by_harness=ours)
        if code == 0 or ours:
            return
        self.failed_order.append(rank)
        if self.phase is Phase.RUNNING:
            self.phase = Phase.GRACE
            self.deadline_s = min(self.deadline_s, now_s + self.limits.grace_s)

    def advance(self, now_s: float) -> int | None:
        """Move on if the time is up; the signal to send to every running rank now, if any."""
        if now_s < self.deadline_s or not self.running:
            return None
        if self.phase is Phase.KILLED:
            self.deadline_s = now_s + self.limits.stacks_s
            return signal.SIGKILL
        if self.phase is Phase.STACKS:
            self.phase = Phase.KILLED
            self.deadline_s = now_s + self.limits.stacks_s
            return signal.SIGKILL
        self.timed_out = now_s >= self.started_s + self.timeout_s
        self.phase = Phase.STACKS
        self.deadline_s = now_s + self.limits.stacks_s
        return signal.SIGUSR1


def lead(
    job: Job, rank_main: RankMain, open_store: OpenStore, limits: Limits | None = None
) -> None:
    """Run a job to its end and write `outcome.json`. Called once, in a process of its own.

    Raises:
        OSError: no port, no pipe, or the outcome cannot be written; ranks are dead by then.
    """
    limits = limits or Limits()
    started_unix_s = time.time()
    os.setsid()
    adopt_orphans()
    # Inherited by the ranks: a request for stacks must not kill one that has no handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # From the very first, so that the outcome follows the run folder even if a resumed harness sets
    # it aside under another name. The ranks stay in the caller's folder.
    folder_fd = os.open(job.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            crew = _Crew(job, rank_main, listener, limits)
            os.fchdir(folder_fd)
            crew.store = open_store(listener)
            crew.watch_to_the_end()
            crew.store = None
    finally:
        kill_children()
    _write_outcome(job, crew, started_unix_s)


class _Crew:
    """The processes of one run: forks them, pumps their output, reaps them."""

    def __init__(
        self, job: Job, rank_main: RankMain, listener: socket.socket, limits: Limits
    ) -> None:
        self.started_s = time.monotonic()
        self.store: object = None
        self.watch = Watch(
            num_ranks=job.spec.world_size,
            timeout_s=job.spec.timeout_s,
            limits=limits,
            started_s=self.started_s,
        )
        self._pids: dict[int, int] = {}
        self._outputs: list[CappedOutput] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup = ChildWakeup()
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ, None)
        for rank in range(job.spec.world_size):
            self._fork(job, rank_main, rank, listener)

    def _fork(self, job: Job, rank_main: RankMain, rank: int, listener: socket.socket) -> None:
        path = job.folder / f"rank{rank}.stderr"
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        output = CappedOutput(read_fd, path, cap_bytes=self.watch.limits.output_cap_bytes)
        self._outputs.append(output)
        leader_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(write_fd, f"fork: {error}\n".encode())
            os.close(write_fd)
            self.watch.ended(rank, None, time.monotonic())
            return
        if pid == 0:
            self._become_rank(job, rank_main, rank, listener, write_fd, leader_pid)
        os.close(write_fd)
        self._pids[pid] = rank
        self._selector.register(read_fd, selectors.EVENT_READ, output)

    def _become_rank(
        self,
        job: Job,
        rank_main: RankMain,
        rank: int,
        listener: socket.socket,
        write_fd: int,
        leader_pid: int,
    ) -> None:
        """In the new process: never returns, and runs none of the leader's clean-up."""
        code = 1
        try:
            ChildWakeup.disarm()
            die_with_parent(leader_pid)
            _redirect(write_fd)
            port = listener.getsockname()[1]
            self._drop_descriptors(listener)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            os.environ.update(rank_environment(job, rank, port))
            code = rank_main(job.spec, job.folder, rank, port)
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
            traceback.print_exc()
        finally:
            _flush()
            os._exit(exit_status(code))

    def _drop_descriptors(self, listener: socket.socket) -> None:
        """Close what belongs to the leader, earlier ranks' pipes included."""
        listener.close()
        self._selector.close()
        for output in self._outputs:
            output.abandon()
        self._wakeup.close()

    def watch_to_the_end(self) -> None:
        """Wait until every rank has ended, by itself or by force."""
        while self.watch.running:
            patience_s = max(self.watch.deadline_s - time.monotonic(), 0.0)
            for key, _ in self._selector.select(patience_s):
                if key.data is None:
                    self._wakeup.drain()
                elif not key.data.drain():
                    self._selector.unregister(key.fd)
            self._reap()
            number = self.watch.advance(time.monotonic())
            if number is not None:
                self._signal_running(number)

    def _reap(self) -> None:
        for pid, rank in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[pid]
                code = os.waitstatus_to_exitcode(status)
                self.watch.ended(rank, code, time.monotonic())
                # Whoever exits with 1 has told the others itself, or is one of them.
                if code not in (0, 1) and rank in self.watch.failed_order:
                    how = f"died by {signal_name(-code)}" if code < 0 else f"exited with {code}"
                    claim(self.store, FirstFailure(rank, how))

    def _signal_running(self, number: int) -> None:
        for pid in self._pids:
            signal_quietly(pid, number)

    def close_outputs(self) -> list[str]:
        """Finish the output files; what went wrong with them."""
        for output in self._outputs:
            output.close()
        return [output.problem for output in self._outputs if output.problem]


def rank_environment(job: Job, rank: int, port: int) -> dict[str, str]:
    """Environment of one rank, as `env://` and the CUDA driver read it."""
    world_size = str(job.spec.world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        # A harness that was itself started by torchrun must not lend its store to the ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **gpu_environment(job.devices, rank),
    }


def exit_status(code: object) -> int:
    """What the kernel can carry of a rank's exit code: 0 only for 0, never for 256 or None."""
    if not isinstance(code, int):
        return 1
    return code & 0xFF or int(code != 0)


def _redirect(write_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(write_fd, 1)
    os.dup2(write_fd, 2)
    os.close(write_fd)
    for stream in (sys.stdout, sys.stderr):
        # Whatever the rank prints must be out before it can be killed.
        getattr(stream, "reconfigure", _no_reconfigure)(line_buffering=True)


def _no_reconfigure(*, line_buffering: bool) -> None:
    """Stand-in for streams that are not text files, as test runners put in place."""


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _write_outcome(job: Job, crew: _Crew, started_unix_s: float) -> None:
    wall_s = time.monotonic() - crew.started_s
    problems = crew.close_outputs()
    here = Path()
    ranks = [
        RankEvidence(
            exit=crew.watch.exits[records.rank],
            records=records,
            stderr_tail=tail_of(here / f"rank{records.rank}.stderr"),
        )
        for records in read_ranks(here, job.spec.world_size)
    ]
    what, message, culprit = classify(
        ranks,
        timed_out=crew.watch.timed_out,
        timeout_s=job.spec.timeout_s,
        failed_order=crew.watch.failed_order,
    )
    if problems:
        message += f"; output lost: {problems[0]}"
    outcome = RunOutcome(
        key=job.spec.key,
        what=what,
        message=message.removeprefix("; "),
        culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=started_unix_s,
        wall_s=wall_s,
        attempt=job.attempt,
    )
    save_outcome(here, outcome)


def tail_of(path: Path, size_bytes: int = EVIDENCE_TAIL_BYTES) -> str:
    """The end of a text file; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - size_bytes, 0))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def die_as_child_of(parent_pid: int, work: Callable[[], None], stderr_path: Path) -> None:
    """Run `work` in a freshly forked process that dies with its parent; never returns.

    What goes wrong ends in `stderr_path`, and in the exit code: `NO_VERDICT` if the machine
    refused something, 1 for a mistake of ours.
    """
    code = 1
    try:
        die_with_parent(parent_pid)
        fd = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        _redirect(fd)
        work()
        code = 0
    except (HarnessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        code = int(ExitCode.NO_VERDICT)
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)
