"""From exit states, records and stderr to one answer: what happened to a run, and whose fault.

    how a rank ended                              what
    its own error record                          as the rank classified it
    exit code `UNRECORDED`, no record of its end  interrupted (its records found no space)
    illegal-access or out-of-memory text, no record   illegal_access, oom
    SIGKILL, SIGTERM, ... not from the harness    killed
    any other signal, or a non-zero exit          crashed
    still running when the time was up            hang
    the same, but every rank has its end record   nothing: the program came to its end
    could not be forked                           not_run

One failing rank takes the others with it, so most of the evidence is collateral. A rank is a
*victim* if its record blames another, or only says that a peer went away or that it waited too long
for one; the culprit is the first rank to fail that is not a victim, else one that was still
running: the one with the fewest steps, else the only one whose stack does not wait in a collective.

A rank that failed by itself says so in the run's store before it exits; for one that was killed its
leader does. What the others see is a lost connection: they look there for the cause.

A SIGKILL does not say who sent it. The kernel counts its own before it sends them, those of every
cgroup, in `oom_kill` of /proc/vmstat (proc(5), since Linux 4.13): if that number is what it was
when the run began, somebody else sent the signal. In some sandboxes nothing is known.
"""

import json
import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any, NamedTuple, get_args

from harness.engine.collective_log import Fault, Place, find_mismatch, find_missing, rank_names
from harness.errors import cut
from harness.infrastructure import library_failures, no_process
from harness.recorder import UNRECORDED
from harness.recorder.session import failures_of
from harness.records import Ending, ErrorRecord, Passed, RankExit, RankRecords, RunOutcome, What

