"""The processes of a run on one machine: forked, listened to, ended and waited for.

    running --a rank fails--> grace --grace_s--> stacks --stacks_s--> killed
       '----- timeout_s is up, or told to stop ------^
       '----- no rank recorded anything for stall_s -'

In `stacks` every rank left gets SIGUSR1, which makes faulthandler print the stack of each thread.
What a rank prints goes by a pipe to the leader and, with secrets masked, into rank<R>.stderr: the
first `cap_bytes`, how much was dropped, and the last `TAIL_BYTES`, where a traceback is.
"""

import faulthandler
import fcntl
import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import FrameType

import psutil

from harness.engine import evidence
from harness.engine.base import gpu_environment
from harness.engine.outcome import FirstFailure, claim, signal_name
from harness.engine.process import GATE_VARIABLE, ChildWakeup, die_with_parent, signal_quietly
from harness.masking import MAX_HELD_BYTES, Masker, Stream
from harness.records import RankExit, RunSpec
from harness.store.streams import has_begun, has_end_record, last_step_s, rank_path

CAP_BYTES = 16 << 20
TAIL_BYTES = 256 << 10
_READ_BYTES = 1 << 20
"""As much as a pipe can hold without privileges; what is read at once is masked at once."""
WINDOWS = 2
"""Times the seconds between two writes of steps that ranks may be silent."""
START_STALLS = 6
"""Times its patience that a soak may take to its first record."""
LOOK_S = 2.0
"""Between looks at whether a program's ranks have all come to their end."""
RankMain = Callable[[RunSpec, Path, int, int], int]
"""Runs one rank: specification, folder, rank, port of the store; gives the exit code."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How patient a leader is (seconds; `leave_s`: with ranks that have only to exit), and how much
    it stores of a rank's output (bytes)."""

    grace_s: float = 3.0
    stacks_s: float = 1.0
    leave_s: float = 30.0
    output_cap_bytes: int = CAP_BYTES


def limit_options(limits: Limits) -> list[str]:
    """The same as options of `python -m harness.worker`."""
    values = asdict(limits).items()
    return [text for key, value in values for text in (f"--{key.replace('_', '-')}", str(value))]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to lead, or the `ranks` of it that are on one node.

    `devices`: GPU of each rank here, empty without. SIGTERM may end the ranks, stacks first. If it
    `shares_gpus`, a failure is undecided: it may be that of another run on its GPUs. `gate_fd`, of
    a run that is started early: a byte for each rank and one for the leader says there that its
    devices are free, and its time begins.
    """

    spec: RunSpec
    folder: Path
    devices: tuple[str, ...] = ()
    attempt: int = 0
    ranks: range = range(0)
    stops_on_sigterm: bool = False
    shares_gpus: bool = False
    gate_fd: int | None = None

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", range(self.spec.world_size))


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """The address of the rendezvous store, and its socket where it is hosted here."""

    address: str
    port: int
    listener: socket.socket | None = None


# --- when ranks are asked for their stacks, and when they are killed ----------------------------


class Phase(IntEnum):
    """Where a run is; it only moves forward."""

    RUNNING, GRACE, STACKS, KILLED = range(4)


@dataclass
class Watch:
    """A clock without processes, in monotonic seconds; `started_s` infinite: it has not begun.

    Without a record for `stall_s`, now `patience_s`, ranks have stalled; infinite: never.
    `failed_s`: when each rank failed by itself, in the order in which they were seen to.
    """

    ranks: Sequence[int]
    timeout_s: float
    limits: Limits
    started_s: float
    stall_s: float = math.inf
    phase: Phase = Phase.RUNNING
    timed_out: bool = False
    stalled: bool = False
    leaving: bool = False
    exits: dict[int, RankExit] = field(default_factory=dict)
    failed_s: dict[int, float] = field(default_factory=dict)
    deadline_s: float = field(init=False)
    patience_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.progressed(self.started_s)

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended."""
        return [rank for rank in self.ranks if rank not in self.exits]

    def go(self, now_s: float) -> None:
        """Take note that the run's time begins."""
        self.started_s = now_s
        self.progressed(now_s)

    def progressed(self, now_s: float, window_s: float = 0.0) -> None:
        """Take note that ranks do something, and of what the steps that they record together take:
        silence within it is no stall."""
        if self.phase is Phase.RUNNING:
            self.patience_s = max(self.stall_s, WINDOWS * window_s)
            self.deadline_s = min(self.started_s + self.timeout_s, now_s + self.patience_s)

    def leaves(self, now_s: float) -> None:
        """Take note that every rank left has written its end record, and has only to exit."""
        if self.phase is Phase.RUNNING and not self.leaving:
            self.leaving = True
            self._leave_until(now_s + self.limits.leave_s)

    def _leave_until(self, deadline_s: float) -> None:
        # The deadline so far may be that of a stall, which is moved only when it is reached.
        self.deadline_s = min(self.started_s + self.timeout_s, deadline_s)

    def may_stall(self, now_s: float) -> bool:
        """Whether it must be looked at what ranks have recorded, before `advance`."""
        waits = self.phase is Phase.RUNNING and not self.leaving and self.stall_s < math.inf
        return waits and now_s >= self.deadline_s

    def ended(
        self, rank: int, code: int | None, now_s: float, *, left_early: bool = False,
        number: int = 0,
    ) -> None:  # fmt: skip
        """Take note that a rank ended, or could not be started (error `number`).

        The first failure starts the grace of the others; so does one that left with 0 and without
        an end record: the others may wait for it.
        """
        ours = (self.phase is Phase.KILLED and code == -signal.SIGKILL) or (
            self.phase >= Phase.STACKS and code == -signal.SIGUSR1
        )
        self.exits[rank] = RankExit(rank=rank, code=code, killed_by_harness=ours, errno=number)
        if ours or (code == 0 and not left_early):
            return
        if code != 0:
            self.failed_s[rank] = now_s
        if self.phase is Phase.RUNNING:
            self.phase = Phase.GRACE
            self._leave_until(now_s + self.limits.grace_s)

    def advance(self, now_s: float) -> int | None:
        """Move on if the time is up; the signal to send to every running rank now, if any."""
        if now_s < self.deadline_s or not self.running:
            return None
        self.deadline_s = now_s + self.limits.stacks_s
        if self.phase >= Phase.STACKS:
            self.phase = Phase.KILLED
            return signal.SIGKILL
        self.timed_out = now_s >= self.started_s + self.timeout_s
        self.stalled = self.phase is Phase.RUNNING and not (self.timed_out or self.leaving)
        self.phase = Phase.STACKS
        return signal.SIGUSR1

    def stop(self, now_s: float) -> None:
        """End every rank left now, stacks first, whatever time there was."""
        if self.phase < Phase.STACKS:
            self.phase, self.deadline_s = Phase.GRACE, now_s


