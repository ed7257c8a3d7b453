"""Runs as jobs of Slurm: one job a run, an agent on each of its nodes, results in the run folder.

    start   slurm.json, then sbatch under a name that is only this job's
    wait    look into the folders, ask squeue for all jobs at once, until a run is over
    adopt   a job that an earlier harness submitted is found by its name and waited for
    cancel  scancel

What a run wrote is the truth; the state of its job only explains what is missing there. Nothing is
concluded from a command that fails: a controller that is away is waited for, with a bound, and its
jobs go on. The run folder must lie on a file system that the nodes share.
"""

import math
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engine.base import Closing, Slots
from harness.engine.node_reports import (
    LOG_FILE,
    OUTSIDE,
    NodeReport,
    Word,
    needs_word,
    not_yet_visible,
    put_together,
    read_reports,
)
from harness.engine.ranks import Limits, limit_options
from harness.engine.slurm_calls import JobState, NoAnswer, QueueFull, SlurmCalls
from harness.engine.slurm_job import (
    SlurmOptions,
    Submission,
    load_submission,
    request,
    save_submission,
    share_out,
)
from harness.errors import Infrastructure, UsageError
from harness.records import RunOutcome, RunSpec
from harness.store import begin_run, save_outcome

ENTRY = "harness.worker.main:rank_main"
DEFAULT_SLOTS = 1 << 16
"""Ranks in the queue of Slurm at a time, if nothing is said: as many as there are."""
DEFAULT_JOBS = 500


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, in seconds.

    Attributes:
        poll_s: between two looks at the jobs.
        late_s: for files of a job that is over, or a job that squeue does not know (yet).
        answer_s: for one command.
        away_s: for a controller that does not answer.
        cancel_s: for cancelled jobs to be gone.
        full_s: between two tries to submit while Slurm takes no more jobs of ours.
        leave_s: for a job to leave when every node has reported.
    """

    poll_s: float = 1.0
    late_s: float = 75.0
    answer_s: float = 60.0
    away_s: float = 900.0
    cancel_s: float = 30.0
    full_s: float = 10.0
    leave_s: float = 60.0


@dataclass
class _Active:
    """A job that was submitted, or is about to be.

    Attributes:
        open_since_s: since when it is over with something missing.
        queued_since_s: since when it waits in the queue, as far as this harness has seen.
        put_off: Slurm takes no more jobs of ours now.
        is_held: not submitted yet: it waits for its reference to end, to run on the same nodes.
    """

    spec: RunSpec
    folder: Path
    submission: Submission
    open_since_s: float | None = None
    queued_since_s: float | None = None
    put_off: bool = False
    is_held: bool = False

    def reports(self) -> dict[int, NodeReport]:
        """Of its nodes, as far as they show."""
        return read_reports(self.folder, self.submission.name, self.submission.num_nodes)

    def conclude(self, reports: Mapping[int, NodeReport], word: Word) -> RunOutcome:
        """What happened to it."""
        submission = self.submission
        nodes, attempt = submission.num_nodes, submission.attempt
        found = put_together(
            self.spec, self.folder, reports, word, num_nodes=nodes, attempt=attempt
        )
        return found if reports else replace(found, started_unix_s=submission.submitted_unix_s)


class SlurmEngine(Closing):
    """Runs on the nodes of a cluster, each as a job of its own."""

    def __init__(
        self,
        options: SlurmOptions,
        *,
        slots: int = DEFAULT_SLOTS,
        jobs: int | None = None,
        entry: str = ENTRY,
        limits: Limits | None = None,
        patience: Patience | None = None,
        references: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; nothing is submitted yet.

        Args:
            options: what each job asks for.
            slots: ranks that may be submitted at the same time.
            jobs: jobs that may be, None for a number that schedulers bear well.
            entry: `module:function` of a `RankMain`.
            limits: how patient agents are.
            patience: how patient this engine is.
            references: by key of a run, the key of the run whose nodes it is to have.

        Raises:
            UsageError: counts that make no sense.
        """
        self._room = Slots(slots, ("",) * slots, jobs or DEFAULT_JOBS)
        self._options, self._entry = options, entry
        self._limits, self._patience = limits or Limits(), patience or Patience()
        self._calls = SlurmCalls(answer_s=self._patience.answer_s, away_s=self._patience.away_s)
        self._active: dict[str, _Active] = {}
        self._references = references or {}
        self._would_take: set[tuple[str, ...]] = set()
        self._answered_s = time.monotonic()
        self._full_s = -math.inf
        # Jobs whose runs are concluded, and since when: their nodes are free once they have left.
        self._leaving_s: dict[str, float] = {}

    @property
    def slots(self) -> int:
        """How many ranks may be submitted at the same time."""
        return self._room.num_slots

    def check(self, spec: RunSpec) -> None:
        """Refuse a run that Slurm would never start.

        Raises:
            UsageError: more ranks than slots, GPUs not asked for, or Slurm's own refusal.
            Infrastructure: no Slurm, or no answer.
        """
        self._room.check(spec)
        if spec.device == "cuda" and self._options.gpus_per_node is None:
            raise UsageError(
                f"run {spec.key} needs GPUs: expected launch.slurm.gpus_per_node, got nothing"
            )
        shape = tuple(request(spec, self._options))
        if shape not in self._would_take:
            self._calls.would_take(shape, script(["true"]))
            self._would_take.add(shape)

    def can_start(self, spec: RunSpec) -> bool:
        """Whether one more job may be submitted now."""
        # Each try at a full queue may take as long as `answer_s`.
        return self._room.fits(spec) and not any(run.put_off for run in self._active.values())

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        """Submit the job of a run; see `Engine.start`."""
        self._room.take(spec)
        shares = share_out(spec.world_size, self._options, spec.device)
        submission = Submission(
            name=f"harness-{spec.key}-{uuid.uuid4().hex[:10]}",
            num_nodes=shares.num_nodes,
            ranks_per_node=shares.ranks_per_node,
            submitted_unix_s=time.time(),
            attempt=attempt,
        )
        reference = self._active.get(self._references.get(spec.key, ""))
        held = not attempt and reference is not None and not reference.is_held
        run = _Active(spec, folder.absolute(), submission, is_held=held)
        # Known before Slurm hears of it: a signal in between must find it to cancel.
        self._active[spec.key] = run
        if not held:
            self._begin(run)

    def _begin(self, run: _Active) -> None:
        submission = run.submission
        try:
            begin_run(run.folder, run.spec)
            save_submission(run.folder, submission)
            self._submit(run)
        except (UsageError, Infrastructure):
            self._release(run.spec.key)
            with suppress(Infrastructure):
                # Should Slurm have heard of it after all, the job finds this and leaves.
                save_submission(run.folder, replace(submission, cancelled=True))
            raise

    def _submit(self, run: _Active) -> None:
        """Hand a job to Slurm; put it off if Slurm takes no more now and others are on their way.

        Raises:
            UsageError: refused for good.
            Infrastructure: no answer.
        """
        name = run.submission.name
        options = [*identity(name, run.folder), *request(run.spec, self._options)]
        options += self._same_nodes(run)
        command = [
            sys.executable, "-P", "-m", "harness.worker", "job", "--folder", str(run.folder),
            "--name", name, "--entry", self._entry, *limit_options(self._limits),
        ]  # fmt: skip
        try:
            job_id = self._calls.submit(options, script(command), name, run.put_off)
        except QueueFull:
            # With nothing of ours in the queue there may be no end to wait for.
            if not run.put_off and sum(not other.is_held for other in self._active.values()) == 1:
                raise
            run.put_off, self._full_s = True, time.monotonic()
            return
        run.put_off = False
        run.submission = replace(run.submission, job_id=job_id)
        save_submission(run.folder, run.submission)

    def _same_nodes(self, run: _Active) -> list[str]:
        """The option of sbatch for the nodes that the reference had, if it told of as many."""
        key = self._references.get(run.spec.key)
        # A later attempt goes where it may: those nodes may be what kept the first from starting.
        if key is None or run.submission.attempt:
            return []
        folder = run.folder.with_name(key)
        theirs = load_submission(folder)
        if theirs is None or theirs.num_nodes != run.submission.num_nodes:
            return []
        reports = read_reports(folder, theirs.name, theirs.num_nodes).values()
        return [f"--nodelist={nodes}" for nodes in {report.nodes for report in reports} - {""}]

    def _begin_more(self) -> None:
        """Submit what waited for its reference, and try again, oldest first, what was put off."""
        for run in list(self._active.values()):
            if run.is_held and self._references[run.spec.key] not in self._active:
                run.is_held = False
                self._begin(run)
            elif run.put_off and time.monotonic() - self._full_s >= self._patience.full_s:
                self._submit(run)

    def adopt(self, spec: RunSpec, folder: Path) -> bool:
        """Go on with the job of a run that an earlier harness submitted; see `Engine.adopt`."""
        folder = folder.absolute()
        submission = load_submission(folder)
        if submission is None or submission.cancelled:
            return False
        run = _Active(spec, folder, submission)
        state = self._calls.patiently(self._calls.states).get(submission.name)
        if not self._is_worth_waiting(run, state):
            return False
        if state is not None and submission.job_id is None:
            run.submission = replace(submission, job_id=state.job_id)
            save_submission(folder, run.submission)
        self._room.take(spec)
        self._active[spec.key] = run
        return True

    def _is_worth_waiting(self, run: _Active, state: JobState | None) -> bool:
        """Whether there will be an outcome that says something of the program."""
        if state is not None and state.state not in OUTSIDE:
            return True
        reports = run.reports()
        if len(reports) == run.submission.num_nodes and not needs_word(reports):
            return True
        if state is not None:
            return False
        # Out of squeue's memory: sacct may know better, and a failure must not be forgotten.
        outcome = run.conclude(reports, self._word(run, None))
        return outcome.what not in ("", "interrupted", "not_run")

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended; see `Engine.wait`.

        Raises:
            Infrastructure: the controller is away for too long, or an outcome cannot be written.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._begin_more()
            # The files first: they may say it all, and squeue may take long to say nothing.
            ended = self._look_at_all(None)
            if not ended and self._active:
                ended = self._look_at_all(self._ask_states())
            left_s = until_s - time.monotonic()
            if ended or not self._active or left_s <= 0:
                return ended
            time.sleep(min(self._patience.poll_s, left_s))

    def _look_at_all(self, states: Mapping[str, JobState] | None) -> list[RunOutcome]:
        """Outcomes of runs that are over; `states` None: by their files alone."""
        submitted = [run for run in self._active.values() if not (run.put_off or run.is_held)]
        looks = (self._look(run, states) for run in submitted)
        return [outcome for outcome in looks if outcome is not None]

    def _ask_states(self) -> dict[str, JobState] | None:
        """State of every job; None while the controller is away."""
        try:
            states = self._calls.states()
        except (NoAnswer, UsageError) as error:
            away_s = time.monotonic() - self._answered_s
            if away_s > self._patience.away_s:
                raise Infrastructure(
                    f"Slurm has not answered for {away_s:.0f} s, its jobs go on without us; "
                    f"when it does, go on with --resume: {error}"
                ) from None
            return None
        self._answered_s = time.monotonic()
        self._end_leftovers(states)
        return states

    def _end_leftovers(self, states: Mapping[str, JobState]) -> None:
        """Cancel jobs that stay when their runs are concluded, until their time is up otherwise.

        So does one whose step has lost the process that Slurm had watch it.
        """
        overdue = []
        for name, since_s in list(self._leaving_s.items()):
            state = states.get(name)
            late = time.monotonic() - since_s > self._patience.leave_s
            if state is None or state.leaving or late:
                del self._leaving_s[name]
            if state is not None and not state.leaving and late:
                overdue.append(state.job_id)
        if overdue:
            self._cancel_quietly(overdue, [])

    def _look(self, run: _Active, states: Mapping[str, JobState] | None) -> RunOutcome | None:
        """The outcome of a run if it is over."""
        reports = run.reports()
        whole = len(reports) == run.submission.num_nodes
        if whole and not needs_word(reports):
            return self._conclude_when_visible(run, reports, Word)
        if states is None:
            return None
        state = states.get(run.submission.name)
        if state is not None and not state.ended:
            run.open_since_s = None
            return self._give_up(run, state)
        if state is not None and whole:
            return self._conclude_when_visible(run, reports, lambda: self._word(run, state))
        # Over, or unknown, with something missing: the files, or the answer, may come late.
        if not self._waited_enough(run):
            return None
        return self._finish(run, run.conclude(reports, self._word(run, state)))

    def _give_up(self, run: _Active, state: JobState) -> RunOutcome | None:
        """Cancel a job that is in the queue in vain."""
        told = self._why_never(run, state)
        if not told:
            return None
        self._cancel_quietly([state.job_id], [])
        outcome = run.conclude({}, Word(state.state))
        return self._finish(run, replace(outcome, what="not_run", message=told))

    def _why_never(self, run: _Active, state: JobState) -> str:
        """Why a job in the queue is not waited for any longer; "" if it started, or may still."""
        if state.state != "PENDING":
            run.queued_since_s = None
            return ""
        if state.stuck:
            return f"Slurm will not start job {state.job_id} by itself: {state.reason}"
        now_s, most_s = time.monotonic(), self._options.pending_s
        run.queued_since_s = now_s if run.queued_since_s is None else run.queued_since_s
        if now_s - run.queued_since_s <= most_s:
            return ""
        return (
            f"Slurm did not start job {state.job_id} in {most_s:g} s "
            f"(launch.slurm.pending_s): {state.reason}"
        )

    def _conclude_when_visible(
        self, run: _Active, reports: Mapping[int, NodeReport], word: Callable[[], Word]
    ) -> RunOutcome | None:
        """Conclude once every record is here as its node left it, or has had the time to be."""
        missing = not_yet_visible(run.folder, reports)
        if not missing:
            return self._finish(run, run.conclude(reports, word()))
        if not self._waited_enough(run):
            return None
        told = f"after {self._patience.late_s:g} s {missing}: the shared folder does not show them"
        outcome = run.conclude(reports, word())
        return self._finish(run, replace(outcome, what="interrupted", message=told))

    def _waited_enough(self, run: _Active) -> bool:
        now_s = time.monotonic()
        run.open_since_s = now_s if run.open_since_s is None else run.open_since_s
        return now_s - run.open_since_s > self._patience.late_s

    def _word(self, run: _Active, state: JobState | None) -> Word:
        """What Slurm says of a job that is over."""
        name = run.submission.name
        job_id = state.job_id if state is not None else run.submission.job_id
        if job_id is None:
            return Word(job=f"Slurm job {name} of unknown id")
        known = self._calls.account(job_id, name)
        ended_as = state.state if state is not None else known.state
        return Word(ended_as, known.text, known.exit_code, f"Slurm job {job_id}")

    def _finish(self, run: _Active, outcome: RunOutcome) -> RunOutcome:
        save_outcome(run.folder, outcome)
        self._release(run.spec.key)
        self._leaving_s[run.submission.name] = time.monotonic()
        return outcome

    def _release(self, key: str) -> None:
        self._room.release(key)
        del self._active[key]

    def cancel(self) -> None:
        """Cancel every job. What they recorded stays; they get no outcome."""
        runs = [run for run in self._active.values() if not run.is_held]
        for key in list(self._active):
            self._release(key)
        if not runs:
            return
        nameless = [run for run in runs if run.submission.job_id is None]
        for run in nameless:
            # It may be on its way still: when it starts it will find this, and leave.
            save_submission(run.folder, replace(run.submission, cancelled=True))
        ids = [run.submission.job_id for run in runs if run.submission.job_id is not None]
        self._cancel_quietly(ids, [run.submission.name for run in nameless])
        self._await_gone({run.submission.name for run in runs})

    def _cancel_quietly(self, ids: list[int], names: list[str]) -> None:
        """Cancel as far as Slurm answers: what it does not hear of, `--resume` finds again."""
        try:
            self._calls.cancel(job_ids=ids, names=names)
        except (NoAnswer, UsageError, Infrastructure) as error:
            sys.stderr.write(f"harness: jobs may go on, scancel failed: {error}\n")

    def _await_gone(self, names: set[str]) -> None:
        until_s = time.monotonic() + self._patience.cancel_s
        with suppress(NoAnswer, UsageError, Infrastructure):
            while time.monotonic() < until_s:
                states = self._calls.states()
                if all(name not in states or states[name].ended for name in names):
                    return
                time.sleep(self._patience.poll_s)

    def close(self) -> None:
        """Cancel every job; those whose runs are concluded have their time to leave."""
        self.cancel()
        with suppress(Infrastructure):
            while self._leaving_s and self._ask_states() is not None:
                time.sleep(self._patience.poll_s if self._leaving_s else 0.0)


def identity(name: str, folder: Path) -> list[str]:
    """Options of sbatch that are only this job's.

    Raises:
        UsageError: Slurm would not write to such a folder.
    """
    if "\\" in str(folder):
        # Slurm takes the backslashes out of the name of the file, and there is no way to quote one.
        raise UsageError(f"engine slurm: expected a path without a backslash, got {folder}")
    log = str(folder / LOG_FILE).replace("%", "%%")
    return [f"--job-name={name}", f"--output={log}", "--open-mode=append", "--export=ALL"]


def script(command: list[str]) -> str:
    """A batch script that becomes `command`."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"
