"""The first bad commit and release, by halving, and what a run at a commit says."""

import fcntl
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.bisect import commits
from harness.bisect.commits import (
    Checkout,
    CommitSearch,
    Run,
    at_commit,
    case_run,
    commits_of,
    find_release,
    find_turn,
    releases_of,
    turning_commit,
)
from harness.bisect.experiments import Answer, Questions, Reply
from harness.errors import Interrupted, UsageError
from harness.records import CaseSpec, Ending, Verdict
from tests.support.git_history import BROKEN, WRONG, git, make_history, programs
from tests.unit.harness.bisect.made_up_asker import (
    MadeUpAsker,
    case_of,
    program_run,
    run,
    verdict_of,
)

NUMBER = 64
ONCE: dict[str, Any] = {"every_run": True}
MakeHistory = Callable[..., list[str]]


def by_reading(checkout: Checkout) -> Reply:
    """What the commit's program would say, without starting it."""
    text = (checkout.folder / "program" / "work.py").read_text()
    return Reply(answer="unresolved" if BROKEN in text else "fails" if WRONG in text else "passes")


@pytest.fixture
def history(tmp_path: Path) -> MakeHistory:
    """Makes `tmp_path/repository`; its commits, good one first."""
    return lambda *args, **kwargs: make_history(tmp_path / "repository", programs(*args, **kwargs))


def search(
    place: Path, run: Run = by_reading, *, paths: tuple[str, ...] = (), **how: Any
) -> CommitSearch:
    """From the first commit to the last, with answers kept beside the repository."""
    root = place / "repository"
    commits = f"{git(root, 'rev-list', '--max-parents=0', 'main')}..main"
    questions = Questions(place / "replies")
    found = commits_of(root, commits, paths)
    return turning_commit(found, run, questions, place / "worktree", **how)


def hash_of(found: CommitSearch) -> str:
    assert found.first is not None, found
    return found.first.hash


@pytest.mark.parametrize(
    ("first_bad", "broken", "how", "most"),
    [(1, (), ONCE, 8), (23, (), ONCE, 8), (64, (), ONCE, 8), (45, (32, 33, 48), ONCE, 11),
     (45, (32, 33, 48), {}, 8 + 4 + 3 + 8)],
)  # fmt: skip
def test_one_of_64_by_halving(
    tmp_path: Path, history: MakeHistory, first_bad: int, broken: tuple[int, ...],
    how: dict[str, Any], most: int,
) -> None:  # fmt: skip
    """Both ends, the logarithm, skips, and where nobody knows how often it fails, what is sure."""
    hashes = history(NUMBER, first_bad, broken=broken)
    found = search(tmp_path, **how)
    assert (hash_of(found), found.num_commits) == (hashes[first_bad], NUMBER)
    assert {c.hash for c in found.skipped} <= {hashes[n] for n in broken}
    assert found.num_runs <= most
    told = f"first bad commit: {hashes[first_bad][:10]} Change {first_bad} ("
    assert str(found).startswith(told)
    assert not (tmp_path / "worktree").exists()


def test_nothing_of_the_user_is_touched(tmp_path: Path, history: MakeHistory) -> None:
    """A bisection that was begun, changes, other files and other worktrees are as they were."""
    hashes = history(16, 5)
    root = tmp_path / "repository"
    (root / "program" / "work.py").write_text("mine\n")
    (root / "untracked").write_text("mine too\n")
    git(root, "bisect", "start", "--no-checkout", hashes[-1], hashes[0])

    def state() -> list[str]:
        asked = ("status --porcelain", "bisect log", "for-each-ref", "rev-parse HEAD",
                 "worktree list", "rev-parse BISECT_HEAD", "stash list")  # fmt: skip
        return [git(root, *words.split()) for words in asked]

    before = state()
    assert hash_of(search(tmp_path, **ONCE)) == hashes[5]
    assert state() == before


