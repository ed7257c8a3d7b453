"""The command line through the real engine and the real worker, on the CPU."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("command_line")  # the matrix is run once
SCENARIO = {
    "name": "through",
    "why": "The whole road, from a file to a verdict.",
    "base": {"steps": 4, "seed": 1, "parallel": {"dp": 2}},
    "axes": {
        "plant": ["none", {"fault": "ulp", "step": 3, "rank": "last"}],
        "graph": ["eager", ["attn"]],
    },
    "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
    "checks": {"loss": {}, "state": {}, "finite": {}},
    "launch": {"device": "cpu", "timeout_s": 120, "confirm": True},
}


def harness(*args: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """One command in a process of its own."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "harness", *args],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "HOME": str(cwd), **variables},
    )  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, int]:
    """Folder, JSON answer and exit code of one run of the scenario."""
    folder = tmp_path_factory.mktemp("through")
    (folder / "through.yaml").write_text(json.dumps(SCENARIO))
    ran = harness("run", "through.yaml", "--out", "run", "--json", cwd=folder)
    assert ran.stdout, ran.stderr
    return folder, json.loads(ran.stdout), ran.returncode


def test_the_clean_case_passes_and_the_planted_one_is_localised(
    done: tuple[Path, Any, int],
) -> None:
    """One ulp on the last rank at step 3 is named; the clean case stays green; exit 1."""
    _, answer, code = done
    verdicts = {verdict["case_id"]: verdict for verdict in answer["verdicts"]}
    assert verdicts["unplanted-attn"]["outcome"] == "passed"
    planted = verdicts["ulp_s3_rlast-attn"]
    assert (planted["outcome"], planted["what"]) == ("failed", "diverged")
    difference = planted["difference"]
    assert (difference["step"], difference["rank"], difference["quantity"]) == (3, 1, "weights")
    assert difference["tensor"]
    assert verdicts["unplanted-attn"]["confirmation"] is None
    confirmed = planted["confirmation"]
    assert (confirmed["outcome"], confirmed["difference"]) == ("came_again", difference)
    assert (confirmed["reference_repeats"], confirmed["candidate_repeats"]) == (True, True)
    assert code == answer["exit_code"] == 1


def test_without_asserts_and_docstrings_the_verdicts_are_the_same(
    done: tuple[Path, Any, int],
) -> None:
    """PYTHONOPTIMIZE=2 reaches the forkserver and the ranks, too; what they find is the same."""
    planted = "ulp_s3_rlast-attn"
    folder, answer, code = done
    options = {"PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    ran = harness(
        "run", "through.yaml", "--out", "optimised", "--no-history", "--json", "-k", planted,
        "--set", "launch.confirm=false", cwd=folder, **options,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    kept = [
        [(v["outcome"], v["what"], v["difference"]) for v in each["verdicts"]
         if v["case_id"] == planted]
        for each in (answer, json.loads(ran.stdout))
    ]  # fmt: skip
    assert kept[0] == kept[1] != []


def test_reports_are_written(done: tuple[Path, Any, int]) -> None:
    """HTML, Markdown, JUnit and JSON are there and not empty."""
    _, answer, _ = done
    assert set(answer["reports"]) == {"html", "markdown", "junit", "json"}
    assert all(Path(path).stat().st_size > 100 for path in answer["reports"].values())


def test_show_and_resume_and_rerun(done: tuple[Path, Any, int]) -> None:
    """A case can be shown; resuming a finished run makes nothing; a moved case runs again."""
    folder, _, _ = done
    shown = harness("show", "ulp_s3_rlast-attn", "run", cwd=folder)
    assert shown.returncode == 0
    assert "step 3, rank 1" in shown.stdout
    before = {path: path.stat().st_mtime_ns for path in folder.glob("run/runs/*/outcome.json")}
    assert harness("run", "--resume", "run", cwd=folder).returncode == 1
    after = {path: path.stat().st_mtime_ns for path in folder.glob("run/runs/*/outcome.json")}
    assert before == after
    moved = folder / "moved"
    (folder / "run" / "cases" / "unplanted-attn").rename(moved)
    again = harness("rerun", str(moved), "--out", "again", "--json", cwd=folder)
    assert again.returncode == 0, again.stderr
    (verdict,) = json.loads(again.stdout)["verdicts"]
    assert (verdict["case_id"], verdict["outcome"]) == ("unplanted-attn", "passed")
