"""The ranks that a run has on one machine: their leader forks, watches, ends and reports them.

    fork the ranks -> host the rendezvous store -> watch -> a report -> outcome.json, of a local run
                                                                        node<K>.json, of one of many

    running --a rank fails--> grace --grace_s--> asked --answers_s--> stacks --stacks_s--> killed
       '----- timeout_s is up, or told to stop ------^
       '----- no rank recorded anything for stall_s -'

A leader forks its ranks before it starts a thread (the store does). In `stacks` every rank left
gets SIGUSR1, which makes faulthandler print the stack of each thread. What a rank prints goes by a
pipe to the leader and, with secrets masked, into rank<R>.stderr: the first `cap_bytes`, how much
was dropped, and the last `TAIL_BYTES`, where a traceback is.
"""

import errno
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
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from types import FrameType

import psutil

from harness.engine import evidence
from harness.engine.machine import (
    GATE_VARIABLE,
    ChildWakeup,
    adopt_orphans,
    await_children,
    cores_in,
    die_with_parent,
    gpu_environment,
    is_stopped,
    kill_children,
    no_process,
    signal_quietly,
)
from harness.engine.outcome import (
    FirstFailure,
    NodeReport,
    claim,
    memory_kills_since,
    num_memory_kills,
    put_together,
    report_path,
    signal_name,
    size_of,
)
from harness.errors import HarnessError
from harness.masking import MAX_HELD_BYTES, Masker
from harness.records import ExitCode, Json, RankExit, RunSpec, dumps
from harness.store import save_outcome
from harness.store.files import write_atomic
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
ASKING_S = 0.1
"""Between looks at whether ranks have answered."""
NOT_RUN = 75
"""Exit code of a leader that could not lead its run: for want of memory, of descriptors, a port."""
NO_PROCESS = 76
"""The same where the kernel had no process or no memory left: a failure of the machine."""
NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
RankMain = Callable[[RunSpec, Path, int, int], int]
"""Runs one rank: specification, folder, rank, port of the store; gives the exit code."""
OpenStore = Callable[[socket.socket], object]
"""Hosts the rendezvous store on a listening socket, until the returned object dies."""


