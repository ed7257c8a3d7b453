"""One outcome of a run from the reports of its nodes and the word of Slurm.

reports of all nodes, nobody stopped      as of a run on one machine (`outcome.classify`)
TIMEOUT, DEADLINE                         hang: Slurm's limit was up, with stacks where there are
OUT_OF_MEMORY                             oom
NODE_FAIL, CANCELLED, PREEMPTED, ...      interrupted: says nothing of the program
a rank failed, others were stopped        as of a run on one machine
a node without a report                   crashed if its agent was killed by a signal that did
                                          not come from outside, else interrupted
a hang, or all gave up, once suspended    interrupted: time went by without the program
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.engine.gpu_evidence import kernel_words, last_module, last_place
from harness.engine.job_files import LOG_FILE, STARTED_AGAIN, NodeReport, Submission
from harness.engine.leader import tail_of
from harness.engine.outcome import Answer, RankEvidence, classify, culprit_of, ending_of
from harness.engine.slurm_calls import OUTSIDE
from harness.records import RankExit, RunOutcome, RunSpec, What
from harness.store.streams import read_ranks

LOG_TAIL_BYTES = 8 << 10
NOISE = (
    "mpi/pmix",
    "support for cpu binding",
    "unable to resolve",
    "srun: got sigcont",
    "force terminated",
    "*** job ",
)
_STEP_ENDS = re.compile(
    r"^(?:\d+: )?(?:.*\*\*\* STEP .*CANCELLED|(?P<task>srun: error: \S+: tasks? ))", re.MULTILINE
)
_OF_THE_MACHINE = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "LAUNCH_FAILED")
_TIME_UP = ("TIMEOUT", "DEADLINE")


@dataclass(frozen=True)
class Word:
    """What Slurm says of a job that is over: its state, "" if it is not known, and a sentence.

    `exit_code` is that of its script, None if it is not known.
    """

    state: str = ""
    text: str = ""
    exit_code: int | None = None


def needs_word(reports: Mapping[int, NodeReport]) -> bool:
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
    submission: Submission,
    reports: Mapping[int, NodeReport],
    word: Word,
) -> RunOutcome:
    """Say what happened to a run; every record file that a report speaks of is visible here."""
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
    started = [report.started_unix_s for report in reports.values()]
    wall_s = max((report.wall_s for report in reports.values()), default=0.0)
    answer = _answer(spec, folder, submission, reports, ranks, word, wall_s)
    answer = _unless_suspended(answer, reports, ranks)
    what, message, culprit, _ = answer
    if what == "illegal_access" and culprit is not None:
        words = kernel_words(tail_of(folder / f"rank{culprit}.stderr"), folder, culprit)
        message += f"; {words}" if words else ""
    problems = [report.problem for report in reports.values() if report.problem]
    if problems:
        message = f"{message}; output lost: {problems[0]}".removeprefix("; ")
    return RunOutcome(
        key=spec.key,
        what=what,
        message=message,
        culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=min(started, default=submission.submitted_unix_s),
        wall_s=wall_s,
        attempt=submission.attempt,
        ending=ending_of(answer, ranks, machine=_machine(what, word)),
    )


def _machine(what: What, word: Word) -> str:
    """Whether Slurm took a run away for a reason of the machine."""
    return "node_failure" if what == "interrupted" and word.state in _OF_THE_MACHINE else ""


def _answer(
    spec: RunSpec,
    folder: Path,
    submission: Submission,
    reports: Mapping[int, NodeReport],
    ranks: Sequence[RankEvidence],
    word: Word,
    wall_s: float,
) -> Answer:
    absent = [node for node in range(submission.num_nodes) if node not in reports]
    stopped = any(report.stopped_by for report in reports.values())
    untouched = not absent and not stopped
    if untouched and word.state != "OUT_OF_MEMORY":
        return _classified(reports, ranks, spec.timeout_s)
    said = _said(submission, word, folder)
    if word.state == "OUT_OF_MEMORY":
        return Answer("oom", said, _first_killed(ranks))
    if word.state in OUTSIDE:
        return Answer("interrupted", said, None)
    if word.state in _TIME_UP:
        return _out_of_time(reports, ranks, said, wall_s)
    if absent:
        return _without_report(absent, reports, ranks, said, word, folder)
    answer = _classified(reports, ranks, spec.timeout_s)
    return Answer(answer.what, said, None) if answer.what in ("", "interrupted") else answer


def _unless_suspended(
    answer: Answer, reports: Mapping[int, NodeReport], ranks: Sequence[RankEvidence]
) -> Answer:
    """The same answer, unless it only says that time went by: Slurm had taken that away."""
    only_waited = answer.what == "hang" or (
        answer.what == "crashed" and culprit_of(_known(ranks), _failed_order(reports)) is None
    )
    if not only_waited or not any(report.suspended for report in reports.values()):
        return answer
    told = f"the job was suspended while it ran; {answer.message}"
    return Answer("interrupted", told, None, answer.fault)


def _classified(
    reports: Mapping[int, NodeReport], ranks: Sequence[RankEvidence], timeout_s: float
) -> Answer:
    return classify(
        ranks,
        timed_out=any(report.timed_out for report in reports.values()),
        timeout_s=timeout_s,
        failed_order=_failed_order(reports),
        stalled_s=max((r.stalled_s for r in reports.values() if r.stalled_s), default=None),
    )


def _failed_order(reports: Mapping[int, NodeReport]) -> list[int]:
    when = {rank: at for report in reports.values() for rank, at in report.failed_unix_s.items()}
    return [int(rank) for rank in sorted(when, key=lambda rank: when[rank])]


def _out_of_time(
    reports: Mapping[int, NodeReport], ranks: Sequence[RankEvidence], said: str, wall_s: float
) -> Answer:
    """Slurm's limit was up: a hang, unless a rank had failed before."""
    answer = classify(
        _known(ranks), timed_out=True, timeout_s=wall_s, failed_order=_failed_order(reports)
    )
    if answer.what in ("", "interrupted"):
        return Answer("hang", said, None)
    return answer._replace(message=f"{said}; {answer.message}")


