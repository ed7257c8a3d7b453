"""Runs that shared a GPU under CUDA's MPS and did not end well: made again alone, and then judged.

    an end that is not good -> held, `undecided` on the disk -> nothing more can be tied to it
      its own (`neighbours`)           stands
      in question                      kept as an attempt, made again with nobody beside it
        fails again                    stands: it is the culprit
        ends well, a culprit is known  the new attempt counts
        ends well, none is known       `shared_gpu`: no verdict

So nothing that failed once passes because it was lucky the second time. A culprit is known if one
of the same group ended by itself for certain, or failed alone about where it had failed before:
otherwise another may have ended it, and what it did alone explains nothing.

After a fault MPS gives out no GPU until the last client of its server is gone: seconds at times. A
run that is refused one before its first step has said nothing; it is made again, later each time.

All of this can be cut short. What is not decided says so in its outcome, which then counts as none,
and whoever makes the run again asks on from its kept attempts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engine.neighbours import LOST, OF_COMPANY, Decision, End, Neighbours
from harness.infrastructure import library_failures, machine_failure
from harness.records import RankRecords, RunOutcome, RunResult, RunSpec, What
from harness.shared_gpus import SHARED_GPU
from harness.store import kept_folder, num_kept, read_outcome, save_outcome, set_aside
from harness.store.streams import rank_path, read_ranks

REFUSED = "device_unavailable"
"""A failure of the machine (`harness.infrastructure`): no rank was given a GPU."""
RECOVERY_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""How long to wait before each further start of a run that was refused its GPU."""
STEPS_BESIDE = 1
"""A rank's own step runs so far ahead of the device's, or behind, as it fails."""
_SILENT: tuple[What, ...] = ("", SHARED_GPU, *LOST)
"""What explains no other run's end."""


@dataclass
class Question:
    """A run to be made alone.

    Attributes:
        places: folders of those that may have ended it; empty of one that was refused its GPU.
        in_doubt: whether it got so far that another run may have ended it.
        refusals: how often it was refused its GPU.
    """

    spec: RunSpec
    folder: Path
    places: dict[str, Path]
    outcome: RunOutcome | None = None
    in_doubt: bool = True
    refusals: int = 0


