"""Where ranks go, how steps end, with programs that play Slurm's; `tests/nodes` has a real one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine import slurm
from harness.engine.slurm import Patience, SlurmEngine, SlurmOptions
from harness.errors import Infrastructure, UsageError
from tests.support.records import run_spec

CUDA8 = SlurmOptions(gpus_per_node=8)
PATIENCE = Patience(poll_s=0.01, late_s=0.1, cancel_s=5.0)
RUN = run_spec(4, config={"graph": []}, timeout_s=60.0)


@pytest.mark.parametrize(
    ("world_size", "options", "device", "shares"),
    [
        (4, SlurmOptions(), "cpu", [4]),
        (8, SlurmOptions(nodes=3), "cpu", [3, 3, 2]),
        (2, SlurmOptions(nodes=4), "cpu", [1, 1]),
        (5, SlurmOptions(nodes=4), "cpu", [2, 2, 1]),
        (16, CUDA8, "cuda", [8, 8]),
        (16, CUDA8, "cpu", [16]),
        (6, SlurmOptions(ranks_per_node=4), "cpu", [3, 3]),
    ],
)
def test_where_ranks_go(world_size: int, options: SlurmOptions, device: str, shares: Any) -> None:
    """Blocks of neighbours, as even as they come, on as few nodes as may be; none is empty."""
    step = slurm.share_out(world_size, options, device)
    ranks = [step.ranks(node, world_size) for node in range(step.num_nodes)]
    assert [len(each) for each in ranks] == shares
    assert [rank for each in ranks for rank in each] == list(range(world_size))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for programs that play Slurm's, in an allocation of two nodes."""
    for name in ("srun", "scontrol"):
        play(tmp_path, name, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    return tmp_path


def play(folder: Path, name: str, does: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("does", ["exit 1", "trap 'exit 143' TERM; sleep 60 & wait"])
def test_a_step_without_reports_is_interrupted(programs: Path, tmp_path: Path, does: str) -> None:
    """One that ends, or stays when its run has had its time, and the time to start: SIGTERM."""
    play(programs, "srun", f"{does}")
    run = replace(RUN, timeout_s=-slurm.START_S + 1)
    with SlurmEngine(SlurmOptions(), patience=PATIENCE) as engine:
        engine.start(run, tmp_path / "runs" / "a")
        assert not engine.can_start(run)
        (outcome,) = engine.wait()
        assert engine.wait() == []
    assert (outcome.what, outcome.culprit_rank) == ("interrupted", None)
    assert outcome.started_unix_s > 0


@pytest.mark.parametrize(
    ("state", "told"),
    [("PREEMPTED", "Slurm job 7 ended as PREEMPTED (None, nodes n1)"), ("RUNNING", ""),
     ("COMPLETING", "")],
)  # fmt: skip
def test_how_an_allocation_ended(programs: Path, tmp_path: Path, state: str, told: str) -> None:
    """As scontrol says; one that is on its way out is waited for, with a bound."""
    play(programs, "scontrol", f"echo JobId=7 JobState={state} Reason=None NodeList=n1")
    assert slurm.job_word("7", PATIENCE).text == told
    with SlurmEngine(SlurmOptions(), patience=PATIENCE) as engine:
        if told:
            with pytest.raises(Infrastructure, match=f"{state}.*--resume"):
                engine.start(RUN, tmp_path / "runs" / "a")
        else:
            engine.start(RUN, tmp_path / "runs" / "a")


def test_what_the_engine_cannot_run(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that nobody asked for, too many ranks or nodes, no allocation, no Slurm: one line."""
    engine = SlurmEngine(SlurmOptions(ranks_per_node=2), slots=6)
    for run, told in (
        (replace(RUN, device="cuda"), r"expected launch\.slurm\.gpus_per_node"),
        (replace(RUN, world_size=7), "needs 7 slots, there are 6"),
        (replace(RUN, world_size=6), "needs 3 nodes, Slurm job 7 has 2"),
    ):
        with pytest.raises(UsageError, match=told):
            engine.check(run)
    engine.check(RUN)
    (programs / "srun").unlink()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(Infrastructure, match="srun was not found on PATH"):
        engine.check(RUN)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(UsageError, match="expected to be started in an allocation"):
        SlurmEngine(SlurmOptions()).check(RUN)
