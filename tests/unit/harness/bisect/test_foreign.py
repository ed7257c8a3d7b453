"""What bisect does for somebody's program, as far as no run is needed."""

from pathlib import Path
from typing import Any

import pytest

from harness.bisect.commits import Checkout, at_commit
from harness.bisect.differences import RunChanges
from harness.bisect.repro import read_back, scenarios
from harness.program.spec import codes_of
from harness.records import RunSpec
from tests.unit.harness.bisect.made_up_asker import case_of


def spec_of(folder: Path, **parts: Any) -> RunSpec:
    """A run of `train.py` in a folder; `stress` is a part of its configuration."""
    stress = {"stress": parts.pop("stress")} if "stress" in parts else {}
    program = {
        "kind": "script", "target": str(folder / "train.py"), "folder": str(folder),
        "args": {}, "env": {}, "packages": {}, "record": "auto", "determinism": "", "every": 1,
        "smaller": {"steps": "args.steps"}, **parts,
    }  # fmt: skip
    config = {"program": program, "steps": 6, "taps": [], **stress}
    return RunSpec(config=config, device="cpu", world_size=2, timeout_s=60.0)


def same_runs(reference: RunSpec, candidate: RunSpec, folder: Path) -> None:
    """The scenario of two runs, read back, makes runs of equal keys: they are not made again."""
    case = case_of(reference, candidate)
    for text in scenarios(case, reference, candidate, story="w", folder=folder):
        found = read_back(text, "cpu", folder)
        assert (found.reference.key, found.candidate.key) == (reference.key, candidate.key)


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize(
    "setting", [{"stress": ["poison"]}, {"determinism": "enforce"}, {"every": 2}], ids=str
)
def test_settings_of_one_run_alone_come_and_go(tmp_path: Path, whose: int, setting: Any) -> None:
    """Taken away they are not there, as in a run whose scenario says nothing; so in a scenario."""
    (tmp_path / "train.py").write_text("")
    specs = [spec_of(tmp_path, **(setting if number == whose else {})) for number in (0, 1)]
    legs = RunChanges(*specs)
    assert [legs.run_with(names).key for names in ((), legs.names)] == [s.key for s in specs]
    same_runs(specs[0], specs[1], tmp_path)


def test_the_scenario_is_the_same_two_runs(tmp_path: Path) -> None:
    """Also from another folder, and where a text looks like a number."""
    (tmp_path / "train.py").write_text("")
    parts: dict[str, Any] = {"env": {"B": "2"}, "packages": {"toy": "1.10"}}
    args = {"steps": 8, "model.dim": 8, "new": True, "word": "yes", "rate": "1e-3"}
    reference = spec_of(tmp_path, args=args, **parts)
    candidate = spec_of(tmp_path, args=args | {"old": "1e-3"}, **parts)
    same_runs(reference, candidate, tmp_path / "scenarios" / "repro")


def test_other_code_is_another_program(tmp_path: Path) -> None:
    """Answers of a search do not hold for a script that was edited."""
    script, config = tmp_path / "train.py", spec_of(tmp_path).config
    script.write_text("a = 1")
    before = codes_of([config])
    assert codes_of([config]) == before
    script.write_text("a = 2")
    assert codes_of([config]) != before


def test_arguments_that_name_files_of_the_repository_are_those_of_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, and folders with a slash, that the commit has; words and data of the user's stay."""
    top, there = tmp_path / "top", tmp_path / "there"
    for folder in (top, there):
        (folder / "configs" / "sub").mkdir(parents=True)
        for name in ("train.py", "configs/small.yaml", "plain.txt"):
            (folder / name).write_text(folder.name)
    (top / "data.bin").write_text("ignored by git")
    (tmp_path / "outside.yaml").write_text("not of the repository")
    monkeypatch.chdir(top / "configs")
    args = {
        "config": "small.yaml", "up": "../plain.txt", "all": ["sub/", "word", 3],
        "data": "../data.bin", "mode": "sub", "absolute": str(top / "plain.txt"),
        "outside": "../../outside.yaml", "lr": 0.1,
    }  # fmt: skip
    run = at_commit(spec_of(top, args=args), Checkout(there, top, "c" * 40, 0), top)
    assert run.config["program"]["target"] == str(there / "train.py")
    assert run.config["program"]["args"] == args | {
        "config": str(there / "configs" / "small.yaml"), "up": str(there / "plain.txt"),
        "all": [str(there / "configs" / "sub"), "word", 3], "absolute": str(there / "plain.txt"),
    }  # fmt: skip
