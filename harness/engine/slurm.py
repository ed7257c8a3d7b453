"""Runs on the nodes of the allocation that the harness is in, one after the other.

    start       step.json into the run's folder, then srun: a node's agent (`forkserver node`)
    wait        until srun has ended: the nodes' reports, and Slurm's word where one is missing

Every step begins at the first node, so all runs of a case are on the same nodes. The run folder
must be on a file system of all nodes. Ranks go on nodes in blocks of neighbours, as even as they
come: 8 on 3 nodes: [0 1 2] [3 4 5] [6 7]
"""

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.engine import ENTRY, ActiveRun, Engine
from harness.engine.machine import die_with_parent, server_environment
from harness.engine.outcome import (
    LOG_FILE,
    NO_WORD,
    NodeReport,
    Word,
    needs_word,
    not_yet_visible,
    put_together,
    read_reports,
)
from harness.engine.ranks import Limits
from harness.errors import Infrastructure, UsageError
from harness.provenance import code_variables
from harness.records import CaseSpec, Device, RecordError, RunOutcome, RunSpec
from harness.repeats import unique_runs
from harness.store import begin_run, save_outcome
from harness.store.files import write_atomic
from harness.values import Json, dumps

SETTINGS = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
"""Variables that say which Slurm; all others of that name are of a job that we may be in."""
START_S = 300.0
"""What a step may take beyond its run's timeout: cold imports, file systems, stacks."""
STEP_FILE = "step.json"
MANIFEST_KEY = "slurm"


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Json):
    """`launch.slurm`."""

    nodes: int = 1  # over which a run is spread
    ranks_per_node: int | None = None  # at most; by default its GPUs
    gpus_per_node: int | None = None


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
    """How long to wait, in seconds."""

    poll_s: float = 1.0  # between two looks
    late_s: float = 75.0  # for files of a step that is over
    cancel_s: float = 60.0  # for a step that was cancelled


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


