"""From exit states, records and reports of nodes to one answer: what happened, and whose fault.

    how a rank ended                              what
    its own error record                          as the rank classified it
    exit code `UNRECORDED`, no record of its end  interrupted (its records found no space)
    illegal-access or out-of-memory text, no record   illegal_access, oom
    SIGKILL, SIGTERM, ... not from the harness    killed
    any other signal, or a non-zero exit          crashed
    still running when the time was up            hang
    the same, but every rank has its end record   nothing: the program came to its end
    could not be forked                           not_run

One failing rank takes the others with it. A rank is a *victim* if its record blames another, or
only says that a peer went away or that it waited too long for one; the culprit is the first rank to
fail that is not a victim, else one that was still running: the one with the fewest steps, else the
only one whose stack does not wait in a collective. A rank that failed by itself says so in the
run's store before it exits; for one that was killed its leader does.

On Slurm leaders do not know of each other: srun ends them all with SIGTERM when one fails.

    reports of all nodes, nobody stopped        as above
    Slurm: OUT_OF_MEMORY                        oom
    NODE_FAIL, TIMEOUT, CANCELLED, ...          interrupted: says nothing of the program
    a rank failed, others were stopped          as above
    a node without a report                     crashed if its agent was killed, else interrupted
"""

import json
import math
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, NamedTuple, get_args

from harness.engine.evidence import (
    Place,
    fault_words,
    find_chain,
    find_mismatch,
    find_missing,
    kernel_words,
    last_place,
    odd_one,
    rank_names,
    tail_of,
)
from harness.engine.machine import no_process
from harness.errors import cut
from harness.recorder import UNRECORDED
from harness.recorder.session import failures_of
from harness.records import (
    CollectiveFault,
    Ending,
    Json,
    Passed,
    RankExit,
    RankRecords,
    RecordError,
    RunOutcome,
    RunSpec,
    What,
)
from harness.store.files import read_plain
from harness.store.streams import rank_path, read_ranks

OUTSIDE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU}
)
"""Signals that come from outside of the program: a person, a scheduler, the kernel."""
MESSAGE_CHARS = 500
STARTED = "processes that it started itself, in which nothing is recorded"
LOG_FILE = "job.log"
"""What srun and the agents print."""
NOT_THE_KERNEL = (
    "the kernel killed nothing for want of memory, so somebody did: --resume makes the run again"
)
_SPEAKING: tuple[What, ...] = (
    "race", "stale_address", "stale_guards", "capture_refused", "unsupported",
)  # fmt: skip
"""Answers that say what the type of the exception would; its words begin with the cause."""
_WAITING = {
    "torch/distributed/": "", "fsdp_core/parallel/mesh.py": "", "fsdp_core/fsdp/layout.py": "",
    "harness/worker/main.py": "_agree",
}  # fmt: skip
"""Files in which a rank waits for the others, of one of them a function alone."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_PASSED: dict[str, Passed] = {each: each for each in get_args(Passed)}
_COUNTERS = Path("/proc/vmstat")
_OF_THE_MACHINE = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "LAUNCH_FAILED")
_OUT_OF_MEMORY = re.compile(r"error:.*(oom_kill event|: out of memory)", re.IGNORECASE)
_END_OF_STEP = re.compile(r"\*\*\* STEP .*CANCELLED")
_END_OF_TASK = re.compile(r"srun: error: \S+: tasks? ")
_SAYS_WHY = re.compile(r"error|^(\d+: )?harness: ", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known of one rank: exit state, records, the end of what it printed, its place."""

    exit: RankExit
    records: RankRecords
    stderr_tail: str = ""
    place: Place | None = None

    @property
    def rank(self) -> int:
        return self.exit.rank

    @property
    def last_step(self) -> int:
        """Highest step on record, -1 before the first."""
        return max((step.step for step in self.records.steps), default=-1)

    @property
    def still_running(self) -> bool:
        return self.exit.killed_by_harness

    @property
    def silent(self) -> bool:
        return self.exit.code != 0 and not self.still_running and self.records.error is None

    @property
    def left_early(self) -> bool:
        return self.exit.code == 0 and self.records.end is None and self.records.error is None

    @property
    def failures(self) -> frozenset[str]:
        """What its exception means, or what it printed as it died."""
        if (error := self.records.error) is not None:
            return failures_of(error.type, error.message)
        return failures_of("", self.stderr_tail)

    @property
    def module(self) -> str:
        return "" if self.place is None else self.place.module

    @property
    def stack(self) -> list[tuple[str, str, str]]:
        """File, line and name of each frame of the thread that answered, innermost first."""
        _, found, printed = self.stderr_tail.rpartition("Current thread 0x")
        own = printed.partition("\n\n")[0].partition("\nThread 0x")[0]
        return _FRAME.findall(own) if found else []

    @property
    def is_waiting(self) -> bool:
        """Whether a frame of its stack is one in which a rank waits for the others."""
        frames = ((path, name) for path, _, name in self.stack)
        places = _WAITING.items()
        return any(at in path and name.endswith(f) for path, name in frames for at, f in places)

    @property
    def inside(self) -> str:
        """The innermost frame of its stack in words, without the folder; none of the recorder."""
        frames = (each for each in self.stack if "/harness/recorder/" not in each[0])
        return next((f" in {name} ({PurePath(p).name}:{n})" for p, n, name in frames), "")

    @property
    def where(self) -> str:
        if self.last_step >= 0:
            return f"after step {self.last_step}"
        return f"before its first {'record' if self.records.start is None else 'step'}"

    @property
    def where_now(self) -> str:
        """Where a rank was that still ran: by its answer, if it gave one; its innermost frame, or
        the collective in which it waited."""
        place, where, inside = self.place, self.where, self.inside
        if place is not None and place.is_inside and place.operator:
            inside = f" in {place.last.as_entered}"
        if place is not None and (place.phase or place.at):
            where = f"in step {place.step}" if place.step >= 0 else "before its first step"
            where += f", {place.phase}" if place.phase else ""
            where += f" of {place.module}" if place.phase and place.module else ""
            where += f" at {place.at}" if place.at else ""
            if place.at and place.at.partition(" ")[0] in inside:
                return where  # both say the same line
        joins = any("/multiprocessing/" in path and name == "join" for path, _, name in self.stack)
        return f"{where}{inside}" + (f", waiting for {STARTED}" if joins else "")

    @property
    def left(self) -> str:
        """How it left, of one that exited with 0."""
        end = " before its end record" if self.left_early else ""
        return f"rank {self.rank} exited with code 0{end} {self.where}"


