"""Contracts of harness.bisect.commits: the first bad commit, and nothing of the user touched."""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.bisect.chance import FAILS, PASSES, UNRESOLVED, Answer
from harness.bisect.commits import (
    PREFIX,
    Checkout,
    CommitRange,
    CommitSearch,
    Run,
    find_first_bad,
    parse_range,
    temporary_worktree,
)
from harness.bisect.experiments import Budget, OutOfBudget, Questions, Reply
from harness.errors import UsageError
from tests.bisect_history.history import BROKEN, WRONG, git, make_history, programs

NUMBER = 64


def read(checkout: Checkout) -> Answer:
    """What the commit's program would say, without starting it."""
    text = (checkout.folder / "program" / "work.py").read_text()
    return UNRESOLVED if BROKEN in text else FAILS if WRONG in text else PASSES


def by_reading(checkout: Checkout) -> Reply:
    return Reply(answer=read(checkout))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where worktrees are made: it must be empty at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def history(tmp_path: Path) -> Callable[..., list[str]]:
    """Makes `tmp_path/repository`; its commits, good one first."""
    return lambda *args, **kwargs: make_history(tmp_path / "repository", programs(*args, **kwargs))


def search(
    tmp_path: Path, run: Run, *, budget: Budget | None = None, **how: object
) -> CommitSearch:
    """From the first commit to the last, with answers kept beside the repository."""
    root = tmp_path / "repository"
    commits = f"{git(root, 'rev-list', '--max-parents=0', 'main')}..main"
    questions = Questions(budget, replies=tmp_path / "replies")
    return find_first_bad(CommitRange(root, commits), run, questions, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("first_bad", [1, 23, 64])
def test_one_of_64_by_six_halvings(
    tmp_path: Path, history: Callable[..., list[str]], first_bad: int
) -> None:
    """A fault of every run: both ends, and the logarithm."""
    commits = history(NUMBER, first_bad)
    found = search(tmp_path, by_reading, once=True)
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[first_bad]
    assert found.first_bad.subject == f"Change {first_bad}"
    assert (found.num_commits, found.skipped, found.notes) == (NUMBER, (), ())
    assert found.num_runs <= 2 + math.log2(NUMBER)


def test_64_commits_of_which_three_do_not_build(
    tmp_path: Path, history: Callable[..., list[str]], temporary: Path
) -> None:
    """At 99 %: the broken ones in the middle of the search are stepped over."""
    commits = history(NUMBER, 45, broken=(32, 33, 48))
    found = search(tmp_path, by_reading)
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[45]
    assert 1 <= len(found.skipped) <= 3
    # Five of the bad commit, one of the good one, three more of the one before the first bad.
    assert found.num_runs <= 5 + 1 + math.log2(NUMBER) + 3 + 3
    assert str(found).startswith(f"first bad commit: {commits[45][:10]} Change 45 (")
    assert list(temporary.iterdir()) == []


def test_skipped_commits_hide_it(tmp_path: Path, history: Callable[..., list[str]]) -> None:
    """If it is among those that do not build, all that it may be are named, and no more."""
    commits = history(16, 9, broken=(8, 9, 10))
    found = search(tmp_path, by_reading, once=True)
    assert found.first_bad is None
    assert {c.hash for c in found.suspects} == set(commits[8:12])
    assert {c.hash for c in found.skipped} == set(commits[8:11])
    assert str(found).startswith(
        f"first bad commit: one of 4, from {commits[8][:10]} Change 8 to {commits[11][:10]} "
        "Change 11 (3 commits gave no verdict"
    )


def test_nothing_of_the_user_is_touched(tmp_path: Path, history: Callable[..., list[str]]) -> None:
    """A bisection that was begun, changes, other files and other worktrees are as they were."""
    commits = history(16, 5)
    root = tmp_path / "repository"
    (root / "program" / "work.py").write_text("mine\n")
    (root / "untracked").write_text("mine too\n")
    git(root, "bisect", "start", "--no-checkout", commits[-1], commits[0])

    def state() -> list[str]:
        asked = (
            ("status", "--porcelain"), ("bisect", "log"), ("for-each-ref",), ("rev-parse", "HEAD"),
            ("worktree", "list"), ("rev-parse", "BISECT_HEAD"), ("stash", "list"),
        )  # fmt: skip
        return [git(root, *words) for words in asked]

    before = state()
    found = search(tmp_path, by_reading, once=True)
    assert found.first_bad is not None
    assert state() == before


def test_what_ends_it_leaves_no_worktree_and_it_goes_on(
    tmp_path: Path, history: Callable[..., list[str]], temporary: Path
) -> None:
    """Interrupted at every second run, the same search asks only what it had not asked."""
    commits = history(8, 5)
    runs = 0

    def stopped(checkout: Checkout) -> Reply:
        nonlocal runs
        runs += 1
        if runs % 2 == 0:
            raise KeyboardInterrupt
        return by_reading(checkout)

    for attempt in range(20):
        try:
            found = search(tmp_path, stopped, once=True)
            break
        except KeyboardInterrupt:
            assert list(temporary.iterdir()) == []
            assert git(tmp_path / "repository", "worktree", "list").count("\n") == 0
            assert runs == 2 * (attempt + 1)
    else:
        raise AssertionError("it never ended")
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[5]
    assert runs < 2 * found.num_runs
    before = runs
    assert search(tmp_path, stopped, once=True) == found
    assert runs == before


def test_a_killed_search_is_cleared_away_by_the_next(
    tmp_path: Path, history: Callable[..., list[str]], temporary: Path
) -> None:
    """A worktree that nobody holds is removed; one of a search that works is not."""
    history(4, 2)
    root = tmp_path / "repository"
    dead = temporary / f"{PREFIX}dead"
    dead.mkdir()
    git(root, "worktree", "add", "--quiet", "--detach", str(dead / "worktree"))
    with temporary_worktree(root, "main") as living:
        search(tmp_path, by_reading, once=True)
        assert not dead.exists()
        assert (living.folder / "program").is_dir()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_was_never_a_worktree_goes_too(
    tmp_path: Path, history: Callable[..., list[str]], temporary: Path
) -> None:
    """Its maker was killed before git knew of it; one that is just being made stays."""
    history(4, 2)
    for name in ("old", "new"):
        (temporary / f"{PREFIX}{name}").mkdir()
    os.utime(temporary / f"{PREFIX}old", (0, 0))
    search(tmp_path, by_reading, once=True)
    assert [path.name for path in temporary.iterdir()] == [f"{PREFIX}new"]


def test_a_flaky_fault_is_found(tmp_path: Path, history: Callable[..., list[str]]) -> None:
    """It fires in half of the runs: a commit is asked as often as 99 % takes."""
    commits = history(8, 6)
    drawn = random.Random(3)

    def run(checkout: Checkout) -> Reply:
        fires = drawn.random() < 0.5
        return Reply(answer=FAILS if fires and read(checkout) == FAILS else PASSES)

    found = search(tmp_path, run)
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[6]
    assert "passes in a row are believed (0.99 confidence over 6 questions)" in found.patience


def test_a_lucky_pass_is_taken_back(tmp_path: Path, history: Callable[..., list[str]]) -> None:
    """Seen always at the bad end, it passes once in the middle: the end is not built on that."""
    commits = history(16, 6)
    lucky = {commits[8]}

    def run(checkout: Checkout) -> Reply:
        if checkout.commit in lucky:
            lucky.remove(checkout.commit)
            return Reply(answer=PASSES)
        return by_reading(checkout)

    found = search(tmp_path, run)
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[6]
    assert found.notes == (
        f"{commits[8][:10]} Change 8: passed at first and failed when asked again",
    )
    assert "passes in a row are believed" in found.patience


def test_a_merged_branch(tmp_path: Path, history: Callable[..., list[str]]) -> None:
    """The fault came in by a side branch: its commit is named, not the merge."""
    commits = history(3, 9)
    root = tmp_path / "repository"
    config = ("-c", "user.name=x", "-c", "user.email=x")
    git(root, "checkout", "--quiet", "-b", "side", commits[1])
    for text in ("# side 1\n", f"# side 2\n{WRONG}", f"# side 3\n{WRONG}"):
        (root / "side.txt").write_text(text)
        if WRONG in text:
            (root / "program" / "extra.py").write_text(text)
        git(root, "add", ".")
        git(root, *config, "commit", "--quiet", "-m", text.splitlines()[0])
    guilty = git(root, "rev-parse", "side~1")
    git(root, "checkout", "--quiet", "main")
    git(root, *config, "merge", "--quiet", "--no-ff", "-m", "Merge", "side")

    def run(checkout: Checkout) -> Reply:
        bad = (checkout.folder / "program" / "extra.py").is_file()
        return Reply(answer=FAILS if bad else PASSES)

    found = search(tmp_path, run, once=True)
    assert found.first_bad is not None
    assert found.first_bad.hash == guilty


def test_the_same_files_are_asked_once(tmp_path: Path) -> None:
    """Commits that change nothing of what counts share their answers."""
    root = tmp_path / "repository"
    commits = make_history(
        root,
        [
            {**files, "README": str(place)}
            for files in (programs(1, 2)[0], {"program/work.py": WRONG})
            for place in range(8)
        ],
    )
    asked = []

    def run(checkout: Checkout) -> Reply:
        asked.append(checkout.commit)
        return by_reading(checkout)

    where = CommitRange(root, f"{commits[0]}..main", ("program",))
    found = find_first_bad(where, run, Questions(), once=True)
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[8]
    assert len(asked) == 2


def test_a_budget_ends_it_with_what_is_left(
    tmp_path: Path, history: Callable[..., list[str]]
) -> None:
    """The suspects that are left, and that the budget ended it; more of it goes on."""
    commits = history(NUMBER, 40)
    with pytest.raises(OutOfBudget) as caught:
        search(tmp_path, by_reading, budget=Budget(runs=4), once=True)
    best = caught.value.best
    assert best.first_bad is None
    assert {c.hash for c in best.suspects} == set(commits[33:49])
    assert best.stopped.startswith("the budget of 4 runs")
    with pytest.raises(OutOfBudget, match="budget of 5 runs: 3 spent, the next question takes up"):
        search(tmp_path, by_reading, budget=Budget(runs=5), once=True, cost=3)
    found = search(tmp_path, by_reading, budget=Budget(runs=4), once=True)
    assert found.first_bad is not None
    assert found.first_bad.hash == commits[40]


@pytest.mark.parametrize("once", [True, False])
def test_ends_that_are_not_what_they_should_be(
    tmp_path: Path, history: Callable[..., list[str]], once: bool
) -> None:
    """Good must pass and bad must fail: one line that says which does not."""
    for first_bad, broken, said in (
        (0, (), "expected a good commit that passes, got .* Change 0, which fails"),
        (9, (), "expected a bad commit that fails, got .* Change 4"),
        (1, (0,), "expected a good commit that can be run, got .* Change 0"),
        (1, (4,), "expected a bad commit that fails, got .* Change 4"),
    ):
        place = tmp_path / str(first_bad + 10 * len(broken) + sum(broken))
        make_history(place / "repository", programs(4, first_bad, broken))
        with pytest.raises(UsageError, match=said):
            search(place, by_reading, once=once)


def test_ranges_that_cannot_be(tmp_path: Path, history: Callable[..., list[str]]) -> None:
    """What is no range, no commit, no repository, or runs backwards: one line, exit code 4."""
    commits = history(4, 2)
    root = tmp_path / "repository"
    assert parse_range("v1..") == ("v1", "HEAD")
    questions = Questions()
    for wrong, said in (
        ("main", "expected GOOD..BAD"),
        ("..main", "expected GOOD..BAD"),
        ("a...b", "expected GOOD..BAD"),
        ("--all..main", "expected GOOD..BAD"),
        (f"nowhere..{commits[1]}", "expected a commit of .*, got 'nowhere'"),
        (f"{commits[2]}..{commits[1]}", "that the bad one descends from"),
        ("main..main", "that the bad one descends from"),
    ):
        with pytest.raises(UsageError, match=said) as caught:
            find_first_bad(CommitRange(root, wrong), by_reading, questions)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"git rev-parse in .*: fatal: not a git repository"):
        find_first_bad(CommitRange(tmp_path, "a..b"), by_reading, questions)
    assert questions.asked == ()
