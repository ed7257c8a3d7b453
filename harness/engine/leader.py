"""The leader of the ranks that a run has on one machine: forks them, waits, reports.

    fork the ranks -> host the rendezvous store -> watch -> a report -> outcome.json, of a local run
                                                                        node<K>.json, of one of many

A leader must fork its ranks before it starts a thread (the store does). That of a local run is
forked from the warm server. Those of several nodes do not know of each other: what started them,
srun or torchrun, ends them all with SIGTERM when one exits with a code that is not 0; then a leader
asks its ranks for their stacks, kills them, and reports. Who reads the reports concludes.
"""

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engine.evidence import (
    remove_pipes,
)
from harness.engine.gpus import LOST
from harness.engine.node_reports import NodeReport, put_together, record_sizes, report_path
from harness.engine.outcome import num_memory_kills, with_sender
from harness.engine.process import adopt_orphans, die_with_parent, kill_children
from harness.engine.ranks import Crew, Job, Limits, Meeting, RankMain, flush_output, redirect
from harness.errors import HarnessError
from harness.infrastructure import no_process
from harness.records import ExitCode, dumps
from harness.store import save_outcome
from harness.store.files import write_atomic

OpenStore = Callable[[socket.socket], object]
"""Hosts the rendezvous store on a listening socket, until the returned object dies."""
NOT_RUN = 75
"""Exit code of a leader that could not lead its run: for want of memory, of descriptors, a port."""
NO_PROCESS = 76
"""The same where the kernel had no process or no memory left: a failure of the machine."""
NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


@dataclass(frozen=True, kw_only=True)
class Post:
    """Which node of which job a leader is on; see `NodeReport`."""

    job: str = ""
    node: int = 0
    restart: int = 0


def lead(
    job: Job, rank_main: RankMain, open_store: OpenStore, limits: Limits | None = None
) -> None:
    """Run a local job to its end and write `outcome.json`. Called once, in a process of its own.

    Raises:
        OSError: no port, no pipe, or the outcome cannot be written; ranks are dead by then.
    """
    memory_kills = num_memory_kills()
    os.setsid()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        meeting = Meeting(address="127.0.0.1", port=listener.getsockname()[1], listener=listener)
        report = _lead(job, Post(), meeting, rank_main, open_store, limits)
    outcome = put_together(job.spec, Path(), {0: report}, attempt=job.attempt)
    remove_pipes(Path(), job.ranks, all_went_well=not outcome.what)
    undecided = job.undecided == ("failed" if outcome.what else "finished")
    outcome = replace(outcome, undecided=undecided and outcome.what not in LOST)
    save_outcome(Path(), with_sender(outcome, memory_kills))


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
    report = _lead(job, post, meeting, rank_main, open_store, limits)
    remove_pipes(Path(), job.ranks, all_went_well=False)
    write_atomic(report_path(post.node), dumps(report) + "\n")
    return int(any(state.code != 0 for state in report.exits))


def _lead(
    job: Job, post: Post, meeting: Meeting, rank_main: RankMain, open_store: OpenStore,
    limits: Limits | None,
) -> NodeReport:  # fmt: skip
    """What became of the ranks of `job`; from then on the run's folder is the working directory."""
    started_unix_s, started_s = time.time(), time.monotonic()
    adopt_orphans()
    # Inherited by the ranks: a request for stacks must not kill one that has no handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # From the very first, so that what is written follows the run folder even if a resumed harness
    # sets it aside under another name. The ranks stay in the caller's folder.
    folder_fd = os.open(job.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        crew = Crew(job, rank_main, meeting, limits or Limits())
        os.fchdir(folder_fd)
        crew.store = open_store(meeting.listener) if meeting.listener is not None else None
        crew.watch_to_the_end()
        crew.store = None
    finally:
        kill_children()
    watch = crew.watch
    exits = tuple(watch.exits[rank] for rank in job.ranks)
    ended = any(state.killed_by_harness for state in exits)
    return NodeReport(
        job=post.job,
        restart=post.restart,
        node=post.node,
        exits=exits,
        failed_unix_s={
            str(rank): started_unix_s + failed_s - started_s
            for rank, failed_s in watch.failed_s.items()
        },
        timed_out=watch.timed_out,
        stalled_s=watch.patience_s if watch.stalled else None,
        stopped_by="SIGTERM" if crew.told_to_stop and ended else "",
        suspended=crew.was_suspended,
        record_bytes=record_sizes(Path(), job.ranks),
        problem=next(iter(crew.close_outputs()), ""),
        started_unix_s=started_unix_s,
        wall_s=time.monotonic() - started_s,
        nodes=os.environ.get("SLURM_JOB_NODELIST", ""),
    )


def _is_of_the_disk(error: HarnessError | OSError) -> bool:
    """Whether what stopped a leader will stop every other, too."""
    refusal = error if isinstance(error, OSError) else error.__cause__
    return not isinstance(refusal, OSError) or refusal.errno in NO_DISK


def die_as_child_of(parent_pid: int, work: Callable[[], None], stderr_path: Path) -> None:
    """Run `work` in a freshly forked process that dies with its parent; never returns.

    What goes wrong ends in `stderr_path`, and in the exit code: `NO_VERDICT` if the disk is of no
    use to any run, `NOT_RUN` or `NO_PROCESS` if the machine refused this one something, 1 for a
    mistake of ours.
    """
    code = 1
    try:
        die_with_parent(parent_pid)
        fd = os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        redirect(fd)
        work()
        code = 0
    except (HarnessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        refused = NO_PROCESS if no_process(getattr(error, "errno", 0)) else NOT_RUN
        code = int(ExitCode.NO_VERDICT) if _is_of_the_disk(error) else refused
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)
