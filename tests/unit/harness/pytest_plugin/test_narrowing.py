"""What -m, -k and `select: pairwise` leave of scenario files, and what is never made for it."""

import re
from pathlib import Path
from typing import Any

import pytest

from harness.errors import NothingSelected
from harness.pytest_plugin import collection
from harness.runner.launch import Request, prepare
from harness.scenario import matrix
from harness.scenario.matrix import expand, named
from harness.scenario.schema import load_scenario
from tests.unit.harness.pytest_plugin.test_plugin import Run, run, scenario

__all__ = ["run"]
pytest_plugins = ["pytester"]

SEEDS = {"seed": [1, 2], "stress": ["none", ["jitter"], ["poison"]]}
LEDGERS = {"ledger": [True, False], "microbatches": [1, 2], "steps": [2, 3], **SEEDS}
PLANTS = {"plant": ["none", {"fault": "ulp", "step": 1, "rank": "last"}]}
PAIRS = {"axes": {**LEDGERS, **PLANTS}, "select": "pairwise"}
FILES: dict[str, tuple[dict[str, Any], str]] = {
    "one.yaml": ({"axes": SEEDS, "tier": "smoke"}, "smoke"),
    "two.yaml": (
        {"axes": {"microbatches": [1, 2], "stress": ["none", ["races"]]}, "tier": "pr"},
        "pr",
    ),
    "sub/three.yaml": ({"axes": {"stress": ["none", ["jitter"]]}, "tier": None}, ""),
}
PLUGIN = ("-p", "harness.pytest_plugin.plugin", "-p", "no:cov", "-p", "no:hypothesispytest")
WORD = re.compile(r"\b(?!(?:and|or|not)\b)[\w.=]+")


