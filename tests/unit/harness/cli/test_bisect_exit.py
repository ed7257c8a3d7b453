"""Contracts of harness.cli.options: what `git bisect run` makes of a run."""

import pytest

from harness.cli import main
from harness.cli.options import for_git
from harness.records import ExitCode, RunSpec, What
from tests.unit.harness.fake_engine import FakeEngine, run_json, unequal


def test_every_exit_code_has_a_meaning_for_git() -> None:
    """Good and bad are those of a verdict; without one a commit is skipped, or the search stops."""
    found = {code.name: for_git(code, ["run", "--bisect-exit"]) for code in ExitCode}
    assert found == {
        "PASSED": 0, "FAILED": 1, "INTERNAL": 125, "NOTHING_RAN": 125, "NO_VERDICT": 125,
        "INTERRUPTED": 130, "USAGE": 132,
    }  # fmt: skip
    assert [for_git(code, ["run"]) for code in ExitCode] == list(ExitCode)


@pytest.mark.parametrize(
    ("ends", "keyword", "code"),
    [({}, "dp1", 0), ({"attn": "hang"}, "dp1", 1), ({"": "crashed"}, "dp1", 125),
     ({}, "dp9", 125), ({}, "(", 132)],
)  # fmt: skip
def test_a_run_under_git_bisect(
    ends: dict[str, What], keyword: str, code: int, engine: FakeEngine
) -> None:
    """Passed, failed, no verdict, nothing selected, misused."""
    engine.ends = ends
    assert main(["run", "small.yaml", "-k", keyword, "--bisect-exit"]) == code


def test_an_interrupted_run_stops_the_search(engine: FakeEngine) -> None:
    """Ctrl-C is for all of the search, not for one commit."""

    def interrupt(spec: RunSpec) -> None:
        raise KeyboardInterrupt

    engine.on_start = interrupt
    assert main(["run", "small.yaml", "--bisect-exit"]) == 130


def test_rerun_under_git_bisect(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of one case; JSON tells our own code."""
    assert main(["run", "small.yaml", "--out", "r"]) == 0
    engine.spoil = unequal
    assert main(["rerun", "dp1-attn", "r", "--bisect-exit"]) == 1
    engine.spoil, engine.ends = lambda spec, record: record, {"": "crashed"}
    capsys.readouterr()
    code, answer = run_json(capsys, "rerun", "dp1-attn", "r", "--bisect-exit")
    assert (code, answer["exit_code"]) == (125, 6)
