"""Carrying out a plan: unique runs once, on the engine's slots, each case judged when it can be.

    finished runs are read, unfinished ones set aside                               (resume)
    -> runs start as slots allow, in the order of `harness.runner.plan`
    -> a run ends -> cases whose runs are all finished: seal, judge, store the verdict
    -> bits differ and the case says `confirm` -> both sides once more -> the verdict says so, too

Everything is on disk before it is shown, so a kill at any moment loses at most runs under way.
Which runs are repeated:

    interrupted, not_run          they say nothing of the program: `--resume` makes them
    undecided, shared_gpu         nobody knows what ended it (`harness.engine.local`): likewise
    killed, and not for memory    somebody did it: likewise
    killed, anything else         only on request (`--again-killed`)
    what the machine failed       `--resume` makes them, and at most `launch.retries` times the run
                                  itself, at once (`harness.checks.complete`)

Any other outcome is final. Every attempt is kept, its folder next to the run's. One that computed
other bits before the machine failed it is evidence: no pass after it is one.
"""

import functools
import os
import re
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import ParamSpec, Self, TypeVar, cast

from harness.checks import judge as judge_case
from harness.checks.complete import SHARED_GPU, machine_failure
from harness.checks.evidence import different_leaves
from harness.checks.judge import (
    confirmation_of,
    is_confirmation_due,
    is_unconfirmed,
    unconfirmed,
    unequal,
)
from harness.engine import Engine
from harness.errors import Infrastructure, Interrupted
from harness.masking import Masker
from harness.provenance import fingerprint
from harness.records import (
    CaseSpec,
    CheckResult,
    Confirmation,
    Difference,
    Json,
    Outcome,
    RunOutcome,
    RunResult,
    RunSpec,
    Verdict,
    What,
)
from harness.repeats import confirming_runs, in_turn, is_timed, past_legs, runs_of, unique_runs
from harness.runner.plan import Plan, Queue, Seconds, arrange
from harness.store import LEGS, RunFolder, kept_folders, load_run_folder, set_aside
from harness.store.files import write_atomic
from harness.store.folder import verified
from harness.store.streams import aligned

Judge = Callable[..., Verdict]
"""From a case and its three runs, and `samples` and `repeats` if it has any, to a verdict."""
Args = ParamSpec("Args")
Result = TypeVar("Result")
RETRIES_KEY = "retries"
"""Of the run folder's manifest: how often a run may be repeated."""
TO_REPEAT: tuple[What, ...] = ("interrupted", "not_run", SHARED_GPU)
"""Outcomes that say nothing of the program."""
_HALF_WRITTEN = re.compile(r"\..+\.(\d+)\.tmp")


