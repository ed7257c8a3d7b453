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

One failing rank takes the others with it. A rank is a *victim* if its record blames another, or
only says that a peer went away or that it waited too long for one; the culprit is the first rank to
fail that is not a victim, else one that was still running: the one with the fewest steps, else the
only one whose stack does not wait in a collective. A rank that failed by itself says so in the
run's store before it exits; for one that was killed its leader does.
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

from harness.engine import collective_log as log
from harness.engine.collective_log import Place
from harness.errors import cut
from harness.infrastructure import library_failures, no_process
from harness.recorder import UNRECORDED
from harness.recorder.session import failures_of
from harness.records import CollectiveFault, Ending, Passed, RankExit, RankRecords, RunOutcome, What

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
    "torch/distributed/", "fsdp_core/parallel/collectives.py", "fsdp_core/fsdp/layout.py",
    "harness/worker/soak.py",
)  # fmt: skip
"""Files in which a rank waits for the others."""
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_PASSED: dict[str, Passed] = {each: each for each in get_args(Passed)}


@dataclass(frozen=True, kw_only=True)
class RankEvidence:
    """What is known of one rank: exit state, records, the end of what it printed, the collective
    that it entered last, and the module that it was in."""

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
    def last_step(self) -> int:
        """Highest step on record, -1 before the first."""
        return max((step.step for step in self.records.steps), default=-1)

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
        """Frames of the thread that answered for a stack, innermost first: 'where (file:line)'."""
        _, found, printed = self.stderr_tail.rpartition("Current thread 0x")
        own = printed.partition("\n\n")[0].partition("\nThread 0x")[0] if found else ""
        return tuple(f"{name} ({path}:{line})" for path, line, name in _FRAME.findall(own))

    @property
    def where(self) -> str:
        """How far it came, by its records."""
        if self.last_step >= 0:
            return f"after step {self.last_step}"
        return f"before its first {'record' if self.records.start is None else 'step'}"

    @property
    def inside(self) -> str:
        """The innermost frame of its stack in words, without the folder."""
        name, _, place = (*self.stack, "")[0].partition(" (")
        return f" in {name} ({PurePath(place).name}" if name else ""

    @property
    def where_now(self) -> str:
        """Where a rank was that still ran: by its answer, if it gave one; its innermost frame."""
        place, where = self.place, self.where
        if place is not None and (place.phase or place.at):
            where = f"in step {place.step}" if place.step >= 0 else "before its first step"
            where += f", {place.phase}" if place.phase else ""
            where += f" of {place.module}" if place.phase and place.module else ""
            where += f" at {place.at}" if place.at else ""
        return f"{where}{self.inside}"

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


def classify(
    ranks: Ranks, *, timed_out: bool, timeout_s: float, failed_order: Sequence[int] = (),
    stalled_s: float | None = None, steps: int | None = None,
) -> Answer:  # fmt: skip
    """Say what happened to a run. `what` is empty if every rank exited with 0 and said no error.

    The harness saw ranks fail in `failed_order`, and ended the run as `timeout_s` were up if it
    `timed_out`, or after `stalled_s` without a record. Each was to take `steps`, where that is set.
    """
    ordered = sorted(ranks, key=lambda r: (_place(r, failed_order), r.rank))
    if (culprit := _culprit(ordered, failed_order)) is not None:
        return _blame(culprit, ordered)
    if (left := _left_behind(ordered)) is not None:
        return left
    running = [r for r in ordered if r.still_running]
    victims = [r for r in ordered if r.records.error is not None]
    waited = f"time was up after {timeout_s:g} s" if timed_out else ""
    if stalled_s is not None:
        waited = f"no rank recorded anything for {stalled_s:g} s"
    if running and all(r.records.end and r.records.error is None for r in ranks):
        waited = "every rank has recorded its end, and not every process exits"
    if running and (waited or victims):
        return _hang(running, victims, waited)
    return _gone(ordered, running, victims, steps)


def _gone(ordered: Ranks, running: Ranks, victims: Ranks, steps: int | None) -> Answer:
    """Nobody failed by itself or hung: who left too early, if anybody did."""
    gone = next((r for r in ordered if r.left_early), None)
    if victims:
        # All that failed say that a peer went away: one that left, else the first.
        ends = [(r, r.records.end) for r in ordered if r.exit.code == 0 and steps is not None]
        short = (r for r, end in ends if end is not None and end.steps < (steps or 0))
        gone = gone or next(short, None)
        if gone is None:
            return _blame(victims[0], ordered)
        return Answer("crashed", f"{gone.left}; then {_names(victims)} failed", gone.rank)
    if not running:
        return Answer("", "", None)
    ended = f"{_names(running)} ended by the harness"
    if gone is None:
        return Answer("interrupted", f"{ended} for no reason on record", None)
    # As where the others had the time to end: the steps that it left out are what is wrong.
    told = f"{gone.left}: step {gone.last_step + 1} is missing; {ended}"
    return Answer("missing_step", told, gone.rank)