OUTSIDE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU}
)
"""Signals that come from outside of the program: a person, a scheduler, the kernel."""
MESSAGE_CHARS = 500
_SPEAKING: tuple[What, ...] = (
    "race", "stale_address", "stale_guards", "capture_refused", "unsupported",
)  # fmt: skip
"""Answers that say what the type of the exception would; its words begin with the cause."""
WAITING_PLACES = (
    "torch/distributed/", "fsdp_core/parallel/collectives.py", "fsdp_core/fsdp/collectives.py",
    "harness/worker/soak.py",
)  # fmt: skip
"""Files in which a rank waits for the others."""
_STACK_HEAD = "Current thread 0x"
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_PASSED: dict[str, Passed] = {each: each for each in get_args(Passed)}


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known of one rank: exit state, records, the end of what it printed.

    `place` is the collective that it entered last, `module` what it ran; both as far as known.
    """

    exit: RankExit
    records: RankRecords
    stderr_tail: str = ""
    place: Place | None = None
    module: str = ""

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.exit.rank

    @property
    def last_step(self) -> int | None:
        """Highest step on record, None before the first."""
        return max((step.step for step in self.records.steps), default=None)

    @property
    def still_running(self) -> bool:
        """Whether the harness had to end it."""
        return self.exit.killed_by_harness

    @property
    def silent(self) -> bool:
        """Whether it failed by itself and left no error record."""
        return self.exit.code != 0 and not self.still_running and self.records.error is None

    @property
    def left_early(self) -> bool:
        """Whether it exited with 0 without an end record."""
        return self.exit.code == 0 and self.records.end is None and self.records.error is None

    @property
    def failures(self) -> frozenset[str]:
        """What its exception means, or what it printed as it died."""
        error = self.records.error
        return failures_of("", self.stderr_tail) if error is None else library_failures(error)

    @property
    def stack(self) -> tuple[str, ...]:
        """Frames of the last stack that faulthandler printed, innermost first: 'where (file:line)'.

        The harness asks for it before it ends a rank, so its format is known.
        """
        _, found, printed = self.stderr_tail.rpartition(_STACK_HEAD)
        # Threads are apart by an empty line; only the first one answered the signal.
        own = printed.partition("\n\n")[0].partition("\nThread 0x")[0] if found else ""
        return tuple(f"{name} ({path}:{line})" for path, line, name in _FRAME.findall(own))

    @property
    def inside(self) -> str:
        """The innermost frame of its stack in words, without the folder."""
        name, _, place = (*self.stack, "")[0].partition(" (")
        return f" in {name} ({PurePath(place).name}" if name else ""

    @property
    def where(self) -> str:
        """How far it came, by its records."""
        if self.last_step is not None:
            return f"after step {self.last_step}"
        return f"before its first {'record' if self.records.start is None else 'step'}"

    @property
    def where_now(self) -> str:
        """The same of a rank that was still running: by its answer, where it gave one."""
        place = self.place
        if place is None or not (place.phase or place.at):
            return self.where
        step = f"in step {place.step}" if place.step >= 0 else "before its first step"
        module = f" of {place.module}" if place.module else ""
        phase = f", {place.phase}{module}" if place.phase else ""
        return f"{step}{phase}" + (f" at {place.at}" if place.at else "")

    @property
    def left(self) -> str:
        """How it left, of one that exited with 0."""
        if self.left_early and self.records.start is None:
            return f"rank {self.rank} exited with code 0 before its end record: it recorded nothing"
        end = " before its end record" if self.left_early else ""
        return f"rank {self.rank} exited with code 0{end} {self.where}"


Ranks = Sequence[RankEvidence]


class Answer(NamedTuple):
    """What happened, one sentence, the rank that failed first, why ranks waited in vain."""

    what: What
    message: str
    culprit: int | None
    fault: Fault | None = None


def ending_of(answer: Answer, ranks: Ranks, *, machine: str = "") -> Ending | None:
    """The answer's evidence in fields; None if nothing happened.

    Args:
        machine: name of a failure of the machine that the engine saw.
    """
    if not answer.what:
        return None
    fault = None if answer.fault is None else answer.fault.record
    rank = next((r for r in ranks if r.rank == answer.culprit), None)
    if rank is None:
        return Ending(collective=fault, machine=machine)
    error, code = rank.records.error, rank.exit.code
    if error is None:
        killed = code is not None and code < 0 and not rank.still_running
        phase = rank.place.phase if rank.place is not None else ""
        return Ending(
            signal=signal_name(-code) if code is not None and killed else "",
            phase=_PASSED.get(phase, ""), module=rank.module, collective=fault,
            machine=machine or no_process(rank.exit.errno),
        )  # fmt: skip
    return Ending(
        exception=error.type, raised_at=error.raised_at, phase=error.phase, module=error.module,
        tensor=next(iter(error.tensors), ""), collective=fault, machine=machine,
    )  # fmt: skip


def classify(
    ranks: Ranks, *, timed_out: bool, timeout_s: float, failed_order: Sequence[int] = (),
    stalled_s: float | None = None, steps: int | None = None,
) -> Answer:  # fmt: skip
    """Say what happened to a run. `what` is empty if every rank exited with 0 and said no error.

    Args:
        ranks: evidence of every rank.
        timed_out: whether the harness ended the run because its time was up.
        timeout_s: the time it had, in seconds.
        failed_order: ranks that failed, in the order in which the harness saw them end.
        stalled_s: seconds without a record for which the harness ended it; None if it did not.
        steps: that every rank was to take; None where nobody said.
    """
    place, ordered = _in_order(ranks, failed_order)
    running = [r for r in ordered if r.still_running]
    if (culprit := _culprit(ordered, place)) is not None:
        return _blame(culprit, ordered)
    victims = [r for r in ordered if r.records.error is not None]
    if (left := _left_behind(ordered)) is not None:
        return left
    stays = bool(running) and all(r.records.end and r.records.error is None for r in ranks)
    if running and (timed_out or stalled_s is not None or victims or stays):
        waited = f"time was up after {timeout_s:g} s" if timed_out else ""
        if stalled_s is not None:
            waited = f"no rank recorded anything for {stalled_s:g} s"
        if stays:
            waited = "every rank has recorded its end, and not every process exits"
        return _hang(running, victims, waited=waited)
    if victims:
        return _blame_victims(victims, ordered, steps)
    return _ended_by_harness(running, ordered) if running else Answer("", "", None)


def culprit_of(ranks: Ranks, failed_order: Sequence[int] = ()) -> int | None:
    """The first rank to fail by itself; None if those that failed did so because others left."""
    place, ordered = _in_order(ranks, failed_order)
    culprit = _culprit(ordered, place)
    return None if culprit is None else culprit.rank


def _in_order(
    ranks: Ranks, failed_order: Sequence[int]
) -> tuple[dict[int, int], list[RankEvidence]]:
    """The place of each rank that failed, and all of them in that order."""
    place = {rank: i for i, rank in enumerate(failed_order)}
    return place, sorted(ranks, key=lambda r: (place.get(r.rank, len(place)), r.rank))


def _culprit(ordered: Ranks, place: dict[int, int]) -> RankEvidence | None:
    """The first rank to fail by itself, victims aside."""
    silent = [r for r in ordered if r.silent]
    first = min((place.get(r.rank, len(place)) for r in silent), default=len(place) + 1)

    def is_own(r: RankEvidence) -> bool:
        error = r.records.error
        return error is not None and not _is_victim(error, place.get(r.rank, len(place)), first)

    return next(iter([r for r in ordered if is_own(r)] + silent), None)


def _is_victim(error: ErrorRecord, place: int, first_silent: int) -> bool:
    if error.blames not in (None, error.rank):
        return True
    if error.what not in ("", "crashed", "hang"):
        return False
    lost = error.what == "hang" or "peer_lost" in library_failures(error)
    return lost or first_silent < place


def _blame(culprit: RankEvidence, ranks: Ranks) -> Answer:
    what, how = _how(culprit)
    mismatch = find_mismatch(_places(ranks)) if "mismatched" in culprit.failures else None
    if mismatch is not None and culprit.rank in (*mismatch.ranks, *mismatch.others):
        # Whose process gloo ends says nothing of who was wrong.
        at_fault = culprit.rank if mismatch.odd_one is None else mismatch.odd_one
        return Answer(what, f"{mismatch}; {how}", at_fault, mismatch)
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
        told = _line(error.message, 0)
        if error.type and error.what not in _SPEAKING:
            told = f"{error.type}: {told}"
        when = f"at step {error.step}" if error.step >= 0 else "before its first step"
        return error.what or "crashed", f"{name} {when}: {told}"
    if code is None:
        return "not_run", f"{name} could not be started: {_line(rank.stderr_tail, 0)}"
    if code == UNRECORDED and rank.records.end is None:
        return "interrupted", f"{name} could not write its records: no space left on the disk"
    return _how_silent(rank, code)


def _how_silent(rank: RankEvidence, code: int) -> tuple[What, str]:
    """The same of a rank that left no error record: its exit code and what it printed."""
    verb = f"died by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
    module = f" in module {rank.module}" if rank.module else ""
    how = f"rank {rank.rank} {verb} {rank.where}{module}"
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


def _hang(running: Ranks, victims: Ranks, *, waited: str) -> Answer:
    by_rank = sorted(running, key=lambda r: r.rank)
    where = ", ".join(f"rank {r.rank} {r.where_now}{r.inside}" for r in by_rank)
    message = f"still running: {where}"
    if waited:
        message = f"{waited}; {message}"
    else:
        error = victims[0].records.error
        told = _line(error.message, 0) if error is not None else ""
        message += f"; rank {victims[0].rank} waited and gave up: {told}"
    # Victims, too, say where they were: they gave up there.
    places = _places((*running, *victims))
    if (fault := find_missing(places) or find_mismatch(places)) is not None:
        return Answer("hang", f"{fault}; {message}", fault.odd_one, fault)
    hung = _hung(running)
    if hung is None or len(running) + len(victims) == 1:
        return Answer("hang", message, None if hung is None else hung.rank)
    told = f"the others waited for rank {hung.rank}, {hung.where_now}{hung.inside}"
    return Answer("hang", f"{told}; {message}", hung.rank)


def _ended_by_harness(running: Ranks, ranks: Ranks) -> Answer:
    """Ranks that went on after one had left; any other reason would be on record."""
    names = _names(running)
    if (left := next((r for r in ranks if r.left_early), None)) is not None:
        # As where the others had the time to end: the steps that it left out are what is wrong.
        missing = 0 if left.last_step is None else left.last_step + 1
        told = f"{left.left}: step {missing} is missing; {names} ended by the harness"
        return Answer("missing_step", told, left.rank)
    return Answer("interrupted", f"the harness ended {names} for no reason on record", None)


def _left_behind(ranks: Ranks) -> Answer | None:
    """Ranks that ended with 0 while others waited for them in a collective; None if none did."""
    gone = {r.rank: r for r in ranks if r.exit.code == 0 and r.records.error is None}
    if len(gone) == len(ranks) and not any(r.left_early for r in ranks):
        return None  # all came to their end: nobody waits
    missing = find_missing(_places(ranks))
    if missing is None or not set(missing.ranks) <= set(gone):
        return None
    first = gone[missing.ranks[0]]
    return Answer("hang", f"{missing}; {first.left}", first.rank, missing)


def _places(ranks: Ranks) -> dict[int, Place]:
    """Where ranks are; those that gave up waiting are still in what they waited for."""
    found = {r.rank: r.place for r in ranks if r.place is not None}
    for r in ranks:
        if r.rank in found and r.records.error is not None and "peer_lost" in r.failures:
            found[r.rank] = replace(found[r.rank], is_inside=bool(found[r.rank].operator))
    return found


def _hung(running: Ranks) -> RankEvidence | None:
    """The one rank that the others waited for, if the evidence singles it out."""
    steps = [-1 if r.last_step is None else r.last_step for r in running]
    behind = [r for r, step in zip(running, steps, strict=True) if step == min(steps)]
    if len(behind) == 1:
        return behind[0]
    waiting = [r for r in running if any(p in frame for p in WAITING_PLACES for frame in r.stack)]
    elsewhere = [r for r in running if r.stack and r not in waiting]
    all_known = len(waiting) + len(elsewhere) == len(running)
    return elsewhere[0] if waiting and all_known and len(elsewhere) == 1 else None


def _blame_victims(victims: Ranks, ranks: Ranks, steps: int | None) -> Answer:
    """All that failed say that a peer went away: look for one that left, else take the first."""
    left = next((r for r in ranks if r.left_early), None)
    if left is None and steps is not None:
        ends = ((r, r.records.end) for r in ranks if r.exit.code == 0)
        left = next((r for r, end in ends if end is not None and end.steps < steps), None)
    if left is not None:
        return Answer("crashed", f"{left.left}; then {_names(victims)} failed", left.rank)
    return _blame(victims[0], ranks)


def signal_name(number: int) -> str:
    """SIGKILL for 9; 'signal 77' for a number without a name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _names(ranks: Ranks) -> str:
    return rank_names(sorted(r.rank for r in ranks))


