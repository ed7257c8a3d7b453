"""The shipped layouts, cut to a pipeline of two ranks: the clean case passes, faults are named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLANTS = """plant=[none, {fault: ulp, step: 3, rank: last},
                   {fault: stale_parameter, step: 3, rank: last}]"""


def run(cwd: Path) -> tuple[dict[str, Any], int]:
    """Verdicts by fault, and the exit code, of one `harness run` in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(ROOT / "scenarios/smoke/layouts.yaml"),
         "--axis", "parallel=[{pp: 2}]", "--axis", PLANTS, "--set", "steps=4", "-k", "pp2",
         "--device", "cpu", "--out", str(cwd / "run"), "--json"],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd)},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    answer = json.loads(ran.stdout)
    return {v["case_id"].split("-")[2]: v for v in answer["verdicts"]}, ran.returncode


def test_a_pipeline_passes_and_faults_on_its_last_stage_are_named(tmp_path: Path) -> None:
    """A layer of the last stage has its number in the whole model, in records and in ledgers."""
    verdicts, code = run(tmp_path)
    assert verdicts["unplanted"]["outcome"] == "passed", verdicts["unplanted"]["message"]
    changed = verdicts["ulp_s3_rlast"]
    assert (changed["outcome"], changed["what"]) == ("failed", "diverged")
    difference = changed["difference"]
    assert (difference["step"], difference["rank"], difference["tensor"]) == (3, 1, "norm.weight")
    stale = verdicts["stale_parameter_s3_rlast"]
    assert (stale["outcome"], stale["what"]) == ("failed", "stale_address")
    assert "layers.1.attn.attention.wq.weight" in stale["message"]
    assert code == 1
