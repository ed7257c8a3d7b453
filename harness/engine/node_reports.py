"""What leaders saw of a run's ranks, put together to one outcome; a local run has one node.

    node<K>.json  NodeReport  renamed into place by the leader on node K when its ranks are gone

reports of all nodes, nobody stopped      as `outcome.classify` says
Slurm: TIMEOUT, DEADLINE                  hang: Slurm's limit was up, with stacks where there are
       OUT_OF_MEMORY                      oom
       NODE_FAIL, CANCELLED, ...          interrupted: says nothing of the program
a rank failed, others were stopped        as `outcome.classify` says
a node without a report                   crashed if its agent was killed by a signal that did
                                          not come from outside, else interrupted
a hang, or all gave up, once suspended    interrupted: time went by without the program

On a shared folder a file that is whole on one node may look absent or short on another for a while
(attribute caches of NFS): a report says how long each record file is, so that a reader can tell.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.engine.evidence import kernel_words, last_module, last_place, tail_of
from harness.engine.outcome import Answer, RankEvidence, classify, culprit_of, ending_of
from harness.records import Json, RankExit, RecordError, RunOutcome, RunSpec, What
from harness.store.files import MAX_FILE_BYTES, read_plain
from harness.store.streams import rank_path, read_ranks

LOG_FILE = "job.log"
"""What Slurm and the agents print."""
STARTED_AGAIN = "started again by Slurm"
"""In the log where a later start of a job begins."""
OUTSIDE = frozenset(
    {"CANCELLED", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "REVOKED", "LAUNCH_FAILED",
     "RECONFIG_FAIL"}
)  # fmt: skip
"""States in which a job of Slurm ended that say nothing of the program."""
_OF_THE_MACHINE = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "LAUNCH_FAILED")
_TIME_UP = ("TIMEOUT", "DEADLINE")
LOG_TAIL_BYTES = 8 << 10
NOISE = (
    "mpi/pmix", "support for cpu binding", "unable to resolve", "srun: got sigcont",
    "force terminated", "*** job ",
)  # fmt: skip
_STEP_ENDS = re.compile(
    r"^(?:\d+: )?(?:.*\*\*\* STEP .*CANCELLED|(?P<task>srun: error: \S+: tasks? ))", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class NodeReport(Json):
    """What became of the ranks of one node.

    Attributes:
        job: name of the job; "" of a local run.
        restart: how often Slurm had started the job before.
        node: number of the node in the job.
        failed_unix_s: when each rank that failed did.
        stopped_by: signal that ended ranks which were still running, "" if none did.
        record_bytes: length of each rank's record file.
        problem: why output was lost, "" if none was.
        stalled_s: seconds without a record for which its ranks were ended, None if they were not.
        suspended: whether Slurm had stopped the job for a while.
        nodes: all nodes of the job as Slurm lists them, `n[1-2]`.
    """

    exits: tuple[RankExit, ...]
    started_unix_s: float
    job: str = ""
    restart: int = 0
    node: int = 0
    failed_unix_s: dict[str, float] = field(default_factory=dict)
    timed_out: bool = False
    stopped_by: str = ""
    record_bytes: dict[str, int] = field(default_factory=dict)
    problem: str = ""
    wall_s: float = 0.0
    stalled_s: float | None = None
    suspended: bool = False
    nodes: str = ""


Reports = Mapping[int, NodeReport]
"""Of a run, by node."""


@dataclass(frozen=True)
class Word:
    """What Slurm says of a job that is over: its state, "" if it is not known, and a sentence.

    `exit_code` is that of its script, None if it is not known; `job` is its name in a message.
    """

    state: str = ""
    text: str = ""
    exit_code: int | None = None
    job: str = "the job"


NO_WORD = Word()


def report_path(node: int) -> Path:
    """Name of a node's report in the run folder."""
    return Path(f"node{node}.json")


