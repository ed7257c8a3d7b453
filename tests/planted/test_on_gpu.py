"""The road on GPUs: the smoke scenario is bitwise, and each fault that a GPU knows gets its name.

Skipped where GPUs lack; `python -m pytest -m gpu` runs it on a machine that has them.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RANKS_PER_GPU

ROOT = Path(__file__).parents[2]
SMOKE = ROOT / "scenarios/smoke.yaml::dense_graphs"


def verdicts(folder: Path, *args: str) -> dict[str, Any]:
    """Verdicts by case of one run of the smoke scenario on CUDA, in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(SMOKE), "--device", "cuda",
         "--out", str(folder / "run"), "--ranks-per-gpu", str(RANKS_PER_GPU), "--json", *args],
        cwd=folder, capture_output=True, text=True, check=False, timeout=280,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    return {verdict["case_id"]: verdict for verdict in json.loads(ran.stdout)["verdicts"]}


@pytest.mark.gpu(1)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_one_gpu_is_bitwise(tmp_path: Path, strategy: str) -> None:
    """Eager, attn and full_iteration agree on one GPU, dropout included, in both strategies."""
    found = verdicts(
        tmp_path, "--axis", "parallel=[{dp: 1}]", "--set", f"fsdp.strategy={strategy}",
        "--set", "model=dense_tiny_dropout",
    )  # fmt: skip
    assert {case: verdict["outcome"] for case, verdict in found.items()} == {
        "dp1-attn": "passed",
        "dp1-full_iteration": "passed",
    }


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("ulp", "diverged"),
        ("nan", "nonfinite"),
        ("oom", "oom"),
        ("illegal_access", "illegal_access"),
        ("stale_parameter", "stale_address"),
        ("sigkill", "killed"),
    ],
)
def test_planted_faults_get_their_name(tmp_path: Path, fault: str, what: str) -> None:
    """A fault planted at step 7 in a graphed run on CUDA is called what it is."""
    found = verdicts(
        tmp_path, "--axis", "parallel=[{dp: 1}]", "-k", "full_iteration",
        "--set", f"plant={{fault: {fault}, step: 7}}",
    )  # fmt: skip
    verdict = found["dp1-full_iteration"]
    assert (verdict["outcome"], verdict["what"]) == ("failed", what), verdict["message"]


@pytest.mark.gpu(1)
def test_without_the_ledger_a_gpu_says_nothing(tmp_path: Path) -> None:
    """A graph over a parameter that moved reads foreign memory and no error is raised."""
    found = verdicts(
        tmp_path, "--axis", "parallel=[{dp: 1}]", "-k", "attn", "--set", "ledger=false",
        "--set", "plant={fault: stale_parameter, step: 7}",
    )  # fmt: skip
    verdict = found["dp1-attn"]
    assert verdict["outcome"] == "failed"
    # Every rank ended well: only the comparison shows that something is wrong.
    assert verdict["what"] in ("nonfinite", "diverged")
    assert verdict["difference"]["step"] == 7


@pytest.mark.gpu(2)
def test_two_gpus_are_bitwise(tmp_path: Path) -> None:
    """Eager, attn and full_iteration agree on two GPUs over NCCL."""
    found = verdicts(tmp_path, "-k", "dp2")
    assert {verdict["outcome"] for verdict in found.values()} == {"passed"}


@pytest.mark.gpu(4)
def test_four_gpus_are_bitwise(tmp_path: Path) -> None:
    """Eager, attn and full_iteration agree on four GPUs over NCCL."""
    found = verdicts(tmp_path, "-k", "dp4")
    assert {verdict["outcome"] for verdict in found.values()} == {"passed"}


@pytest.mark.gpu(1)
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="needs the extra te (transformer-engine), which is not installed",
)
def test_transformer_engine_is_bitwise(tmp_path: Path) -> None:
    """With TransformerEngine's modules, graphs still agree with eager bit for bit."""
    found = verdicts(tmp_path, "--axis", "parallel=[{dp: 1}]", "--set", "backend=te")
    assert {verdict["outcome"] for verdict in found.values()} == {"passed"}, found
