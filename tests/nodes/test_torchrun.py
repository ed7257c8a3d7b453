"""Runs over several nodes without Slurm: `python -m harness.worker join`, under torchrun."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fsdp_core.config import ModelConfig, ParallelConfig, TrainConfig
from harness.checks.complete import find_flaw
from harness.records import RunSpec, dumps
from harness.store import load_run_folder
from tests.nodes.runs import ENTRY, LIMIT_S, spec

pytestmark = pytest.mark.xdist_group("slurm")

ADDRESS = "127.0.0.2"
"""Not the address that everything on this machine would fall back to."""


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        port: int = taken.getsockname()[1]
        return port


def start(command: list[str], more: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **(more or {}),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-P", "-m", *command], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def codes_of(processes: list["subprocess.Popen[str]"]) -> list[int]:
    try:
        said = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()  # nothing, to one that has ended
    codes = [process.returncode for process in processes]
    assert all(code in (0, 1, 4) for code in codes), said
    return codes


def test_two_nodes_of_torchrun_train_one_run(tmp_path: Path) -> None:
    """Static rendezvous over two agents: the run is whole, and both nodes are in its records."""
    config = TrainConfig(
        model=ModelConfig(), parallel=ParallelConfig(dp=2), steps=2, graph=("full_iteration",),
        graph_warmup_steps=1,
    )  # fmt: skip
    run = RunSpec(config=config.to_dict(), device="cpu", world_size=2, timeout_s=LIMIT_S)
    specification, folder = tmp_path / "spec.json", tmp_path / "run"
    specification.write_text(dumps(run))
    port = free_port()
    nodes = [
        start(
            ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}",
             f"--master-addr={ADDRESS}", f"--master-port={port}",
             "-m", "harness.worker", "join", str(folder), "--spec", str(specification)]
        )
        for node in (0, 1)
    ]  # fmt: skip
    assert codes_of(nodes) == [0, 0]
    result = load_run_folder(folder, run)
    assert (result.outcome.what, result.outcome.message) == ("", "")
    assert find_flaw(result) is None
    assert [state.code for state in result.outcome.ranks] == [0, 0]
    fingerprints = [records.start.environment["fingerprint"] for records in result.ranks
                    if records.start]  # fmt: skip
    assert [found["ranks_on_node"] for found in fingerprints] == ["1", "1"]


def join(folder: Path, run: RunSpec, rank: int, world_size: int) -> "subprocess.Popen[str]":
    """One rank as torchrun starts it, without the seconds that torchrun takes."""
    (folder.parent / "spec.json").write_text(dumps(run))
    variables = {
        "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS, "MASTER_PORT": "1",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "x",
    }  # fmt: skip
    return start(
        ["harness.worker", "join", str(folder), "--spec", str(folder.parent / "spec.json"),
         "--entry", ENTRY, "--grace-s", "0.3", "--stacks-s", "0.3"],
        variables,
    )  # fmt: skip


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """Each rank has its own agent; the outcome of all is put together by that of rank 0."""
    run = spec({"3": "segv", "1": "print"})
    codes = codes_of([join(tmp_path / "run", run, rank, 4) for rank in range(4)])
    assert codes == [0, 0, 0, 1]
    outcome = load_run_folder(tmp_path / "run", run).outcome
    assert (outcome.what, outcome.culprit_rank) == ("crashed", 3)
    assert "to stderr" in (tmp_path / "run" / "rank1.stderr").read_text()
    plain = json.loads((tmp_path / "run" / "rank3.jsonl").read_text().splitlines()[0])
    shown = plain["environment"]["env"]
    assert (shown["RANK"], shown["LOCAL_RANK"], shown["MASTER_ADDR"]) == ("3", "1", ADDRESS)


def test_another_number_of_ranks_or_an_old_folder_is_refused(tmp_path: Path) -> None:
    """A run is of a certain number of ranks, in a folder of its own."""
    (one,) = [join(tmp_path / "run", spec(), 0, 2)]
    told = one.communicate(timeout=LIMIT_S)[0]
    assert one.returncode == 4
    assert "expected 4 ranks" in told
    (tmp_path / "run" / "rank0.jsonl").touch()
    again = join(tmp_path / "run", spec(), 0, 4)
    told = again.communicate(timeout=LIMIT_S)[0]
    assert again.returncode == 4
    assert "expected a new folder, it holds rank0.jsonl" in told
