"""The batch script of a Slurm job, on its first node: meeting place, then an agent on each node.

    is it still our turn? -> move away what an earlier start left -> hold a port -> srun the agents

Imports no torch: the agents do, all at once.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness.engine.node_reports import LOG_FILE, STARTED_AGAIN, look_again, read_reports
from harness.engine.process import server_environment
from harness.engine.ranks import own_address
from harness.engine.slurm_job import Submission, load_submission
from harness.errors import Infrastructure
from harness.provenance import code_variables
from harness.store import OUTCOME_FILE, SPEC_FILE

VISIBLE_S = 90.0
"""How long a file may take to show on another node; caches of NFS hold for 60 s at most."""
_LEFT_BEHIND = (
    "rank*.jsonl", "rank*.contents", "rank*.stderr", "rank*.place", "node*.json", "nccl_rank*",
    "cuda*.core",
)  # fmt: skip
"""Of an earlier start: records to append to, reports, and evidence of what it was that hung."""


def run_job(folder: Path, name: str, agent: list[str]) -> int:
    """Run the job to its end; its exit code is that of srun.

    Args:
        folder: of the run.
        name: of this job: the folder may have been given to another one since.
        agent: what to run on each node.

    Raises:
        Infrastructure: the run folder is not visible here.
    """
    submission = await_submission(folder, name)
    if submission is None or submission.cancelled:
        sys.stderr.write(f"{folder} is no longer that of job {name}: nothing to do\n")
        return 0
    if _is_finished(folder, submission):
        # Slurm may start a job again that had done all its work: what it left must stay.
        sys.stderr.write(f"{folder} holds a finished run: nothing to do\n")
        return 0
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    try:
        # A controller that was killed may start a job twice at the same time.
        (folder / f"start{restart}").mkdir()
    except FileExistsError:
        sys.stderr.write(f"{folder} was started before by this job: nothing to do\n")
        return 0
    if restart:
        _move_away(folder, restart - 1)
    with socket.socket() as held:
        # Held, not listened at, until the job ends: the agent of this node takes the same port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        address = "127.0.0.1" if submission.num_nodes == 1 else meeting_address()
        held.bind(("127.0.0.1" if address.startswith("127.") else "", 0))
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(held.getsockname()[1])}
        environment = server_environment(os.environ) | code_variables() | meeting
        return subprocess.run(
            srun_command(submission.num_nodes, agent), env=environment, check=False
        ).returncode


def _is_finished(folder: Path, submission: Submission) -> bool:
    """Whether an outcome is stored, or every node has said how its ranks ended by themselves."""
    reports = read_reports(folder, submission.name, submission.num_nodes)
    whole = len(reports) == submission.num_nodes
    stopped = any(report.stopped_by for report in reports.values())
    return (folder / OUTCOME_FILE).exists() or (whole and not stopped)


def srun_command(num_nodes: int, agent: list[str]) -> list[str]:
    """One agent a node, with all that the job has there; a failing one ends the others."""
    cpus = os.environ.get("SLURM_CPUS_PER_TASK", "1")
    return [
        "srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}", "--cpu-bind=none", "--distribution=block", "--mpi=none",
        # The first to end well must not start a countdown for the others.
        "--kill-on-bad-exit=1", "--wait=0", "--input=none", "--label", "--export=ALL", *agent,
    ]  # fmt: skip


def await_submission(folder: Path, name: str) -> Submission | None:
    """What the harness wrote before it submitted us; None if it belongs to another job by now.

    Raises:
        Infrastructure: it cannot be seen from here.
    """
    visible = await_file(folder / SPEC_FILE, lambda: load_submission(folder) is not None)
    submission = load_submission(folder) if visible else None
    if submission is None:
        raise Infrastructure(
            f"{folder} is not visible on this node ({socket.gethostname()}): put --out on a file "
            "system that all nodes share"
        )
    return submission if submission.name == name else None


def await_file(path: Path, there: Callable[[], bool], patience_s: float | None = None) -> bool:
    """Wait until a file shows, and `there` says yes; False if neither does in time."""
    until_s = time.monotonic() + (VISIBLE_S if patience_s is None else patience_s)
    while True:
        # The run folder may have taken the place of another of that name.
        look_again(path.parent.parent)
        look_again(path.parent)
        if path.exists() and there():
            return True
        if time.monotonic() > until_s:
            return False
        time.sleep(0.1)


def meeting_address() -> str:
    """This node's address as the last node of the job reaches it.

    Not what this node's name stands for, which on many machines is a loopback address.
    """
    listed = _ask("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", ""))
    last = (listed.split() or [socket.gethostname()])[-1]
    match = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "-o", "show", "node", last))
    return own_address(match.group(1) if match else last) or socket.gethostname()


def _ask(*command: str) -> str:
    """What a command prints, "" if it has no answer."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _move_away(folder: Path, restart: int) -> None:
    """Keep what the start before left under another name: records must not be appended to it."""
    kept = folder / f"restart{restart}"
    kept.mkdir(exist_ok=True)
    for pattern in _LEFT_BEHIND:
        for path in folder.glob(pattern):
            path.rename(kept / path.name)
    sys.stderr.write(f"{STARTED_AGAIN}; what was there is in {kept.name}, {LOG_FILE} goes on\n")
