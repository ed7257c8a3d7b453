"""The files of a run folder by which a harness and the job of that run know of each other.

    slurm.json   Submission  written by the harness before sbatch is called, again with the job's id
    start<N>/                made by the job when it starts for the Nth time: a second one gives up
    node<K>.json NodeReport  renamed into place by the agent on node K when its ranks are gone
    job.log                  what Slurm and the agents print
    restart<N>/              what the Nth start had left when Slurm started the job again

On a shared folder a file that is whole on one node may look absent or short on another for a while
(attribute caches of NFS): a report says how long each record file is, so that a reader can tell.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import Json, RankExit, RecordError, dumps
from harness.store.files import MAX_FILE_BYTES, read_plain, write_atomic
from harness.store.streams import rank_path

SUBMISSION_FILE, LOG_FILE = "slurm.json", "job.log"
STARTED_AGAIN = "started again by Slurm"
"""In the log where a later start of a job begins."""


@dataclass(frozen=True, kw_only=True)
class Submission(Json):
    """One job of one run. `name` is unlike that of any other job, `job_id` None until known."""

    name: str
    num_nodes: int
    ranks_per_node: int
    submitted_unix_s: float
    attempt: int = 0
    job_id: int | None = None
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class NodeReport(Json):
    """What became of the ranks of one node.

    Attributes:
        job: name of the job.
        restart: how often Slurm had started the job before.
        node: number of the node in the job.
        failed_unix_s: when each rank that failed did.
        stopped_by: signal that ended ranks which were still running, "" if none did.
        record_bytes: length of each rank's record file.
        problem: why output was lost, "" if none was.
        stalled_s: seconds without a record for which the node ended its ranks, None if it did not.
        suspended: whether Slurm had stopped the job for a while.
        nodes: all nodes of the job as Slurm lists them, `n[1-2]`; "" in files older than the field.
    """

    job: str
    restart: int
    node: int
    exits: tuple[RankExit, ...]
    failed_unix_s: dict[str, float]
    timed_out: bool
    stopped_by: str
    record_bytes: dict[str, int]
    problem: str
    started_unix_s: float
    wall_s: float = 0.0
    stalled_s: float | None = None
    suspended: bool = False
    nodes: str = ""


def _read(path: Path) -> Any:
    return json.loads(read_plain(path, MAX_FILE_BYTES).decode())


def save_submission(folder: Path, submission: Submission) -> None:
    """Store what is known of the job (`Infrastructure`: the disk refused)."""
    write_atomic(folder / SUBMISSION_FILE, dumps(submission) + "\n")


def load_submission(folder: Path) -> Submission | None:
    """The job of a run folder; None if there is none that decodes."""
    try:
        return Submission.from_json(_read(folder / SUBMISSION_FILE))
    except (OSError, ValueError, RecursionError):
        return None


def report_path(node: int) -> Path:
    """Name of a node's report in the run folder."""
    return Path(f"node{node}.json")


def read_reports(folder: Path, job: str, num_nodes: int) -> dict[int, NodeReport]:
    """Reports of the job's last start, by node; those of other jobs do not count."""
    look_again(folder)
    found: dict[int, NodeReport] = {}
    for node in range(num_nodes):
        try:
            plain = _read(folder / report_path(node))
            report = NodeReport.from_json(plain)
        except (OSError, ValueError, RecordError, RecursionError):
            continue
        if report.job == job and report.node == node:
            found[node] = report
    last = max((report.restart for report in found.values()), default=0)
    return {node: report for node, report in found.items() if report.restart == last}


def record_sizes(folder: Path, ranks: Iterable[int]) -> dict[str, int]:
    """Length of each rank's record file as this machine sees it; 0 for none."""
    return {str(rank): _size(rank_path(folder, rank)) for rank in ranks}


def look_again(folder: Path) -> None:
    """Have a file system that caches names ask its server again: opening a folder does."""
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def _size(path: Path) -> int:
    # Opened, not only looked at: NFS asks the server again for a file that is opened.
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError:
        return 0


def not_yet_visible(folder: Path, reports: Mapping[int, NodeReport]) -> str:
    """The first record file that is not as long as its node says, in words; "" if all are."""
    look_again(folder)
    for node, report in sorted(reports.items()):
        for rank, expected in report.record_bytes.items():
            got = _size(rank_path(folder, int(rank)))
            if got < expected:
                return (
                    f"the records of rank {rank} on node {node} have {expected} bytes there, "
                    f"{got} here"
                )
    return ""