Ranks = Sequence[RankEvidence]


class Answer(NamedTuple):
    """What happened, one sentence, the rank that failed first, why ranks waited in vain."""

    what: What
    message: str
    culprit: int | None
    fault: CollectiveFault | None = None


def ending_of(answer: Answer, ranks: Ranks, *, machine: str = "") -> Ending | None:
    """The answer's evidence in fields; None if nothing happened. `machine`: which failure of the
    machine the engine saw."""
    if not answer.what:
        return None
    rank = next((r for r in ranks if r.rank == answer.culprit), None)
    if rank is None:
        return Ending(collective=answer.fault, machine=machine)
    error, code = rank.records.error, rank.exit.code
    if error is None:
        killed = code is not None and code < 0 and not rank.still_running
        return Ending(
            signal=signal_name(-(code or 0)) if killed else "", module=rank.module,
            phase=_PASSED.get(rank.place.phase, "") if rank.place is not None else "",
            collective=answer.fault, machine=machine or no_process(rank.exit.errno),
        )  # fmt: skip
    return Ending(
        exception=error.type, raised_at=error.raised_at, phase=error.phase, module=error.module,
        tensor=next(iter(error.tensors), ""), collective=answer.fault, machine=machine,
    )  # fmt: skip


# --- of the ranks -----------------------------------------------------------------------------


def classify(ranks: Ranks, *, waited: str = "", steps: int | None = None) -> Answer:
    """Say what happened to a run. `what` is empty if every rank exited with 0 and said no error.

    The harness ended the ranks left after it had `waited`, in words; "" if it did not end them for
    that. Each rank was to take `steps`, where that is set.
    """
    ordered = sorted(ranks, key=lambda r: (_failed_at(r), r.rank))
    if (culprit := culprit_of(ordered)) is not None:
        return _blame(culprit, ordered)
    if (left := _left_behind(ordered)) is not None:
        return left
    running = [r for r in ordered if r.still_running]
    victims = [r for r in ordered if r.records.error is not None]
    if running and all(r.records.end and r.records.error is None for r in ranks):
        waited += "; " if waited else ""
        waited += "every rank has recorded its end, and not every process exits"
    if not running and not victims:
        return _late(ordered, waited) if waited else Answer("", "", None)
    if (gone := next((r for r in ordered if _left_too_early(r, steps)), None)) is not None:
        return _gone(gone, running, victims, waited)
    if running and (waited or victims):
        return _hang(running, victims, waited)
    for_nothing = f"{_names(running)} ended by the harness for no reason on record"
    return _blame(victims[0], ordered) if victims else Answer("interrupted", for_nothing, None)