def _known(ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
    """Ranks whose node reported."""
    return [rank for rank in ranks if rank.exit.code is not None]


def _first_killed(ranks: Sequence[RankEvidence]) -> int | None:
    killed = [r.rank for r in ranks if r.exit.code == -9 and not r.still_running]
    return killed[0] if len(killed) == 1 else None


def _without_report(
    absent: Sequence[int],
    reports: Mapping[int, NodeReport],
    ranks: Sequence[RankEvidence],
    said: str,
    word: Word,
    folder: Path,
) -> Answer:
    """A node that could not say how its ranks ended: its agent was killed, or never got so far."""
    nodes = f"node {absent[0]}" if len(absent) == 1 else f"nodes {', '.join(map(str, absent))}"
    if culprit_of(_known(ranks), _failed_order(reports)) is not None:
        # A rank elsewhere failed by itself, so the rest is collateral: an agent that is told to
        # stop before it has forked its ranks has nothing to report.
        answer = _classified(reports, _known(ranks), 0.0)
        return answer._replace(message=f"{answer.message}; {nodes} left no report")
    # What a rank does can get its agent killed; it cannot make the agent leave without a report.
    killed = word.exit_code in [128 + number for number in (6, 7, 9, 11, 15)]
    began = any(rank.records.start is not None for rank in ranks)
    by_rank = killed and began and not cancelled_from_outside(folder)
    what: What = "crashed" if by_rank else "interrupted"
    return Answer(what, f"{nodes} left no report; {said}", None)


def _said(submission: Submission, word: Word, folder: Path) -> str:
    """The job's end in one sentence: state, Slurm's words, the last of the log."""
    name = f"Slurm job {submission.job_id or 'of unknown id'}"
    if word.state:
        ending = f"{name} ended as {word.state}"
    else:
        ending = (
            f"{name} has vanished: neither squeue, scontrol nor sacct know of {submission.name}"
        )
    log = last_of_log(folder)
    told = [part for part in (word.text, f"{LOG_FILE}: {log}" if log else "") if part]
    if word.state == "FAILED" and not (folder / LOG_FILE).exists():
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
