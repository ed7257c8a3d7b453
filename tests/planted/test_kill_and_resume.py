"""kill -9 of the harness in mid-matrix, then --resume: nothing is repeated and nothing is lost."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from reports.json_report import normalised
from tests.kill_and_resume.matrix import Matrix, torment
from tests.planted.local_runs import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCENARIO = {
    "name": "killed",
    "why": "A matrix that is killed and taken up again.",
    "base": {"steps": 3, "seed": 3, "parallel": {"dp": 2}},
    "axes": {"graph": ["eager", ["attn"]]},
    "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
    "checks": {"loss": {}, "state": {}, "peak_memory": {"max_ratio": 2.0}},
    "launch": {"device": "cpu", "timeout_s": 120},
}


def start(folder: Path, *args: str) -> "subprocess.Popen[str]":
    """A harness that writes into `run` under `folder`, its lines to be read as they come."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "run", *args, "--jobs", "1"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def kill_after_runs(process: "subprocess.Popen[str]", number: int) -> None:
    """SIGKILL as soon as `number` runs are done and the next one has started."""
    assert process.stdout is not None
    done = 0
    for line in process.stdout:
        done += line.startswith("done")
        if done >= number and line.startswith("start"):
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


def reports_of(run: Path) -> str:
    """The report of a run folder without times and places."""
    return normalised(run / "report" / "report.json", run)


def test_kill_and_resume_equals_an_undisturbed_run(tmp_path: Path) -> None:
    """Killed after a run: it is not made again, and the reports end up the same."""
    found = {}
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "killed.yaml").write_text(json.dumps(SCENARIO))
        process = start(folder, "killed.yaml", "--out", "run")
        finished: dict[Path, int] = {}
        if name == "killed":
            kill_after_runs(process, 1)
            children = [p for p in psutil.process_iter(["cmdline"])
                        if str(folder) in " ".join(p.info["cmdline"] or ())]  # fmt: skip
            assert not psutil.wait_procs(children, timeout=PATIENCE_S)[1]
            finished = {p: p.stat().st_mtime_ns for p in folder.glob("run/runs/*/outcome.json")}
            assert finished
            process = start(folder, "--resume", "run")
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert {path: path.stat().st_mtime_ns for path in finished} == finished
        found[name] = reports_of(folder / "run")
    assert found["whole"] == found["killed"]


def test_random_kills_lose_nothing(tmp_path: Path) -> None:
    """Harness, forkserver, leader or rank: what is finished stays, the reports end up the same."""
    whole = Matrix(tmp_path / "whole", real=False)
    assert whole.to_the_end() == ""
    rng = random.Random(3)
    found = torment(
        Matrix(tmp_path / "killed", real=False), 2, rng, longest_s=0.5, expected=whole.reports()
    )
    assert found.problems == []
    assert sum(found.kills.values()) == 2
