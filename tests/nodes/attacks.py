"""What people, daemons and schedulers do to allocations, on a real Slurm; each has its word.

    python -m tests.nodes.attacks [NAME ...]

Starts a cluster of four nodes of its own, with daemons that give up on each other after 10 s.
Prints a Markdown row an attack, and ends with 1 if an outcome is not the one expected. Two minutes;
what takes no time is in the tests.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engine.slurm import SlurmEngine, SlurmOptions
from harness.records import RunOutcome
from tests.nodes import local_slurm
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, PATIENCE, engine, finish, spec

RIGHT = SlurmOptions(nodes=2, args=("--nodelist=n3,n4",))
LEFT = SlurmOptions(nodes=2, args=("--nodelist=n1,n2",))


@dataclass
class Attack:
    """A cluster, an engine on it, and where its run is."""

    slurm: LocalSlurm
    folder: Path
    engine: SlurmEngine

    def ended(self, act: Callable[[], object], timeout_s: float = LIMIT_S) -> RunOutcome:
        """What becomes of hanging ranks when `act` is done to them."""
        run = spec({"*": "hang"}, timeout_s=timeout_s)
        return finish(self.engine, run, self.folder, "hanging", act)

    @property
    def job(self) -> str:
        """The allocation's id."""
        return self.slurm.call("squeue", "-h", "-o", "%A").split()[0]

    def kill(self, word: str) -> None:
        """SIGKILL the processes of Slurm that have this word in their command."""
        for entry in Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                environment = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in command and self.slurm.variables["SLURM_CONF"] in environment:
                os.kill(int(entry.name), signal.SIGKILL)


def suspended(at: Attack) -> RunOutcome:
    """For longer than the run has time."""

    def act() -> None:
        job = at.job
        at.slurm.call("scontrol", "suspend", job)
        time.sleep(8)
        at.slurm.call("scontrol", "resume", job)

    return at.ended(act, timeout_s=6.0)


def time_limit(at: Attack) -> RunOutcome:
    """Of the allocation, which Slurm looks at every 30 s."""
    return at.ended(lambda: at.slurm.call("scontrol", "update", f"JobId={at.job}", "EndTime=now+1"))


def salloc_killed(at: Attack) -> RunOutcome:
    """The step goes on; the next run has another allocation, and the first is not left over."""
    run = spec({"*": "await_go"})

    def act() -> None:
        at.kill("salloc ")
        (at.folder / "go").touch()

    first, before = finish(at.engine, run, at.folder, "waiting", act), at.job
    second = finish(at.engine, spec(), at.folder.with_name("second"))
    assert second.what == "", second.message
    assert at.job != before
    return first


def srun_killed(at: Attack) -> RunOutcome:
    """With the agents: all that holds the step together."""
    return at.ended(lambda: at.kill(f"--folder {at.folder}"))


def stepd_killed(at: Attack) -> RunOutcome:
    """Ranks go on, and srun would stay for ever: it is ended once the run is concluded."""
    return at.ended(lambda: at.kill(f"slurmstepd: [{at.job}.0]"), timeout_s=10.0)


def node_daemon_killed(at: Attack) -> RunOutcome:
    """A node that does not answer is down after a while, with all that runs there."""
    at.engine = engine(RIGHT)
    try:
        with at.engine:
            return at.ended(lambda: at.slurm.kill("n4"))
    finally:
        at.slurm.start_node("n4")


def controller_killed(at: Attack) -> RunOutcome:
    """And started again while the next run is: nothing happened to either."""
    run = spec({"*": "await_go"})

    def act() -> None:
        time.sleep(6)  # it saves what it knows every 5 s
        at.slurm.kill("slurmctld")
        (at.folder / "go").touch()

    first = finish(at.engine, run, at.folder, "waiting", act)
    assert first.what == "", first.message
    at.engine.start(spec(), at.folder.with_name("next"))
    time.sleep(3)
    at.slurm.start_controller()
    return at.engine.wait(LIMIT_S)[0]


def odd_path(at: Attack) -> RunOutcome:
    """A folder whose name every shell and every pattern would take for something else."""
    return finish(at.engine, spec(), at.folder / "a b%j'\"$HOME;&*\\\n-x")


ATTACKS: dict[Callable[[Attack], RunOutcome], tuple[str, ...]] = {
    suspended: ("interrupted",),
    time_limit: ("interrupted",),
    salloc_killed: ("",),
    srun_killed: ("interrupted",),
    stepd_killed: ("hang",),  # these ranks do: their own time was up
    node_daemon_killed: ("interrupted",),
    controller_killed: ("",),
    odd_path: ("",),
}


def main() -> int:
    """The command."""
    local_slurm.CONFIGURATION = local_slurm.CONFIGURATION.replace(
        "SlurmdTimeout=300", "SlurmdTimeout=10"
    )
    if why := LocalSlurm.missing():
        sys.exit(why)
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
            with engine(LEFT, replace(PATIENCE, leave_s=5.0, cancel_s=10.0)) as made:
                outcome = attack(Attack(slurm, Path(out) / name / "run", made))
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
