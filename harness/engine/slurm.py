"""Runs on the nodes of one allocation of Slurm, one after the other, each a step of agents.

    first run   the allocation that the harness is in (SLURM_JOB_ID), or one from `salloc`, with the
                nodes that the largest run needs
    start       step.json into the run's folder, then srun: one agent (`harness.worker node`) a node
    wait        until srun has ended: the nodes' reports, and Slurm's word where one is missing
    close       the allocation is given back

Every step begins at the first node, so all runs of a case are on the same nodes. `salloc` holds the
allocation while we hold its standard input; one that is left all the same has a name that only this
run folder gives, and is cancelled first. The run folder must be on a file system of all nodes.
Ranks go on nodes in blocks of neighbours, as even as they come: 8 on 3 nodes: [0 1 2] [3 4 5] [6 7]
"""

import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

from harness.codec import Json, dumps
from harness.engine import leader
from harness.engine.base import Closing
from harness.engine.evidence import tail_of
from harness.engine.leader import LOG_FILE, NO_WORD, Word, not_yet_visible
from harness.engine.process import die_with_parent, server_environment
from harness.engine.ranks import Limits, limit_options
from harness.errors import Infrastructure, UsageError, one_line
from harness.provenance import code_variables
from harness.records import CaseSpec, RecordError, RunOutcome, RunSpec
from harness.repeats import unique_runs
from harness.store import begin_run, save_outcome
from harness.store.files import write_atomic

ENTRY = "harness.worker.main:rank_main"
OURS = dict.fromkeys(
    ("--job-name", "-J", "--no-shell", "--kill-command", "-K", "--quiet", "-Q", "--overcommit",
     "-O", "--no-kill", "-k", "--chdir", "-D"), "",
) | {
    "--nodes": "nodes", "-N": "nodes", "--ntasks": "nodes", "-n": "nodes",
    "--ntasks-per-node": "ranks_per_node", "--cpus-per-task": "cpus_per_rank",
    "-c": "cpus_per_rank", "--time": "walltime_s", "-t": "walltime_s",
    "--partition": "partition", "-p": "partition", "--account": "account", "-A": "account",
    "--gres": "gpus_per_node", "--gpus-per-node": "gpus_per_node", "--gpus": "gpus_per_node",
    "-G": "gpus_per_node",
}  # fmt: skip
"""Options of salloc that the engine sets, and the key of `launch.slurm` to say instead."""
PASSING = (
    "unable to contact slurm controller", "socket timed out", "connection refused",
    "connection reset", "connection timed out", "temporarily", "standby", "zero bytes were",
    "communication", "transport endpoint", "try again", "munge", "plugin_init", "insane message",
)  # fmt: skip
"""What the commands say, in lower case, of trouble that has nothing to do with the request."""
STUCK = (
    "launch failed requeued held", "badconstraints", "invalidaccount", "invalidqos",
    "dependencyneversatisfied", "partitionconfig", "partitiontimelimit", "partitionnodelimit",
)  # fmt: skip
"""Reasons, in lower case, for which a pending job would wait for ever; others pass."""
SETTINGS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Variables that say which Slurm; all others of that name are of a job that we may be in."""
START_S = 300.0
"""What a step may take beyond its run's timeout: cold imports, file systems, stacks."""
STEP_FILE = "step.json"
MANIFEST_KEY = "slurm"


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Json):
    """`launch.slurm`, what is asked for; what is left out is the cluster's default.

    `walltime_s` limits the allocation, `pending_s` its time in the queue. A run is spread over
    `nodes`, at most `ranks_per_node` on each (by default its GPUs). `args`: more of salloc's.
    """

    partition: str = ""
    account: str = ""
    walltime_s: float | None = None
    pending_s: float = 86_400.0
    nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_rank: int = 1
    args: tuple[str, ...] = ()


DEFAULT_OPTIONS = SlurmOptions()


@dataclass(frozen=True, kw_only=True)
class Step(Json):
    """A run as agents find it in step.json; no other step has its `name`."""

    name: str
    num_nodes: int
    ranks_per_node: int

    def ranks(self, node: int, world_size: int) -> range:
        """Ranks of a node, never none."""
        first = node * self.ranks_per_node
        return range(first, min(first + self.ranks_per_node, world_size))


