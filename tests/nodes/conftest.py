"""The cluster of these tests: one a session, started by the first test that asks for it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.local_slurm import LocalSlurm


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalSlurm]:
    """A real Slurm of four nodes; a skip that says why where there can be none."""
    if why := LocalSlurm.missing():
        pytest.skip(f"no Slurm on this machine: {why}")
    with tempfile.TemporaryDirectory(prefix="slurm") as folder, LocalSlurm(Path(folder)) as slurm:
        yield slurm


@pytest.fixture
def slurm(cluster: LocalSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalSlurm]:
    """The cluster, found by every Slurm command that the test starts; idle again at its end."""
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    yield cluster
    cluster.wait_idle()
