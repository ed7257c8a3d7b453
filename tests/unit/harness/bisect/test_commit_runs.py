"""Contracts of harness.bisect.commit_runs: what a run at a commit says, and whose code it is."""

import dataclasses
import fcntl
import json
import os
import shutil
import sys
import types
from pathlib import Path

import pytest

from harness.bisect.commit_runs import (
    SHUT_OUT,
    case_run,
    python_environment,
)
from harness.bisect.commits import Checkout, Run
from harness.codec import dumps
from harness.errors import Infrastructure, Interrupted
from harness.records import CaseSpec, Ending, Outcome, RunSpec, Verdict, What
from harness.store.files import read_object, with_checksum

CLI = """\
import json, sys
def main():
    assert sys.argv[1] == "rerun" and "--json" in sys.argv and "--no-history" in sys.argv
    print(json.dumps({"verdicts": [%(verdict)s]}))
    sys.exit(%(code)s)
"""

CONFIG = """\
class TrainConfig:
    def to_dict(self):
        return {"steps": 20}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are made where we are."""
    monkeypatch.chdir(tmp_path)


def checkout(folder: Path) -> Checkout:
    """The folder as the worktree of a commit."""
    place = folder / "worktree"
    place.mkdir(exist_ok=True)
    return Checkout(folder=place, repository=folder / "repository", commit="c" * 40, attempt=2)


def verdict(outcome: Outcome, what: What = "") -> Verdict:
    return Verdict(
        case_id="x", outcome=outcome, what=what, message="why", checks=(), runs={}, wall_s=1.0
    )


def test_modules_are_the_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worktree comes first; what lies in the user's checkout does not come at all."""
    mine = checkout(tmp_path)
    path = os.pathsep.join([str(mine.repository), str(mine.repository / "src"), "/elsewhere", ""])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("GIT_DIR", "/of/a/hook")
    env = python_environment(mine)
    first, *rest = env["PYTHONPATH"].split(os.pathsep)
    assert rest == [str(mine.folder), "/elsewhere"]
    assert [path.name for path in Path(first).iterdir()] == ["sitecustomize.py"]
    assert "GIT_DIR" not in env


def test_an_editable_installation_lends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that a commit lacks is missing; what else is installed so is there, and what the
    user does at the start of Python is done."""
    finder = types.ModuleType("__editable___finder")
    vars(finder)["MAPPING"] = {"harness": "/installed", "theirs": "/installed"}
    vars(finder)["Finder"] = type("Finder", (), {"__module__": finder.__name__})
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder.Finder])
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import sys\nsys.flag_of_mine = True\n")
    monkeypatch.setattr(sys, "flag_of_mine", False, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(mine)])
    exec(SHUT_OUT, {"__file__": str(tmp_path / "sitecustomize.py")})
    assert finder.MAPPING == {"theirs": "/installed"}
    assert getattr(sys, "flag_of_mine")  # noqa: B009 - made up


def install(folder: Path, told: Verdict | None, code: int) -> Checkout:
    """A commit whose harness gives this answer."""
    made = checkout(folder)
    package = made.folder / "harness"
    for each in (package, made.folder / "fsdp_core"):
        each.mkdir()
        (each / "__init__.py").write_text("")
    shown = json.dumps(told.to_json()) if told is not None else ""
    (package / "__main__.py").write_text("from harness.cli import main\nmain()\n")
    text = CLI % {"verdict": shown.replace("null", "None"), "code": code}
    (package / "cli.py").write_text(text)
    return made


def stored(folder: Path) -> Path:
    """A case folder, of a case of one rank."""
    leg = RunSpec(config={}, device="cpu", world_size=1, timeout_s=1)
    case = CaseSpec(
        id="x", scenario="s", labels={}, reference=leg, control=leg, candidate=leg,
        expect="bitwise", checks={},
    )  # fmt: skip
    place = folder / "case"
    place.mkdir(exist_ok=True)
    (place / "case.json").write_text(dumps(with_checksum(case)))
    return place


def run_of(folder: Path, wanted: Verdict | None = None, room: tuple[str, ...] = ()) -> Run:
    """Runs the stored case, which has diverged."""
    wanted = wanted or verdict("failed", "diverged")
    return case_run(stored(folder), wanted, folder / "runs", room)


@pytest.mark.parametrize(
    ("told", "code", "answer", "words"),
    [
        (verdict("passed"), 0, "passes", "passed"),
        (verdict("failed", "diverged"), 1, "fails", "failed diverged"),
        (verdict("failed", "crashed"), 1, "unresolved", "no verdict: failed crashed"),
        (verdict("error", "diverged"), 6, "unresolved", "no verdict: error diverged"),
        (verdict("failed", "diverged"), 6, "unresolved", "no verdict: failed diverged"),
        (verdict("passed"), 6, "unresolved", "no verdict: passed"),
        (None, 1, "unresolved", "no verdict: exit code 1"),
    ],
)
def test_a_case_fails_as_it_did_or_says_nothing(
    tmp_path: Path, told: Verdict | None, code: int, answer: str, words: str
) -> None:
    """Another failure is not the one that is searched for, and no verdict is no pass."""
    reply = run_of(tmp_path)(install(tmp_path, told, code))
    assert reply.answer == answer
    assert reply.words.startswith(words)


def test_a_nondeterministic_reference_can_be_searched_for(tmp_path: Path) -> None:
    """It has an exit code of its own; a case that can be compared again has passed."""
    wanted = verdict("incomparable", "nondeterministic_reference")
    made = install(tmp_path, wanted, 6)
    assert run_of(tmp_path, wanted)(made).answer == "fails"


@pytest.mark.parametrize(
    ("ending", "answer"),
    [
        (Ending(exception="RuntimeError", raised_at="unit.py:9 gather"), "fails"),
        (Ending(exception="ImportError"), "unresolved"),
        (Ending(signal="SIGSEGV"), "unresolved"),
        (Ending(), "unresolved"),
        (None, "unresolved"),
    ],
)
def test_a_crash_is_the_same_by_what_ended_it(
    tmp_path: Path, ending: Ending | None, answer: str
) -> None:
    """Old code crashes for reasons of its own, which are not what is searched for."""
    wanted = dataclasses.replace(
        verdict("failed", "crashed"), message="ValueError, SIGBUS",
        ending=Ending(exception="RuntimeError"),
    )  # fmt: skip
    made = install(tmp_path, dataclasses.replace(wanted, ending=ending), 1)
    assert run_of(tmp_path, wanted)(made).answer == answer


def test_a_crash_of_an_older_verdict_is_any_crash(tmp_path: Path) -> None:
    """Nobody wrote down what ended it."""
    wanted = verdict("failed", "crashed")
    made = install(tmp_path, dataclasses.replace(wanted, ending=Ending(signal="SIGBUS")), 1)
    assert run_of(tmp_path, wanted)(made).answer == "fails"


def test_a_commit_that_does_not_import_says_nothing(tmp_path: Path) -> None:
    """Python's own exit code for it is 1, which must not be taken for a failure."""
    made = install(tmp_path, verdict("failed", "diverged"), 1)
    (made.folder / "harness" / "cli.py").write_text("def broken(:\n")
    reply = run_of(tmp_path)(made)
    assert reply.answer == "unresolved"
    assert reply.words == "does not build: SyntaxError: invalid syntax"


