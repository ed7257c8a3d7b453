"""Which GPU a rank has, and what is believed of runs that share one.

NCCL refuses two ranks of one communicator on one GPU, as it sees by host and bus. Ranks that share
GPUs are therefore put on hosts of their own, by NCCL_HOSTID: the first rank of each GPU makes up
the first host, the second rank of each the next, and so on. Ranks of one such host talk as ever;
hosts talk through sockets on the loopback device: NCCL's own kernels and bits, and times that mean
nothing.

Under CUDA's MPS the processes on a GPU share a server: a rank that faults or is killed there takes
the ranks of other runs with it, and all of them get CUDA's words for it.

    bad end of a run that shared a GPU     held, `undecided` on the disk; nothing more is started
      its own: an exception, no word of the device; somebody's SIGKILL        stands
      any other                            kept as an attempt, run again once nothing else runs
        fails again                        stands
        ends well, a culprit is known      the new attempt counts
        ends well, none is known           `shared_gpu`: no verdict

So nothing that failed once passes because it was lucky the second time. The culprit is a run that
shared a GPU with it, ended at about the same time, and ended by itself, or failed alone about where
it had failed before. After a fault MPS gives out no GPU for seconds: a run that is refused one
before its first step has said nothing, and is run again. Whoever resumes an undecided run asks on.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.infrastructure import (
    HOST_KEY,
    SHARED_GPU,
    SHARED_HOST,
    library_failures,
    machine_failure,
)
from harness.records import RankRecords, RunOutcome, RunResult, RunSpec, What
from harness.store import kept_folder, num_kept, read_outcome, save_outcome, set_aside
from harness.store.streams import rank_path, read_ranks

MPS_PIPES = "/tmp/nvidia-mps"
"""Folder of the pipes of CUDA's MPS, unless CUDA_MPS_PIPE_DIRECTORY names another."""
REFUSED = "device_unavailable"
"""A failure of the machine (`harness.infrastructure`): no rank was given a GPU."""
RECOVERY_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""How long to wait before each further start of a run that was refused its GPU."""
NOTICE_S = 30.0
"""How much later than its GPU was lost a rank may see that: it looks when it waits for the device.
"""
STEPS_APART = 1
"""A rank's own step runs so far ahead of the device's, or behind, as it fails."""
LOST: tuple[What, ...] = ("interrupted", "not_run")
"""Ends that say nothing of the program."""
BY_COMPANY: tuple[What, ...] = ("hang", "oom")
"""What other runs on the GPU bring about without a fault: kernels that wait, memory taken."""


def shared(gpus: Sequence[str], ranks_per_gpu: int) -> tuple[str, ...]:
    """The GPU of each rank slot: every GPU once, then every GPU again.

    Raises:
        ValueError: less than one rank a GPU.
    """
    if ranks_per_gpu < 1:
        raise ValueError(f"Expected at least 1 rank a GPU, got {ranks_per_gpu}.")
    return tuple(gpus) * ranks_per_gpu


def gpu_environment(devices: Sequence[str], rank: int) -> dict[str, str]:
    """Variables of one rank: the GPUs that it sees, and its own as LOCAL_RANK.

    Args:
        devices: GPU of each rank, as CUDA_VISIBLE_DEVICES names it; empty for ranks without.
        rank: whose environment.
    """
    if not devices:
        return {"CUDA_VISIBLE_DEVICES": "", "LOCAL_RANK": str(rank)}
    # CUDA sees no GPU at all where one is named twice.
    seen = list(dict.fromkeys(devices))
    found = {
        "CUDA_VISIBLE_DEVICES": ",".join(seen),
        "LOCAL_RANK": str(seen.index(devices[rank])),
    }
    if len(seen) < len(devices):
        host = devices[:rank].count(devices[rank])
        found |= {HOST_KEY: f"{SHARED_HOST}-{host}", "NCCL_SOCKET_IFNAME": "lo"}
    return found


def mps_runs() -> bool:
    """Whether processes that use CUDA here go through MPS: its daemon has made its control pipe."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_PIPES
    return os.path.exists(os.path.join(folder, "control"))  # noqa: PTH110, PTH118 - never raises


@dataclass
class _Question:
    """A run to be run alone.

    Attributes:
        places: folders of those that may have ended it, by key.
        in_doubt: whether it got so far that another run may have ended it.
        refusals: how often it was refused its GPU.
    """

    spec: RunSpec
    folder: Path
    places: dict[str, Path]
    outcome: RunOutcome | None = None
    in_doubt: bool = True
    refusals: int = 0


