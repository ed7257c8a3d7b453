"""What people, daemons and schedulers do to allocations, on a real Slurm; each has its word.

    python -m tests.nodes.attacks [NAME ...]

Starts a cluster of two nodes of its own, with daemons that give up on each other after 10 s.
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

from harness.engine import slurm
from harness.engine.slurm import SlurmEngine
from harness.records import RunOutcome
from tests.nodes import local_slurm
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, PATIENCE, allocation, engine, finish, spec


@dataclass
class Attack:
    """A cluster, an engine on it, and where its run is."""

    slurm: LocalSlurm
    folder: Path
    engine: SlurmEngine
    job: str

    def ended(self, act: Callable[[], object], timeout_s: float = LIMIT_S) -> RunOutcome:
        """What becomes of hanging ranks when `act` is done to them."""
        run = spec({"*": "hang"}, timeout_s=timeout_s)
        return finish(self.engine, run, self.folder, "hanging", act)

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


def time_limit(at: Attack) -> RunOutcome:
    """Of the allocation, which Slurm looks at every 30 s."""
    return at.ended(lambda: at.slurm.call("scontrol", "update", f"JobId={at.job}", "EndTime=now+1"))


def srun_killed(at: Attack) -> RunOutcome:
    """With the agents: all that holds the step together."""
    return at.ended(lambda: at.kill(f"--folder {at.folder}"))


def stepd_killed(at: Attack) -> RunOutcome:
    """Ranks go on, and srun would stay for ever: it is ended when the run has had its time."""
    slurm.START_S = 10.0
    return at.ended(lambda: at.kill(f"slurmstepd: [{at.job}.0]"), timeout_s=10.0)


def node_daemon_killed(at: Attack) -> RunOutcome:
    """A node that does not answer is down after a while, with all that runs there."""
    try:
        return at.ended(lambda: at.slurm.kill("n2"))
    finally:
        at.slurm.start_node("n2")


def odd_path(at: Attack) -> RunOutcome:
    """A folder whose name every shell and every pattern would take for something else."""
    return finish(at.engine, spec(), at.folder / "a b%j'\"$HOME;&*\\\n-x")


ATTACKS: dict[Callable[[Attack], RunOutcome], tuple[str, ...]] = {
    time_limit: ("interrupted",),
    srun_killed: ("interrupted",),
    stepd_killed: ("hang",),  # these ranks do: their own time was up
    node_daemon_killed: ("interrupted",),
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
        tempfile.TemporaryDirectory(prefix="slurm") as cluster,
        tempfile.TemporaryDirectory() as out,
        LocalSlurm(Path(cluster), nodes=2) as local,
    ):
        os.environ.update(local.variables)
        for attack, expected in ATTACKS.items():
            name = attack.__name__
            if wanted and name not in wanted:
                continue
            began_s = time.monotonic()
            patience, place = replace(PATIENCE, cancel_s=10.0), Path(out) / name / "run"
            with allocation(local) as job, engine(patience=patience) as made:
                outcome = attack(Attack(local, place, made, job))
            took_s = time.monotonic() - began_s
            wrong += outcome.what not in expected
            words = outcome.message.replace("|", " ").replace(out, "")[:200]
            sys.stdout.write(
                f"| {name} | {outcome.what or 'done'}"
                f"{'' if outcome.what in expected else ' (WRONG)'} | {took_s:.1f} | {words} |\n"
            )
            sys.stdout.flush()
            local.wait_idle()
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
