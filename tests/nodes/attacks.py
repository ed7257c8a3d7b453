"""What people, daemons and schedulers do to jobs, on a real Slurm; each must end in the right word.

    python -m tests.nodes.attacks [NAME ...]

Starts a cluster of four nodes of its own, with daemons that give up on each other after 10 s.
Prints a Markdown row an attack, and ends with 1 if an outcome is not one of those expected. Three
minutes; what takes no time is in the tests.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engine.slurm import SlurmEngine
from harness.engine.slurm import SlurmOptions
from harness.records import RunOutcome, RunSpec
from tests.nodes import local_slurm
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, PATIENCE, engine, job_id_of, spec, wait_for

LEFT, RIGHT = ("--nodelist=n1,n2",), ("--nodelist=n3,n4",)
OUTER_JOB = {
    "SLURM_JOB_ID": "99", "SLURM_RESTART_COUNT": "1", "SLURM_MEM_PER_CPU": "100",
    "SLURM_MEM_PER_NODE": "9", "SLURM_NTASKS_PER_NODE": "8", "SLURM_EXCLUSIVE": "x",
    "SLURM_PARTITION": "nowhere", "SQUEUE_PARTITION": "other", "SBATCH_ARRAY_INX": "0-1",
}  # fmt: skip


@dataclass
class Attack:
    """One run under way, or about to be: on which cluster, and where."""

    slurm: LocalSlurm
    folder: Path

    def started(self, run: RunSpec, sign: str, options: SlurmOptions) -> SlurmEngine:
        """An engine whose run has come to where each rank gives a sign."""
        made = engine(options, replace(PATIENCE, leave_s=5.0))
        made.start(run, self.folder)
        wait_for(*(self.folder / f"{sign}{rank}" for rank in range(run.world_size)))
        return made

    def ended(
        self, options: SlurmOptions, act: Callable[[], object], timeout_s: float = LIMIT_S
    ) -> RunOutcome:
        """What becomes of hanging ranks when `act` is done to them."""
        with self.started(spec({"*": "hang"}, timeout_s=timeout_s), "hanging", options) as made:
            act()
            return made.wait(LIMIT_S)[0]

    @property
    def job(self) -> str:
        """The job's id."""
        return str(job_id_of(self.folder))

    def kill_daemons(self, word: str) -> None:
        """SIGKILL the processes of Slurm that work for the job."""
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in command and self.slurm.variables["SLURM_CONF"] in environment:
                os.kill(int(entry.name), signal.SIGKILL)


def cancelled(at: Attack) -> RunOutcome:
    """Somebody's scancel."""
    return at.ended(SlurmOptions(nodes=2), lambda: at.slurm.call("scancel", at.job))


def step_cancelled(at: Attack) -> RunOutcome:
    """Of the step alone: Slurm calls the job FAILED."""
    return at.ended(SlurmOptions(nodes=2), lambda: at.slurm.call("scancel", f"{at.job}.0"))


def suspended(at: Attack) -> RunOutcome:
    """For longer than the run has time."""

    def act() -> None:
        at.slurm.call("scontrol", "suspend", at.job)
        time.sleep(8)
        at.slurm.call("scontrol", "resume", at.job)

    return at.ended(SlurmOptions(nodes=2), act, timeout_s=6.0)


def srun_killed(at: Attack) -> RunOutcome:
    """With the job's script and the agents: all that holds the step together."""
    return at.ended(SlurmOptions(nodes=2), lambda: at.kill_daemons(f"--folder {at.folder}"))


def stepd_killed(at: Attack) -> RunOutcome:
    """Ranks go on, and the job would stay for ever: it is cancelled once the run is concluded."""
    act = lambda: at.kill_daemons(f"slurmstepd: [{at.job}.0]")  # noqa: E731
    outcome = at.ended(SlurmOptions(nodes=2, args=LEFT), act, timeout_s=10.0)
    assert not at.slurm.call("squeue", "-h", "-t", "R", "-j", at.job, check=False).strip()
    return outcome


