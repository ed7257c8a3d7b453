"""The agent of one node, started by srun, or of one rank, started by torchrun.

Both find out who they are from the environment, import torch once, and fork their ranks.
"""

import gc
import json
import os
import shutil
import socket
import sys
from pathlib import Path

from harness.engine.leader import Post, lead_share
from harness.engine.node_reports import (
    NodeReport,
    not_yet_visible,
    put_together,
    read_reports,
)
from harness.engine.ranks import Job, Limits, Meeting
from harness.engine.slurm_job import Shares
from harness.errors import UsageError
from harness.records import RunSpec
from harness.store import SPEC_FILE, save_outcome
from harness.store.files import make_folder
from harness.worker.job import await_file, await_submission
from harness.worker.serve import load_entry, open_store

REPORTS_S = 120.0
"""How long rank 0's agent waits for the reports of the others after its own."""


def run_node(folder: Path, name: str, entry: str, limits: Limits) -> int:
    """The ranks of this node of a Slurm job; the exit code.

    Raises:
        Infrastructure: the run folder cannot be seen from here.
        OSError: no process, no port.
    """
    submission = await_submission(folder, name)
    if submission is None:
        return 0
    spec = _read_spec(folder)
    node = int(os.environ["SLURM_NODEID"])
    shares = Shares(spec.world_size, submission.num_nodes, submission.ranks_per_node)
    ranks = shares.ranks(node)
    job = Job(
        spec=spec, folder=folder, ranks=ranks, stops_on_sigterm=True,
        devices=_devices(spec, len(ranks)),
    )  # fmt: skip
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    meeting = _meeting(hosted=node == 0)
    return _lead(job, Post(job=name, node=node, restart=restart), meeting, entry, limits)


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
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank == 0:
        _prepare_folder(folder, spec_file)
    if not await_file(folder / SPEC_FILE, lambda: True):
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
    post = Post(job=name, node=rank, restart=restart)
    code = _lead(job, post, _meeting(hosted=False), entry, limits)
    if rank == 0:
        _conclude(Path(), spec, name)
    return code


def _lead(job: Job, post: Post, meeting: Meeting, entry: str, limits: Limits) -> int:
    rank_main = load_entry(entry)
    # As in the forkserver: what is alive now is shared with every rank, if nobody writes to it.
    gc.collect()
    gc.freeze()
    return lead_share(job, post, meeting, rank_main, open_store, limits)


def _meeting(*, hosted: bool) -> Meeting:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if not hosted:
        return Meeting(address=address, port=port)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # The batch script holds the port so that nobody takes it; both are of one user.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind(("127.0.0.1" if address.startswith("127.") else "", port))
    listener.listen(1024)
    return Meeting(address=address, port=port, listener=listener)


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
        beside = folder / f".{SPEC_FILE}.tmp"
        shutil.copyfile(spec_file, beside)
        beside.replace(folder / SPEC_FILE)


def _conclude(folder: Path, spec: RunSpec, name: str) -> None:
    """Wait for every report, with a bound, and write the outcome."""
    reports: dict[int, NodeReport] = {}

    def all_there() -> bool:
        nonlocal reports
        reports = read_reports(folder, name, spec.world_size)
        return len(reports) == spec.world_size and not not_yet_visible(folder, reports)

    await_file(folder / SPEC_FILE, all_there, REPORTS_S)
    outcome = put_together(spec, folder, reports, num_nodes=spec.world_size)
    save_outcome(folder, outcome)
    sys.stdout.write(f"{spec.key}: {outcome.what or 'done'} {outcome.message}\n")