def test_what_ends_it_leaves_no_worktree_and_it_goes_on(
    tmp_path: Path, history: MakeHistory
) -> None:
    """Interrupted at every second run, the same search asks only what it had not asked."""
    hashes, runs, found = history(8, 5), list[str](), None
    root, left = tmp_path / "repository", tmp_path / "worktree"
    git(root, "worktree", "add", "--detach", str(left))
    (left / "program" / "work.py").write_text(BROKEN)

    def stopped(checkout: Checkout) -> Reply:
        runs.append(checkout.commit)
        if len(runs) % 2 == 0:
            raise KeyboardInterrupt
        return by_reading(checkout)

    for _ in range(20):
        try:
            found = search(tmp_path, stopped, **ONCE)
            break
        except KeyboardInterrupt:
            assert not left.exists()
            assert git(root, "worktree", "list").count("\n") == 0
    assert found is not None
    assert hash_of(found) == hashes[5]
    assert len(runs) < 2 * found.num_runs
    before = len(runs)
    assert (search(tmp_path, stopped, **ONCE), len(runs)) == (found, before)


def test_a_lucky_pass_is_taken_back(tmp_path: Path, history: MakeHistory) -> None:
    """Seen always at the bad end, it passes once in the middle: the end is not built on that."""
    hashes = history(16, 6)
    lucky = {hashes[8]}

    def run(checkout: Checkout) -> Reply:
        if checkout.commit in lucky:
            lucky.remove(checkout.commit)
            return Reply(answer="passes")
        return by_reading(checkout)

    found = search(tmp_path, run)
    assert hash_of(found) == hashes[6]
    again = "passed at first and failed when asked again"
    assert found.notes == (f"{hashes[8][:10]} Change 8: {again}",)


def test_of_a_branch_that_was_merged_the_merge_is_named(
    tmp_path: Path, history: MakeHistory
) -> None:
    """It is one of the commits that are searched; those of the branch are not."""
    hashes, root = history(3, 9), tmp_path / "repository"
    who = ("-c", "user.name=x", "-c", "user.email=x")
    git(root, "checkout", "--quiet", "-b", "side", hashes[1])
    (root / "side.txt").write_text("broken")
    git(root, "add", ".")
    git(root, *who, "commit", "--quiet", "-m", "side")
    git(root, "checkout", "--quiet", "main")
    git(root, *who, "merge", "--quiet", "--no-ff", "-m", "Merge", "side")

    def run(checkout: Checkout) -> Reply:
        return Reply(answer="fails" if (checkout.folder / "side.txt").is_file() else "passes")

    found = search(tmp_path, run, **ONCE)
    assert (found.first and found.first.subject, found.num_commits) == ("Merge", 4)


@pytest.mark.parametrize("how", [ONCE, {}])
@pytest.mark.parametrize(
    ("first_bad", "broken", "said"),
    [(0, (), "expected an end that passes, got .* Change 0, which fails as well"),
     (9, (), "expected an end that fails, got .* 0, which passes, and .* Change 4, which passes"),
     (1, (4,), "expected an end that fails, .* Change 0, which passes, .* 4, which gives no verd")],
)  # fmt: skip
def test_ends_that_are_not_what_they_should_be(
    tmp_path: Path, history: MakeHistory, first_bad: int, broken: tuple[int, ...], said: str,
    how: dict[str, Any],
) -> None:  # fmt: skip
    """One must pass and one must fail: one line that says which does not."""
    history(4, first_bad, broken)
    with pytest.raises(UsageError, match=said):
        search(tmp_path, **how)


def test_ranges_that_cannot_be(tmp_path: Path, history: MakeHistory) -> None:
    """What is no range, no commit, no repository, or runs backwards: one line, exit code 4."""
    hashes = history(4, 2)
    root = tmp_path / "repository"
    assert commits_of(root, f"{hashes[0]}..").line[-1] == hashes[-1]
    for wrong, said in (
        ("main", "expected A..B"), ("..main", "expected A..B"),
        ("a...b", "expected A..B"), ("--all..main", "expected A..B"),
        (f"nowhere..{hashes[1]}", "expected a commit of .*, got 'nowhere'"),
        (f"{hashes[2]}..{hashes[1]}", "that B descends from"),
        ("main..main", "that B descends from"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said) as caught:
            commits_of(root, wrong)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"git rev-parse in .*: fatal: not a git repository"):
        commits_of(tmp_path, "a..b")