# --- what ranks print and record ------------------------------------------------------------------


class CappedOutput:
    """Copies what arrives at `read_fd`, which it owns, into `path`; `problem`: why some is lost."""

    def __init__(
        self, read_fd: int, path: Path, *, cap_bytes: int = CAP_BYTES, masker: Masker | None = None
    ) -> None:
        self._masker = masker or Masker({})
        self._stream = Stream(self._masker)
        os.set_blocking(read_fd, False)
        with suppress(OSError):  # not allowed: the user's pipes hold too much already
            fcntl.fcntl(read_fd, fcntl.F_SETPIPE_SZ, _READ_BYTES)
        self.read_fd, self.problem = read_fd, ""
        self._file = path.open("wb", buffering=0)
        self._cap_bytes = cap_bytes
        self._written_bytes = self._beyond_bytes = 0
        self._tail = bytearray()

    def drain(self, max_reads: int = 4) -> bool:
        """Copy what is there now, a bounded part of it at most; False at the end of the output."""
        for _ in range(max_reads):
            try:
                data = os.read(self.read_fd, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            # Most of a flood is dropped: only its end is masked, once that is known.
            flood = self._beyond_bytes > 0
            self._store(self._stream.release() + data if flood else self._stream.take(data))
        return True

    def close(self) -> None:
        """Copy what is left, add the end of a flood, and close. Safe to call twice."""
        if self._file.closed:
            return
        # One read empties a pipe; a stray child that floods it must not keep us here.
        self.drain()
        os.close(self.read_fd)
        self._store(self._stream.rest())
        if self._beyond_bytes:
            tail, cut = bytes(self._tail), max(len(self._tail) - TAIL_BYTES, 0)
            # The beginning of a tail that was cut there may be the end of a secret: it only shows
            # whether the first byte that is stored is inside of one.
            cut = self._masker.parted(tail, cut) if cut else 0
            tail = self._masker.data(tail[cut:])[-TAIL_BYTES:]
            note = (
                f"\n[harness: output above {self._cap_bytes} bytes: "
                f"{self._beyond_bytes - len(tail)} bytes dropped here, the last {len(tail)} follow]"
            )
            self._write(f"{note}\n".encode() + tail)
        self._file.close()

    def _store(self, data: bytes) -> None:
        room = max(self._cap_bytes - self._written_bytes, 0)
        head, rest = data[:room], data[room:]
        self._write(head)
        self._written_bytes += len(head)
        self._beyond_bytes += len(rest)
        self._tail += rest
        # More than is stored: a secret that its end begins inside of is seen whole.
        del self._tail[: -TAIL_BYTES - MAX_HELD_BYTES]

    def _write(self, data: bytes) -> None:
        """Write all of `data`; a full disk is noted once and must not stop the draining."""
        view = memoryview(data)
        while view and not self.problem:
            try:
                view = view[self._file.write(view) or 0 :]
            except OSError as error:
                self.problem = str(error)


class Records:
    """The records of a run's ranks on this machine, from inside the run's folder, as they grow.

    `window_s`: what the steps take that a rank holds back and writes together; 0 until it is known.
    """

    def __init__(self, job: Job) -> None:
        self.window_s = 0.0
        self._files = [rank_path(Path(), rank) for rank in job.ranks]
        self._spec = job.spec
        self._num_bytes, self._have_begun = 0, False

    def have_grown(self, run_s: float) -> bool:
        """Whether any rank has recorded anything since this was asked last, `run_s` after "go".

        A run may take its time to start, to compile and to capture: `timeout_s` is the limit of
        that, and of a soak, which has hours, `START_STALLS` times its patience.
        """
        soak = self._spec.soak
        if not self._have_begun:
            builtin = self._spec.is_builtin
            self._have_begun = any(has_begun(file, is_builtin=builtin) for file in self._files)
            return soak is None or self._have_begun or run_s < START_STALLS * soak.stall_s
        before = self._num_bytes
        self._num_bytes = sum(file.stat().st_size for file in self._files if file.exists())
        if self._num_bytes <= before:
            return False
        held = self._spec.config.get("flush_every", 1)
        if soak is not None and isinstance(held, int) and held > 1:
            self.window_s = held * max(last_step_s(file) or 0.0 for file in self._files)
        return True


# --- the processes ---------------------------------------------------------------------------


class Crew:
    """The processes of one run: forks them, pumps their output, reaps them."""

    def __init__(self, job: Job, rank_main: RankMain, meeting: Meeting, limits: Limits) -> None:
        """Fork the ranks of `job`; the caller is the only thread of its process."""
        # Where the first failure is told; None on a node that does not host it.
        self.store: object = None
        stacks_s, soak = max(limits.stacks_s, evidence.dumps_take_s(job.spec)), job.spec.soak
        self.watch = Watch(
            ranks=job.ranks, timeout_s=job.spec.timeout_s,
            limits=replace(limits, stacks_s=stacks_s),
            started_s=time.monotonic() if job.gate_fd is None else math.inf,
            stall_s=(job.spec.stall_s or math.inf) if soak is None else soak.stall_s,
        )  # fmt: skip
        self.told_to_stop = self.was_suspended = False
        self._job, self._rank_main, self._meeting = job, rank_main, meeting
        self._pids: dict[int, int] = {}
        self._records = Records(job)
        # The trainer leaves without the destructors in which other programs may stay.
        self._look_s = math.inf if job.spec.is_builtin else LOOK_S
        self._outputs: list[CappedOutput] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup = ChildWakeup()
        for fd in (self._wakeup.fd, job.gate_fd):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ, None)
        if job.stops_on_sigterm:
            signal.signal(signal.SIGTERM, self._take_signal)
            # What Slurm sends before the SIGSTOP of a job that is suspended.
            signal.signal(signal.SIGTSTP, self._take_signal)
        evidence.prepare_to_ask(job.spec, job.folder, job.ranks)
        for rank in job.ranks:
            self._fork(rank)

    def _fork(self, rank: int) -> None:
        path = self._job.folder / f"rank{rank}.stderr"
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        cap_bytes = self.watch.limits.output_cap_bytes
        output = CappedOutput(read_fd, path, cap_bytes=cap_bytes, masker=Masker(os.environ))
        self._outputs.append(output)
        leader_pid = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.write(write_fd, f"fork: {error}\n".encode())
            os.close(write_fd)
            self.watch.ended(rank, None, time.monotonic(), number=error.errno or 0)
            return
        if pid == 0:
            self._become_rank(rank, write_fd, leader_pid)
        os.close(write_fd)
        self._pids[pid] = rank
        self._selector.register(read_fd, selectors.EVENT_READ, output)

    def _become_rank(self, rank: int, write_fd: int, leader_pid: int) -> None:
        """In the new process: never returns, and runs none of the leader's clean-up."""
        code: object = 1
        job, meeting = self._job, self._meeting
        try:
            if job.stops_on_sigterm:
                # Slurm sends it to all that came from the leader: only the leader is to act on it,
                # or nobody could tell what the rank did when it was told to go.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            ChildWakeup.disarm()
            die_with_parent(leader_pid)
            redirect(write_fd)
            if meeting.listener is not None:
                meeting.listener.close()  # or a store that is gone would still be connected to
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            os.environ.update(rank_environment(job, rank, meeting.port, meeting.address))
            code = self._rank_main(job.spec, job.folder, rank, meeting.port)
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code
        except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(exit_status(code))

    def watch_to_the_end(self) -> None:
        """Wait until every rank has ended, by itself or by force; from inside the run's folder."""
        watch = self.watch
        while watch.running:
            patience_s = max(min(watch.deadline_s - time.monotonic(), self._look_s), 0.0)
            for key, _ in self._selector.select(patience_s if patience_s < math.inf else None):
                if key.fd == self._wakeup.fd:
                    self._wakeup.drain()
                elif key.fd == self._job.gate_fd:
                    self._selector.unregister(key.fd)
                    if os.read(key.fd, 1):
                        watch.go(time.monotonic())
                elif not key.data.drain():
                    self._selector.unregister(key.fd)
            self._reap()
            now_s = time.monotonic()
            if self.told_to_stop:
                watch.stop(now_s)
            left = [rank_path(Path(), rank) for rank in watch.running]
            if self._look_s < math.inf and all(map(has_end_record, left)):
                watch.leaves(now_s)
            run_s = now_s - watch.started_s
            if watch.may_stall(now_s) and self._records.have_grown(run_s):
                watch.progressed(now_s, self._records.window_s)
            number = watch.advance(time.monotonic())
            if number == signal.SIGUSR1:
                evidence.ask_for_dumps(Path(), watch.running)
            for pid in self._pids if number is not None else ():
                signal_quietly(pid, number or 0)

    def _reap(self) -> None:
        for pid, rank in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[pid]
                code = os.waitstatus_to_exitcode(status)
                left_early = code == 0 and not has_end_record(rank_path(Path(), rank))
                self.watch.ended(rank, code, time.monotonic(), left_early=left_early)
                # Whoever exits with 1 has told the others itself, or is one of them.
                if code not in (0, 1) and rank in self.watch.failed_s:
                    how = f"died by {signal_name(-code)}" if code < 0 else f"exited with {code}"
                    claim(self.store, FirstFailure(rank, how))

    def close_outputs(self) -> str:
        """Finish the output files; what went wrong with the first of them, "" if nothing did."""
        for output in self._outputs:
            output.close()
        return next((output.problem for output in self._outputs if output.problem), "")

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        self.told_to_stop |= number == signal.SIGTERM
        self.was_suspended |= number == signal.SIGTSTP