def job_word(job_id: str, patience: Patience) -> Word:
    """What became of a job; `state` "" while it lives, or where nobody knows."""
    until_s = time.monotonic() + patience.late_s
    while True:
        found = dict(re.findall(r"(\w+)=(\S+)", ask("scontrol", "-o", "show", "job", job_id)))
        state = found.get("JobState", "")
        if state != "COMPLETING" or time.monotonic() > until_s:
            break
        time.sleep(patience.poll_s)
    if state in ("", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING"):
        return NO_WORD
    reason, nodes = found.get("Reason", ""), found.get("NodeList", "?")
    return Word(state, f"Slurm job {job_id} ended as {state} ({reason}, nodes {nodes})")


# --- the engine -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Active(ActiveRun):
    step: Step
    srun: "subprocess.Popen[bytes]"

    def reports(self) -> tuple[dict[int, NodeReport], bool]:
        """As far as they show, and whether these are all."""
        found = read_reports(self.folder, self.step.name, self.step.num_nodes)
        return found, len(found) == self.step.num_nodes


class SlurmEngine(Engine):
    """Runs on the nodes of the allocation around the harness, one at a time."""

    def __init__(
        self, options: SlurmOptions, *, slots: int = 1 << 16, entry: str = ENTRY,
        limits: Limits | None = None, patience: Patience | None = None,
    ) -> None:  # fmt: skip
        """Prepare runs of at most `slots` ranks; `entry` is `module:function` of a `RankMain`."""
        self.slots = slots
        self._options, self._entry = options, entry
        self._limits, self._patience = limits or Limits(), patience or Patience()
        self._active: _Active | None = None
        self._job_id = os.environ.get("SLURM_JOB_ID", "")
        nodes = os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or "1"
        self._num_nodes = int(nodes)

    def check(self, spec: RunSpec) -> None:
        if not 1 <= spec.world_size <= self.slots:
            raise UsageError(
                f"run {spec.key} needs {spec.world_size} slots, there are {self.slots}"
            )
        if spec.placed:
            raise UsageError(f"run {spec.key}: expected no devices that are named, on Slurm")
        if not self._job_id:
            raise UsageError(
                "engine slurm: expected to be started in an allocation, as by salloc --nodes=2 "
                "harness run ..., got no SLURM_JOB_ID"
            )
        if shutil.which("srun") is None:
            raise Infrastructure("engine slurm: srun was not found on PATH")
        device_on_slurm(spec.device, self._options)
        step = share_out(spec.world_size, self._options, spec.device)
        if step.num_nodes > self._num_nodes:
            raise UsageError(
                f"run {spec.key} needs {step.num_nodes} nodes, Slurm job {self._job_id} has "
                f"{self._num_nodes}"
            )

    def can_start(self, spec: RunSpec) -> bool:
        return self._active is None

    def start(self, spec: RunSpec, folder: Path, *, attempt: int = 0) -> None:
        self.check(spec)
        if (word := job_word(self._job_id, Patience(late_s=0.0, poll_s=0.0))).state:
            raise Infrastructure(f"{word.text}; go on with --resume in another one")
        folder = folder.absolute()
        step = share_out(spec.world_size, self._options, spec.device)
        begin_run(folder, spec)
        write_atomic(folder / STEP_FILE, dumps(step) + "\n")
        srun = self._begin(step, folder)
        self._active = _Active(spec=spec, folder=folder, attempt=attempt, step=step, srun=srun)

    def _begin(self, step: Step, folder: Path) -> "subprocess.Popen[bytes]":
        command = [
            "srun", f"--jobid={self._job_id}", f"--nodes={step.num_nodes}", "--relative=0",
            f"--ntasks={step.num_nodes}", "--ntasks-per-node=1", "--overlap", "--whole",
            "--cpu-bind=none", "--distribution=block", "--mpi=none", "--label", "--export=ALL",
            # The first to end well must not start a countdown for the others.
            "--kill-on-bad-exit=1", "--wait=0", "--input=none",
            sys.executable, "-P", "-m", "harness.worker.forkserver", "node",
            "--folder", str(folder), "--name", step.name,
            "--entry", self._entry, "--limits", dumps(self._limits),
        ]  # fmt: skip
        mine = os.getpid()
        environment = server_environment(own_environment(os.environ)) | code_variables()
        with (folder / LOG_FILE).open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,
                # It ends its step, which outlives us otherwise.
                preexec_fn=lambda: die_with_parent(mine, gently=True),
            )  # fmt: skip

    def wait(self, timeout_s: float | None = None) -> list[RunOutcome]:
        if (run := self._active) is None:
            return []
        overdue_s = run.started_s + run.spec.timeout_s + START_S - time.monotonic()
        wait_s = overdue_s if timeout_s is None else min(timeout_s, overdue_s)
        try:
            run.srun.wait(max(wait_s, 0.0))
        except subprocess.TimeoutExpired:
            if wait_s < overdue_s:
                return []
            self._stop(run)
        return [self._conclude(run)]

    def _stop(self, run: _Active) -> None:
        """End the step: srun kills its tasks on SIGTERM."""
        run.srun.terminate()
        try:
            run.srun.wait(self._patience.cancel_s)
        except subprocess.TimeoutExpired:
            run.srun.kill()
            run.srun.wait()

    def _conclude(self, run: _Active) -> RunOutcome:
        """The outcome, once every record is here as its node left it, or has had the time to be."""
        patience, word, (reports, whole) = self._patience, NO_WORD, run.reports()
        if not whole or needs_word(reports.values()):
            word = job_word(self._job_id, patience)
        until_s = time.monotonic() + (0.0 if word.state else patience.late_s)
        while not whole or not_yet_visible(run.folder, reports):
            if time.monotonic() > until_s:
                break
            time.sleep(min(patience.poll_s, 0.2))
            reports, whole = run.reports()
        outcome = put_together(
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
        return outcome

    def cancel(self) -> None:
        run, self._active = self._active, None
        if run is not None:
            self._stop(run)


# --- what differs before a run is started: this machine is only where the harness waits ----------


def device_on_slurm(wanted: str, options: SlurmOptions) -> Device:
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