@pytest.mark.parametrize(
    ("answers", "suspects"),
    [("ggbbbb", "2"), ("gbbbbb", "1"), ("gggggb", "5"), ("g--bbb", "321"), ("g----b", "54321"),
     ("bbgggg", "2"), ("bggggg", "1"), ("bbbbbg", "5"), ("b--ggg", "321"),
     ("-ggggggb", "7"), ("---ggbbb", "5"), ("----bbbb", "43210"), ("bbb-----", "76543"),
     ("g", ""), ("gggggg", ""), ("bbbbbb", ""), ("gbbbb-", "")],
)  # fmt: skip
def test_the_first_bad_or_good_release(answers: str, suspects: str) -> None:
    """By the same halving, as ends say; what gives no verdict hides it, at an end, too, where no
    other one passes; ends must differ."""
    table: dict[str, Answer] = {"b": "fails", "g": "passes", "-": "unresolved"}
    versions, asked = [f"1.{n}" for n in range(len(answers))], list[str]()

    def run(version: str, attempt: int) -> Reply:
        asked.append(version)
        return Reply(answer=table[answers[versions.index(version)]])

    def found() -> CommitSearch:
        return find_turn(releases_of("toy", versions), run, Questions(), **ONCE)

    if not suspects:
        with pytest.raises(UsageError, match="--package: expected a"):
            found()
        return
    answer = found()
    assert [c.hash for c in answer.suspects] == [f"1.{n}" for n in suspects]
    assert answer.becomes == ("good" if answers[0] == "b" else "bad")
    assert len(asked) == len(set(asked)) <= 2 + max(3, len(suspects))
    assert bool(answer.notes) == ("g" not in answers)


def test_a_lucky_pass_of_what_was_mended_later_is_taken_back() -> None:
    """The pass next to the answer is asked again, on whichever side of it it lies."""
    versions, lucky = [f"1.{n}" for n in range(9)], {"1.4"}

    def run(version: str, attempt: int) -> Reply:
        is_luck = version in lucky and not attempt
        passes = is_luck or version in versions[6:]
        return Reply(answer="passes" if passes else "fails")

    found = find_turn(releases_of("toy", versions), run, Questions())
    assert (hash_of(found), found.becomes) == ("1.6", "good")
    assert found.notes == ("1.4: passed at first and failed when asked again",)


@pytest.mark.parametrize(("pinned", "are_alike"), [("1.0", True), (None, True), ("0.9", False)])
def test_both_runs_have_the_release_unless_they_differ_in_it(
    monkeypatch: pytest.MonkeyPatch, pinned: str | None, are_alike: bool
) -> None:
    """Two releases would be compared in place of what the case compares."""
    monkeypatch.setattr(commits, "published", lambda *_: ["1.0", "1.1", "1.2"])
    monkeypatch.setattr(commits, "make_environments", lambda *_: None)
    parts: list[Any] = [
        {"packages": {"toy": v} if v else {}} for v in (pinned, "1.0" if pinned else None)
    ]

    def what(case: CaseSpec) -> str:
        ours, theirs, again = (
            run.config["program"]["packages"].get("toy")
            for run in (case.reference, case.candidate, case.control)
        )
        assert ours == again
        assert (ours == theirs) is are_alike
        return "diverged" if theirs < "1.2" else ""

    one, other = (program_run(args={"fast": n}, **part) for n, part in enumerate(parts))
    case = case_of(one, other)
    failed = verdict_of(case, "diverged")
    found = find_release(case, failed, "toy", "1.0..1.2", MadeUpAsker(of_case=what), **ONCE)
    assert (hash_of(found), found.becomes) == ("1.2", "good")


# --- a run at a commit -----------------------------------------------------------------------

CLI = """\
import json, os, sys
def main():
    assert sys.argv[1] == "rerun" and "--json" in sys.argv and "--no-history" in sys.argv
    open("argv", "w").write(" ".join(sys.argv))
    print(json.dumps({"verdicts": [%(verdict)s]}))
    sys.exit(%(code)s)
"""


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reply]:
    """Runs a case that has failed at a commit whose harness gives some answer."""
    monkeypatch.chdir(tmp_path)

    def run(
        told: Verdict | None, code: int, wanted: Verdict | None = None, *, cli: str = CLI,
        room: tuple[str, ...] = (), lacks: str = "",
    ) -> Reply:  # fmt: skip
        shown = json.dumps(told.to_json()).replace("null", "None") if told is not None else ""
        texts = {
            "harness/__init__": "", "fsdp_core/__init__": "",
            "harness/cli": cli.replace("%(verdict)s", shown).replace("%(code)s", str(code)),
            "harness/__main__": "from harness.cli import main\nmain()\n",
        }  # fmt: skip
        place = tmp_path / "worktree"
        for name, text in texts.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / f"{name}.py").write_text(text)
        if lacks:
            (place / lacks).rename(place / "gone")
        made = Checkout(place, tmp_path / "repository", "c" * 40, 2)
        return case_run(tmp_path / "case", wanted or FAILED, tmp_path / "runs", room)(made)

    return run


