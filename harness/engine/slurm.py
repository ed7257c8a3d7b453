"""Runs as jobs of Slurm: one job a run, an agent on each of its nodes, results in the run folder.

    start   slurm.json, then sbatch under a name that is only this job's
    wait    look into the folders, ask squeue for all jobs at once, until a run is over
    adopt   a job that an earlier harness submitted is found by its name and waited for
    cancel  scancel

What a run wrote is the truth; the state of its job only explains what is missing there. Nothing is
concluded from a command that fails: a controller that is away is waited for, with a bound, and its
jobs go on. The run folder must lie on a file system that the nodes share.

What sbatch is told for a run: options, and a script that becomes the job on its first node.

How long the Slurm engine waits for what: jobs that do not start, jobs that do not leave.
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
from types import TracebackType
from typing import Self

from harness.engine.base import Slots
from harness.engine.node_reports import (
    LOG_FILE,
    NodeReport,
    Submission,
    Word,
    load_submission,
    needs_word,
    not_yet_visible,
    put_together,
    read_reports,
    save_submission,
)
from harness.engine.ranks import Limits
from harness.engine.slurm_calls import OUTSIDE, JobState, NoAnswer, QueueFull, SlurmCalls
from harness.engine.slurm_options import SlurmOptions, share_out
from harness.errors import Infrastructure, UsageError
from harness.records import RunOutcome, RunSpec
from harness.store import begin_run, save_outcome

START_S = 300.0
"""What a job may take beyond its run's timeout: cold imports, file systems, stacks."""


def request(spec: RunSpec, options: SlurmOptions) -> list[str]:
    """Options of sbatch that say what a run needs: equal for all runs of one shape."""
    shares = share_out(spec.world_size, options, spec.device)
    wall_s = options.walltime_s or spec.timeout_s + START_S
    asked = [
        f"--nodes={shares.num_nodes}",
        f"--ntasks={shares.num_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={shares.ranks_per_node * options.cpus_per_rank}",
        f"--time={math.ceil(wall_s / 60)}",
        "--requeue" if options.requeue else "--no-requeue",
    ]
    if options.gpus_per_node is not None and spec.device == "cuda":
        asked.append(f"--gres=gpu:{options.gpus_per_node}")
    if options.partition:
        asked.append(f"--partition={options.partition}")
    if options.account:
        asked.append(f"--account={options.account}")
    return [*asked, *options.args]


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


def batch_command(name: str, folder: Path, entry: str, limits: Limits) -> list[str]:
    """What the job runs on its first node."""
    return [
        sys.executable, "-P", "-m", "harness.worker", "job", "--folder", str(folder),
        "--name", name, "--entry", entry,
        "--grace-s", str(limits.grace_s), "--stacks-s", str(limits.stacks_s),
        "--output-cap-bytes", str(limits.output_cap_bytes),
    ]  # fmt: skip


def script(command: list[str]) -> str:
    """A batch script that becomes `command`."""
    return f"#!/bin/sh\nexec {shlex.join(command)}\n"


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


class Queued:
    """Since when jobs wait in the queue, as far as this harness has seen."""

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s, self._clock = most_s, clock
        self._since_s: dict[str, float] = {}

    def why_never(self, name: str, state: JobState) -> str:
        """Why a job is not waited for any longer; "" if it has started, or may still."""
        if state.state != "PENDING":
            self._since_s.pop(name, None)
            return ""
        if state.stuck:
            return f"Slurm will not start job {state.job_id} by itself: {state.reason}"
        waited_s = self._clock() - self._since_s.setdefault(name, self._clock())
        if waited_s <= self._most_s:
            return ""
        return (
            f"Slurm did not start job {state.job_id} in {self._most_s:g} s "
            f"(launch.slurm.pending_s): {state.reason}"
        )


