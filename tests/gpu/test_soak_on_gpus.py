"""Soaks on one GPU: what is planted late in a run is named, and a clean one states its bound.

`python -m pytest -m gpu tests/gpu/test_soak_on_gpus.py`, some minutes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "scenarios/soak.yaml::planted_soak"


def soaked(folder: Path, wanted: str) -> dict[str, Any]:
    """The verdict of the one case of the planted soak whose name has `wanted`, on one GPU."""
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(PLANTED), "--device", "cuda", "-k", wanted,
         "--set", "parallel.dp=1", "--out", str(folder / "run"), "--json", "--no-history"],
        cwd=folder, capture_output=True, text=True, check=False, timeout=290,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    (verdict,) = json.loads(ran.stdout)["verdicts"]
    found: dict[str, Any] = verdict
    return found


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("fault", "what", "told"),
    [
        ("unplanted", "", "no failure in 1"),
        ("nan", "nonfinite", "at step 77 on rank 0"),
        ("small_leak", "memory_regression", "live memory of rank 0 grows by 65,536 bytes"),
        ("hang", "hang", "no rank recorded anything for 40 s; still running: rank 0"),
        ("segfault", "crashed", "rank 0 died by SIGSEGV"),
        ("illegal_access", "illegal_access", "rank 0 at step 77"),
    ],
)
def test_what_is_planted_late_is_named(tmp_path: Path, fault: str, what: str, told: str) -> None:
    """Each by its kind, rank and step; without a fault all is well."""
    verdict = soaked(tmp_path, fault)
    assert (verdict["what"], told in verdict["message"]) == (what, True), verdict["message"]


@pytest.mark.gpu(1)
def test_an_illegal_access_comes_with_what_cuda_says(tmp_path: Path) -> None:
    """The kind of exception and the kernel, from CUDA's own core dump."""
    message = soaked(tmp_path, "illegal_access")["message"]
    assert "CUDBG_EXCEPTION_WARP_ILLEGAL_ADDRESS in" in message
    assert "kernel memcpy" in message
    (stderr,) = tmp_path.glob("run/runs/*full_iteration*/rank0.stderr")
    assert "illegal" in stderr.read_text(errors="replace")