def node_daemon_killed(at: Attack) -> RunOutcome:
    """A node that does not answer is down after a while, with all that runs there."""
    try:
        return at.ended(SlurmOptions(nodes=2, args=RIGHT), lambda: at.slurm.kill("n4"))
    finally:
        at.slurm.start_node("n4")


def controller_killed(at: Attack) -> RunOutcome:
    """And started again: nothing happened to the job."""
    run = spec({"*": "await_go"})
    with at.started(run, "waiting", SlurmOptions(nodes=2, args=LEFT)) as made:
        time.sleep(6)  # it saves what it knows every 5 s
        at.slurm.kill("slurmctld")
        at.slurm.start_controller()
        (at.folder / "go").touch()
        return made.wait(LIMIT_S)[0]


def pending(at: Attack) -> RunOutcome:
    """A partition that is down: given up after `pending_s`, with the reason."""
    at.slurm.call("scontrol", "update", "PartitionName=all", "State=DOWN")
    try:
        with engine(SlurmOptions(nodes=2, pending_s=2.0)) as made:
            made.start(spec(), at.folder)
            return made.wait(LIMIT_S)[0]
    finally:
        at.slurm.call("scontrol", "update", "PartitionName=all", "State=UP")


def held_after_requeue(at: Attack) -> RunOutcome:
    """Requeued and held by an administrator."""
    options = SlurmOptions(nodes=2, requeue=True, pending_s=5.0)
    return at.ended(options, lambda: at.slurm.call("scontrol", "requeuehold", at.job))


def inside_a_job(at: Attack) -> RunOutcome:
    """The harness has the variables of a job of its own, restarted once."""
    before = dict(os.environ)
    os.environ.update(OUTER_JOB)
    try:
        with engine(SlurmOptions(nodes=2)) as made:
            made.check(spec())
            made.start(spec(), at.folder)
            return made.wait(LIMIT_S)[0]
    finally:
        os.environ.clear()
        os.environ.update(before)


def odd_path(at: Attack) -> RunOutcome:
    """A folder whose name every shell and every pattern would take for something else."""
    with engine(SlurmOptions(nodes=2)) as made:
        made.start(spec(), at.folder / "a b%j'\"$HOME;&*\n-x")
        return made.wait(LIMIT_S)[0]


ATTACKS: dict[Callable[[Attack], RunOutcome], tuple[str, ...]] = {
    cancelled: ("interrupted",),
    step_cancelled: ("interrupted",),
    suspended: ("interrupted",),
    srun_killed: ("interrupted",),
    stepd_killed: ("hang",),  # these ranks do: their own time was up
    node_daemon_killed: ("interrupted",),
    controller_killed: ("",),
    pending: ("not_run",),
    held_after_requeue: ("not_run",),
    inside_a_job: ("",),
    odd_path: ("",),
}


def main() -> int:
    """The command."""
    local_slurm.CONFIGURATION = local_slurm.CONFIGURATION.replace(
        "SlurmdTimeout=300", "SlurmdTimeout=10"
    )
    wanted, wrong = sys.argv[1:], 0
    sys.stdout.write("| attack | outcome | s | words |\n| --- | --- | --- | --- |\n")
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as place,
        tempfile.TemporaryDirectory() as out,
        LocalSlurm(Path(place)) as slurm,
    ):
        os.environ.update(slurm.variables)
        for attack, expected in ATTACKS.items():
            name = attack.__name__
            if wanted and name not in wanted:
                continue
            began_s = time.monotonic()
            outcome = attack(Attack(slurm, Path(out) / name))
            took_s = time.monotonic() - began_s
            wrong += outcome.what not in expected
            words = outcome.message.replace("|", " ").replace(out, "")[:200]
            sys.stdout.write(
                f"| {name} | {outcome.what or 'done'}"
                f"{'' if outcome.what in expected else ' (WRONG)'} | {took_s:.1f} | {words} |\n"
            )
            sys.stdout.flush()
            slurm.wait_idle()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
