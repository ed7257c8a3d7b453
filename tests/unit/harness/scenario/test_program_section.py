"""The key `program` of a scenario: what runs come of it. `malformed/program_*` has refusals."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ScenarioError
from harness.program.spec import ProgramSpec, command_line, program_of
from harness.records import CaseSpec, RunSpec
from harness.scenario.matrix import expand
from harness.scenario.schema import Overrides, load_scenario

PROGRAM: dict[str, Any] = {"script": "train.py", "steps": 4, "args": {"lr": 0.1}}


def written(folder: Path, program: Any = None, **sections: Any) -> Path:
    """A scenario of one axis of a program, with other keys than `PROGRAM` and other sections."""
    plain: dict[str, Any] = {
        "name": "case", "why": "A sentence.", "program": PROGRAM | (program or {}),
        "axes": {"args.amp": [False, True]},
        "compare": {"axis": "args.amp", "reference": False, "expect": "bitwise"},
        "checks": {"loss": {}, "state": {}},
    } | sections  # fmt: skip
    (folder / "train.py").touch()
    path = folder / "case.yaml"
    path.write_text(json.dumps(plain))
    return path


def cases(path: Path, **overrides: Any) -> tuple[CaseSpec, ...]:
    return expand(load_scenario(path, overrides=Overrides(**overrides)), "cpu")


def of(run: RunSpec) -> ProgramSpec:
    """The program of a run."""
    program = program_of(run.config)
    assert program is not None
    return program


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
    assert of(cases(path)[0].reference).args["lr"] == word


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
    keys = {"args": {"lr": "1e-3", "v": 1}, "env": {"A": 1}, "packages": {"x": "0.10"}, "ranks": 2}
    (case,) = cases(written(tmp_path, keys))
    reference, candidate = of(case.reference), of(case.candidate)
    assert (reference.target, reference.folder) == (str(tmp_path / "train.py"), str(tmp_path))
    assert reference.args == {"lr": "1e-3", "v": 1, "amp": False}
    assert candidate.args == reference.args | {"amp": True}
    assert (reference.env, reference.packages) == ({"A": "1"}, {"x": "0.10"})
    assert (case.reference.world_size, case.reference.config["steps"]) == (2, 4)
    assert (case.id, case.labels) == ("amp", {"args.amp": "true"})


def test_what_a_script_says_itself_is_no_mistake_here(tmp_path: Path) -> None:
    """Taps of its own recorder; a mean over all steps, those of the case and not of the file."""
    (case,) = cases(written(tmp_path, checks={"loss": {}, "taps": {}}))
    assert case.checks["taps"] == {}
    expect = {"loss_gap": 0.1, "over": 5}
    compare = {"axis": "args.amp", "reference": False, "expect": expect}
    (case,) = cases(written(tmp_path, compare=compare), sets=("steps=5",))
    assert case.expect == expect


def test_numbers_and_texts_of_yaml(tmp_path: Path) -> None:
    """A bare 1e-3 is a number, 0.10 in packages keeps its zero, a quoted number stays a text."""
    path = written(tmp_path)
    bare = '{"script": "train.py", "steps": 4, args: {lr: 1e-3, rate: 0.10, word: "0.10"}, '
    bare += 'packages: {x: 0.10}, env: {N: 10.0, M: "010"}}'
    path.write_text(path.read_text().replace(json.dumps(PROGRAM), bare))
    program = of(cases(path)[0].reference)
    assert program.args == {"lr": 0.001, "rate": 0.1, "word": "0.10", "amp": False}
    assert (program.packages, program.env) == ({"x": "0.10"}, {"N": "10.0", "M": "010"})


def test_options_replace_settings_and_axes(tmp_path: Path) -> None:
    """`--set args.lr=0.2` and `--axis args.n=[1,2]` reach the program."""
    path = written(tmp_path)
    (case,) = cases(path, sets=("args.lr=0.2", "steps=7"))
    assert (of(case.candidate).args["lr"], case.candidate.config["steps"]) == (0.2, 7)
    many = cases(path, axes=("args.n=[1, 2]",))
    assert [of(each.reference).args["n"] for each in many] == [1, 2]


def test_axes_of_variables_packages_and_more(tmp_path: Path) -> None:
    """Variables, versions, ranks and determinism may be axes; include and exclude choose cases."""
    sections: dict[str, Any] = {
        "axes": {"args.amp": [False, True], "env.ALGO": ["Ring", "Tree"], "ranks": [1, 2]},
        "exclude": [{"env.ALGO": "Tree", "ranks": 2}],
        "include": [{"args.amp": True, "env.ALGO": "Ring", "ranks": 1, "args.seed": 3}],
    }
    found = cases(written(tmp_path, **sections))
    runs = [case.candidate for case in found]
    seen = [(of(run).env["ALGO"], run.world_size, of(run).args.get("seed")) for run in runs]
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
