"""The agent of one node, started by srun, or of one rank, started by torchrun.

Both find out who they are from the environment, import torch once, and fork their ranks. The agents
of a step meet at the port that the first node's has taken and written to meeting.json.
"""

import gc
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.engine.leader import (
    NodeReport,
    lead_share,
    look_again,
    not_yet_visible,
    put_together,
    read_reports,
)
from harness.engine.ranks import Job, Limits, Meeting, own_address
from harness.engine.slurm import STEP_FILE, Step, ask
from harness.errors import Infrastructure, UsageError
from harness.records import RunSpec
from harness.store import SPEC_FILE, save_outcome
from harness.store.files import make_folder, write_atomic
from harness.worker.serve import load_entry, open_store

VISIBLE_S = 90.0
"""How long a file may take to show on another node; caches of NFS hold for 60 s at most."""
REPORTS_S = 120.0
"""How long rank 0's agent waits for the reports of the others after its own."""
MEETING_FILE = "meeting.json"


def run_node(folder: Path, name: str, entry: str, limits: Limits) -> int:
    """The ranks of this node of a step; the exit code.

    Raises:
        Infrastructure: the run folder cannot be seen from here, or has gone to another step.
        OSError: no process, no port.
    """
    step = Step.from_json(_await_object(folder / STEP_FILE, name))
    spec, node = _read_spec(folder), int(os.environ["SLURM_PROCID"])
    ranks = step.ranks(node, spec.world_size)
    meeting = _host(folder, step) if node == 0 else _find(folder, name)
    job = Job(
        spec=spec, folder=folder, ranks=ranks, stops_on_sigterm=True,
        devices=_devices(spec, len(ranks)),
    )  # fmt: skip
    return _lead(job, name, node, meeting, entry, limits)


def _host(folder: Path, step: Step) -> Meeting:
    """Take a port, and tell the other nodes."""
    address = "127.0.0.1" if step.num_nodes == 1 else _address()
    listener = socket.create_server(
        ("127.0.0.1" if address.startswith("127.") else "", 0), backlog=1024
    )
    meeting = Meeting(address=address, port=listener.getsockname()[1], listener=listener)
    told = {"name": step.name, "address": address, "port": meeting.port}
    write_atomic(folder / MEETING_FILE, json.dumps(told) + "\n")
    return meeting


def _find(folder: Path, name: str) -> Meeting:
    found = _await_object(folder / MEETING_FILE, name)
    return Meeting(address=found["address"], port=found["port"])


def _address() -> str:
    """This node's address as the last node of the step reaches it.

    Not what this node's name stands for, which on many machines is a loopback address.
    """
    listed = ask("scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", ""))
    last = (listed.split() or [socket.gethostname()])[-1]
    match = re.search(r"\bNodeAddr=(\S+)", ask("scontrol", "-o", "show", "node", last))
    return own_address(match.group(1) if match else last) or socket.gethostname()


def _await_object(path: Path, name: str) -> dict[str, Any]:
    """A file of the step of that name, once it shows.

    Raises:
        Infrastructure: it does not.
    """
    found: dict[str, Any] = {}

    def is_there() -> bool:
        nonlocal found
        with suppress(OSError, ValueError):
            found = json.loads(path.read_bytes())
        return found.get("name") == name

    if not _await(path, is_there):
        raise Infrastructure(
            f"{path} is not visible on this node ({socket.gethostname()}), or is of another step: "
            "put --out on a file system that all nodes share"
        )
    return found


def _await(path: Path, there: Callable[[], bool], patience_s: float = VISIBLE_S) -> bool:
    """Wait until a file shows, and `there` says yes; False if neither does in time."""
    until_s = time.monotonic() + patience_s
    while True:
        # The run folder may have taken the place of another of that name.
        look_again(path.parent.parent)
        look_again(path.parent)
        if path.exists() and there():
            return True
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)


def run_torchrun_rank(folder: Path, spec_file: Path | None, entry: str, limits: Limits) -> int:
    """The one rank of a run that torchrun started this process for; the exit code.

    Rank 0's puts the outcome together in the end.

    Args:
        folder: the run's, seen by every node; made by rank 0.
        spec_file: specification of the run, copied there; None if it is there already.
        entry: `module:function` of a `RankMain`.
        limits: how patient to be.

    Raises:
        UsageError: not started by torchrun, for another number of ranks, or the folder was used.
    """
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise UsageError(f"join: expected {', '.join(missing)} in the environment, as of torchrun")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    name = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ['MASTER_PORT']}"
    if rank == 0:
        _prepare_folder(folder, spec_file)
    if not _await(folder / SPEC_FILE, lambda: True):
        raise UsageError(f"join: {folder / SPEC_FILE}: expected a specification, got nothing")
    spec = _read_spec(folder)
    if spec.world_size != int(os.environ["WORLD_SIZE"]):
        raise UsageError(
            f"join: expected {spec.world_size} ranks for run {spec.key}, torchrun started "
            f"{os.environ['WORLD_SIZE']}"
        )
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    job = Job(
        spec=spec, folder=folder, ranks=range(rank, rank + 1), first_local_rank=local_rank,
        local_world_size=local, stops_on_sigterm=True, devices=_devices(spec, local),
    )  # fmt: skip
    meeting = Meeting(address=os.environ["MASTER_ADDR"], port=int(os.environ["MASTER_PORT"]))
    code = _lead(job, name, rank, meeting, entry, limits)
    if rank == 0:
        _conclude(Path(), spec, name)
    return code


def _lead(job: Job, name: str, node: int, meeting: Meeting, entry: str, limits: Limits) -> int:
    rank_main = load_entry(entry)
    # As in the forkserver: what is alive now is shared with every rank, if nobody writes to it.
    gc.collect()
    gc.freeze()
    return lead_share(job, name, node, meeting, rank_main, open_store, limits)


def _devices(spec: RunSpec, count: int) -> tuple[str, ...]:
    """The GPUs of the ranks here, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        UsageError: there are fewer than ranks.
    """
    if spec.device != "cuda":
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(i) for i in range(count)] if named is None else [n for n in named.split(",") if n]
    if len(seen) < count:
        raise UsageError(f"run {spec.key} needs {count} GPUs here, this node gives {len(seen)}")
    return tuple(seen[:count])


def _read_spec(folder: Path) -> RunSpec:
    return RunSpec.from_json(json.loads((folder / SPEC_FILE).read_bytes()))


def _prepare_folder(folder: Path, spec_file: Path | None) -> None:
    make_folder(folder)
    used = [path.name for path in folder.glob("*") if path.name != SPEC_FILE]
    if used:
        raise UsageError(f"join: {folder}: expected a new folder, it holds {used[0]}")
    if spec_file is not None:
        copy = folder / f".{SPEC_FILE}.tmp"
        shutil.copyfile(spec_file, copy)
        copy.replace(folder / SPEC_FILE)


def _conclude(folder: Path, spec: RunSpec, name: str) -> None:
    """Wait for every report, with a bound, and write the outcome."""
    reports: dict[int, NodeReport] = {}

    def all_there() -> bool:
        nonlocal reports
        reports = read_reports(folder, name, spec.world_size)
        return len(reports) == spec.world_size and not not_yet_visible(folder, reports)

    _await(folder / SPEC_FILE, all_there, REPORTS_S)
    outcome = put_together(spec, folder, reports, num_nodes=spec.world_size)
    save_outcome(folder, outcome)
    sys.stdout.write(f"{spec.key}: {outcome.what or 'done'} {outcome.message}\n")
