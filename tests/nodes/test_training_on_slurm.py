"""A scenario on a real Slurm, with the real worker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.checks.complete import find_flaw
from harness.engine.slurm import SlurmEngine
from harness.records import ExitCode
from harness.runner import launch
from harness.store import load_run_folder
from tests.nodes.local_slurm import LocalSlurm
from tests.nodes.runs import LIMIT_S

pytestmark = pytest.mark.xdist_group("slurm")

SCENARIO = """\
name: on_slurm
why: Graphing must not change one bit where ranks are on two nodes.
base: {model: dense_tiny, steps: 2, graph_warmup_steps: 1}
axes: {parallel: [{dp: 4}], graph: [eager, [full_iteration]]}
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {loss: {}, state: {}}
launch: {device: cpu, timeout_s: 120, engine: slurm, slurm: {nodes: 2}}
"""


def harness(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "harness", *arguments], cwd=folder, env=environment,
        capture_output=True, text=True, check=False, timeout=2 * LIMIT_S,
    )  # fmt: skip


def test_a_run_of_a_scenario_trains_on_two_nodes_of_two_ranks(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphed run of the scenario is whole: every step, digest and replay of all four ranks.

    One of its three runs, as each job imports torch once a node.
    """
    # The batch script finds the code where this process does.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "s.yaml").write_text(SCENARIO)
    prepared = launch.prepare(
        launch.Request(paths=(tmp_path / "s.yaml",), slurm=("partition=all",))
    )
    assert prepared.slurm is not None
    (case,) = prepared.plan.cases
    with SlurmEngine(prepared.slurm, slots=prepared.plan.slots) as engine:
        engine.check(case.candidate)
        engine.start(case.candidate, tmp_path / "run")
        (outcome,) = engine.wait(2 * LIMIT_S)
    assert outcome.what == "", outcome.message
    result = load_run_folder(tmp_path / "run", case.candidate)
    assert find_flaw(result) is None
    found = [records.start.environment["fingerprint"] for records in result.ranks if records.start]
    assert [fingerprint["ranks_on_node"] for fingerprint in found] == ["2"] * 4


def test_a_partition_that_is_not_there_is_one_line(slurm: LocalSlurm, tmp_path: Path) -> None:
    """What sbatch refuses ends the command with exit code 4 and says what was refused."""
    (tmp_path / "s.yaml").write_text(SCENARIO)
    done = harness("run", "s.yaml", "--slurm", "partition=nowhere", "--no-history", folder=tmp_path)
    assert done.returncode == ExitCode.USAGE
    (line,) = done.stderr.splitlines()
    assert line.startswith("harness: sbatch refused: ")
    assert "invalid partition specified: nowhere" in line
