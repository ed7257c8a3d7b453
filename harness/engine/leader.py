"""The leader of one run: forks its ranks, waits, keeps the wall clock, says what happened.

    open a listening port -> fork the ranks -> host the rendezvous store -> watch -> outcome.json

A leader is forked from the warm server, has no torch of its own, and must fork its ranks before it
starts a thread (the store does).

The leader of the ranks that a run has on one node; other nodes have leaders of their own.

    fork the ranks of this node -> (host the rendezvous store) -> watch -> node<K>.json

No leader knows of the others. What started them, srun or torchrun, ends them all with SIGTERM when
one exits with a code that is not 0; SIGTERM makes a leader ask its ranks for their stacks, kill
them, and report. Whoever reads the reports puts the whole together.
"""

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.disk import write_atomic
from harness.engine.evidence import (
    kernel_words,
    last_module,
    last_place,
    remove_pipes,
    tail_of,
)
from harness.engine.gpus import LOST
from harness.engine.node_reports import NodeReport, record_sizes, report_path
from harness.engine.outcome import RankEvidence, classify, ending_of, num_memory_kills, with_sender
from harness.engine.process import adopt_orphans, die_with_parent, kill_children
from harness.engine.ranks import Crew, Job, Limits, Meeting, RankMain, flush_output, redirect
from harness.errors import HarnessError
from harness.infrastructure import no_process
from harness.records import ExitCode, RunOutcome, RunSpec, dumps
from harness.store import save_outcome
from harness.streams import read_ranks

OpenStore = Callable[[socket.socket], object]
"""Hosts the rendezvous store on a listening socket, until the returned object dies."""

NOT_RUN = 75
"""Exit code of a leader that could not lead its run: for want of memory, of descriptors, a port."""
NO_PROCESS = 76
"""The same where the kernel had no process or no memory left: a failure of the machine."""
NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


def lead(
    job: Job, rank_main: RankMain, open_store: OpenStore, limits: Limits | None = None
) -> None:
    """Run a job to its end and write `outcome.json`. Called once, in a process of its own.

    Raises:
        OSError: no port, no pipe, or the outcome cannot be written; ranks are dead by then.
    """
    limits = limits or Limits()
    started_unix_s, memory_kills = time.time(), num_memory_kills()
    os.setsid()
    adopt_orphans()
    # Inherited by the ranks: a request for stacks must not kill one that has no handler yet.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # From the very first, so that the outcome follows the run folder even if a resumed harness sets
    # it aside under another name. The ranks stay in the caller's folder.
    folder_fd = os.open(job.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
            port = listener.getsockname()[1]
            meeting = Meeting(address="127.0.0.1", port=port, listener=listener)
            crew = Crew(job, rank_main, meeting, limits)
            os.fchdir(folder_fd)
            crew.store = open_store(listener)
            crew.watch_to_the_end()
            crew.store = None
    finally:
        kill_children()
    _write_outcome(job, crew, started_unix_s, memory_kills)


def _write_outcome(job: Job, crew: Crew, started_unix_s: float, memory_kills: int | None) -> None:
    wall_s = time.monotonic() - crew.started_s
    problems = crew.close_outputs()
    here = Path()
    ranks = [
        RankEvidence(
            exit=crew.watch.exits[records.rank],
            records=records,
            stderr_tail=tail_of(here / f"rank{records.rank}.stderr"),
            place=last_place(here, records.rank),
            module=last_module(here, records.rank),
        )
        for records in read_ranks(here, job.spec.world_size)
    ]
    answer = classify(
        ranks,
        timed_out=crew.watch.timed_out,
        stalled_s=crew.watch.patience_s if crew.watch.stalled else None,
        timeout_s=job.spec.timeout_s,
        failed_order=crew.watch.failed_order,
        steps=_steps_of(job.spec),
    )
    what, message, culprit, _ = answer
    remove_pipes(here, job.ranks, all_went_well=not what)
    if what == "illegal_access" and culprit is not None:
        words = kernel_words(tail_of(here / f"rank{culprit}.stderr"), here, culprit)
        message += f"; {words}" if words else ""
    if problems:
        message += f"; output lost: {problems[0]}"
    outcome = RunOutcome(
        key=job.spec.key,
        what=what,
        message=message.removeprefix("; "),
        culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=started_unix_s,
        wall_s=wall_s,
        attempt=job.attempt,
        undecided=what not in LOST and job.undecided == ("failed" if what else "finished"),
        ending=ending_of(answer, ranks),
    )
    save_outcome(here, with_sender(outcome, memory_kills))


def _steps_of(spec: RunSpec) -> int | None:
    """Steps that are due, where the run says so and is not a soak."""
    steps = spec.config.get("steps")
    return steps if isinstance(steps, int) and spec.soak is None else None


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
