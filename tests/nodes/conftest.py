"""The cluster of these tests: one a session, started by the first test that asks for it."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engine.slurm_job import SlurmOptions
from harness.records import RunOutcome, RunSpec
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, SAFE, engine, job_id_of, spec, wait_for


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalSlurm]:
    """A real Slurm of four nodes; a skip that says why where there can be none."""
    if why := LocalSlurm.missing():
        pytest.skip(f"no Slurm on this machine: {why}")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, LocalSlurm(Path(folder)) as slurm:
        yield slurm


@dataclass
class Slow:
    """A run that is under way while the other tests run."""

    run: RunSpec
    folder: Path
    job_id: int
    outcome: Callable[[], RunOutcome]


@pytest.fixture(scope="session")
def overdue(cluster: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    """The time limit of its job runs out: Slurm looks every 30 s, so the last test asks for it."""
    folder = tmp_path_factory.mktemp("overdue")
    run = spec({"*": "hang"}, name="overdue")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        with engine(SlurmOptions(nodes=2, args=SAFE)) as slurm_engine:
            slurm_engine.start(run, folder)
            wait_for(*(folder / f"hanging{rank}" for rank in range(4)))
            job_id = job_id_of(folder)
            cluster.call("scontrol", "update", f"JobId={job_id}", "EndTime=now+1")
            yield Slow(run, folder, job_id, lambda: slurm_engine.wait(LIMIT_S)[0])


@pytest.fixture(scope="session")
def requeued(cluster: LocalSlurm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slow]:
    """Its job is started again, once its old credential has expired: after some seconds."""
    folder = tmp_path_factory.mktemp("requeued")
    run = spec({"*": "await_go"}, name="requeued")

    def outcome() -> RunOutcome:
        wait_for(folder / "start1")
        (folder / "go").touch()
        return slurm_engine.wait(LIMIT_S)[0]

    with pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.variables.items():
            patch.setenv(name, value)
        with engine(SlurmOptions(nodes=2, requeue=True, args=SAFE)) as slurm_engine:
            slurm_engine.start(run, folder)
            wait_for(*(folder / f"waiting{rank}" for rank in range(4)))
            job_id = job_id_of(folder)
            cluster.call("scontrol", "requeue", str(job_id))
            yield Slow(run, folder, job_id, outcome)


@pytest.fixture
def slurm(cluster: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> LocalSlurm:
    """The cluster, found by every Slurm command that the test starts."""
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    return cluster
