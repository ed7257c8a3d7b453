"""Taps in a run of the command line: a changed weight is found in the first module that uses it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCENARIO = """
name: taps
why: What went through modules says where a fault entered.
base:
  model: dense_tiny
  parallel: {pp: 2}
  steps: 5
  dtype: fp32
  microbatches: 1
  flush_every: 2
  taps: ["layers.*.attn.**:output", "layers.*:gradient"]
axes:
  plant:
    - none
    - {fault: positive_zero, step: 3, rank: last, tensor: layers.1.attn.attention.wk.weight}
  graph: [eager, [attn]]
compare: {axis: graph, reference: eager, expect: bitwise}
checks: {state: {}, taps: {}}
"""


def run(cwd: Path) -> dict[str, Any]:
    """Verdicts by whether a fault was planted."""
    path = cwd / "taps.yaml"
    path.write_text(SCENARIO)
    ran = subprocess.run(
        [sys.executable, "-m", "harness", "run", str(path), "--device", "cpu",
         "--out", str(cwd / "run"), "--json"],
        cwd=cwd, capture_output=True, text=True, check=False, timeout=240,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(cwd)},
    )  # fmt: skip
    assert ran.stdout, ran.stderr
    verdicts = json.loads(ran.stdout)["verdicts"]
    return {"zero" if "zero" in v["case_id"] else "none": v for v in verdicts}


def test_the_module_that_used_a_changed_weight_first_is_named(tmp_path: Path) -> None:
    """One weight set to zero: its linear's output, in the step after, on its stage's rank.

    Without the fault every call of every module is equal, replayed or not.
    """
    verdicts = run(tmp_path)
    clean = {check["check"]: check for check in verdicts["none"]["checks"]}
    assert verdicts["none"]["outcome"] == "passed", verdicts["none"]["message"]
    assert clean["taps"]["figures"]["unseen"] == 0
    assert clean["taps"]["figures"]["calls"] >= 5 * 2 * 7
    found = {check["check"]: check for check in verdicts["zero"]["checks"]}
    assert found["state"]["difference"]["step"] == 3
    difference = found["taps"]["difference"]
    assert (difference["step"], difference["rank"]) == (4, 1)
    assert difference["tensor"] == "layers.1.attn.attention.wk:output[0]"
