"""A whole matrix through the real engine: killed, interrupted, resumed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.records import CaseSpec, ExitCode, RunSpec
from harness.store import RunFolder
from tests.planted import stub_ranks
from tests.planted.local_runs import PATIENCE_S, TIMEOUT_S, wait_for
from tests.support import records

HARNESS = """
import sys
from pathlib import Path
from harness.engine.local import LocalEngine
from harness.errors import HarnessError
from harness.records import Verdict
from harness.runner.run import execute
from harness.store import RunFolder

class Lines:
    def run_started(self, spec): print("started", spec.key, flush=True)
    def run_finished(self, outcome): print("finished", outcome.key, flush=True)
    def judged(self, verdict): print("judged", verdict.case_id, flush=True)

folder = RunFolder.open(Path(sys.argv[1]))
with LocalEngine(2, entry="tests.planted.test_engine_resume:rank_main") as engine:
    try:
        execute(folder, folder.cases, engine, Lines())
    except HarnessError as error:
        print(error, flush=True)
        sys.exit(error.exit_code)
"""


SEEDS = {"ref": 0, "fast": 1, "slow": 2, "last": 3}


def rank_main(spec: RunSpec, folder: Path, rank: int, store_port: int) -> int:
    """A stub rank; those of the slow run hang in their first attempt."""
    if spec.config["seed"] == SEEDS["slow"]:
        spec = dataclasses.replace(spec, config=spec.config | {"stub": {"*": "hang_once"}})
    return stub_ranks.rank_main(spec, folder, rank, store_port)


def run(name: str, replica: int = 0) -> RunSpec:
    config = {"steps": 4, "microbatches": 1, "parallel": {"dp": 2}, "seed": SEEDS[name]}
    return records.run_spec(2, config=config, timeout_s=TIMEOUT_S, replica=replica)


def case(name: str) -> CaseSpec:
    return records.case_spec(name, run("ref"), run("ref", 1), run(name), checks={"loss": {}})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    cases = [case("fast"), case("slow"), case("last")]
    made = RunFolder.create(tmp_path / "out", {}, "", cases)
    made.release()
    return made


def harness(folder: RunFolder) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(folder.path)], env=environment, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip


def until_slow_hangs(folder: RunFolder) -> None:
    paths = [folder.run_folder(run("slow").key) / f"hanging{rank}" for rank in (0, 1)]
    wait_for(*paths)


def facts(folder: RunFolder) -> list[tuple[str, str, str]]:
    return [(v.case_id, v.outcome, v.message) for v in folder.verdicts()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_matrix_goes_on_where_it_was(folder: RunFolder, how: int, tmp_path: Path) -> None:
    """Stopped in the middle and resumed: finished runs stay, the verdicts are those of a quiet run.

    A run that hangs in its first attempt only makes the middle a certain place.
    """
    with harness(folder) as first:
        assert first.stdout is not None
        # Slots are filled before verdicts are made: the hang alone says nothing of the first case.
        assert "judged fast\n" in iter(first.stdout.readline, "")
        until_slow_hangs(folder)
        first.send_signal(how)
        told = first.communicate(timeout=PATIENCE_S)[0]
    expected = -how if how == signal.SIGKILL else ExitCode.INTERRUPTED
    assert first.returncode == expected
    if how != signal.SIGKILL:
        assert "1 of 3 cases are done" in told
    done = {key: (folder.run_folder(key) / "outcome.json").stat().st_mtime_ns
            for key in (run("ref").key, run("ref", 1).key, run("fast").key)}  # fmt: skip
    assert folder.finished(run("slow").key) is None
    with harness(folder) as second:
        lines = second.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert second.returncode == 0
    started = [line.split()[1] for line in lines if line.startswith("started")]
    assert started == [run("slow").key, run("last").key]
    for key, mtime_ns in done.items():
        assert (folder.run_folder(key) / "outcome.json").stat().st_mtime_ns == mtime_ns
    kept = folder.path / "runs" / f"{run('slow').key}.attempt0"
    assert json.loads((kept / "rank0.jsonl").read_text().splitlines()[2])["step"] == 0
    quiet = RunFolder.create(tmp_path / "quiet", {}, "", folder.cases)
    quiet.release()
    (quiet.run_folder(run("slow").key).with_name(f"{run('slow').key}.attempt0")).mkdir(parents=True)
    with harness(quiet) as undisturbed:
        undisturbed.communicate(timeout=PATIENCE_S)
    assert facts(folder) == facts(quiet)
    assert [fact[1] for fact in facts(folder)] == ["passed"] * 3