@dataclass(frozen=True)
class _End:
    """A bad end, in monotonic seconds: when it began, when the last rank was gone."""

    folder: Path
    first_s: float
    last_s: float

    def is_near(self, other: "_End") -> bool:
        """Whether one may have brought about the other."""
        return self.first_s <= other.last_s + NOTICE_S and other.first_s <= self.last_s + NOTICE_S


class SharedGpus:
    """Runs on shared GPUs, from their start until it is known whose their ends were."""

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
        self._mps, self._patience_s, self._recovery_s = mps, patience_s, recovery_s
        self.clear()

    def clear(self) -> None:
        """Forget every run: what is undecided on the disk stays so."""
        self._gpus: dict[str, frozenset[str]] = {}
        self._company: dict[str, set[str]] = {}
        self._ends: dict[str, _End] = {}
        self._questions: dict[str, _Question] = {}
        self._drains = False
        self._alone = ""
        self._recovered_s = 0.0

    def asks(self, spec: RunSpec, folder: Path) -> bool:
        """Whether an earlier attempt of a run is undecided: then it waits to be run alone."""
        kept = [outcome for outcome in _kept(folder, spec.key) if outcome.undecided]
        tied = sorted({key for outcome in kept for key in outcome.tied})
        if kept:
            places = {key: folder.with_name(key) for key in tied}
            self._questions[spec.key] = _Question(spec, folder, places)
        return bool(kept)

    def started(self, key: str, devices: Sequence[str]) -> str:
        """Take note of a run; which of its ends are undecided: `failed`, `finished`, or none."""
        if key == self._alone:
            return "finished"
        if not (self._shares and devices and self._mps()):
            return ""
        mine = frozenset(devices)
        self._company[key] = {other for other, gpus in self._gpus.items() if gpus & mine}
        for other in self._company[key]:
            self._company[other].add(key)
        self._gpus[key] = mine
        return "failed"

    def left(self, key: str) -> None:
        """Take note that no rank of a run is left."""
        self._gpus.pop(key, None)

    def closed(self) -> bool:
        """Whether nothing may start: a run is to be alone, or others must end before it."""
        return self._drains or bool(self._alone)

    def due_s(self) -> float | None:
        """Until when to wait for a GPU; None: not at all."""
        return self._recovered_s if self._recovered_s > time.monotonic() else None

    def ended(self, spec: RunSpec, folder: Path, outcome: RunOutcome) -> RunOutcome | None:
        """What to tell of a run that has ended; None as long as its outcome is held back."""
        key = spec.key
        if key == self._alone:
            self._alone = ""
            question = self._questions[key]
            if not self._is_put_off(question, outcome):
                question.outcome = outcome
            return None
        if outcome.what and outcome.what not in LOST and key in self._company:
            question = _Question(spec, folder, {}, in_doubt=False)
            if self._is_put_off(question, outcome):
                self._questions[key] = question
                self._drains = True
                return None
            if self._company[key]:
                self._ends[key] = _end(spec, folder, outcome, self._patience_s)
                if not _is_own(spec, folder, outcome):
                    _saved(folder, replace(outcome, undecided=True))
                    self._questions[key] = replace(question, in_doubt=True)
                    self._drains = True
                    return None
        return _saved(folder, replace(outcome, undecided=False)) if outcome.undecided else outcome

    def _is_put_off(self, question: _Question, outcome: RunOutcome) -> bool:
        """Whether a run is only to be started later, as it was given no GPU."""
        if question.refusals >= len(self._recovery_s) or not _is_refused(question, outcome):
            return False
        self._recovered_s = time.monotonic() + self._recovery_s[question.refusals]
        question.refusals += 1
        _saved(question.folder, replace(outcome, undecided=False))
        return True

    def next_alone(self) -> tuple[RunSpec, Path, int] | None:
        """The run to start, with its attempt, now that none is under way; None if none may be."""
        self._tie()
        if self.due_s() is not None:
            return None
        for key, question in self._questions.items():
            if question.outcome is None:
                self._alone = key
                set_aside(question.folder)
                return question.spec, question.folder, num_kept(question.folder)
        return None

    def _tie(self) -> None:
        """Write down who may have ended whom, once no more can."""
        ends, self._ends = self._ends, {}
        for key, end in ends.items():
            near = [
                k for k, other in ends.items() if k in self._company[key] and end.is_near(other)
            ]
            outcome, _ = read_outcome(end.folder, key)
            if key in self._questions and outcome is not None:
                self._questions[key].places = {k: ends[k].folder for k in near}
                told = f"{outcome.message}; {_with(near)}"
                _saved(end.folder, replace(outcome, message=told, tied=tuple(near)))
        self._company.clear()

    def settled(self) -> list[RunOutcome]:
        """Outcomes that need not be held back any longer, once every question has its answer."""
        asked = self._questions
        if not asked or any(question.outcome is None for question in asked.values()):
            return []
        self._questions, self._drains = {}, False
        # First those that failed alone: they may be what explains the others' ends.
        return [_answered(q) for q in sorted(asked.values(), key=lambda q: not _failed(q.outcome))]