def rank_environment(job: Job, rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """Environment of one rank, as `env://` and the CUDA driver read it."""
    interface = interface_towards(address)
    if interface != "lo":
        interface = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.spec.world_size),
        "LOCAL_WORLD_SIZE": str(len(job.ranks)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # Left to itself gloo takes the address that this machine's name stands for, which on many
        # is one that no other machine can reach.
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        # A harness that was itself started by torchrun must not lend its store to the ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **({} if job.gate_fd is None else {GATE_VARIABLE: str(job.gate_fd)}),
        **gpu_environment(job.devices, rank - job.ranks.start),
        **evidence.evidence_environment(job.spec, job.folder, rank, os.environ),
    }


def interface_towards(address: str) -> str:
    """Network interface by which this machine reaches an address, "" if that cannot be told."""
    if address.startswith("127."):
        return "lo"
    mine = own_address(address)
    found = psutil.net_if_addrs().items()
    return next((str(name) for name, held in found if any(e.address == mine for e in held)), "")


def own_address(towards: str) -> str:
    """This machine's own IPv4 address on the way to another host, "" if there is no way."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def exit_status(code: object) -> int:
    """What the kernel can carry of a rank's exit code: 0 only for 0, never for 256 or None."""
    return code & 0xFF or int(code != 0) if isinstance(code, int) else 1


def redirect(write_fd: int) -> None:
    """Nothing to read, and whatever is printed goes to `write_fd`, which is closed."""
    null = os.open(os.devnull, os.O_RDONLY)
    for fd, to in ((null, 0), (write_fd, 1), (write_fd, 2)):
        os.dup2(fd, to)
    os.close(null)
    os.close(write_fd)
    for stream in (sys.stdout, sys.stderr):
        # Whatever the rank prints must be out before it can be killed.
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(line_buffering=True)


def flush_output() -> None:
    """Write out what Python holds back; called before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
