"""The processes of a run on one machine: forked, listened to, ended and waited for.

fork the ranks -> pump what they print -> reap -> `Watch` says whom to signal -> ... -> all gone
"""

import faulthandler
import math
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from harness.engine.first_failure import FirstFailure, claim
from harness.engine.gpu_evidence import (
    ask_for_dumps,
    evidence_environment,
    prepare_to_ask,
    with_time_for_dumps,
)
from harness.engine.gpus import gpu_environment
from harness.engine.outcome import signal_name
from harness.engine.output import CappedOutput
from harness.engine.process import ChildWakeup, die_with_parent, signal_quietly
from harness.engine.watch import Limits, Watch
from harness.masking import Masker
from harness.records import RunSpec
from harness.store.streams import has_begun, has_end_record, last_step_s, rank_path

START_STALLS = 6
"""Times its patience that a soak may take to its first record."""

LOOK_S = 2.0
"""Between looks at whether a program's ranks have all come to their end."""
RankMain = Callable[[RunSpec, Path, int, int], int]
"""Runs one rank: specification, folder, rank, port of the store; gives the exit code."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to lead, or the share of it that one node has.

    Attributes:
        devices: GPU of each rank here, as CUDA_VISIBLE_DEVICES names it; empty without.
        ranks: those that run here; all of the run by default.
        first_local_rank: LOCAL_RANK of the first of them.
        local_world_size: ranks on this machine, None if they are all in `ranks`.
        stops_on_sigterm: whether SIGTERM ends the ranks, their stacks first.
        undecided: which ends the engine has to decide upon (`harness.engine.company`): runs that
            `failed`, runs that `finished`, or none.
    """

    spec: RunSpec
    folder: Path
    devices: tuple[str, ...] = ()
    attempt: int = 0
    ranks: range = range(0)
    first_local_rank: int = 0
    local_world_size: int | None = None
    stops_on_sigterm: bool = False
    undecided: str = ""

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", range(self.spec.world_size))


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks find each other: the address of the rendezvous store.

    `listener` is its socket where the store is hosted here, None where it is on another node.
    """

    address: str
    port: int
    listener: socket.socket | None = None


class Records:
    """The records of a run's ranks on this machine, from inside the run's folder, as they grow.

    `window_s`: what the steps take that a rank holds back and writes together; 0 until it is known.
    """

    def __init__(self, job: Job) -> None:
        self.window_s = 0.0
        self._files = [rank_path(Path(), rank) for rank in job.ranks]
        self._soak, self._config = job.spec.soak, job.spec.config
        self._is_builtin = job.spec.is_builtin
        self._num_bytes, self._have_begun = 0, False

    def have_grown(self, run_s: float) -> bool:
        """Whether any rank has recorded anything since this was asked last.

        A run may take its time to start, to compile and to capture: `timeout_s` is the limit of
        that, and of a soak, which has hours, `START_STALLS` times its patience.

        Args:
            run_s: seconds since the run was started.
        """
        if not self._have_begun:
            self._have_begun = any(has_begun(f, is_builtin=self._is_builtin) for f in self._files)
            if self._soak is None or self._have_begun:
                return True
            return run_s < START_STALLS * self._soak.stall_s
        before = self._num_bytes
        self._num_bytes = sum(file.stat().st_size for file in self._files if file.exists())
        if self._num_bytes <= before:
            return False
        held = self._config.get("flush_every", 1)
        if self._soak is not None and isinstance(held, int) and held > 1:
            self.window_s = held * max(last_step_s(file) or 0.0 for file in self._files)
        return True


class Crew:
    """The processes of one run: forks them, pumps their output, reaps them."""

    def __init__(self, job: Job, rank_main: RankMain, meeting: "Meeting", limits: Limits) -> None:
        """Fork the ranks of `job`; the caller is the only thread of its process.

        From now on SIGTERM, if the job says so, ends the ranks, stacks first.
        """
        self.started_s = time.monotonic()
        # Where the first failure is told; None on a node that does not host it.
        self.store: object = None
        self.watch = Watch(
            ranks=job.ranks,
            timeout_s=job.spec.timeout_s,
            limits=with_time_for_dumps(limits, job.spec),
            started_s=self.started_s,
            stall_s=job.spec.stall_s if job.spec.soak is None else job.spec.soak.stall_s,
        )
        self.told_to_stop = self.was_suspended = False
        self._pids: dict[int, int] = {}
        self._records = Records(job)
        # The trainer leaves without the destructors in which other programs may stay.
        self._look_s = LOOK_S if job.spec.config.get("program") is not None else math.inf
        self._outputs: list[CappedOutput] = []
        self._selector = selectors.DefaultSelector()
        self._wakeup = ChildWakeup()
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ, None)
        if job.stops_on_sigterm:
            signal.signal(signal.SIGTERM, self._take_sigterm)
            # What Slurm sends before the SIGSTOP of a job that is suspended.
            signal.signal(signal.SIGTSTP, self._take_sigtstp)
        prepare_to_ask(job.spec, job.folder, job.ranks)
        for rank in job.ranks:
            self._fork(job, rank_main, rank, meeting)

    def _fork(self, job: Job, rank_main: RankMain, rank: int, meeting: "Meeting") -> None:
        path = job.folder / f"rank{rank}.stderr"
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
            self._become_rank(job, rank_main, rank, meeting, write_fd, leader_pid)
        os.close(write_fd)
        self._pids[pid] = rank
        self._selector.register(read_fd, selectors.EVENT_READ, output)

    def _become_rank(
        self,
        job: Job,
        rank_main: RankMain,
        rank: int,
        meeting: "Meeting",
        write_fd: int,
        leader_pid: int,
    ) -> None:
        """In the new process: never returns, and runs none of the leader's clean-up."""
        code = 1
        try:
            if job.stops_on_sigterm:
                # Slurm sends it to all that came from the leader: only the leader is to act on it,
                # or nobody could tell what the rank did when it was told to go.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            ChildWakeup.disarm()
            die_with_parent(leader_pid)
            redirect(write_fd)
            self._drop_descriptors(meeting)
            faulthandler.enable()
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            os.environ.update(rank_environment(job, rank, meeting.port, meeting.address))
            code = rank_main(job.spec, job.folder, rank, meeting.port)
        except SystemExit as stop:
            code = 0 if stop.code is None else stop.code if isinstance(stop.code, int) else 1
        except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
            traceback.print_exc()
        finally:
            flush_output()
            os._exit(exit_status(code))

    def _drop_descriptors(self, meeting: "Meeting") -> None:
        """Close what belongs to the leader, earlier ranks' pipes included."""
        if meeting.listener is not None:
            meeting.listener.close()
        self._selector.close()
        for output in self._outputs:
            output.abandon()
        self._wakeup.close()

    def watch_to_the_end(self) -> None:
        """Wait until every rank has ended, by itself or by force; from inside the run's folder."""
        while self.watch.running:
            patience_s = max(min(self.watch.deadline_s - time.monotonic(), self._look_s), 0.0)
            for key, _ in self._selector.select(patience_s):
                if key.data is None:
                    self._wakeup.drain()
                elif not key.data.drain():
                    self._selector.unregister(key.fd)
            self._reap()
            if self.told_to_stop:
                self.watch.stop(time.monotonic())
            now_s = time.monotonic()
            if self._look_s < math.inf and self._all_have_ended():
                self.watch.leaves(now_s)
            if self.watch.may_stall(now_s) and self._records.have_grown(now_s - self.started_s):
                self.watch.window_s = self._records.window_s
                self.watch.progressed(now_s)
            number = self.watch.advance(time.monotonic())
            if number is not None:
                self._signal_running(number)

    def _all_have_ended(self) -> bool:
        """Whether every rank that still runs here has written its end record."""
        return all(has_end_record(rank_path(Path(), rank)) for rank in self.watch.running)

    def _reap(self) -> None:
        for pid, rank in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[pid]
                code = os.waitstatus_to_exitcode(status)
                left_early = code == 0 and not has_end_record(rank_path(Path(), rank))
                self.watch.ended(rank, code, time.monotonic(), left_early=left_early)
                # Whoever exits with 1 has told the others itself, or is one of them.
                if code not in (0, 1) and rank in self.watch.failed_order:
                    how = f"died by {signal_name(-code)}" if code < 0 else f"exited with {code}"
                    claim(self.store, FirstFailure(rank, how))

    def _signal_running(self, number: int) -> None:
        if number == signal.SIGUSR1:
            ask_for_dumps(Path(), self.watch.running)
        for pid in self._pids:
            signal_quietly(pid, number)

    def close_outputs(self) -> list[str]:
        """Finish the output files; what went wrong with them."""
        for output in self._outputs:
            output.close()
        return [output.problem for output in self._outputs if output.problem]

    def _take_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.told_to_stop = True

    def _take_sigtstp(self, number: int, frame: FrameType | None) -> None:
        self.was_suspended = True


