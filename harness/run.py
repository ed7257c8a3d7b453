"""Carrying out a plan: unique runs once, on the engine's slots, each case judged when it can be.

    finished runs are read, unfinished ones set aside      (resume)
    -> runs start, large ones first, as slots allow
    -> a run ends -> cases whose three runs are finished: seal, judge, store the verdict

Everything is on disk before it is told, so a kill at any moment loses at most runs under way. A run
that ended as `interrupted` or `not_run` (the machine's doing) is made again by the next execution
of the folder; any other outcome is final and never retried.
"""

import dataclasses
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from harness.checks import judge as judge_case
from harness.disk import write_atomic
from harness.engine.base import Engine
from harness.errors import Infrastructure, Interrupted
from harness.records import CaseSpec, RunOutcome, RunResult, RunSpec, Verdict, What
from harness.store import RunFolder

Judge = Callable[[CaseSpec, RunResult, RunResult, RunResult], Verdict]

TO_REPEAT: tuple[What, ...] = ("interrupted", "not_run")
"""Outcomes that say nothing of the program: made again on resume."""
MAX_OVERTAKEN = 8
"""How many smaller runs may start before a run that waits for more slots."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Progress(Protocol):
    """Who is told what happens, as it happens."""

    def run_started(self, spec: RunSpec) -> None:
        """A run was handed to the engine."""
        ...

    def run_finished(self, outcome: RunOutcome) -> None:
        """A run ended."""
        ...

    def judged(self, verdict: Verdict) -> None:
        """A case has its answer, whether new or stored earlier."""
        ...


def execute(
    folder: RunFolder,
    cases: Sequence[CaseSpec],
    engine: Engine,
    progress: Progress,
    *,
    exit_first: bool = False,
    judge: Judge = judge_case,
) -> tuple[Verdict, ...]:
    """Make the runs of `cases` that are missing and judge every case; verdicts in case order.

    Args:
        folder: where everything is stored; locked here if it is not yet.
        cases: what to do; a case with a `skip_reason` is answered without running.
        engine: makes the runs; stays open.
        progress: is told of every run made and every verdict, stored ones included.
        exit_first: stop after the first verdict that is neither passed nor skipped. Runs under way
            are killed, and the cases left have no verdict: `--resume` goes on with them.
        judge: from a case and its three runs to a verdict.

    Raises:
        UsageError: a run needs more than the engine has, or the folder is in use; nothing started.
        Interrupted: SIGINT, SIGTERM or SIGHUP; runs under way were killed, what is done is kept.
        Infrastructure: the disk or the engine failed.
    """
    folder.acquire()
    matrix = _Matrix(folder, cases, engine, progress, judge)
    for spec in matrix.waiting.values():
        engine.check(spec)
    try:
        with _stop_on_signals():
            try:
                matrix.carry_out(exit_first=exit_first)
            except BaseException:
                engine.cancel()
                raise
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted: {len(matrix.verdicts)} of {len(cases)} cases are done; "
            f"go on with --resume {folder.path}"
        ) from None
    return tuple(matrix.verdicts[case.id] for case in cases if case.id in matrix.verdicts)


class _Matrix:
    """State of one execution: which runs wait, which cases have their answer."""

    def __init__(
        self,
        folder: RunFolder,
        cases: Sequence[CaseSpec],
        engine: Engine,
        progress: Progress,
        judge: Judge,
    ) -> None:
        self._folder = folder
        self._cases = cases
        self._engine = engine
        self._progress = progress
        self._judge = judge
        self.verdicts: dict[str, Verdict] = {}
        self._ended: set[str] = set()
        self.waiting: dict[str, RunSpec] = {}
        for key, spec in unique_runs(cases).items():
            outcome = folder.finished(key)
            if outcome is None or outcome.what in TO_REPEAT:
                self.waiting[key] = spec
            else:
                self._ended.add(key)
        self._num_unended = len(self.waiting)

    def carry_out(self, *, exit_first: bool) -> None:
        """Start, wait and judge until nothing is left, or the first failure with `exit_first`."""
        remaining: list[CaseSpec] = []
        for case in self._cases:
            if not self._answer_from_store(case):
                remaining.append(case)
        queue = Queue(self.waiting.values())
        while True:
            remaining = [case for case in remaining if not self._judge_if_complete(case)]
            if exit_first and any(_stops(verdict) for verdict in self.verdicts.values()):
                self._engine.cancel()
                return
            if not self._num_unended:
                return
            while (spec := queue.next(self._engine.can_start)) is not None:
                self._start(spec)
            outcomes = self._engine.wait()
            if not outcomes:
                left = self._num_unended
                raise Infrastructure(f"the engine has nothing under way, but {left} runs are left")
            for outcome in outcomes:
                self._num_unended -= 1
                self._ended.add(outcome.key)
                self._progress.run_finished(outcome)

    def _start(self, spec: RunSpec) -> None:
        self._folder.set_aside(spec.key)
        attempt = self._folder.num_attempts(spec.key)
        self._engine.start(spec, self._folder.run_folder(spec.key), attempt=attempt)
        self._progress.run_started(spec)

    def _answer_from_store(self, case: CaseSpec) -> bool:
        """Take the stored verdict of a case whose runs need not be made again."""
        if case.skip_reason:
            self._answer(case, _skipped(case))
            return True
        if not self._is_complete(case):
            return False
        verdict = self._folder.load_verdict(case.id)
        if verdict is None or verdict.runs != _run_keys(case) or verdict.outcome == "error":
            return False
        self.verdicts[case.id] = verdict
        self._progress.judged(verdict)
        return True

    def _is_complete(self, case: CaseSpec) -> bool:
        return all(key in self._ended for key in _run_keys(case).values())

    def _judge_if_complete(self, case: CaseSpec) -> bool:
        if not self._is_complete(case):
            return False
        self._folder.seal_case(case)
        self._answer(case, self._judged(case))
        return True

    def _judged(self, case: CaseSpec) -> Verdict:
        legs = [self._folder.load_run(s) for s in (case.reference, case.control, case.candidate)]
        try:
            verdict = self._judge(case, *legs)
        except Exception as error:  # noqa: BLE001 - our own mistake must not cost the other cases
            path = self._folder.case_folder(case.id) / "judge_error.txt"
            write_atomic(path, traceback.format_exc())
            return Verdict(
                case_id=case.id,
                outcome="error",
                what="unsupported",
                message=f"the harness failed to judge: {type(error).__name__}: {error} ({path})",
                checks=(),
                runs=_run_keys(case),
                wall_s=0.0,
            )
        return dataclasses.replace(verdict, wall_s=sum(leg.outcome.wall_s for leg in legs))

    def _answer(self, case: CaseSpec, verdict: Verdict) -> None:
        self._folder.save_verdict(verdict)
        self.verdicts[case.id] = verdict
        self._progress.judged(verdict)


class Queue:
    """Runs that wait for slots, largest first.

    A run that does not fit may be overtaken by smaller ones, so that no slot idles, but only
    `MAX_OVERTAKEN` times: then nothing starts until enough slots have come free for it.
    """

    def __init__(self, specs: Iterable[RunSpec]) -> None:
        """Queue `specs`; equal sizes keep their order."""
        self._waiting = sorted(specs, key=lambda spec: -spec.world_size)
        self._num_overtaken = 0

    def next(self, can_start: Callable[[RunSpec], bool]) -> RunSpec | None:
        """Take the run to start now, None if none may."""
        for place, spec in enumerate(self._waiting):
            if can_start(spec):
                # Only the head counts: whatever starts before it is smaller or of its size.
                self._num_overtaken = self._num_overtaken + 1 if place else 0
                return self._waiting.pop(place)
            if self._num_overtaken >= MAX_OVERTAKEN:
                return None
        return None


def unique_runs(cases: Sequence[CaseSpec]) -> dict[str, RunSpec]:
    """The runs that `cases` need, by key, in the order in which they are first needed."""
    runs: dict[str, RunSpec] = {}
    for case in cases:
        if not case.skip_reason:
            for spec in (case.reference, case.control, case.candidate):
                runs.setdefault(spec.key, spec)
    return runs


def _run_keys(case: CaseSpec) -> dict[str, str]:
    return {
        "reference": case.reference.key,
        "control": case.control.key,
        "candidate": case.candidate.key,
    }


def _stops(verdict: Verdict) -> bool:
    return verdict.outcome not in ("passed", "skipped")


def _skipped(case: CaseSpec) -> Verdict:
    return Verdict(
        case_id=case.id,
        outcome="skipped",
        what="unsupported",
        message=case.skip_reason,
        checks=(),
        runs={},
        wall_s=0.0,
    )


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; ignore more of them.

    Later ones must not cut the killing of runs short, which takes seconds at most. Only the main
    thread can do this; elsewhere signals are left to whoever owns it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    told = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
