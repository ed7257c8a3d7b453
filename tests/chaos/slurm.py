"""What people, daemons and schedulers do to allocations, on a real Slurm; what takes no time is in
`tests/nodes`. A cluster of two nodes, with daemons that give up on each other after 10 s."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.engine import slurm as engine_of_slurm
from harness.engine.slurm import SlurmEngine
from harness.records import RunOutcome
from tests.nodes import local_slurm
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, PATIENCE, allocation, engine, finish, spec

ODD = "a b%j'\"$HOME;&*\\\n-x"
"""A folder whose name every shell and every pattern would take for something else."""


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


def _time_is_up(at: Attack) -> RunOutcome:
    # Of the allocation, which Slurm looks at every 30 s.
    return at.ended(lambda: at.slurm.call("scontrol", "update", f"JobId={at.job}", "EndTime=now+1"))


def _stepd_killed(at: Attack) -> RunOutcome:
    # Ranks go on, and srun would stay for ever: it is ended when the run has had its time.
    engine_of_slurm.START_S = 10.0
    return at.ended(lambda: at.kill(f"slurmstepd: [{at.job}.0]"), timeout_s=10.0)


def _node_daemon_killed(at: Attack) -> RunOutcome:
    try:
        return at.ended(lambda: at.slurm.kill("n2"))
    finally:
        at.slurm.start_node("n2")


ATTACKS: dict[str, tuple[Callable[[Attack], RunOutcome], str]] = {
    "time is up": (_time_is_up, "interrupted"),
    "srun killed": (lambda at: at.ended(lambda: at.kill(f"--folder {at.folder}")), "interrupted"),
    "stepd killed": (_stepd_killed, "hang"),  # these ranks do: their own time was up
    "node daemon killed": (_node_daemon_killed, "interrupted"),
    "odd path": (lambda at: finish(at.engine, spec(), at.folder / ODD), ""),
}


def slurm(folder: Path) -> Iterator[str]:
    """Each attack has its word.

    Raises:
        PermissionError: there is no Slurm here.
    """
    if why := LocalSlurm.missing():
        raise PermissionError(why)
    text = local_slurm.CONFIGURATION
    local_slurm.CONFIGURATION = text.replace("SlurmdTimeout=300", "SlurmdTimeout=10")
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as cluster,
        LocalSlurm(Path(cluster), nodes=2) as local,
    ):
        os.environ.update(local.variables)
        for number, (name, (attack, expected)) in enumerate(ATTACKS.items()):
            patience, place = replace(PATIENCE, cancel_s=10.0), folder / str(number) / "run"
            with allocation(local) as job, engine(patience=patience) as made:
                outcome = attack(Attack(local, place, made, job))
            if outcome.what != expected:
                yield f"{name}: {outcome.what or 'done'}: {outcome.message[:300]}"
            local.wait_idle()
