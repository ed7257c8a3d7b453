"""Runs on this machine: a warm forkserver behind a socket, slots in front of it.

If the server dies, the runs that were under way end as `interrupted` and the next run starts a new
one. If only a leader dies, its run is `crashed`, or `killed` by a SIGKILL. Under CUDA's MPS a rank
that faults takes all ranks on its GPU with it: runs that share GPUs then go one at a time.

A run whose devices are exactly those of one that is under way is started early: its processes make
their contexts and communicators, and wait with the model until that run has ended (`after`). Only
of the built-in program, on the devices in `HARNESS_START_EARLY` ("cuda" if not set), never a soak,
a timed run, or one that was started before. A run that failed on GPUs as it waited, or had no
memory there while another one waited, is undecided: started again, it has its devices to itself.
"""

import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.engine import ENTRY, ActiveRun, Engine, Slots
from harness.engine.evidence import tail_of
from harness.engine.machine import kill_group, kill_marked, mps_runs, no_process, server_environment
from harness.engine.outcome import memory_kills_since, num_memory_kills, signal_name, with_sender
from harness.engine.ranks import NO_PROCESS, NOT_RUN, Limits
from harness.errors import Infrastructure
from harness.provenance import code_variables
from harness.records import Ending, ExitCode, RankExit, RunOutcome, RunSpec, What, dumps
from harness.repeats import is_timed
from harness.store import begin_run, read_outcome, save_outcome

LEADER_SLACK_S = 60.0
"""What a leader may take beyond a run's own timeout before the engine ends the server."""
START_TIMEOUT_S = 300.0
"""How long the server may take to import torch; a cold network file system is slow."""
STOP_TIMEOUT_S = 10.0
EARLY_VARIABLE = "HARNESS_START_EARLY"
MARK_VARIABLE = "HARNESS_ENGINE"
"""In the environment of a server and of all that comes from it; a value for each server."""


class ServerGoneError(Exception):
    """The forkserver closed its end of the socket."""


class ServerProcess:
    """The forkserver as a subprocess: messages in, messages out (`ServerGoneError`: it is gone)."""

    def __init__(self, entry: str, limits: Limits) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._control, theirs = socket.socketpair()
        self._received = b""
        mark = secrets.token_hex(16)
        self._mark = f"{MARK_VARIABLE}={mark}"
        command = [
            sys.executable, "-P", "-m", "harness.worker.forkserver", "local",
            "--fd", str(theirs.fileno()), "--entry", entry, "--limits", dumps(limits),
        ]  # fmt: skip
        environment = server_environment(os.environ) | code_variables() | {MARK_VARIABLE: mark}
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                    stdout=self._log, stderr=self._log, env=environment,
                    # Its own session: Ctrl-C at the terminal is for the harness to act on.
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                self._control.close()
                self._log.close()
                raise Infrastructure(f"cannot start the forkserver: {error}") from error
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Wait until its imports are done (`Infrastructure`: they failed, or took too long)."""
        why = f"not ready after {START_TIMEOUT_S:g} s"
        try:
            for message in self.receive(START_TIMEOUT_S):
                if "ready" in message:
                    return
                why = str(message.get("failed", message))
        except ServerGoneError:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").split("\n")
            why = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
        raise Infrastructure(f"the forkserver could not start: {why}")

    def send(self, message: Mapping[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ServerGoneError from error

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Messages that have arrived, after waiting for one; empty if none came in time."""
        if not select.select([self._control], [], [], timeout_s)[0]:
            return []
        data = b""
        with suppress(ConnectionResetError):
            data = self._control.recv(1 << 16)
        if not data:
            raise ServerGoneError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> str:
        """End it and everything it started; how it ended, in words."""
        self._control.close()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._log.close()
        if code >= 0:
            return f"exited with code {code}"
        # It could not clean up: processes of ranks may be in sessions of their own.
        kill_marked(self._mark)
        return f"died by {signal_name(-code)}"

    def kill(self) -> None:
        self._process.kill()


