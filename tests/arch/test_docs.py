"""What pages say can be followed: links resolve, files are there, commands parse, and tables and
counts are those of the code. `python -m tests.cookbook` runs the examples of docs/DEBUGGING.md."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from fsdp_core.config import DEGREES, SCOPES, TrainConfig
from harness.cli import commands
from harness.records import WHATS, ExitCode
from harness.scenario.matrix import expand
from harness.scenario.schema import LAUNCH, SECTIONS, load_scenario
from harness.scenario.suite import find_scenarios
from harness.values import TIERS
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


# --- the CI templates of docs/ci and our own: what they type exists, they ask for what they need --


pytest_plugins = ["pytester"]

GITHUB = [*sorted((ROOT / "docs/ci/github").glob("*.yml")), ROOT / ".github/workflows/ci.yml"]
GITLAB = ROOT / "docs/ci/gitlab.yml"
VARIABLES = {
    "${{ matrix.shard }}": "1/8", "$CI_NODE_INDEX": "1", "$CI_NODE_TOTAL": "8",
}  # fmt: skip
"""What stands for what only a CI knows."""
PINNED = re.compile(r"uses: actions/[a-z-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")


def loaded(path: Path) -> dict[str, Any]:
    """A template. YAML 1.1 reads GitHub's key `on` as true."""
    plain = yaml.safe_load(path.read_text())
    return {("on" if key is True else key): value for key, value in plain.items()}


def github_jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every job of every workflow."""
    for path in GITHUB:
        for name, job in loaded(path)["jobs"].items():
            yield f"{path.stem}.{name}", job


def gitlab_jobs() -> dict[str, dict[str, Any]]:
    """The jobs that run."""
    plain = loaded(GITLAB)
    return {name: job for name, job in plain.items() if isinstance(job, dict) and "script" in job}


def command_lines() -> list[str]:
    """Every line that a template gives to a shell, with values for what only a CI knows."""
    texts = [step["run"] for _, job in github_jobs() for step in job["steps"] if "run" in step]
    for job in (loaded(GITLAB)["default"], *gitlab_jobs().values()):
        texts += [*job.get("before_script", ()), *job.get("script", ())]
    for variable, value in VARIABLES.items():
        texts = [text.replace(variable, value) for text in texts]
    return sorted({line for text in texts for line in text.splitlines()})


@pytest.mark.parametrize("line", command_lines())
def test_what_a_template_types_exists(line: str, pytester: pytest.Pytester) -> None:
    """Options of harness and pytest parse as they stand; targets, folders and tiers are there."""
    words = shlex.split(line.partition(" > ")[0])
    match words:
        case [program, *args] if Path(program).name == "harness":
            with commands.make_context("harness", list(args)) as context:
                name, command, rest = commands.resolve_command(context, list(args))
                assert isinstance(command, click.Command)
                with command.make_context(name, rest, parent=context) as parsed:
                    tiers = parsed.params.get("tiers") or ()
                    assert set(tiers) <= set(TIERS)
        case ["python", "-m", "pytest", *args]:
            config = pytester.parseconfig("-p", "harness.pytest_plugin.plugin", *args)
            assert config.getoption("harness")
            assert set(str(config.getoption("markexpr")).split(" or ")) <= set(TIERS)
        case ["bash", script]:
            assert (ROOT / script).is_file()
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        case ["python", "-m", "pip", "install", "--editable", extras]:
            assert extras in (".", ".[test]")
        case _:
            assert words[0] == "echo", line
    folders = [word for word in words if word.startswith("scenarios")]
    assert all((ROOT / folder).exists() for folder in folders)


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.stem)
def test_a_workflow_may_read_the_code_and_nothing_else(path: Path) -> None:
    """One permission, no stored token, actions by commit, one run at a time, every job limited.

    No event hands secrets or a token that may write to code of a fork, and a machine of one's own
    runs none of a pull request.
    """
    plain = loaded(path)
    assert set(plain["on"]) <= {"pull_request", "merge_group", "schedule", "workflow_dispatch"}
    if "pull_request" in plain["on"]:
        assert not any("self-hosted" in job["runs-on"] for job in plain["jobs"].values())
    assert "secrets." not in path.read_text()
    uses = [line for line in path.read_text().splitlines() if "uses:" in line]
    assert all(PINNED.search(line) for line in uses)
    assert plain["permissions"] == {"contents": "read"}
    assert plain["concurrency"]["group"].startswith(plain["name"])
    for job in plain["jobs"].values():
        assert "permissions" not in job
        assert job["timeout-minutes"] > 0
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is False


def test_evidence_is_kept_whatever_the_outcome() -> None:
    """Jobs that run cases upload their folders after failures and timeouts, too.

    A job whose own limit ends it is cancelled, so the step that runs has a smaller one.
    """
    for name, job in github_jobs():
        lines = " ".join(step.get("run", "") for step in job["steps"])
        if "harness run" in lines or "--harness " in lines:
            (upload,) = [s for s in job["steps"] if "upload" in s.get("uses", "")]
            assert upload["if"] == "${{ always() }}", name
            limits = [s["timeout-minutes"] for s in job["steps"] if "timeout-minutes" in s]
            assert limits[0] < job["timeout-minutes"] - 5, name
            assert upload["with"]["if-no-files-found"] == "error"
    for name, job in gitlab_jobs().items():
        assert job["timeout"], name
        if name != "sound":
            assert job["extends"] == ".evidence"
        if "--tier" in " ".join(job["script"]) or "--harness " in " ".join(job["script"]):
            assert "RUNNER_SCRIPT_TIMEOUT" in job["variables"], name
    assert loaded(GITLAB)[".evidence"]["artifacts"]["when"] == "always"


def test_a_report_is_made_whatever_became_of_the_shards() -> None:
    """Failed, killed and lost shards have their place in it; empty ones are neither red nor green.

    The job matrix of GitHub leaves empty shards out; GitLab numbers its jobs before anybody knows.
    """
    (report,) = [job for name, job in github_jobs() if name == "nightly.report"]
    assert report["if"] == "${{ always() }}"
    jobs = gitlab_jobs()
    assert [rule["when"] for rule in jobs["nightly-report"]["rules"]] == ["always"]
    assert jobs["nightly"]["allow_failure"] == {"exit_codes": int(ExitCode.NOTHING_RAN)}
    assert "allow_failure" not in jobs["nightly-report"]


def test_no_untrusted_text_reaches_a_shell() -> None:
    """GitHub pastes `${{ }}` into scripts: only the shard's name, which the plan job made."""
    for _, job in github_jobs():
        for step in job["steps"]:
            assert set(re.findall(r"\$\{\{.*?\}\}", step.get("run", ""))) <= {"${{ matrix.shard }}"}