def culprit_of(ranks: Ranks, failed_order: Sequence[int] = ()) -> int | None:
    """The first rank to fail by itself; None if those that failed did so because others left."""
    ordered = sorted(ranks, key=lambda r: (_place(r, failed_order), r.rank))
    culprit = _culprit(ordered, failed_order)
    return None if culprit is None else culprit.rank


def _place(rank: RankEvidence, failed_order: Sequence[int]) -> int:
    return failed_order.index(rank.rank) if rank.rank in failed_order else len(failed_order)


def _culprit(ordered: Ranks, failed_order: Sequence[int]) -> RankEvidence | None:
    """The first rank to fail by itself, victims aside."""
    silent = [r for r in ordered if r.silent]
    first = min((_place(r, failed_order) for r in silent), default=len(failed_order) + 1)

    def is_own(r: RankEvidence) -> bool:
        error = r.records.error
        if error is None or error.blames not in (None, error.rank):
            return False
        lost = error.what == "hang" or "peer_lost" in r.failures
        follows = lost or first < _place(r, failed_order)
        return not (follows and error.what in ("", "crashed", "hang"))

    return next(iter([r for r in ordered if is_own(r)] + silent), None)


def _blame(culprit: RankEvidence, ranks: Ranks) -> Answer:
    what, how = _how(culprit)
    mismatch = log.find_mismatch(_places(ranks)) if "mismatched" in culprit.failures else None
    if mismatch is not None and culprit.rank in (*mismatch.ranks, *mismatch.others):
        # Whose process gloo ends says nothing of who was wrong.
        return _in_vain(what, mismatch, how, culprit.rank)
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
    # Victims, too, say where they were: they gave up there.
    places = _places((*running, *victims))
    if (fault := log.find_missing(places) or log.find_mismatch(places)) is not None:
        return _in_vain("hang", fault, message, None)
    hung = _hung(running)
    if hung is not None and len(running) + len(victims) > 1:
        message = f"the others waited for rank {hung.rank}, {hung.where_now}; {message}"
    return Answer("hang", message, None if hung is None else hung.rank)


def _left_behind(ranks: Ranks) -> Answer | None:
    """Ranks that ended with 0 while others waited for them in a collective; None if none did."""
    gone = {r.rank: r for r in ranks if r.exit.code == 0 and r.records.error is None}
    if len(gone) == len(ranks) and not any(r.left_early for r in ranks):
        return None  # all came to their end: nobody waits
    missing = log.find_missing(_places(ranks))
    if missing is None or not set(missing.ranks) <= set(gone):
        return None
    first = gone[missing.ranks[0]]
    return _in_vain("hang", missing, first.left, first.rank)


def _in_vain(what: What, fault: CollectiveFault, more: str, otherwise: int | None) -> Answer:
    """With the rank at fault, or `otherwise` if two sides may be."""
    odd = log.odd_one(fault)
    culprit = otherwise if odd is None else odd
    return Answer(what, f"{log.fault_words(fault)}; {more}", culprit, fault)


def _places(ranks: Ranks) -> dict[int, Place]:
    """Where ranks are; those that gave up waiting are still in what they waited for."""
    found = {r.rank: r.place for r in ranks if r.place is not None}
    for r in ranks:
        if r.rank in found and r.records.error is not None and "peer_lost" in r.failures:
            found[r.rank] = replace(found[r.rank], is_inside=bool(found[r.rank].operator))
    return found


def _hung(running: Ranks) -> RankEvidence | None:
    """The one rank that the others waited for, if the evidence singles it out."""
    behind = [r for r in running if r.last_step == min(each.last_step for each in running)]
    if len(behind) == 1:
        return behind[0]
    waiting = [r for r in running if any(p in frame for p in WAITING_PLACES for frame in r.stack)]
    elsewhere = [r for r in running if r.stack and r not in waiting]
    alone = waiting and len(elsewhere) == 1 and len(waiting) + 1 == len(running)
    return elsewhere[0] if alone else None


def signal_name(number: int) -> str:
    """SIGKILL for 9; 'signal 77' for a number without a name."""
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _names(ranks: Ranks) -> str:
    return log.rank_names(sorted(r.rank for r in ranks))


def _line(text: str, index: int) -> str:
    """One of the lines that are not empty, "" if there is none."""
    lines = [cut(line.strip(), MESSAGE_CHARS) for line in text.splitlines() if line.strip()]
    return lines[index] if lines else ""


# --- who sent a SIGKILL: the kernel counts its own, of every cgroup, before it sends them ---------

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
    """The rank, and what became of it in words."""

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
