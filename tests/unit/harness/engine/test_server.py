"""Contracts of the forkserver's process before it can serve."""

import os
import subprocess
import sys
from pathlib import Path

from tests.planted.local_runs import wait_gone

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
