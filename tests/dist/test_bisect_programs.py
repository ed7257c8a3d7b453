"""`harness bisect` of a training script of two ranks: place, cause, scenario, commit, release."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.harness.program.test_packages import make_wheel

TRAIN = """
import argparse, torch, torch.distributed as dist
{imports}
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
for name in ("planted", "foreach", "initial"):
    parser.add_argument("--" + name, action="store_true")
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(int(options.initial))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=options.foreach)
for step in range(options.steps):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    x = x * (1 + ({fault}) * (step == 1) * (dist.get_rank() == 1) / 2**18)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
PLANTED = TRAIN.format(imports="", fault="options.planted")


def scenario(folder: Path, axis: str, values: list[Any], **program: Any) -> Path:
    """A scenario beside `train.py`; its first value is the reference's."""
    plain = {
        "name": "toy", "why": "A toy.",
        "program": {"script": "train.py", "ranks": 2, "steps": 3, **program},
        "axes": {axis: values}, "compare": {"axis": axis, "reference": values[0],
        "expect": "bitwise"}, "checks": {"loss": {}, "state": {}, "finite": {}},
        "launch": {"device": "cpu", "timeout_s": 240},
    }  # fmt: skip
    path = folder / "toy.yaml"
    path.write_text(json.dumps(plain))
    return path


def harness(folder: Path, *words: object) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "harness", *map(str, words)], cwd=folder, capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def bisected(folder: Path, path: Path, *words: object) -> dict[str, Any]:
    code, answer, said = harness(folder, "bisect", path, "--json", *words)
    assert code == 1, said
    found: dict[str, Any] = json.loads(answer)
    return found


def test_one_of_three_options_is_named_and_the_scenario_fails(tmp_path: Path) -> None:
    """Step, microbatch, rank and element; the cause alone; a scenario that fails."""
    (tmp_path / "train.py").write_text(PLANTED)
    values = [{}, {"planted": True, "foreach": True, "steps": 3}]
    smaller = {"steps": "args.steps"}
    path = scenario(tmp_path, "args", values, steps=3, smaller=smaller)
    found = bisected(tmp_path, path, "--repro", tmp_path / "repro")
    place, (cause,), least = found["place"], found["causes"]["causes"], found["least_case"]
    assert (place["step"], place["phase"], place["ranks"]) == (1, "input", [1])
    assert place["element"]["num_different"] == 12
    assert cause["changes"] == ["args.planted: none -> true"]
    assert least["ranks"] == 2
    code, _, said = harness(tmp_path, "run", least["path"], "--no-history")
    assert code == 1, said


def test_a_difference_before_step_0_is_one_of_initialisation(tmp_path: Path) -> None:
    """No module is looked into, and what cannot be found out is not asked."""
    (tmp_path / "train.py").write_text(PLANTED)
    path = scenario(tmp_path, "args.initial", [False, True], ranks=1)
    found = bisected(tmp_path, path, "--until", "place")
    place = found["place"]
    assert (place["step"], place["phase"], place["tensor"]) == (-1, "initialisation", "weight")
    assert len(found["questions"]) == 1


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_the_first_bad_commit_of_the_programs_repository(tmp_path: Path) -> None:
    """Of six commits; a range that is not in it, or no repository, is the user's mistake."""
    (tmp_path / "train.py").write_text(TRAIN.format(imports="import data", fault="data.fault"))
    path = scenario(tmp_path, "args.planted", [False, True])
    told = harness(tmp_path, "bisect", path, "--commits", "HEAD~1..HEAD")
    assert (told[0], "not a git repository" in told[2]) == (4, True)
    git(tmp_path, "init", "-q")
    for number in range(6):
        fault = "'--planted' in sys.argv" if number >= 3 else "False"
        (tmp_path / "data.py").write_text(f"import sys\nnumber, fault = {number}, {fault}\n")
        git(tmp_path, "add", "train.py", "data.py")
        git(tmp_path, "commit", "-qm", f"commit {number}")
    told = harness(tmp_path, "bisect", path, "--commits", "HEAD~9..HEAD")
    assert (told[0], "expected a commit of" in told[2]) == (4, True)
    found = bisected(
        tmp_path, path, "--until", "place", "--no-element", "--commits", "HEAD~5..HEAD",
        "--every-run",
    )  # fmt: skip
    assert found["commits"]["first"]["subject"] == "commit 3"


def test_the_first_bad_release_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By halving, with the reference as it was."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    index = tmp_path / "index"
    for version in ("1.0", "1.1", "1.2", "1.10", "2.0"):
        make_wheel(index, "tinytoy", version)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("DELTAZERO_CACHE", str(tmp_path / "cache"))
    fault = "tinytoy.VERSION in ('1.10', '2.0')"
    (tmp_path / "train.py").write_text(TRAIN.format(imports="import tinytoy", fault=fault))
    path = scenario(tmp_path, "packages.tinytoy", ["1.0", "2.0"])
    found = bisected(
        tmp_path, path, "--until", "place", "--no-element", "--package", "tinytoy", "1.0..2.0",
        "--every-run",
    )  # fmt: skip
    assert (found["release"]["first"]["hash"], found["release"]["num_commits"]) == ("1.10", 4)