class Leftovers:
    """Jobs whose runs are concluded: their nodes are free only once they have left, too.

    They do so by themselves. One that does not, as the process that Slurm had watch a step was
    killed, would hold its nodes until its time is up.
    """

    def __init__(self, leave_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._leave_s, self._clock = leave_s, clock
        self._since_s: dict[str, float] = {}

    def add(self, name: str) -> None:
        """A run is concluded whose job may be in the queue still."""
        self._since_s[name] = self._clock()

    def update(self, states: Mapping[str, JobState]) -> list[int]:
        """Forget those that have left; ids of jobs that have had their time, each told once."""
        overdue = []
        for name, since_s in list(self._since_s.items()):
            state = states.get(name)
            if state is None or state.leaving:
                del self._since_s[name]
            elif self._clock() - since_s > self._leave_s:
                del self._since_s[name]
                overdue.append(state.job_id)
        return overdue

    def __bool__(self) -> bool:
        return bool(self._since_s)


ENTRY = "harness.worker.main:rank_main"
DEFAULT_SLOTS = 1 << 16
"""Ranks in the queue of Slurm at a time, if nothing is said: as many as there are."""
DEFAULT_JOBS = 500


@dataclass
class _Active:
    """A job that was submitted, or is about to be."""

    spec: RunSpec
    folder: Path
    submission: Submission
    open_since_s: float | None = None
    put_off: bool = False
    is_held: bool = False
    """Not submitted yet: it waits for its reference to end, to run on the same nodes."""


class SlurmEngine:
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
        self._leftovers = Leftovers(self._patience.leave_s)
        self._queued = Queued(options.pending_s)

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
        command = batch_command(name, run.folder, self._entry, self._limits)
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

    def _begin_held(self) -> None:
        for run in [run for run in self._active.values() if run.is_held]:
            if self._references[run.spec.key] not in self._active:
                run.is_held = False
                self._begin(run)

    def _submit_put_off(self) -> None:
        """Try again what Slurm had no room for, oldest first, until it has none again."""
        for run in [run for run in self._active.values() if run.put_off]:
            if time.monotonic() - self._full_s < self._patience.full_s:
                return
            self._submit(run)

    def adopt(self, spec: RunSpec, folder: Path) -> bool:
        """Go on with the job of a run that an earlier harness submitted; see `Engine.adopt`."""
        folder = folder.absolute()
        submission = load_submission(folder)
        if submission is None or submission.cancelled:
            return False
        state = self._calls.patiently(self._calls.states).get(submission.name)
        if not self._is_worth_waiting(spec, folder, submission, state):
            return False
        if state is not None and submission.job_id is None:
            submission = replace(submission, job_id=state.job_id)
            save_submission(folder, submission)
        self._room.take(spec)
        self._active[spec.key] = _Active(spec, folder, submission)
        return True

    def _is_worth_waiting(
        self, spec: RunSpec, folder: Path, submission: Submission, state: JobState | None
    ) -> bool:
        """Whether there will be an outcome that says something of the program."""
        if state is not None and state.state not in OUTSIDE:
            return True
        reports = read_reports(folder, submission.name, submission.num_nodes)
        if len(reports) == submission.num_nodes and not needs_word(reports):
            return True
        if state is not None:
            return False
        # Out of squeue's memory: sacct may know better, and a failure must not be forgotten.
        word = self._account(submission, None)
        outcome = put_together(spec, folder, submission, reports, word)
        return outcome.what not in ("", "interrupted", "not_run")

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """Runs that have ended; see `Engine.wait`.

        Raises:
            Infrastructure: the controller is away for too long, or an outcome cannot be written.
        """
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._begin_held()
            # The files first: they may say it all, and squeue may take long to say nothing.
            ended = self._look_at_all(None)
            if not ended and self._active:
                ended = self._look_at_all(self._ask_states())
            left_s = until_s - time.monotonic()
            if ended or not self._active or left_s <= 0:
                return ended
            self._submit_put_off()
            time.sleep(min(self._patience.poll_s, left_s))

    def _look_at_all(self, states: dict[str, JobState] | None) -> list[RunOutcome]:
        return [out for key in list(self._active) if (out := self._look(key, states))]

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
        if overdue := self._leftovers.update(states):
            self._cancel_quietly(overdue, [])
        return states

    def _look(self, key: str, states: dict[str, JobState] | None) -> RunOutcome | None:
        """The outcome of a run if it is over."""
        run = self._active[key]
        submission = run.submission
        if run.put_off or run.is_held:
            return None
        reports = read_reports(run.folder, submission.name, submission.num_nodes)
        if len(reports) == submission.num_nodes and not needs_word(reports):
            return self._conclude_when_visible(run, reports, Word)
        if states is None:
            return None
        return self._ask_why(run, reports, states.get(submission.name))

    def _ask_why(
        self, run: _Active, reports: dict[int, NodeReport], state: JobState | None
    ) -> RunOutcome | None:
        """The outcome of a run whose reports are not all there, or leave something open."""
        if state is not None and (told := self._queued.why_never(run.submission.name, state)):
            return self._give_up(run, state, told)
        if state is not None and not state.ended:
            run.open_since_s = None
            return None
        if state is not None and len(reports) == run.submission.num_nodes:
            return self._conclude_when_visible(run, reports, lambda: self._word(run, state))
        # Over, or unknown, with something missing: the files, or the answer, may come late.
        if not self._waited_enough(run):
            return None
        return self._conclude(run, reports, self._word(run, state))

    def _conclude_when_visible(
        self, run: _Active, reports: dict[int, NodeReport], word: Callable[[], Word]
    ) -> RunOutcome | None:
        """Conclude once every record is here as its node left it, or has had the time to be."""
        missing = not_yet_visible(run.folder, reports)
        if not missing:
            return self._conclude(run, reports, word())
        if not self._waited_enough(run):
            return None
        outcome = put_together(run.spec, run.folder, run.submission, reports, word())
        told = f"after {self._patience.late_s:g} s {missing}: the shared folder does not show them"
        return self._finish(run, replace(outcome, what="interrupted", message=told))

    def _waited_enough(self, run: _Active) -> bool:
        now_s = time.monotonic()
        if run.open_since_s is None:
            run.open_since_s = now_s
        return now_s - run.open_since_s > self._patience.late_s

    def _word(self, run: _Active, state: JobState | None) -> Word:
        return self._account(run.submission, state)

    def _account(self, submission: Submission, state: JobState | None) -> Word:
        job_id = state.job_id if state is not None else submission.job_id
        if job_id is None:
            return Word()
        known, text, exit_code = self._calls.account(job_id, submission.name)
        return Word(state.state if state is not None else known, text, exit_code)

    def _give_up(self, run: _Active, state: JobState, told: str) -> RunOutcome:
        """End a job that would wait for ever."""
        self._cancel_quietly([state.job_id], [])
        word = Word(state.state, f"reason: {state.reason}")
        outcome = put_together(run.spec, run.folder, run.submission, {}, word)
        return self._finish(run, replace(outcome, what="not_run", message=told))

    def _conclude(self, run: _Active, reports: dict[int, NodeReport], word: Word) -> RunOutcome:
        return self._finish(run, put_together(run.spec, run.folder, run.submission, reports, word))

    def _finish(self, run: _Active, outcome: RunOutcome) -> RunOutcome:
        save_outcome(run.folder, outcome)
        self._release(run.spec.key)
        self._leftovers.add(run.submission.name)
        return outcome

    def _release(self, key: str) -> None:
        self._room.release(key)
        del self._active[key]

    def cancel(self) -> None:
        """Cancel every job. What they recorded stays; they get no outcome."""
        all_runs = list(self._active.values())
        for run in all_runs:
            self._release(run.spec.key)
        runs = [run for run in all_runs if not run.is_held]
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
        while time.monotonic() < until_s:
            try:
                states = self._calls.states()
            except (NoAnswer, UsageError, Infrastructure):
                return
            if all(name not in states or states[name].ended for name in names):
                return
            time.sleep(self._patience.poll_s)

    def close(self) -> None:
        """Cancel every job; those whose runs are concluded have their time to leave."""
        self.cancel()
        while self._leftovers and self._ask_states_once() is not None:
            time.sleep(self._patience.poll_s if self._leftovers else 0.0)

    def _ask_states_once(self) -> dict[str, JobState] | None:
        try:
            return self._ask_states()
        except Infrastructure:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
