"""The leader of the ranks that a run has on one machine, and what leaders saw, put together.

    fork the ranks -> host the rendezvous store -> watch -> a report -> outcome.json, of a local run
                                                                        node<K>.json, of one of many

A leader forks its ranks before it starts a thread (the store does). Those of several nodes do not
know of each other: srun ends them all with SIGTERM when one fails; then a leader asks its ranks for
their stacks, kills them, and reports. Who reads the reports concludes:

    reports of all nodes, nobody stopped        as `outcome.classify` says
    Slurm: OUT_OF_MEMORY                        oom
    NODE_FAIL, TIMEOUT, CANCELLED, ...          interrupted: says nothing of the program
    a rank failed, others were stopped          as `outcome.classify` says
    a node without a report                     crashed if its agent was killed, else interrupted
    a hang, or all gave up, once suspended      interrupted: time went by without the program

On a shared folder a file that is whole on one node may look absent or short on another for a while
(caches of NFS): a report says how long each record file is, so that a reader can tell.
"""

import errno
import json
import math
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from harness.engine import outcome as outcomes
from harness.engine.evidence import kernel_words, last_module, last_place, remove_pipes, tail_of
from harness.engine.outcome import Answer, RankEvidence
from harness.engine.process import adopt_orphans, die_with_parent, kill_children
from harness.engine.ranks import Crew, Job, Limits, Meeting, RankMain, flush_output, redirect
from harness.errors import HarnessError
from harness.infrastructure import no_process
from harness.records import ExitCode, Json, RankExit, RecordError, RunOutcome, RunSpec, What, dumps
from harness.store import save_outcome
from harness.store.files import MAX_FILE_BYTES, read_plain, write_atomic
from harness.store.streams import rank_path, read_ranks