@pytest.fixture
def another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of another place on the path."""
    (tmp_path / "another").mkdir()
    made = install(tmp_path / "another", verdict("failed", "diverged"), 1)
    monkeypatch.setenv("PYTHONPATH", str(made.folder))


@pytest.mark.usefixtures("another")
def test_a_harness_of_elsewhere_is_refused(tmp_path: Path) -> None:
    """If the commit has none, that of the environment must not answer for it."""
    with pytest.raises(Infrastructure, match=r"expected harness of .*worktree, got"):
        run_of(tmp_path)(checkout(tmp_path))


@pytest.mark.usefixtures("another")
def test_a_trainer_of_elsewhere_says_nothing(tmp_path: Path) -> None:
    """A commit that has none would be answered for by what is installed."""
    made = install(tmp_path, verdict("failed", "diverged"), 1)
    shutil.rmtree(made.folder / "fsdp_core")
    reply = run_of(tmp_path)(made)
    assert reply.answer == "unresolved"
    assert reply.words.startswith("no verdict: it would run ")


def test_what_the_commit_does_not_know_is_told(tmp_path: Path) -> None:
    """A setting that is not at its default is no verdict, and what is left out is noted."""
    made = install(tmp_path, verdict("failed", "diverged"), 1)
    (made.folder / "fsdp_core" / "config.py").write_text(CONFIG)
    place = stored(tmp_path)
    run = case_run(place, verdict("failed", "diverged"), tmp_path / "runs")
    for seed, answer, words, detail in (
        (1234, "fails", "failed diverged", {"left_out": ["seed"]}),
        (7, "unresolved", "no verdict: it does not know seed = 7", {}),
    ):
        plain = read_object(place / "case.json")
        for leg in ("reference", "control", "candidate"):
            plain[leg]["config"] = {"steps": 4, "seed": seed}
        (place / "case.json").write_text(dumps(with_checksum(plain)))
        reply = run(made)
        assert (reply.answer, reply.words, reply.detail) == (answer, words, detail)


def test_room_is_passed_on(tmp_path: Path) -> None:
    """As the user gave it."""
    made = install(tmp_path, verdict("passed"), 0)
    cli = made.folder / "harness" / "cli.py"
    said = "def main():\n    open('argv', 'w').write(' '.join(sys.argv))\n"
    cli.write_text(cli.read_text().replace("def main():\n", said))
    room = ("--slots", "4", "--ranks-per-gpu", "2")
    assert run_of(tmp_path, room=room)(made).answer == "passes"
    assert Path("argv").read_text().endswith("--json --no-history --slots 4 --ranks-per-gpu 2")


@pytest.mark.timeout(60)
def test_whatever_a_run_has_started_ends_with_it(tmp_path: Path) -> None:
    """Its child holds a lock that it would keep for ever."""
    held, made = tmp_path / "held", install(tmp_path, verdict("passed"), 0)
    cli = made.folder / "harness" / "cli.py"
    locks = (
        f"def main():\n    import fcntl, os, signal; file = open({str(held)!r}, 'w')\n"
        "    fcntl.flock(file, fcntl.LOCK_EX); os.fork() or signal.pause()\n"
    )
    cli.write_text(cli.read_text().replace("def main():\n", locks))
    assert run_of(tmp_path)(made).answer == "passes"
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_modules_of_where_we_are_do_not_count(tmp_path: Path) -> None:
    """Runs are made in the user's checkout, for paths of the case; its packages stay out."""
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    assert run_of(tmp_path)(install(tmp_path, verdict("passed"), 0)).answer == "passes"


def test_an_interrupted_run_is_no_answer(tmp_path: Path) -> None:
    """Exit code 2 of the harness ends the search, which asks again when it goes on."""
    made = install(tmp_path, verdict("passed"), 2)
    with pytest.raises(Interrupted):
        run_of(tmp_path)(made)
