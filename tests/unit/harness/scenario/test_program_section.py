"""The key `program` of a scenario: what is refused, and what runs come of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ScenarioError
from harness.program.spec import command_line, program_of
from harness.records import CaseSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario

PROGRAM: dict[str, Any] = {"script": "train.py", "steps": 4, "args": {"lr": 0.1}}


def written(folder: Path, program: Any = None, **sections: Any) -> Path:
    """A scenario of one axis of a program; a section of None is left out."""
    plain: dict[str, Any] = {
        "name": "case", "why": "A sentence.", "program": program or PROGRAM,
        "axes": {"args.amp": [False, True]},
        "compare": {"axis": "args.amp", "reference": False, "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}},
    } | sections  # fmt: skip
    (folder / "train.py").touch()
    path = folder / "case.yaml"
    path.write_text(json.dumps({key: value for key, value in plain.items() if value is not None}))
    return path


def cases(path: Path, **overrides: Any) -> tuple[CaseSpec, ...]:
    return expand(load_scenario(path, overrides=Overrides(**overrides)), "cpu")


def with_(**keys: Any) -> dict[str, Any]:
    """`PROGRAM` with other keys; None leaves one out."""
    return {k: v for k, v in (PROGRAM | keys).items() if v is not None}


@pytest.mark.parametrize("word", ["on", "off", "yes", "no"])
def test_a_bare_word_that_yaml_takes_for_a_bool_is_refused(word: str, tmp_path: Path) -> None:
    """The message says what to write; in quotes it is a text."""
    path = written(tmp_path)
    text = path.read_text().replace('"lr": 0.1', f'"lr": {word}')
    path.write_text(text)
    with pytest.raises(ScenarioError) as raised:
        cases(path)
    assert raised.value.key == "program.args.lr"
    assert f'"{word}" in quotes' in raised.value.expected
    path.write_text(text.replace(f": {word}", f': "{word}"'))
    program = program_of(cases(path)[0].reference.config)
    assert program is not None
    assert program.args["lr"] == word


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"lr": 0.1}, ["--lr", "0.1"]),
        ({"amp": True, "graphs": False, "seed": None}, ["--amp"]),
        ({"sizes": [1, 2]}, ["--sizes", "1", "--sizes", "2"]),
        ({"-x": 3, "--y": True}, ["-x", "3", "--y"]),
        ({"out=": "a", "flag=": True}, ["out=a", "flag=true"]),
        ({"_": ["in.txt", 2], "a": "b"}, ["--a", "b", "in.txt", "2"]),
        ({"_": "in.txt"}, ["in.txt"]),
        ({"_": 0}, ["0"]),
        ({"name": "with space"}, ["--name", "with space"]),
    ],
)
def test_the_command_line(args: dict[str, Any], words: list[str]) -> None:
    """Options by name, then what stands alone."""
    assert command_line(args) == words


def test_a_case_is_a_pair_of_commands(tmp_path: Path) -> None:
    """Reference and candidate differ in the axis; paths are relative to the scenario's file."""
    program = with_(args={"lr": "1e-3", "v": 1}, env={"A": 1}, packages={"x": "0.10"}, ranks=2)
    (case,) = cases(written(tmp_path, program, axes={"args.amp": [False, True]}))
    reference, candidate = (program_of(each.config) for each in (case.reference, case.candidate))
    assert reference is not None
    assert candidate is not None
    assert (reference.target, reference.folder) == (str(tmp_path / "train.py"), str(tmp_path))
    assert reference.args == {"lr": "1e-3", "v": 1, "amp": False}
    assert candidate.args == {"lr": "1e-3", "v": 1, "amp": True}
    assert (reference.env, reference.packages) == ({"A": "1"}, {"x": "0.10"})
    assert (case.reference.world_size, case.reference.config["steps"]) == (2, 4)
    assert "args.amp" in case.labels
    assert "amp" in case.id


def test_a_script_may_say_itself_what_the_check_taps_compares(tmp_path: Path) -> None:
    """Only its records know whether it gives its recorder patterns."""
    (case,) = cases(written(tmp_path, checks={"loss": {}, "taps": {}}))
    assert case.checks["taps"] == {}


def test_a_mean_may_be_over_all_steps(tmp_path: Path) -> None:
    """The bound itself is allowed, with the steps of the case and not of the file."""
    expect = {"loss_gap": 0.1, "over": 5}
    compare = {"axis": "args.amp", "reference": False, "expect": expect}
    (case,) = cases(written(tmp_path, compare=compare), sets=("steps=5",))
    assert case.expect == expect


def test_numbers_and_texts_of_yaml(tmp_path: Path) -> None:
    """A bare 1e-3 is a number, 0.10 in packages keeps its zero, a quoted number stays a text."""
    path = written(tmp_path)
    path.write_text(
        """
name: case
why: A sentence.
program:
  script: train.py
  steps: 4
  args: {lr: 1e-3, rate: 0.10, word: "0.10"}
  packages: {x: 0.10}
  env: {N: 10.0, M: "010"}
axes: {args.amp: [false, true]}
compare: {axis: args.amp, reference: false, expect: bitwise}
checks: {state: {}}
"""
    )
    program = program_of(cases(path)[0].reference.config)
    assert program is not None
    assert program.args == {"lr": 0.001, "rate": 0.1, "word": "0.10", "amp": False}
    assert program.packages == {"x": "0.10"}
    assert program.env == {"N": "10.0", "M": "010"}


def test_options_replace_settings_and_axes(tmp_path: Path) -> None:
    """`--set args.lr=0.2` and `--axis args.n=[1,2]` reach the program."""
    path = written(tmp_path)
    (case,) = cases(path, sets=("args.lr=0.2", "steps=7"))
    program = program_of(case.candidate.config)
    assert program is not None
    assert (program.args["lr"], case.candidate.config["steps"]) == (0.2, 7)
    many = cases(path, axes=("args.n=[1, 2]",))
    found = [program_of(each.reference.config) for each in many]
    assert [each.args["n"] for each in found if each is not None] == [1, 2]


def test_axes_of_variables_packages_and_more(tmp_path: Path) -> None:
    """Variables, versions, ranks and determinism may be axes; include and exclude choose cases."""
    axes = {"args.amp": [False, True], "env.ALGO": ["Ring", "Tree"], "ranks": [1, 2]}
    sections: dict[str, Any] = {
        "axes": axes,
        "exclude": [{"env.ALGO": "Tree", "ranks": 2}],
        "include": [{"args.amp": True, "env.ALGO": "Ring", "ranks": 1, "args.seed": 3}],
    }
    found = cases(written(tmp_path, **sections))
    seen = []
    for case in found:
        program = program_of(case.candidate.config)
        assert program is not None
        seen.append((program.env["ALGO"], case.candidate.world_size, program.args.get("seed")))
    assert seen == [("Ring", 1, 3), ("Ring", 2, None), ("Tree", 1, None)]
    assert len({case.id for case in found}) == 3


def test_ids_that_read_alike_get_a_hash(tmp_path: Path) -> None:
    """Dashes in values may make two ids the same: both are told apart by what they hold."""
    axes = {"args.a": ["1-b_2", "1"], "args.b": ["3", "2-b_3"], "args.z": [False, True]}
    compare = {"axis": "args.z", "reference": False, "expect": "bitwise"}
    found = [case.id for case in cases(written(tmp_path, axes=axes, compare=compare))]
    alike = [name for name in found if name.startswith("a_1-b_2-b_3-")]
    assert len(set(found)) == 4
    assert len({len(name) for name in alike} | {len(alike)}) == 2, found