def read_reports(folder: Path, job: str, num_nodes: int) -> dict[int, NodeReport]:
    """Reports of the job's last start, by node; those of other jobs do not count."""
    look_again(folder)
    found: dict[int, NodeReport] = {}
    for node in range(num_nodes):
        with suppress(OSError, ValueError, RecordError, RecursionError):
            text = read_plain(folder / report_path(node), MAX_FILE_BYTES).decode()
            report = NodeReport.from_json(json.loads(text))
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


def not_yet_visible(folder: Path, reports: Reports) -> str:
    """The first record file that is not as long as its node says, in words; "" if all are."""
    look_again(folder)
    for node, report in sorted(reports.items()):
        for rank, there in report.record_bytes.items():
            if (here := _size(rank_path(folder, int(rank)))) < there:
                told = f"the records of rank {rank} on node {node}"
                return f"{told} have {there} bytes there, {here} here"
    return ""


def needs_word(reports: Reports) -> bool:
    """Whether the reports leave open what Slurm had to do with the end of the run.

    It ended ranks that were still running, or may be who killed one (for the memory it used).
    """
    return any(
        report.stopped_by
        or any(state.code == -9 and not state.killed_by_harness for state in report.exits)
        for report in reports.values()
    )


def put_together(
    spec: RunSpec,
    folder: Path,
    reports: Reports,
    word: Word = NO_WORD,
    *,
    num_nodes: int = 1,
    attempt: int = 0,
) -> RunOutcome:
    """Say what happened to a run; every record file that a report speaks of is visible here.

    Args:
        spec: the run.
        folder: of the run.
        reports: of the nodes that made one.
        word: what Slurm says of the job.
        num_nodes: that the run had.
        attempt: the outcome's.
    """
    exits = {state.rank: state for report in reports.values() for state in report.exits}
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
    answer = _Concluder(spec, folder, reports, ranks, word, num_nodes).answer()
    what, message, culprit, _ = answer
    if what == "illegal_access" and culprit is not None:
        words = kernel_words(tail_of(folder / f"rank{culprit}.stderr"), folder, culprit)
        message += f"; {words}" if words else ""
    if problem := next((report.problem for report in reports.values() if report.problem), ""):
        message = f"{message}; output lost: {problem}".removeprefix("; ")
    by_machine = what == "interrupted" and word.state in _OF_THE_MACHINE
    return RunOutcome(
        key=spec.key,
        what=what,
        message=message,
        culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=min((r.started_unix_s for r in reports.values()), default=0.0),
        wall_s=max((report.wall_s for report in reports.values()), default=0.0),
        attempt=attempt,
        ending=ending_of(answer, ranks, machine="node_failure" if by_machine else ""),
    )