@dataclass(frozen=True, kw_only=True)
class Limits(Json):
    """How patient a leader is, and how much it stores of what a rank prints."""

    grace_s: float = 3.0  # with the others, once a rank has failed
    answers_s: float = 0.0  # with ranks that say where they are
    stacks_s: float = 1.0  # with ranks that print their stacks
    leave_s: float = 30.0  # with ranks that have only to exit
    output_cap_bytes: int = CAP_BYTES


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to lead, or the `ranks` of it that are on one node."""

    spec: RunSpec
    folder: Path
    ranks: range
    devices: tuple[str, ...] = ()  # GPU of each rank here, empty without
    attempt: int = 0
    address: str = "127.0.0.1"  # of the rendezvous store
    port: int = 0
    listener: socket.socket | None = None  # of the store, where it is hosted here
    stops_on_sigterm: bool = False  # it ends the ranks, stacks first
    # Of a run that is started early: a byte for each rank and one for the leader says there that
    # its devices are free, and its time begins.
    gate_fd: int | None = None


# --- when ranks are asked for their stacks, and when they are killed ----------------------------


class Phase(IntEnum):
    """Where a run is; it only moves forward."""

    RUNNING, GRACE, ASKED, STACKS, KILLED = range(5)


@dataclass
class Watch:
    """A clock without processes, in monotonic seconds."""

    ranks: Sequence[int]
    timeout_s: float
    limits: Limits
    started_s: float  # infinite: it has not begun
    stall_s: float = math.inf  # without a record, until ranks have stalled; infinite: never
    phase: Phase = Phase.RUNNING
    waited: str = ""  # why ranks that still ran were ended, in words
    leaving: bool = False
    exits: dict[int, RankExit] = field(default_factory=dict)
    stopped: frozenset[int] = frozenset()  # by somebody, when time was up
    epoch_unix_s: float = field(default_factory=lambda: time.time() - time.monotonic())
    deadline_s: float = field(init=False)
    patience_s: float = field(init=False)  # what `stall_s` is now

    def __post_init__(self) -> None:
        self.progressed(self.started_s)

    @property
    def running(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.exits]

    def go(self, now_s: float) -> None:
        self.started_s = now_s
        self.progressed(now_s)

    def progressed(self, now_s: float, window_s: float = 0.0) -> None:
        """Ranks do something; silence within what the steps take that they record together is no
        stall."""
        if self.phase is Phase.RUNNING:
            self.patience_s = max(self.stall_s, WINDOWS * window_s)
            self._wait(now_s, self.patience_s)

    def leaves(self, now_s: float) -> None:
        """Every rank left has written its end record, and has only to exit."""
        if self.phase is Phase.RUNNING and not self.leaving:
            self.leaving = True
            self._wait(now_s, self.limits.leave_s)

    def _wait(self, now_s: float, seconds: float) -> None:
        self.deadline_s = min(self.started_s + self.timeout_s, now_s + seconds)

    def may_stall(self, now_s: float) -> bool:
        """Whether it must be looked at what ranks have recorded, before `advance`."""
        waits = self.phase is Phase.RUNNING and not self.leaving and self.stall_s < math.inf
        return waits and now_s >= self.deadline_s

    def ended(
        self, rank: int, code: int | None, now_s: float, *, left_early: bool = False,
        number: int = 0,
    ) -> None:  # fmt: skip
        """A rank ended, or could not be started (error `number`).

        The first failure starts the grace of the others; so does one that left with 0 and without
        an end record: the others may wait for it.
        """
        # Printing the stack of a thread that ends meanwhile is a segmentation fault.
        by_asking = (-signal.SIGUSR1, -signal.SIGSEGV)
        ours = (self.phase is Phase.KILLED and code == -signal.SIGKILL) or (
            self.phase >= Phase.STACKS and code in by_asking
        )
        failed = code != 0 and not ours
        self.exits[rank] = RankExit(
            rank=rank, code=code, killed_by_harness=ours, errno=number,
            failed_at=self.epoch_unix_s + now_s if failed else None,
            is_stopped=rank in self.stopped,
        )  # fmt: skip
        if (failed or left_early) and self.phase is Phase.RUNNING:
            self.phase = Phase.GRACE
            self._wait(now_s, self.limits.grace_s)

    def advance(self, now_s: float) -> int | None:
        """Move on if the time is up; the signal to send to every running rank now, if any."""
        if now_s < self.deadline_s or not self.running:
            return None
        if self.phase < Phase.ASKED:
            if now_s >= self.started_s + self.timeout_s:
                self.waited = f"time was up after {self.timeout_s:g} s"
            elif self.phase is Phase.RUNNING and not self.leaving:
                self.waited = f"no rank recorded anything for {self.patience_s:g} s"
            self.phase, self.deadline_s = Phase.ASKED, now_s + self.limits.answers_s
            if self.limits.answers_s:
                return None
        self.deadline_s = now_s + self.limits.stacks_s
        if self.phase >= Phase.STACKS:
            self.phase = Phase.KILLED
            return signal.SIGKILL
        self.phase = Phase.STACKS
        return signal.SIGUSR1

    def stop(self, now_s: float) -> None:
        """End every rank left now, stacks first, whatever time there was."""
        if self.phase < Phase.STACKS:
            self.phase, self.deadline_s = max(self.phase, Phase.GRACE), now_s


# --- what ranks print and record ------------------------------------------------------------------


class CappedOutput:
    """Copies what arrives at `read_fd`, which it owns, into `path`; `problem`: why some is lost."""

    def __init__(
        self, read_fd: int, path: Path, *, cap_bytes: int = CAP_BYTES, masker: Masker | None = None
    ) -> None:
        self._masker = masker or Masker({})
        self._held = b""
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
            data = self._held + data
            # Most of a flood is dropped: only its end is masked, once that is known.
            flood = self._beyond_bytes > 0
            cut = len(data) if flood else self._masker.settled(data)
            self._held = data[cut:]
            self._store(data if flood else self._masker.data(data[:cut]))
        return True

    def close(self) -> None:
        """Copy what is left, add the end of a flood, and close. Safe to call twice."""
        if self._file.closed:
            return
        # One read empties a pipe; a stray child that floods it must not keep us here.
        self.drain()
        os.close(self.read_fd)
        self._store(self._masker.data(self._held))
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
    """The records of a run's ranks on this machine, from inside the run's folder, as they grow."""

    def __init__(self, job: Job) -> None:
        # What the steps take that a rank holds back and writes together; 0 until it is known.
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
        before, self._num_bytes = self._num_bytes, sum(map(size_of, self._files))
        if self._num_bytes <= before:
            return False
        held = self._spec.config.get("flush_every", 1)
        if soak is not None and isinstance(held, int) and held > 1:
            self.window_s = held * max(last_step_s(file) or 0.0 for file in self._files)
        return True


# --- the processes ---------------------------------------------------------------------------


class Crew:
    """The processes of one run: forks them, pumps their output, reaps them."""

    def __init__(self, job: Job, rank_main: RankMain, limits: Limits) -> None:
        """Fork the ranks of `job`; the caller is the only thread of its process."""
        # Where the first failure is told; None on a node that does not host it.
        self.store: object = None
        answers_s, soak = evidence.dumps_take_s(job.spec), job.spec.soak
        self.watch = Watch(
            ranks=job.ranks, timeout_s=job.spec.timeout_s,
            limits=replace(limits, answers_s=answers_s),
            started_s=time.monotonic() if job.gate_fd is None else math.inf,
            stall_s=(job.spec.stall_s or math.inf) if soak is None else soak.stall_s,
        )  # fmt: skip
        self.told_to_stop = False
        self._job, self._rank_main = job, rank_main
        self._pids: dict[int, int] = {}
        self._records = Records(job)
        # The trainer leaves without the destructors in which other programs may stay.
        self._look_s = math.inf if job.spec.is_builtin else LOOK_S
        self.outputs: list[CappedOutput] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup = ChildWakeup()
        for fd in (self._wakeup.fd, job.gate_fd):
            if fd is not None:
                self._selector.register(fd, selectors.EVENT_READ, None)
        if job.stops_on_sigterm:
            signal.signal(signal.SIGTERM, self._take_signal)
        evidence.prepare_to_ask(job.spec, job.folder, job.ranks)
        for rank in job.ranks:
            self._fork(rank)

    def _fork(self, rank: int) -> None:
        path = self._job.folder / f"rank{rank}.stderr"
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        cap_bytes = self.watch.limits.output_cap_bytes
        output = CappedOutput(read_fd, path, cap_bytes=cap_bytes, masker=Masker(os.environ))
        self.outputs.append(output)
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
        job = self._job
        try:
            if job.stops_on_sigterm:
                # Slurm sends it to all that came from the leader: only the leader is to act on it,
                # or nobody could tell what the rank did when it was told to go.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            ChildWakeup.disarm()
            die_with_parent(leader_pid)
            redirect(write_fd)
            if job.listener is not None:
                job.listener.close()  # or a store that is gone would still be connected to
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            os.environ.update(rank_environment(job, rank))
            if job.spec.placed and job.spec.device == "cpu":
                os.sched_setaffinity(0, cores_in(job.spec.placed[rank]))
            code = self._rank_main(job.spec, job.folder, rank, job.port)
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code
            if not isinstance(code, int):
                sys.stderr.write(f"{code}\n")  # as an interpreter does
        except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
            traceback.print_exc()
        finally:
            flush_output()
            # What the kernel can carry: 0 only for 0, never for 256 or None.
            os._exit(code & 0xFF or int(code != 0) if isinstance(code, int) else 1)

    def watch_to_the_end(self) -> None:
        """Wait until every rank has ended, by itself or by force; from inside the run's folder."""
        watch = self.watch
        while watch.running:
            look_s = min(self._look_s, ASKING_S if watch.phase is Phase.ASKED else math.inf)
            patience_s = max(min(watch.deadline_s - time.monotonic(), look_s), 0.0)
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
            self._advance()

    def _advance(self) -> None:
        """Ask ranks whose time is up where they are; then for stacks, which may kill them."""
        watch, now_s, before = self.watch, time.monotonic(), self.watch.phase
        if before is Phase.ASKED and evidence.have_answered(self._job.spec, Path(), watch.running):
            watch.deadline_s = now_s
        number = watch.advance(now_s)
        if before < Phase.ASKED <= watch.phase:
            watch.stopped = frozenset(r for pid, r in self._pids.items() if is_stopped(pid))
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
                if code not in (0, 1) and self.watch.exits[rank].failed_at is not None:
                    how = f"died by {signal_name(-code)}" if code < 0 else f"exited with {code}"
                    claim(self.store, FirstFailure(rank, how))

    def _take_signal(self, number: int, frame: FrameType | None) -> None:
        self.told_to_stop = True


