"""Layouts through the real engine and worker: clean ones pass, planted faults are named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "scenarios/smoke/layouts.yaml"
PIPELINE = {
    "name": "pipeline",
    "why": "Faults on the last stage of a pipeline get their names.",
    "base": {"steps": 4, "microbatches": 2, "seed": 1, "parallel": {"pp": 2}},
    "axes": {
        "plant": [
            {"fault": "ulp", "step": 3, "rank": "last"},
            {"fault": "stale_parameter", "step": 3, "rank": "last"},
        ],
        "graph": ["eager", ["full_iteration"]],
    },
    "compare": {"axis": "graph", "reference": "eager", "expect": "bitwise"},
    "checks": {"loss": {}, "state": {}, "finite": {}},
    "launch": {"device": "cpu", "timeout_s": 120},
}


def run(*args: str, cwd: Path) -> tuple[dict[str, Any], int]:
    """Verdicts by case, and the exit code, of one `harness run` in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", *args, "--json"],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd)},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    answer = json.loads(ran.stdout)
    return {verdict["case_id"]: verdict for verdict in answer["verdicts"]}, ran.returncode


def test_a_shipped_layout_passes(tmp_path: Path) -> None:
    """Experts over two ranks, captured with their exchanges, have eager's bits."""
    verdicts, code = run(str(SHIPPED), "-k", "dp2_ep2 and not etp2", "--device", "cpu",
                         "--out", str(tmp_path / "run"), cwd=tmp_path)  # fmt: skip
    assert [verdict["outcome"] for verdict in verdicts.values()] == ["passed"]
    assert code == 0


def test_faults_on_a_later_stage_are_named(tmp_path: Path) -> None:
    """The tensor is of a layer that the last stage has, by its number in the whole model."""
    (tmp_path / "pipeline.yaml").write_text(json.dumps(PIPELINE))
    verdicts, code = run("pipeline.yaml", "--out", str(tmp_path / "run"), cwd=tmp_path)
    changed = verdicts["ulp_s3_rlast-full_iteration"]
    assert (changed["outcome"], changed["what"]) == ("failed", "diverged")
    difference = changed["difference"]
    assert (difference["step"], difference["rank"], difference["tensor"]) == (3, 1, "norm.weight")
    stale = verdicts["stale_parameter_s3_rlast-full_iteration"]
    assert (stale["outcome"], stale["what"]) == ("failed", "stale_address")
    assert "layers.1.attn.attention.wq.weight" in stale["message"]
    assert code == 1