@dataclass(frozen=True)
class _Concluder:
    """The table of the module's docstring."""

    spec: RunSpec
    folder: Path
    reports: Reports
    ranks: Sequence[RankEvidence]
    word: Word
    num_nodes: int

    def answer(self) -> Answer:
        """The same answer, unless it only says that time went by: Slurm had taken that away."""
        answer = self._answer()
        only_waited = answer.what == "hang" or (
            answer.what == "crashed" and culprit_of(self._known, self._failed_order) is None
        )
        if not only_waited or not any(report.suspended for report in self.reports.values()):
            return answer
        told = f"the job was suspended while it ran; {answer.message}"
        return Answer("interrupted", told, None, answer.fault)

    def _answer(self) -> Answer:
        state = self.word.state
        absent = [node for node in range(self.num_nodes) if node not in self.reports]
        stopped = any(report.stopped_by for report in self.reports.values())
        if not (absent or stopped or state == "OUT_OF_MEMORY"):
            return self._classified(self.ranks)
        if state == "OUT_OF_MEMORY":
            return Answer("oom", self._said, self._first_killed)
        if state in OUTSIDE:
            return Answer("interrupted", self._said, None)
        if state in _TIME_UP:
            return self._out_of_time()
        if absent:
            return self._without_report(absent)
        answer = self._classified(self.ranks)
        return (
            answer
            if answer.what not in ("", "interrupted")
            else answer._replace(message=self._said, culprit=None)
        )

    def _classified(self, ranks: Sequence[RankEvidence], late_s: float | None = None) -> Answer:
        """What ranks tell by themselves; `late_s`: after how long Slurm ended them, if it did."""
        steps = self.spec.config.get("steps")
        reports = self.reports.values()
        return classify(
            ranks,
            timed_out=late_s is not None or any(report.timed_out for report in reports),
            timeout_s=self.spec.timeout_s if late_s is None else late_s,
            failed_order=self._failed_order,
            stalled_s=max((r.stalled_s for r in reports if r.stalled_s), default=None),
            steps=steps if isinstance(steps, int) and self.spec.soak is None else None,
        )

    @property
    def _failed_order(self) -> list[int]:
        when = {r: at for report in self.reports.values() for r, at in report.failed_unix_s.items()}
        return [int(rank) for rank in sorted(when, key=lambda rank: when[rank])]

    @property
    def _known(self) -> list[RankEvidence]:
        """Ranks whose node reported."""
        return [rank for rank in self.ranks if rank.exit.code is not None]

    @property
    def _first_killed(self) -> int | None:
        killed = [r.rank for r in self.ranks if r.exit.code == -9 and not r.still_running]
        return killed[0] if len(killed) == 1 else None

    def _out_of_time(self) -> Answer:
        """Slurm's limit was up: a hang, unless a rank had failed before."""
        wall_s = max((report.wall_s for report in self.reports.values()), default=0.0)
        answer = self._classified(self._known, wall_s)
        if answer.what in ("", "interrupted"):
            return Answer("hang", self._said, None)
        return answer._replace(message=f"{self._said}; {answer.message}")

    def _without_report(self, absent: Sequence[int]) -> Answer:
        """Nodes that did not say how their ranks ended: killed, or they never got so far."""
        nodes = f"node {absent[0]}" if len(absent) == 1 else f"nodes {', '.join(map(str, absent))}"
        if culprit_of(self._known, self._failed_order) is not None:
            # A rank elsewhere failed by itself, so the rest is collateral: an agent that is told to
            # stop before it has forked its ranks has nothing to report.
            answer = self._classified(self._known)
            return answer._replace(message=f"{answer.message}; {nodes} left no report")
        # What a rank does can get its agent killed, not make the agent leave without a report.
        killed = self.word.exit_code in [128 + number for number in (6, 7, 9, 11, 15)]
        began = any(rank.records.start is not None for rank in self.ranks)
        by_rank = killed and began and not cancelled_from_outside(self.folder)
        what: What = "crashed" if by_rank else "interrupted"
        return Answer(what, f"{nodes} left no report; {self._said}", None)

    @property
    def _said(self) -> str:
        """The job's end in one sentence: state, Slurm's words, the last of the log."""
        word, log = self.word, last_of_log(self.folder)
        ending = f"{word.job} ended as {word.state}"
        if not word.state:
            ending = f"{word.job} has vanished: neither squeue, scontrol nor sacct know of it"
        told = [part for part in (word.text, f"{LOG_FILE}: {log}" if log else "") if part]
        if word.state == "FAILED" and not (self.folder / LOG_FILE).exists():
            told.append(f"no {LOG_FILE}: is the run folder on a file system that the nodes share?")
        return f"{ending} ({'; '.join(told)})" if told else ending


def cancelled_from_outside(folder: Path) -> bool:
    """Whether somebody ended the step, and not srun because one of its tasks had failed.

    srun tells of the task first, then ends the others; whoever else ends a step is first heard of
    by Slurm's word on the step, and its tasks' ends follow.
    """
    log = tail_of(folder / LOG_FILE).rpartition(STARTED_AGAIN)[2]
    first = _STEP_ENDS.search(log)
    return first is not None and first.group("task") is None


def last_of_log(folder: Path) -> str:
    """The line of the job's log that says most: Slurm's own word, else the last one."""
    lines = [line.strip() for line in tail_of(folder / LOG_FILE, LOG_TAIL_BYTES).splitlines()]
    lines = [line for line in lines if line]
    slurm = [line for line in lines if "***" in line and "CANCELLED" in line]
    plain = [line for line in lines if not any(noise in line.lower() for noise in NOISE)]
    return next(iter(slurm or plain[-1:]), "")[:300]
