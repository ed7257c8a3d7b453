"""What the cookbook types can be typed: commands parse, files are there. `python -m tests.cookbook`
runs it."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from harness.cli.main import commands
from harness.scenario.matrix import expand
from harness.scenario.schema import load_scenario
from tests.cookbook.transcript import GAP, Step, changes, read_steps

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "COOKBOOK.md").read_text(encoding="utf-8")
STEPS = read_steps(PAGE)
SCENARIOS = sorted((ROOT / "scenarios" / "cookbook").glob("*.yaml"))
ENDS = (";", "|", ">", "&&", "do", "done")


def harness_lines(command: str) -> Iterator[list[str]]:
    """The arguments of each call of the harness in a line of bash."""
    words = shlex.split(re.sub(r"([;|>]|&&)", r" \1 ", command))
    for number, word in enumerate(words):
        if word == "harness":
            rest = words[number + 1 :]
            end = next((i for i, other in enumerate(rest) if other in ENDS), len(rest))
            yield rest[:end]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"line{step.line}")
def test_what_the_cookbook_types_parses(step: Step) -> None:
    """Every option exists, and takes what it is given."""
    for args in harness_lines(step.command):
        with commands.make_context("harness", list(args)) as context:
            name, command, rest = commands.resolve_command(context, args)
            assert isinstance(command, click.Command)
            with command.make_context(name, rest, parent=context):
                pass


def test_files_of_the_cookbook_are_there() -> None:
    """Scenarios that it names are there, all are named; repros are those of their bisections."""
    named = set(re.findall(r"scenarios/cookbook/\w+\.yaml", PAGE))
    assert named == {str(path.relative_to(ROOT)) for path in SCENARIOS}
    for repro in set(re.findall(r"scenarios/repro/(repro_\w+)\.yaml", PAGE)):
        assert any(repro.startswith(f"repro_{path.stem}_") for path in SCENARIOS), repro


def test_every_command_of_the_cookbook_was_run() -> None:
    """No command stands without what it printed, but those that print nothing."""
    silent = [step.command for step in STEPS if not any(line.strip() for line in step.shown)]
    assert all("history out/history" in command or "while " in command for command in silent)
    assert len(STEPS) > len(silent)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenarios_of_the_cookbook_are_small(path: Path) -> None:
    """At most eight ranks and six steps: two cores are enough; one case has a fault at least."""
    cases = expand(load_scenario(path), "cpu")
    assert any(case.candidate.plant is not None for case in cases)
    for case in cases:
        assert case.candidate.world_size <= 8
        assert case.candidate.config["steps"] <= 6


def test_changed_lines_are_told() -> None:
    """A line that was not printed, and one that the page lacks, wherever no gap stands for them."""
    shown = ["plan", GAP, "step 3, rank 1  ", "took 4 s", "end"]
    assert changes(shown, ["plan", "x", "y", "step 3, rank 1", "", "took 17.5 s", "end"]) == []
    assert changes(shown, ["plan", "step 4, rank 1", "took 4 s", "end"]) == ["- step 3, rank 1"]
    assert changes(["a", "b"], ["a", "new", "b", "more"]) == ["+ new", "+ more"]
    assert changes([f"differs {GAP} step 3"], ["differs first at step 3"]) == []
    assert changes(["0x3f8a21c4"], ["0x3f8a21c5"]) == ["- 0x3f8a21c4", "+ 0x3f8a21c5"]
    assert changes([], ["said"]) == ["+ said"]
