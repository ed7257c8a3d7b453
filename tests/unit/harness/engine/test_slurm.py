"""What is asked of Slurm and what steps are told; `tests/nodes` has the real one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engine import slurm
from harness.engine.slurm import Patience, SlurmEngine, SlurmOptions
from harness.errors import Infrastructure, UsageError
from harness.records import RunSpec

CUDA8 = SlurmOptions(gpus_per_node=8)
PATIENCE = Patience(poll_s=0.01, late_s=0.1, away_s=60.0, cancel_s=5.0, leave_s=0.1)
RUN = RunSpec(config={"graph": []}, device="cpu", world_size=4, timeout_s=60.0)


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
    """A folder on PATH for programs that play Slurm's; each ends well unless a test writes it."""
    for name in ("salloc", "srun", "scontrol", "squeue", "scancel"):
        play(tmp_path, name, "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


def play(folder: Path, name: str, does: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / name).chmod(0o755)


GRANTED = 'echo "$@" >> "$0.asked"; echo "salloc: Granted job allocation 7" >&2; cat >/dev/null'


def test_what_is_asked_for_is_what_the_largest_run_needs(programs: Path, tmp_path: Path) -> None:
    """One request, with every option; runs on the CPU ask for no GPU."""
    play(programs, "salloc", GRANTED)
    options = SlurmOptions(
        partition="p", account="a", walltime_s=61, nodes=2, gpus_per_node=8, cpus_per_rank=3,
        args=("--qos=x",),
    )  # fmt: skip
    with SlurmEngine(options, patience=PATIENCE) as engine:
        engine.check(replace(RUN, world_size=8))
        for name in "ab":
            engine.start(replace(RUN, world_size=1), tmp_path / "runs" / name)
            engine.cancel()
    (asked,) = (programs / "salloc.asked").read_text().splitlines()
    head, _, rest = asked.partition(" --nodes=2 ")
    assert head.startswith("--kill-command --job-name=harness-")
    assert rest == (
        "--ntasks-per-node=1 --cpus-per-task=12 --time=2 --partition=p --account=a --qos=x cat"
    )


AWAY = "Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(("began", "calls"), [("", 3), ("slurmstepd: error: x; ", 1)])
def test_a_controller_that_is_away_is_asked_again(
    programs: Path, tmp_path: Path, began: str, calls: int
) -> None:
    """For nodes as for a step; what has begun is not started twice."""
    first = f'[ -e $0.1 ] || {{ touch $0.1; echo "{AWAY}" >&2; exit 1; }}; '
    play(programs, "salloc", first + GRANTED)
    until_3 = f'[ $(wc -l < $0.calls) = 3 ] || {{ echo "{began}{AWAY}" >&2; exit 1; }}'
    play(programs, "srun", f"echo x >> $0.calls; {until_3}")
    with SlurmEngine(SlurmOptions(), patience=PATIENCE) as engine:
        engine.start(RUN, tmp_path / "runs" / "a")
        (outcome,) = engine.wait()
    assert outcome.what == "interrupted"
    assert (programs / "srun.calls").read_text().count("x") == calls


def test_a_step_that_stays_is_ended(programs: Path, tmp_path: Path) -> None:
    """When its run has had its time, and the time to start: srun gets a SIGTERM."""
    play(programs, "salloc", GRANTED)
    play(programs, "srun", "trap 'exit 143' TERM; sleep 60 & wait")
    run = replace(RUN, timeout_s=-slurm.START_S)
    with SlurmEngine(SlurmOptions(), patience=PATIENCE) as engine:
        engine.start(run, tmp_path / "runs" / "a")
        (outcome,) = engine.wait()
    assert (outcome.what, outcome.culprit_rank) == ("interrupted", None)
    assert outcome.started_unix_s > 0


@pytest.mark.parametrize(
    ("state", "told"),
    [("PREEMPTED", "Slurm job 7 ended as PREEMPTED (None, nodes n1)"), ("RUNNING", ""),
     ("COMPLETING", "")],
)  # fmt: skip
def test_how_an_allocation_ended(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, told: str
) -> None:
    """As scontrol says; one that is on its way out is waited for, with a bound."""
    play(programs, "scontrol", f"echo JobId=7 JobState={state} Reason=None NodeList=n1")
    assert slurm.job_word("7", 0.05, 0.01).text == told
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with SlurmEngine(SlurmOptions()) as engine:
        if told:
            with pytest.raises(Infrastructure, match=f"{state}.*--resume"):
                engine.start(RUN, tmp_path / "runs" / "a")
        else:
            engine.start(RUN, tmp_path / "runs" / "a")


def test_what_the_engine_cannot_run(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that nobody asked for, too many ranks, no Slurm: one line each."""
    engine = SlurmEngine(SlurmOptions(), slots=4)
    for run, told in (
        (replace(RUN, device="cuda"), r"expected launch\.slurm\.gpus_per_node"),
        (replace(RUN, world_size=5), "needs 5 slots, there are 4"),
    ):
        with pytest.raises(UsageError, match=told):
            engine.check(run)
    (programs / "srun").unlink()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(Infrastructure, match="srun was not found on PATH"):
        engine.check(RUN)