CASE = case_of(run(), run(seed=2))
FAILED, PASSED = verdict_of(CASE, "diverged"), verdict_of(CASE, "")
NO_VERDICT = replace(FAILED, outcome="error")
OTHER = replace(FAILED, outcome="incomparable", what="nondeterministic_reference")
CRASHED = replace(FAILED, what="crashed", ending=Ending(exception="RuntimeError"))


@pytest.mark.parametrize(
    ("told", "code", "wanted", "answer", "words"),
    [
        (PASSED, 0, FAILED, "passes", "passed"),
        (FAILED, 1, FAILED, "fails", "failed diverged"),
        (CRASHED, 1, FAILED, "unresolved", "no verdict: failed crashed"),
        (NO_VERDICT, 6, FAILED, "unresolved", "no verdict: error diverged"),
        (FAILED, 6, FAILED, "unresolved", "no verdict: failed diverged"),
        (PASSED, 6, FAILED, "unresolved", "no verdict: passed"),
        (None, 1, FAILED, "unresolved", "no verdict: exit code 1"),
        (OTHER, 6, OTHER, "fails", "incomparable nondeterministic_reference"),
        (CRASHED, 1, CRASHED, "fails", "failed crashed"),
        *(
            (replace(CRASHED, ending=e), 1, CRASHED, "unresolved", "no verdict")
            for e in (Ending(exception="ImportError"), Ending(signal="SIGSEGV"), Ending(), None)
        ),
        (CRASHED, 1, replace(CRASHED, ending=None), "fails", "failed crashed"),
    ],
)
def test_a_case_fails_as_it_did_or_says_nothing(
    says: Callable[..., Reply], told: Verdict | None, code: int, wanted: Verdict, answer: str,
    words: str,
) -> None:  # fmt: skip
    """Another failure is not the one that is searched for, and no verdict is no pass."""
    reply = says(told, code, wanted)
    assert reply.answer == answer
    assert reply.words.startswith(words)


def test_a_commit_that_cannot_be_run_is_skipped(says: Any, tmp_path: Path) -> None:
    """Python's own exit code for one that does not import is 1, as that of a failure."""
    reply = says(FAILED, 1, cli="def broken(:\n")
    assert (reply.answer, "SyntaxError: invalid syntax" in reply.words) == ("unresolved", True)
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    assert says(FAILED, 1).answer == "fails"
    reply = says(FAILED, 1, lacks="fsdp_core")
    assert (reply.answer, reply.words) == ("unresolved", "no verdict: it has no fsdp_core")


@pytest.mark.timeout(60)
def test_room_is_passed_on_and_whatever_a_run_has_started_ends_with_it(
    says: Callable[..., Reply], tmp_path: Path
) -> None:
    """Its child holds a lock that it would keep for ever; exit code 2 ends the search."""
    held = tmp_path / "held"
    locks = (
        f"def main():\n    import fcntl, os, signal; file = open({str(held)!r}, 'w')\n"
        "    fcntl.flock(file, fcntl.LOCK_EX); os.fork() or signal.pause()\n"
    )
    room = ("--slots", "4", "--ranks-per-gpu", "2")
    cli = CLI.replace("def main():\n", locks)
    assert says(FAILED, 1, room=room, cli=cli).answer == "fails"
    assert Path("argv").read_text().endswith("--json --no-history --slots 4 --ranks-per-gpu 2")
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(Interrupted):
        says(PASSED, 2)


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
    moved = at_commit(program_run(top, args=args), Checkout(there, top, "c" * 40, 0), top)
    assert moved.config["program"]["target"] == str(there / "train.py")
    assert moved.config["program"]["args"] == args | {
        "config": str(there / "configs" / "small.yaml"), "up": str(there / "plain.txt"),
        "all": [str(there / "configs" / "sub"), "word", 3], "absolute": str(there / "plain.txt"),
    }  # fmt: skip