@pytest.fixture
def expanded(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three files under scenarios/; the names of those of which pytest makes cases."""
    Path("scenarios/a.yaml").unlink()
    Path("scenarios/sub").mkdir()
    for name, (changes, _) in FILES.items():
        text = {"name": Path(name).stem, **changes}
        Path("scenarios", name).write_text(scenario(**text).replace('"tier": null, ', ""))
    made: list[str] = []
    real = matrix.expand_marked

    def expand_marked(held: object, device: str) -> object:
        made.append(str(Path(held.path).relative_to("scenarios")))  # type: ignore[attr-defined]
        return real(held, device)  # type: ignore[arg-type]

    monkeypatch.setattr(collection, "expand_marked", expand_marked)
    return made


def true_words(file: str, case: str, labels: dict[str, str], option: str) -> list[str]:
    """What a word is looked for in, written down from pytest's documentation."""
    tier = FILES[file][1]
    if option == "-m":
        return [tier, "timeout"]
    axes = [f"{axis}={value}" for axis, value in labels.items()]
    return ["scenarios", *file.split("/"), tier, "timeout", case, *axes]


def expected(option: str, expression: str) -> set[str]:
    found = set()
    for file in FILES:
        for case in expand(load_scenario(Path("scenarios", file)), "cpu"):
            words = true_words(file, case.id, dict(case.labels), option)

            def value(match: re.Match[str], words: list[str] = words) -> str:
                word = match[0]
                if option == "-m":
                    return str(word in words)
                return str(any(word.lower() in known.lower() for known in words))

            if eval(WORD.sub(value, expression)):
                found.add(f"scenarios/{file}::{case.id}")
    return found


@pytest.mark.parametrize(
    ("option", "expression", "files"),
    [
        ("-m", "smoke", ["one.yaml"]),
        ("-m", "not smoke", ["sub/three.yaml", "two.yaml"]),
        ("-m", "smoke or pr", ["one.yaml", "two.yaml"]),
        ("-m", "not (smoke or pr)", ["sub/three.yaml"]),
        ("-m", "weekly", []),
        ("-m", "not timeout", []),
        # Somebody's conftest.py may give cases a marker: for pytest to say.
        ("-m", "slow", list(FILES)),
        ("-m", "slow and smoke", list(FILES)),
        ("-m", "not SMOKE", list(FILES)),
        ("-k", "races", ["two.yaml"]),
        ("-k", "RACES or seed=2", ["one.yaml", "two.yaml"]),
        ("-k", "three", ["sub/three.yaml"]),
        ("-k", "sub or smoke", ["one.yaml", "sub/three.yaml"]),
        ("-k", "not sub and not microbatches1", ["one.yaml", "two.yaml"]),
        ("-k", "not stress_jitter", ["one.yaml", "two.yaml"]),
        ("-k", "jitter and not seed", ["sub/three.yaml"]),
        ("-k", "yaml", list(FILES)),
        ("-k", "nowhere", []),
        ("-k", "not yaml", []),
    ],
)  # fmt: skip
def test_files_without_a_selected_case_are_never_expanded(
    run: Run, expanded: list[str], option: str, expression: str, files: list[str]
) -> None:
    """What is collected is what pytest's documentation says; other files' cases are not made."""
    got = run("--harness", "--co", "-q", option, expression)
    wanted = expected(option, expression)
    assert {line for line in got.outlines if "::" in line} == wanted
    assert sorted(expanded) == sorted(files)
    assert got.ret == (pytest.ExitCode.OK if wanted else pytest.ExitCode.NO_TESTS_COLLECTED)


@pytest.mark.parametrize("option", ["-m", "-k"])
def test_an_expression_that_pytest_refuses_is_refused_by_pytest(run: Run, option: str) -> None:
    """Nothing is left out on its account, and the words are pytest's."""
    got = run("--harness", "--co", option, "smoke or")
    assert got.ret == pytest.ExitCode.USAGE_ERROR
    got.stderr.fnmatch_lines([f"ERROR: Wrong expression passed to '{option}'*"])


def test_names_are_those_of_the_cases(run: Run) -> None:
    """What -k is held against is what is expanded, include and exclude too."""
    include = [
        {"seed": 1, "stress": ["jitter"], "microbatches": 3},
        {"seed": 7, "stress": ["races"]},
    ]
    exclude = [{"seed": 2, "stress": ["poison"]}]
    Path("a.yaml").write_text(scenario(axes=SEEDS, include=include, exclude=exclude))
    held = load_scenario(Path("a.yaml"))
    assert list(named(held)) == [(case.id, dict(case.labels)) for case in expand(held, "cpu")]


@pytest.mark.parametrize(
    "words", [None, "seed1", "seed=2 and not ledger=false", "microbatches1 or poison"]
)
def test_a_pairwise_choice_is_that_of_harness_run(run: Run, words: str | None) -> None:
    """With -k or without: the same cases in the same order, of those that -k leaves."""
    file = Path("scenarios/a.yaml")
    file.write_text(scenario(**PAIRS))
    cases = prepare(Request(paths=(file,), keyword=words, device="cpu")).plan.cases
    got = run("--harness", "--co", "-q", *(("-k", words) if words else ()))
    assert [line for line in got.outlines if "::" in line] == [f"{file}::{c.id}" for c in cases]
    assert got.outlines[-1].startswith(f"{len(cases)}/64 tests collected ({64 - len(cases)} desel")


def test_a_case_asked_for_by_its_name_is_never_chosen_away(
    run: Run, pytester: pytest.Pytester
) -> None:
    """Cases beyond the pairwise choice run when they are named, and again with --lf."""
    file = Path("scenarios/a.yaml")
    file.write_text(scenario(**PAIRS))
    chosen = {case.id for case in prepare(Request(paths=(file,), device="cpu")).plan.cases}
    beyond = [c.id for c in expand(load_scenario(file), "cpu") if c.id not in chosen]
    assert len(beyond) > 10
    nodes = [f"{file}::{case}" for case in beyond]
    got = pytester.runpytest_inprocess(*PLUGIN, "--harness", "--co", "-q", *nodes)
    assert [line for line in got.outlines if "::" in line] == nodes
    both = pytester.runpytest_inprocess(*PLUGIN, "--harness", "--co", "-q", str(file), nodes[0])
    assert nodes[0] in both.outlines
    assert len(both.outlines) < len(beyond)
    failed = [node for node in nodes if "ulp" in node]
    pytester.runpytest_inprocess(*PLUGIN, "--harness", "--harness-out", "first", *failed)
    again = run("--harness", "--co", "-q", "--lf")
    assert [line for line in again.outlines if "::" in line] == failed
    first = [line for line in run("--harness", "--co", "-q", "--ff").outlines if "::" in line]
    assert first[: len(failed)] == failed
    assert len(first) < 64


def test_a_pairwise_scenario_without_a_case_left_is_nothing_selected(run: Run) -> None:
    """As `harness run -k` says: no case, exit code 5."""
    Path("scenarios/a.yaml").write_text(scenario(**PAIRS))
    assert run("--harness", "-k", "nowhere").ret == pytest.ExitCode.NO_TESTS_COLLECTED
    with pytest.raises(NothingSelected):
        prepare(Request(paths=(Path("scenarios/a.yaml"),), keyword="nowhere", device="cpu"))