class View:
    """Hears of what happens, and shows nothing of it; `launch` enters it before the first call,
    leaves it after the last."""

    def planned(self, plan: Plan) -> None:
        """The plan is made; runs follow."""

    def run_started(self, spec: RunSpec) -> None:
        """A run was handed to the engine."""

    def run_finished(self, outcome: RunOutcome) -> None:
        """A run ended."""

    def judged(self, verdict: Verdict) -> None:
        """A case has its answer, whether new or stored earlier."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return


def execution(  # noqa: PLR0913 - all but four have a default that is right nearly everywhere
    folder: RunFolder, cases: Sequence[CaseSpec], engine: Engine, progress: View, *,
    exit_first: bool = False, retries: int = 0, seconds: Seconds = lambda spec: 1.0,
    judge: Judge = judge_case, confirm: bool = True,
) -> Generator[None, None, tuple[Verdict, ...]]:  # fmt: skip
    """Make the runs of `cases` that are missing and judge every case; verdicts in case order.

    Each round starts what fits, waits until a run ends and judges what can be judged. Closed early,
    or after the first failure with `exit_first`, it kills the runs under way. A run that the
    machine failed is repeated at most `retries` times. The folder is locked, the engine stays open.

    Raises:
        UsageError: a run needs more than the engine has, or the folder is in use; nothing started.
        Interrupted: SIGINT, SIGTERM or SIGHUP; runs under way were killed, what is done is kept.
        Infrastructure: the disk or the engine failed.
    """
    folder.acquire()
    matrix = _Matrix(folder, cases, engine, progress, judge, retries, seconds, confirm)
    for spec in matrix.waiting.values():
        engine.check(spec)
    try:
        yield from matrix.rounds(exit_first=exit_first)
    except KeyboardInterrupt:
        engine.cancel()
        raise Interrupted(
            f"interrupted: {len(matrix.verdicts)} of {len(cases)} cases are done; "
            f"go on with: harness run --resume {folder.path}",
            matrix.in_order(),
        ) from None
    except BaseException:
        engine.cancel()
        raise
    return matrix.in_order()


def advance(
    rounds: Generator[None, None, Result], enough: Callable[[], bool] = lambda: False
) -> Result | None:
    """Go through rounds until there is enough; what they come to, None if they have not ended.

    Raises what they do; `Interrupted` for SIGINT, SIGTERM or SIGHUP.
    """
    with stop_on_signals():
        try:
            while not enough():
                next(rounds)
        except StopIteration as end:
            value: Result | None = end.value
            return value
        except KeyboardInterrupt:
            rounds.throw(KeyboardInterrupt)  # it may have come between two rounds
            raise
    return None


def whole(rounds: Callable[Args, Generator[None, None, Result]]) -> Callable[Args, Result]:
    """A function that goes through all rounds and returns what they come to."""

    @functools.wraps(rounds)
    def to_the_end(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        return cast(Result, advance(rounds(*args, **kwargs)))

    return to_the_end


execute = whole(execution)


def keep_trace(path: Path, error: Exception) -> str:
    """Write an error's traceback to a file, and say the error in words; neither with a secret."""
    masker = Masker(os.environ)
    write_atomic(path, masker.text("".join(traceback.format_exception(error))))
    return masker.text(f"{type(error).__name__}: {error}")


