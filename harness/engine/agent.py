"""The leader of the ranks that a run has on one node; other nodes have leaders of their own.

    fork the ranks of this node -> (host the rendezvous store) -> watch -> node<K>.json

No leader knows of the others. What started them, srun or torchrun, ends them all with SIGTERM when
one exits with a code that is not 0; SIGTERM makes a leader ask its ranks for their stacks, kill
them, and report. Whoever reads the reports puts the whole together.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from harness.engine.crew import Crew, Job, Meeting, RankMain
from harness.engine.gpu_evidence import remove_pipes
from harness.engine.job_files import NodeReport, record_sizes, report_path
from harness.engine.leader import OpenStore
from harness.engine.process import adopt_orphans, kill_children
from harness.engine.watch import Limits
from harness.records import dumps
from harness.store.files import write_atomic


@dataclass(frozen=True, kw_only=True)
class Post:
    """Which node of which job this is; see `NodeReport`."""

    job: str
    node: int
    restart: int = 0


def lead_share(
    job: Job, post: Post, meeting: Meeting, rank_main: RankMain, open_store: OpenStore,
    limits: Limits | None = None,
) -> int:  # fmt: skip
    """Run the ranks of one node to their end and write its report; the exit code.

    Args:
        job: the run and which of its ranks are here.
        post: who we are, for the report.
        meeting: where all ranks find each other; the store is hosted here if it has a listener.
        rank_main: runs one rank.
        open_store: hosts the store.
        limits: how patient to be.

    Returns:
        0, or 1 if a rank of this node failed or was ended.

    Raises:
        OSError: no pipe, or no process. Ranks are dead by then.
        Infrastructure: the report cannot be written.
    """
    started_unix_s, started_s = time.time(), time.monotonic()
    adopt_orphans()
    # Inherited by the ranks: a request for stacks must not kill one that has no handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # The report follows the run folder even if a resumed harness sets it aside.
    folder_fd = os.open(job.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        crew = Crew(job, rank_main, meeting, limits or Limits())
        os.fchdir(folder_fd)
        crew.store = open_store(meeting.listener) if meeting.listener is not None else None
        crew.watch_to_the_end()
        crew.store = None
    finally:
        kill_children()
    remove_pipes(Path(), job.ranks, all_went_well=False)
    exits = tuple(crew.watch.exits[rank] for rank in job.ranks)
    ended = any(state.killed_by_harness for state in exits)
    report = NodeReport(
        job=post.job,
        restart=post.restart,
        node=post.node,
        exits=exits,
        failed_unix_s={
            str(rank): started_unix_s + failed_s - started_s
            for rank, failed_s in crew.watch.failed_s.items()
        },
        timed_out=crew.watch.timed_out,
        stalled_s=crew.watch.patience_s if crew.watch.stalled else None,
        stopped_by="SIGTERM" if crew.told_to_stop and ended else "",
        suspended=crew.was_suspended,
        record_bytes=record_sizes(Path(), job.ranks),
        problem=next(iter(crew.close_outputs()), ""),
        started_unix_s=started_unix_s,
        wall_s=time.monotonic() - started_s,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
    )
    write_atomic(report_path(post.node), dumps(report) + "\n")
    return int(any(state.code != 0 for state in exits))