def _line(text: str, index: int) -> str:
    """One of the lines that are not empty, "" if there is none."""
    lines = [cut(line.strip(), MESSAGE_CHARS) for line in text.splitlines() if line.strip()]
    return lines[index] if lines else ""


# --- who sent a SIGKILL -----------------------------------------------------------------------

_COUNTERS = Path("/proc/vmstat")
NOT_THE_KERNEL = (
    "the kernel killed nothing for want of memory, so somebody did: --resume makes the run again"
)


def num_memory_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it started; None: not told."""
    try:
        lines = _COUNTERS.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def memory_kills_since(before: int | None) -> int | None:
    """What the kernel has killed since then; None: not told."""
    now = num_memory_kills()
    return None if before is None or now is None else now - before


def with_sender(outcome: RunOutcome, kills: int | None) -> RunOutcome:
    """The outcome, and of one that a SIGKILL brought about who sent that, as far as it is known.

    Args:
        outcome: of a run that has ended.
        kills: what the kernel killed for want of memory where and while it ran; None: not known.
    """
    # Without a culprit it was the leader of the ranks that died.
    codes = [state.code for state in outcome.ranks if state.rank == outcome.culprit_rank]
    if outcome.what != "killed" or codes not in ([], [-signal.SIGKILL]) or kills is None:
        return outcome
    words = f"the kernel killed {kills} for want of memory meanwhile" if kills else NOT_THE_KERNEL
    return replace(outcome, message=f"{outcome.message}; {words}", from_outside=not kills)


# --- who failed first, in the run's store -----------------------------------------------------

_KEY = "first failure"
_TOLD_CHARS = 500


class FirstFailure(NamedTuple):
    """The rank, and what became of it in words."""

    rank: int
    told: str


def claim(store: Any, failure: FirstFailure) -> None:
    """Write it, if nothing was written before; a store that is gone, or is none, is left alone."""
    if hasattr(store, "compare_set"):
        with suppress(RuntimeError):
            store.compare_set(_KEY, "", json.dumps([failure.rank, failure.told[:_TOLD_CHARS]]))


def find(store: Any, patience: timedelta) -> FirstFailure | None:
    """What was written, or is within `patience`; None if nothing is, or there is no store."""
    if store is not None:
        with suppress(RuntimeError, ValueError):
            store.wait([_KEY], patience)
            return FirstFailure(*json.loads(store.get(_KEY)))
    return None