@dataclass(kw_only=True)
class _Active(ActiveRun):
    after: str = ""  # whose slots it waits for
    again: bool = False  # it was started before, so that nothing starts early beside it
    memory_kills: int | None = field(default_factory=num_memory_kills)
    leader_pid: int | None = None
    devices: tuple[str, ...] = ()
    heir: str = ""  # who waited for its slots

    @property
    def overdue_s(self) -> float:
        """When its leader has not answered for so long that the engine kills the server."""
        return math.inf if self.after else self.started_s + self.spec.timeout_s + LEADER_SLACK_S


class LocalEngine(Engine):
    """Runs in fresh processes on this machine, one slot a rank."""

    def __init__(
        self, slots: int, jobs: int | None = None, entry: str = ENTRY,
        devices: Sequence[str] = (), limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """Prepare for `slots` ranks, in `jobs` runs, at a time (`UsageError`: no such counts).

        The server imports `entry`, `module:function` of a `RankMain`. `devices`: GPU of each slot,
        as CUDA_VISIBLE_DEVICES names it, empty without.
        """
        self.slots = slots
        self._slots = Slots(slots, devices, jobs)
        self._entry, self._limits = entry, limits or Limits()
        self._shares = len(set(devices)) < len(devices)
        self._early = os.environ.get(EARLY_VARIABLE, "cuda").split(",")
        self._server: ServerProcess | None = None
        self._begun: set[str] = set()
        self._active: dict[str, _Active] = {}
        self._failure: Infrastructure | None = None
        self._ended: list[RunOutcome] = []

    @property
    def server_pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    def check(self, spec: RunSpec) -> None:
        self._slots.check(spec)

    def can_start(self, spec: RunSpec) -> bool:
        on_gpus = spec.device == "cuda" and any(run.devices for run in self._active.values())
        if self._shares and on_gpus and mps_runs():
            return False  # a fault of one would end the other
        return self._slots.fits(spec) or self._to_follow(spec) != ""

    def _to_follow(self, spec: RunSpec) -> str:
        if spec.key in self._begun or not self._may_be_early(spec):
            return ""
        awaited = {run.after for run in self._active.values()}
        for key, run in self._active.items():
            same = (run.spec.device, run.spec.world_size) == (spec.device, spec.world_size)
            is_free = not (run.after or run.again or key in awaited)
            if same and is_free and self._may_be_early(run.spec):
                return key
        return ""

    def _may_be_early(self, spec: RunSpec) -> bool:
        plain = spec.is_builtin and spec.soak is None and not (spec.placed or is_timed(spec))
        return plain and spec.device in self._early

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self.check(spec)
        after = "" if self._slots.fits(spec) else self._to_follow(spec)
        key, ahead = spec.key, self._active.get(after)
        run = _Active(
            spec=spec, folder=folder.absolute(), attempt=attempt, after=after,
            again=key in self._begun,
        )  # fmt: skip
        run.devices = self._slots.take(run.spec) if ahead is None else ahead.devices
        self._begun.add(key)
        # Known before the server hears of it: a signal in between must find it to cancel.
        self._active[key] = run
        try:
            begin_run(run.folder, run.spec)
            self._send_start({
                "start": key, "folder": str(run.folder), "devices": run.devices,
                "attempt": run.attempt, "after": run.after, "num_ranks": run.spec.world_size,
            })  # fmt: skip
        except BaseException:
            if key in self._active:
                self._release(key)
            raise

    def _send_start(self, command: Mapping[str, Any]) -> None:
        """Send to the server; to a new one if it turns out to be dead."""
        for _ in range(2):
            if self._server is None:
                server = ServerProcess(self._entry, self._limits)
                try:
                    server.wait_ready()
                except BaseException:
                    server.stop()
                    raise
                self._server = server
            try:
                self._server.send(command)
            except ServerGoneError:
                self._server_died(spare=command["start"])
            else:
                return
        raise Infrastructure("the forkserver died twice before it could start a run")

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended; see `Engine.wait` (`Infrastructure`: no room for an outcome)."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._active and not self._ended and self._failure is None:
            now_s = time.monotonic()
            if now_s > deadline_s:
                break
            overdue_s = min(run.overdue_s for run in self._active.values())
            if now_s >= overdue_s and self._server is not None:
                self._server.kill()
            self._take_messages(max(min(deadline_s, overdue_s) - now_s, 0.001))
        if not self._ended and self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        ended, self._ended = self._ended, []
        return ended

    def _take_messages(self, patience_s: float) -> None:
        assert self._server is not None, "a run is under way"
        try:
            messages = self._server.receive(patience_s)
        except ServerGoneError:
            self._server_died()
            return
        for message in messages:
            if message.get("started") in self._active:
                self._active[message["started"]].leader_pid = message["pid"]
            elif message.get("exited") in self._active:
                self._leader_ended(self._release(message["exited"]), message)

    def _leader_ended(self, run: _Active, message: Mapping[str, Any]) -> None:
        stderr = run.folder / "leader.stderr"
        words, status = tail_of(stderr).strip(), message["status"]
        if not words:
            with suppress(OSError):
                stderr.unlink(missing_ok=True)
        outcome, missing = read_outcome(run.folder, run.spec.key)
        what: What = "not_run"
        last, ending = words.split("\n")[-1] or missing, Ending()
        if status == ExitCode.NO_VERDICT and outcome is None:
            self._failure = Infrastructure(words or "the leader of a run had no disk to write to")
            return
        why = f"the leader of the run exited with code {status}: {last}"
        if status is None:
            why = f"the run could not be started: {message['why']}"
            ending = Ending(machine=no_process(message["errno"]))
        elif status in (NOT_RUN, NO_PROCESS):
            why = f"the run could not be led: {last}"
            ending = Ending(machine="no_process" if status == NO_PROCESS else "")
        elif status < 0:
            # What a rank does can kill its leader, but cannot make the leader's own code fail.
            what = "killed" if status == -signal.SIGKILL else "crashed"
            ending = Ending(signal=signal_name(-status))
            why = f"the leader of the run died by {ending.signal}: {last}"
        else:
            what = "interrupted"
        self._conclude(run, what, why, ending)

    def _server_died(self, spare: str = "") -> None:
        """Turn every run under way but `spare` into an outcome; `start` makes a new server."""
        if self._server is None:
            return
        for run in self._active.values():
            if run.leader_pid is not None:
                kill_group(run.leader_pid)
        how = self._server.stop()
        self._server = None
        why, ending = f"the forkserver {how} during the run", Ending(machine="forkserver_died")
        for run in [self._release(key) for key in list(self._active) if key != spare]:
            self._conclude(run, "interrupted", why, ending)

    def _release(self, key: str) -> _Active:
        """Forget a run; its slots go to the run that waits for them, if one does."""
        run = self._active.pop(key)
        heir = next((other for other in self._active.values() if other.after == key), None)
        if heir is not None:
            self._slots.pass_on(key, heir.spec.key)
            heir.after, heir.started_s, heir.started_unix_s = "", time.monotonic(), time.time()
            run.heir = heir.spec.key
        elif not run.after:
            self._slots.release(key)
        return run

    def _conclude(self, run: _Active, what: What, message: str, ending: Ending) -> None:
        """Tell the outcome of a run as its leader wrote it, or, where it could not, as given."""
        outcome, _ = read_outcome(run.folder, run.spec.key)
        is_stored = outcome is not None
        if outcome is None:
            ranks = tuple(RankExit(rank=rank, code=None) for rank in range(run.spec.world_size))
            outcome = RunOutcome(
                key=run.spec.key, what=what, message=message, ranks=ranks, attempt=run.attempt,
                started_unix_s=run.started_unix_s, wall_s=time.monotonic() - run.started_s,
                ending=ending,
            )  # fmt: skip
            outcome = with_sender(outcome, memory_kills_since(run.memory_kills))
            with suppress(OSError):
                for half_written in list(run.folder.glob(".*.tmp")):  # by the leader, as it died
                    half_written.unlink(missing_ok=True)
        # Two runs' communicators may have been too much.
        in_company = bool(run.devices) and (run.after or (run.heir and outcome.what == "oom"))
        if in_company and outcome.what not in ("", "interrupted", "not_run"):
            outcome, is_stored = replace(outcome, undecided=True), False
        try:
            if not is_stored:
                save_outcome(run.folder, outcome)
        except Infrastructure as error:
            self._failure = error
        else:
            self._ended.append(outcome)

    def cancel(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None
        for key in list(self._active):
            self._release(key)
        self._ended.clear()