def _late(ranks: Ranks, waited: str) -> Answer:
    """Time was up, and every rank came to its end before it was killed: a request for stacks is a
    signal, which ends a wait in C."""
    places = ", ".join(f"rank {r.rank}{r.inside}" for r in ranks)
    hung = _hung(ranks)
    culprit = None if hung is None else hung.rank
    return Answer("hang", f"{waited}: {places}; then every rank came to its end", culprit)


def _left_too_early(rank: RankEvidence, steps: int | None) -> bool:
    end = rank.records.end
    is_short = end is not None and rank.exit.code == 0 and end.steps < (steps or 0)
    return rank.left_early or is_short


def _gone(gone: RankEvidence, running: Ranks, victims: Ranks, waited: str) -> Answer:
    """A rank left too early: the others waited for it, or failed as it was gone."""
    # One that failed may linger in the clean-up of its groups, until it is ended.
    how = [gone.left, *([f"then {_names(victims)} failed"] if victims else [])]
    how += [f"{_names(running)} ended by the harness"] if running else []
    if victims:
        return Answer("crashed", "; ".join(how), gone.rank)
    if waited:
        return Answer("hang", "; ".join([*how, waited]), gone.rank)
    # As where the others had the time to end: the steps that it left out are what is wrong.
    how[0] += f": step {gone.last_step + 1} is missing"
    return Answer("missing_step", "; ".join(how), gone.rank)


def _failed_at(rank: RankEvidence) -> float:
    return math.inf if rank.exit.failed_at is None else rank.exit.failed_at


def culprit_of(ranks: Ranks) -> RankEvidence | None:
    """The first rank to fail by itself; None if those that failed did so because others left."""
    ordered = sorted(ranks, key=lambda r: (_failed_at(r), r.rank))
    silent = [r for r in ordered if r.silent]
    first_s = min(map(_failed_at, silent), default=math.inf)

    def is_own(r: RankEvidence) -> bool:
        error = r.records.error
        if error is None or error.blames not in (None, error.rank):
            return False
        lost = error.what == "hang" or "peer_lost" in r.failures
        follows = lost or first_s < _failed_at(r)
        return not (follows and error.what in ("", "crashed", "hang"))

    return next(iter([r for r in ordered if is_own(r)] + silent), None)


def _blame(culprit: RankEvidence, ranks: Ranks) -> Answer:
    what, how = _how(culprit)
    if culprit.failures & {"mismatched", "peer_lost"}:
        # Whose process gloo ends, or who gave up first, says nothing of who was wrong.
        places = _places(ranks)
        fault = find_missing(places) or find_mismatch(places)
        if fault is not None and culprit.rank in (*fault.ranks, *fault.others):
            return _in_vain(what, fault, how, culprit.rank)
    others = [r for r in ranks if r.rank != culprit.rank]
    if lost := [r for r in others if r.records.error is not None or r.silent]:
        how += f"; then {_names(lost)} failed too"
    if ended := [r for r in others if r.still_running]:
        how += f"; {_names(ended)} ended by the harness"
    return Answer(what, how, culprit.rank)


def _how(rank: RankEvidence) -> tuple[What, str]:
    """What ended this rank, and one clause that says so."""
    error, code, name = rank.records.error, rank.exit.code, f"rank {rank.rank}"
    if error is not None:
        said = _line(error.message, 0)
        if error.type and error.what not in _SPEAKING:
            said = f"{error.type}: {said}"
        when = f"at step {error.step}" if error.step >= 0 else "before its first step"
        return error.what or "crashed", f"{name} {when}: {said}"
    if code is None:
        return "not_run", f"{name} could not be started: {_line(rank.stderr_tail, 0)}"
    if code == UNRECORDED and rank.records.end is None:
        return "interrupted", f"{name} could not write its records: no space left on the disk"
    return _how_silent(rank, code, name)