def share_out(world_size: int, options: SlurmOptions, device: str) -> Step:
    """Spread a run over as few nodes as the options allow."""
    most = options.ranks_per_node or (options.gpus_per_node if device == "cuda" else None)
    wanted = max(min(options.nodes, world_size), -(-world_size // (most or world_size)))
    each = -(-world_size // wanted)
    # Blocks of that size may fill fewer nodes than were asked for; none is left empty.
    return Step(name=uuid.uuid4().hex, num_nodes=-(-world_size // each), ranks_per_node=each)


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait, in seconds: between two looks; for files of a step that is over; for a
    controller that is away; for what was cancelled; for a step whose nodes have all reported."""

    poll_s: float = 1.0
    late_s: float = 75.0
    away_s: float = 900.0
    cancel_s: float = 60.0
    leave_s: float = 60.0


# --- the allocation -------------------------------------------------------------------------------


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what would change a command or, handed on, a step: variables of a job of ours."""
    others = ("SLURM_", "SQUEUE_", "SCANCEL_", "SRUN_")
    return {k: v for k, v in environ.items() if k in SETTINGS or not k.startswith(others)}


def ask(*command: str) -> str:
    """What a command of Slurm prints; "" if it fails or does not answer."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=60,
            stdin=subprocess.DEVNULL, env=own_environment(os.environ), start_new_session=True,
        )  # fmt: skip
        return done.stdout if done.returncode == 0 else ""
    return ""


def _passes(words: str) -> bool:
    return any(phrase in words.lower() for phrase in PASSING)


def _end(process: "subprocess.Popen[bytes]", patience_s: float) -> None:
    """Wait for a process that was asked to go; kill it if it does not."""
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def job_word(job_id: str, late_s: float, poll_s: float) -> Word:
    """What became of a job; `state` "" while it lives, or where nobody knows."""
    until_s = time.monotonic() + late_s
    while True:
        found = dict(re.findall(r"(\w+)=(\S+)", ask("scontrol", "-o", "show", "job", job_id)))
        state = found.get("JobState", "")
        if state != "COMPLETING" or time.monotonic() > until_s:
            break
        time.sleep(poll_s)
    if state in ("", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING"):
        return NO_WORD
    reason, nodes = found.get("Reason", ""), found.get("NodeList", "?")
    return Word(state, f"Slurm job {job_id} ended as {state} ({reason}, nodes {nodes})")


def cancel_leftovers(name: str, patience: Patience) -> None:
    """Cancel this user's jobs of that name, and wait until they are gone."""
    mine = (f"--user={os.getuid()}", f"--name={name}")
    until_s = time.monotonic() + patience.cancel_s
    while ask("squeue", "--noheader", "--format=%A", *mine).strip():
        ask("scancel", "--quiet", *mine)
        if time.monotonic() > until_s:
            raise Infrastructure(f"Slurm did not cancel the jobs named {name}: scancel them")
        time.sleep(patience.poll_s)


# --- the engine -----------------------------------------------------------------------------------


@dataclass
class _Active:
    """The run under way, and the process of its srun; `whole_s`: when all nodes had reported."""

    spec: RunSpec
    folder: Path
    attempt: int
    step: Step
    srun: "subprocess.Popen[bytes]"
    started_unix_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)
    whole_s: float | None = None

    def reports(self) -> tuple[dict[int, leader.NodeReport], bool]:
        """Of its nodes, as far as they show, and whether these are all."""
        found = leader.read_reports(self.folder, self.step.name, self.step.num_nodes)
        return found, len(found) == self.step.num_nodes

    def is_overdue(self, now_s: float, leave_s: float) -> bool:
        """Whether its srun waits for what will not come."""
        if self.whole_s is None and self.reports()[1]:
            self.whole_s = now_s
        late = self.whole_s is not None and now_s - self.whole_s > leave_s
        return late or now_s - self.started_s > self.spec.timeout_s + START_S

    def stop(self, patience_s: float) -> None:
        """End the step: srun kills its tasks on SIGTERM."""
        self.srun.terminate()
        _end(self.srun, patience_s)


class SlurmEngine(Closing):
    """Runs on the nodes of one allocation, one at a time; nothing is asked for before the first."""

    def __init__(
        self, options: SlurmOptions, *, slots: int = 1 << 16, entry: str = ENTRY,
        limits: Limits | None = None, patience: Patience | None = None,
    ) -> None:  # fmt: skip
        """Prepare runs of at most `slots` ranks; `entry` is `module:function` of a `RankMain`."""
        self.slots = slots
        self._options, self._entry = options, entry
        self._limits, self._patience = limits or Limits(), patience or Patience()
        # What the runs that were checked need, and what is held.
        self._nodes, self._cpus, self._gpus = 1, 1, False
        self._job_id, self._num_held = "", 0
        self._salloc: subprocess.Popen[bytes] | None = None
        self._words: IO[bytes] | None = None
        self._active: _Active | None = None
        self._outer = os.environ.get("SLURM_JOB_ID", "")
        nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or "1"
        self._outer_nodes = int(nodes)

    def check(self, spec: RunSpec) -> None:
        """Refuse a run that could never start; the allocation will have the nodes that it needs.

        Raises `UsageError`, or `Infrastructure` if there is no Slurm here.
        """
        if not 1 <= spec.world_size <= self.slots:
            raise UsageError(
                f"run {spec.key} needs {spec.world_size} slots, there are {self.slots}"
            )
        if spec.device == "cuda" and self._options.gpus_per_node is None:
            raise UsageError(
                f"run {spec.key} needs GPUs: expected launch.slurm.gpus_per_node, got nothing"
            )
        for program in ("salloc", "srun", "scontrol"):
            if shutil.which(program) is None:
                raise Infrastructure(
                    f"engine slurm: {program} was not found on PATH; legal values of --engine "
                    "here: local"
                )
        step = share_out(spec.world_size, self._options, spec.device)
        if self._outer and step.num_nodes > self._outer_nodes:
            raise UsageError(
                f"run {spec.key} needs {step.num_nodes} nodes, Slurm job {self._outer} has "
                f"{self._outer_nodes}"
            )
        self._nodes = max(self._nodes, step.num_nodes)
        self._cpus = max(self._cpus, step.ranks_per_node * self._options.cpus_per_rank)
        self._gpus = self._gpus or spec.device == "cuda"

    def can_start(self, spec: RunSpec) -> bool:
        """Whether no run is under way."""
        return self._active is None

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        """Start the step of a run, and wait for the allocation first; see `Engine.start`."""
        self.check(spec)
        folder = folder.absolute()
        self._allocate(folder.parent)
        step = share_out(spec.world_size, self._options, spec.device)
        begin_run(folder, spec)
        write_atomic(folder / STEP_FILE, dumps(step) + "\n")
        srun = self._begin(step, folder)
        self._active = _Active(spec, folder, attempt, step, srun)

    @property
    def _is_held(self) -> bool:
        """Whether there is an allocation that Slurm has not taken back, as far as salloc knows."""
        return bool(self._job_id) and (self._salloc is None or self._salloc.poll() is None)

    def _allocate(self, root: Path) -> None:
        """Have an allocation; another one if there is none any more, or it has too few nodes."""
        if self._is_held and self._num_held >= self._nodes:
            return
        self.close()
        if self._outer:
            if (word := job_word(self._outer, 0.0, 0.0)).state:
                raise Infrastructure(f"{word.text}; go on with --resume in another one")
            self._job_id, self._num_held = self._outer, self._outer_nodes
            return
        name = f"harness-{hashlib.sha256(os.fsencode(root)).hexdigest()[:16]}"
        cancel_leftovers(name, self._patience)
        until_s = time.monotonic() + self._options.pending_s
        while not self._ask_for_nodes(name, until_s):
            time.sleep(self._patience.poll_s)

    @property
    def _said(self) -> str:
        """What salloc printed, in one line."""
        assert self._words is not None
        self._words.seek(0)
        lines = self._words.read().decode(errors="replace").splitlines()
        return "; ".join(line.strip() for line in lines if line.strip())

    def _ask_for_nodes(self, name: str, until_s: float) -> bool:
        """Nodes by salloc; False if Slurm did not answer, and there is time to ask again."""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the allocation
        # Known at once: a signal from now on must find it to give back.
        salloc = self._salloc = subprocess.Popen(
            ["salloc", "--kill-command", f"--job-name={name}", *self._request(), "cat"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._words,
            env=_environment(), start_new_session=True,
        )  # fmt: skip
        self._num_held = self._nodes
        reason, asked_s = "", -math.inf
        while (granted := re.search(r"Granted job allocation (\d+)", self._said)) is None:
            pending = re.search(r"Pending job allocation (\d+)", self._said)
            job_id, now_s = pending.group(1) if pending else "", time.monotonic()
            if salloc.poll() is not None:
                said = one_line(self._said)[:500]
                self.close()
                if _passes(said) and now_s <= until_s:
                    return False
                raise UsageError(f"salloc refused: {said}")
            if job_id and now_s - asked_s > min(10 * self._patience.poll_s, until_s - now_s):
                asked_s, before = now_s, reason
                reason = ask("squeue", "-h", "-o%r", f"-j{job_id}").strip() or reason
                if reason.lower().startswith(STUCK):
                    self.close()
                    raise UsageError(f"Slurm will not start job {job_id} by itself: {reason}")
                if reason not in (before, "None"):
                    sys.stderr.write(f"harness: Slurm job {job_id} waits: {reason}\n")
            if now_s > until_s:
                said = reason or self._said
                self.close()
                raise Infrastructure(
                    f"Slurm did not start job {job_id} in {self._options.pending_s:g} s "
                    f"(launch.slurm.pending_s): {said}"
                )
            time.sleep(min(self._patience.poll_s, 0.1))
        self._job_id = granted.group(1)
        return True

    def _request(self) -> list[str]:
        """Options of salloc."""
        options = self._options
        minutes = "" if options.walltime_s is None else math.ceil(options.walltime_s / 60)
        wanted = {
            "--nodes=": self._nodes, "--ntasks-per-node=": 1, "--cpus-per-task=": self._cpus,
            "--time=": minutes, "--gres=gpu:": (options.gpus_per_node or "") if self._gpus else "",
            "--partition=": options.partition, "--account=": options.account,
        }  # fmt: skip
        return [f"{name}{value}" for name, value in wanted.items() if value != ""] + [*options.args]

    def _begin(self, step: Step, folder: Path) -> "subprocess.Popen[bytes]":
        """Start one agent a node, on the first nodes; a failing one ends the others."""
        command = [
            "srun", f"--jobid={self._job_id}", f"--nodes={step.num_nodes}", "--relative=0",
            f"--ntasks={step.num_nodes}", "--ntasks-per-node=1", "--overlap", "--whole",
            "--cpu-bind=none", "--distribution=block", "--mpi=none", "--label", "--export=ALL",
            # The first to end well must not start a countdown for the others.
            "--kill-on-bad-exit=1", "--wait=0", "--input=none",
            sys.executable, "-P", "-m", "harness.worker", "node", "--folder", str(folder),
            "--name", step.name, "--entry", self._entry, *limit_options(self._limits),
        ]  # fmt: skip
        mine = os.getpid()
        with (folder / LOG_FILE).open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(),
                start_new_session=True,
                # It ends its step, which outlives us otherwise where the allocation is not ours.
                preexec_fn=lambda: die_with_parent(mine, gently=True),
            )  # fmt: skip

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        """The run that has ended; see `Engine.wait` (`Infrastructure`: no room for its outcome)."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (run := self._active) is not None:
            left_s = until_s - time.monotonic()
            try:
                run.srun.wait(max(min(left_s, self._patience.poll_s), 0.0))
            except subprocess.TimeoutExpired:
                if not run.is_overdue(time.monotonic(), self._patience.leave_s):
                    if left_s <= 0:
                        break
                    continue
                run.stop(self._patience.cancel_s)
            if not self._begins_again(run):
                return [self._conclude(run)]
        return []

    def _begins_again(self, run: _Active) -> bool:
        """Whether the step was started once more, as no controller was there to start it."""
        log = tail_of(run.folder / LOG_FILE)
        began = "slurmstepd" in log or any(run.folder.glob("rank*"))
        late = time.monotonic() - run.started_s > self._patience.away_s
        if run.srun.returncode == 0 or began or late or not (_passes(log) and self._is_held):
            return False
        time.sleep(self._patience.poll_s)
        (run.folder / LOG_FILE).unlink()
        run.srun = self._begin(run.step, run.folder)
        return True

    def _conclude(self, run: _Active) -> RunOutcome:
        """The outcome, once every record is here as its node left it, or has had the time to be."""
        patience, word, (reports, whole) = self._patience, NO_WORD, run.reports()
        if self._job_id and (not whole or leader.needs_word(reports.values())):
            word = job_word(self._job_id, patience.late_s, patience.poll_s)
        until_s = time.monotonic() + (0.0 if word.state else patience.late_s)
        while not whole or not_yet_visible(run.folder, reports):
            if time.monotonic() > until_s:
                break
            time.sleep(min(patience.poll_s, 0.2))
            reports, whole = run.reports()
        outcome = leader.put_together(
            run.spec, run.folder, reports,
            word._replace(killed_by=max(run.srun.returncode - 128, 0)),
            num_nodes=run.step.num_nodes, attempt=run.attempt,
        )  # fmt: skip
        if not word.state and (missing := not_yet_visible(run.folder, reports)):
            why = f"after {patience.late_s:g} s {missing}: the shared folder does not show them"
            outcome = replace(outcome, what="interrupted", message=why)
        if not reports:
            outcome = replace(outcome, started_unix_s=run.started_unix_s)
        save_outcome(run.folder, outcome)
        self._active = None
        if word.state:
            self.close()
        return outcome

    def cancel(self) -> None:
        """Kill the run under way. What it recorded stays; it gets no outcome."""
        run, self._active = self._active, None
        if run is not None:
            run.stop(self._patience.cancel_s)

    def close(self) -> None:
        """Kill the run under way and give the allocation back."""
        self.cancel()
        salloc, self._salloc = self._salloc, None
        job_id, self._job_id = self._job_id, ""
        if salloc is None or salloc.stdin is None or self._words is None:
            return  # none, or the one that we are in
        with suppress(OSError):
            salloc.stdin.close()
        if not job_id:
            salloc.terminate()  # it waits in the queue still
        _end(salloc, self._patience.cancel_s)
        if job_id:
            ask("scancel", "--quiet", job_id)  # salloc may have been killed
        self._words.close()


def _environment() -> dict[str, str]:
    return server_environment(own_environment(os.environ)) | code_variables()


# --- what differs before a run is started: this machine is only where the harness waits ----------


def device_on_slurm(wanted: str, options: SlurmOptions) -> Literal["cpu", "cuda"]:
    """The device that `auto`, `cpu` or `cuda` means (`UsageError`: GPUs that nobody asked for)."""
    if options.gpus_per_node is None and wanted == "cuda":
        raise UsageError(
            "device cuda on Slurm: expected launch.slurm.gpus_per_node (--slurm "
            "gpus_per_node=8), got nothing"
        )
    return "cpu" if wanted == "cpu" or options.gpus_per_node is None else "cuda"


def slots_on_slurm(wanted: int | None, cases: Sequence[CaseSpec]) -> int:
    """Ranks that a run may have: as many as the largest wants."""
    return wanted or max((run.world_size for run in unique_runs(cases).values()), default=1)


def stored_options(manifest: Mapping[str, Any]) -> SlurmOptions | None:
    """What an earlier harness asked of Slurm, None: nothing (`UsageError`: damaged there)."""
    try:
        stored = manifest.get(MANIFEST_KEY)
        return None if stored is None else SlurmOptions.from_json(stored)
    except RecordError as error:
        raise UsageError(f"the run folder's manifest is damaged: {error}") from error