class Company:
    """Keeps ends back until it is known whose they were."""

    def __init__(
        self,
        devices: Sequence[str],
        mps: Callable[[], bool],
        patience_s: float,
        recovery_s: Sequence[float] = RECOVERY_S,
    ) -> None:
        """Know who shares GPUs.

        Args:
            devices: GPU of each slot.
            mps: whether CUDA's processes go through MPS now.
            patience_s: what may pass from the first failure of a run to its end, but for a hang.
            recovery_s: waits between starts of a run that is refused its GPU.
        """
        self._shares = len(set(devices)) < len(devices)
        self._mps = mps
        self._patience_s = patience_s
        self._recovery_s = recovery_s
        self.clear()

    def clear(self) -> None:
        """Forget every run: what is undecided on the disk stays so."""
        self._neighbours = Neighbours()
        self._doubted: set[str] = set()
        self._held: dict[str, tuple[RunSpec, Path, RunOutcome]] = {}
        self._questions: dict[str, Question] = {}
        self._alone = ""
        self._recovered_s = 0.0

    def asks(self, spec: RunSpec, folder: Path) -> bool:
        """Whether an earlier attempt of a run is in question: then it waits to be made alone."""
        kept = _kept(folder, spec.key)
        if not any(outcome.undecided for outcome in kept):
            return False
        tied = {key for outcome in kept for key in outcome.tied}
        places = {key: folder.with_name(key) for key in sorted(tied)}
        self._questions[spec.key] = Question(spec, folder, places)
        return True

    def started(self, key: str, devices: Sequence[str]) -> str:
        """Take note of a run; which of its ends are undecided: `failed`, `finished`, or none."""
        if key == self._alone:
            return "finished"
        if not (self._shares and devices and self._mps()):
            return ""
        self._neighbours.started(key, devices)
        self._doubted.add(key)
        return "failed"

    def left(self, key: str) -> None:
        """Take note that no rank of a run is left."""
        self._neighbours.left(key)

    def closed(self) -> bool:
        """Whether nothing may start: a run is to be alone, or a GPU's runs are ending together."""
        return bool(self._alone) or self.due_s() is not None

    def due_s(self) -> float | None:
        """Until when to wait: for ends that may be tied to those held, for a GPU; None: neither."""
        now_s = time.monotonic()
        waits = [self._neighbours.due_s(now_s)]
        waits += [self._recovered_s] if self._recovered_s > now_s else []
        return max((until_s for until_s in waits if until_s is not None), default=None)

    def ended(self, spec: RunSpec, folder: Path, outcome: RunOutcome) -> RunOutcome | None:
        """What to tell of a run that has ended; None as long as its outcome is held back."""
        key = spec.key
        if key == self._alone:
            self._alone = ""
            question = self._questions[key]
            if not self._is_put_off(question, outcome):
                question.outcome = outcome
            return None
        if key in self._doubted:
            refused = Question(spec, folder, {}, in_doubt=False)
            if self._is_put_off(refused, outcome):
                self._doubted.discard(key)
                self._questions[key] = refused
                return None
        had_company = self._neighbours.had_company(key)
        if key in self._doubted and outcome.what and had_company:
            self._neighbours.ended(_end(spec, folder, outcome, self._patience_s))
            if outcome.what not in LOST:
                if not outcome.undecided:  # written by the engine: its leader is dead
                    outcome = _saved(folder, replace(outcome, undecided=True))
                self._held[key] = (spec, folder, outcome)
                return None
        self._doubted.discard(key)
        return _saved(folder, replace(outcome, undecided=False)) if outcome.undecided else outcome

    def _is_put_off(self, question: Question, outcome: RunOutcome) -> bool:
        """Whether a run was refused its GPU, and is to be made again once MPS has recovered."""
        if question.refusals >= len(self._recovery_s) or not _is_refused(question, outcome):
            return False
        self._recovered_s = time.monotonic() + self._recovery_s[question.refusals]
        question.refusals += 1
        _saved(question.folder, replace(outcome, undecided=False))
        return True

    def settled(self) -> list[RunOutcome]:
        """Outcomes that need not be held back any longer; those in question are queued."""
        if self.due_s() is None and (certain := self._part(self._neighbours.decide())):
            return certain
        asked = self._questions
        if not asked or self._held or any(q.outcome is None for q in asked.values()):
            return []
        self._questions = {}
        # First those that failed alone: they may be what explains the others' ends.
        return [_answered(q) for q in sorted(asked.values(), key=lambda q: not _failed(q.outcome))]

    def _part(self, decision: Decision) -> list[RunOutcome]:
        held, self._held = self._held, {}
        self._doubted -= held.keys()
        for key, tied in decision.asked.items():
            spec, folder, outcome = held[key]
            told = f"{outcome.message}; {_beside(tied)}"
            _saved(folder, replace(outcome, message=told, tied=tied))
            self._questions[key] = Question(spec, folder, {k: held[k][1] for k in tied})
        certain = [held[key] for key in decision.stand if key in held]
        return [_saved(folder, replace(end, undecided=False)) for _, folder, end in certain]

    def next_alone(self) -> tuple[RunSpec, Path, int] | None:
        """The run to make, with its attempt, now that nothing is under way; None if none may be."""
        if self._recovered_s > time.monotonic():
            return None
        for key, question in self._questions.items():
            if question.outcome is None:
                self._alone = key
                set_aside(question.folder)
                return question.spec, question.folder, num_kept(question.folder)
        return None


def _saved(folder: Path, outcome: RunOutcome) -> RunOutcome:
    save_outcome(folder, outcome)
    return outcome


def _failed(outcome: RunOutcome | None) -> bool:
    return outcome is not None and outcome.what not in _SILENT


def _kept(folder: Path, key: str) -> list[RunOutcome]:
    found = (read_outcome(kept_folder(folder, n), key)[0] for n in range(num_kept(folder)))
    return [outcome for outcome in found if outcome is not None]