OpenStore = Callable[[socket.socket], object]
"""Hosts the rendezvous store on a listening socket, until the returned object dies."""
NOT_RUN = 75
"""Exit code of a leader that could not lead its run: for want of memory, of descriptors, a port."""
NO_PROCESS = 76
"""The same where the kernel had no process or no memory left: a failure of the machine."""
NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
LOST: tuple[What, ...] = ("interrupted", "not_run")
"""Ends that say nothing of the program."""
LOG_FILE = "job.log"
"""What srun and the agents print."""
OF_THE_MACHINE = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "LAUNCH_FAILED")
STEP_ENDS = {
    "oom_kill event": "OUT_OF_MEMORY", ": out of memory": "OUT_OF_MEMORY",
    "due to node failure": "NODE_FAIL", "node failure on": "NODE_FAIL",
    "due to preemption": "PREEMPTED", "due to time limit": "TIMEOUT",
}  # fmt: skip
"""What srun and slurmstepd say, in lower case, of a step that ended while its job lives."""
_NOISE = (
    "mpi/pmix", "support for cpu binding", "unable to resolve", "srun: got sigcont",
    "force terminated", "*** job ",
)  # fmt: skip
_FIRST_END = re.compile(
    r"^(?:\d+: )?(?:.*\*\*\* STEP .*CANCELLED|(?P<task>srun: error: \S+: tasks? ))", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class NodeReport(Json):
    """What became of the ranks of the `node`-th node of the step `job` ("" of a local run).

    By rank: when each that failed did, and the length of its record file. `stopped_by`: the signal
    that ended ranks which were still running, "" if none did; `stalled_s`: the seconds without a
    record for which they were ended; `suspended`: Slurm had stopped them for a while; `problem`:
    why output was lost; `memory_kills`: by the kernel meanwhile, None if that is not known.
    """

    exits: tuple[RankExit, ...]
    started_unix_s: float
    job: str = ""
    node: int = 0
    failed_unix_s: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    stopped_by: str = ""
    record_bytes: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    wall_s: float = 0.0
    stalled_s: float | None = None
    suspended: bool = False
    memory_kills: int | None = None


Reports = Mapping[int, NodeReport]
"""Of a run, by node."""


class Word(NamedTuple):
    """What Slurm says: how the allocation ended, "" while it lives, a sentence of it, and the
    signal that killed an agent."""

    state: str = ""
    text: str = ""
    killed_by: int = 0


NO_WORD = Word()


# --- leading --------------------------------------------------------------------------------------


def lead(
    job: Job, rank_main: RankMain, open_store: OpenStore, limits: Limits | None = None
) -> None:
    """Run a local job to its end and write `outcome.json`, in a process of its own.

    Raises `OSError` (no port, no pipe) or `Infrastructure` (no room); ranks are dead by then.
    """
    os.setsid()
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        meeting = Meeting(address="127.0.0.1", port=listener.getsockname()[1], listener=listener)
        report = _lead(job, meeting, rank_main, open_store, limits)
    outcome = put_together(job.spec, Path(), {0: report}, attempt=job.attempt)
    remove_pipes(Path(), job.ranks, all_went_well=not outcome.what)
    in_doubt = job.shares_gpus and outcome.what not in ("", *LOST)
    save_outcome(Path(), replace(outcome, undecided=in_doubt))


def lead_share(
    job: Job, name: str, node: int, meeting: Meeting, rank_main: RankMain,
    open_store: OpenStore, limits: Limits | None = None,
) -> int:  # fmt: skip
    """Run the ranks of a step's `node`-th node to their end and write its report; the exit code.

    The store is hosted here if `meeting` has a listener. Raises as `lead`.
    """
    report = replace(_lead(job, meeting, rank_main, open_store, limits), job=name, node=node)
    remove_pipes(Path(), job.ranks, all_went_well=False)
    write_atomic(report_path(node), dumps(report) + "\n")
    return int(any(state.code != 0 for state in report.exits))


def _lead(
    job: Job, meeting: Meeting, rank_main: RankMain, open_store: OpenStore, limits: Limits | None
) -> NodeReport:
    """What became of the ranks of `job`; from then on the run's folder is the working directory."""
    started_unix_s, started_s = time.time(), time.monotonic()
    kills = outcomes.num_memory_kills()
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
    # Of a run that was started early, the time in which it waited is not its own.
    waited = job.gate_fd is not None and watch.started_s < math.inf
    begun_s = watch.started_s if waited else started_s
    exits = tuple(watch.exits[rank] for rank in job.ranks)
    ended = any(state.killed_by_harness for state in exits)
    failed = watch.failed_s.items()
    return NodeReport(
        exits=exits,
        failed_unix_s={str(rank): started_unix_s + at_s - started_s for rank, at_s in failed},
        timed_out=watch.timed_out,
        stalled_s=watch.patience_s if watch.stalled else None,
        stopped_by="SIGTERM" if crew.told_to_stop and ended else "",
        suspended=crew.was_suspended,
        memory_kills=outcomes.memory_kills_since(kills),
        record_bytes={str(rank): _size(rank_path(Path(), rank)) for rank in job.ranks},
        problem=crew.close_outputs(),
        started_unix_s=started_unix_s + begun_s - started_s,
        wall_s=time.monotonic() - begun_s,
    )


def die_as_child_of(parent_pid: int, work: Callable[[], None], stderr_path: Path) -> None:
    """Run `work` in a freshly forked process that dies with its parent; never returns.

    What goes wrong ends in `stderr_path`, and in the exit code: `NO_VERDICT` if the disk is of no
    use to any run, `NOT_RUN` or `NO_PROCESS` if the machine refused this one something, 1 for a
    mistake of ours.
    """
    code = 1
    try:
        die_with_parent(parent_pid)
        redirect(os.open(stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        work()
        code = 0
    except (HarnessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        refusal = error if isinstance(error, OSError) else error.__cause__
        of_disk = not isinstance(refusal, OSError) or refusal.errno in NO_DISK
        refused = NO_PROCESS if no_process(getattr(error, "errno", 0)) else NOT_RUN
        code = int(ExitCode.NO_VERDICT) if of_disk else refused
    except BaseException:  # noqa: BLE001 - the last frame of a process: report, then exit
        traceback.print_exc()
    finally:
        flush_output()
        os._exit(code)


# --- reading reports ------------------------------------------------------------------------------


def report_path(node: int) -> Path:
    """Name of a node's report in the run folder."""
    return Path(f"node{node}.json")


def read_reports(folder: Path, job: str, num_nodes: int) -> dict[int, NodeReport]:
    """Reports of a step, by node; those of other steps do not count."""
    look_again(folder)
    found: dict[int, NodeReport] = {}
    for node in range(num_nodes):
        with suppress(OSError, ValueError, RecordError, RecursionError):
            text = read_plain(folder / report_path(node), MAX_FILE_BYTES)
            report = NodeReport.from_json(json.loads(text))
            if (report.job, report.node) == (job, node):
                found[node] = report
    return found


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


def not_yet_visible(folder: Path, reports: Reports) -> str:
    """The first record file that is not as long as its node says, in words; "" if all are."""
    look_again(folder)
    for node, report in sorted(reports.items()):
        for rank, there in report.record_bytes.items():
            if (here := _size(rank_path(folder, int(rank)))) < there:
                records = f"the records of rank {rank} on node {node}"
                return f"{records} have {there} bytes there, {here} here"
    return ""


def needs_word(reports: Iterable[NodeReport]) -> bool:
    """Whether it is open what Slurm had to do with the end of the run: it stopped ranks that were
    still running, or may be who killed one (for the memory it used)."""
    exits = [state for report in reports for state in report.exits if not report.stopped_by]
    stopped = any(report.stopped_by for report in reports)
    return stopped or any(e.code == -signal.SIGKILL and not e.killed_by_harness for e in exits)


def put_together(
    spec: RunSpec, folder: Path, reports: Reports, word: Word = NO_WORD, *,
    num_nodes: int = 1, attempt: int = 0,
) -> RunOutcome:  # fmt: skip
    """Say what happened to a run on `num_nodes`; every record file that a report speaks of is
    visible here. Without a `word` Slurm has nothing to say."""
    known = reports.values()
    exits = {state.rank: state for report in known for state in report.exits}
    ranks = [
        RankEvidence(
            exit=exits.get(records.rank, RankExit(rank=records.rank, code=None)),
            records=records,
            stderr_tail=tail_of(folder / f"rank{records.rank}.stderr"),
            place=last_place(folder, records.rank),
            module=last_module(folder, records.rank),
        )
        for records in read_ranks(folder, spec.world_size)
    ]
    state = word.state or step_state(folder)
    said = _said(folder, word, state)
    answer = _answer(spec, reports, ranks, range(num_nodes), state, said, word.killed_by)
    what, message, culprit, _ = answer
    if what == "illegal_access" and culprit is not None:
        words = kernel_words(ranks[culprit].stderr_tail, folder, culprit)
        message += f"; {words}" if words else ""
    if problem := next((report.problem for report in known if report.problem), ""):
        message = f"{message}; output lost: {problem}".removeprefix("; ")
    machine = "node_failure" if what == "interrupted" and state in OF_THE_MACHINE else ""
    outcome = RunOutcome(
        key=spec.key, what=what, message=message, culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=min((report.started_unix_s for report in known), default=0.0),
        wall_s=max((report.wall_s for report in known), default=0.0),
        attempt=attempt, ending=outcomes.ending_of(answer, ranks, machine=machine),
    )  # fmt: skip
    there = (r for r in known if any(each.rank == culprit for each in r.exits))
    return outcomes.with_sender(outcome, next((report.memory_kills for report in there), None))


def _answer(
    spec: RunSpec, reports: Reports, ranks: Sequence[RankEvidence], nodes: range, state: str,
    said: str, killed_by: int,
) -> Answer:  # fmt: skip
    """The table of the module's docstring. `state`: how Slurm ended the step, `said` in words."""
    when = {rank: at for report in reports.values() for rank, at in report.failed_unix_s.items()}
    order = [int(rank) for rank in sorted(when, key=lambda rank: when[rank])]
    known = [rank for rank in ranks if rank.exit.code is not None]
    failed_itself = outcomes.culprit_of(known, order) is not None
    steps, all_of = spec.config.get("steps"), reports.values()

    def classified(of: Sequence[RankEvidence]) -> Answer:
        return outcomes.classify(
            of, timed_out=any(report.timed_out for report in all_of), timeout_s=spec.timeout_s,
            failed_order=order,
            stalled_s=max((r.stalled_s for r in all_of if r.stalled_s), default=None),
            steps=steps if isinstance(steps, int) and spec.soak is None else None,
        )  # fmt: skip

    absent = [str(node) for node in nodes if node not in reports]
    silent = f"node{'s' * (len(absent) > 1)} {', '.join(absent)} left no report"
    if not absent and not needs_word(all_of):
        answer = classified(ranks)
    elif state == "OUT_OF_MEMORY":
        killed = [rank.rank for rank in ranks if rank.exit.code == -9 and not rank.still_running]
        answer = Answer("oom", said, killed[0] if len(killed) == 1 else None)
    elif state:
        answer = Answer("interrupted", said, None)
    elif absent and failed_itself:
        # The rest is collateral: an agent that is told to stop before it has forked its ranks has
        # nothing to report.
        answer = classified(known)
        answer = answer._replace(message=f"{answer.message}; {silent}")
    elif absent:
        # What a rank does can get its agent killed, not make the agent leave without a report.
        by_rank = any(rank.records.start for rank in ranks) and killed_by in (6, 7, 9, 11, 15)
        answer = Answer("crashed" if by_rank else "interrupted", f"{silent}; {said}", None)
    else:
        answer = classified(ranks)
        if answer.what in ("", "interrupted"):
            answer = answer._replace(message=said, culprit=None)
    only_waited = answer.what == "hang" or (answer.what == "crashed" and not failed_itself)
    if only_waited and any(report.suspended for report in all_of):
        # Slurm had taken the time away that went by.
        why = f"the run was suspended while it ran; {answer.message}"
        answer = Answer("interrupted", why, None, answer.fault)
    return answer


def _said(folder: Path, word: Word, state: str) -> str:
    """The step's end in one sentence: Slurm's words, and the line of the log that says most."""
    ending = word.text or f"the step ended ({state or 'Slurm says no more'})"
    log = tail_of(folder / LOG_FILE, 8 << 10).splitlines()
    lines = [line.strip() for line in log if line.strip()]
    slurm = [line for line in lines if "***" in line and "CANCELLED" in line]
    plain = [line for line in lines if not any(noise in line.lower() for noise in _NOISE)]
    said = next(iter(slurm or plain[-1:]), "")[:300]
    return f"{ending}; {LOG_FILE}: {said}" if said else ending


def step_state(folder: Path) -> str:
    """How Slurm, or somebody, ended the step while its job lives; "" if a task ended it.

    srun tells of a task that failed first, then ends the others; whoever else ends a step is first
    heard of by Slurm's word on the step, and its tasks' ends follow.
    """
    log = tail_of(folder / LOG_FILE)
    errors = "\n".join(line.lower() for line in log.splitlines() if "error:" in line)
    for phrase, state in STEP_ENDS.items():
        if phrase in errors:
            return state
    first = _FIRST_END.search(log)
    return "CANCELLED" if first is not None and first.group("task") is None else ""