def _how_silent(rank: RankEvidence, code: int, name: str) -> tuple[What, str]:
    how = f"{name} died by {signal_name(-code)}" if code < 0 else f"{name} exited with code {code}"
    how += f" {rank.where}" + (f" in module {rank.module}" if rank.module else "")
    if "illegal_access" in rank.failures:
        return "illegal_access", f"{how}: CUDA illegal memory access"
    if "out_of_memory" in rank.failures:
        return "oom", f"{how}: CUDA out of memory"
    if -code in OUTSIDE_SIGNALS:
        return "killed", f"{how}, not sent by the harness"
    if code < 0:
        return "crashed", f"{how}{rank.inside}"
    last = _line(rank.stderr_tail, -1)
    return "crashed", f"{how}: {last}" if last else how


def _hang(running: Ranks, victims: Ranks, waited: str) -> Answer:
    by_rank = sorted(running, key=lambda r: r.rank)
    message = f"still running: {', '.join(f'rank {r.rank} {r.where_now}' for r in by_rank)}"
    if waited:
        message = f"{waited}; {message}"
    elif (error := victims[0].records.error) is not None:
        message += f"; rank {victims[0].rank} waited and gave up: {_line(error.message, 0)}"
    stopped = [r for r in by_rank if r.exit.is_stopped]
    if stopped:
        message = f"SIGSTOP or a debugger holds {_names(stopped)}; {message}"
    # Victims, too, say where they were: they gave up there.
    places = _places((*running, *victims))
    fault = find_missing(places) or find_mismatch(places)
    if fault is not None:
        return _in_vain("hang", fault, message, stopped[0].rank if stopped else None)
    if not stopped and (chain := find_chain(places)) is not None:
        return Answer("hang", f"{chain.words}; {message}", chain.end, chain.fault)
    hung = stopped[0] if stopped else _hung(running)
    if hung is not None and len(running) + len(victims) > 1:
        message = f"the others waited for rank {hung.rank}, {hung.where_now}; {message}"
    return Answer("hang", message, None if hung is None else hung.rank)


def _left_behind(ranks: Ranks) -> Answer | None:
    """Ranks that ended with 0 while others waited for them in a collective; None if none did."""
    gone = {r.rank: r for r in ranks if r.exit.code == 0 and r.records.error is None}
    if len(gone) == len(ranks) and not any(r.left_early for r in ranks):
        return None  # all came to their end: nobody waits
    missing = find_missing(_places(ranks))
    if missing is None or not set(missing.ranks) <= set(gone):
        return None
    first = gone[missing.ranks[0]]
    return _in_vain("hang", missing, first.left, first.rank)


def _in_vain(what: What, fault: CollectiveFault, more: str, otherwise: int | None) -> Answer:
    """With the rank at fault, or `otherwise` if two sides may be."""
    odd = odd_one(fault)
    culprit = otherwise if odd is None else odd
    return Answer(what, f"{fault_words(fault)}; {more}", culprit, fault)


def _places(ranks: Ranks) -> dict[int, Place]:
    """Where ranks are; those that gave up waiting are still in what they waited for."""
    found = {}
    for r in ranks:
        place = r.place
        if place is None or not (place.operator or place.entered or place.phase or place.at):
            continue  # it has noted a module at most
        lost = r.records.error is not None and "peer_lost" in r.failures
        gave_up = lost and not place.message
        found[r.rank] = replace(place, is_inside=bool(place.operator)) if gave_up else place
    return found


def _hung(running: Ranks) -> RankEvidence | None:
    """The one rank that the others waited for, if the evidence singles it out."""
    behind = [r for r in running if r.last_step == min(each.last_step for each in running)]
    if len(behind) == 1:
        return behind[0]
    waiting = [r for r in running if r.is_waiting]
    elsewhere = [r for r in running if r.stack and not r.is_waiting]
    alone = waiting and len(elsewhere) == 1 and len(waiting) + 1 == len(running)
    return elsewhere[0] if alone else None