def _is_refused(question: Question, outcome: RunOutcome) -> bool:
    if not outcome.what:
        return False
    spec = question.spec
    ranks = tuple(read_ranks(question.folder, spec.world_size))
    return machine_failure(RunResult(spec=spec, outcome=outcome, ranks=ranks)) == REFUSED


def _end(spec: RunSpec, folder: Path, outcome: RunOutcome, patience_s: float) -> End:
    now_s, now_unix_s = time.monotonic(), time.time()
    written = {
        rank: now_s - max(now_unix_s - rank_path(folder, rank).stat().st_mtime, 0.0)
        for rank in range(spec.world_size)
        if rank_path(folder, rank).is_file()
    }
    culprit = _culprit(outcome, read_ranks(folder, spec.world_size))
    first_s = max(written.values(), default=now_s - outcome.wall_s)
    if culprit is not None and culprit.error is not None:
        first_s = written.get(culprit.rank, first_s)
    elif outcome.what != "hang":
        first_s = max(first_s, now_s - patience_s)
    own = _is_own(outcome, culprit)
    return End(key=spec.key, what=outcome.what, first_s=first_s, last_s=now_s, own=own)


def _culprit(outcome: RunOutcome, ranks: Sequence[RankRecords]) -> RankRecords | None:
    return next((each for each in ranks if each.rank == outcome.culprit_rank), None)


def _is_own(outcome: RunOutcome, culprit: RankRecords | None) -> bool:
    """Whether an end was the run's own for certain, if no other failed before it."""
    if outcome.what == "killed":
        return True  # by somebody, or by itself: MPS sends no signal
    if culprit is None or culprit.error is None or outcome.what in OF_COMPANY:
        return False
    return "of_device" not in library_failures(culprit.error)


# --- what a run that was made alone says ------------------------------------------------------


def _answered(question: Question) -> RunOutcome:
    """The outcome of a run that was made alone, with what it is taken for."""
    outcome, folder = question.outcome, question.folder
    assert outcome is not None
    decided = replace(outcome, undecided=False)
    first = [each for each in _kept(folder, outcome.key) if each.undecided and each.what]
    if not question.in_doubt:
        return _saved(folder, decided)
    if _failed(outcome):
        told = f"{outcome.message}; this time alone, before that {_beside(question.places)}"
        return _saved(folder, replace(decided, message=told))
    if outcome.what in LOST or _explained(question.places):
        return _saved(folder, decided)
    how = first[-1].what if first else "it is not known how"
    told = (
        f"it ended as {how} at first ({_beside(question.places)}) and finished alone, and no other "
        "of them failed alone as it had before: nobody knows whose doing it was; run them in a new "
        "folder without MPS, or with --jobs 1"
    )
    return _saved(folder, replace(decided, what=SHARED_GPU, message=told, culprit_rank=None))


def _explained(places: dict[str, Path]) -> bool:
    return any(_explains(folder, key) for key, folder in places.items())


def _explains(folder: Path, key: str) -> bool:
    """Whether a run is known to have ended by itself when it ended beside others."""
    asked: int | None = None
    for number in (*range(num_kept(folder)), None):
        place = folder if number is None else kept_folder(folder, number)
        outcome, _ = read_outcome(place, key)
        if outcome is None or outcome.what in _SILENT:
            continue
        step = _failed_at(place, outcome)
        if outcome.undecided:
            asked = step
        elif asked is None or abs(step - asked) <= STEPS_BESIDE:
            return True
    return False


def _failed_at(folder: Path, outcome: RunOutcome) -> int:
    """The step in which a run failed, as far as its records tell."""
    ranks = read_ranks(folder, len(outcome.ranks))
    culprit = _culprit(outcome, ranks)
    if culprit is not None and culprit.error is not None:
        return culprit.error.step
    return max((step.step for each in ranks for step in each.steps), default=-1) + 1


def _beside(keys: Sequence[str] | dict[str, Path]) -> str:
    if not keys:
        return "on a GPU under MPS with other runs"
    noun = "run" if len(keys) == 1 else "runs"
    return f"on a GPU under MPS with {noun} {', '.join(keys)}, which failed at the same time"