@dataclass
class _Matrix:
    folder: RunFolder
    cases: Sequence[CaseSpec]
    engine: Engine
    progress: View
    judge: Judge
    retries: int
    seconds: Seconds
    confirm: bool
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    waiting: dict[str, RunSpec] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    under_way: set[str] = field(default_factory=set)
    unconfirmed: dict[str, Verdict] = field(default_factory=dict)
    of_run: dict[str, list[CaseSpec]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        needed = unique_runs(self.cases)
        self.waiting |= {k: spec for k, spec in needed.items() if is_left(self.folder, spec)}
        self.ended |= needed.keys() - self.waiting.keys()
        self.turns = deque(spec for spec in in_turn(self.cases) if spec.key in self.waiting)
        self.queue = Queue(arrange(self.cases, self.seconds, left=self.waiting.__contains__))

    def in_order(self) -> tuple[Verdict, ...]:
        return tuple(self.verdicts[case.id] for case in self.cases if case.id in self.verdicts)

    def rounds(self, *, exit_first: bool) -> Iterator[None]:
        touched = [case for case in self.cases if not self._answer_from_store(case)]
        for case in touched:
            for key in {spec.key for spec in runs_of(case)}:
                self.of_run.setdefault(key, []).append(case)
        while True:
            if not exit_first:
                self._fill()  # before judging, which takes time: no slot waits for it
            for case in touched:
                if case.id not in self.verdicts:
                    self._judge_if_complete(case)
            yield
            found = self.verdicts.values() if exit_first else ()
            if any(verdict.outcome not in ("passed", "skipped") for verdict in found):
                self.engine.cancel()
                return
            if self.ended.issuperset(self.waiting):
                return
            self._fill()
            touched = [case for key in self._wait() for case in self.of_run.get(key, ())]

    def _fill(self) -> None:
        if any(is_timed(self.waiting[key]) for key in self.under_way):
            return  # it has the machine to itself, though a case may want to be confirmed
        while (spec := self.queue.next(self.engine.can_start)) is not None:
            self._start(spec)
        if self.turns and not self.under_way:
            self._start(self.turns.popleft())

    def _start(self, spec: RunSpec) -> None:
        self.under_way.add(spec.key)
        set_aside(self.folder.run_folder(spec.key))
        attempt = len(kept_folders(self.folder.run_folder(spec.key)))
        self.engine.start(spec, self.folder.run_folder(spec.key), attempt=attempt)
        self.progress.run_started(spec)

    def _wait(self) -> list[str]:
        """The keys of runs that have ended by now, at least one unless it is repeated."""
        outcomes = self.engine.wait()
        if not outcomes:
            left = len(self.waiting.keys() - self.ended)
            raise Infrastructure(f"the engine has nothing under way, but {left} runs are left")
        ended = []
        for outcome in outcomes:
            self.under_way.discard(outcome.key)
            self.progress.run_finished(outcome)
            spec = self.waiting[outcome.key]
            if why_again(self.folder, spec, self.retries):
                (self.turns.appendleft if is_timed(spec) else self.queue.push)(spec)
            else:
                ended.append(outcome.key)
        self.ended.update(ended)
        return ended

    def _answer_from_store(self, case: CaseSpec) -> bool:
        if case.skip_reason:
            # A case that was planned otherwise, and may have failed, is not skipped.
            skipped = _no_answer(case, "skipped", case.skip_reason)
            self._answer(case, verified(self.folder, case, skipped))
            return True
        if not self._is_complete(case):
            # A run of it is repeated: killed in between, this verdict must not answer for it.
            set_aside(self.folder.case_folder(case.id))
            return False
        verdict = self.folder.load_verdict(case.id)
        if verdict is None or verdict.runs != _run_keys(case) or verdict.outcome == "error":
            return False
        if verified(self.folder, case, verdict) != verdict:
            # Files were damaged since, or it was not made from them: answered anew.
            return False
        if self.confirm and is_unconfirmed(case, verdict):
            self.unconfirmed[case.id] = verdict
            return False
        self.verdicts[case.id] = verdict
        self.progress.judged(verdict)
        return True

    def _is_complete(self, case: CaseSpec) -> bool:
        return all(spec.key in self.ended for spec in runs_of(case))

    def _judge_if_complete(self, case: CaseSpec) -> None:
        verdict = self.unconfirmed.get(case.id)
        if verdict is None:
            if not self._is_complete(case):
                return
            self.folder.seal_case(case)
            verdict = self._judged(case)
        if self.confirm and is_confirmation_due(case, verdict):
            self._confirm_or_wait(case, verdict)
        else:
            self._answer(case, verdict)

    def _judged(self, case: CaseSpec) -> Verdict:
        runs = [self.folder.load_run(spec) for spec in runs_of(case)]
        more = dict(zip(("samples", "repeats"), past_legs(case, runs), strict=True))
        try:
            verdict = self.judge(case, *runs[:3], **{k: v for k, v in more.items() if v})
        except Exception as error:  # noqa: BLE001 - our own mistake must not cost the other cases
            path = self.folder.case_folder(case.id) / "judge_error.txt"
            why = f"the harness failed to judge: {keep_trace(path, error)} ({path})"
            return replace(_no_answer(case, "error", why), runs=_run_keys(case))
        verdict = held_against_attempts(self.folder, case, verdict)
        return replace(verdict, wall_s=sum(role.outcome.wall_s for role in runs))

    def _confirm_or_wait(self, case: CaseSpec, verdict: Verdict) -> None:
        repeats = confirming_runs(case)
        left = [spec for spec in repeats.values() if not self._is_made(spec)]
        if not left:
            found = self._confirmed(case, verdict, repeats)
            self._answer(case, replace(verdict, confirmation=found))
            return
        if verdict.confirmation is None:
            # Killed before the repeats end, the verdict is there, and says that they are missing.
            verdict = replace(verdict, confirmation=unconfirmed(case))
            self.folder.save_verdict(verdict, case)
        self.unconfirmed[case.id] = verdict
        for spec in left:
            self.of_run.setdefault(spec.key, []).append(case)

    def _confirmed(
        self, case: CaseSpec, verdict: Verdict, repeats: dict[str, RunSpec]
    ) -> Confirmation:
        load = self.folder.load_run
        first = load(case.reference), load(case.candidate)
        again = load(repeats["reference"]), load(repeats["candidate"])
        try:
            return confirmation_of(case, verdict, first, again)
        except Exception as error:  # noqa: BLE001 - as in `_judged`
            keep_trace(self.folder.case_folder(case.id) / "judge_error.txt", error)
            return replace(unconfirmed(case), what="unsupported")

    def _is_made(self, spec: RunSpec) -> bool:
        if not is_left(self.folder, spec):
            self.ended.add(spec.key)
        elif spec.key not in self.waiting:
            self.engine.check(spec)
            self.waiting[spec.key] = spec
            self.queue.push(spec)
        return spec.key in self.ended

    def _answer(self, case: CaseSpec, verdict: Verdict) -> None:
        self.folder.save_verdict(verdict, case)
        self.verdicts[case.id] = verdict
        self.progress.judged(verdict)


def _no_answer(case: CaseSpec, outcome: Outcome, why: str) -> Verdict:
    return Verdict(case_id=case.id, outcome=outcome, what="unsupported", message=why)


def _run_keys(case: CaseSpec) -> dict[str, str]:
    return {role: getattr(case, role).key for role in LEGS}


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt, in the main thread.

    More of them must not cut the killing of runs short, which takes seconds at most.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise KeyboardInterrupt

    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in stops}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- attempts: which runs are made again, and what earlier ones prove


