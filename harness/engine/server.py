"""The harness' end of the forkserver: a subprocess that speaks JSON lines over a socket pair.

The protocol is in `harness.worker.serve`, which this side never imports: torch lives there.
"""

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import harness
from harness.engine.outcome import signal_name
from harness.engine.process import kill_marked
from harness.engine.watch import Limits
from harness.errors import Infrastructure
from harness.provenance import code_variables

START_TIMEOUT_S = 300.0
"""How long the server may take to import torch; a cold network file system is slow."""
STOP_TIMEOUT_S = 10.0
MARK_VARIABLE = "HARNESS_ENGINE"
"""In the environment of a server and of all that comes from it; a value for each server."""


class ServerGoneError(Exception):
    """The forkserver closed its end of the socket."""


class ServerProcess:
    """The forkserver as a subprocess: messages in, messages out."""

    def __init__(self, entry: str, limits: Limits) -> None:
        """Start it; `wait_ready` must follow."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the server
        self._control, theirs = socket.socketpair()
        self._received = b""
        self._mark = secrets.token_hex(16)
        command = [
            sys.executable, "-P", "-m", "harness.worker", "serve", "--fd", str(theirs.fileno()),
            "--entry", entry, "--grace-s", str(limits.grace_s), "--stacks-s", str(limits.stacks_s),
            "--leave-s", str(limits.leave_s), "--output-cap-bytes", str(limits.output_cap_bytes),
        ]  # fmt: skip
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env=server_environment(os.environ)
                    | code_variables()
                    | {MARK_VARIABLE: self._mark},
                    # Its own session: Ctrl-C at the terminal is for the harness to act on.
                    start_new_session=True,
                )
            except OSError as error:
                self._control.close()
                self._log.close()
                raise Infrastructure(f"cannot start the forkserver: {error}") from error

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until its imports are done.

        Raises:
            Infrastructure: they failed, or took too long.
        """
        try:
            messages = self.receive(timeout_s)
        except ServerGoneError:
            messages = []
            why = self._last_words() or "it died without a word"
        else:
            why = f"not ready after {timeout_s:g} s"
        for message in messages:
            if "ready" in message:
                return
            why = str(message.get("failed", message))
        self.stop()
        raise Infrastructure(f"the forkserver could not start: {why}")

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            ServerGoneError: nobody listens.
        """
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ServerGoneError from error

    def receive(self, timeout_s: float | None) -> list[dict[str, Any]]:
        """Messages that have arrived, after waiting for one; empty if none came in time.

        Raises:
            ServerGoneError: it is gone, and everything it said has been handed out.
        """
        if not select.select([self._control], [], [], timeout_s)[0]:
            return []
        try:
            data = self._control.recv(1 << 16)
        except ConnectionResetError as error:
            raise ServerGoneError from error
        if not data:
            raise ServerGoneError
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def stop(self) -> str:
        """End it and everything it started; how it ended, in words."""
        if self._log.closed:
            return "was stopped"
        self._control.close()
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._log.close()
        if code < 0:
            # It could not clean up: processes of ranks may be in sessions of their own.
            kill_marked(f"{MARK_VARIABLE}={self._mark}")
        return f"died by {signal_name(-code)}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        """SIGKILL; its leaders and their ranks die with it."""
        self._process.kill()

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def server_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the forkserver: the harness' own, with what forking and repeating needs.

    One OpenMP thread, since a process with threads cannot fork safely; one hash seed, so that sets
    of strings are in the same order in every run.
    """
    root = Path(harness.__file__).resolve().parent.parent
    paths = [p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root.name not in ("site-packages", "dist-packages") and str(root) not in paths:
        paths.append(str(root))
    return {
        "PYTHONHASHSEED": "0",
        **environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
