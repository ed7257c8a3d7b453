"""Large matrices expand at once, and too large ones are refused before they are made."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.errors import ScenarioError
from tests.unit.harness.scenario.small_scenario import GRAPHS, cases, ids


def test_ten_thousand_cases_are_planned_at_once_without_torch(tmp_path: Path) -> None:
    """A laptop plans and prints a matrix of 10,000 cases at once, and needs no torch for it."""
    cases(tmp_path, axes={"seed": [1], "graph": GRAPHS})
    path = tmp_path / "case.yaml"
    axes = {"seed": list(range(100)), "steps": list(range(3, 53)), "graph": GRAPHS}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"axes": axes}))
    code = (
        "import sys\n"
        "from harness.scenario.matrix import expand\n"
        "from harness.scenario.schema import load_scenario\n"
        "from harness.runner.plan import make_plan\n"
        "from tests.pace import in_paces\n"
        "from harness.cli.output import print_plan\n"
        "from harness.terminal import make_console\n"
        "cases = lambda: expand(load_scenario(sys.argv[1]), 'cpu')\n"
        "console = make_console(); console.file = open(sys.argv[2], 'w')\n"
        "c = []; work = lambda: c.append(make_plan(cases(), slots=8))\n"
        "shown = lambda: (work(), print_plan(console, c[0]))\n"
        "paces = in_paces(shown, times=1); console.file.close()\n"
        "print(len(c[0].runs), paces, 'torch' in sys.modules)"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[4])}
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "plan.txt")]
    count, paces, torch = subprocess.check_output(command, text=True, env=environment).split()
    assert (count, torch) == ("20000", "False")  # 10,000 candidates, 5,000 references, twice each
    lines = (tmp_path / "plan.txt").read_text().splitlines()
    assert len(lines) == 20_001
    assert lines[-1].startswith("10000 cases, 20000 runs on 8 slots, about ")
    assert float(paces) < 40  # 25 measured; a pace is 0.06 s where nothing else runs


def test_too_many_combinations_are_refused_before_they_are_made(tmp_path: Path) -> None:
    """The product is counted, not built."""
    numbers = list(range(1, 500))
    began = time.process_time()
    with pytest.raises(ScenarioError, match="at most 50,000 combinations"):
        ids(tmp_path, axes={"seed": numbers, "steps": numbers, "microbatches": numbers,
                            "graph": GRAPHS})  # fmt: skip
    assert time.process_time() - began < 1


def test_many_rules_on_many_cases_stay_fast(tmp_path: Path) -> None:
    """Excluding is a look-up, not a product of rules and cases."""
    axes = {"seed": list(range(100)), "steps": list(range(3, 53)), "graph": GRAPHS}
    rules = [{"seed": n, "steps": m} for n in range(90) for m in range(3, 13)]
    began = time.process_time()
    assert len(ids(tmp_path, axes=axes, exclude=rules)) == 10_000 - 2 * len(rules)
    assert time.process_time() - began < 8