def rank_environment(job: Job, rank: int) -> dict[str, str]:
    """Environment of one rank, as `env://` and the CUDA driver read it."""
    interface = interface_towards(job.address)
    if interface != "lo":
        interface = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.spec.world_size),
        "LOCAL_WORLD_SIZE": str(len(job.ranks)),
        "MASTER_ADDR": job.address,
        "MASTER_PORT": str(job.port),
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
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return ""


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
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a program may have none
        with suppress(OSError, ValueError):
            stream.flush()


# --- the leader --------------------------------------------------------------------------------


def lead(job: Job, rank_main: RankMain, open_store: OpenStore, limits: Limits) -> None:
    """Run a local job to its end and write `outcome.json`, in a process of its own.

    Raises `OSError` (no port, no pipe) or `Infrastructure` (no room); ranks are dead by then.
    """
    os.setsid()
    with socket.create_server((job.address, 0), backlog=1024) as listener:
        hosted = replace(job, port=listener.getsockname()[1], listener=listener)
        report = _lead(hosted, rank_main, open_store, limits)
    outcome = put_together(job.spec, Path(), {0: report}, attempt=job.attempt)
    evidence.remove_pipes(Path(), job.ranks, all_went_well=not outcome.what)
    save_outcome(Path(), outcome)


def lead_share(
    job: Job, name: str, node: int, rank_main: RankMain, open_store: OpenStore, limits: Limits
) -> int:
    """Run the ranks of a step's `node`-th node to their end and write its report; the exit code.

    Raises as `lead`.
    """
    report = replace(_lead(job, rank_main, open_store, limits), job=name, node=node)
    evidence.remove_pipes(Path(), job.ranks, all_went_well=False)
    write_atomic(report_path(node), dumps(report) + "\n")
    return int(any(state.code != 0 for state in report.exits))