def signal_name(number: int) -> str:
    """SIGKILL for 9; 'signal 77' for a number without a name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _names(ranks: Ranks) -> str:
    return rank_names(sorted(r.rank for r in ranks))


def _line(text: str, index: int) -> str:
    lines = [cut(line.strip(), MESSAGE_CHARS) for line in text.splitlines() if line.strip()]
    return lines[index] if lines else ""


# --- of a run on one or more nodes ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NodeReport(Json):
    """What became of the ranks of one node of a step, or of a local run."""

    exits: tuple[RankExit, ...]
    started_unix_s: float
    job: str = ""  # name of the step
    node: int = 0  # of the step
    record_bytes: dict[str, int] = field(default_factory=dict)  # of each rank's file
    waited: str = ""  # why ranks that still ran were ended, in words
    was_stopped: bool = False  # SIGTERM ended ranks
    problem: str = ""  # why output was lost
    wall_s: float = 0.0
    memory_kills: int | None = None  # by the kernel meanwhile, None if that is not known


Reports = Mapping[int, NodeReport]
"""Of a run, by node."""


class Word(NamedTuple):
    """What Slurm says."""

    state: str = ""  # how the allocation ended, "" while it lives
    text: str = ""
    killed_by: int = 0  # the signal that killed an agent


NO_WORD = Word()


def report_path(node: int) -> Path:
    """Name of a node's report in the run folder."""
    return Path(f"node{node}.json")


def read_reports(folder: Path, job: str, num_nodes: int) -> dict[int, NodeReport]:
    """Reports of a step, by node; those of other steps do not count."""
    look_again(folder)
    found: dict[int, NodeReport] = {}
    for node in range(num_nodes):
        with suppress(OSError, ValueError, RecordError, RecursionError):
            report = NodeReport.from_json(json.loads(read_plain(folder / report_path(node))))
            if (report.job, report.node) == (job, node):
                found[node] = report
    return found


def look_again(folder: Path) -> None:
    """Have a file system that caches names ask its server again: opening a folder does."""
    with suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))


def size_of(path: Path) -> int:
    """Bytes of a file, 0 if there is none; opened, as NFS asks the server again for that."""
    try:
        with path.open("rb") as file:
            return file.seek(0, os.SEEK_END)
    except OSError:
        return 0


def not_yet_visible(folder: Path, reports: Reports) -> str:
    """The first record file that is not as long as its node says, in words; "" if all are.

    A file that is whole on one node may be short on another for a while, by the caches of NFS.
    """
    look_again(folder)
    for node, report in sorted(reports.items()):
        for rank, there in report.record_bytes.items():
            if (here := size_of(rank_path(folder, int(rank)))) < there:
                records = f"the records of rank {rank} on node {node}"
                return f"{records} have {there} bytes there, {here} here"
    return ""


def needs_word(reports: Iterable[NodeReport]) -> bool:
    """Whether it is open what Slurm had to do with the end of the run: it stopped ranks that were
    still running, or may be who killed one (for the memory it used)."""
    return any(
        report.was_stopped
        or any(e.code == -signal.SIGKILL and not e.killed_by_harness for e in report.exits)
        for report in reports
    )


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
        )
        for records in read_ranks(folder, spec.world_size)
    ]
    word = _completed(folder, word, is_anyone_heard=bool(reports))
    answer = _answer(spec, reports, ranks, num_nodes, word)
    what, message, culprit, _ = answer
    if what == "illegal_access" and culprit is not None:
        words = kernel_words(ranks[culprit].stderr_tail, folder, culprit)
        message += f"; {words}" if words else ""
    if problem := next((report.problem for report in known if report.problem), ""):
        message = f"{message}; output lost: {problem}".removeprefix("; ")
    is_machine = what == "interrupted" and word.state in _OF_THE_MACHINE
    outcome = RunOutcome(
        key=spec.key, what=what, message=message, culprit_rank=culprit,
        ranks=tuple(rank.exit for rank in ranks),
        started_unix_s=min((report.started_unix_s for report in known), default=0.0),
        wall_s=max((report.wall_s for report in known), default=0.0), attempt=attempt,
        ending=ending_of(answer, ranks, machine="node_failure" if is_machine else ""),
    )  # fmt: skip
    there = (r for r in known if any(each.rank == culprit for each in r.exits))
    return with_sender(outcome, next((report.memory_kills for report in there), None))


