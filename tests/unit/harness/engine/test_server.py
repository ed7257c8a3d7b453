"""Contracts of the forkserver's process before it can serve."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

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
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert parent.stdout is not None
    with parent, parent.stdout:
        server = os.pidfd_open(int(parent.stdout.readline()))
        try:
            assert (tmp_path / "importing").read_text() == "importing"
            parent.kill()
            ended, _, _ = select.select([server], [], [], 30.0)
            assert ended == [server]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(server, signal.SIGKILL)
            os.close(server)
