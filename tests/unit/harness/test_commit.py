"""Contracts of harness.commit: which code ran, with what lies on top of the commit."""

import subprocess
from pathlib import Path

import pytest

from harness.commit import describe


def git(root: Path, *arguments: str) -> str:
    names = ["-c", "user.name=x", "-c", "user.email=x"]
    done = subprocess.run(
        ["git", "-C", str(root), *names, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit of a package and a README."""
    git(tmp_path, "init", "--quiet")
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "a.py").write_text("a = 1\n")
    (tmp_path / "README.md").write_text("read\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "Begin")
    return tmp_path


def test_a_clean_tree_is_its_commit(root: Path) -> None:
    """Nothing on top; what is no code does not count."""
    head = git(root, "rev-parse", "HEAD")
    assert describe(root) == head
    (root / "README.md").write_text("changed\n")
    (root / "new.txt").write_text("new\n")
    assert describe(root) == head


def test_changes_on_top_have_a_name(root: Path) -> None:
    """Changed, staged, deleted and new files each make another code; the same again the same."""
    seen = [describe(root)]

    def told() -> str:
        seen.append(describe(root))
        assert describe(root) == seen[-1]
        return seen[-1]

    (root / "harness" / "c.py").write_text("c = 1\n")
    told()
    (root / "harness" / "c.py").unlink()
    assert describe(root) == seen[0]
    (root / "harness" / "a.py").write_text("a = 2\n")
    changed = told()
    assert changed.startswith(f"{git(root, 'rev-parse', 'HEAD')}+")
    git(root, "add", ".")
    assert describe(root) == changed
    (root / "harness" / "b.py").write_text("b = 1\n")
    told()
    (root / "harness" / "b.py").write_text("b = 2\n")
    told()
    (root / "harness" / "a.py").unlink()
    told()
    assert len(set(seen)) == len(seen)


def test_settings_of_git_hide_no_change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a hook's variables nor a converter that makes all files look alike."""
    clean = describe(root)
    other = root.parent / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    (root / ".git" / "info" / "attributes").write_text("*.py diff=same\n")
    git(root, "config", "diff.same.textconv", "true")
    (root / "harness" / "a.py").write_text("a = 2\n")
    changed = describe(root)
    assert changed.startswith(f"{clean}+")
    (root / "harness" / "a.py").write_text("a = 3\n")
    assert describe(root) != changed
    git(root, "checkout", "--quiet", "harness")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / "index"))
    assert describe(root) == clean


def test_no_repository_is_no_commit(tmp_path: Path, root: Path) -> None:
    """Outside, in a repository that the code is no part of, or without a commit: unknown."""
    assert describe(tmp_path / "nothing") == ""
    site = root / "site-packages"
    (site / "harness").mkdir(parents=True)
    (site / "harness" / "a.py").write_text("")
    assert describe(site) == ""
    empty = tmp_path / "empty"
    (empty / "harness").mkdir(parents=True)
    git(empty, "init", "--quiet")
    assert describe(empty) == ""


def test_this_tree_has_a_commit_or_is_no_repository() -> None:
    """The default is the code that is running."""
    assert describe() == describe(Path(__file__).parents[3])