@dataclass(frozen=True, kw_only=True)
class Attempt(Json):
    """One earlier attempt of a run.

    `signature` is the failure of the machine that ended it, `shared_gpu` if another run on its GPU
    may have, "" for one that somebody stopped; `num_steps` are those that some rank recorded.
    """

    key: str
    number: int
    what: What
    message: str
    signature: str
    num_steps: int
    wall_s: float

    @property
    def cause(self) -> str:
        """What a pass after it is shown with; "" for an attempt whose harness ended before it."""
        return self.signature or ("killed" if self.what == "killed" else "")


def why_again(folder: RunFolder, spec: RunSpec, limit: int) -> str:
    """The failure for which a run that has ended is repeated at once; "" if it is final."""
    outcome = folder.finished(spec.key)
    if outcome is not None and outcome.undecided:
        return SHARED_GPU  # of one that the engine starts again it is not
    if outcome is None or not outcome.what or not limit:
        return ""
    failure = machine_failure(folder.load_run(spec))
    earlier = earlier_attempts(folder, spec) if failure else ()
    spent = sum(attempt.signature not in ("", SHARED_GPU) for attempt in earlier)
    return failure if spent < limit else ""


def is_left(folder: RunFolder, spec: RunSpec) -> bool:
    """Whether `--resume` makes a run, for the first time or again: what says nothing of the program
    is asked again."""
    outcome = folder.finished(spec.key)
    if outcome is None or outcome.undecided or outcome.what in TO_REPEAT:
        return True
    if outcome.what == "killed" and outcome.from_outside:
        return True
    return bool(outcome.what and machine_failure(folder.load_run(spec)))


def open_repeats(folder: RunFolder) -> dict[str, list[RunSpec]]:
    """By case, the repeats that are left to be made for a failure which is stored."""
    found: dict[str, list[RunSpec]] = {}
    for case in folder.cases:
        verdict = folder.load_verdict(case.id) if case.confirm else None
        if verdict is not None and is_unconfirmed(case, verdict):
            specs = confirming_runs(case).values()
            found[case.id] = [spec for spec in specs if is_left(folder, spec)]
    return found


def stored_limit(manifest: Mapping[str, object]) -> int:
    """The limit that a run folder was made with; 0 if it says none."""
    stored = manifest.get(RETRIES_KEY)
    return stored if isinstance(stored, int) else 0


