"""What pages say can be followed: links resolve, files are there, commands parse, and tables and
counts are those of the code. `python -m tests.cookbook` runs the examples of docs/DEBUGGING.md."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from fsdp_core.config import DEGREES, SCOPES, TrainConfig
from harness.cli import commands
from harness.records import WHATS
from harness.scenario.matrix import expand
from harness.scenario.schema import LAUNCH, SECTIONS, load_scenario
from harness.scenario.suite import find_scenarios
from tests.arch.tree import ROOT
from tests.cookbook.transcript import GAP, Step, changes, read_steps

PAGES = sorted(
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("[!.o]*/**/*.md"))
    if not {"build", "node_modules"} & set(path.parts)
)  # fmt: skip
MAX_LINES = 1500
"""Of all pages: whoever adds a page shortens another."""
DEBUGGING = ROOT / "docs" / "DEBUGGING.md"
STEPS = read_steps(DEBUGGING.read_text(encoding="utf-8"))
SCENARIOS = {
    str(path).partition("::")[2]: path
    for path in find_scenarios([ROOT / "scenarios" / "cookbook.yaml"])
}
ENDS = (";", "|", ">", "&&", "do", "done")
STANDS_FOR = {"I/N": "1/2", "CASE": "out/RUN/cases/x", "N": "2", "X": "2"}
"""Words of usage lines that are no value."""
PATHS = re.compile(
    r"(?<![\w./-])(?:fsdp_core|harness|reports|scenarios|tests|benchmarks|docs)/[\w./*-]*"
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
each_page = pytest.mark.parametrize("path", PAGES, ids=[str(p.relative_to(ROOT)) for p in PAGES])


def harness_lines(command: str) -> Iterator[list[str]]:
    """The arguments of each call of the harness in a line of bash."""
    words = shlex.split(re.sub(r"([;|>]|&&)", r" \1 ", command))
    for number, word in enumerate(words):
        if word == "harness":
            rest = words[number + 1 :]
            end = next((i for i, other in enumerate(rest) if other in ENDS), len(rest))
            yield rest[:end]


def parse(args: list[str]) -> None:
    """Fail if an option does not exist or does not take its value."""
    with commands.make_context("harness", list(args)) as context:
        name, command, rest = commands.resolve_command(context, args)
        assert isinstance(command, click.Command)
        if isinstance(command, click.Group):
            with command.make_context(name, list(rest), parent=context) as inner:
                name, command, rest = command.resolve_command(inner, rest)
                assert command is not None
        with command.make_context(name, rest, parent=context):
            pass


def typed_lines(page: str) -> Iterator[str]:
    """Lines of indented blocks that begin with the command, without comments."""
    for line in page.splitlines():
        if match := re.match(r" {4}(?:\$ |\.venv/bin/)?(harness .*)", line):
            yield match[1].partition("#")[0].strip()


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@each_page
def test_links_resolve(path: Path) -> None:
    """Files are there, and headings are in them."""
    for link in LINK.findall(path.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        file = path.parent / name if name else path
        assert file.exists(), link
        assert not anchor or anchor in anchors(file.read_text(encoding="utf-8")), link


@each_page
def test_files_that_pages_name_are_there(path: Path) -> None:
    """From the top of the tree, or from the page; but for those that a command makes."""
    for name in PATHS.findall(path.read_text(encoding="utf-8")):
        where = name.rstrip(".")
        found = [*ROOT.glob(where.rstrip("/")), *path.parent.glob(where.rstrip("/"))]
        assert found or "scenarios/repro" in where, where


@each_page
def test_commands_of_pages_parse(path: Path) -> None:
    """Every option exists, and takes what it is given."""
    for line in typed_lines(path.read_text(encoding="utf-8")):
        for args in harness_lines(line):
            parse([STANDS_FOR.get(word, word) for word in args if not word.startswith("[")])


def test_pages_are_few() -> None:
    """A reader's time is limited."""
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PAGES}
    assert sum(lines.values()) <= MAX_LINES, lines


def test_the_guide_has_every_word() -> None:
    """Sections of a scenario, keys of launch, settings, kinds of verdicts."""
    guide = (ROOT / "docs" / "GUIDE.md").read_text(encoding="utf-8")
    blocks = [line for line in guide.splitlines() if line.startswith("    ")]
    words = set(re.findall(r"\w+", " ".join([*re.findall(r"`([^`\n]+)`", guide), *blocks])))
    for word in (*SECTIONS, *LAUNCH, *filter(None, WHATS), *SCOPES):
        assert word in words, word
    ours = {"steps", "microbatches", "micro_batch_size", "seed", "dtype", "optim", "data",
            "flush_every", "stress_seed", "graph_warmup_steps", "graph_optimizer"}  # fmt: skip
    for word in set(TrainConfig.__dataclass_fields__) - ours:
        assert word in words, word


def test_the_architecture_has_every_axis_and_scope() -> None:
    """No degree and no graph scope is left out."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in (*DEGREES, "edp", "dynamic_cp", "pp_chunks"):
        assert re.search(rf"\b{name}\b", text), name
    for scope in SCOPES:
        assert f"| `{scope}` |" in text, scope


# ---- the examples of docs/DEBUGGING.md


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"line{step.line}")
def test_what_an_example_types_parses(step: Step) -> None:
    """Every option exists, and takes what it is given."""
    for args in harness_lines(step.command):
        parse(args)


def test_files_of_the_examples_are_there() -> None:
    """All scenarios of the file are named; repros are those of their bisections."""
    page = DEBUGGING.read_text(encoding="utf-8")
    assert set(re.findall(r"cookbook\.yaml::(\w+)", page)) == set(SCENARIOS)
    for repro in set(re.findall(r"scenarios/repro/(repro_\w+)\.yaml", page)):
        assert any(repro.startswith(f"repro_{name}_") for name in SCENARIOS), repro


def test_every_command_of_an_example_was_run() -> None:
    """None is without what it printed."""
    assert STEPS
    assert all(any(line.strip() for line in step.shown) for step in STEPS)


@pytest.mark.parametrize("path", SCENARIOS.values(), ids=SCENARIOS)
def test_scenarios_of_the_examples_are_small(path: Path) -> None:
    """At most eight ranks and six steps: two cores are enough; one case has a fault at least."""
    cases = expand(load_scenario(path), "cpu")
    assert any(case.candidate.plant is not None for case in cases)
    for case in cases:
        assert case.candidate.world_size <= 8
        assert case.candidate.config["steps"] <= 6


def test_changed_lines_are_told() -> None:
    """A line that was not printed, and one that the page lacks, wherever no gap covers them."""
    shown = ["plan", GAP, "step 3, rank 1  ", "took 4 s", "end"]
    assert changes(shown, ["plan", "x", "y", "step 3, rank 1", "", "took 17.5 s", "end"]) == []
    assert changes(shown, ["plan", "step 4, rank 1", "took 4 s", "end"]) == ["- step 3, rank 1"]
    assert changes(["a", "b"], ["a", "new", "b", "more"]) == ["+ new", "+ more"]
    assert changes([f"differs {GAP} step 3"], ["differs first at step 3"]) == []
    assert changes(["0x3f8a21c4"], ["0x3f8a21c5"]) == ["- 0x3f8a21c4", "+ 0x3f8a21c5"]
    assert changes([], ["said"]) == ["+ said"]
