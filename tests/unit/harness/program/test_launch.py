"""One rank of a program: its environment, its command, and how a function may end."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch

from harness.program.launch import SITE, command, environment, run_program
from harness.program.spec import ProgramSpec
from harness.records import RankRecords
from harness.store.streams import rank_path, read_rank
from tests.unit.harness.recorder.recorded import record_folder

ENTRY = """
import sys
import torch

def main(how, steps=2):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    if how == "exit":
        sys.exit(0)
    if how == "exit 3":
        sys.exit(3)
    if how == "raise":
        raise ValueError("by intent")
    return 4 if how == "return 4" else None
"""


def called(how: str, folder: Path) -> tuple[int, RankRecords]:
    """Exit code and records of a rank that calls `main(how)`."""
    (folder / "entry_program.py").write_text(ENTRY)
    program = ProgramSpec(
        kind="entry", target="entry_program:main", folder=str(folder), args={"how": how}
    )
    out = record_folder(folder / "run", **program.to_json())
    pid = os.fork()
    if pid == 0:
        code: object = 99
        torch.set_num_threads(1)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        with contextlib.suppress(Exception):
            try:
                code = run_program(program, out, "key")
            except SystemExit as stop:
                code = stop.code
        os._exit(code if isinstance(code, int) else 0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), read_rank(rank_path(out, 0), 0)


@pytest.mark.parametrize(
    ("how", "code"), [("", 0), ("exit", 0), ("exit 3", 3), ("return 4", 4), ("raise", 99)]
)
def test_how_a_function_may_end(how: str, code: int, tmp_path: Path) -> None:
    """Leaving by sys.exit is an end as returning is; only an exception is an error."""
    found, records = called(how, tmp_path)
    assert found == code
    assert len(records.steps) == 2
    assert (records.end is None) == (how == "raise")
    assert (records.error is not None) == (how == "raise")
    assert not records.problems


def test_the_environment_is_that_of_torchrun(tmp_path: Path) -> None:
    """The recorder comes first on the path; the program's own variables come last."""
    mine = {"NCCL_NVLS_ENABLE": "1", "MINE": "2"}
    program = ProgramSpec(
        kind="script", target="/x/train.py", folder="/x", env=mine, determinism="enforce"
    )
    found = environment(program, tmp_path, {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": "/mine"})
    assert found["PYTHONPATH"].split(os.pathsep) == [str(SITE), str(SITE.parents[2]), "/mine"]
    assert found["DELTAZERO_RECORD"] == str(tmp_path)
    assert (found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("1", "2")
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert (found["NCCL_NVLS_ENABLE"], found["MINE"]) == ("1", "2")


def test_a_module_is_found_in_the_scenarios_folder(tmp_path: Path) -> None:
    """`python -m` looks there, whatever folder the harness runs in."""
    program = ProgramSpec(kind="module", target="pkg.train", folder="/x", args={"lr": 1})
    assert "/x" in environment(program, tmp_path, {})["PYTHONPATH"].split(os.pathsep)
    assert command(program) == [sys.executable, "-m", "pkg.train", "--lr", "1"]
