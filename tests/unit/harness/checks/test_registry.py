"""The registry of checks is the schema of `checks:`, what is refused, and the table of the docs."""

import math
from pathlib import Path
from typing import Any

import pytest

from harness.checks import CHECKS, defaults, refusal, table
from harness.cli import main
from harness.records import ExitCode

README = Path(__file__).resolve().parents[4] / "scenarios" / "README.md"
RATIO = {"max_ratio": 2.0}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lost", {}), ("loss", {"rtol": 1e-5}), ("state", {"groups": ["grads"]}),
        ("taps", {"max": 1}), ("finite", {"": 1}), ("peak_memory", {}),
        ("peak_memory", {"max_ration": 2.0}), ("peak_memory", RATIO | {"max_bytes": None}),
        ("throughput", {"slow": 1}),
        ("throughput", {"repeats": 5}), ("throughput", {"repeats": 51}),
        ("soak", {"limit": 1}), ("graphs", {"min_replays": 0.5}),
        *(("peak_memory", {"max_ratio": wrong}) for wrong in (True, "2", 0, -1.0, math.inf)),
        *(("throughput", {"max_slowdown": wrong}) for wrong in (0, True, math.nan, "5%")),
        *(("throughput", {"skip_steps": wrong}) for wrong in (-1, 1.5, True)),
        *(("soak", {"max_leak_bytes": wrong}) for wrong in (-1, True)),
    ],
)  # fmt: skip
def test_what_is_no_option_is_refused(name: str, options: dict[str, Any]) -> None:
    """A limit that says nothing gives no verdict."""
    answer = refusal(name, options)
    assert answer is not None
    assert (answer.check, answer.outcome, answer.what) == (name, "error", "unsupported")


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_filled_in_is_legal(name: str) -> None:
    """Defaults are enough, but where a check asks nothing without a limit."""
    options = RATIO if CHECKS[name].needs_option else defaults(name)
    assert refusal(name, options) is None


def test_a_scenario_may_not_leave_out_state_and_finite() -> None:
    """Of a program its graphs are looked at, too."""
    always = {name: check.always for name, check in CHECKS.items() if check.always}
    assert always == {"state": "case", "finite": "case", "graphs": "program"}
    assert {name for name, check in CHECKS.items() if check.compares} == {"loss", "state", "taps"}


def test_the_docs_have_the_table() -> None:
    """As `harness list --checks` prints it."""
    assert "\n".join(table()) in README.read_text()


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """`harness list --checks` needs no scenario."""
    assert main(["list", "--checks"]) == ExitCode.PASSED
    assert capsys.readouterr().out.splitlines() == list(table())
