"""Jobs that Slurm, or a person with its commands, ends in the middle."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engine.slurm import SlurmEngine
from harness.engine.slurm_job import SlurmOptions
from harness.records import RunOutcome
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, SAFE, engine, job_id_of, spec, wait_for

pytestmark = pytest.mark.xdist_group("slurm")

LEFT, RIGHT = SAFE, ("--nodelist=n3,n4",)
HANG = {"*": "hang"}


@dataclass
class Ended:
    """What became of the runs, where they are, and the id of each job."""

    outcomes: dict[str, RunOutcome]
    folder: Path
    job_ids: dict[str, int]


@pytest.fixture(scope="module")
def ended(cluster: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two runs at once, each of which Slurm ends in its own way."""
    folder = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        left = engine(SlurmOptions(nodes=2, args=LEFT))
        right = engine(SlurmOptions(nodes=2, args=RIGHT))
        runs = {name: spec(HANG, name=name) for name in ("cancelled", "lost")}
        engines = {"cancelled": left, "lost": right}
        with left, right:
            for name, run in runs.items():
                engines[name].start(run, folder / name)
            ids = {name: job_id_of(folder / name) for name in runs}
            for name in runs:
                wait_for(*(folder / name / f"hanging{rank}" for rank in range(4)))
            cluster.call("scancel", str(ids["cancelled"]))
            down = ("NodeName=n4", "State=DOWN", "Reason=pulled")
            cluster.call("scontrol", "update", *down)
            found = {key: out for one in (right, left) for key, out in _all(one).items()}
            cluster.call("scontrol", "update", "NodeName=n4", "State=RESUME", check=False)
    return Ended({name: found[run.key] for name, run in runs.items()}, folder, ids)


def _all(one: SlurmEngine) -> dict[str, RunOutcome]:
    """Outcomes of all runs of an engine, by key."""
    found: dict[str, RunOutcome] = {}
    while outcomes := one.wait(LIMIT_S):
        found |= {outcome.key: outcome for outcome in outcomes}
    return found


def test_a_node_lost_in_mid_run(ended: Ended) -> None:
    """The job of a node that goes down is nobody's fault: interrupted, with the cause and nodes."""
    outcome = ended.outcomes["lost"]
    assert outcome.what == "interrupted", outcome.message
    for told in (f"Slurm job {ended.job_ids['lost']} ended as NODE_FAIL", "NodeDown", "n[3-4]"):
        assert told in outcome.message


def test_a_job_cancelled_by_somebody(ended: Ended) -> None:
    """A cancelled job is interrupted, and says by Slurm's word that it was cancelled."""
    outcome = ended.outcomes["cancelled"]
    assert outcome.what == "interrupted", outcome.message
    assert f"Slurm job {ended.job_ids['cancelled']} ended as CANCELLED" in outcome.message