def _saved(folder: Path, outcome: RunOutcome) -> RunOutcome:
    save_outcome(folder, outcome)
    return outcome


def _failed(outcome: RunOutcome | None) -> bool:
    return outcome is not None and outcome.what not in ("", SHARED_GPU, *LOST)


def _kept(folder: Path, key: str) -> list[RunOutcome]:
    found = (read_outcome(kept_folder(folder, n), key)[0] for n in range(num_kept(folder)))
    return [outcome for outcome in found if outcome is not None]


def _is_refused(question: _Question, outcome: RunOutcome) -> bool:
    ranks = tuple(read_ranks(question.folder, question.spec.world_size))
    run = RunResult(spec=question.spec, outcome=outcome, ranks=ranks)
    return bool(outcome.what) and machine_failure(run) == REFUSED


def _end(spec: RunSpec, folder: Path, outcome: RunOutcome, patience_s: float) -> _End:
    """When a run ended; a hang began when its ranks recorded something for the last time."""
    now_s = time.monotonic()
    first_s = now_s - patience_s
    if outcome.what == "hang":
        files = [path for r in range(spec.world_size) if (path := rank_path(folder, r)).is_file()]
        now_unix_s, begun_unix_s = time.time(), time.time() - outcome.wall_s
        recorded_unix_s = max((path.stat().st_mtime for path in files), default=begun_unix_s)
        first_s = now_s - max(now_unix_s - recorded_unix_s, 0.0)
    return _End(folder, first_s, now_s)


def _is_own(spec: RunSpec, folder: Path, outcome: RunOutcome) -> bool:
    """Whether nothing of the device is in the end of a run, so that no other brought it about."""
    if outcome.what == "killed":
        return True  # by somebody, or by itself: MPS sends no signal
    ranks = list(read_ranks(folder, spec.world_size))
    errors = [each.error for each in ranks if each.error is not None]
    own = any(error.rank == outcome.culprit_rank for error in errors)
    foreign = any(library_failures(error) & {"of_device", "peer_lost"} for error in errors)
    return own and not foreign and outcome.what not in BY_COMPANY


def _answered(question: _Question) -> RunOutcome:
    """The outcome of a run that was run alone, with what it is taken for."""
    outcome, folder = question.outcome, question.folder
    assert outcome is not None
    decided = replace(outcome, undecided=False)
    if not question.in_doubt or outcome.what in LOST:
        return _saved(folder, decided)
    if _failed(outcome):
        told = f"{outcome.message}; this time alone, before that {_with(list(question.places))}"
        return _saved(folder, replace(decided, message=told))
    first = [each for each in _kept(folder, outcome.key) if each.undecided and each.what]
    how = first[-1].what if first else "it is not known how"
    with_whom = _with(list(question.places))
    if any(_explains(place, key) for key, place in question.places.items()):
        told = f"it ended as {how} at first ({with_whom}), and well alone"
        return _saved(folder, replace(decided, message=told))
    told = (
        f"it ended as {how} at first ({with_whom}) and finished alone, and no other "
        "of them failed alone as it had before: nobody knows whose doing it was; run them in a new "
        "folder without MPS, or with --jobs 1"
    )
    return _saved(folder, replace(decided, what=SHARED_GPU, message=told, culprit_rank=None))


def _explains(folder: Path, key: str) -> bool:
    """Whether a run is known to have ended by itself when it ended with others."""
    asked: int | None = None
    for number in (*range(num_kept(folder)), None):
        place = folder if number is None else kept_folder(folder, number)
        outcome, _ = read_outcome(place, key)
        if outcome is None or not _failed(outcome) or (step := _failed_at(place, outcome)) is None:
            continue
        if outcome.undecided:
            asked = step
        elif asked is None or abs(step - asked) <= STEPS_APART:
            return True
    return False


def _failed_at(folder: Path, outcome: RunOutcome) -> int | None:
    """The step in which a run failed, as far as its records tell; None if it got no GPU."""
    ranks: list[RankRecords] = list(read_ranks(folder, len(outcome.ranks)))
    for each in ranks:
        if each.rank == outcome.culprit_rank and each.error is not None:
            return None if REFUSED in library_failures(each.error) else each.error.step
    return max((step.step for each in ranks for step in each.steps), default=-1) + 1


def _with(keys: Sequence[str]) -> str:
    if not keys:
        return "on a GPU under MPS with other runs"
    noun = "run" if len(keys) == 1 else "runs"
    return f"on a GPU under MPS with {noun} {', '.join(keys)}, which failed at the same time"
