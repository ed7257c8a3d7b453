"""What is asked of a launch, what comes of checking it, and what of carrying it out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness.engine.slurm import SlurmOptions
from harness.errors import Interrupted
from harness.machine import Machine
from harness.records import Verdict
from harness.runner.occupancy import Occupancy
from harness.runner.plan import Plan
from harness.scenario.schema import Overrides
from harness.scenario.suite import Picked, Selected
from harness.store import RunFolder
from harness.store.merge import Whole


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for. `slots`, `device` and `engine` override the scenario's.

    `slurm` are `KEY=YAML` texts over its `launch.slurm`; `paths` are files and folders that run
    together, of which `tiers` leaves some; `select` is over what the scenarios say. `history` is
    where the run will be recorded, `costs` the one that a `shard` is cut by. `mixed`
    goes on with a folder of other code. `picked` are the cases that pytest's `session` selected.
    """

    scenario: Path | None = None
    paths: tuple[Path, ...] = ()
    tiers: tuple[str, ...] = ()
    select: str | None = None
    picked: Picked | None = None
    session: str = ""
    shard: str | None = None
    costs: Path | None = None
    history: Path | None = None
    resume: Path | None = None
    mixed: bool = False
    keyword: str | None = None
    device: str | None = None
    slots: int | None = None
    ranks_per_gpu: int | None = None
    jobs: int | None = None
    out: Path | None = None
    exit_first: bool = False
    engine: str | None = None
    slurm: tuple[str, ...] = ()
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request that can be carried out: nothing has been written yet.

    Attributes:
        name: of the scenario.
        why: of the scenario.
        text: what goes into the run folder as scenario.yaml.
        plan: the runs to make and every case.
        device: where they run.
        devices: GPU of each slot, as CUDA_VISIBLE_DEVICES names it; empty on the CPU.
        machine: this machine.
        slurm: what is asked of Slurm; None where this machine makes the runs.
        retries: how often a run that the machine failed is made again.
        resumed: the folder to go on with; None to make one.
        selected: what is run of each scenario, and how much is left out.
        tiers: that were asked for; "" if none was.
        whole: what a shard is a part of; None for all.
        session: of pytest, "" for none.
    """

    name: str
    why: str
    text: str
    plan: Plan
    device: Literal["cpu", "cuda"]
    devices: tuple[str, ...]
    machine: Machine
    slurm: SlurmOptions | None = None
    retries: int = 0
    resumed: RunFolder | None = None
    selected: tuple[Selected, ...] = ()
    tiers: str = ""
    whole: Whole | None = None
    session: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """What selections leave out, a line each."""
        return tuple(filter(None, (part.note() for part in self.selected)))


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What was carried out."""

    folder: Path
    verdicts: tuple[Verdict, ...]
    num_cases: int
    wall_s: float
    occupancy: Occupancy


class CutShort(Interrupted):
    """A launch that was interrupted; `done` is what had been carried out by then."""

    def __init__(self, text: str, done: Carried) -> None:
        self.done = done
        super().__init__(text, done.verdicts)
