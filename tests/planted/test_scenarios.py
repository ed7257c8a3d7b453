"""The shipped planted scenarios, as a user runs them: every fault is called what it is."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.faults.catalogue import CATALOGUE

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "scenarios/planted").glob("*.yaml"))
CHEAPER = {"wrong_values": ("--set", "parallel.dp=2", "--set", "steps=9")}
"""What a scenario can do without to name the same faults: ranks, and steps after the last fault."""
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}


def harness(*args: str, cwd: Path) -> tuple[Any, int]:
    """The JSON answer and the exit code of one command in a process of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "harness", *args, "--json"],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=280,
        env=ENVIRONMENT | {"HOME": str(cwd)},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    return json.loads(ran.stdout), ran.returncode


def planted_faults(path: Path, cwd: Path) -> dict[str, str]:
    """The fault in the candidate of every case of a scenario, "" where there is none."""
    answer, _ = harness("list", str(path), cwd=cwd)
    return {
        case["id"]: (case["candidate"]["plant"] or {}).get("fault", "")
        for case in answer[str(path)]
    }


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_fault_is_named_and_the_clean_cases_pass(path: Path, tmp_path: Path) -> None:
    """Each verdict names what the catalogue expects; what cannot be planted here is skipped."""
    faults = planted_faults(path, tmp_path)
    answer, code = harness(
        "run",
        str(path),
        *CHEAPER.get(path.stem, ()),
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
        cwd=tmp_path,
    )
    assert {verdict["case_id"] for verdict in answer["verdicts"]} == set(faults)
    for verdict in answer["verdicts"]:
        fault = faults[verdict["case_id"]]
        if not fault:
            assert verdict["outcome"] == "passed", verdict["message"]
        elif "cpu" not in CATALOGUE[fault].devices:
            assert verdict["outcome"] == "skipped", verdict["message"]
        else:
            assert verdict["outcome"] == "failed", (fault, verdict["message"])
            assert verdict["what"] in CATALOGUE[fault].expects, (fault, verdict["message"])
    assert "" in faults.values()
    assert code == 1


def test_every_fault_has_a_scenario(tmp_path: Path) -> None:
    """No fault of the catalogue is without a real run that shows it caught."""
    shown = {fault for path in SCENARIOS for fault in planted_faults(path, tmp_path).values()}
    counterparts = {fault.counterpart for fault in CATALOGUE.values()}
    assert shown - {""} == set(CATALOGUE) - counterparts
