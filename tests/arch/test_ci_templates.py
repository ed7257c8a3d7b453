"""The CI templates of docs/ci and our own: what they type exists, they ask for what they need.

Their syntax is checked against the schemas of GitHub and GitLab by `make lint`.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from harness.cli import commands
from harness.records import ExitCode
from harness.scenario.schema import TIERS
from tests.arch.tree import ROOT

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