def set_killed_aside(path: Path) -> None:
    """Set every killed run of a folder aside, so that `--resume` makes it."""
    with RunFolder.open(path) as folder:
        repeats = (spec.key for case in folder.cases for spec in confirming_runs(case).values())
        for key in dict.fromkeys([*unique_runs(folder.cases), *repeats]):
            if (outcome := folder.finished(key)) and outcome.what == "killed":
                set_aside(folder.run_folder(key))


def clear_leftovers(folder: RunFolder) -> None:
    """Remove what a killed harness left half-written; the folder is locked by the caller.

    `.NAME.PID.tmp` was to be renamed into place, `cases/.CASE.tmp` to be sealed. Below `runs`
    nothing is looked for, as Slurm jobs may be at work there.
    """
    root = folder.path
    for path in root.glob("cases/.*.tmp"):
        shutil.rmtree(path, ignore_errors=True)
    places = (".", "report", "replies", "cases/*")
    for path in (path for at in places for path in root.glob(f"{at}/.*.tmp")):
        process = _HALF_WRITTEN.fullmatch(path.name)
        # Reports are made without the lock: their harness may be at it.
        if process and not Path("/proc", process[1]).exists():
            with suppress(OSError):
                path.unlink()


def earlier_attempts(folder: RunFolder, spec: RunSpec) -> tuple[Attempt, ...]:
    """Every attempt of a run but the last, oldest first."""
    return tuple(
        Attempt(
            key=run.outcome.key, number=number, what=run.outcome.what, message=run.outcome.message,
            signature=SHARED_GPU if _is_in_doubt(run) else machine_failure(run),
            num_steps=len({record.step for records in run.ranks for record in records.steps}),
            wall_s=run.outcome.wall_s,
        )
        for number, run in enumerate(_earlier_runs(folder, spec))
    )  # fmt: skip


def _earlier_runs(folder: RunFolder, spec: RunSpec) -> list[RunResult]:
    places = kept_folders(folder.run_folder(spec.key))
    return [load_run_folder(place, spec) for place in places]


def _is_in_doubt(run: RunResult) -> bool:
    return run.outcome.undecided or run.outcome.what == SHARED_GPU


def held_against_attempts(folder: RunFolder, case: CaseSpec, verdict: Verdict) -> Verdict:
    """The verdict, unless it says passed and an earlier attempt of one of its runs says otherwise.

    A candidate that computed other bits has failed; a reference that did is not deterministic. Of
    bits that were computed while another run spoiled the GPU, nobody can say whose they are.
    """
    for role in LEGS if verdict.outcome == "passed" else ():
        spec: RunSpec = getattr(case, role)
        for number, run in enumerate(_earlier_runs(folder, spec)):
            place = _first_difference(run, folder.load_run(spec))
            if place is None:
                continue
            of = f" of {place.tensor}" if place.tensor else ""
            message = (
                f"attempt {number} of the {role}, which did not finish, had other "
                f"{place.quantity}{of} at step {place.step} on rank {place.rank} than the attempt "
                "after it"
            )
            what: What = "diverged" if role == "candidate" else "nondeterministic_reference"
            if _is_in_doubt(run):
                what = SHARED_GPU
                message += "; another run was on its GPUs then"
            answer = CheckResult(
                check="attempts", what=what, message=message, difference=place,
                outcome="failed" if what == "diverged" else "incomparable",
            )  # fmt: skip
            return replace(
                verdict, outcome=answer.outcome, what=what, message=message, difference=place,
                checks=(*verdict.checks, answer),
            )  # fmt: skip
    return verdict


def _first_difference(earlier: RunResult, last: RunResult) -> Difference | None:
    """In any bit of what both recorded in one environment: the state before step 0 included."""
    ours, theirs = (
        {each.rank: fingerprint(each.start.environment) for each in run.ranks if each.start}
        for run in (earlier, last)
    )
    shared = ours.keys() & theirs.keys()
    if not shared or any(different_leaves(ours[rank], theirs[rank]) for rank in shared):
        return None
    answers = [answer for answer in unequal(*aligned(earlier, last)) if answer.outcome == "failed"]
    places = [answer.difference for answer in answers if answer.difference is not None]
    return min(places, key=lambda place: (place.step, not place.tensor), default=None)
