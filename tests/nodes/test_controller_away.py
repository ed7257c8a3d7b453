"""A slurmctld that is killed, comes back, or comes back with no memory. A cluster of their own."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engine import slurm_calls
from harness.engine.slurm_calls import SlurmCalls
from harness.engine.slurm_job import SlurmOptions, load_submission
from harness.errors import Infrastructure
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S, PATIENCE, engine, spec, wait_for

pytestmark = pytest.mark.xdist_group("slurm")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, overdue: object) -> Iterator[LocalSlurm]:
    """A cluster of one node, beside the one of the other tests, which goes on."""
    with (
        tempfile.TemporaryDirectory(prefix="slurm") as folder,
        LocalSlurm(Path(folder), nodes=1) as slurm,
    ):
        for name, value in slurm.variables.items():
            monkeypatch.setenv(name, value)
        yield slurm


def test_the_controller_is_away_and_comes_back(
    small: LocalSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Away: what runs goes on and is concluded, what is new is tried again, nothing is given up."""
    patience = replace(PATIENCE, answer_s=2.0, away_s=LIMIT_S)
    first, second = spec({"*": "await_go"}, 2, name="first"), spec(world_size=2, name="second")
    with engine(SlurmOptions(), patience) as slurm_engine:
        slurm_engine.start(first, tmp_path / "first")
        wait_for(tmp_path / "first" / "waiting0", tmp_path / "first" / "waiting1")
        small.stop_controller()
        (tmp_path / "first" / "go").touch()
        (outcome,) = slurm_engine.wait(LIMIT_S)
        assert outcome.what == "", outcome.message
        attempts = iter([small.start_controller])
        monkeypatch.setattr(
            slurm_calls, "pause", lambda seconds: next(attempts, lambda: time.sleep(seconds))()
        )
        slurm_engine.start(second, tmp_path / "second")
        assert next(attempts, None) is None
        (outcome,) = slurm_engine.wait(LIMIT_S)
        assert outcome.what == "", outcome.message


def test_the_controller_stays_away_or_forgets(
    small: LocalSlurm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Away for good is the machine's trouble; a job that the controller forgot has vanished."""
    run = spec({"*": "hang"}, 2)
    slurm_engine = engine(SlurmOptions())
    slurm_engine.start(run, tmp_path)
    wait_for(tmp_path / "hanging0", tmp_path / "hanging1")
    small.kill("slurmctld")
    hurry = replace(PATIENCE, away_s=0.5, late_s=1.0)
    monkeypatch.setattr(slurm_engine, "_patience", hurry)
    monkeypatch.setattr(slurm_engine, "_calls", SlurmCalls(answer_s=1.0, away_s=0.5))
    with pytest.raises(Infrastructure, match=r"has not answered for .* go on with --resume"):
        slurm_engine.wait(LIMIT_S)
    with pytest.raises(Infrastructure, match=r"Slurm gave no answer for 0\.5 s"):
        slurm_engine.start(spec(world_size=2, name="more"), tmp_path / "more")
    submission = load_submission(tmp_path / "more")
    assert submission is not None
    assert submission.cancelled
    small.start_controller(forgetful=True)
    monkeypatch.setattr(slurm_engine, "_patience", replace(hurry, away_s=LIMIT_S))
    monkeypatch.setattr(slurm_engine, "_calls", SlurmCalls(answer_s=20.0, away_s=LIMIT_S))
    (outcome,) = slurm_engine.wait(LIMIT_S)
    assert outcome.what == "interrupted", outcome.message
    assert "has vanished: neither squeue, scontrol nor sacct know of it" in outcome.message
    assert not engine(SlurmOptions()).adopt(run, tmp_path)