def _answer(
    spec: RunSpec, reports: Reports, ranks: Ranks, num_nodes: int, word: Word
) -> Answer:  # fmt: skip
    """The second table of the module's docstring."""
    all_of = reports.values()
    known = [rank for rank in ranks if rank.exit.code is not None]
    waited = next((report.waited for report in all_of if report.waited), "")
    steps = spec.config.get("steps")
    steps = steps if isinstance(steps, int) and spec.soak is None else None
    absent = [str(node) for node in range(num_nodes) if node not in reports]
    silent = f"node{'s' * (len(absent) > 1)} {', '.join(absent)} left no report"
    if not absent and not needs_word(all_of):
        answer = classify(ranks, waited=waited, steps=steps)
    elif word.state == "OUT_OF_MEMORY":
        killed = [rank.rank for rank in ranks if rank.exit.code == -9 and not rank.still_running]
        answer = Answer("oom", word.text, killed[0] if len(killed) == 1 else None)
    elif word.state:
        answer = Answer("interrupted", word.text, None)
    elif absent and culprit_of(known) is not None:
        # The rest is collateral: an agent that is told to stop before it has forked its ranks has
        # nothing to report.
        answer = classify(known, waited=waited, steps=steps)
        answer = answer._replace(message=f"{answer.message}; {silent}")
    elif absent:
        # What a rank does can get its agent killed, not make the agent leave without a report.
        began = any(rank.records.start for rank in ranks)
        what: What = "crashed" if began and word.killed_by in (6, 7, 9, 11, 15) else "interrupted"
        answer = Answer(what, f"{silent}; {word.text}", None)
    else:
        answer = classify(ranks, waited=waited, steps=steps)
        if answer.what in ("", "interrupted"):
            answer = answer._replace(message=word.text, culprit=None)
    return answer


def _completed(folder: Path, word: Word, *, is_anyone_heard: bool) -> Word:
    """Slurm's word, with the end of a step whose job lives, and the line of the log that says most.

    srun ends a step because a task failed: it speaks of that task first, and asks the agents to
    stop, which then report. Where somebody else cancels a step, Slurm may kill all agents at once,
    and word of their ends may overtake its word on the step.
    """
    log, state = tail_of(folder / LOG_FILE), word.state
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ends = [line for line in lines if _END_OF_STEP.search(line) or _END_OF_TASK.match(line)]
    slurm = [line for line in ends if not _END_OF_TASK.match(line)]
    if not state and _OUT_OF_MEMORY.search(log):
        state = "OUT_OF_MEMORY"
    elif not state and slurm and (slurm[0] == ends[0] or not is_anyone_heard):
        state = "CANCELLED"
    text = word.text or f"the step ended ({state or 'Slurm says no more'})"
    said = next(iter(slurm or [line for line in lines if _SAYS_WHY.search(line)][-1:]), "")
    return Word(state, f"{text}; {LOG_FILE}: {said[:300]}" if said else text, word.killed_by)


# --- who sent a SIGKILL: the kernel counts its own, of every cgroup, before it sends them ---------


def num_memory_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it started; None: not known."""
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", _COUNTERS.read_text("ascii"), re.MULTILINE):
            return int(found[1])
    return None


def memory_kills_since(before: int | None) -> int | None:
    """What the kernel has killed since then; None: not known."""
    now = num_memory_kills()
    return None if before is None or now is None else now - before


def with_sender(outcome: RunOutcome, kills: int | None) -> RunOutcome:
    """The outcome, and of one that a SIGKILL brought about who sent that, as far as it is known.

    `kills`: what the kernel killed for want of memory where and while it ran; None: not known.
    """
    # Without a culprit it was the leader of the ranks that died.
    codes = [state.code for state in outcome.ranks if state.rank == outcome.culprit_rank]
    if outcome.what != "killed" or codes not in ([], [-signal.SIGKILL]) or kills is None:
        return outcome
    words = f"the kernel killed {kills} for want of memory meanwhile" if kills else NOT_THE_KERNEL
    return replace(outcome, message=f"{outcome.message}; {words}", from_outside=not kills)


# --- who failed first, in the run's store -----------------------------------------------------

_KEY = "first failure"


class FirstFailure(NamedTuple):
    """A rank, and what became of it in words."""

    rank: int
    told: str


def claim(store: Any, failure: FirstFailure) -> None:
    """Write it, if nothing was written before; a store that is gone, or is none, is left alone."""
    if hasattr(store, "compare_set"):
        with suppress(RuntimeError):
            store.compare_set(_KEY, "", json.dumps([failure.rank, failure.told[:MESSAGE_CHARS]]))


def find(store: Any, patience: timedelta) -> FirstFailure | None:
    """What was written, or is within `patience`; None if nothing is, or there is no store."""
    if store is not None:
        with suppress(RuntimeError, ValueError):
            store.wait([_KEY], patience)
            return FirstFailure(*json.loads(store.get(_KEY)))
    return None
