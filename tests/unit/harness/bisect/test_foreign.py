"""What bisect does for somebody's program, as far as no run is needed."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from harness.bisect.aligned import Legs
from harness.bisect.commits import Checkout, at_commit
from harness.bisect.differences import LegChanges, config_of, leaves_of, with_steps
from harness.bisect.divergence import where_they_part
from harness.bisect.repro import read_back, scenario_texts
from harness.program.spec import codes_of
from harness.records import (
    CaseSpec,
    InitialRecord,
    RankRecords,
    RunOutcome,
    RunResult,
    RunSpec,
    StartRecord,
    StepRecord,
)


def spec_of(folder: Path, *, ranks: int = 2, **parts: dict[str, Any]) -> RunSpec:
    """A run of `train.py` in a folder."""
    program = {
        "kind": "script", "target": str(folder / "train.py"), "folder": str(folder),
        "args": {}, "env": {}, "packages": {}, "record": "auto", "determinism": "", "every": 1,
        "smaller": {"steps": "args.steps"}, **parts,
    }  # fmt: skip
    config = copy.deepcopy({"program": program, "steps": 6, "taps": []})
    return RunSpec(config=config, device="cpu", world_size=ranks, timeout_s=60.0)


PLAIN: dict[str, Any] = {"args": {"steps": 8, "model.dim": 4, "old": "1e-3"}, "env": {"A": "1"}}
OTHER: dict[str, Any] = {
    "args": {"steps": 8, "model.dim": 8, "new": True}, "env": {"B": "2"},
    "packages": {"toy": "1.10"}, "determinism": "enforce",
}  # fmt: skip


def test_options_are_leaves_and_come_back(tmp_path: Path) -> None:
    """A name may have dots, and what is None is not there."""
    config = spec_of(tmp_path, **OTHER).config
    leaves = leaves_of(config)
    assert leaves["args.model.dim"] == 8
    assert leaves["packages.toy"] == "1.10"
    assert config_of(leaves) == config
    assert "new" not in config_of(leaves | {"args.new": None})["program"]["args"]


def test_each_difference_is_a_change_and_all_of_them_are_the_candidate(tmp_path: Path) -> None:
    """Options that one run alone has are changes, too, and go one at a time."""
    legs = LegChanges(spec_of(tmp_path, **PLAIN), spec_of(tmp_path, **OTHER))
    assert {change.leaf for change in legs.changes} == {
        "args.model.dim", "args.new", "args.old", "env.A", "env.B", "packages.toy", "determinism",
    }  # fmt: skip
    assert legs.run_with(legs.names).key == legs.candidate.key
    assert legs.run_with(()).key == legs.reference.key
    one = next(change for change in legs.changes if change.leaf == "args.old")
    program = legs.run_with([one.name]).config["program"]
    assert program["args"] == {"steps": 8, "model.dim": 4}
    assert program["env"] == {"A": "1"}
    assert not legs.why_illegal([one.name])


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("name", ["stress", "determinism", "every"])
def test_settings_of_one_run_alone_come_and_go(tmp_path: Path, whose: int, name: str) -> None:
    """Taken away they are not there, as in a run whose scenario says nothing; so in a scenario."""
    (tmp_path / "train.py").write_text("")
    specs = [spec_of(tmp_path), spec_of(tmp_path)]
    config = specs[whose].config
    holder = config if name == "stress" else config["program"]
    holder[name] = {"stress": ["poison"], "determinism": "enforce", "every": 2}[name]
    legs = LegChanges(*specs)
    assert [legs.run_with(names).key for names in ((), legs.names)] == [s.key for s in specs]
    (text,) = scenario_texts(case_of(*specs), *specs, name="n", why="w", folder=tmp_path)
    found = read_back(text, "cpu", tmp_path)
    assert [found.reference.key, found.candidate.key] == [spec.key for spec in specs]


def test_steps_change_with_the_option_that_states_them(tmp_path: Path) -> None:
    """By as many; a program that declares no such option keeps its steps."""
    spec = with_steps(spec_of(tmp_path, **PLAIN), 4)
    assert (spec.config["steps"], spec.config["program"]["args"]["steps"]) == (4, 6)
    fixed = spec_of(tmp_path, **PLAIN, smaller={})
    assert with_steps(fixed, 4) == fixed


def test_the_scenario_is_the_same_two_runs(tmp_path: Path) -> None:
    """Read back from another folder, it makes runs of equal keys, so they are not made again."""
    (tmp_path / "train.py").write_text("")
    reference, candidate = spec_of(tmp_path, **OTHER), spec_of(tmp_path, **OTHER)
    candidate.config["program"]["args"]["old"] = "1e-3"
    case = case_of(reference, candidate)
    folder = tmp_path / "scenarios" / "repro"
    (text,) = scenario_texts(case, reference, candidate, name="n", why="w", folder=folder)
    found = read_back(text, "cpu", folder)
    assert (found.reference.key, found.candidate.key) == (reference.key, candidate.key)


def case_of(reference: RunSpec, candidate: RunSpec) -> CaseSpec:
    """A case of two runs."""
    return CaseSpec(
        id="c", scenario="s", labels={}, reference=reference, candidate=candidate,
        control=dataclasses.replace(reference, replica=1), expect="bitwise",
        checks={"loss": {}, "state": {}},
    )  # fmt: skip


def test_other_code_is_another_program(tmp_path: Path) -> None:
    """Answers of a search do not hold for a script that was edited."""
    script, config = tmp_path / "train.py", spec_of(tmp_path).config
    script.write_text("a = 1")
    before = codes_of([config])
    assert codes_of([config]) == before
    script.write_text("a = 2")
    assert codes_of([config]) != before


# --- places


NAMES: dict[str, tuple[str, ...]] = {
    "grads": ("w",), "weights": ("w", "b"), "optim": (), "rng": ("cpu",), "ema": ("w",),
}  # fmt: skip


def run_of(
    folder: Path,
    *,
    initial: dict[str, str] | None = None,
    step: dict[str, str] | None = None,
    names: dict[str, tuple[str, ...]] = NAMES,
) -> RunResult:
    """Two ranks and two steps, with other digests before step 0, or in step 1 on rank 1."""
    plain = {group: "a" * 32 * len(held) for group, held in names.items()}
    ranks = []
    for rank in range(2):
        start = StartRecord(
            schema=1, rank=rank, world_size=2, pid=1, device="cpu", tensors=names, environment={}
        )
        steps = tuple(
            StepRecord(
                step=number, rank=rank, loss=None, microbatch_losses=(), grad_norm=None,
                digests=plain | (step or {} if (number, rank) == (1, 1) else {}), nonfinite={},
                step_s=0.1, live_bytes=0, peak_bytes=0,
            )
            for number in range(2)
        )  # fmt: skip
        first = InitialRecord(rank=rank, digests=plain | (initial or {}), nonfinite={})
        ranks.append(
            RankRecords(
                rank=rank,
                start=start,
                steps=steps,
                initial=first,
                events=(),
                error=None,
                end=None,
                problems=(),
            )
        )
    spec = spec_of(folder)
    outcome = RunOutcome(
        key=spec.key, what="", message="", culprit_rank=None, ranks=(), started_unix_s=0.0,
        wall_s=1.0,
    )  # fmt: skip
    return RunResult(spec=spec, outcome=outcome, ranks=tuple(ranks))


B, A = "b" * 32, "a" * 32


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"initial": {"weights": A + B}}, ("initialisation", -1, "weights", "b", (0, 1))),
        ({"initial": {"rng": B, "ema": B}}, ("initialisation", -1, "ema", "w", (0, 1))),
        ({"step": {"grads": B}}, ("backward", 1, "grads", "w", (1,))),
        ({"step": {"ema": B}}, ("state", 1, "ema", "w", (1,))),
        ({"step": {"weights": B + A}}, ("optimizer", 1, "weights", "w", (1,))),
    ],
)
def test_the_first_difference_has_a_phase_and_a_name(
    tmp_path: Path, change: dict[str, dict[str, str]], expected: tuple[object, ...]
) -> None:
    """State before step 0 comes first; groups of the program's own last."""
    found = where_they_part(Legs(run_of(tmp_path), run_of(tmp_path, **change)))  # type: ignore[arg-type] # by name
    assert found is not None
    assert (found.phase, found.step, found.quantity, found.tensor, found.ranks) == expected
    assert found.collective == ""
    assert str(found).startswith("before step 0" if found.step == -1 else "step 1")


def test_a_tensor_of_one_run_alone_is_named(tmp_path: Path) -> None:
    """Runs that hold other tensors are compared by name, not given up."""
    more = {**NAMES, "weights": ("w", "extra", "b")}
    found = where_they_part(Legs(run_of(tmp_path), run_of(tmp_path, names=more)))
    assert found is not None
    assert (found.phase, found.tensor, found.quantity) == ("initialisation", "extra", "weights")
    assert "one run alone" in found.evidence[-1]
    assert where_they_part(Legs(run_of(tmp_path), run_of(tmp_path))) is None


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
    checkout = Checkout(folder=there, repository=top, commit="c" * 40, attempt=0)
    run = at_commit(spec_of(top, args=args), checkout, top)
    assert run.config["program"]["target"] == str(there / "train.py")
    assert run.config["program"]["args"] == args | {
        "config": str(there / "configs" / "small.yaml"),
        "up": str(there / "plain.txt"),
        "all": [str(there / "configs" / "sub"), "word", 3],
        "absolute": str(there / "plain.txt"),
    }
