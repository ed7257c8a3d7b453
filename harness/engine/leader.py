"""The leader of one run: forks its ranks, waits, keeps the wall clock, says what happened.

    open a listening port -> fork the ranks -> host the rendezvous store -> watch -> outcome.json

A leader is forked from the warm server, has no torch of its own, and must fork its ranks before it
starts a thread (the store does).
"""

import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from harness.engine.crew import Crew, Job, Meeting, RankMain, flush_output, redirect
from harness.engine.gpu_evidence import (
    kernel_words,
    last_module,
    last_place,
    remove_pipes,
)
from harness.engine.memory_kills import num_memory_kills, with_sender
from harness.engine.neighbours import LOST
from harness.engine.outcome import RankEvidence, classify, ending_of
from harness.engine.process import adopt_orphans, die_with_parent, kill_children
from harness.engine.watch import Limits
from harness.errors import HarnessError
from harness.infrastructure import no_process
from harness.records import ExitCode, RunOutcome, RunSpec
from harness.store import save_outcome
from harness.store.files import read_tail
from harness.store.streams import read_ranks

OpenStore = Callable[[socket.socket], object]
"""Hosts the rendezvous store on a listening socket, until the returned object dies."""

NOT_RUN = 75
"""Exit code of a leader that could not lead its run: for want of memory, of descriptors, a port."""
NO_PROCESS = 76
"""The same where the kernel had no process or no memory left: a failure of the machine."""
NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
EVIDENCE_TAIL_BYTES = 64 << 10


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


def tail_of(path: Path, size_bytes: int = EVIDENCE_TAIL_BYTES) -> str:
    """The end of a text file; empty if it cannot be read, or is a link or a pipe."""
    return read_tail(path, size_bytes).decode(errors="replace")


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