def rank_environment(job: Job, rank: int, port: int, address: str = "127.0.0.1") -> dict[str, str]:
    """Environment of one rank, as `env://` and the CUDA driver read it."""
    interface = interface_towards(address)
    if interface != "lo":
        interface = os.environ.get("GLOO_SOCKET_IFNAME", interface)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.spec.world_size),
        "LOCAL_WORLD_SIZE": str(job.local_world_size or len(job.ranks)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # Left to itself gloo takes the address that this machine's name stands for, which on many
        # is one that no other machine can reach.
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        # A harness that was itself started by torchrun must not lend its store to the ranks.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **gpu_environment(job.devices, job.first_local_rank + rank - job.ranks.start),
        **evidence_environment(job.spec, job.folder, rank, os.environ),
    }


def interface_towards(address: str) -> str:
    """Network interface by which this machine reaches an address, "" if that cannot be told."""
    if address.startswith("127."):
        return "lo"
    mine = own_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == mine for entry in addresses):
            return str(name)
    return ""


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
    if not isinstance(code, int):
        return 1
    return code & 0xFF or int(code != 0)


def redirect(write_fd: int) -> None:
    """Nothing to read, and whatever is printed goes to `write_fd`, which is closed."""
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


def flush_output() -> None:
    """Write out what Python holds back; called before `os._exit`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
