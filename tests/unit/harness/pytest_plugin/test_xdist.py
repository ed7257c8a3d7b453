"""With pytest-xdist one worker has all cases; what becomes of them when it is killed."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from harness.store import RunFolder, num_kept
from tests.unit.harness.pytest_plugin.test_plugin import CASES, FAULT, PLUGIN, SCENARIO

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[4]
CONFTEST = f"""
import os, signal
from pathlib import Path
import pytest
from harness.runner import launch
from tests.support.fake_engine import PlantingEngine

launch.make_engine = PlantingEngine

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    with open(f"of{{os.getpid()}}", "a") as file:
        file.write(f"{{item.name}}\\n")
    if item.name == "{CASES[2]}" and not Path("ended").exists():
        ended = Path("kept/runs").glob("*/outcome.json")
        Path("ended").write_text(" ".join(path.parent.name for path in ended))
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def session(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Four cases in two files and three tests, whose third case kills its worker, once."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest(CONFTEST)
    for name, plant in (("a", SCENARIO["axes"]["plant"][0]), ("b", SCENARIO["axes"]["plant"][1])):
        axes = SCENARIO["axes"] | {"plant": [plant]}
        changed = SCENARIO | {"name": name, "axes": axes}
        (pytester.path / f"{name}.yaml").write_text(json.dumps(changed))
    pytester.makepyfile("def test_0(): pass\ndef test_1(): pass\ndef test_2(): pass\n")
    return pytester


@pytest.mark.parametrize("dist", ["load", "loadfile"])
def test_one_worker_has_all_cases_and_another_goes_on_if_it_dies(
    session: pytest.Pytester, dist: str
) -> None:
    """Every case gets its verdict, in one run folder, and no run that had ended is made again."""
    got = session.runpytest_subprocess(
        *PLUGIN, "--harness", "--harness-out", "kept", "-n", "2", "--dist", dist, "a.yaml",
        "b.yaml", ".",
    )  # fmt: skip
    got.assert_outcomes(passed=5, failed=3)
    got.stdout.fnmatch_lines([f"*crashed while running 'b.yaml::{CASES[2]}'*"])
    got.stdout.fnmatch_lines([f"*repeat it:  harness rerun kept/cases/b.{CASES[2]}"])
    workers = [file.read_text().split() for file in session.path.glob("of*")]
    of_cases = [tuple(name for name in names if name in CASES) for names in workers]
    assert set(filter(None, of_cases)) == {tuple(CASES[:3]), tuple(CASES[2:])}
    assert Counter(itertools.chain(*workers))["test_1"] == 1
    folder = RunFolder.open(session.path / "kept")
    outcomes = [verdict.outcome for verdict in folder.verdicts()]
    assert outcomes == ["failed" if FAULT in case else "passed" for case in CASES]
    ended = (session.path / "ended").read_text().split()
    assert ended
    assert not any(num_kept(folder.run_folder(key)) for key in ended)


def test_a_distribution_that_gives_every_worker_all_cases_is_refused(
    session: pytest.Pytester,
) -> None:
    """One sentence, and nothing runs."""
    got = session.runpytest_subprocess(*PLUGIN, "--harness", "-n", "2", "--dist", "each", ".")
    assert got.ret == pytest.ExitCode.USAGE_ERROR
    got.stderr.fnmatch_lines(["ERROR: --dist each: expected another with --harness: *"])


def test_files_outside_of_the_root_are_cases_of_the_same_worker(
    session: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Their tests have names of their own, and no second worker takes the run folder."""
    away = tmp_path_factory.mktemp("away") / "b.yaml"
    (session.path / "b.yaml").rename(away)
    (session.path / "ended").touch()  # nobody is killed
    got = session.runpytest_subprocess(
        *PLUGIN, "--harness", "--harness-out", "kept", "-n", "2", "-v", "--rootdir", ".", "a.yaml",
        str(away),
    )  # fmt: skip
    got.stdout.fnmatch_lines([f"*FAILED {away}::{CASES[2]}*", f"*repeat it: *b.{CASES[2]}"])
    got.assert_outcomes(passed=2, failed=2)