def _lead(job: Job, rank_main: RankMain, open_store: OpenStore, limits: Limits) -> NodeReport:
    """What became of the ranks of `job`; from then on the run's folder is the working directory."""
    started_s, kills = time.monotonic(), num_memory_kills()
    adopt_orphans()
    # Inherited by the ranks: a request for stacks must not kill one that has no handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # From the very first, so that what is written follows the run folder even if a resumed harness
    # sets it aside under another name. The ranks stay in the caller's folder.
    folder_fd = os.open(job.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        crew = Crew(job, rank_main, limits)
        os.fchdir(folder_fd)
        crew.store = open_store(job.listener) if job.listener is not None else None
        crew.watch_to_the_end()
        crew.store = None
        await_children()
    finally:
        kill_children()
    for output in crew.outputs:
        output.close()
    watch = crew.watch
    # Of a run that was started early, the time in which it waited is not its own.
    waited = job.gate_fd is not None and watch.started_s < math.inf
    begun_s = watch.started_s if waited else started_s
    exits = tuple(watch.exits[rank] for rank in job.ranks)
    return NodeReport(
        exits=exits,
        record_bytes={str(rank): size_of(rank_path(Path(), rank)) for rank in job.ranks},
        waited=watch.waited,
        was_stopped=crew.told_to_stop and any(state.killed_by_harness for state in exits),
        problem=next((output.problem for output in crew.outputs if output.problem), ""),
        memory_kills=memory_kills_since(kills),
        started_unix_s=watch.epoch_unix_s + begun_s,
        wall_s=time.monotonic() - begun_s,
    )


def die_as_child_of(parent_pid: int, work: Callable[[], None], stderr_path: Path) -> None:
    """Run `work` in a freshly forked process that dies with its parent; never returns.

    What goes wrong ends in `stderr_path`, and in the exit code: `NO_VERDICT` if the disk is of no
    use to any run, `NOT_RUN` or `NO_PROCESS` if the machine refused this one something, 1 for a
    mistake of ours.
    """
    code = 1
    try:
        die_with_parent(parent_pid)
        redirect(os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        work()
        code = 0
    except (HarnessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        refusal = error if isinstance(error, OSError) else error.__cause__
        of_disk = not isinstance(refusal, OSError) or refusal.errno in NO_DISK
        refused = NO_PROCESS if no_process(getattr(error, "errno", 0)) else NOT_RUN
        code = int(ExitCode.NO_VERDICT) if of_disk else refused
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)
